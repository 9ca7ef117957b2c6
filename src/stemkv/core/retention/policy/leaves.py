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


class Place:
    """Where a leaf stands among others, until it leaves."""

    __slots__ = ("is_in", "key", "node_id")

    def __init__(self, key: int, node_id: int) -> None:
        self.key = key
        self.node_id = node_id
        self.is_in = True


class TwoEndedLeaves:
    """Leaves by key, with the smallest and the largest at hand.

    Most keys come in ascending order, as they are times: those stand in a row. The
    others are in a heap for each end.
    """

    __slots__ = ("_largest", "_num_late", "_row", "_smallest", "num_in")

    def __init__(self) -> None:
        self.num_in = 0  # leaves
        self._row: deque[Place] = deque()  # ascending
        self._num_late = 0  # places that ever went to the heaps, so that no two tie
        self._smallest: list[tuple[int, int, int, Place]] = []
        self._largest: list[tuple[int, int, int, Place]] = []

    def add(self, node_id: int, key: int) -> Place:
        """Put a leaf in that is not in; give what is returned to `discard`."""
        place = Place(key, node_id)
        self.num_in += 1
        row = self._row
        if not row or row[-1].key < key or _is_before(row[-1], place):
            row.append(place)
        else:
            self._num_late = count = self._num_late + 1
            heappush(self._smallest, (key, -node_id, count, place))
            heappush(self._largest, (-key, node_id, count, place))
        return place

    def discard(self, place: Place) -> None:
        """Take a leaf out that is in."""
        place.is_in = False
        self.num_in -= 1
        most = 2 * self.num_in + 64
        if len(self._row) + len(self._smallest) > most or len(self._largest) > most:
            # Paid for by what left since the last time.
            places = [*self._row, *(entry[3] for entry in self._smallest)]
            left = [each for each in places if each.is_in]
            left.sort(key=lambda each: (each.key, -each.node_id))
            self._row = deque(left)
            self._smallest.clear()
            self._largest.clear()

    def first(self) -> Place | None:
        """Return the leaf with the smallest key; of equal ones the youngest node."""
        row, heap = self._row, self._smallest
        while row and not row[0].is_in:
            row.popleft()
        while heap and not heap[0][3].is_in:
            heappop(heap)
        if heap and (not row or _is_before(heap[0][3], row[0])):
            return heap[0][3]
        return row[0] if row else None

    def last(self) -> Place | None:
        """Return the leaf with the largest key; of equal ones the oldest node."""
        row, heap = self._row, self._largest
        while row and not row[-1].is_in:
            row.pop()
        while heap and not heap[0][3].is_in:
            heappop(heap)
        if heap and (not row or _is_before(row[-1], heap[0][3])):
            return heap[0][3]
        return row[-1] if row else None


def _is_before(one: Place, other: Place) -> bool:
    if one.key != other.key:
        return one.key < other.key
    return one.node_id > other.node_id
