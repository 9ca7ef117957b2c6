"""Admission orders compared: who waits, how long at worst, and what it costs.

Owns the tables, pictures and sentences of a comparison. What the numbers mean,
`measure.scheduling` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from stemkv.measure.results import (
    GIB,
    LatencySummary,
    Scheduling,
    SweepCell,
    SweepResult,
)
from stemkv.report.chart import (
    LINE_COLORS,
    Axis,
    Band,
    Series,
    bar_chart,
    line_chart,
    value_or_gap,
)
from stemkv.report.page import Cell, Chart, Section
from stemkv.report.wording import memory, name, per_cent, percent, seconds

__all__ = ["order_charts", "order_headline", "order_tables"]

_Row = tuple[SweepCell, Scheduling]


def _has_orders(result: SweepResult) -> bool:
    """Return whether orders are compared: two or more, with a clock."""
    return len({cell.order for cell, _ in _rows(result)}) > 1


def order_headline(result: SweepResult) -> str | None:
    """Return what the comparison comes to; `None` if there is none."""
    if not _has_orders(result):
        return None
    rows = _rows(result)
    best = max(rows, key=lambda row: row[1].slo_share)
    calmest = min(rows, key=lambda row: _or_inf(_of(row[1].ttft("all"), "max")))
    longest = _of(calmest[1].ttft("all"), "max")
    cell, found = best
    text = (
        f"Of {len({each.order for each, _ in rows})} admission orders “{cell.order}” "
        f"serves most requests within {_limits(found)}: {percent(found.slo_share)}"
    )
    others = [
        row for row in rows if row[0].order != cell.order and _is_alike(row, best)
    ]
    if others:
        least = min(others, key=lambda row: row[1].slo_share)
        text += f" (“{least[0].order}” {percent(least[1].slo_share)})"
    if longest is not None:
        text += (
            f"; with “{calmest[0].order}” nobody waits longer than {seconds(longest)}, "
            f"with “{cell.order}” {seconds(_of(found.ttft('all'), 'max'))}"
        )
    return f"{text}."


def order_tables(result: SweepResult) -> list[Section]:
    """Return two tables for each size, policy and rule: totals, and TTFT by class."""
    if not _has_orders(result):
        return []
    tables: list[Section] = []
    for group in _groups(result):
        first = group[0][0]
        where = f"with {memory(first.gib * GIB)}{_words(result, first)}"
        tables += [_totals(group, where), _classes(group, where)]
    # One explanation is enough for all.
    return [
        table
        if at < 2
        else Section(
            title=table.title, columns=table.columns, rows=table.rows, label=table.label
        )
        for at, table in enumerate(tables)
    ]


def order_charts(result: SweepResult) -> list[Chart]:
    """Return pictures of the largest memory: waits of all, at worst, and of tenants."""
    if not _has_orders(result):
        return []
    group = _groups(result)[-1]
    first = group[0][0]
    where = f"with {memory(first.gib * GIB)}{_words(result, first)}"
    charts = [_distribution(group, where)]
    charts.append(
        _bars(
            f"The longest wait, {where}",
            group,
            {
                "in work of its tenant": lambda f: f.most_wait_ratio,
                "in work of all": lambda f: f.most_wait_ratio_of_all,
            },
            axis="x backlog",
            note="Prefill tokens that were run from a request's arrival to its first "
            "token, over the uncached tokens that were ahead of it, itself included: 1 "
            "if nobody overtook it. Of its own tenant, and of all. The longest of all "
            "requests.",
            label="exact, of estimated steps",
        )
    )
    tenants = [
        each.name for each in group[0][1].classes if each.name.startswith("tenant ")
    ]
    if tenants:
        charts.append(
            _bars(
                f"TTFT p95 by tenant, {where}",
                group,
                {name(each): _p95_of(each) for each in tenants},
                axis="seconds",
                note="Tenants with most requests.",
                label="estimated",
            )
        )
    charts.append(
        _bars(
            f"TTFT p95, cold and warm, {where}",
            group,
            {
                "cold": _p95_of("cold"),
                "warm": _p95_of("warm"),
            },
            axis="seconds",
            note="Cold requests reused nothing.",
            label="estimated",
        )
    )
    return charts


def _rows(result: SweepResult) -> list[_Row]:
    return [(c, c.scheduling) for c in result.cells if c.scheduling is not None]


def _groups(result: SweepResult) -> list[list[_Row]]:
    """Return the rows that differ by their order only, by size; in the order of cells."""
    groups: dict[tuple[int, str, str], list[_Row]] = {}
    for cell, found in _rows(result):
        key = (cell.num_blocks, cell.sharing, cell.eviction)
        groups.setdefault(key, []).append((cell, found))
    return [groups[key] for key in sorted(groups)]


def _is_alike(one: _Row, other: _Row) -> bool:
    return all(
        getattr(one[0], word) == getattr(other[0], word)
        for word in ("num_blocks", "sharing", "eviction")
    )


def _words(result: SweepResult, cell: SweepCell) -> str:
    """Return what else tells this group from others."""
    varying = [
        getattr(cell, word)
        for word in ("eviction", "sharing")
        if len({getattr(each, word) for each, _ in _rows(result)}) > 1
    ]
    return "".join(f", {word}" for word in varying)


def _totals(group: Sequence[_Row], where: str) -> Section:
    has_gap = any(found.tenant_gap_tokens is not None for _, found in group)
    has_cpu = any(found.scheduler_cpu_s is not None for _, found in group)
    columns = ["order", "TTFT p50 s", "p95 s", "p99 s", "longest s", "within limits %"]
    columns += ["goodput per s", "wait, x own backlog", "x all"]
    columns += ["tenant gap, tokens"] if has_gap else []
    columns += ["hit tokens", "requests per s"]
    columns += ["scheduler CPU s"] if has_cpu else []
    rows: list[Sequence[Cell]] = []
    for cell, found in sorted(group, key=lambda row: (-row[1].slo_share, row[0].order)):
        every = found.ttft("all")
        row: list[Cell] = [cell.order]
        row += [_of(every, each) for each in ("p50", "p95", "p99", "max")]
        row += [per_cent(found.slo_share), found.goodput_rps]
        row += [found.most_wait_ratio, found.most_wait_ratio_of_all]
        row += [found.tenant_gap_tokens] if has_gap else []
        row += [found.hit_tokens, found.requests_per_s]
        row += [found.scheduler_cpu_s] if has_cpu else []
        rows.append(row)
    note = (
        f"Within limits: {_limits(group[0][1])}, of all requests (2 s and 50 ms if none "
        f"were given; where a time per token is promised, try --step-time). Wait: prefill "
        f"tokens run until the first token over those that were ahead, of the own tenant "
        f"and of all. Tenant gap: the furthest that two backlogged tenants got apart in what "
        f"they were served, weighted."
    )
    if has_cpu:
        note += " CPU: measured, of the scheduler on this machine in pure Python."
    return Section(
        title=f"Admission orders {where}",
        columns=columns,
        rows=rows,
        note=note,
        label="waits in tokens exact, times estimated",
    )


def _classes(group: Sequence[_Row], where: str) -> Section:
    names = list(
        dict.fromkeys(each.name for _, found in group for each in found.classes)
    )
    rows: list[Sequence[Cell]] = []
    for title in names:
        for cell, found in group:
            summary = found.ttft(title)
            if summary is not None:
                rows.append(
                    (
                        name(title),
                        cell.order,
                        summary.count,
                        summary.p50,
                        summary.p95,
                        summary.p99,
                    )
                )
    return Section(
        title=f"TTFT by class {where}",
        columns=("class", "order", "requests", "p50 s", "p95 s", "p99 s"),
        rows=rows,
        note="Cold: reused nothing. Light tenants: all but the one with most requests.",
        label="estimated",
    )


def _distribution(group: Sequence[_Row], where: str) -> Chart:
    series = []
    for index, (cell, found) in enumerate(group):
        every = found.ttft("all")
        if every is None:
            continue
        series.append(
            Series(
                name=cell.order,
                x=[max(second, 1e-3) for _, second in every.distribution],
                y=[share for share, _ in every.distribution],
                color=LINE_COLORS[index % len(LINE_COLORS)],
            )
        )
    return line_chart(
        title=f"Time to first token, {where}",
        x=Axis(title="seconds", is_log=True),
        y=Axis(title="requests within", is_share=True),
        series=series,
        columns=("order", "p50 s", "p95 s", "p99 s"),
        rows=[
            (cell.order, *(_of(found.ttft("all"), p) for p in ("p50", "p95", "p99")))
            for cell, found in group
        ],
        note="The share of requests that had their first token within a time.",
        label="estimated",
    )


def _bars(
    title: str,
    group: Sequence[_Row],
    values: dict[str, Callable[[Scheduling], float | None]],
    *,
    axis: str,
    note: str,
    label: str,
) -> Chart:
    return bar_chart(
        title=title,
        names=[cell.order for cell, _ in group],
        bands=[
            Band(
                name=title_of,
                values=[value_or_gap(value(found)) for _, found in group],
                color=LINE_COLORS[index % len(LINE_COLORS)],
            )
            for index, (title_of, value) in enumerate(values.items())
        ],
        x=Axis(title=axis),
        is_stacked=False,
        columns=("order", *values),
        rows=[
            (cell.order, *(value(found) for value in values.values()))
            for cell, found in group
        ],
        note=note,
        label=label,
    )


def _limits(found: Scheduling) -> str:
    parts: Iterable[tuple[str, float | None]] = (
        ("to the first token", found.slo_ttft_s),
        ("per token after it", found.slo_tpot_s),
    )
    return " and ".join(
        f"{seconds(limit)} {what}" for what, limit in parts if limit is not None
    )


def _p95_of(title: str) -> Callable[[Scheduling], float | None]:
    return lambda found: _of(found.ttft(title), "p95")


def _of(summary: LatencySummary | None, what: str) -> float | None:
    return None if summary is None else getattr(summary, what)


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else value
