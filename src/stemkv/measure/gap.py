"""How far an eviction policy comes from LRU towards the one that knows the future.

Owns the definition: at one size and under one sharing rule, with requests one after
another,

    gap closed = (policy - LRU) / (clairvoyant - LRU)

in hit tokens and in saved seconds. LRU closes 0, the clairvoyant policy 1 by definition;
who does worse than LRU is below 0. Where hints are given, LRU is the one without any, so
that what hints are worth counts. The clairvoyant policy keeps the most blocks and not
the most seconds, as a deep token saves more than a first one: in seconds a policy may
exceed 1. Exact, but for what seconds are made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from stemkv.measure.results import SweepCell, SweepResult

__all__ = ["BASELINE", "BEST", "baseline_of", "compared", "with_gaps"]

BASELINE, BEST = "lru", "clairvoyant"

# Of prompt tokens. Where the two are closer than this, a share of what is between them
# says nothing of a policy.
_LEAST_GAP = 0.001


def with_gaps(cells: Iterable[SweepCell]) -> tuple[SweepCell, ...]:
    """Return the cells with their gaps, where both ends were replayed.

    All of one order of requests: cells without a clock.
    """
    cells = tuple(cells)
    groups: dict[tuple[int, str], list[SweepCell]] = {}
    for cell in cells:
        groups.setdefault((cell.num_blocks, cell.sharing), []).append(cell)
    ends = {key: (baseline_of(group), _best(group)) for key, group in groups.items()}
    return tuple(
        _with_gap(cell, *ends[cell.num_blocks, cell.sharing]) for cell in cells
    )


def compared(result: SweepResult) -> tuple[SweepCell, ...]:
    """Return the cells that compare eviction policies, none if there are no such.

    They are without a clock, and the clairvoyant policy is among them.
    """
    if result.clockless:
        return result.clockless
    has_best = any(cell.eviction == BEST for cell in result.cells)
    return result.cells if has_best else ()


def baseline_of(cells: Sequence[SweepCell]) -> SweepCell | None:
    """Return which of the cells of one size and rule is the lower end of the gap."""
    found = [cell for cell in cells if cell.eviction == BASELINE]
    return min(found, key=lambda cell: cell.is_hinted, default=None)


def _best(cells: Sequence[SweepCell]) -> SweepCell | None:
    return next((cell for cell in cells if cell.eviction == BEST), None)


def _with_gap(
    cell: SweepCell, low: SweepCell | None, high: SweepCell | None
) -> SweepCell:
    if low is None or high is None or high.hit_rate - low.hit_rate < _LEAST_GAP:
        return replace(cell, token_gap=None, seconds_gap=None)
    way, way_s = high.hit_rate - low.hit_rate, high.saved_s - low.saved_s
    return replace(
        cell,
        token_gap=(cell.hit_rate - low.hit_rate) / way,
        seconds_gap=(cell.saved_s - low.saved_s) / way_s if way_s > 0 else None,
    )
