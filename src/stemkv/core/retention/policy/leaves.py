"""Evictable leaves in an order, with the first (and last) at hand.

Owns lazy heaps: what left stays in a heap until it is met or until too much of the
heap is dead. So every call is O(log n), amortised.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

__all__ = ["Leaves", "TwoEndedLeaves"]

Key = tuple[float, ...]  # different for any two leaves, so that the order is total


class Leaves:
    """Leaves by key, smallest first. A leaf keeps its key while it is in."""

    __slots__ = ("_heap", "_keys")

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}  # those that are in
        self._heap: list[tuple[Key, int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._keys

    def add(self, node_id: int, key: Key) -> None:
        """Put a leaf in that is not in."""
        self._keys[node_id] = key
        heappush(self._heap, (key, node_id))

    def discard(self, node_id: int) -> None:
        """Take a leaf out if it is in."""
        if self._keys.pop(node_id, None) is None:
            return
        if not self._keys:
            self._heap.clear()
        elif len(self._heap) > 2 * len(self._keys) + 64:
            # Paid for by what left since the last time.
            self._heap = [(key, each) for each, key in self._keys.items()]
            heapify(self._heap)

    def first(self) -> int | None:
        """Return the leaf with the smallest key."""
        heap, keys = self._heap, self._keys
        while heap:
            key, node_id = heap[0]
            if keys.get(node_id) == key:
                return node_id
            heappop(heap)
        return None


class TwoEndedLeaves:
    """Leaves by key, with the smallest and the largest at hand.

    Most keys come in ascending order, as they are times: those stand in a row. The
    others are in a heap for each end.
    """

    __slots__ = ("_keys", "_largest", "_row", "_smallest")

    def __init__(self) -> None:
        self._keys: dict[int, int] = {}  # those that are in
        self._row: deque[tuple[int, int]] = deque()  # (key, -node id), ascending
        self._smallest: list[tuple[int, int]] = []
        self._largest: list[tuple[int, int]] = []  # both numbers negated

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, node_id: int, key: int) -> None:
        """Put a leaf in that is not in."""
        self._keys[node_id] = key
        entry = (key, -node_id)
        row = self._row
        if not row or row[-1] < entry:
            row.append(entry)
        else:
            heappush(self._smallest, entry)
            heappush(self._largest, (-key, node_id))

    def discard(self, node_id: int) -> None:
        """Take a leaf out if it is in."""
        keys = self._keys
        if keys.pop(node_id, None) is None:
            return
        most = 2 * len(keys) + 64
        if len(self._row) + len(self._smallest) > most or len(self._largest) > most:
            # Paid for by what left since the last time.
            self._row = deque(sorted((key, -each) for each, key in keys.items()))
            self._smallest.clear()
            self._largest.clear()

    def first(self) -> int | None:
        """Return the leaf with the smallest key; of equal ones the youngest node."""
        keys, row, heap = self._keys, self._row, self._smallest
        while row and keys.get(-row[0][1]) != row[0][0]:
            row.popleft()
        while heap and keys.get(-heap[0][1]) != heap[0][0]:
            heappop(heap)
        if heap and (not row or heap[0] < row[0]):
            return -heap[0][1]
        return -row[0][1] if row else None

    def last(self) -> int | None:
        """Return the leaf with the largest key; of equal ones the oldest node."""
        keys, row, heap = self._keys, self._row, self._largest
        while row and keys.get(-row[-1][1]) != row[-1][0]:
            row.pop()
        while heap and keys.get(heap[0][1]) != -heap[0][0]:
            heappop(heap)
        if heap and (not row or (-heap[0][0], -heap[0][1]) > row[-1]):
            return heap[0][1]
        return -row[-1][1] if row else None
