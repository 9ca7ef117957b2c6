"""The page of a replay.

Owns its order, its headline and the sentences below it, all made from the numbers.
The sections are in `reuse` and `latency`.
"""

from __future__ import annotations

from stemkv.core.books.entry import MissReason
from stemkv.measure.results import GIB, ReplayResult
from stemkv.report import latency, reuse
from stemkv.report.capacity import capacity_charts, hit_rate_at
from stemkv.report.chart import Mark
from stemkv.report.hindsight import hindsight_note
from stemkv.report.opaque import opaque_headline, opaque_note, warned
from stemkv.report.page import Cell, Chart, Fact, Page, Section
from stemkv.report.wording import (
    count,
    energy,
    memory,
    name,
    number,
    percent,
    points,
    seconds,
)

__all__ = ["replay_page"]

_SHARED, _ISOLATED = "shared", "isolated"  # names of the curves that are compared
_MAX_REASONS = 3


def replay_page(result: ReplayResult) -> Page:
    """Return the page of one replay.

    Raises:
        InvariantError: A check of the result does not hold.
    """
    own = Mark(
        x=result.capacity_gib, text=f"this run: {memory(result.capacity_gib * GIB)}"
    )
    counted = reuse.counted(result)
    of_reuse: list[Section | Chart] = [
        *capacity_charts(
            result.curves,
            own=own,
            hit_label=counted,
            saved_label=result.cost_kind.value,
        ),
        *reuse.bounds(result),
        *reuse.tenant_bars(result),
        *reuse.losses(result),
        *reuse.eviction(result),
        *reuse.writers(result),
        *reuse.prefixes(result),
        *reuse.tenant_table(result),
    ]
    sections: list[Section | Chart] = [
        *([] if result.trace.is_opaque else of_reuse),
        *latency.memory_chart(result),
        *latency.wait_table(result),
        *latency.opportunity_table(result),
        *latency.stall_table(result),
        *latency.ttft_chart(result),
        *latency.latency_table(result),
        *latency.in_flight(result),
        *latency.timeline(result),
        _trace(result),
        *_problems(result),
    ]
    return Page(
        title=f"StemKV replay of {name(result.trace.name)}",
        headline=_headline(result),
        paragraphs=_paragraphs(result),
        facts=_facts(result),
        sections=sections,
        method={"costs": result.cost_source, **result.config},
        checks=result.checks,
    )


def _headline(result: ReplayResult) -> str:
    if result.trace.is_opaque:
        return opaque_headline(result.trace)
    totals = result.tokens
    size = memory(result.capacity_gib * GIB)
    where = f"{size} of KV memory"
    if result.num_replicas > 1:
        where += f" on each of {result.num_replicas} replicas"
    if not totals.prompt:
        return f"Nothing was replayed in {where}: no request came to its prompt."
    if totals.reused:
        text = (
            f"Reuse saved {seconds(result.saved.seconds)} of prefill "
            f"({percent(totals.hit_rate)} of the prompt tokens) in {where}"
        )
    else:
        text = (
            f"Reuse saved nothing: of {totals.prompt:,} prompt tokens none was reused "
            f"in {where}"
        )
    return f"{text}{_isolation(result)}."


def _isolation(result: ReplayResult) -> str:
    """Return what isolation costs as the end of a sentence, or nothing."""
    cost = _isolation_cost(result)
    if cost is None:
        totals = result.tokens
        lost = totals.misses.get(MissReason.OTHER_DOMAIN.value, 0)
        if totals.reused or not lost:
            return ""
        return (
            f"; isolating tenants costs {points(lost / totals.prompt)} of hit rate: "
            f"others had those tokens"
        )
    # The lines have no clock, so the difference is not one of two such replays.
    where = "at this size, by the curves of requests one after another"
    if abs(cost) < 0.0005:
        return f"; isolating tenants would cost nothing {where}"
    verb = "costs" if cost > 0 else "gains"
    return f"; isolating tenants {verb} {points(cost)} of hit rate {where}"


def _isolation_cost(result: ReplayResult) -> float | None:
    """Return by how much sharing between tenants raises the hit rate at this size."""
    if result.trace.num_tenants < 2:
        return None
    curves = {curve.name: curve for curve in result.curves}
    if _SHARED not in curves or _ISOLATED not in curves:
        return None
    shared, isolated = (
        hit_rate_at(curves[name], result.capacity_gib) for name in (_SHARED, _ISOLATED)
    )
    return None if shared is None or isolated is None else shared - isolated


