"""Can a prompt be read out of the cache, a token at a time?

Owns the published attack on prefix caches: the attacker knows how a victim's prompt
begins, asks for every continuation, and takes the one that was cached already. It is
given the truth about everything before the position it guesses, so one bad guess does
not spoil the rest.

Two oracles tell what was cached. The count of cached tokens is exact to a token: a
match may end inside a block. Time is coarser, so there the victim filled in a form that
the attacker knows: after each field come blocks of known text, and a right guess saves
computing them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stemkv.audit.isolation.probes import Stage
from stemkv.audit.isolation.statistics import binomial_tail
from stemkv.audit.isolation.worlds import (
    ATTACKER,
    BLOCK_SIZE,
    VICTIM,
    Setting,
    World,
    random_ids,
)
from stemkv.core.prefix.tokens import TokenIds

__all__ = ["LUCK", "Theft", "Thefts", "steal_by_count", "steal_by_time"]

LUCK = 0.01  # more guesses right than luck gives once in so many tries

_NUM_COUNT_POSITIONS = 6
_NUM_COUNT_CANDIDATES = 8
_NUM_KNOWN = BLOCK_SIZE + 4  # so that the secret lies inside a block
_NUM_TIME_POSITIONS = 5
_NUM_TIME_CANDIDATES = 6
_NUM_FIELD = 2 * BLOCK_SIZE  # a field's token and the known text behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Theft:
    """What became of one attempt to read a secret."""

    setting: str
    oracle: Literal["cached tokens", "time to first token"]
    secret: str  # which candidate each position holds, as digits
    guess: str
    num_candidates: int  # at each position
    num_probes: int
    # Positions at which the oracle did not say the same of all candidates; `None` for
    # time, which never says the same twice.
    num_telling: int | None

    @property
    def num_right(self) -> int:
        """Positions guessed right."""
        return sum(a == b for a, b in zip(self.secret, self.guess, strict=True))

    @property
    def by_luck(self) -> float:
        """The probability of guessing at least so many without any oracle."""
        return binomial_tail(self.num_right, len(self.secret), 1 / self.num_candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thefts:
    """All attempts to read a secret."""

    count_control: Theft
    count: Theft
    count_public: Theft
    time_control: Theft
    time: tuple[Theft, ...]  # the second only if the first looked like success

    def all(self) -> list[Theft]:
        """Return every attempt, controls included."""
        return [
            self.count_control,
            self.count,
            self.count_public,
            self.time_control,
            *self.time,
        ]


def steal_by_count(
    stage: Stage, setting: Setting, progress: Callable[[str], None], *, seed: int
) -> Theft:
    """Read a secret by the number of cached tokens each answer reports."""
    progress(f"reading a secret by cached tokens, {setting.name}")
    rng = random.Random(seed)
    known = random_ids(rng, stage.loaded, _NUM_KNOWN)
    candidates = _candidates(rng, stage, _NUM_COUNT_CANDIDATES)
    digits = [rng.randrange(len(candidates)) for _ in range(_NUM_COUNT_POSITIONS)]
    secret = [candidates[digit] for digit in digits]
    rest = random_ids(rng, stage.loaded, 3 * BLOCK_SIZE - len(known) - len(secret))
    world = stage.world(setting, num_blocks=64)
    if setting.has_public_head:
        world.engine.declare_public(TokenIds.from_ids(known))
    world.ask(VICTIM, TokenIds.from_ids([*known, *secret, *rest]))
    # What it knows is in its own domain from here on, so no count is of that.
    world.ask(ATTACKER, TokenIds.from_ids(known))
    guesses, num_telling, num_probes = [], 0, 0
    for index in range(len(secret)):
        counts = []
        for candidate in candidates:
            # The last token is never matched, so one more stands behind the guess.
            # Probes stay below two blocks: none publishes what it tries.
            tried = [*known, *secret[:index], candidate, candidates[0]]
            answer = world.ask(ATTACKER, TokenIds.from_ids(tried))
            counts.append(answer.counts.reused)
        num_probes += len(candidates)
        num_telling += len(set(counts)) > 1
        best = [d for d, count in enumerate(counts) if count == max(counts)]
        guesses.append(rng.choice(best))
    return Theft(
        setting=setting.name,
        oracle="cached tokens",
        secret=_shown(digits),
        guess=_shown(guesses),
        num_candidates=len(candidates),
        num_probes=num_probes,
        num_telling=num_telling,
    )


def steal_by_time(
    stage: Stage,
    setting: Setting,
    progress: Callable[[str], None],
    *,
    seed: int,
    clock: Callable[[], float],
) -> Theft:
    """Read the fields of a form by the time to the first token."""
    progress(f"reading a secret by time to first token, {setting.name}")
    rng = random.Random(seed)
    candidates = _candidates(rng, stage, _NUM_TIME_CANDIDATES)
    digits = [rng.randrange(len(candidates)) for _ in range(_NUM_TIME_POSITIONS)]
    known = random_ids(rng, stage.loaded, BLOCK_SIZE)
    texts = [random_ids(rng, stage.loaded, _NUM_FIELD - 1) for _ in digits]
    last = random_ids(rng, stage.loaded, 1)  # never matched
    world = World(
        stage.loaded,
        setting,
        num_blocks=2 * len(digits) * len(candidates) + 64,
        numerics=stage.numerics,
        num_threads=stage.num_threads,
        clock=clock,
    )
    form = list(known)
    for digit, text in zip(digits, texts, strict=True):
        form += [candidates[digit], *text]
    world.ask(VICTIM, TokenIds.from_ids([*form, *last]))
    world.ask(ATTACKER, TokenIds.from_ids([*known, *last]))
    guesses = []
    for index, text in enumerate(texts):
        before = form[: len(known) + index * _NUM_FIELD]
        times = {}
        for digit in rng.sample(range(len(candidates)), len(candidates)):
            tried = [*before, candidates[digit], *text, *last]
            answer = world.ask(ATTACKER, TokenIds.from_ids(tried))
            assert answer.timeline.ttft_s is not None, "it has an output token"
            times[digit] = answer.timeline.ttft_s
        guesses.append(min(times, key=times.__getitem__))
    return Theft(
        setting=setting.name,
        oracle="time to first token",
        secret=_shown(digits),
        guess=_shown(guesses),
        num_candidates=len(candidates),
        num_probes=len(digits) * len(candidates),
        num_telling=None,
    )


def _candidates(rng: random.Random, stage: Stage, num: int) -> list[int]:
    return rng.sample(range(stage.loaded.vocab_size), num)


def _shown(digits: list[int]) -> str:
    return "".join(map(str, digits))
