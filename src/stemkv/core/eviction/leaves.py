"""Evictable leaves in an order, with the first (and last) at hand.

Owns lazy heaps: what left stays in the heap until it is met or until too much of the
heap is dead. So every call is O(log n), amortised.
"""

from __future__ import annotations

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
        if len(self._heap) > 2 * len(self._keys) + 64:
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
    """Leaves by key, with the smallest and the largest at hand."""

    __slots__ = ("_keys", "_largest", "_smallest")

    def __init__(self) -> None:
        self._keys: dict[int, int] = {}
        self._smallest: list[tuple[int, int]] = []
        self._largest: list[tuple[int, int]] = []  # keys negated

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, node_id: int, key: int) -> None:
        """Put a leaf in that is not in."""
        self._keys[node_id] = key
        heappush(self._smallest, (key, -node_id))
        heappush(self._largest, (-key, node_id))

    def discard(self, node_id: int) -> None:
        """Take a leaf out if it is in."""
        keys = self._keys
        if keys.pop(node_id, None) is None:
            return
        if len(self._smallest) > 2 * len(keys) + 64:
            self._smallest = [(key, -each) for each, key in keys.items()]
            heapify(self._smallest)
        if len(self._largest) > 2 * len(keys) + 64:
            self._largest = [(-key, each) for each, key in keys.items()]
            heapify(self._largest)

    def first(self) -> int | None:
        """Return the leaf with the smallest key; of equal ones the youngest node."""
        heap, keys = self._smallest, self._keys
        while heap:
            key, negated = heap[0]
            if keys.get(-negated) == key:
                return -negated
            heappop(heap)
        return None

    def last(self) -> int | None:
        """Return the leaf with the largest key; of equal ones the oldest node."""
        heap, keys = self._largest, self._keys
        while heap:
            negated, node_id = heap[0]
            if keys.get(node_id) == -negated:
                return node_id
            heappop(heap)
        return None
