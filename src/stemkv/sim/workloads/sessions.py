"""Sessions that begin one after the other and overlap, cut where enough arrived.

Owns when to stop making sessions. A trace is the first so many arrivals of traffic that
goes on, so it has no tail in which sessions only end.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from stemkv.sim.workloads.draft import Draft

__all__ = ["first_arrivals"]


def first_arrivals(
    starts: Iterable[float],
    make_session: Callable[[float, str], list[Draft]],
    *,
    num_requests: int,
) -> list[Draft]:
    """Return the first `num_requests` drafts by arrival, of sessions at `starts`.

    `starts` ascend without end; `make_session` gets a start and a name. Nothing in a
    session arrives before its start, and parents before their children, so no parent is
    cut off.
    """
    drafts: list[Draft] = []
    ahead: list[float] = []  # arrivals of these drafts that a new session may precede
    num_settled = 0
    for index, start_s in enumerate(starts):
        while ahead and ahead[0] <= start_s:
            heapq.heappop(ahead)
            num_settled += 1
        if num_settled >= num_requests:
            break
        session = make_session(start_s, f"session-{index}")
        drafts += session
        for draft in session:
            heapq.heappush(ahead, draft.arrival_s)
    drafts.sort(key=lambda draft: draft.arrival_s)
    return drafts[:num_requests]
