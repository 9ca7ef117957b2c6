"""Is a victim's prompt answered sooner than one that nobody used?

Owns the measurement of time to first token in pairs, and the rule that decides. Of two
fresh prompts of equal length a coin gives one to the victim, who uses it; the attacker
then asks both, in an order that another coin decides, on one engine, right after each
other. Control pairs, in which attacker and victim are in one group, are interleaved:
they show what a hit saves, on this machine, at this moment.

A difference that is not significant says nothing unless a small one would have been.
So pairs are added until the difference that would have been found is small beside the
control's, or there are enough: the outcome is inconclusive then. How many pairs are
measured depends on the sizes of the differences, never on their signs, which keeps the
test by sign flips exact (see `statistics`).

A significant difference is only believed if fresh pairs show it again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from stemkv.audit.isolation.probes import Stage
from stemkv.audit.isolation.statistics import PairedTest, compare_pairs
from stemkv.audit.isolation.worlds import (
    ATTACKER,
    BLOCK_SIZE,
    PRIVATE,
    SHARED,
    VICTIM,
    Setting,
    World,
    random_ids,
)
from stemkv.audit.verdict import Verdict
from stemkv.core.prefix.tokens import TokenIds

__all__ = ["ALPHA", "LIMIT", "POWER", "Round", "TimingPlan", "judge", "time_pairs"]

ALPHA = 0.01  # of one round
POWER = 0.9
# Share of the control's effect that must have been detectable. A fault in sharing lets
# a block be reused at the least, which is a quarter of a prompt of four blocks: more
# than twice this.
LIMIT = 0.1
_NUM_WARM_UP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingPlan:
    """How much is measured."""

    num_prompt_tokens: int = 4 * BLOCK_SIZE
    min_pairs: int = 24
    max_pairs: int = 40
    num_draws: int = 10_000  # sign patterns


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Pairs of the claim and of the control, measured in turn. In seconds."""

    claim: PairedTest  # victim's prompt minus fresh prompt
    control: PairedTest  # the same within one group
    differences: tuple[float, ...] = field(repr=False)
    control_differences: tuple[float, ...] = field(repr=False)
    fresh_s: float  # median TTFT of a fresh prompt

    @property
    def effect(self) -> float:
        """What a hit saves in the control."""
        return abs(self.control.mean)

    @property
    def has_control(self) -> bool:
        """Whether the attack works where it should."""
        return self.control.p <= ALPHA and self.control.mean < 0

    @property
    def is_powered(self) -> bool:
        """Whether a leak a tenth as large as the control's would have been found."""
        return self.claim.detectable <= LIMIT * self.effect


def time_pairs(
    stage: Stage,
    plan: TimingPlan,
    progress: Callable[[str], None],
    *,
    seed: int,
    clock: Callable[[], float],
) -> Round:
    """Measure until a tenth of the control's effect is detectable, or long enough."""
    rng = random.Random(seed)
    claim = _Pairs(stage, PRIVATE, plan, rng, clock)
    control = _Pairs(stage, SHARED, plan, rng, clock)
    for pairs, name in ((claim, "claim"), (control, "control")):
        progress(f"time to first token: warming up the {name}")
        for _ in range(_NUM_WARM_UP):
            pairs.measure()
        pairs.forget()
    while True:
        for pairs in (claim, claim, control):
            pairs.measure()
        num = len(claim.differences)
        if num % 4 == 0:
            progress(f"time to first token: {num} pairs")
        if num < plan.min_pairs:
            continue
        done = _finish(claim, control, plan, seed)
        if done.is_powered or num >= plan.max_pairs:
            return done


def judge(first: Round, second: Round | None) -> Verdict:
    """Decide from one round, and another if the first was significant.

    Broken if both are significant in the same direction. Where there is no leak that
    happens once in 2 / ALPHA**2 audits, 20,000 times at 0.01.
    """
    rounds = [first] if second is None else [first, second]
    is_significant = [done.claim.p <= ALPHA for done in rounds]
    if len(rounds) > 1 and all(is_significant):
        is_same = (first.claim.mean < 0) == (rounds[-1].claim.mean < 0)
        return Verdict.BROKEN if is_same else Verdict.INCONCLUSIVE
    if is_significant[-1] or not all(done.has_control for done in rounds):
        return Verdict.INCONCLUSIVE
    return Verdict.HOLDS if rounds[-1].is_powered else Verdict.INCONCLUSIVE


class _Pairs:
    """Pairs measured in one setting so far."""

    def __init__(
        self,
        stage: Stage,
        setting: Setting,
        plan: TimingPlan,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self._stage = stage
        self._num_tokens = plan.num_prompt_tokens
        self._rng = rng
        self._world = World(
            stage.loaded,
            setting,
            num_blocks=6 * (plan.num_prompt_tokens // BLOCK_SIZE + 2),
            numerics=stage.numerics,
            num_threads=stage.num_threads,
            clock=clock,
        )
        self.forget()

    def forget(self) -> None:
        """Drop what was measured."""
        self.differences: list[float] = []
        self.fresh: list[float] = []

    def measure(self) -> None:
        """Measure one pair, on an empty cache."""
        self._world.engine.reset()
        ids = [
            random_ids(self._rng, self._stage.loaded, self._num_tokens)
            for _ in range(2)
        ]
        prompts = [TokenIds.from_ids(each) for each in ids]
        # Which is the victim's, and which is asked first: two coins.
        self._rng.shuffle(prompts)
        used, fresh = prompts
        order = [used, fresh]
        self._rng.shuffle(order)
        self._world.ask(VICTIM, used)
        times = {}
        for prompt in order:
            ttft_s = self._world.ask(ATTACKER, prompt).timeline.ttft_s
            assert ttft_s is not None, "it has an output token"
            times[prompt] = ttft_s
        self.differences.append(times[used] - times[fresh])
        self.fresh.append(times[fresh])


def _finish(claim: _Pairs, control: _Pairs, plan: TimingPlan, seed: int) -> Round:
    tests = [
        compare_pairs(
            pairs.differences,
            alpha=ALPHA,
            power=POWER,
            seed=seed,
            num_draws=plan.num_draws,
        )
        for pairs in (claim, control)
    ]
    fresh = sorted(claim.fresh)
    return Round(
        claim=tests[0],
        control=tests[1],
        differences=tuple(claim.differences),
        control_differences=tuple(control.differences),
        fresh_s=fresh[len(fresh) // 2],
    )
