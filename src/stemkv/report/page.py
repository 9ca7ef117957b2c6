"""A page of sentences, tables and charts: no network, light and dark, for phones too.

Owns escaping and style. Every text that gets here is data and is escaped, and so is
what it has that cannot be seen. Knows nothing
of what a chart shows (see `chart`) or of what draws it (see `script`).
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from stemkv.errors import InvariantError
from stemkv.measure.results import Check
from stemkv.report.script import content_policy, script_elements
from stemkv.report.wording import NO_DATA, number, visible

__all__ = ["Cell", "Chart", "Fact", "Key", "Page", "Section"]

Cell = str | int | float | None

_TONES = {"holds", "broken", "inconclusive"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with a table below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    label: str = ""  # "exact", "measured", "estimated", or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One entry of a legend."""

    name: str
    color: str  # a variable of `page.css`, such as "var(--reused)"
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A heading with a picture below it, and the picture's numbers as a folded table.

    Builders are in `chart`. Texts in `figure` must be escaped already: plotly reads
    tags in them.
    """

    title: str
    figure: Mapping[str, Any]  # plotly's "data" and "layout", as plain data
    height: int  # CSS pixels
    legend: Sequence[Key] = ()  # one per trace in their order, or none
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    label: str = ""  # "exact", "measured", "estimated", or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number in large type."""

    name: str
    value: str  # with its unit
    label: str = ""  # "exact", "measured", "estimated", or nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One document. A cell that reads holds, broken or inconclusive is coloured.

    Raises:
        InvariantError: A check does not hold; numbers that do not add up are not shown.
    """

    title: str
    headline: str
    sections: Sequence[Section | Chart]
    paragraphs: Sequence[str] = ()  # below the headline
    facts: Sequence[Fact] = ()  # below the paragraphs
    method: Mapping[str, Cell] = field(default_factory=dict)  # setting → value
    checks: Sequence[Check] = ()

    def __post_init__(self) -> None:
        broken = [check for check in self.checks if not check.holds]
        if broken:
            sides = "; ".join(f"{c.name}: {c.left!r} ≠ {c.right!r}" for c in broken)
            raise InvariantError(
                f"{len(broken)} of {len(self.checks)} checks of {self.title!r} fail, "
                f"so it is not drawn: {sides}; this is a defect of StemKV, report it"
            )

    def render(self) -> str:
        """Return the whole HTML document; equal pages give equal bytes."""
        charts = [each for each in self.sections if isinstance(each, Chart)]
        title = _text(self.title)
        policy = html.escape(content_policy(has_charts=bool(charts)))
        parts = [
            f"<h1>{title}</h1>",
            f'<p class="headline">{_text(self.headline)}</p>',
            *(f"<p>{_text(text)}</p>" for text in self.paragraphs),
            _facts(self.facts),
            *self._sections(),
            self._method(),
            self._checks(),
            script_elements([each.figure for each in charts]) if charts else "",
        ]
        body = "\n".join(filter(None, parts))
        return (
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{_style()}</style>\n</head>\n<body>\n"
            f"{body}\n</body>\n</html>\n"
        )

    def _sections(self) -> list[str]:
        parts = []
        num_charts = 0
        for each in self.sections:
            if isinstance(each, Chart):
                parts.append(_chart(each, num_charts))
                num_charts += 1
            else:
                parts.append(_section(each))
        return parts

    def _method(self) -> str:
        if not self.method:
            return ""
        rows = list(self.method.items())
        return _section(Section(title="Method", columns=("what", "value"), rows=rows))

    def _checks(self) -> str:
        if not self.checks:
            return ""
        table = _table(
            ("equation", "left", "right", "verdict"),
            [(c.name, c.left, c.right, "holds") for c in self.checks],
        )
        return f"<h2>Checks</h2>\n{_folded(f'all {len(self.checks)} hold', table)}"


def _text(text: str) -> str:
    return html.escape(visible(text))


def _facts(facts: Sequence[Fact]) -> str:
    if not facts:
        return ""
    boxes = "\n".join(
        f"<div><dt>{_text(fact.name)}</dt><dd>{_text(fact.value)}</dd>"
        f"{_label(fact.label, tag='dd')}</div>"
        for fact in facts
    )
    return f'<dl class="facts">\n{boxes}\n</dl>'


def _section(section: Section) -> str:
    return f"{_heading(section)}\n{_table(section.columns, section.rows)}"


def _chart(chart: Chart, index: int) -> str:
    numbers = _table(chart.columns, chart.rows)
    return (
        f"<section>{_heading(chart)}\n"
        f'<div class="chart" id="chart-{index}" style="min-height:{chart.height}px">'
        f"<p>A chart is drawn here by a browser of 2023 or later that runs scripts. "
        f"Its numbers are below.</p></div>\n"
        f"{_legend(chart.legend)}{_folded('the numbers', numbers)}</section>"
    )


def _legend(legend: Sequence[Key]) -> str:
    if not legend:
        return ""
    keys = "".join(
        f'<li><button aria-pressed="true">{_swatch(key)}{_text(key.name)}</button>'
        for key in legend
    )
    return f'<ul class="legend">{keys}</ul>\n'


def _swatch(key: Key) -> str:
    color = html.escape(key.color)
    if key.is_dashed:
        return f'<i class="dashed" style="border-color:{color}"></i>'
    return f'<i style="background:{color}"></i>'


def _heading(part: Section | Chart) -> str:
    note = f'<p class="note">{_text(part.note)}</p>' if part.note else ""
    return f"<h2>{_text(part.title)}{_label(part.label)}</h2>{note}"


def _label(label: str, tag: str = "span") -> str:
    return f' <{tag} class="label">{_text(label)}</{tag}>' if label else ""


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{_text(summary)}</summary>{content}</details>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    numeric = [
        _is_numeric([row[index] for row in rows]) for index in range(len(columns))
    ]
    head = "".join(
        f"<th{_class('number' if is_numeric else '')}>{_text(column)}</th>"
        for column, is_numeric in zip(columns, numeric, strict=True)
    )
    body = "\n".join(f"<tr>{_cells(row, numeric)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def _is_numeric(cells: Sequence[Cell]) -> bool:
    """Return whether a column is of numbers, which are easier compared flush right."""
    numbers = [cell for cell in cells if isinstance(cell, int | float)]
    words = [cell for cell in cells if isinstance(cell, str) and cell != NO_DATA]
    return bool(numbers) and not words


def _cells(row: Sequence[Cell], numeric: Sequence[bool]) -> str:
    return "".join(
        _cell(cell, is_numeric=is_numeric)
        for cell, is_numeric in zip(row, numeric, strict=True)
    )


def _cell(cell: Cell, *, is_numeric: bool) -> str:
    if isinstance(cell, str):
        text, tone = _text(cell), cell if cell in _TONES else ""
    else:
        text, tone = "" if cell is None else _number(cell), ""
    return f"<td{_class('number' if is_numeric else tone)}>{text}</td>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def _number(value: int | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return NO_DATA if math.isnan(value) else number(value, digits=4)


@cache
def _style() -> str:
    return files("stemkv.report").joinpath("page.css").read_text(encoding="utf-8")
