"""Evictable leaves in an order, with the first (and last) at hand.

Owns lazy heaps: what left stays in a heap until it is met or until too much of the
heap is dead. So every call is O(log n), amortised.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush

__all__ = ["Leaves", "Place", "TwoEndedLeaves"]

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


# A leaf among others: key, node id negated, and whether it is in. Lists are compared
# item by item, which is the order of leaves, and at no cost.
Place = list[int]


class TwoEndedLeaves:
    """Leaves by key, with the smallest and the largest at hand.

    Most keys come in ascending order, as they are times: those stand in a row. The
    others are in a heap for each end.
    """

    __slots__ = ("_largest", "_num_places", "_row", "_smallest", "num_in")

    def __init__(self) -> None:
        self.num_in = 0  # leaves
        self._num_places = 0  # at most so many, dead ones included
        self._row: deque[Place] = deque()  # ascending
        self._smallest: list[Place] = []
        self._largest: list[tuple[int, int, Place]] = []  # both numbers negated

    def add(self, node_id: int, key: int) -> Place:
        """Put a leaf in that is not in; give what is returned to `discard`."""
        place = [key, -node_id, True]
        self.num_in += 1
        self._num_places += 1
        row = self._row
        if not row or row[-1] < place:
            row.append(place)
        else:
            heappush(self._smallest, place)
            heappush(self._largest, (-key, node_id, place))
        return place

    def discard(self, place: Place) -> None:
        """Take a leaf out that is in."""
        place[2] = False
        self.num_in = num_in = self.num_in - 1
        if self._num_places > 2 * num_in + 64:
            # Paid for by what left since the last time.
            places = [*self._row, *self._smallest]
            self._row = deque(sorted(each for each in places if each[2]))
            self._smallest.clear()
            self._largest.clear()
            self._num_places = num_in

    def first(self) -> Place | None:
        """Return the leaf with the smallest key; of equal ones the youngest node."""
        row, heap = self._row, self._smallest
        while row and not row[0][2]:
            row.popleft()
        while heap and not heap[0][2]:
            heappop(heap)
        if heap and (not row or heap[0] < row[0]):
            return heap[0]
        return row[0] if row else None

    def last(self) -> Place | None:
        """Return the leaf with the largest key; of equal ones the oldest node."""
        row, heap = self._row, self._largest
        while row and not row[-1][2]:
            row.pop()
        while heap and not heap[0][2][2]:
            heappop(heap)
        if heap and (not row or row[-1] < heap[0][2]):
            return heap[0][2]
        return row[-1] if row else None
