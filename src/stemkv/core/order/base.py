"""In which order waiting requests are considered for admission.

Owns the protocol only. An order sees requests, never blocks or other tenants' caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from stemkv.core.request import Request, RequestId

__all__ = ["AdmissionOrder"]


class AdmissionOrder(Protocol):
    """Holds the waiting and preempted requests."""

    @property
    def is_timeless(self) -> bool:
        """Whether `candidates` does not depend on `now`."""

    def add(self, request: Request) -> None:
        """Take a request that waits, new or preempted."""

    def remove(self, request_id: RequestId) -> None:
        """Drop a request that was admitted or cancelled."""

    def candidates(self, now: float) -> Iterator[Request]:
        """Yield the waiting requests, next one first; pure."""

    def first(self, num: int, now: float) -> Iterator[Request]:
        """Yield the first `num` of `candidates`, in O(num)."""

    def __len__(self) -> int:
        """Return how many wait."""
