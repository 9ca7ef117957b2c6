"""How long requests took, what memory held meanwhile, and the moments worth a look.

Owns the sections of a replay's page that follow from the clock. Knows nothing of why
tokens were reused or not (see `reuse`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from stemkv.measure.results import (
    GIB,
    LatencySummary,
    MemorySample,
    ReplayResult,
    RequestResult,
)
from stemkv.report.chart import (
    LINE_COLORS,
    Area,
    Axis,
    Series,
    Span,
    area_chart,
    line_chart,
    span_chart,
    thinned,
)
from stemkv.report.page import Cell, Chart, Section
from stemkv.report.wording import (
    NO_DATA,
    count,
    name,
    number,
    per_cent,
    percent,
    seconds,
    short,
)

__all__ = [
    "in_flight",
    "latency_table",
    "memory_chart",
    "opportunity_table",
    "stall_table",
    "timeline",
    "ttft_chart",
    "wait_table",
]

_REASONS = {
    "queue": "others went first",
    "memory": "memory was short",
    "places": "as many ran as may",
    "prefix": "its prefix was being computed",
    "session": "as many sessions were active as may",
    "rollout": "what it shall run on was not in place",
    "paused": "paused after it had begun",
    "preempted": "its blocks had been taken",
}
_MAX_TTFT_TENANTS = 6
_MAX_SAMPLES = 300  # more than one per pixel of a phone
_MAX_MOMENTS = 200
_MAX_ACCOUNTS = 10
_TIMELINE_REQUESTS = 60
_TIMELINE_STEPS = 600


def memory_chart(result: ReplayResult) -> list[Chart]:
    """Return blocks by state over time, with evictions and stalls below."""
    if not result.memory:
        return []
    samples = _thinned_memory(result.memory)
    times = [sample.at_s for sample in samples]
    size = result.block_bytes / GIB

    def series(what: str, values: Sequence[float], color: str) -> Series:
        return Series(name=what, x=times, y=values, color=color, is_stepped=True)

    areas = [
        Area(
            title="GiB",
            share=2.2,
            series=[
                series("active", [s.active * size for s in samples], "var(--active)"),
                series("cached", [s.cached * size for s in samples], "var(--cached)"),
                series("free", [s.free * size for s in samples], "var(--free)"),
            ],
        )
    ]
    if any(s.evicted for s in samples):
        evicted = series(
            "evicted blocks", [s.evicted for s in samples], "var(--lost-1)"
        )
        areas.append(Area(title="evicted", series=[evicted], share=0.7))
    if any(s.stalled for s in samples):
        stalled = series(
            "requests waiting for memory", [s.stalled for s in samples], "var(--lost-2)"
        )
        areas.append(Area(title="waiting", series=[stalled], share=0.7))
    note = (
        f"{count(result.num_evicted_blocks, 'block')} evicted; "
        f"{count(result.num_stalls, 'admission')} waited for memory, "
        f"{seconds(result.stall_s)} in all; "
        f"{count(result.num_preemptions, 'preemption')}."
    )
    if len(samples) < len(result.memory):
        note += (
            f" {len(samples):,} of {len(result.memory):,} samples are drawn: of each "
            f"stretch the one with most active blocks and all its evictions."
        )
    return [
        area_chart(
            title="Memory over time",
            x=Axis(title="seconds from the first arrival"),
            areas=areas,
            columns=(
                "second",
                "active",
                "cached",
                "free",
                "evicted",
                "waiting requests",
            ),
            rows=[
                (s.at_s, s.active, s.cached, s.free, s.evicted, s.stalled)
                for s in samples
            ],
            note=note,
            label=result.cost_kind.value,
        )
    ]


def stall_table(result: ReplayResult) -> list[Section]:
    """Return whose running requests held the memory while admissions waited."""
    if not result.stall_accounts:
        return []
    shown = result.stall_accounts[:_MAX_ACCOUNTS]
    left = len(result.stall_accounts) - len(shown)
    size = result.block_bytes / GIB
    return [
        Section(
            title="Who held the memory while admissions waited",
            columns=("account", "active GiB", "% of the memory"),
            rows=[
                (name(account), blocks * size, per_cent(blocks / result.num_blocks))
                for account, blocks in shown
            ],
            note=(
                "Mean over the admissions that waited, on the replica where they did."
                + (f" {count(left, 'smaller account')} in the JSON." if left else "")
            ),
            label=result.cost_kind.value,
        )
    ]


def wait_table(result: ReplayResult) -> list[Section]:
    """Return why requests waited: request-seconds by reason, and the longest wait."""
    found = result.scheduling
    if found is None or not found.wait_s:
        return []
    total = math.fsum(found.wait_s.values())
    rows: list[Sequence[Cell]] = [
        (_REASONS.get(reason, reason), seconds, per_cent(seconds / total))
        for reason, seconds in sorted(
            found.wait_s.items(), key=lambda item: (-item[1], item[0])
        )
        if total
    ]
    note = (
        "Seconds over all requests; a reason holds until the scheduler finds another."
    )
    if found.most_wait_ratio is not None:
        note += (
            f" The longest wait was {found.most_wait_ratio:.1f} times the work of its "
            f"tenant that was ahead; where memory is short, what was cached then may "
            f"have been computed again since."
        )
    if found.tenant_gap_tokens is not None:
        note += (
            f" Backlogged tenants got at most {found.tenant_gap_tokens:,.0f} weighted "
            f"tokens apart."
        )
    return [
        Section(
            title="Why requests waited",
            columns=("reason", "request-seconds", "%"),
            rows=rows,
            note=note,
            label=result.cost_kind.value,
        )
    ]


def opportunity_table(result: ReplayResult) -> list[Section]:
    """Return what the last retained GiB saves, beside what requests waited for it."""
    found = result.opportunity
    if found is None:
        return []
    rows: list[Sequence[Cell]] = [
        ("saved by the last of it, s per GiB", found.saved_s_per_gib),
        ("how much that last of it is, GiB", found.last_gib),
        ("request-seconds waited for memory", found.memory_wait_s),
        ("retained when such waits began, mean GiB", found.retained_gib),
    ]
    if found.wait_s_per_gib is not None:
        rows.append(("waited, s per GiB retained", found.wait_s_per_gib))
    return [
        Section(
            title="What the last retained GiB saves, and what waits for it",
            columns=("what", "value"),
            rows=rows,
            note="Over the whole trace. Saved: by the curve of requests one after another "
            "(LRU). Retained memory is evicted as soon as an admission needs it, so it "
            "is what was left that the waiting could not use.",
            label="estimated",
        )
    ]


def _thinned_memory(samples: Sequence[MemorySample]) -> list[MemorySample]:
    kept = []
    for start, end in thinned(len(samples), _MAX_SAMPLES):
        group = samples[start:end]
        peak = max(group, key=lambda sample: sample.active)
        kept.append(
            MemorySample(
                at_s=peak.at_s,
                active=peak.active,
                cached=peak.cached,
                free=peak.free,
                evicted=sum(sample.evicted for sample in group),
                stalled=max(sample.stalled for sample in group),
            )
        )
    return kept


def ttft_chart(result: ReplayResult) -> list[Chart]:
    """Return the distribution of TTFT, of all requests and by tenant."""
    summaries = [("all", s) for s in result.latencies if s.name == "TTFT"]
    if len(result.tenants) > 1:
        ordered = sorted(result.tenants, key=lambda t: (-t.num_requests, t.tenant))
        summaries += [(name(t.tenant), t.ttft) for t in ordered if t.ttft is not None]
    drawn = [(who, s) for who, s in summaries if s.distribution]
    left = len(drawn) - 1 - _MAX_TTFT_TENANTS
    drawn = drawn[: 1 + _MAX_TTFT_TENANTS]
    if not drawn:
        return []
    series = []
    for index, (who, summary) in enumerate(drawn):
        places = [max(second, 1e-6) for _, second in summary.distribution]
        series.append(
            Series(
                name=who,
                x=places,
                y=[share for share, _ in summary.distribution],
                color=LINE_COLORS[index] if index else "var(--ink)",
            )
        )
    note = (
        "The share of requests that had their first token within a time. The table has "
        "milliseconds."
    )
    if left > 0:
        note += f" The {count(left, 'tenant')} with fewest requests are not shown."
    return [
        line_chart(
            title="Time to first token",
            x=Axis(title="seconds", is_log=True),
            y=Axis(title="requests within", is_share=True),
            series=series,
            columns=("of", *_SUMMARY_COLUMNS),
            rows=[(who, *_summary_row(summary)) for who, summary in drawn],
            note=note,
            label=result.cost_kind.value,
        )
    ]


_SUMMARY_COLUMNS = ("count", "mean", "p50", "p90", "p95", "p99", "max")


def _summary_row(summary: LatencySummary) -> list[Cell]:
    times = (summary.mean, summary.p50, summary.p90, summary.p95, summary.p99)
    return [summary.count, *(each * 1e3 for each in (*times, summary.max))]


def latency_table(result: ReplayResult) -> list[Section]:
    """Return every latency's percentiles."""
    rows: list[Sequence[Cell]] = [
        (summary.name, *_summary_row(summary)) for summary in result.latencies
    ]
    if result.regret_delay_s is not None:
        summary = result.regret_delay_s
        rows.append(("eviction to the next request for it", *_summary_row(summary)))
    if not rows:
        return []
    limits = []
    if result.slo_ttft_s is not None:
        limits.append(f"TTFT within {seconds(result.slo_ttft_s)}")
    if result.slo_tpot_s is not None:
        limits.append(f"TPOT within {seconds(result.slo_tpot_s)}")
    note = ""
    if limits and result.goodput_rps is not None:
        note = (
            f"Goodput: {number(result.goodput_rps)} requests per second "
            f"({percent(result.goodput_share)} of them) had {' and '.join(limits)}."
        )
    return [
        Section(
            title="Latencies, in milliseconds",
            columns=("what", *_SUMMARY_COLUMNS),
            rows=rows,
            note=note,
            label=result.cost_kind.value,
        )
    ]


