"""What a terminal shows of a replay: the report's sentences, and its tables cut short.

Owns which numbers are few enough for a terminal. Wording and units are the report's.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from stemkv.cli.outputs import print_section
from stemkv.cli.thresholds import Finding, Judgement
from stemkv.measure.results import GIB, LatencySummary, ReplayResult, TraceFacts
from stemkv.report import Page, Section
from stemkv.report.latency import latency_table, stall_table, wait_table
from stemkv.report.page import Cell
from stemkv.report.reuse import bounds, counted, losses
from stemkv.report.wording import (
    NO_DATA,
    count,
    energy,
    memory,
    name,
    per_cent,
    seconds,
    visible,
)

__all__ = ["print_findings", "print_notes", "print_replay", "print_sentences"]

_MAX_TENANTS = 10
_MAX_PREFIXES = 5
_MAX_PROBLEMS = 5
_MARKS = {
    Judgement.MET: "[bold red]met[/bold red]",
    Judgement.NOT_MET: "[green]not met[/green]",
    Judgement.UNDECIDED: "[yellow]undecided[/yellow]",
}


def print_replay(console: Console, result: ReplayResult, page: Page) -> None:
    """Print a replay's headline, its tables, and what was left out."""
    print_sentences(console, page)
    sections = [*latency_table(result), _memory(result), *stall_table(result)]
    if not result.trace.is_opaque:
        sections = [*_tokens(result), *_tenants(result), *sections]
        sections += [*_prefixes(result), *bounds(result)]
    sections += wait_table(result)
    for section in sections:
        print_section(console, section)
    print_notes(console, result.trace)


def print_sentences(console: Console, page: Page) -> None:
    """Print a page's headline and what stands below it."""
    console.print(visible(page.headline), markup=False, style="bold")
    for paragraph in page.paragraphs:
        console.print(visible(paragraph), markup=False)


def print_notes(console: Console, trace: TraceFacts) -> None:
    """Print what readers should know of a trace, and lines that were left out."""
    for note in trace.notes:
        console.print(f"note: {visible(note)}", markup=False, style="dim")
    shown = trace.problems[:_MAX_PROBLEMS]
    for problem in shown:
        console.print(f"left out: {visible(problem)}", markup=False)
    if more := trace.num_skipped_lines - len(shown):
        console.print(
            count(more, "more line was left out", plural="more lines were left out")
        )


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print what became of every condition."""
    for finding in findings:
        console.print(f"{_MARKS[finding.judgement]}: ", end="")
        console.print(f"{finding.threshold.text}: {finding.because}", markup=False)


def _tokens(result: ReplayResult) -> list[Section]:
    totals = result.tokens
    if not totals.prompt:
        return []
    rows: list[Sequence[Cell]] = [
        ("reused", totals.reused, per_cent(totals.hit_rate), "not computed again")
    ]
    label = counted(result)
    others = losses(result)
    if others:
        rows += others[0].rows
    section = Section(
        title="Where the prompt tokens went",
        columns=("fate", "tokens", "%", "meaning"),
        rows=rows,
        label=label,
    )
    return [section, *others[1:]]


def _tenants(result: ReplayResult) -> list[Section]:
    if len(result.tenants) < 2:
        return []
    ordered = sorted(
        result.tenants, key=lambda each: (-each.tokens.prompt, each.tenant)
    )
    shown = ordered[:_MAX_TENANTS]
    left = len(ordered) - len(shown)
    return [
        Section(
            title="Tenants",
            columns=(
                "tenant",
                "requests",
                "hit rate %",
                "saved s",
                "retained GiB·s",
                "TTFT p50 s",
                "TTFT p99 s",
                "stalled s",
            ),
            rows=[
                (
                    name(each.tenant),
                    each.num_requests,
                    per_cent(each.tokens.hit_rate) if each.tokens.prompt else NO_DATA,
                    each.saved.seconds,
                    each.saved.retained_gib_s,
                    *_median_and_tail(each.ttft),
                    each.stall_s,
                )
                for each in shown
            ],
            note=f"{count(left, 'smaller tenant')} in the JSON." if left else "",
            label=result.cost_kind.value,
        )
    ]


def _median_and_tail(summary: LatencySummary | None) -> tuple[Cell, Cell]:
    return (None, None) if summary is None else (summary.p50, summary.p99)


def _memory(result: ReplayResult) -> Section:
    saved = result.saved
    size = result.block_bytes
    peak = result.peak_active_blocks
    rows: list[Sequence[Cell]] = [
        ("KV memory of a replica", memory(result.capacity_gib * GIB)),
        ("most of it active at once", memory(peak * size)),
        ("retained, in GiB·s", saved.retained_gib_s),
        ("prefill saved", seconds(saved.seconds)),
        ("energy saved (estimated)", energy(saved.joules)),
        ("saved seconds per retained GiB·s", saved.seconds_per_gib_s),
        ("eviction policy", result.config.get("eviction")),
        ("blocks published", result.num_published_blocks),
        ("blocks evicted", result.num_evicted_blocks),
        ("tokens evicted and asked for again", result.regret_tokens),
        ("admissions that waited for memory", result.num_stalls),
        ("preemptions", result.num_preemptions),
    ]
    opportunity = result.opportunity
    if opportunity is not None:
        rows += [
            (
                f"what its last {memory(opportunity.last_gib * GIB)} saves, s per GiB",
                opportunity.saved_s_per_gib,
            ),
            ("waited for memory, s", opportunity.memory_wait_s),
            (
                "retained when such a wait began, on average",
                memory(opportunity.retained_gib * GIB),
            ),
        ]
    if result.num_refused_blocks:
        rows.append(
            ("blocks not retained after their last use", result.num_refused_blocks)
        )
    return Section(
        title="Memory and what it was worth",
        columns=("what", "value"),
        rows=rows,
        label=result.cost_kind.value,
    )


def _prefixes(result: ReplayResult) -> list[Section]:
    shown = result.prefixes[:_MAX_PREFIXES]
    if not shown:
        return []
    return [
        Section(
            title="Prefixes worth most per byte",
            columns=("domain", "tokens", "hits", "saved s", "saved s per GiB·s"),
            rows=[
                (
                    name(each.domain),
                    f"{each.start:,} to {each.end:,}",
                    each.num_hits,
                    each.saved_s,
                    each.seconds_per_gib_s,
                )
                for each in shown
            ],
            label=result.cost_kind.value,
        )
    ]
