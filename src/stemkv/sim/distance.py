"""The hit rate of an LRU cache at every capacity, from one pass over a trace.

Owns stack distances on the prefix tree. Knows no cache: what it says is what a replay
through `PrefixCache` with `Lru` finds, one request at a time.

After Mattson et al., "Evaluation techniques for storage hierarchies" (IBM Systems
Journal 9(2), 1970): under LRU a cache holds the most recently used units, as many as
fit, so a unit is found by exactly the caches that are at least as large as its place in
the order of last use. A request touches its units last to first, which makes the first
the most recent: that is the order of an eviction that takes tails first. So a place is
the number of units touched by later requests, and of units before it on its own path.
`reuse.Run` gives that for a run of units at once: one sum over requests, in a Fenwick
tree, and places that go up by one.

A replay differs below `LruCurve.longest_request` blocks only: it does not insert a
request that is longer than the cache, while the curve lets it push out everything but
its own leading units. From there on both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stemkv.core.books.cost import CostModel
from stemkv.sim.hits import HitCounter, Hits, hit_tokens, steady_start
from stemkv.sim.reuse import Reuses
from stemkv.sim.trace import TraceRequest

__all__ = ["LruCurve", "lru_curve"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LruCurve:
    """Hits of LRU at every capacity; index `c` of an array is a cache of `c` blocks."""

    longest_request: int  # units; exact from this capacity on
    num_requests: int
    no_hits: Hits  # at capacity 0: what does not depend on it
    units: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    steady_tokens: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64] | None

    @property
    def num_blocks_for_all(self) -> int:
        """Smallest capacity with the hits of an unlimited cache."""
        return len(self.units) - 1

    def at(self, num_blocks: int) -> Hits:
        """Return the hits of a cache of `num_blocks`; O(1)."""
        index = min(num_blocks, self.num_blocks_for_all)
        return Hits(
            num_blocks=num_blocks,
            input_tokens=self.no_hits.input_tokens,
            hit_tokens=int(self.tokens[index]),
            hit_units=int(self.units[index]),
            steady_input_tokens=self.no_hits.steady_input_tokens,
            steady_hit_tokens=int(self.steady_tokens[index]),
            saved_s=None if self.seconds is None else float(self.seconds[index]),
        )


def lru_curve(reuses: Reuses, *, cost: CostModel | None = None) -> LruCurve:
    """Return hits at every capacity; O(units + runs · log requests)."""
    trace = reuses.trace
    size = reuses.num_distinct + 1
    units = np.zeros(size, np.int64)
    tokens = np.zeros(size, np.int64)
    steady_tokens = np.zeros(size, np.int64)
    seconds = None if cost is None else np.zeros(size)
    prices = _Prices(cost, trace.unit_size) if cost is not None else None
    steady = steady_start(len(trace.requests))
    # How many units request `i` was the last to touch; the sum over all is `resident`.
    touched_last = _Sums(len(trace.requests))
    resident = 0
    for index, (request, runs) in enumerate(
        zip(trace.requests, reuses.runs, strict=True)
    ):
        for run in runs:
            place = resident - touched_last.up_to(run.last) + 1
            places = slice(place, place + run.end - run.start)
            weights = _weights(request, run.start, run.end, trace.unit_size)
            units[places] += 1
            tokens[places] += weights
            if index >= steady:
                steady_tokens[places] += weights
            if seconds is not None and prices is not None:
                seconds[places] += prices.of(request, run.start, run.end)
        for run in runs:
            touched_last.add(run.last, run.start - run.end)
            resident -= run.end - run.start
        touched_last.add(index, len(request.units))
        resident += len(request.units)
    last = int(units.nonzero()[0][-1]) if units.any() else 0
    return LruCurve(
        longest_request=max((len(each.units) for each in trace.requests), default=0),
        num_requests=len(trace.requests),
        no_hits=HitCounter(trace, cost).hits(0),
        units=np.cumsum(units[: last + 1]),
        tokens=np.cumsum(tokens[: last + 1]),
        steady_tokens=np.cumsum(steady_tokens[: last + 1]),
        seconds=None if seconds is None else np.cumsum(seconds[: last + 1]),
    )


def _weights(
    request: TraceRequest, start: int, end: int, unit_size: int
) -> npt.NDArray[np.int64]:
    """Return what each of these units adds to the hit, in tokens."""
    weights = np.full(end - start, unit_size, np.int64)
    weights[-1] = hit_tokens(request, end, unit_size) - (end - 1) * unit_size
    return weights


class _Prices:
    """Seconds that a hit on each unit saves, by its place in a prompt.

    Prefill seconds are additive, so the units of a hit can be counted one by one.
    """

    def __init__(self, cost: CostModel, unit_size: int) -> None:
        self._cost = cost
        self._unit_size = unit_size
        self._whole = np.zeros(0)

    def of(
        self, request: TraceRequest, start: int, end: int
    ) -> npt.NDArray[np.float64]:
        """Return the seconds of units `[start, end)` of a prompt."""
        size = self._unit_size
        if end > len(self._whole):
            more = range(len(self._whole), 2 * end)
            added = [
                self._cost.prefill_seconds(each * size, (each + 1) * size)
                for each in more
            ]
            self._whole = np.concatenate((self._whole, np.array(added)))
        seconds = self._whole[start:end].copy()
        seconds[-1] = self._cost.prefill_seconds(
            (end - 1) * size, hit_tokens(request, end, size)
        )
        return seconds


class _Sums:
    """Prefix sums of counts that change: a Fenwick tree."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)

    def add(self, index: int, amount: int) -> None:
        tree = self._tree
        position = index + 1
        while position < len(tree):
            tree[position] += amount
            position += position & -position

    def up_to(self, index: int) -> int:
        """Return the sum of the counts 0 … index."""
        tree = self._tree
        position = index + 1
        total = 0
        while position:
            total += tree[position]
            position &= position - 1
        return total
