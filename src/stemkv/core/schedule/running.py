"""Who holds blocks, oldest first, and whose prefill is not done.

Owns the lists; each has one place. Knows nothing of blocks or of who waits.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from stemkv.core.schedule.request import Request, RequestId
from stemkv.errors import InvariantError

__all__ = ["Running"]


class Running:
    """The running requests."""

    def __init__(self) -> None:
        self.all: list[Request] = []  # sorted by arrival
        self.stepping: list[Request] = []  # of those, the ones that do not coast
        self.prefills: dict[RequestId, Request] = {}  # of those, the unfinished ones
        self.num_moves = 0  # requests that started or stopped running

    def __len__(self) -> int:
        return len(self.all)

    def add(self, request: Request) -> None:
        """Take a request that has its blocks."""
        self.num_moves += 1
        insort(self.all, request, key=_order_key)
        insort(self.stepping, request, key=_order_key)

    def remove(self, request: Request) -> None:
        """Let a request go, which does not coast."""
        self.num_moves += 1
        _remove(self.all, request)
        _remove(self.stepping, request)

    def sleep(self, request: Request) -> None:
        """Leave a request out of the steps that are spelled out."""
        _remove(self.stepping, request)

    def wake(self, request: Request) -> None:
        """Spell a request's steps out again."""
        insort(self.stepping, request, key=_order_key)


def _remove(requests: list[Request], request: Request) -> None:
    index = bisect_left(requests, request.order_key, key=_order_key)
    if index == len(requests) or requests[index] is not request:
        raise InvariantError(f"request {request.request_id} is not running")
    del requests[index]


def _order_key(request: Request) -> tuple[float, int, int]:
    return request.order_key
