"""The reuse index as plainly as it can be said: every block's past, every idle time.

Nothing is counted as it happens. What was learnt is worked out from the log of all idle
times, each time that the rates are made anew. Written from the description in
`docs/policies.md` and `reuse_times.py`, with its arithmetic in the same order, so that
equal counts give equal bits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from tests.core.eviction.twin import Block, Nodes

__all__ = ["ReuseIndexRule"]

_EDGES = [0.0, *(1.5**i for i in range(22))]
_WIDTHS = [end - start for start, end in pairwise(_EDGES)]
_NUM_BINS = len(_WIDTHS)
_NEVER_AGAIN_S = _EDGES[-1]

Kind = tuple[int, int, int]  # hint, uses, gap


@dataclass(eq=False)
class Idle:
    """One block's time from a release to the next use."""

    kind: Kind
    began_s: float  # those that begin within half a second count from the first one's
    ended_s: float | None = None

    def length_s(self) -> float:
        assert self.ended_s is not None
        return self.ended_s - self.began_s


@dataclass
class _Past:
    hint: int
    num_uses: int  # up to 3
    gap: int  # 0: none, 1: under 15 s, 2: under 90 s, 3: longer
    last_used_s: float
    tick: int
    idle: Idle | None  # None: in use
    was_released: bool

    @property
    def kind(self) -> Kind:
        return self.hint, self.num_uses, self.gap


class Learner:
    """Rates by class and age, from the log of idle times."""

    def __init__(self, weight: float, *, max_events: float = 100_000.0) -> None:
        self.num_fits = 0
        self.num_halvings = 0
        self._weight = weight  # of a block
        self._max_events = max_events
        self._log: list[Idle] = []
        self._ends: list[Idle] = []  # in the order in which they ended
        # When counts were halved: the time, and how many idle times had ended.
        self._halvings: list[tuple[float, int]] = []
        self._fit_at = 200.0
        self._prior = _rates([0.1] + [0.05] * (_NUM_BINS - 1))
        self._rates: dict[Kind, list[float]] = {}

    def begin(self, kind: Kind, now: float) -> Idle:
        began_s = now
        if self._log and now - self._log[-1].began_s < 0.5:
            began_s = self._log[-1].began_s
        idle = Idle(kind, began_s)
        self._log.append(idle)
        return idle

    def end(self, idle: Idle, now: float) -> None:
        """Take note that a use ended it. Nothing is made anew before all are noted."""
        idle.ended_s = now
        self._ends.append(idle)

    def settle(self, now: float) -> None:
        """Make the rates anew, if enough idle times have ended since the last time."""
        if self._num_events() >= self._fit_at:
            self._fit(now)
            self.num_fits += 1

    def rate(self, kind: Kind, age_s: float) -> float:
        if age_s >= _NEVER_AGAIN_S:
            return 1e-12 / (1.0 + age_s)
        return self._rates.get(kind, self._prior)[_bin(age_s)]

    def _num_events(self) -> float:
        return sum(
            self._weight * 0.5 ** self._halvings_after_end(index)
            for index, idle in enumerate(self._ends)
            if idle.length_s() < _NEVER_AGAIN_S
        )

    def _halvings_after_end(self, index: int) -> int:
        return sum(index < num_ended for _, num_ended in self._halvings)

    def _counts(self, now: float) -> tuple[dict[Kind, list[float]], ...]:
        """By class and bin: how many were used in it, and how many outlasted it."""
        reused: dict[Kind, list[float]] = {}
        lasted: dict[Kind, list[float]] = {}
        for index, idle in enumerate(self._ends):
            if idle.length_s() < _NEVER_AGAIN_S:
                row = reused.setdefault(idle.kind, [0.0] * _NUM_BINS)
                halved = 0.5 ** self._halvings_after_end(index)
                row[_bin(idle.length_s())] += self._weight * halved
        for idle in self._log:
            for at, edge_s in enumerate(_EDGES[1:]):
                until_s = now if idle.ended_s is None else idle.ended_s
                if until_s - idle.began_s >= edge_s:
                    row = lasted.setdefault(idle.kind, [0.0] * _NUM_BINS)
                    halvings = [s for s, _ in self._halvings]
                    num_after = sum(s - idle.began_s >= edge_s for s in halvings)
                    row[at] += self._weight * 0.5**num_after
        return reused, lasted

    def _fit(self, now: float) -> None:
        reused, lasted = self._counts(now)
        kinds = sorted({*reused, *lasted})
        zero = [0.0] * _NUM_BINS
        pooled: list[float] = []
        carried = 0.05
        for at in range(_NUM_BINS):
            num_reused = sum(reused.get(kind, zero)[at] for kind in kinds)
            num_lasted = sum(lasted.get(kind, zero)[at] for kind in kinds)
            num = num_reused + num_lasted
            pooled.append((num_reused + 100.0 * carried) / (num + 100.0))
            if num > 100.0:
                carried = pooled[at]
        for kind in kinds:
            own = list(zip(reused.get(kind, zero), lasted.get(kind, zero), strict=True))
            expected = sum(g * (r + s) for g, (r, s) in zip(pooled, own, strict=True))
            ratio = (sum(r for r, _ in own) + 5.0) / (expected + 5.0)
            hazards = [
                (r + 100.0 * min(0.9, ratio * g)) / (r + s + 100.0)
                for g, (r, s) in zip(pooled, own, strict=True)
            ]
            self._rates[kind] = _rates(hazards)
        num_events = self._num_events()
        if num_events >= self._max_events:
            self._halvings.append((now, len(self._ends)))
            num_events /= 2
            self.num_halvings += 1
        self._fit_at = num_events * 1.05 + 200.0


