"""Admissions that have to wait for memory, and who held it.

Owns the stalls that go on and what all of them add up to. Knows no accounts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stemkv.core.books.entry import Stall

__all__ = ["StallTotals", "Stalls"]


@dataclass(slots=True)
class StallTotals:
    """Who held the memory when an admission had to wait, summed over the stalls."""

    num_stalls: int = 0
    active_blocks: int = 0
    shared_blocks: int = 0  # of those, published and on the path of a lease
    cached_blocks: int = 0  # evictable, and still too few
    missing_blocks: int = 0  # by how much admission fell short


class Stalls:
    """What goes on, by request."""

    def __init__(self) -> None:
        self.totals = StallTotals()
        self._open: dict[str, tuple[str, Stall]] = {}  # tenant, and it up to now

    def __len__(self) -> int:
        """Return how many requests stall now."""
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request's admission waits for memory."""
        return request_id in self._open

    def begin(
        self,
        request_id: str,
        tenant: str,
        stall: Stall,
        *,
        num_active: int,
        num_shared: int,
        num_cached: int,
    ) -> None:
        """Begin a stall and count it."""
        self._open[request_id] = (tenant, stall)
        totals = self.totals
        totals.num_stalls += 1
        totals.active_blocks += num_active
        totals.shared_blocks += num_shared
        totals.cached_blocks += num_cached
        totals.missing_blocks += stall.num_missing_blocks

    def end(self, request_id: str, now: float) -> tuple[str, Stall] | None:
        """End a request's stall; return whose it was, unless it took no time."""
        tenant, stall = self._open.pop(request_id, (None, None))
        if tenant is None or stall is None or stall.start_s == now:
            return None
        return tenant, replace(stall, end_s=now)