def _paragraphs(result: ReplayResult) -> list[str]:
    paragraphs = warned(result.trace)
    totals = result.tokens
    lost = {
        reason: totals.misses.get(reason.value, 0)
        for reason in MissReason
        if reason not in (MissReason.NEVER_SEEN, MissReason.BELOW_BLOCK)
    }
    if totals.prompt and not result.trace.is_opaque:
        # Sorting is stable: equal shares stay in the order of the reasons.
        largest = sorted(lost, key=lambda reason: -lost[reason])[:_MAX_REASONS]
        parts = [
            f"{reuse.reason_name(reason)} {percent(lost[reason] / totals.prompt)}"
            for reason in largest
            if lost[reason]
        ]
        text = f"Of {totals.prompt:,} prompt tokens {totals.computed:,} were computed"
        if parts:
            text += f". Lost, of all prompt tokens: {', '.join(parts)}"
        paragraphs.append(f"{text}.")
    ttft = next((each for each in result.latencies if each.name == "TTFT"), None)
    if ttft is not None and ttft.count:
        paragraphs.append(
            f"TTFT was {seconds(ttft.p50)} at the median and {seconds(ttft.p99)} at p99; "
            f"{percent(result.busy_share)} of the replicas' time went into steps "
            f"({result.cost_source})."
        )
    paragraphs += _stalls(result)
    paragraphs += hindsight_note(result.config)
    paragraphs += opaque_note(result.trace)
    if not result.trace.is_exact:
        paragraphs.append(
            "The trace has text and not tokens, so every count of tokens is an estimate."
        )
    if result.trace.num_skipped_lines:
        left = count(result.trace.num_skipped_lines, "line")
        paragraphs.append(
            f"{left} of the trace could not be read and had to be left out."
        )
    if result.num_refused:
        paragraphs.append(
            f"{count(result.num_refused, 'request')} could never run: longer than the "
            f"memory or the model's context."
        )
    return paragraphs


def _stalls(result: ReplayResult) -> list[str]:
    if not result.num_finished:
        return []  # nobody waited, as nobody was served
    if not result.num_stalls:
        text = "No admission waited for memory"
        if result.trace.is_opaque:
            return [f"{text}."]
        return [f"{text}: what was kept for reuse stalled nobody."]
    blocks = result.num_blocks
    return [
        f"{count(result.num_stalls, 'admission')} waited for memory, "
        f"{seconds(result.stall_s)} in all; meanwhile running requests held "
        f"{percent(result.stall_active_blocks / blocks)} of the blocks "
        f"({percent(result.stall_shared_blocks / blocks)} published and pinned), and "
        f"{percent(result.stall_cached_blocks / blocks)} were cached."
    ]


def _facts(result: ReplayResult) -> list[Fact]:
    timed = result.cost_kind.value
    facts = [] if result.trace.is_opaque else _reuse_facts(result)
    for summary in result.latencies:
        if summary.name == "TTFT" and summary.count:
            facts += [
                Fact(name="TTFT p50", value=seconds(summary.p50), label=timed),
                Fact(name="TTFT p99", value=seconds(summary.p99), label=timed),
            ]
    if result.goodput_rps is not None:
        facts.append(
            Fact(
                name="goodput, requests per second",
                value=number(result.goodput_rps),
                label=timed,
            )
        )
    facts.append(
        Fact(
            name="output tokens per second",
            value=number(result.output_tokens_per_s),
            label=timed,
        )
    )
    return facts


def _reuse_facts(result: ReplayResult) -> list[Fact]:
    counted, timed = reuse.counted(result), result.cost_kind.value
    return [
        Fact(
            name="hit rate by token",
            value=percent(result.tokens.hit_rate),
            label=counted,
        ),
        Fact(
            name="the same, last half",
            value=percent(result.steady_hit_rate),
            label=counted,
        ),
        Fact(
            name="hit rate by request",
            value=percent(result.request_hit_rate),
            label=counted,
        ),
        Fact(
            name="prefill saved",
            value=seconds(result.saved.seconds),
            label=timed,
        ),
        Fact(
            name="energy saved",
            value=energy(result.saved.joules),
            label="estimated",
        ),
        Fact(
            name="saved s per retained GiB·s",
            value=number(result.saved.seconds_per_gib_s),
            label=timed,
        ),
    ]


def _trace(result: ReplayResult) -> Section:
    trace, totals = result.trace, result.tokens
    rows: list[tuple[str, Cell]] = [
        ("trace", trace.name),
        ("format", trace.format),
        ("requests", trace.num_requests),
        ("finished", result.num_finished),
        ("refused", result.num_refused),
        ("requests of unknown prompt", trace.num_opaque),
        ("tenants", trace.num_tenants),
        ("first to last arrival", seconds(trace.duration_s)),
        ("last end", seconds(result.end_s)),
        ("prompt tokens", trace.prompt_tokens),
        ("output tokens", trace.output_tokens),
        ("reused tokens, copied ones", totals.copied),
        ("tokens recomputed after preemptions", totals.recomputed),
        ("tokens per unit of the trace", trace.unit_size),
        ("tokens are", "exact" if trace.is_exact else "estimated from text"),
        ("steps", result.num_steps),
        ("replicas", result.num_replicas),
        ("blocks per replica", result.num_blocks),
        ("tokens per block", result.block_size),
        ("bytes per block", result.block_bytes),
        ("most active blocks", result.peak_active_blocks),
        ("tokens in them", result.peak_active_tokens),
        ("published blocks", result.num_published_blocks),
        ("evicted blocks", result.num_evicted_blocks),
        ("blocks not retained after their last use", result.num_refused_blocks),
        ("tokens evicted and asked for again", result.regret_tokens),
        ("lines left out", trace.num_skipped_lines),
    ]
    return Section(title="What was replayed", columns=("what", "value"), rows=rows)


def _problems(result: ReplayResult) -> list[Section]:
    trace = result.trace
    rows = [("note", note) for note in trace.notes]
    rows += [("left out", problem) for problem in trace.problems]
    if not rows:
        return []
    left = trace.num_skipped_lines - len(trace.problems)
    note = (
        f"{count(left, 'more line was', plural='more lines were')} left out."
        if left > 0
        else ""
    )
    return [
        Section(title="Notes on the trace", columns=("", "what"), rows=rows, note=note)
    ]