def in_flight(result: ReplayResult) -> list[Chart]:
    """Return how many requests were queued, prefilled and decoded over time."""
    lives = [_Life(request, result.end_s) for request in result.requests]
    lives = [life for life in lives if life.end > life.arrival]
    if len(lives) <= _TIMELINE_REQUESTS or result.end_s <= 0:
        return []
    num = _MAX_MOMENTS
    moments = [result.end_s * index / (num - 1) for index in range(num)]
    passed = [
        [bisect_right(ordered, moment) for moment in moments]
        for ordered in (
            sorted(life.arrival for life in lives),
            sorted(life.admitted for life in lives),
            sorted(life.first_token for life in lives),
            sorted(life.end for life in lives),
        )
    ]
    counts = [
        [before - after for before, after in zip(*pair, strict=True)]
        for pair in pairwise(passed)
    ]
    phases = list(zip(_PHASES, counts, strict=True))
    # Decodes at the bottom: the steadiest layer carries the others.
    areas = Area(
        title="requests",
        share=2.0,
        series=[
            Series(name=phase, x=moments, y=values, color=color, is_stepped=True)
            for (phase, color), values in reversed(phases)
        ],
    )
    return [
        area_chart(
            title="Requests in flight",
            x=Axis(title="seconds from the first arrival"),
            areas=[areas],
            columns=("second", *(phase for phase, _ in _PHASES)),
            rows=list(zip(moments, *counts, strict=True)),
            note=f"Counted at {num} moments.",
            label=result.cost_kind.value,
        )
    ]


