"""Requests sorted by a key that may change.

Owns the sorted list. A list and not a heap: the first few can be read without taking
anything out, and moving a few thousand pointers costs less than one comparison of keys.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator

from stemkv.core.request import Request, RequestId
from stemkv.errors import InvariantError

__all__ = ["Key", "Ranking", "Row"]

Key = tuple[float, ...]  # smaller is earlier
Row = tuple[Key, tuple[float, int, int], Request]  # no two have the same arrival


class Ranking:
    """Requests, smallest key first; of equal keys the one that arrived first."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._places: dict[RequestId, tuple[Key, tuple[float, int, int]]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._places

    def rows(self) -> Iterator[Row]:
        """Iterate in order; not while the ranking changes."""
        return iter(self._rows)

    def put(self, request: Request, key: Key) -> None:
        """Insert a request, or move it to another key."""
        place = self._places.get(request.request_id)
        if place is not None:
            if place[0] == key:
                return
            del self._rows[self._find(request, place)]
        arrival = request.order_key
        insort(self._rows, (key, arrival, request))
        self._places[request.request_id] = (key, arrival)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        place = self._places.pop(request.request_id, None)
        if place is None:
            raise InvariantError(f"request {request.request_id} is not in the ranking")
        del self._rows[self._find(request, place)]

    def first(self, passed: Container[RequestId] = ()) -> Row | None:
        """Return the first that is not among those passed over."""
        for row in self._rows:
            if row[2].request_id not in passed:
                return row
        return None

    def _find(self, request: Request, place: tuple[Key, tuple[float, int, int]]) -> int:
        at = bisect_left(self._rows, place)
        if self._rows[at][2] is not request:
            raise InvariantError(f"request {request.request_id} is ranked elsewhere")
        return at
