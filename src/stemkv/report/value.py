"""The pages of `stemkv value` and `stemkv demo`, from sentences and tables made there.

Owns their titles and the demo's picture. The sentences are their callers'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stemkv.report.chart import Axis, Band, bar_chart
from stemkv.report.page import Cell, Chart, Page, Section
from stemkv.report.wording import memory, number, seconds

__all__ = ["DemoRow", "demo_page", "value_page"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """One number without and with reuse."""

    name: str
    off: float
    on: float
    unit: str  # "s", "bytes", "count" or "rate" (per second)


def value_page(
    *,
    headline: str,
    paragraphs: Sequence[str],
    sections: Sequence[Section | Chart],
    config: Mapping[str, Cell],
) -> Page:
    """Return the page that says what retained bytes are worth."""
    return Page(
        title="StemKV value: what retained KV is worth",
        headline=headline,
        paragraphs=paragraphs,
        sections=sections,
        method=config,
    )


def demo_page(
    *,
    headline: str,
    paragraphs: Sequence[str],
    rows: Sequence[DemoRow],
    config: Mapping[str, Cell],
) -> Page:
    """Return the page that compares the same requests without and with reuse."""
    table = Section(
        title="The same requests, without and with reuse",
        columns=("", "reuse off", "reuse on", "off / on"),
        rows=[
            (row.name, _shown(row.off, row.unit), _shown(row.on, row.unit), _ratio(row))
            for row in rows
        ],
        note="Seconds and rates are measured, counts and bytes are exact.",
    )
    timed = [row for row in rows if row.unit == "s"]
    sections: list[Section | Chart] = [table]
    if timed:
        sections.insert(
            0,
            bar_chart(
                title="Seconds without and with reuse",
                names=[row.name for row in timed],
                bands=[
                    Band(
                        name="reuse off",
                        values=[row.off for row in timed],
                        color="var(--computed)",
                    ),
                    Band(
                        name="reuse on",
                        values=[row.on for row in timed],
                        color="var(--reused)",
                    ),
                ],
                x=Axis(title="seconds"),
                is_stacked=False,
                label="measured",
            ),
        )
    return Page(
        title="StemKV demo",
        headline=headline,
        paragraphs=paragraphs,
        sections=sections,
        method=config,
    )


def _ratio(row: DemoRow) -> float | None:
    return round(row.off / row.on, 2) if row.off and row.on else None


def _shown(value: float, unit: str) -> str:
    match unit:
        case "s":
            return seconds(value)
        case "bytes":
            return memory(value)
        case "count":
            return f"{value:,.0f}"
        case _:
            return number(value)
