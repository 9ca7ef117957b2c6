"""Who waited, for how long, and was it fair: the numbers by which orders are compared.

Owns the definitions. Knows no order and no clock of its own.

- *SLO share*: of all requests, those whose TTFT and TPOT kept both limits. Strict: 2 s
  and 50 ms.
- *wait ratio* of a request: prefill tokens that its own tenant ran from its arrival to
  its first token, over the uncached tokens of its tenant that were ahead of it then,
  itself included. About 1 if nobody overtook it; `fair` bounds it by about k while
  memory is not short: what was cached when a request came and was evicted before its
  start is run and was not ahead. *Of all*: the same with the work of all tenants.
- *tenant gap*: the largest range, over any time in which two tenants were backlogged
  without a break, of the difference of what they were served: prefill tokens and
  `decode_weight` for each decoded one, over the tenant's weight. 0 is perfectly fair.
- *cold*: reused nothing; *warm*: reused something; *light*: of any tenant but the one
  with most requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from stemkv.core.schedule.service import Served
from stemkv.measure.latency import goodput, summarize
from stemkv.measure.results import LatencySummary, RequestResult, Scheduling

__all__ = [
    "STRICT",
    "Slo",
    "TenantGap",
    "light_tenants",
    "scheduling_of",
    "tpot_of",
    "ttft_of",
]

_MAX_TENANTS = 8  # with a line of their own, those with most requests


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits of one request, seconds; `None` limits nothing."""

    ttft_s: float | None
    tpot_s: float | None


STRICT = Slo(2.0, 0.050)


class TenantGap:
    """Follows how far apart backlogged tenants get; told of every step.

    `tenants` are those that are compared: pairs are followed, so not too many.
    """

    def __init__(
        self,
        tenants: Iterable[str],
        *,
        decode_weight: float,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._pairs = list(combinations(sorted(tenants), 2))
        self._decode_weight = decode_weight
        self._weights = weights or {}
        self._ranges: dict[tuple[str, str], tuple[float, float]] = {}
        self._largest = 0.0

    @property
    def largest(self) -> float:
        """The largest range so far, weighted tokens."""
        return self._largest

    def note(self, served: Mapping[str, Served]) -> None:
        """Look at what everybody has been served up to now."""
        for pair in self._pairs:
            one, other = served.get(pair[0]), served.get(pair[1])
            if one is None or other is None or not one.num_queued * other.num_queued:
                self._ranges.pop(pair, None)
                continue
            difference = self._work(pair[0], one) - self._work(pair[1], other)
            low, high = self._ranges.get(pair, (difference, difference))
            low, high = min(low, difference), max(high, difference)
            self._ranges[pair] = low, high
            self._largest = max(self._largest, high - low)

    def _work(self, tenant: str, served: Served) -> float:
        tokens = served.num_prefill + self._decode_weight * served.num_decode
        return tokens / self._weights.get(tenant, 1.0)


def light_tenants(requests: Sequence[RequestResult]) -> frozenset[str]:
    """Return all tenants but the one with most requests; of equals the first by name."""
    counts = _counts(requests)
    if not counts:
        return frozenset()
    heaviest = min(counts, key=lambda tenant: (-counts[tenant], tenant))
    return frozenset(counts) - {heaviest}


def scheduling_of(
    requests: Sequence[RequestResult],
    *,
    order: str,
    end_s: float,
    slo: Slo,
    gap_tokens: float | None,
    cpu_s: float | None = None,
) -> Scheduling:
    """Return the numbers of one run.

    `cpu_s` is what the scheduler took, measured; `None`: nobody looked.
    """
    finished = [each for each in requests if each.end_s is not None]
    latencies = [
        (None, None) if each.end_s is None else (ttft_of(each), tpot_of(each))
        for each in requests
    ]
    good = goodput(latencies, end_s, ttft_s=slo.ttft_s, tpot_s=slo.tpot_s)
    worst = max(finished, key=lambda r: r.wait_ratio or 0.0, default=None)
    wait_s: dict[str, float] = {}
    for each in requests:
        for reason, seconds in each.wait_s.items():
            wait_s[reason] = wait_s.get(reason, 0.0) + seconds
    return Scheduling(
        order=order,
        slo_ttft_s=slo.ttft_s,
        slo_tpot_s=slo.tpot_s,
        slo_share=good.share,
        goodput_rps=good.per_second,
        most_wait_ratio=None if worst is None else worst.wait_ratio,
        most_wait_request=None if worst is None else worst.request_id,
        most_wait_ratio_of_all=max(
            (each.wait_ratio_of_all or 0.0 for each in finished), default=None
        ),
        tenant_gap_tokens=gap_tokens,
        classes=_classes(finished),
        wait_s=dict(sorted(wait_s.items())),
        hit_tokens=sum(each.reused_tokens for each in finished),
        requests_per_s=len(finished) / end_s if end_s else 0.0,
        scheduler_cpu_s=cpu_s,
    )


def ttft_of(request: RequestResult) -> float:
    """Return arrival to first token of a finished request."""
    assert request.first_token_s is not None, "a finished request has a first token"
    return request.first_token_s - request.arrival_s


def tpot_of(request: RequestResult) -> float | None:
    """Return seconds per token after the first; `None` for a single token."""
    if request.output_tokens < 2:
        return None
    assert request.end_s is not None, "a finished request has an end"
    assert request.first_token_s is not None, "a finished request has a first token"
    return (request.end_s - request.first_token_s) / (request.output_tokens - 1)


def _classes(finished: Sequence[RequestResult]) -> tuple[LatencySummary, ...]:
    light = light_tenants(finished)
    counts = _counts(finished)
    tenants = sorted(counts, key=lambda tenant: (-counts[tenant], tenant))
    members = [
        ("all", finished),
        ("cold", [each for each in finished if not each.reused_tokens]),
        ("warm", [each for each in finished if each.reused_tokens]),
        ("light tenants", [each for each in finished if each.tenant in light]),
    ]
    if len(tenants) > 1:
        members += [
            (f"tenant {tenant}", [each for each in finished if each.tenant == tenant])
            for tenant in tenants[:_MAX_TENANTS]
        ]
    summaries = [summarize(name, map(ttft_of, some)) for name, some in members]
    return tuple(summary for summary in summaries if summary is not None)


def _counts(requests: Sequence[RequestResult]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for each in requests:
        counts[each.tenant] = counts.get(each.tenant, 0) + 1
    return counts
