"""What all charts have in common: axes, margins, colours, texts.

Owns what plotly is told about a figure apart from its data. Colours are names of
variables of `page.css`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stemkv.report.wording import short, visible

__all__ = [
    "MAX_NAME",
    "Axis",
    "Mark",
    "axis_of",
    "layout_of",
    "marked",
    "named_rows",
    "plain",
    "plain_axis",
]

MAX_NAME = 26  # characters of a name beside a bar; a phone has room for no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """What one direction means."""

    title: str  # with its unit
    is_log: bool = False
    is_share: bool = False  # values in [0, 1], written as percentages


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A vertical line at a place of its own."""

    x: float
    text: str


def plain(text: str) -> str:
    """Return text that plotly shows as it is: it would make links of tags."""
    return html.escape(visible(" ".join(text.split())), quote=False)


def layout_of(height: int) -> dict[str, Any]:
    """Return what all charts have in common."""
    return {
        "height": height,
        "margin": {"l": 8, "r": 20, "t": 22, "b": 44},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "var(--ink)"},
        "hovermode": "x unified",
        "hoverlabel": {
            "bgcolor": "var(--soft)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--ink)", "size": 12},
            "namelength": 40,
        },
        "showlegend": False,  # the page has one that wraps
        "modebar": {
            "bgcolor": "rgba(0,0,0,0)",
            "color": "var(--faint)",
            "activecolor": "var(--ink)",
        },
        "xaxis": plain_axis(),
        "yaxis": plain_axis(),
    }


def plain_axis() -> dict[str, Any]:
    """Return the look of an axis that says nothing yet."""
    return {
        "automargin": True,
        "gridcolor": "var(--line)",
        "linecolor": "var(--line)",
        "zerolinecolor": "var(--line)",
        "tickfont": {"size": 12},
    }


def axis_of(axis: Axis, values: Sequence[float]) -> dict[str, Any]:
    """Return plotly's form of an axis; a logarithmic one has ticks around `values`.

    Shares without values reach from 0 to 1.
    """
    result: dict[str, Any] = {"title": {"text": plain(axis.title), "standoff": 8}}
    if axis.is_share:
        result |= {"tickformat": ".0%", "hoverformat": ".1%", "rangemode": "tozero"}
        if not values:
            result["range"] = [0, 1]
    if axis.is_log:
        ticks = _log_ticks([value for value in values if value > 0])
        result |= {"type": "log", "tickvals": ticks, "hoverformat": ".4~g"}
        result["ticktext"] = [f"{tick:g}" for tick in ticks]
    return result


def _log_ticks(values: Sequence[float]) -> list[float]:
    """Return 1, 2, 5, 10 … over the values; only powers of ten if that is too many."""
    if not values:
        return []
    low, high = min(values), max(values)
    steps = (1, 2, 5) if high <= low * 2000 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [float(f"{step}e{power}") for power in powers for step in steps]
    # One beyond either end: the axis is a little longer than the values.
    return [tick for tick in ticks if low / 2.5 <= tick <= high * 2.5]


def named_rows(names: Sequence[str]) -> dict[str, Any]:
    """Return an axis of names, the first on top, at places 0, 1, 2 and so on."""
    # By position and not by name: plotly would read names like 2024-01-01 or 7 as
    # dates and numbers, and two names that are cut to one would share a bar.
    return {
        "tickvals": list(range(len(names))),
        "ticktext": [plain(short(name, MAX_NAME)) for name in names],
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
        "zeroline": False,
    }


def marked(mark: Mark, *, is_log: bool) -> dict[str, Any]:
    """Return the part of a layout that draws a mark over the whole height."""
    # Annotations on a logarithmic axis are placed by the exponent, shapes by value.
    place = math.log10(mark.x) if is_log else mark.x
    return {
        "shapes": [
            {
                "type": "line",
                "x0": mark.x,
                "x1": mark.x,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": {"color": "var(--mark)", "width": 1.5, "dash": "dot"},
            }
        ],
        "annotations": [
            {
                "x": place,
                "y": 1,
                "yref": "paper",
                "yanchor": "bottom",
                "showarrow": False,
                "text": plain(mark.text),
                "font": {"color": "var(--mark)", "size": 12},
            }
        ],
    }
