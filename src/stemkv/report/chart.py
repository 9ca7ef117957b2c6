"""Charts as plotly figures: lines, stacked bars, a heat map, spans of time.

Owns their forms and the table of numbers that goes with each; what they have in common
is in `look`. Knows nothing of what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stemkv.report.look import (
    MAX_NAME,
    Axis,
    Mark,
    axis_of,
    layout_of,
    marked,
    named_rows,
    plain,
    plain_axis,
)
from stemkv.report.page import Cell, Chart, Key
from stemkv.report.wording import number, short, tokens

__all__ = [
    "LINE_COLORS",
    "Area",
    "Axis",
    "Band",
    "Mark",
    "Series",
    "Span",
    "area_chart",
    "bar_chart",
    "heat_map",
    "line_chart",
    "span_chart",
    "thinned",
    "value_or_gap",
]

LINE_COLORS = tuple(f"var(--line-{n})" for n in range(1, 9))

_ROW_HEIGHT = 30  # CSS pixels
_HEIGHT = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line. Where `y` is NaN the line has a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    is_dashed: bool = False
    has_points: bool = False  # each value gets a dot
    is_stepped: bool = False  # a value holds until the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """One part of every stacked bar."""

    name: str
    values: Sequence[float]  # one per bar
    color: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """Series stacked on each other, or beside each other as lines, on an axis."""

    series: Sequence[Series]
    title: str  # of its vertical axis, with its unit
    share: float = 1.0  # of the chart's height, relative to the other areas
    is_stacked: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time in a row."""

    row: int
    start: float
    end: float
    phase: str  # one colour each
    text: str


def value_or_gap(value: float | None) -> float:
    """Return what a chart leaves a gap for where there is no value."""
    return math.nan if value is None else value


def line_chart(
    *,
    title: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    mark: Mark | None = None,
    columns: Sequence[str] = (),
    rows: Sequence[Sequence[Cell]] = (),
    note: str = "",
    label: str = "",
) -> Chart:
    """Return a chart of lines; without `rows` the table has every point."""
    data = [_line(each) for each in series]
    places = [v for each in series for v in each.x if not x.is_log or v > 0]
    layout = layout_of(_HEIGHT)
    layout["xaxis"] |= axis_of(x, places + ([mark.x] if mark else []))
    layout["yaxis"] |= axis_of(y, [v for each in series for v in each.y])
    layout["yaxis"]["rangemode"] = "tozero"  # half as high has to look half as high
    if mark is not None:
        layout |= marked(mark, is_log=x.is_log)
    if not rows:
        columns = ("line", x.title, y.title)
        rows = [
            (each.name, *point)
            for each in series
            for point in zip(each.x, each.y, strict=True)
        ]
    return Chart(
        title=title,
        figure={"data": data, "layout": layout},
        height=layout["height"],
        legend=_keys(series),
        columns=columns,
        rows=rows,
        note=note,
        label=label,
    )


def bar_chart(
    *,
    title: str,
    names: Sequence[str],
    bands: Sequence[Band],
    x: Axis,
    is_stacked: bool = True,
    columns: Sequence[str] = (),
    rows: Sequence[Sequence[Cell]] = (),
    note: str = "",
    label: str = "",
) -> Chart:
    """Return a chart of horizontal bars, the first on top.

    Bands that are not stacked stand below each other, and each bar has its number.
    """
    height = 60 + _ROW_HEIGHT * len(names) * (1 if is_stacked else len(bands))
    layout = layout_of(height)
    layout["barmode"] = "stack" if is_stacked else "group"
    layout["hovermode"] = "closest"
    layout["xaxis"] |= axis_of(x, [])
    layout["yaxis"] |= named_rows(names)
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plain(band.name),
            "x": [value if math.isfinite(value) else 0 for value in band.values],
            "y": list(range(len(names))),
            "marker": {"color": band.color, "line": {"width": 0}},
            "hovertemplate": "%{x}<extra>%{fullData.name}</extra>",
        }
        for band in bands
    ]
    layout["bargap"] = 0.3
    if not is_stacked or len(bands) == 1:
        for trace, band in zip(data, bands, strict=True):
            trace["text"] = [number(value) for value in band.values]
            trace["textangle"] = 0
            # Beside a bar without length: what is infinite is not drawn long.
            trace["textposition"] = [
                "auto" if value and math.isfinite(value) else "outside"
                for value in band.values
            ]
    if not rows:
        columns = ("", *(band.name for band in bands))
        rows = [
            (name, *(band.values[index] for band in bands))
            for index, name in enumerate(names)
        ]
    return Chart(
        title=title,
        figure={"data": data, "layout": layout},
        height=layout["height"],
        legend=[Key(name=band.name, color=band.color) for band in bands]
        if len(bands) > 1
        else (),
        columns=columns,
        rows=rows,
        note=note,
        label=label,
    )


