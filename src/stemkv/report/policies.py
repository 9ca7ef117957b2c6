"""Eviction policies compared: one table for each size, and how much of the gap they close.

Owns the order of policies, their marks and the sentence on top. What the gap is,
`measure.gap` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from stemkv.measure.gap import BEST, baseline_of, compared
from stemkv.measure.results import GIB, SweepCell, SweepResult
from stemkv.report.capacity import gib_axis
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
from stemkv.report.wording import memory, name, per_cent, percent

__all__ = ["policy_charts", "policy_headline", "policy_sentences", "policy_tables"]

_MEASURED = "CPU s"
_WORST = "worst"

_Group = tuple[str, float]  # sharing rule, GiB


def policy_tables(result: SweepResult) -> list[Section]:
    """Return a table for each size and sharing rule, the best policy first."""
    groups = _groups(compared(result))
    has_rules = len({sharing for sharing, _ in groups}) > 1
    tables = [
        _table(result, cells, where=f", {sharing}" if has_rules else "")
        for (sharing, _), cells in groups.items()
    ]
    # One explanation is enough for all.
    return [replace(table, note="") if at else table for at, table in enumerate(tables)]


def policy_charts(result: SweepResult) -> list[Chart]:
    """Return the gap closed in tokens and in seconds against memory."""
    cells = [cell for cell in compared(result) if cell.token_gap is not None]
    if not cells:
        return []
    lru = "LRU without hints" if any(cell.is_hinted for cell in cells) else "LRU"
    if len({cell.gib for cell in cells}) == 1:
        return [_bars(cells, lru)]
    return [
        _lines(
            "Gap closed between LRU and clairvoyant, in tokens",
            cells,
            lambda cell: cell.token_gap,
            note=f"{lru} is 0 and a policy that knows the future 100\N{NO-BREAK SPACE}%, at "
            f"every size. Requests one after another.{_alike(cells)}",
            label="exact" if result.trace.is_exact else "estimated",
        ),
        _lines(
            "Gap closed between LRU and clairvoyant, in seconds",
            cells,
            lambda cell: cell.seconds_gap,
            note="The same in saved prefill. Clairvoyant keeps the most tokens and not "
            "the most seconds, so that more than 100\N{NO-BREAK SPACE}% is possible.",
            label="estimated",
        ),
    ]


def policy_headline(result: SweepResult) -> str | None:
    """Return what the comparison comes to; `None` if there is none, or no gap."""
    found = _ranked(compared(result))
    if not found:
        return None
    best, worst = found[0], found[-1]
    text = (
        f"Of {len(found)} eviction policies “{name(best[0])}” comes closest to one that "
        f"knows the future: it closes {_range(_tokens(best[1]))} of the gap to LRU in tokens, "
        f"{_range(_seconds(best[1]))} in seconds"
    )
    if len(found) > 1:
        least = _range(_tokens(worst[1]))
        text += f"; “{name(worst[0])}” closes least, {least} in tokens"
    return f"{text}."


def policy_sentences(result: SweepResult) -> list[str]:
    """Return who reuses less than LRU, and where there is nothing to be won."""
    cells = compared(result)
    sentences = []
    losses = [
        (1 - cell.hit_rate / lru.hit_rate, cell)
        for group in _groups(cells).values()
        if (lru := baseline_of(group)) is not None and lru.hit_rate > 0
        for cell in group
        if cell.hit_rate < lru.hit_rate and cell.eviction != BEST
    ]
    if losses:
        loss, cell = max(losses, key=lambda each: each[0])
        sentences.append(
            f"The most that a policy loses against LRU is {percent(loss)} of its hits: "
            f"“{name(cell.eviction)}” with {memory(cell.gib * GIB)}."
        )
    elif cells:
        is_one = len({cell.gib for cell in cells}) == 1
        where = "at this size" if is_one else "at any of these sizes"
        sentences.append(f"No policy reuses less than LRU {where}.")
    narrow = [
        group[0]
        for group in _groups(cells).values()
        if all(cell.token_gap is None for cell in group)
    ]
    if narrow:
        sizes = ", ".join(dict.fromkeys(memory(cell.gib * GIB) for cell in narrow))
        sentences.append(
            f"With {sizes} LRU reuses what a clairvoyant policy does, within a "
            f"thousandth of the prompt tokens: there is no gap to close."
        )
    return sentences


def _groups(cells: Iterable[SweepCell]) -> dict[_Group, list[SweepCell]]:
    groups: dict[_Group, list[SweepCell]] = {}
    for cell in sorted(cells, key=lambda each: (each.sharing, each.num_blocks)):
        groups.setdefault((cell.sharing, cell.gib), []).append(cell)
    return groups


def _titles(cells: Sequence[SweepCell]) -> Callable[[SweepCell], str]:
    """Return what cells are called: by policy, and LRU twice where there are hints."""
    has_hints = any(cell.is_hinted for cell in cells)

    def called(cell: SweepCell) -> str:
        is_blind = has_hints and not cell.is_hinted and cell.eviction != BEST
        return f"{cell.eviction} without hints" if is_blind else cell.eviction

    return called


def _ranked(cells: Sequence[SweepCell]) -> list[tuple[str, list[SweepCell]]]:
    """Return the policies that an engine can have, with their cells, the best first.

    By the mean gap over sizes where there is one. The LRU that closes nothing by
    definition is none of them.
    """
    by_name: dict[str, list[SweepCell]] = {}
    ends = [baseline_of(group) for group in _groups(cells).values()]
    for cell in cells:
        if cell.token_gap is not None and cell.eviction != BEST and cell not in ends:
            by_name.setdefault(cell.eviction, []).append(cell)

    def mean(cells: Sequence[SweepCell]) -> float:
        return math.fsum(cell.token_gap or 0.0 for cell in cells) / len(cells)

    return sorted(by_name.items(), key=lambda each: (-mean(each[1]), each[0]))


def _tokens(cells: Sequence[SweepCell]) -> list[float]:
    return [cell.token_gap for cell in cells if cell.token_gap is not None]


def _seconds(cells: Sequence[SweepCell]) -> list[float]:
    return [cell.seconds_gap for cell in cells if cell.seconds_gap is not None]


def _range(shares: Sequence[float]) -> str:
    if not shares:
        return "nothing"
    low, high = percent(min(shares)), percent(max(shares))
    return low if low == high else f"{low} to {high}"


def _table(result: SweepResult, cells: Sequence[SweepCell], *, where: str) -> Section:
    trace = result.trace
    called = _titles(cells)
    ordered = sorted(cells, key=lambda cell: (-cell.hit_rate, called(cell)))
    online = [cell for cell in ordered if cell.eviction != BEST]
    lowest, highest = online[-1].hit_rate, online[0].hit_rate
    measured = any(cell.policy_cpu_s is not None for cell in cells)
    gib = cells[0].gib
    gib_s = gib * trace.duration_s if trace.has_arrivals else 0.0
    columns = ["policy", "hit rate %", "saved s", "gap closed, tokens %"]
    columns += ["gap closed, seconds %", "regret tokens", "evicted GiB"]
    columns += ["saved s per GiB·s"] if gib_s else []
    columns += [_MEASURED, "net saved s"] if measured else []
    rows: list[Sequence[Cell]] = []
    for cell in ordered:
        is_worst = lowest < highest and cell.hit_rate == lowest and cell in online
        row: list[Cell] = [
            called(cell),
            per_cent(cell.hit_rate),
            cell.saved_s,
            _per_cent(cell.token_gap),
            _per_cent(cell.seconds_gap),
            cell.regret_tokens,
            cell.evicted_gib,
        ]
        row += [cell.saved_s / gib_s] if gib_s else []
        row += [cell.policy_cpu_s, cell.net_saved_s] if measured else []
        rows.append([*row, _WORST if is_worst else ""])
    note = "Regret: tokens evicted and asked for again."
    if gib_s:
        note += " GiB·s: the memory, from the first arrival to the last."
    if measured:
        note += (
            " CPU s: measured, in the policy's hooks on this machine in pure Python. Net "
            "saved: less that."
        )
    label = "counts exact, saved seconds estimated"
    if not trace.is_exact:
        label = "estimated"
    return Section(
        title=f"Eviction policies with {memory(gib * GIB)}{where}",
        columns=[*columns, ""],
        rows=rows,
        note=note,
        label=f"{label}, CPU time measured" if measured else label,
    )


def _per_cent(share: float | None) -> Cell:
    return None if share is None else per_cent(share)


def _lines(
    title: str,
    cells: Sequence[SweepCell],
    value: Callable[[SweepCell], float | None],
    *,
    note: str,
    label: str,
) -> Chart:
    called = _titles(cells)
    policies = sorted({cell.eviction for cell in cells})
    rules = sorted({cell.sharing for cell in cells})
    lines: dict[tuple[str, str], list[SweepCell]] = {}
    for cell in sorted(cells, key=lambda each: (called(each), each.sharing, each.gib)):
        lines.setdefault((called(cell), cell.sharing), []).append(cell)
    series = [
        Series(
            name=who if len(rules) == 1 else f"{who}, {rule}",
            x=[cell.gib for cell in line],
            y=[value_or_gap(value(cell)) for cell in line],
            color=LINE_COLORS[policies.index(line[0].eviction) % len(LINE_COLORS)],
            # One hue per policy; of two ways to share one is dashed, and so are the
            # ends: what nobody can have, and LRU where all else is hinted.
            is_dashed=who == BEST or who != line[0].eviction or rule != rules[0],
            has_points=True,
        )
        for (who, rule), line in lines.items()
    ]
    return line_chart(
        title=title,
        x=gib_axis(sorted({cell.gib for cell in cells})),
        y=Axis(title="of the gap", is_share=True),
        series=series,
        columns=("policy", "GiB", "gap closed %"),
        rows=[
            (line.name, gib, per_cent(share))
            for line in series
            for gib, share in zip(line.x, line.y, strict=True)
            if math.isfinite(share)
        ],
        note=note,
        label=label,
    )


def _alike(cells: Sequence[SweepCell]) -> str:
    """Return which policies did the same, so that one hides another, or nothing."""
    called = _titles(cells)
    lines: dict[str, list[tuple[float, str, float]]] = {}
    for cell in cells:
        point = cell.gib, cell.sharing, cell.hit_rate
        lines.setdefault(called(cell), []).append(point)
    same: dict[tuple[tuple[float, str, float], ...], list[str]] = {}
    for eviction, line in sorted(lines.items()):
        same.setdefault(tuple(sorted(line)), []).append(eviction)
    texts = [" and ".join(each) for each in same.values() if len(each) > 1]
    return "".join(f" {text} do the same." for text in texts)


def _bars(cells: Sequence[SweepCell], lru: str) -> Chart:
    called = _titles(cells)
    ordered = sorted(cells, key=lambda cell: (-(cell.token_gap or 0), called(cell)))
    rules = {cell.sharing for cell in cells}
    return bar_chart(
        title=f"Gap closed between LRU and clairvoyant with {memory(cells[0].gib * GIB)}",
        names=[
            called(cell) if len(rules) == 1 else f"{called(cell)}, {cell.sharing}"
            for cell in ordered
        ],
        bands=[
            Band(
                name="in tokens, %",
                values=[per_cent(value_or_gap(cell.token_gap)) for cell in ordered],
                color="var(--line-1)",
            ),
            Band(
                name="in seconds, %",
                values=[per_cent(value_or_gap(cell.seconds_gap)) for cell in ordered],
                color="var(--line-2)",
            ),
        ],
        x=Axis(title="% of the gap"),
        is_stacked=False,
        note=f"{lru} is 0 and a policy that knows the future 100. Requests one after "
        f"another.{_alike(cells)}",
        label="estimated",
    )
