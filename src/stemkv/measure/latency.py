"""Latencies of many requests, and what part of them was good enough.

Owns the summary of a distribution and goodput under limits. What TTFT or TPOT of one
request are is `timeline`'s; percentiles are those of `timeline.percentile`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from stemkv.measure.results import LatencySummary

__all__ = ["Goodput", "goodput", "summarize", "summarize_weighted"]

_SHARES = tuple(percent / 100 for percent in range(101))


def summarize(name: str, seconds: Iterable[float]) -> LatencySummary | None:
    """Return mean, percentiles and distribution; `None` for no values."""
    return summarize_weighted(name, [(value, 1) for value in seconds])


def summarize_weighted(
    name: str, seconds: Iterable[tuple[float, int]]
) -> LatencySummary | None:
    """Return the summary of values that occur several times: (value, how often).

    Equal to `summarize` of all values written out; O(distinct values).
    """
    counts: dict[float, int] = {}
    for value, count in seconds:
        counts[value] = counts.get(value, 0) + count
    ordered = sorted(item for item in counts.items() if item[1] > 0)
    total = sum(count for _, count in ordered)
    if not total:
        return None
    ends = []  # of each value: how many are up to it
    seen = 0
    for _, count in ordered:
        seen += count
        ends.append(seen)
    at = _Ranks(ordered, ends, total)
    return LatencySummary(
        name=name,
        count=total,
        mean=math.fsum(value * count for value, count in ordered) / total,
        p50=at.quantile(0.5),
        p90=at.quantile(0.9),
        p95=at.quantile(0.95),
        p99=at.quantile(0.99),
        max=ordered[-1][0],
        distribution=tuple((share, at.quantile(share)) for share in _SHARES),
    )


class _Ranks:
    """Linear interpolation between closest ranks, as `timeline.percentile` does it."""

    def __init__(
        self, ordered: list[tuple[float, int]], ends: list[int], total: int
    ) -> None:
        self._ordered = ordered
        self._ends = ends
        self._total = total

    def quantile(self, share: float) -> float:
        position = (self._total - 1) * share
        low = math.floor(position)
        left = self._at(low)
        right = self._at(min(low + 1, self._total - 1))
        return left + (right - left) * (position - low)

    def _at(self, rank: int) -> float:
        low, high = 0, len(self._ends) - 1
        while low < high:
            middle = (low + high) // 2
            if self._ends[middle] > rank:
                high = middle
            else:
                low = middle + 1
        return self._ordered[low][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests served within the limits."""

    per_second: float
    share: float  # of all requests, refused ones included


def goodput(
    latencies: Iterable[tuple[float | None, float | None]],
    duration_s: float,
    *,
    ttft_s: float | None,
    tpot_s: float | None,
) -> Goodput:
    """Count requests with TTFT and TPOT within their limits.

    `latencies` are (TTFT, TPOT) of every request: TTFT is `None` if it was not served,
    TPOT if it has fewer than two tokens, which keeps any limit. `None` as a limit is
    no limit. `duration_s`: first arrival to last token.
    """
    num_good = num_all = 0
    for ttft, tpot in latencies:
        num_all += 1
        num_good += (
            ttft is not None
            and (ttft_s is None or ttft <= ttft_s)
            and (tpot_s is None or tpot is None or tpot <= tpot_s)
        )
    return Goodput(
        per_second=num_good / duration_s if duration_s > 0 else math.nan,
        share=num_good / num_all if num_all else math.nan,
    )
