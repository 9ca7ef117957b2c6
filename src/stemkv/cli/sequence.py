"""A replay without a clock, for people, for scripts and as a page.

Owns its document and its words. One request goes after another, so there are hits and
evictions, and no latencies, no value per second of memory and no reasons for a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from stemkv.cli.outputs import print_section
from stemkv.cli.summary import print_notes, print_sentences
from stemkv.measure.results import GIB, Bound, CapacityCurve, TraceFacts
from stemkv.report import Chart, Fact, Page, Section
from stemkv.report.capacity import capacity_charts, hit_rate_at
from stemkv.report.chart import Mark
from stemkv.report.hindsight import hindsight_note
from stemkv.report.opaque import opaque_headline, opaque_note, warned
from stemkv.report.page import Cell
from stemkv.report.wording import (
    NO_DATA,
    count,
    memory,
    name,
    per_cent,
    percent,
    points,
)
from stemkv.report.wording import seconds as duration
from stemkv.sim.sequence import SequenceResult

__all__ = ["SequenceReport", "print_sequence", "sequence_page"]

_MAX_TENANTS = 20
_MAX_FLOWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceReport:
    """What a replay without a clock found, and under what settings."""

    trace: TraceFacts
    config: Mapping[str, str | int | float | None]
    cost_source: str
    num_blocks: int
    gib: float
    sequence: SequenceResult
    curves: tuple[CapacityCurve, ...]
    bounds: tuple[Bound, ...]

    @property
    def hit_rate(self) -> float:
        """Reused over prompt tokens; NaN without prompts."""
        return self.sequence.hits.hit_rate


def sequence_page(report: SequenceReport) -> Page:
    """Return the page; what would need a clock is not on it."""
    charts = capacity_charts(
        report.curves,
        own=Mark(x=report.gib, text=f"this run: {memory(report.gib * GIB)}"),
        hit_label=_label(report),
        saved_label="estimated",
    )
    sections: list[Section | Chart] = [_notes(report)]
    if not report.trace.is_opaque:
        sections = [*charts, *_sections(report), *sections]
    return Page(
        title=f"StemKV replay of {name(report.trace.name)}, without a clock",
        headline=_headline(report),
        paragraphs=_paragraphs(report),
        facts=[] if report.trace.is_opaque else _facts(report),
        sections=sections,
        method={"costs": report.cost_source, **report.config},
    )


def _facts(report: SequenceReport) -> list[Fact]:
    hits = report.sequence.hits
    return [
        Fact(
            name="hit rate by token",
            value=percent(hits.hit_rate),
            label=_label(report),
        ),
        Fact(
            name="the same, last half",
            value=percent(hits.steady_hit_rate),
            label=_label(report),
        ),
        Fact(
            name="hit rate by request",
            value=percent(report.sequence.request_hit_rate),
            label=_label(report),
        ),
        Fact(
            name="prefill saved",
            value=duration(hits.saved_s),
            label="estimated",
        ),
    ]


def print_sequence(console: Console, report: SequenceReport, page: Page) -> None:
    """Print the headline, the tables, and what was left out."""
    print_sentences(console, page)
    if not report.trace.is_opaque:
        for section in _sections(report):
            print_section(console, section)
    print_notes(console, report.trace)


def _label(report: SequenceReport) -> str:
    return "exact" if report.trace.is_exact else "estimated"


def _headline(report: SequenceReport) -> str:
    if report.trace.is_opaque:
        return opaque_headline(report.trace)
    hits = report.sequence.hits
    text = (
        f"Without a clock, {percent(hits.hit_rate)} of the prompt tokens are reused in "
        f"{memory(report.gib * GIB)} of KV memory, {duration(hits.saved_s)} of prefill"
    )
    lines = {curve.name: curve for curve in report.curves}
    if report.trace.num_tenants > 1 and {"shared", "isolated"} <= lines.keys():
        shared = hit_rate_at(lines["shared"], report.gib)
        isolated = hit_rate_at(lines["isolated"], report.gib)
        if shared is not None and isolated is not None:
            verb = "costs" if shared >= isolated else "gains"
            text += (
                f"; isolating tenants {verb} {points(shared - isolated)} of hit rate "
                f"at this size"
            )
    return text + "."


def _paragraphs(report: SequenceReport) -> list[str]:
    if report.trace.is_opaque:
        return []
    found = report.sequence
    paragraphs = [
        f"{count(found.num_requests, 'request')} one after another, each alone in the "
        f"cache; {found.num_hit_requests:,} reused something. Units of "
        f"{report.trace.unit_size} tokens, {found.num_evicted_units:,} evicted."
    ]
    if found.num_too_long:
        paragraphs.append(
            f"{count(found.num_too_long, 'prompt is', plural='prompts are')} longer "
            f"than the memory: what they reuse counts, they leave nothing behind."
        )
    if not report.trace.is_exact:
        paragraphs.append(
            "The trace has text and not tokens, so every count of tokens is an estimate."
        )
    paragraphs += hindsight_note(report.config)
    return [*warned(report.trace), *paragraphs, *opaque_note(report.trace)]


def _sections(report: SequenceReport) -> list[Section]:
    return [*_tenants(report), *_flows(report), *_bounds(report)]


def _tenants(report: SequenceReport) -> list[Section]:
    tenants = report.sequence.tenants
    ordered = sorted(tenants, key=lambda each: (-each.input_tokens, each.tenant))
    left = len(ordered) - _MAX_TENANTS
    return [
        Section(
            title="Tenants",
            columns=("tenant", "requests", "with a hit", "prompt tokens", "hit rate %"),
            rows=[
                (
                    name(each.tenant),
                    each.num_requests,
                    each.num_hit_requests,
                    each.input_tokens,
                    per_cent(each.hit_tokens / each.input_tokens)
                    if each.input_tokens
                    else NO_DATA,
                )
                for each in ordered[:_MAX_TENANTS]
            ],
            note=f"{count(left, 'smaller tenant')} in the JSON." if left > 0 else "",
            label=_label(report),
        )
    ]


def _flows(report: SequenceReport) -> list[Section]:
    flows = report.sequence.writers
    if len({who for flow in flows for who in (flow.writer, flow.reader)}) < 2:
        return []
    ordered = sorted(flows, key=lambda each: (-each.tokens, each.writer, each.reader))
    left = len(ordered) - _MAX_FLOWS
    return [
        Section(
            title="Who reuses whose tokens",
            columns=("writer", "reader", "tokens"),
            rows=[
                (name(flow.writer), name(flow.reader), flow.tokens)
                for flow in ordered[:_MAX_FLOWS]
            ],
            note=f"{count(left, 'smaller pair')} in the JSON." if left > 0 else "",
            label=_label(report),
        )
    ]


def _bounds(report: SequenceReport) -> list[Section]:
    if not report.bounds:
        return []
    rows: list[Sequence[Cell]] = [("this run", per_cent(report.hit_rate), "")]
    rows += [(b.name, per_cent(b.hit_rate), b.note) for b in report.bounds]
    return [
        Section(
            title="Bounds",
            columns=("what", "hit rate %", "what it bounds"),
            rows=rows,
            label=_label(report),
        )
    ]


def _notes(report: SequenceReport) -> Section:
    trace = report.trace
    rows: list[Sequence[Cell]] = [
        ("trace", f"{trace.name} ({trace.format})"),
        ("requests", f"{trace.num_requests:,}"),
        ("prompt tokens", f"{trace.prompt_tokens:,}"),
        ("lines left out", f"{trace.num_skipped_lines:,}"),
        *(("note", note) for note in trace.notes),
        *(("left out", problem) for problem in trace.problems),
    ]
    return Section(title="What was replayed", columns=("what", "value"), rows=rows)
