"""Evict the leaf that is needed again last: for replays, which know the future.

Owns next uses of resident nodes. The cache and its hooks are the real ones, so
what this policy keeps differs from what another one keeps by the choice of victims only.
`bounds.clairvoyant` counts the same hits without a cache, and faster.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from stemkv.core.retention.policy.leaves import Leaves
from stemkv.errors import InvariantError
from stemkv.sim.bounds import next_uses
from stemkv.sim.reuse import Reuses

__all__ = ["Clairvoyant"]

_END = 2  # of a segment (next use, start, end)


class _Held:
    """Blocks of one node: where they stand, and the request that used them last."""

    __slots__ = ("end", "last", "start")

    def __init__(self, start: int, end: int, last: int) -> None:
        self.start = start  # blocks before the first one on its path
        self.end = end
        self.last = last


class Clairvoyant:
    """Needed again last goes first; never is last of all, and of equals the deepest.

    L. A. Belady, "A study of replacement algorithms for a virtual-storage computer"
    (IBM Systems Journal 5(2), 1966), on a prefix tree: what is said at
    `bounds.clairvoyant` of what it bounds holds here as well.

    Only for `replay_sequence`, one block a unit, and for the trace and sharing rule
    that `reuses` were found in: it must be told which request is next (`serving`). In a
    timed replay the order of requests is an outcome, and changes with what was evicted;
    there is no future to read beforehand. `InvariantError` where nobody told it.

    A node's blocks are needed again no earlier the deeper they stand, so its tail
    speaks for it. The cache may take a whole node at once, however, and then those
    would go too that are needed soon. So the driver cuts nodes where the next use
    changes (`cuts`), and they stay cut: parts that differ do not merge.

    Every hook is O(log n), amortised.
    """

    needs_keys = False

    def __init__(self, reuses: Reuses) -> None:
        self._next = next_uses(reuses)  # by request: (next use, start, end), by depth
        self._request: int | None = None
        self._held: dict[int, _Held] = {}  # by node id
        self._leaves = Leaves()

    # The driver's part

    def serving(self, index: int) -> None:
        """Take what follows as the work of request `index` of the trace."""
        if self._request is not None and index <= self._request:
            raise InvariantError(
                f"request {index} after request {self._request}: clairvoyant serves a "
                f"trace in its order, once; make a new one for each replay"
            )
        self._request = index

    def cuts(self, num_units: int) -> list[int]:
        """Return depths below `num_units` at which the request's next use changes."""
        segments = self._next[self._now()]
        return [end for _, _, end in segments if end < num_units]

    # The hooks

    def num_alike(self, keys: Sequence[int]) -> int:
        """Return all of them: the driver cuts what differs."""
        return len(keys)

    def can_extend(self, node_id: int, keys: Sequence[int]) -> bool:
        """A lease that adds blocks to a node uses the node as well."""
        return True

    def can_merge(self, upper_id: int, lower_id: int) -> bool:
        """Keep apart what is not needed again at the same time."""
        upper, lower = self._held[upper_id], self._held[lower_id]
        return upper.last == lower.last and self._need(upper) == self._need(lower)

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
        """Learn where the blocks stand; publishing is a use."""
        held = self._held.get(node_id)
        if held is None:
            self._held[node_id] = _Held(start, start + num_blocks, self._now())
        else:
            held.end += num_blocks

    def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
        """Remember the request."""
        self._held[node_id].last = self._now()

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        """Know it already."""

    def split(self, upper_id: int, lower_id: int, *, num_blocks: int) -> None:
        """Give each part its place."""
        lower = self._held[lower_id]
        cut = lower.start + num_blocks
        self._held[upper_id] = _Held(lower.start, cut, lower.last)
        lower.start = cut

    def merged(self, upper_id: int, lower_id: int) -> None:
        """Join two parts that are needed again at the same time."""
        self._held[lower_id].start = self._held.pop(upper_id).start

    def became_evictable(self, node_id: int, *, now: float) -> None:
        """Make the node a candidate, at the next use of its tail."""
        held = self._held[node_id]
        self._leaves.add(node_id, (-self._need(held), -held.end))

    def became_pinned(self, node_id: int) -> None:
        """Drop the node as a candidate."""
        self._leaves.discard(node_id)

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        """Forget what is gone; the new tail may be needed earlier."""
        was_candidate = node_id in self._leaves
        self._leaves.discard(node_id)
        if num_left == 0:
            del self._held[node_id]
            return
        held = self._held[node_id]
        held.end = held.start + num_left
        if was_candidate:
            self._leaves.add(node_id, (-self._need(held), -held.end))

    def victim(self, now: float) -> int | None:
        """Return the leaf that is needed again last; amortised O(log n)."""
        return self._leaves.first()

    def most_to_take(self) -> int | None:
        """Any number: the trace was cut where another node would be next."""
        return None

    # Private

    def _now(self) -> int:
        if self._request is None:
            raise InvariantError(
                "clairvoyant was not told which request is served: it is for "
                "replay_sequence only, since a timed replay has no order beforehand"
            )
        return self._request

    def _need(self, held: _Held) -> int:
        """Return which request needs the last block again; past all means never."""
        segments = self._next[held.last]
        at = bisect_right(segments, held.end - 1, key=lambda segment: segment[_END])
        return segments[at][0]
