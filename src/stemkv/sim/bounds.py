"""What no eviction policy can exceed: an unlimited cache, and ones that know the future.

Owns the bounds. They are no policies: they read the whole trace beforehand and have
their own bookkeeping instead of a cache.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from stemkv.core.books.cost import CostModel
from stemkv.errors import InvariantError
from stemkv.sim.hits import HitCounter, Hits
from stemkv.sim.reuse import Reuses

__all__ = ["clairvoyant", "clairvoyant_selective", "infinite", "next_uses"]


def infinite(reuses: Reuses, *, cost: CostModel | None = None) -> Hits:
    """Return the hits of a cache that evicts nothing.

    Bounds every policy at every capacity under this sharing rule, in tokens and in
    seconds: what was never seen before cannot be reused. O(runs).
    """
    counter = HitCounter(reuses.trace, cost)
    for index, runs in enumerate(reuses.runs):
        if runs:
            counter.count(index, runs[-1].end)
    return counter.hits(None)


def clairvoyant(
    reuses: Reuses, num_blocks: int, *, cost: CostModel | None = None
) -> Hits:
    """Return the hits of a cache that evicts what is needed again last.

    L. A. Belady, "A study of replacement algorithms for a virtual-storage computer"
    (IBM Systems Journal 5(2), 1966), on a prefix tree. A unit is needed again no later
    than what continues it, so the victim can always be a leaf; of units needed by the
    same request the deepest goes.

    Bounds, in units, every policy that serves one request after another in this order,
    keeps a request's whole path in memory while it runs, inserts all of it, and evicts
    only to make room. Does not bound:

    - policies that leave units out of the cache (`clairvoyant_selective` does), and
      requests in another order;
    - tokens to the last one: where units are partly filled, another choice of equally
      many units may be worth a few more;
    - seconds or other costs that grow with depth: a deep unit saves more than a first
      one, and the best choice is then no longer greedy. `saved_s` is what this choice
      saves, not the most that could be saved;
    - caches smaller than the longest request. A request longer than the cache inserts
      nothing; its hits count.

    O(runs · log runs).
    """
    walk = _Clairvoyant(reuses, num_blocks, cost)
    for index, request in enumerate(reuses.trace.requests):
        found = walk.take(index)
        num_units = len(request.units)
        if num_units > num_blocks:
            num_units = found
        walk.make_room(num_units)
        walk.insert(index, num_units)
    return walk.hits()


def clairvoyant_selective(
    reuses: Reuses, num_blocks: int, *, cost: CostModel | None = None
) -> Hits:
    """Return the hits of a cache that keeps what is needed again first, new or old.

    As `clairvoyant`, but a request's own units compete as well once it has run, and
    while it runs it takes no room. So it bounds, in units, every policy for this order
    of requests, at every capacity. What is said there of tokens and seconds holds.
    """
    walk = _Clairvoyant(reuses, num_blocks, cost)
    for index, request in enumerate(reuses.trace.requests):
        walk.take(index)
        walk.insert(index, len(request.units))
        walk.make_room(0)
    return walk.hits()


class _Clairvoyant:
    """Units that one request touched last and another will touch next, as segments.

    Segments of one request are consecutive, with next uses that go up with depth. A
    segment loses units from its end only.
    """

    def __init__(self, reuses: Reuses, num_blocks: int, cost: CostModel | None) -> None:
        self._reuses = reuses
        self._num_blocks = num_blocks
        self._counter = HitCounter(reuses.trace, cost)
        self._num_resident = 0
        # By last use, in order of depth: (next use, start, end). A next use past the
        # last request means never.
        self._next: list[list[tuple[int, int, int]]] = next_uses(reuses)
        self._by_next: dict[int, list[int]] = {}  # next use → its segments
        self._left: list[int] = []  # units of a segment that are resident
        # (-next use, -start, segment): the one needed last is on top, of those needed
        # at the same time the deepest.
        self._heap: list[tuple[int, int, int]] = []

    def take(self, index: int) -> int:
        """Count the request's resident units and let go of them; return how many."""
        left = self._left
        segments = self._by_next.pop(index, ())
        found = sum(left[each] for each in segments)
        for each in segments:
            left[each] = 0  # its heap entry is dropped when met
        self._num_resident -= found
        self._counter.count(index, found)
        return found

    def make_room(self, num_units: int) -> None:
        """Evict until so many more units fit."""
        short = self._num_resident + num_units - self._num_blocks
        while short > 0:
            if not self._heap:
                raise InvariantError(f"{short} blocks short, nothing to evict")
            _, _, segment = self._heap[0]
            dropped = min(short, self._left[segment])
            self._left[segment] -= dropped
            self._num_resident -= dropped
            short -= dropped
            if self._left[segment] == 0:
                heappop(self._heap)

    def insert(self, index: int, num_units: int) -> None:
        """Make the first `num_units` of the request resident."""
        for next_use, start, end in self._next[index]:
            kept = min(end, num_units) - start
            if kept <= 0:
                break
            segment = len(self._left)
            self._left.append(kept)
            self._by_next.setdefault(next_use, []).append(segment)
            heappush(self._heap, (-next_use, -start, segment))
        self._num_resident += num_units
        if len(self._heap) > 2 * self._num_blocks + 64:
            # A live segment has a unit at least, so half of them are dead.
            self._heap = [entry for entry in self._heap if self._left[entry[2]]]
            heapify(self._heap)

    def hits(self) -> Hits:
        """Return what was counted."""
        return self._counter.hits(self._num_blocks)


def next_uses(reuses: Reuses) -> list[list[tuple[int, int, int]]]:
    """Turn the runs round: for each request, when its units are touched next.

    By request `(next use, start, end)`, first units first, without gaps. The next use
    of what nobody touches again is the number of requests. O(runs).
    """
    result: list[list[tuple[int, int, int]]] = [[] for _ in reuses.runs]
    for index, runs in enumerate(reuses.runs):
        for run in runs:
            result[run.last].append((index, run.start, run.end))
    never = len(result)
    for request, segments in zip(reuses.trace.requests, result, strict=True):
        end = segments[-1][2] if segments else 0
        if end < len(request.units):
            segments.append((never, end, len(request.units)))
    return result
