"""What the last retained GiB saves, beside what requests wait for it.

Owns the two sides of one question: would memory that retains prefixes do more as room for
requests that wait? Neither side decides it alone. What is retained saves prefill seconds
on a replica; what waits is somebody's time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Opportunity", "opportunity_of"]

_MOST_SHARE = 0.25  # of the memory, that the last GiB may be


@dataclass(frozen=True, slots=True, kw_only=True)
class Opportunity:
    """Both sides. Estimated: by an LRU curve of one request after another, and a replay."""

    last_gib: float  # how much "the last GiB" is here; less than 1 in little memory
    saved_s_per_gib: float  # prefill seconds that it saves, over the whole trace
    memory_wait_s: float  # request-seconds in which memory was waited for
    retained_gib: float  # mean, that retained prefixes held when such a wait began

    @property
    def wait_s_per_gib(self) -> float | None:
        """Seconds waited per GiB retained meanwhile; `None` if nothing was retained."""
        return self.memory_wait_s / self.retained_gib if self.retained_gib else None


def opportunity_of(
    points: Sequence[tuple[float, float]],
    *,
    capacity_gib: float,
    memory_wait_s: float,
    retained_gib: float,
) -> Opportunity | None:
    """Return both sides; `None` where the curve says nothing of this memory.

    `points` are (GiB, saved seconds), of one curve, ascending.
    """
    last_gib = min(1.0, _MOST_SHARE * capacity_gib)
    high = _at(points, capacity_gib)
    low = _at(points, capacity_gib - last_gib)
    if high is None or low is None or not last_gib:
        return None
    return Opportunity(
        last_gib=last_gib,
        saved_s_per_gib=max(0.0, high - low) / last_gib,
        memory_wait_s=memory_wait_s,
        retained_gib=retained_gib,
    )


def _at(points: Sequence[tuple[float, float]], gib: float) -> float | None:
    """Return the saved seconds at a size, between the points on a straight line."""
    sizes = [size for size, _ in points]
    if not sizes or gib < sizes[0]:
        return None
    at = bisect_left(sizes, gib)
    if at == len(sizes):
        return points[-1][1]
    if sizes[at] == gib:
        return points[at][1]
    (low, before), (high, after) = points[at - 1], points[at]
    return before + (after - before) * (gib - low) / (high - low)
