"""Evict the leaf whose last use is longest ago.

Owns last-use times and a lazy heap: a key is corrected when it reaches the top, which
is right because last uses only grow. At most one heap entry per node.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

__all__ = ["Lru"]


class Lru:
    """Least recently used; ties go to the node that appeared last (see `__init__`)."""

    def __init__(self) -> None:
        self._last_used: dict[int, float] = {}
        self._evictable: set[int] = set()
        # (last use, -node id): of two nodes used at the same time the younger goes
        # first. A child is younger than its parent and siblings of one lease tie.
        self._heap: list[tuple[float, int]] = []
        self._in_heap: set[int] = set()

    def published(self, node_id: int, *, num_blocks: int, now: float) -> None:
        """Count publishing as a use."""
        self._last_used[node_id] = now

    def touched(self, node_id: int, *, now: float) -> None:
        """Remember the use; the heap is corrected when the node reaches its top."""
        self._last_used[node_id] = now

    def split(self, upper_id: int, lower_id: int) -> None:
        """Give both parts the last use of the whole."""
        self._last_used[upper_id] = self._last_used[lower_id]

    def merged(self, upper_id: int, lower_id: int) -> None:
        """Give the whole the later last use of its parts."""
        last_used = self._last_used.pop(upper_id)
        self._last_used[lower_id] = max(self._last_used[lower_id], last_used)

    def became_evictable(self, node_id: int, *, now: float) -> None:
        """Make the node a candidate, at the time of its last use."""
        self._evictable.add(node_id)
        if node_id not in self._in_heap:
            self._in_heap.add(node_id)
            heappush(self._heap, (self._last_used[node_id], -node_id))

    def became_pinned(self, node_id: int) -> None:
        """Drop the node as a candidate; its heap entry is dropped when met."""
        self._evictable.discard(node_id)

    def removed(self, node_id: int) -> None:
        """Forget the node; its heap entry goes when met or when too many are dead."""
        self._evictable.discard(node_id)
        del self._last_used[node_id]
        if len(self._heap) > 2 * len(self._evictable) + 64:
            # Paid for by the removals since the last time.
            self._heap = [(self._last_used[each], -each) for each in self._evictable]
            heapify(self._heap)
            self._in_heap = set(self._evictable)

    def victim(self) -> int | None:
        """Return the least recently used unpinned leaf; amortised O(log n)."""
        heap = self._heap
        while heap:
            last_used, negative_id = heap[0]
            node_id = -negative_id
            if node_id not in self._evictable:
                heappop(heap)
                self._in_heap.discard(node_id)
            elif self._last_used[node_id] != last_used:
                heappop(heap)
                heappush(heap, (self._last_used[node_id], negative_id))
            else:
                return node_id
        return None
