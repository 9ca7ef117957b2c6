"""Requests sorted by a key that may change.

Owns the sorted list. A list and not a heap: the first few can be read without taking
anything out, and moving a few thousand pointers costs less than one comparison of keys.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator
from typing import Any

from stemkv.core.schedule.order.base import Candidate
from stemkv.core.schedule.request import RequestId
from stemkv.errors import InvariantError

__all__ = ["Key", "Ranking", "Row", "request_of"]

Key = tuple[float, ...]  # smaller is earlier; in one ranking all have the same length
# A key, the arrival (no two have the same one) and the request: flat, as comparing
# nested tuples takes twice as long.
Row = tuple[Any, ...]


def request_of(row: Row) -> Candidate:
    """Return the request of a row."""
    request: Candidate = row[-1]
    return request


class Ranking:
    """Requests, smallest key first; of equal keys the one that arrived first."""

    __slots__ = ("_by_id", "_rows")

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._by_id: dict[RequestId, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request: Candidate) -> bool:
        return request.request_id in self._by_id

    def rows(self) -> Iterator[Row]:
        """Iterate in order; not while the ranking changes."""
        return iter(self._rows)

    def put(self, request: Candidate, key: Key) -> None:
        """Insert a request, or move it to another key."""
        row = (*key, *request.order_key, request)
        known = self._by_id.get(request.request_id)
        if known is not None:
            if known == row:
                return
            del self._rows[self._find(known)]
        insort(self._rows, row)
        self._by_id[request.request_id] = row

    def remove(self, request: Candidate) -> None:
        """Take a request out."""
        row = self._by_id.pop(request.request_id, None)
        if row is None:
            raise InvariantError(f"request {request.request_id} is not in the ranking")
        del self._rows[self._find(row)]

    def first(self, passed: Container[RequestId] = ()) -> Row | None:
        """Return the first row that is not of one passed over."""
        for row in self._rows:
            if row[-1].request_id not in passed:
                return row
        return None

    def _find(self, row: Row) -> int:
        at = bisect_left(self._rows, row)
        if self._rows[at] is not row:
            raise InvariantError(f"request {row[-1].request_id} is ranked elsewhere")
        return at
