"""Hit rate and saved seconds against memory.

Owns the two charts that replays and sweeps have in common. Knows nothing of how a curve
was computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from stemkv.measure.results import CapacityCurve
from stemkv.report.chart import LINE_COLORS, Axis, Mark, Series, line_chart
from stemkv.report.page import Chart
from stemkv.report.wording import per_cent

__all__ = ["capacity_charts", "gib_axis", "hit_rate_at"]


def hit_rate_at(curve: CapacityCurve, gib: float) -> float | None:
    """Return a curve's hit rate at a size, between points linearly; `None` outside."""
    ordered = sorted(curve.points, key=lambda point: point.gib)
    for low, high in pairwise(ordered):
        if low.gib <= gib <= high.gib and low.gib < high.gib:
            weight = (gib - low.gib) / (high.gib - low.gib)
            return low.hit_rate + weight * (high.hit_rate - low.hit_rate)
    at = [p.hit_rate for p in ordered if math.isclose(p.gib, gib, rel_tol=1e-9)]
    return at[0] if at else None


def capacity_charts(
    curves: Sequence[CapacityCurve],
    *,
    own: Mark | None,
    hit_label: str,
    saved_label: str,
) -> list[Chart]:
    """Return hit rate and saved seconds against memory, where there are curves."""
    shown = [curve for curve in curves if curve.points]
    if not shown:
        return []
    notes = [f"{c.name}: {c.note.rstrip('.')}." for c in shown if c.note]
    note = " ".join(
        [
            "Requests in order of arrival, without a clock, for every size of cache.",
            *notes,
        ]
    )
    hits = {
        curve.name: [(p.gib, p.hit_rate) for p in curve.points if p.gib > 0]
        for curve in shown
    }
    charts = [
        line_chart(
            title="Hit rate by token against memory",
            x=gib_axis([g for line in hits.values() for g, _ in line]),
            y=Axis(title="prompt tokens reused", is_share=True),
            series=_curve_series(hits),
            mark=own,
            note=note,
            label=hit_label,
            columns=("line", "GiB", "blocks", "hit rate %"),
            rows=[
                (c.name, p.gib, p.num_blocks, per_cent(p.hit_rate))
                for c in shown
                for p in c.points
            ],
        )
    ]
    saved = {
        curve.name: [
            (p.gib, p.saved_s)
            for p in curve.points
            if p.gib > 0 and p.saved_s is not None
        ]
        for curve in shown
    }
    saved = {name: line for name, line in saved.items() if line}
    if saved:
        charts.append(
            line_chart(
                title="Saved prefill against memory",
                x=gib_axis([g for line in saved.values() for g, _ in line]),
                y=Axis(title="seconds of prefill saved"),
                series=_curve_series(saved),
                mark=own,
                note="The same replays: what the reused tokens would have taken.",
                label=saved_label,
                columns=("line", "GiB", "saved s"),
                rows=[(name, *point) for name, line in saved.items() for point in line],
            )
        )
    return charts


def gib_axis(sizes: Sequence[float]) -> Axis:
    """Return an axis of memory, logarithmic for sizes (all above 0) that differ a lot."""
    is_log = bool(sizes) and max(sizes) > 8 * min(sizes)
    return Axis(title="GiB of KV memory", is_log=is_log)


def _curve_series(lines: Mapping[str, Sequence[tuple[float, float]]]) -> list[Series]:
    """Return lines in colours; a bound has the colour of what it bounds, dashed."""
    colors: dict[str, str] = {}
    series = []
    for name, line in lines.items():
        bounded = name.removeprefix("clairvoyant, ")
        if bounded not in colors:
            colors[bounded] = LINE_COLORS[len(colors) % len(LINE_COLORS)]
        ordered = sorted(line)
        series.append(
            Series(
                name=name,
                x=[gib for gib, _ in ordered],
                y=[value for _, value in ordered],
                color=colors[bounded],
                is_dashed=name.startswith("clairvoyant"),
                has_points=len(ordered) <= 24,
            )
        )
    return series
