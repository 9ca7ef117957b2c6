"""What the latency words mean.

Owns TTFT, TPOT, ITL, queue time, E2E and percentiles. Times are seconds on one
monotonic clock; whether a number is measured or modelled is the caller's to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

__all__ = ["RequestTimeline", "percentile"]


@dataclass(slots=True, kw_only=True)
class RequestTimeline:
    """When the things happened that latencies are made of."""

    arrival_s: float
    first_scheduled_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)  # one per output token

    @property
    def queue_s(self) -> float | None:
        """Arrival to first scheduled."""
        if self.first_scheduled_s is None:
            return None
        return self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: arrival to first output token."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: each gap between consecutive output tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; `None` for fewer than two."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def e2e_s(self) -> float | None:
        """Arrival to last output token."""
        return self.token_times_s[-1] - self.arrival_s if self.token_times_s else None


def percentile(values: Iterable[float], percent: float) -> float:
    """Return the percentile by linear interpolation between closest ranks.

    The same definition as numpy's default. NaN for no values.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be in [0, 100], got {percent}")
    ordered = sorted(values)
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
