"""First come, first served.

Owns a list sorted by arrival. A preempted request keeps its arrival, so it returns to
the place it had.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from stemkv.core.request import Request, RequestId

__all__ = ["Fcfs"]


class Fcfs:
    """Admission by arrival; ties by the order of `add`."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._keys: dict[RequestId, tuple[float, int, int]] = {}

    @property
    def is_timeless(self) -> bool:
        """Arrivals do not change while requests wait."""
        return True

    def add(self, request: Request) -> None:
        """Insert by arrival."""
        self._keys[request.request_id] = request.order_key
        insort(self._waiting, request, key=_key)

    def remove(self, request_id: RequestId) -> None:
        """Drop the request, wherever it stands."""
        key = self._keys.pop(request_id)
        del self._waiting[bisect_left(self._waiting, key, key=_key)]

    def candidates(self, now: float) -> Iterator[Request]:
        """Yield a snapshot, oldest first, so that admitting while iterating is safe."""
        return iter(tuple(self._waiting))

    def first(self, num: int, now: float) -> Iterator[Request]:
        """Yield the oldest, at most `num`."""
        return iter(self._waiting[:num])

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)


def _key(request: Request) -> tuple[float, int, int]:
    return request.order_key
