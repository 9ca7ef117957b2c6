"""A value study as tables and charts, for a terminal and a page alike.

Owns which numbers stand together and the label of each table. Sentences are
`conclusion`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from stemkv.measure.flood import FloodResult
from stemkv.measure.results import GIB, LatencySummary
from stemkv.measure.value import ValueResult, ValueRun
from stemkv.report import Chart, Section
from stemkv.report.chart import LINE_COLORS, Axis, Mark, Series, line_chart
from stemkv.report.page import Cell
from stemkv.report.wording import memory, per_cent

__all__ = ["charts", "tables"]

_REUSES = ("off", "isolated", "shared")


def tables(result: ValueResult, flood: FloodResult | None = None) -> list[Section]:
    """Return all numbers, the prefix first and what a flood leaves last."""
    return [
        _prefix(result),
        _instead(result),
        _loads(result),
        _copies(result),
        _memories(result),
        _break_even(result),
        *([] if flood is None or not flood.is_conclusive else [_flood(result, flood)]),
    ]


def charts(result: ValueResult) -> list[Chart]:
    """Return what a page shows as pictures."""
    label = result.time_source.value
    drawn: list[Chart] = []
    if len(result.loads) > 1:
        drawn = [
            _against_rate(
                result,
                title="Goodput from light load to overload",
                unit="requests/s within the limits",
                value=lambda run: run.goodput_rps,
            ),
            _against_rate(
                result,
                title="Slow first tokens from light load to overload",
                unit="TTFT p95, seconds",
                value=lambda run: _p95(run.ttft),
            ),
            _against_rate(
                result,
                title="Prefill saved",
                unit="seconds saved per minute",
                value=lambda run: run.saved_s_per_min,
            ),
        ]
    if len(result.memories) > 1:
        gib = [point.gib for point in result.memories]
        drawn.append(
            line_chart(
                title="Share of requests from which the prefix is worth its memory",
                x=Axis(title="GiB of KV memory", is_log=True),
                y=Axis(title="share of requests", is_share=True),
                series=[
                    Series(
                        name="break-even, if never evicted",
                        x=gib,
                        y=[_drawn(p.break_even.share) for p in result.memories],
                        color=LINE_COLORS[0],
                        has_points=True,
                    ),
                    Series(
                        name="this mix",
                        x=gib,
                        y=[result.mix.share] * len(gib),
                        color=LINE_COLORS[1],
                        is_dashed=True,
                    ),
                ],
                note="An upper limit; see the table for its two sides.",
                label=label,
            )
        )
    return drawn


def _against_rate(
    result: ValueResult,
    *,
    title: str,
    unit: str,
    value: Callable[[ValueRun], float | None],
) -> Chart:
    return line_chart(
        title=title,
        x=Axis(title="requests/s arriving"),
        y=Axis(title=unit),
        series=[
            Series(
                name="reuse off" if name == "off" else name,
                x=[point.rate for point in result.loads],
                y=[_drawn(value(point.runs()[index])) for point in result.loads],
                color=LINE_COLORS[index],
                has_points=True,
            )
            for index, name in enumerate(_REUSES)
        ],
        mark=Mark(x=result.capacity.off.requests_per_s, text="most with reuse off"),
        label=result.time_source.value,
    )


def _prefix(result: ValueResult) -> Section:
    prefix, mix = result.prefix, result.mix
    exact, timed = result.mix_source.value, result.time_source.value
    rows: list[tuple[Cell, ...]] = [
        ("tokens kept, whole blocks", f"{prefix.num_tokens:,}", exact),
        ("memory of one copy", memory(prefix.num_bytes), exact),
        ("prefill of one copy, s", f"{prefix.prefill_s:.4f}", timed),
        ("prefill of one copy, J", f"{prefix.prefill_joules:.1f}", timed),
        ("requests that begin with it", f"{mix.num_sharing} of {mix.num_requests}", exact),
        ("tenants", f"{result.num_tenants}", exact),
    ]  # fmt: skip
    return Section(title="The prefix", columns=("what", "value", "how"), rows=rows)


def _instead(result: ValueResult) -> Section:
    mix = result.mix
    rows = [
        ("one-off requests", mix.one_off_tokens, result.active_one_offs),
        ("this mix, a copy each", mix.mean_tokens, result.active_requests),
        ("this mix, reusing", mix.mean_own_tokens, result.active_reusing_requests),
    ]
    return Section(
        title=f"What {memory(result.prefix.num_bytes)} would hold as active KV",
        columns=("filled with", "tokens each", "requests"),
        rows=[(name, _finite(size), _finite(number)) for name, size, number in rows],
        note="Mean prompt and output; 'reusing' finds the prefix cached elsewhere.",
        label=result.mix_source.value,
    )


def _loads(result: ValueResult) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for point in (*result.loads, result.capacity):
        for run in point.runs():
            rows.append(
                (
                    point.rate,
                    run.reuse,
                    _p50(run.ttft),
                    _p95(run.ttft),
                    _p95(run.tpot),
                    run.goodput_rps,
                    _per_cent(run.goodput_share),
                    run.saved_s_per_min,
                    run.saved_joules_per_min / 1000,
                )
            )
    limits = f"TTFT {result.config['slo_ttft_s']:g} s, TPOT {result.config['slo_tpot_s']:g} s"
    off, isolated, shared = (run.requests_per_s for run in result.capacity.runs())
    return Section(
        title=f"Light load to overload, {memory(result.capacity.off.gib * GIB)}",
        columns=(
            "arrive/s",
            "reuse",
            "TTFT p50 s",
            "TTFT p95 s",
            "TPOT p95 s",
            "goodput/s",
            "within %",
            "saved s/min",
            "kJ/min",
        ),
        rows=rows,
        note=(
            f"Within: requests that keep {limits}. ∞: all arrive at once; reuse off "
            f"then serves {off:.3g} requests/s, isolated {isolated:.3g}, shared "
            f"{shared:.3g}."
        ),
        label=result.time_source.value,
    )


def _copies(result: ValueResult) -> Section:
    return Section(
        title=f"One chain or a copy per request, at {result.pivot().rate:.3g} requests/s",
        columns=(
            "reuse",
            "running",
            "mean GiB",
            "peak GiB",
            "copies, mean GiB",
            "copies, peak GiB",
            "in use %",
        ),
        rows=[
            (
                run.reuse,
                run.mean_running,
                run.mean_active_gib,
                run.peak_active_gib,
                run.mean_copies_gib,
                run.peak_copies_gib,
                _per_cent(run.used_share),
            )
            for run in result.pivot().runs()
        ],
        note=(
            "Active KV. Copies: the same requests at the same times, each with all its "
            "blocks to itself, at final lengths. In use: of the time that what was "
            "reused was kept."
        ),
        label=result.time_source.value,
    )


def _memories(result: ValueResult) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for point in result.memories:
        for run in point.runs():
            rows.append(
                (
                    point.gib,
                    run.reuse,
                    100 * run.hit_rate,
                    run.num_evicted_blocks,
                    run.regret_tokens,
                    run.num_stalls,
                    run.stall_s,
                    _finite(run.stall_active_gib),
                    _finite(run.stall_cached_gib),
                    _p95(run.ttft),
                    run.goodput_rps,
                )
            )
    return Section(
        title=f"Less and less memory, at {result.pivot().rate:.3g} requests/s",
        columns=(
            "GiB",
            "reuse",
            "hit %",
            "evicted",
            "regret",
            "stalls",
            "stall s",
            "active",
            "idle",
            "TTFT p95 s",
            "goodput/s",
        ),
        rows=rows,
        note=(
            "Evicted: blocks. Regret: tokens evicted and asked for again. Stalls: "
            "admissions that waited for memory. Active, idle: mean GiB then; idle can be "
            "evicted at once and was not enough."
        ),
        label=result.time_source.value,
    )


def _break_even(result: ValueResult) -> Section:
    rows: list[tuple[Cell, ...]] = []
    for point in result.memories:
        found = point.break_even
        rows.append(
            (
                point.gib,
                found.one_off_rate,
                0.0 if found.displaced_rate is None else found.displaced_rate,
                found.active_s_per_gib_s,
                found.kept_s_per_gib_s(result.mix.share),
                100 * found.share,
                _per_cent(point.shared.retention_share),
            )
        )
    return Section(
        title="Break-even share of requests",
        columns=(
            "GiB",
            "one-offs/s",
            "without it/s",
            "active s/GiB·s",
            "kept s/GiB·s",
            "share %",
            "lives from %",
        ),
        rows=rows,
        note=(
            "Share, in closed form: where the prefix, never evicted, saves as many "
            "seconds per GiB-second as its memory carries as active KV. That is taken "
            "from one-off requests, all at once, through all of the memory and without "
            "the prefix's part. An upper limit. Lives from: the share from which the "
            "core, going by age alone, still has it when the next request comes."
        ),
        label=result.time_source.value,
    )


def _flood(result: ValueResult, flood: FloodResult) -> Section:
    return Section(
        title=(
            f"A tenant that floods, {flood.flood_rate:.3g} beside {flood.rate:.3g} "
            f"requests/s, {memory(flood.gib * GIB)}"
        ),
        columns=(
            "tenant",
            "alone, tokens",
            "flooded, tokens",
            "left %",
            "floor GiB",
            "with floors, tokens",
            "kept %",
        ),
        rows=[
            (
                each.tenant,
                each.alone_tokens,
                each.flooded_tokens,
                _per_cent(each.flooded_share),
                each.working_set_gib,
                each.kept_tokens,
                _per_cent(each.kept_share),
            )
            for each in flood.tenants
        ],
        note=(
            "Prompt tokens reused within each tenant, in the same memory. The flood is "
            "one-off requests. Floor: the least memory in which the tenant alone, one "
            "request after another, finds all that it could ever find."
        ),
        label=result.time_source.value,
    )


def _p50(summary: LatencySummary | None) -> float | None:
    return None if summary is None else summary.p50


def _p95(summary: LatencySummary | None) -> float | None:
    return None if summary is None else summary.p95


def _per_cent(share: float | None) -> Cell:
    if share is None or math.isnan(share):
        return None
    return math.inf if math.isinf(share) else per_cent(share)


def _finite(value: float) -> Cell:
    return None if math.isnan(value) else value


def _drawn(value: float | None) -> float:
    return math.nan if value is None else value
