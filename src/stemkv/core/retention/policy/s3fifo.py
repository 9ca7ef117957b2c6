"""Evict in the order of arrival, from a small queue first, and spare what was used.

Owns the two queues, and which blocks left the small one. Times do not matter to it.

S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache
eviction", SOSP 2023): what is new enters the small queue, a tenth of the cache. At its
head, what was used more than once moves to the main queue and anything else goes, but
is remembered; if it comes back, it enters the main queue. At the head of that, what was
used enters anew, for one use less, and anything else goes.

On a prefix tree only unpinned leaves can go. Others keep their place, and a parent that
becomes a leaf is met there. A node moves as a whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from stemkv.core.retention.policy.ghosts import Ghosts
from stemkv.core.retention.policy.leaves import Leaves

__all__ = ["S3Fifo"]

_MAX_USES = 3
_USES_TO_MOVE = 2
_PART_SMALL = 10  # one of so many resident blocks


class _Run:
    """What is known of a run of blocks with one history."""

    __slots__ = ("is_main", "keys", "num_uses", "place")

    def __init__(self, keys: array[int], *, is_main: bool) -> None:
        self.keys = keys  # one for each of its blocks
        self.is_main = is_main  # else it is in the small queue
        self.num_uses = 0  # after the one that brought it in
        self.place: int | None = None  # in its queue; None: its first lease lasts

    def is_like(self, other: _Run) -> bool:
        """Whether the two are one run that was cut."""
        return (
            self.is_main == other.is_main
            and self.num_uses == other.num_uses
            and self.place == other.place
        )


class S3Fifo:
    """First in, first out, from two queues.

    `num_blocks` is the size of the cache: as many blocks that left the small queue are
    remembered. A tenth is one of the resident blocks. A node enters its queue when its
    first lease ends, or the last of those that overlap it; of nodes that enter at once,
    the one that appeared last goes first. Every lease after the first is a use.

    The article does not say what to do where no leaf is in the queue whose turn it is:
    the other one gives, and the small queue then spares what was used as the main one
    does.
    """

    needs_keys = True

    def __init__(self, num_blocks: int) -> None:
        self._runs: dict[int, _Run] = {}  # by node id
        self._ghosts: Ghosts[None] = Ghosts(num_blocks)
        self._small = Leaves()
        self._main = Leaves()
        self._num_small = 0  # blocks, whether they can go or not
        self._num_main = 0
        self._num_places = 0
        self._tick: int | None = None  # at which the last place was given

    def num_alike(self, keys: Sequence[int]) -> int:
        """Return how many blocks enter the same queue."""
        return self._ghosts.num_alike(keys)

    def can_extend(self, node_id: int, keys: Sequence[int]) -> bool:
        """Only what enters the same queue at the same time."""
        run = self._runs[node_id]
        return (
            run.num_uses == 0
            and run.place is None
            and run.is_main == (keys[0] in self._ghosts)
        )

    def can_merge(self, upper_id: int, lower_id: int) -> bool:
        """Only what has one place and was used equally often."""
        return self._runs[upper_id].is_like(self._runs[lower_id])

    def published(
        self,
        node_id: int,
        *,
        start: int,
        num_blocks: int,
        keys: Sequence[int],
        hint: int,
        tick: int,
        now: float,
    ) -> None:
        """Choose the queue; the place comes when the first lease ends."""
        own = array("Q", keys)
        is_main = own[0] in self._ghosts
        self._ghosts.recall(own)
        run = self._runs.get(node_id)
        if run is None:
            run = self._runs[node_id] = _Run(own, is_main=is_main)
        else:
            run.keys.extend(own)
        self._count(run, num_blocks)

    def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
        """Count the use."""
        run = self._runs[node_id]
        run.num_uses = min(_MAX_USES, run.num_uses + 1)

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        """Give the node its place, unless it has one."""
        run = self._runs[node_id]
        if run.place is None:
            if tick != self._tick:
                self._tick = tick
                self._num_places += 1
            run.place = self._num_places

    def split(self, upper_id: int, lower_id: int, *, num_blocks: int) -> None:
        """Give both parts the place and the uses of the whole."""
        lower = self._runs[lower_id]
        upper = _Run(lower.keys[:num_blocks], is_main=lower.is_main)
        upper.num_uses, upper.place = lower.num_uses, lower.place
        self._runs[upper_id] = upper
        del lower.keys[:num_blocks]

    def merged(self, upper_id: int, lower_id: int) -> None:
        """Join two parts that have one history."""
        upper, lower = self._runs.pop(upper_id), self._runs[lower_id]
        lower.keys = upper.keys + lower.keys

    def became_evictable(self, node_id: int, *, now: float) -> None:
        """Make the node a candidate, at its place."""
        self._enter(node_id, self._runs[node_id])

    def became_pinned(self, node_id: int) -> None:
        """Drop the node as a candidate; it keeps its place."""
        self._leaves(self._runs[node_id]).discard(node_id)

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        """Remember what left the small queue."""
        run = self._runs[node_id]
        gone = run.keys[num_left:]
        self._count(run, -len(gone))
        if may_return and not run.is_main:
            self._ghosts.remember(gone, None)
        if num_left:
            del run.keys[num_left:]
            return
        self._leaves(run).discard(node_id)
        del self._runs[node_id]

    def most_to_take(self) -> int | None:
        """Any number: the next victim would be the same node."""
        return None

    def victim(self, now: float) -> int | None:
        """Return the first leaf that was not used; amortised O(log n).

        Moves those that were. Each step is chosen anew, so asking again takes none.
        """
        while True:
            small, main = self._small.first(), self._main.first()
            is_small_full = _PART_SMALL * self._num_small >= (
                self._num_small + self._num_main
            )
            if small is not None and is_small_full:
                run = self._runs[small]
                if run.num_uses < _USES_TO_MOVE:
                    return small
                self._small.discard(small)
                self._count(run, -len(run.keys))
                run.is_main, run.num_uses = True, 0
                self._count(run, len(run.keys))
                self._enter_anew(small, run)
                continue
            first = small if main is None else main
            if first is None:
                return None
            run = self._runs[first]
            if run.num_uses == 0:
                return first
            run.num_uses -= 1
            self._leaves(run).discard(first)
            self._enter_anew(first, run)

    # Private

    def _leaves(self, run: _Run) -> Leaves:
        return self._main if run.is_main else self._small

    def _count(self, run: _Run, num_blocks: int) -> None:
        if run.is_main:
            self._num_main += num_blocks
        else:
            self._num_small += num_blocks

    def _enter(self, node_id: int, run: _Run) -> None:
        assert run.place is not None, "a candidate was released"
        self._leaves(run).add(node_id, (run.place, -node_id))

    def _enter_anew(self, node_id: int, run: _Run) -> None:
        """Put a leaf at the end of its queue."""
        self._num_places += 1
        run.place = self._num_places
        self._enter(node_id, run)
