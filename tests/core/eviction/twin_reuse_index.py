"""The reuse index as plainly as it can be said: every block's past, every idle time.

Nothing is counted as it happens. What was learnt is worked out from the log of all idle
times, each time that the rates are made anew, with the arithmetic in the same order, so
that equal counts give equal bits. The shadow of LRU is the real one; it has tests of its
own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from stemkv.core.retention.policy.lru_shadow import Group, LruShadow
from tests.core.eviction.twin import Block, Nodes, Twin

__all__ = ["Idle", "Learner", "ReuseIndexRule", "ReuseIndexTwin"]

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
    group: Group | None = None  # of the shadow; None: in use

    @property
    def kind(self) -> Kind:
        return self.hint, self.num_uses, self.gap


class Learner:
    """Rates by class and age, from the log of idle times."""

    def __init__(self, *, max_runs: float = 10_000.0) -> None:
        self.num_fits = 0
        self.num_halvings = 0
        self._max_runs = max_runs
        self._log: list[Idle] = []
        self._ends: list[list[Idle]] = []  # of blocks that ended at once, in order
        self._ending: list[Idle] = []
        # When counts were halved: the time, and how many ends there had been.
        self._halvings: list[tuple[float, int]] = []
        self._fit_at = 20.0
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
        """Take note that a use ended it; `settle` when all of a node are noted."""
        idle.ended_s = now
        self._ending.append(idle)

    def settle(self, now: float) -> None:
        """Make the rates anew, if enough idle times have ended since the last time."""
        if not self._ending:
            return
        self._ends.append(self._ending)
        is_event = self._ending[0].length_s() < _NEVER_AGAIN_S
        self._ending = []
        if not is_event:
            return
        weight, square = self._sums()
        if weight >= self._fit_at * (square / weight):
            self._fit(now, square / weight)
            self.num_fits += 1

    def rate(self, kind: Kind, age_s: float) -> float:
        if age_s >= _NEVER_AGAIN_S:
            return 1e-12 / (1.0 + age_s)
        return self._rates.get(kind, self._prior)[_bin(age_s)]

    def _sums(self) -> tuple[float, float]:
        """Of the blocks that ended at once: the sum, and the sum of squares."""
        weight = square = 0.0
        for index, run in enumerate(self._ends):
            if run[0].length_s() < _NEVER_AGAIN_S:
                halved = 0.5 ** self._halvings_after_end(index)
                weight += len(run) * halved
                square += len(run) ** 2 * halved
        return weight, square

    def _halvings_after_end(self, index: int) -> int:
        return sum(index < num_ended for _, num_ended in self._halvings)

    def _counts(self, now: float) -> tuple[dict[Kind, list[float]], ...]:
        """By class and bin: how many were used in it, and how many outlasted it.

        What ended is halved as a whole from then on, what is older than all bins from
        the moment it is; what lasts counts in full.
        """
        reused: dict[Kind, list[float]] = {}
        lasted: dict[Kind, list[float]] = {}
        for index, run in enumerate(self._ends):
            if run[0].length_s() < _NEVER_AGAIN_S:
                weight = len(run) * 0.5 ** self._halvings_after_end(index)
                row = reused.setdefault(run[0].kind, [0.0] * _NUM_BINS)
                row[_bin(run[0].length_s())] += weight
                for at in range(_bin(run[0].length_s())):
                    lasted.setdefault(run[0].kind, [0.0] * _NUM_BINS)[at] += weight
        for idle in self._log:
            until_s = now if idle.ended_s is None else idle.ended_s
            is_past_all = until_s - idle.began_s >= _NEVER_AGAIN_S
            if idle.ended_s is not None and not is_past_all:
                continue
            num_halvings = sum(
                s - idle.began_s >= _NEVER_AGAIN_S for s, _ in self._halvings
            )
            for at, edge_s in enumerate(_EDGES[1:]):
                if until_s - idle.began_s >= edge_s:
                    row = lasted.setdefault(idle.kind, [0.0] * _NUM_BINS)
                    row[at] += 0.5**num_halvings
        return reused, lasted

    def _fit(self, now: float, run: float) -> None:
        """`run` is how many blocks make one observation."""
        reused, lasted = self._counts(now)
        kinds = sorted({*reused, *lasted})
        zero = [0.0] * _NUM_BINS
        pooled: list[float] = []
        prior, carried = 20.0 * run, 0.05
        for at in range(_NUM_BINS):
            num_reused = sum(reused.get(kind, zero)[at] for kind in kinds)
            num_lasted = sum(lasted.get(kind, zero)[at] for kind in kinds)
            num = num_reused + num_lasted
            pooled.append((num_reused + prior * carried) / (num + prior))
            if num > prior:
                carried = pooled[at]
        for kind in kinds:
            own = list(zip(reused.get(kind, zero), lasted.get(kind, zero), strict=True))
            expected = sum(g * (r + s) for g, (r, s) in zip(pooled, own, strict=True))
            ratio = (sum(r for r, _ in own) + 2.0 * run) / (expected + 2.0 * run)
            hazards = [
                (r + prior * min(0.9, ratio * g)) / (r + s + prior)
                for g, (r, s) in zip(pooled, own, strict=True)
            ]
            self._rates[kind] = _rates(hazards)
        weight, _ = self._sums()
        if weight >= self._max_runs * run:
            self._halvings.append((now, len(self._ends)))
            self.num_halvings += 1
            weight /= 2
        self._fit_at = weight / run * 1.05 + 20.0


class ReuseIndexRule:
    """Least rate times worth, of the oldest and the newest leaf of each class.

    And as far from LRU as the shadow says that it can be afforded.
    """

    needs_keys = True

    def __init__(
        self,
        num_blocks: int,
        *,
        worth: Callable[[int], float] | None = None,
        max_runs: float = 10_000.0,
    ) -> None:
        self.max_ghosts = 8 * num_blocks
        self.learner = Learner(max_runs=max_runs)
        self.shadow = LruShadow()
        self.most: int | None = None  # blocks of the last victim that may go
        self.is_choice = False  # whether LRU would have taken another
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
            state.idle = state.group = None
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
        if one.group is not other.group:
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
        self.most, self.is_choice = None, False
        for least, _, leaf in sorted(rated):
            if least >= 0.9 * score(oldest):
                break
            num_free = self._num_free(nodes[leaf])
            num_blocks = len(nodes[leaf])
            group = nodes[leaf][0].state.group
            if num_free < num_blocks and group is not None:
                self.shadow.ranked(group, nodes[leaf][0].depth - 1)
            if num_free == 0 and self.shadow.room <= 0:
                continue
            num_most = num_free + max(0, self.shadow.room)
            self.most = num_most if num_most < num_blocks else None
            self.is_choice = True
            return leaf
        num_free = self._num_free(nodes[oldest])
        if 0 < num_free < len(nodes[oldest]):
            self.most = num_free
        return oldest

    def _num_free(self, blocks: Sequence[Block]) -> int:
        """Blocks that LRU does not hold, which nobody can lose by."""
        return sum(not self._is_held(block) for block in blocks)

    def _is_held(self, block: Block) -> bool:
        group: Group | None = block.state.group
        return group is None or group.start <= block.depth - 1 < group.end


class ReuseIndexTwin(Twin):
    """A twin whose rule also hears what the shadow of LRU has to."""

    def __init__(self, rule: ReuseIndexRule) -> None:
        super().__init__(rule)
        self.learner = rule.learner
        self._shadow = rule.shadow
        self._ri = rule

    def most_to_take(self) -> int | None:
        return self._ri.most

    def published(self, node_id: int, **said: Any) -> None:
        start, num_blocks = said["start"], said["num_blocks"]
        past = self._pasts(said["keys"])[0]
        if past is not None and past.group is not None and node_id not in self.nodes:
            self._shadow.missed(past.group, start, num_blocks)
        super().published(node_id, **said)

    def used(self, node_id: int, **said: Any) -> None:
        blocks = self.nodes[node_id]
        group = blocks[0].state.group
        if group is None:
            self._shadow.shared(len(blocks))
        else:
            self._shadow.hit(group, blocks[0].depth - 1, len(blocks))
        super().used(node_id, **said)

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        super().released(node_id, tick=tick, now=now)
        blocks = self.nodes[node_id]
        group = self._shadow.released(tick, blocks[0].depth - 1, len(blocks))
        for block in blocks:
            block.state.group = group

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        blocks = self.nodes[node_id]
        group, start = blocks[0].state.group, blocks[0].depth - 1 + num_left
        num_gone = len(blocks) - num_left
        if group is not None and node_id == self._named:
            self._shadow.evicted(group, start, num_gone, is_choice=self._ri.is_choice)
        elif group is not None:
            self._shadow.withdrawn(group, start, num_gone)
        super().dropped(node_id, num_left, may_return=may_return)


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