def heat_map(
    *,
    title: str,
    names: Sequence[str],
    values: Sequence[Sequence[int]],
    x_title: str,
    y_title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    note: str = "",
    label: str = "",
) -> Chart:
    """Return a square of cells, `values[row][column]`; a zero stays empty.

    Colours follow the logarithm: a tenant that is a hundred times larger than the rest
    would leave them all in one colour.
    """
    places = list(range(len(names)))
    layout = layout_of(190 + _ROW_HEIGHT * len(names))
    layout["hovermode"] = "closest"
    layout["xaxis"] |= named_rows(names) | {
        "title": {"text": plain(x_title), "standoff": 8},
        "range": [-0.5, len(names) - 0.5],
        "tickangle": -40 if len(names) > 3 else 0,
        "ticktext": [plain(short(name, 14)) for name in names],
    }
    layout["yaxis"] |= named_rows(names) | {
        "title": {"text": plain(y_title), "standoff": 8},
        "ticktext": [plain(short(name, 14)) for name in names],
    }
    shown = [[tokens(value) if value else "" for value in row] for row in values]
    figure = {
        "type": "heatmap",
        "x": places,
        "y": places,
        "z": [[math.log10(value) if value else None for value in r] for r in values],
        # From 0: the smallest of the values is not nothing.
        "zmin": 0,
        "colorscale": [[0, "var(--heat-low)"], [1, "var(--heat-high)"]],
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
        "text": shown,
        "hovertemplate": "%{text} tokens<extra></extra>",
    }
    if len(names) <= 12:
        figure["texttemplate"] = "%{text}"
    return Chart(
        title=title,
        figure={"data": [figure], "layout": layout},
        height=layout["height"],
        columns=columns,
        rows=rows,
        note=note,
        label=label,
    )


def area_chart(
    *,
    title: str,
    x: Axis,
    areas: Sequence[Area],
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    note: str = "",
    label: str = "",
) -> Chart:
    """Return areas below each other over one horizontal axis, the first on top."""
    series = [each for area in areas for each in area.series]
    height = 240 + round(80 * sum(area.share for area in areas))
    layout = layout_of(height)
    layout["xaxis"] |= axis_of(x, [])
    data: list[dict[str, Any]] = []
    total = sum(area.share for area in areas)
    gap = 0.06 if len(areas) > 1 else 0.0
    top = 1.0
    for index, area in enumerate(areas, start=1):
        bottom = top - area.share / total * (1 - gap * (len(areas) - 1))
        number = "" if index == 1 else str(index)
        layout[f"yaxis{number}"] = (
            plain_axis()
            | axis_of(Axis(title=area.title), [])
            | {"domain": [max(0.0, bottom), top], "rangemode": "tozero"}
        )
        top = bottom - gap
        for each in area.series:
            trace = _line(each) | {"yaxis": f"y{number}"}
            if area.is_stacked:
                trace |= {"stackgroup": f"stack{index}", "fillcolor": each.color}
                trace["line"] = {**trace["line"], "width": 0}
            data.append(trace)
    # Drawn below the lowest area.
    lowest = "" if len(areas) == 1 else str(len(areas))
    layout["xaxis"]["anchor"] = f"y{lowest}"
    return Chart(
        title=title,
        figure={"data": data, "layout": layout},
        height=layout["height"],
        legend=_keys(series),
        columns=columns,
        rows=rows,
        note=note,
        label=label,
    )


def span_chart(
    *,
    title: str,
    x: Axis,
    y_title: str,
    row_names: Sequence[str],
    phases: Sequence[tuple[str, str]],
    spans: Sequence[Span],
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    note: str = "",
    label: str = "",
) -> Chart:
    """Return rows of spans, the first row on top; `phases` are (name, colour)."""
    layout = layout_of(110 + 9 * len(row_names))
    layout["barmode"] = "overlay"
    layout["hovermode"] = "closest"
    layout["xaxis"] |= axis_of(x, [])
    named = [(index, name) for index, name in enumerate(row_names) if name]
    layout["yaxis"] |= {
        "title": {"text": plain(y_title), "standoff": 8},
        "range": [len(row_names) - 0.3, -0.7],
        "tickvals": [index for index, _ in named],
        "ticktext": [plain(short(name, MAX_NAME)) for _, name in named],
        "showgrid": False,
        "zeroline": False,
    }
    data = []
    for phase, color in phases:
        own = [span for span in spans if span.phase == phase]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plain(phase),
                "y": [span.row for span in own],
                "base": [span.start for span in own],
                "x": [span.end - span.start for span in own],
                "width": 0.75,
                "marker": {"color": color, "line": {"width": 0}},
                "hovertext": [plain(span.text) for span in own],
                "hovertemplate": "%{hovertext}<extra>%{fullData.name}</extra>",
            }
        )
    return Chart(
        title=title,
        figure={"data": data, "layout": layout},
        height=layout["height"],
        legend=[Key(name=name, color=color) for name, color in phases],
        columns=columns,
        rows=rows,
        note=note,
        label=label,
    )


def thinned(length: int, limit: int) -> list[tuple[int, int]]:
    """Return at most `limit` half-open index ranges that cover `[0, length)` evenly."""
    num_groups = min(length, limit)
    return [
        (group * length // num_groups, (group + 1) * length // num_groups)
        for group in range(num_groups)
    ]


def _keys(series: Sequence[Series]) -> list[Key]:
    return [
        Key(name=each.name, color=each.color, is_dashed=each.is_dashed)
        for each in series
    ]


def _line(series: Series) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers" if series.has_points else "lines",
        "name": plain(short(series.name, 40)),
        "x": list(series.x),
        "y": list(series.y),
        "line": {
            "color": series.color,
            "width": 2.5,
            "dash": "dash" if series.is_dashed else "solid",
            "shape": "hv" if series.is_stepped else "linear",
        },
        "marker": {"color": series.color, "size": 6},
    }
