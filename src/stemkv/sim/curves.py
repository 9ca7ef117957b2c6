"""What memory and knowledge of the future would change: curves and bounds of a trace.

Owns which lines a report shows, at which sizes, and the sentence that says what each
bound bounds. Requests go one after another in order of arrival, without a clock. The
arithmetic is in `distance` and `bounds`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stemkv.core.books.cost import CostModel
from stemkv.errors import ConfigError
from stemkv.measure.results import (
    GIB,
    Bound,
    CapacityCurve,
    CurvePoint,
    ReplayResult,
)
from stemkv.sim.bounds import clairvoyant, clairvoyant_selective, infinite
from stemkv.sim.distance import LruCurve, lru_curve
from stemkv.sim.hits import Hits
from stemkv.sim.reuse import Reuses, find_reuses
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace

__all__ = ["Study", "lru_curves", "study", "units_in", "with_study"]

_NUM_POINTS = 24
_POINTS_PER_CLAIRVOYANT = 3  # each of its points is a pass of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The lines and limits that stand beside a replay."""

    curves: tuple[CapacityCurve, ...]
    bounds: tuple[Bound, ...]


def study(
    trace: Trace,
    rule: SharingRule,
    costs: CostModel,
    *,
    num_blocks: int,
    block_size: int,
    num_replicas: int = 1,
) -> Study:
    """Return LRU under every rule of interest, and what cannot be exceeded.

    Lines are of one cache that serves all requests. They go from the longest prompt,
    which any deployment must hold, to where more memory changes nothing, and have a
    point at `num_blocks`. Replicas are bounded by one cache as large as all of theirs.
    Prompts that are not known reuse nothing here, which the notes say; if none is known
    there is nothing to draw.
    O(units) per rule, and a few passes more for the clairvoyant line.
    """
    if _is_opaque(trace):
        return Study(curves=(), bounds=())
    scale = _Scale(trace, costs, block_size)
    found = {each.name: find_reuses(trace, each) for each in _rules(trace, rule)}
    lines = {name: lru_curve(reuses, cost=costs) for name, reuses in found.items()}
    longest = scale.blocks(max(1, lines[rule.name].longest_request))
    enough = max(scale.blocks(line.num_blocks_for_all) for line in lines.values())
    sizes = _spaced(min(num_blocks, longest), max(num_blocks, longest, enough))
    sizes = sorted({*sizes, num_blocks})
    # Smaller ones can't keep a whole prompt, as this bound does.
    large = [size for size in sizes if size >= longest]
    some = {*large[::_POINTS_PER_CLAIRVOYANT], large[-1], max(num_blocks, longest)}
    best = scale.clairvoyant_line(rule.name, found[rule.name], sorted(some))
    return Study(
        curves=(
            *(scale.lru_line(name, line, sizes) for name, line in lines.items()),
            best,
        ),
        bounds=tuple(
            dataclasses.replace(bound, note=bound.note + scale.of_bound)
            for bound in _bounds(
                found, rule.name, scale, num_blocks * num_replicas, longest=longest
            )
        ),
    )


def with_study(result: ReplayResult, found: Study) -> ReplayResult:
    """Return the result with these curves and bounds beside it."""
    return dataclasses.replace(result, curves=found.curves, bounds=found.bounds)


def lru_curves(
    trace: Trace,
    rules: Iterable[SharingRule],
    costs: CostModel,
    *,
    sizes: Sequence[int],
    block_size: int,
) -> tuple[CapacityCurve, ...]:
    """Return LRU under each rule from the smallest to the largest of `sizes` (blocks).

    Nothing if no prompt is known.
    """
    if _is_opaque(trace):
        return ()
    scale = _Scale(trace, costs, block_size)
    between = sorted({*_spaced(min(sizes), max(sizes)), *sizes})
    return tuple(
        scale.lru_line(
            rule.name, lru_curve(find_reuses(trace, rule), cost=costs), between
        )
        for rule in rules
    )


def units_in(trace: Trace, num_blocks: int, block_size: int) -> int:
    """Return how many whole units of a trace fit into so many blocks; at least 1."""
    num_units = num_blocks * block_size // trace.unit_size
    if num_units < 1:
        raise ConfigError(
            f"{num_blocks} blocks of {block_size} tokens hold less than one unit of the "
            f"trace, which has {trace.unit_size} tokens; give more memory"
        )
    return num_units


def _num_opaque(trace: Trace) -> int:
    return sum(request.is_opaque for request in trace.requests)


