"""What a sequential replay counts: units that were there, as tokens and as seconds.

Owns the weight of a hit, so that the cache, the bounds and the curves all count the
same. Knows nothing of how a hit came about. Everything but `saved_s` is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stemkv.core.books.cost import CostModel
from stemkv.sim.trace import Trace, TraceRequest

__all__ = ["HitCounter", "Hits", "hit_tokens", "steady_start"]


def hit_tokens(request: TraceRequest, num_units: int, unit_size: int) -> int:
    """Return the prompt tokens in leading units that were cached.

    A partly filled last unit counts its own tokens, and the last token of a prompt is
    always computed, as its logits are needed.
    """
    return min(num_units * unit_size, request.input_length - 1)


def steady_start(num_requests: int) -> int:
    """Return the first request of the steady half, in which the cache is warm."""
    return num_requests // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Hits of all requests of a trace at one capacity."""

    num_blocks: int | None  # capacity, one unit a block; None: unlimited
    input_tokens: int
    hit_tokens: int
    hit_units: int
    steady_input_tokens: int  # of the last half of the requests
    steady_hit_tokens: int
    saved_s: float | None  # of prefill; None: nobody gave a cost model

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens; NaN without prompts."""
        return _share(self.hit_tokens, self.input_tokens)

    @property
    def steady_hit_rate(self) -> float:
        """Share of prompt tokens in the last half of the requests."""
        return _share(self.steady_hit_tokens, self.steady_input_tokens)


class HitCounter:
    """Sums hits, one request after another."""

    def __init__(self, trace: Trace, cost: CostModel | None = None) -> None:
        self._trace = trace
        self._cost = cost
        self._steady_start = steady_start(len(trace.requests))
        self._hit_units = 0
        self._hit_tokens = 0
        self._steady_hit_tokens = 0
        self._saved_s = 0.0

    def count(self, index: int, num_units: int) -> int:
        """Count leading units that request `index` found; return them as tokens."""
        if num_units == 0:
            return 0
        request = self._trace.requests[index]
        tokens = hit_tokens(request, num_units, self._trace.unit_size)
        self._hit_units += num_units
        self._hit_tokens += tokens
        if index >= self._steady_start:
            self._steady_hit_tokens += tokens
        if self._cost is not None:
            self._saved_s += self._cost.prefill_seconds(0, tokens)
        return tokens

    def hits(self, num_blocks: int | None) -> Hits:
        """Return the sums, as what a cache of `num_blocks` gave."""
        steady = self._trace.requests[self._steady_start :]
        return Hits(
            num_blocks=num_blocks,
            input_tokens=self._trace.num_input_tokens,
            hit_tokens=self._hit_tokens,
            hit_units=self._hit_units,
            steady_input_tokens=sum(request.input_length for request in steady),
            steady_hit_tokens=self._steady_hit_tokens,
            saved_s=None if self._cost is None else self._saved_s,
        )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
