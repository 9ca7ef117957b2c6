"""The page of a sweep: one trace under many configurations.

Owns which lines are drawn and the sentence on top. Knows nothing of how cells came to be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from stemkv.measure.gap import BEST
from stemkv.measure.results import GIB, SweepCell, SweepResult
from stemkv.report.capacity import capacity_charts, gib_axis
from stemkv.report.chart import (
    LINE_COLORS,
    Axis,
    Band,
    Series,
    bar_chart,
    line_chart,
    value_or_gap,
)
from stemkv.report.hindsight import hindsight_note
from stemkv.report.opaque import opaque_headline, opaque_note, warned
from stemkv.report.orders import order_charts, order_headline, order_tables
from stemkv.report.page import Cell, Chart, Page, Section
from stemkv.report.policies import (
    policy_charts,
    policy_headline,
    policy_sentences,
    policy_tables,
)
from stemkv.report.wording import (
    count,
    memory,
    name,
    number,
    per_cent,
    percent,
    points,
    seconds,
)

__all__ = ["is_conclusive", "numbers_label", "sweep_page"]

_MAX_LINES = 12
_Choice = tuple[str, str, str]  # eviction, order, sharing
_CHOICES = ("eviction policy", "admission order", "sharing rule")  # in words


def sweep_page(result: SweepResult) -> Page:
    """Return the page of one sweep."""
    cells = sorted(result.cells, key=lambda cell: (cell.num_blocks, *_choice(cell)))
    counted = "exact" if result.trace.is_exact else "estimated"
    sections: list[Section | Chart] = []
    paragraphs = [*warned(result.trace), *opaque_note(result.trace)]
    if is_conclusive(result):
        paragraphs = [
            *policy_sentences(result),
            # With a clock as well: the headline is of the comparison without.
            *([_most(_real(cells))] if result.clockless else []),
            *_spread(_real(cells)),
            *hindsight_note(result.config),
            *paragraphs,
        ]
        sections = [
            *order_charts(result),
            *order_tables(result),
            *policy_charts(result),
            *policy_tables(result),
            *_charts(cells, counted=counted),
            *capacity_charts(
                result.curves, own=None, hit_label=counted, saved_label="estimated"
            ),
            _best(_real(cells)),
        ]
    if cells:
        sections.append(_all(cells, label=numbers_label(result)))
    return Page(
        title=f"StemKV sweep of {name(result.trace.name)}",
        headline=_headline(result, cells),
        paragraphs=paragraphs,
        sections=sections,
        method={"costs": result.cost_source, **result.config},
    )


def is_conclusive(result: SweepResult) -> bool:
    """Return whether anything can be said of reuse: prompts are known, and some ran."""
    return not result.trace.is_opaque and any(
        cell.num_refused < result.trace.num_requests for cell in result.cells
    )


def numbers_label(result: SweepResult) -> str:
    """Return how the numbers of the cells were obtained.

    Without a clock hits are counted, whatever steps cost; with one, who finds what in
    the cache depends on when.
    """
    is_timed = any(cell.ttft_p50_s is not None for cell in result.cells)
    if is_timed or not result.trace.is_exact:
        return "estimated"
    return "hit rates and blocks exact, saved seconds estimated"


def _real(cells: Sequence[SweepCell]) -> list[SweepCell]:
    """Return the cells that somebody could run, who does not know the future."""
    return [cell for cell in cells if cell.eviction != BEST] or list(cells)


def _choice(cell: SweepCell) -> _Choice:
    return cell.eviction, cell.order, cell.sharing


def _name(cell: SweepCell, cells: Sequence[SweepCell]) -> str:
    """Return what tells a configuration from the others: only what varies."""
    varying = [
        value
        for index, value in enumerate(_choice(cell))
        if len({_choice(other)[index] for other in cells}) > 1
    ]
    return ", ".join(varying) or cell.eviction


def _headline(result: SweepResult, cells: Sequence[SweepCell]) -> str:
    if not cells:
        return "No configuration was replayed."
    if result.trace.is_opaque:
        return opaque_headline(result.trace)
    if not is_conclusive(result):
        return (
            f"Inconclusive: none of {count(len(cells), 'configuration')} could serve a "
            f"request, as each is longer than the memory."
        )
    return order_headline(result) or policy_headline(result) or _most(_real(cells))


def _most(cells: Sequence[SweepCell]) -> str:
    """Return which configuration reuses most, and which is worth most."""
    # The first of equals is the smallest.
    most = max(cells, key=lambda cell: cell.hit_rate)
    dearest = max(cells, key=lambda cell: _comparable(cell.seconds_per_gib_s))
    text = (
        f"Of {count(len(cells), 'configuration')}, “{_name(most, cells)}” with "
        f"{memory(most.gib * GIB)} reuses most ({percent(most.hit_rate)} of the prompt "
        f"tokens)"
    )
    if math.isfinite(dearest.seconds_per_gib_s):
        text += (
            f"; “{_name(dearest, cells)}” with {memory(dearest.gib * GIB)} saves most per "
            f"retained GiB-second ({seconds(dearest.seconds_per_gib_s)})"
        )
    return text + "."


def _comparable(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _spread(cells: Sequence[SweepCell]) -> list[str]:
    spreads = []
    for group in _by_size(cells):
        rates = [cell.hit_rate for cell in group]
        spreads.append((max(rates) - min(rates), group[0].gib))
    widest = max(spreads, key=lambda spread: spread[0], default=None)
    if widest is None or not widest[0] > 0:
        return []
    varying = [
        words
        for index, words in enumerate(_CHOICES)
        if len({_choice(cell)[index] for cell in cells}) > 1
    ]
    return [
        f"At one size the choice of {' and '.join(varying)} moves the hit rate by up to "
        f"{points(widest[0])} (at {memory(widest[1] * GIB)})."
    ]


def _by_size(cells: Sequence[SweepCell]) -> list[list[SweepCell]]:
    sizes = sorted({cell.num_blocks for cell in cells})
    return [[cell for cell in cells if cell.num_blocks == size] for size in sizes]


def _charts(cells: Sequence[SweepCell], *, counted: str) -> list[Chart]:
    best: dict[_Choice, float] = {}
    for cell in cells:
        choice = _choice(cell)
        best[choice] = max(best.get(choice, -math.inf), cell.hit_rate)
    ordered = sorted(best, key=lambda choice: (-best[choice], choice))
    # By name from here on: a colour stays with its policy from sweep to sweep.
    drawn = sorted(ordered[:_MAX_LINES])
    left = len(ordered) - len(drawn)
    note = f"The {left} lowest of {len(ordered)} are not drawn." if left else ""
    charts = [
        _chart(
            "Hit rate by token",
            cells,
            drawn,
            lambda cell: cell.hit_rate,
            axis=Axis(title="prompt tokens reused", is_share=True),
            note=note,
            label=counted,
        ),
    ]
    if any(math.isfinite(cell.seconds_per_gib_s) for cell in cells):
        charts.append(
            _chart(
                "Saved prefill per retained GiB-second",
                cells,
                drawn,
                lambda cell: cell.seconds_per_gib_s,
                axis=Axis(title="seconds per retained GiB·s"),
                note=note,
                label="estimated",
            )
        )
    if any(cell.ttft_p99_s is not None for cell in cells):
        charts.append(
            _chart(
                "TTFT p99",
                cells,
                drawn,
                lambda cell: cell.ttft_p99_s,
                axis=Axis(title="seconds"),
                note=note,
                label="estimated",
            )
        )
    return charts


def _chart(
    title: str,
    cells: Sequence[SweepCell],
    drawn: Sequence[_Choice],
    value: Callable[[SweepCell], float | None],
    *,
    axis: Axis,
    note: str,
    label: str,
) -> Chart:
    """Return lines over sizes, or bars if there is only one size."""
    lines = {choice: [c for c in cells if _choice(c) == choice] for choice in drawn}
    names = {choice: _name(line[0], cells) for choice, line in lines.items()}
    rows = [
        (names[choice], cell.gib, value(cell))
        for choice, line in lines.items()
        for cell in line
    ]
    columns = ("configuration", "GiB", axis.title)
    sizes = sorted({cell.gib for cell in cells})
    if len(sizes) == 1:
        values = [value_or_gap(value(line[0])) for line in lines.values()]
        return bar_chart(
            title=title,
            names=list(names.values()),
            bands=[Band(name=axis.title, values=values, color="var(--reused)")],
            x=axis,
            columns=columns,
            rows=rows,
            note=note,
            label=label,
        )
    sharings = sorted({choice[2] for choice in drawn})
    hues = sorted({choice[:2] for choice in drawn})
    return line_chart(
        title=f"{title} against memory",
        x=gib_axis(sizes),
        y=axis,
        series=[
            Series(
                name=names[choice],
                x=[cell.gib for cell in line],
                y=[value_or_gap(value(cell)) for cell in line],
                color=LINE_COLORS[hues.index(choice[:2]) % len(LINE_COLORS)],
                # One hue per policy; of two ways to share one is dashed, and so is
                # what nobody can have.
                is_dashed=choice[2] != sharings[-1] or choice[0] == BEST,
                has_points=True,
            )
            for choice, line in lines.items()
        ],
        columns=columns,
        rows=rows,
        note=note,
        label=label,
    )


def _best(cells: Sequence[SweepCell]) -> Section:
    rows: list[Sequence[Cell]] = []
    for group in _by_size(cells):
        most = max(group, key=lambda cell: cell.hit_rate)
        row: list[Cell] = [
            group[0].gib,
            _name(most, cells),
            per_cent(most.hit_rate),
        ]
        timed = [cell for cell in group if cell.ttft_p99_s is not None]
        if timed:
            quickest = min(timed, key=lambda cell: value_or_gap(cell.ttft_p99_s))
            row += [_name(quickest, cells), number(quickest.ttft_p99_s)]
        else:
            row += ["not replayed with a clock", None]
        rows.append(row)
    return Section(
        title="Best at each size",
        columns=("GiB", "highest hit rate", "%", "lowest TTFT p99", "s"),
        rows=rows,
    )


def _all(cells: Sequence[SweepCell], *, label: str) -> Section:
    return Section(
        title="All configurations",
        columns=(
            "GiB",
            "blocks",
            "eviction",
            "order",
            "sharing",
            "hit rate %",
            "saved s",
            "saved s per retained GiB·s",
            "TTFT p50 s",
            "TTFT p99 s",
            "worst tenant's TTFT p99 s",
            "goodput per s",
            "evicted GiB",
            "regret tokens",
            "preemptions",
            "refused",
        ),
        rows=[
            (
                cell.gib,
                cell.num_blocks,
                *_choice(cell),
                per_cent(cell.hit_rate),
                cell.saved_s,
                cell.seconds_per_gib_s,
                cell.ttft_p50_s,
                cell.ttft_p99_s,
                cell.worst_tenant_ttft_p99_s,
                cell.goodput_rps,
                cell.evicted_gib,
                cell.regret_tokens,
                cell.num_preemptions,
                cell.num_refused,
            )
            for cell in cells
        ],
        note="Empty cells: replayed without a clock, or no limits were given. Regret: "
        "tokens evicted and asked for again. Refused requests are longer than the "
        "memory; their tokens count as not reused.",
        label=label,
    )
