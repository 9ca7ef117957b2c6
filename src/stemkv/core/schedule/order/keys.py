"""What requests are ranked by.

Owns the keys. A key is asked with the number of leading tokens to be taken for cached,
so that the same key ranks a request by all it would find and by what is public of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from stemkv.core.books.cost import CostModel
from stemkv.core.schedule.order.base import Candidate
from stemkv.core.schedule.order.ranking import Key

__all__ = ["KeyOf", "by_arrival", "by_cached", "latest_start", "work_left"]

KeyOf = Callable[[Candidate, int], Key]


def by_arrival(request: Candidate, num_ready: int) -> Key:
    """Rank by arrival alone: of equal keys the one that arrived first goes first."""
    return ()


def by_cached(request: Candidate, num_ready: int) -> Key:
    """Rank by cached tokens, the most first."""
    return (-num_ready,)


def work_left(costs: CostModel | None) -> KeyOf:
    """Rank by predicted prefill seconds of what is not cached, the least first.

    Without costs by tokens: then a token deep in a prompt counts as a first one.
    """
    if costs is None:
        return lambda request, num_ready: (request.num_tokens - num_ready,)
    seconds = costs.prefill_seconds

    def key(request: Candidate, num_ready: int) -> Key:
        return (seconds(num_ready, request.num_tokens),)

    return key


def latest_start(costs: CostModel, slo_ttft_s: Mapping[str, float]) -> KeyOf:
    """Rank by when a request must start to have its first token in time.

    `(0, latest start)` for classes with a limit, `(1, seconds left)` for others. Whoever
    is late is ranked with the others: a lost cause must not make the next one late, as
    it does with earliest-deadline-first under overload.
    """

    def key(request: Candidate, num_ready: int) -> Key:
        seconds = costs.prefill_seconds(num_ready, request.num_tokens)
        limit = slo_ttft_s.get(request.spec.request_class or "", math.inf)
        if math.isinf(limit) or request.is_late:
            return (1, seconds)
        return (0, request.spec.arrival_s + limit - seconds)

    return key