_PHASES = (
    ("queued", "var(--queued)"),
    ("prefill", "var(--active)"),
    ("decode", "var(--cached)"),
)
_STEPS = (("step with prefill", "var(--line-4)"), ("step of decodes", "var(--line-8)"))


class _Life:
    """When a request passed from phase to phase; what never came ends with it."""

    __slots__ = ("admitted", "arrival", "end", "first_token", "request")

    def __init__(self, request: RequestResult, end_s: float) -> None:
        self.request = request
        self.arrival = request.arrival_s
        if request.end_s is not None:
            self.end = request.end_s
        elif request.admitted_s is not None:
            self.end = end_s  # still running when the replay ended
        else:
            self.end = request.arrival_s  # refused
        admitted, first_token = request.admitted_s, request.first_token_s
        self.admitted = self.end if admitted is None else admitted
        self.first_token = self.end if first_token is None else first_token

    @property
    def phases(self) -> list[tuple[str, float, float]]:
        """Return (phase, start, end), those without duration left out."""
        ends = (self.arrival, self.admitted, self.first_token, self.end)
        spans = zip(_PHASES, ends, ends[1:], strict=False)
        return [(phase, start, end) for (phase, _), start, end in spans if end > start]


def timeline(result: ReplayResult) -> list[Chart]:
    """Return requests and steps as spans, around the longest wait of the run."""
    if not result.requests:
        return []
    ordered = sorted(result.requests, key=lambda r: (r.arrival_s, r.request_id))
    waits = [
        -1.0 if r.first_token_s is None else r.first_token_s - r.arrival_s
        for r in ordered
    ]
    worst = max(range(len(ordered)), key=lambda index: waits[index])
    start = max(
        0, min(worst - _TIMELINE_REQUESTS // 2, len(ordered) - _TIMELINE_REQUESTS)
    )
    lives = [
        _Life(request, result.end_s)
        for request in ordered[start : start + _TIMELINE_REQUESTS]
    ]
    first = min(life.arrival for life in lives)
    last = max(life.end for life in lives)
    within = [s for s in result.steps if s.end_s >= first and s.start_s <= last]
    steps = [within[begin] for begin, _ in thinned(len(within), _TIMELINE_STEPS)]
    replicas = sorted({step.replica for step in steps})
    names = [f"replica {replica}" for replica in replicas] + [""] * len(lives)
    spans = [
        Span(
            row=replicas.index(step.replica),
            start=step.start_s,
            end=step.end_s,
            phase=_STEPS[0 if step.num_prefill_tokens else 1][0],
            text=f"{step.num_prefill_tokens:,} prefill tokens, {step.num_decodes} decodes",
        )
        for step in steps
    ]
    for row, life in enumerate(lives, start=len(replicas)):
        r = life.request
        text = (
            f"{short(r.request_id, 24)} of {short(r.tenant, 24)}: "
            f"{r.reused_tokens:,} of {r.prompt_tokens:,} prompt tokens reused"
        )
        spans += [
            Span(row=row, start=begin, end=end, phase=phase, text=text)
            for phase, begin, end in life.phases
        ]
    note = f"{len(lives)} of {count(len(ordered), 'request')}, in order of arrival"
    note += ", around the one that waited longest" if len(lives) < len(ordered) else ""
    note += f"; {len(steps):,} of {count(result.num_steps, 'step')}." if steps else "."
    return [
        span_chart(
            title="Timeline",
            x=Axis(title="seconds from the first arrival"),
            y_title="",
            row_names=names,
            phases=(*(_STEPS if steps else ()), *_PHASES),
            spans=spans,
            columns=("request", "tenant", "arrival", "admitted", "first token", "end"),
            rows=[_request_row(life.request) for life in lives],
            note=note,
            label=result.cost_kind.value,
        )
    ]


def _request_row(request: RequestResult) -> list[Cell]:
    times = (request.admitted_s, request.first_token_s, request.end_s)
    return [
        name(request.request_id),
        name(request.tenant),
        request.arrival_s,
        *(NO_DATA if each is None else each for each in times),
    ]
