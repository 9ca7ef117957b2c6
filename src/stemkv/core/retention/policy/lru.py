"""Evict the leaf whose last use is longest ago.

Owns the time of each node's last use, as the number of the event.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from stemkv.core.retention.policy.leaves import Leaves

__all__ = ["Lru"]


class Lru:
    """Least recently used; of nodes used at once, the one that appeared last goes first.

    A use lasts from the beginning of the first lease to the end of the last, so what is
    in use was used later than anything else.
    """

    needs_keys = False

    def __init__(self) -> None:
        # By node id: the tick at which its last use ended; inf while it lasts
        self._last_used: dict[int, float] = {}
        self._leaves = Leaves()

    def num_alike(self, keys: Sequence[int]) -> int:
        """All of them: blocks that come together are used together."""
        return len(keys)

    def can_extend(self, node_id: int, keys: Sequence[int]) -> bool:
        """Always: a lease that adds blocks to a node uses the node as well."""
        return True

    def can_merge(self, upper_id: int, lower_id: int) -> bool:
        """Keep apart what is not in use and was not used at the same time."""
        return self._last_used[upper_id] == self._last_used[lower_id]

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
        """Count publishing as a use."""
        self._last_used[node_id] = inf

    def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
        """Begin a use, if none lasts."""
        self._last_used[node_id] = inf

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        """Remember the end of the use."""
        self._last_used[node_id] = tick

    def split(self, upper_id: int, lower_id: int, *, num_blocks: int) -> None:
        """Give both parts the last use of the whole."""
        self._last_used[upper_id] = self._last_used[lower_id]

    def merged(self, upper_id: int, lower_id: int) -> None:
        """Forget the upper part; both had the same last use."""
        del self._last_used[upper_id]

    def became_evictable(self, node_id: int, *, now: float) -> None:
        """Make the node a candidate, at the time of its last use."""
        self._leaves.add(node_id, (self._last_used[node_id], -node_id))

    def became_pinned(self, node_id: int) -> None:
        """Drop the node as a candidate."""
        self._leaves.discard(node_id)

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        """Forget the node when nothing of it is left."""
        if num_left == 0:
            self._leaves.discard(node_id)
            del self._last_used[node_id]

    def most_to_take(self) -> int | None:
        """Any number: the next victim would be the same node."""
        return None

    def victim(self, now: float) -> int | None:
        """Return the least recently used leaf; amortised O(log n)."""
        return self._leaves.first()
