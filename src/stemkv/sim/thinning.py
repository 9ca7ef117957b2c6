"""A long series kept short enough to draw.

Owns one rule: when too many points are kept, neighbours are joined two by two, and from
then on twice as many arrivals make one point. Equal input gives equal points.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Thinned"]

T = TypeVar("T")


class Thinned(Generic[T]):
    """At most `limit` points of a series.

    `join(earlier, later)` makes one point of two; `None` keeps the earlier one and
    drops the later, so what is left are examples and not sums.
    """

    def __init__(self, limit: int, join: Callable[[T, T], T] | None) -> None:
        self.num_added = 0
        self._limit = limit
        self._join = join
        self._stride = 1
        self._points: list[T] = []
        self._num_in_last = 0

    def add(self, point: T) -> None:
        """Take in the next point; amortised O(1)."""
        self.num_added += 1
        if self._points and self._num_in_last < self._stride:
            if self._join is not None:
                self._points[-1] = self._join(self._points[-1], point)
            self._num_in_last += 1
            return
        if len(self._points) == self._limit:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            odd = self._points[-1:] if len(self._points) % 2 else []
            join = self._join
            self._points = [a if join is None else join(a, b) for a, b in pairs] + odd
            self._stride *= 2
        self._points.append(point)
        self._num_in_last = 1

    def points(self) -> tuple[T, ...]:
        """Return what is kept, in order."""
        return tuple(self._points)