def _is_opaque(trace: Trace) -> bool:
    return 0 < len(trace.requests) == _num_opaque(trace)


def _caveats(trace: Trace) -> tuple[str, str]:
    """Return what the notes of curves and of bounds must add."""
    num_opaque = _num_opaque(trace)
    if not num_opaque:
        return "", ""
    unknown = f"{num_opaque:,} of {len(trace.requests):,} prompts are not known"
    return (
        f"; a lower bound, as {unknown}",
        f"; {unknown} and count as sharing nothing: with them it could be more",
    )


def _rules(trace: Trace, rule: SharingRule) -> list[SharingRule]:
    """Return the rules worth a line: with one tenant all are the same."""
    if len(trace.tenants()) < 2:
        return [rule]
    compared = [SharingRule(name="shared"), SharingRule(name="isolated")]
    return compared if rule in compared else [*compared, rule]


def _spaced(low: int, high: int) -> list[int]:
    """Return sizes with about one ratio between neighbours."""
    step = (high / low) ** (1 / (_NUM_POINTS - 1))
    return [round(low * step**index) for index in range(_NUM_POINTS)]


class _Scale:
    """Blocks of a deployment, units of a trace, and bytes."""

    def __init__(self, trace: Trace, costs: CostModel, block_size: int) -> None:
        self._unit_size = trace.unit_size
        self._block_size = block_size
        self._block_bytes = block_size * costs.bytes_per_token
        self._costs = costs
        self._of_curve, self.of_bound = _caveats(trace)

    def units(self, num_blocks: int) -> int:
        return num_blocks * self._block_size // self._unit_size

    def gib(self, num_blocks: int) -> float:
        return num_blocks * self._block_bytes / GIB

    def blocks(self, num_units: int) -> int:
        """Return how many blocks so many units fill."""
        return -(-num_units * self._unit_size // self._block_size)

    def lru_line(
        self, name: str, line: LruCurve, sizes: Sequence[int]
    ) -> CapacityCurve:
        exact_from = self.blocks(line.longest_request)
        return CapacityCurve(
            name=name,
            points=tuple(
                self._point(size, line.at(self.units(size))) for size in sizes
            ),
            note=(
                f"LRU; below {self.gib(exact_from):.3g} GiB, the longest prompt, an "
                f"estimate"
                if sizes[0] < exact_from
                else "LRU"
            )
            + self._of_curve,
        )

    def clairvoyant_line(
        self, name: str, reuses: Reuses, sizes: Sequence[int]
    ) -> CapacityCurve:
        return CapacityCurve(
            name=f"clairvoyant, {name}",
            points=tuple(
                self._point(
                    size, clairvoyant(reuses, self.units(size), cost=self._costs)
                )
                for size in sizes
            ),
            note="evicts what is needed again last; nobody can know that in time"
            + self._of_curve,
        )

    def _point(self, size: int, hits: Hits) -> CurvePoint:
        return CurvePoint(
            num_blocks=size,
            gib=self.gib(size),
            hit_rate=hits.hit_rate,
            saved_s=hits.saved_s,
        )


def _bounds(
    found: dict[str, Reuses], rule: str, scale: _Scale, num_blocks: int, *, longest: int
) -> Iterable[Bound]:
    own = found[rule]
    where = f"{rule}, {scale.gib(num_blocks):.3g} GiB"
    yield Bound(
        name=f"unlimited cache, {rule}",
        hit_rate=infinite(own).hit_rate,
        note="no policy and no amount of memory reuses more under this sharing rule",
    )
    if rule != "shared" and "shared" in found:
        yield Bound(
            name="unlimited cache, shared",
            hit_rate=infinite(found["shared"]).hit_rate,
            note="the same if all tenants shared everything; the rest is new text",
        )
    in_order = "with requests one after another in order of arrival"
    yield Bound(
        name=f"clairvoyant that may leave blocks out, {where}",
        hit_rate=clairvoyant_selective(own, scale.units(num_blocks)).hit_rate,
        note=f"no policy with this memory reuses more blocks, {in_order}",
    )
    if num_blocks >= longest:
        yield Bound(
            name=f"clairvoyant, {where}",
            hit_rate=clairvoyant(own, scale.units(num_blocks)).hit_rate,
            note=(
                f"no eviction policy reuses more blocks where a prompt is kept whole "
                f"while it runs, {in_order}; says nothing of seconds"
            ),
        )