class ReuseIndexRule:
    """Least rate times worth, of the oldest and the newest leaf of each class."""

    needs_keys = True

    def __init__(
        self,
        num_blocks: int,
        *,
        worth: Callable[[int], float] | None = None,
        blocks_per_count: float = 1.0,
    ) -> None:
        self.max_ghosts = 8 * num_blocks
        self.learner = Learner(1.0 / blocks_per_count)
        self._worth = worth

    def new(self, past: _Past | None, *, hint: int, tick: int, now: float) -> _Past:
        if past is None:
            return _Past(hint, 1, 0, now, tick, None, False)
        state = _Past(**vars(past))
        self.used(state, hint=hint, tick=tick, now=now)
        return state

    def grown(self, state: _Past, *, tick: int, now: float) -> None:
        state.tick, state.last_used_s = tick, now

    def used(self, state: _Past, *, hint: int, tick: int, now: float) -> None:
        if state.idle is not None:
            self.learner.end(state.idle, now)
            state.idle = None
        idle_s = now - state.last_used_s
        state.gap = 1 if idle_s < 15.0 else 2 if idle_s < 90.0 else 3
        state.num_uses = min(3, state.num_uses + 1)
        state.hint, state.tick, state.last_used_s = hint, tick, now

    def settle(self, now: float) -> None:
        self.learner.settle(now)

    def released(self, state: _Past, *, tick: int, now: float) -> None:
        state.was_released = True
        state.tick, state.last_used_s = tick, now
        state.idle = self.learner.begin(state.kind, now)

    def evicted(self, block: Block) -> None:
        pass

    def past(self, state: _Past) -> _Past:
        return _Past(**vars(state))

    def are_pasts_alike(self, one: _Past, other: _Past) -> bool:
        return self.are_alike(one, other)

    def are_alike(self, one: _Past, other: _Past) -> bool:
        if (one.idle is None) != (other.idle is None):
            return False
        if one.idle is not None and other.idle is not None:
            if one.idle.began_s != other.idle.began_s:
                return False
        return (one.kind, one.tick, one.last_used_s, one.was_released) == (
            other.kind,
            other.tick,
            other.last_used_s,
            other.was_released,
        )

    def can_follow(self, state: _Past, past: _Past | None) -> bool:
        return state.num_uses == 1 and not state.was_released and past is None

    def victim(self, nodes: Nodes, leaves: set[int], now: float) -> int:
        def score(leaf: int) -> float:
            tail = nodes[leaf][-1]
            rate = self.learner.rate(tail.state.kind, now - tail.state.last_used_s)
            return rate if self._worth is None else rate * self._worth(tail.depth)

        def tick(leaf: int) -> int:
            return int(nodes[leaf][-1].state.tick)

        by_kind: dict[Kind, list[int]] = {}
        for leaf in leaves:
            by_kind.setdefault(nodes[leaf][-1].state.kind, []).append(leaf)
        oldest = min(leaves, key=lambda leaf: (tick(leaf), -leaf))
        rated = []
        for same in by_kind.values():
            first = min(same, key=lambda leaf: (tick(leaf), -leaf))
            last = max(same, key=lambda leaf: (tick(leaf), -leaf))
            rated.append((score(first), tick(first), first))
            if last != first:
                rated.append((2.5 * score(last), tick(last), last))
        least, _, best = min(rated)
        return best if least < 0.9 * score(oldest) else oldest


def _bin(age_s: float) -> int:
    return bisect_right(_EDGES, age_s) - 1


def _rates(hazards: list[float]) -> list[float]:
    """At best, over all times to keep it: chance of a use per expected second."""
    rates = []
    for start in range(_NUM_BINS):
        best = 0.0
        lasting, uses, seconds = 1.0, 0.0, 0.0
        for at in range(start, _NUM_BINS):
            uses += lasting * hazards[at]
            seconds += lasting * _WIDTHS[at] * (1.0 - hazards[at] / 2)
            lasting *= 1.0 - hazards[at]
            best = max(best, uses / seconds)
        rates.append(best)
    return rates
