"""How far an eviction policy comes from LRU towards the one that knows the future.

Owns the definition: at one size and under one sharing rule, with requests one after
another,

    gap closed = (policy - LRU) / (clairvoyant - LRU)

in hit tokens and in saved seconds. LRU closes 0, the clairvoyant policy 1 by definition;
who does worse than LRU is below 0. The clairvoyant policy keeps the most blocks and not
the most seconds, as a deep token saves more than a first one: in seconds a policy may
exceed 1. Exact, but for what seconds are made of.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stemkv.measure.results import SweepCell

__all__ = ["with_gaps"]

# Of prompt tokens. Where the two are closer than this, a share of what is between them
# says nothing of a policy.
_LEAST_GAP = 0.001


def with_gaps(
    cells: Iterable[SweepCell], *, baseline: str = "lru", best: str = "clairvoyant"
) -> tuple[SweepCell, ...]:
    """Return the cells with their gaps, where both ends were replayed.

    All of one order of requests: cells without a clock.
    """
    cells = tuple(cells)
    ends: dict[tuple[int, str], dict[str, SweepCell]] = {}
    for cell in cells:
        ends.setdefault((cell.num_blocks, cell.sharing), {})[cell.eviction] = cell
    found = []
    for cell in cells:
        group = ends[cell.num_blocks, cell.sharing]
        low, high = group.get(baseline), group.get(best)
        if low is None or high is None or high.hit_rate - low.hit_rate < _LEAST_GAP:
            found.append(replace(cell, token_gap=None, seconds_gap=None))
            continue
        way_s = high.saved_s - low.saved_s
        found.append(
            replace(
                cell,
                token_gap=(cell.hit_rate - low.hit_rate)
                / (high.hit_rate - low.hit_rate),
                seconds_gap=(cell.saved_s - low.saved_s) / way_s if way_s > 0 else None,
            )
        )
    return tuple(found)
