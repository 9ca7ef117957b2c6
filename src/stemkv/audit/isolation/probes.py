"""Does anything an attacker sees depend on what a victim's prompt says?

Owns the probes that have an exact answer: the same play is run in twin worlds, in one
of which the victim uses the attacker's prompt and in the other a different one of equal
length, and what the attacker saw is compared byte by byte. In the control, where both
are in one group, it must differ; else equality elsewhere would say nothing.

Prompts of equal length make equal load: that load can be felt is no secret of the
engine (`docs/sharing.md`), and `remaining` measures it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stemkv.audit.isolation.worlds import (
    ATTACKER,
    BLOCK_SIZE,
    SETTINGS,
    VICTIM,
    Setting,
    World,
    random_ids,
)
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine import LoadedModel

__all__ = ["PROBES", "Finding", "Sight", "Stage", "run_probes"]

# Name of the probe → what the attacker looks at.
PROBES: Mapping[str, str] = {
    "match": "how much of its prompt it finds cached",
    "cached tokens": "the cached tokens it is told, and all other counts",
    "events": "every event of its own requests and domain",
    "usage": "what it is told that its own domain holds",
    "eviction": "which of its own blocks others' load evicts",
    "waiting": "in which step it starts while the victim computes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What one probe saw in one world."""

    lines: tuple[str, ...]
    number: int | None = None  # the gist, where there is one

    @property
    def digest(self) -> str:
        """SHA-256 of the lines, hexadecimal."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One probe in one setting, in all its worlds."""

    probe: str
    setting: Setting
    same: Sight  # the victim used the attacker's prompt
    other: Sight  # it used another one of equal length
    idle: Sight | None  # it did nothing; None: that would be another load

    @property
    def is_signal(self) -> bool:
        """Whether the attacker saw any difference."""
        return any(
            sight is not None and sight.lines != self.same.lines
            for sight in (self.other, self.idle)
        )

    @property
    def cell(self) -> str:
        """What a table shows."""
        if self.same.number is not None and self.other.number is not None:
            return f"{self.same.number} / {self.other.number}"
        return "differs" if self.is_signal else "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the plays are put on with."""

    loaded: LoadedModel
    seed: int
    numerics: str = "exact"
    num_threads: int | None = None

    def world(
        self,
        setting: Setting,
        num_blocks: int,
        token_budget: int = 512,
        *,
        floors: Mapping[str, int] | None = None,
    ) -> World:
        """Return a new world on a clock of its own."""
        return World(
            self.loaded,
            setting,
            num_blocks=num_blocks,
            token_budget=token_budget,
            floors=floors,
            numerics=self.numerics,
            num_threads=self.num_threads,
        )

    def prompts(self, num_tokens: int, num: int) -> list[list[int]]:
        """Return token ids, no two of which begin with the same token.

        They are the same in every call with the same arguments.
        """
        rng = random.Random(f"{self.seed}/{num_tokens}/{num}")
        firsts = rng.sample(range(self.loaded.vocab_size), num)
        return [
            [first, *random_ids(rng, self.loaded, num_tokens - 1)] for first in firsts
        ]


def run_probes(stage: Stage, progress: Callable[[str], None]) -> list[Finding]:
    """Run every probe in every setting."""
    findings = []
    for setting in SETTINGS:
        for title, play, knows_idle in (
            ("before the attacker", _before, True),
            ("beside the attacker", _beside, False),
            ("against its cache", _against, False),
        ):
            progress(f"twin worlds, {setting.name}: the victim {title}")
            same = play(stage, setting, is_same=True)
            other = play(stage, setting, is_same=False)
            idle = play(stage, setting, is_same=None) if knows_idle else {}
            findings += [
                Finding(
                    probe=probe,
                    setting=setting,
                    same=sight,
                    other=other[probe],
                    idle=idle.get(probe),
                )
                for probe, sight in same.items()
            ]
    return findings


# Plays: `is_same` says which prompt the victim uses, `None` that there is no victim.


def _before(stage: Stage, setting: Setting, is_same: bool | None) -> dict[str, Sight]:
    """Let the victim come and go before the attacker asks."""
    world = stage.world(setting, num_blocks=32)
    secret, unrelated = _prompts(stage, world, 2 * BLOCK_SIZE + 8, 2)
    if is_same is not None:
        world.ask(VICTIM, secret if is_same else unrelated, max_new_tokens=2)
    elif setting.has_public_head:
        # That somebody used a public head is no secret: somebody always did.
        world.ask("stranger", unrelated)
    world.wait_until(100.0)
    found = world.found_by(ATTACKER, secret)
    usage = [repr(world.engine.usage_of(ATTACKER))]
    first = world.ask(ATTACKER, secret, max_new_tokens=2)
    usage.append(repr(world.engine.usage_of(ATTACKER)))
    again = world.ask(ATTACKER, secret)
    usage.append(repr(world.engine.usage_of(ATTACKER)))
    return {
        "match": Sight(lines=(str(found),), number=found),
        "cached tokens": Sight(
            lines=tuple(repr(c.counts) for c in (first, again)),
            number=first.counts.reused,
        ),
        "events": Sight(lines=(*world.seen_by(ATTACKER), repr(first), repr(again))),
        "usage": Sight(lines=tuple(usage)),
    }


def _beside(stage: Stage, setting: Setting, is_same: bool | None) -> dict[str, Sight]:
    """Let the attacker ask while the victim's prompt is being computed.

    A stranger leaves the victim less than a block of the first step, so the first block
    that the attacker misses is one that the victim is about to publish; and the second
    step has room for both, so the attacker starts in it unless it waits for that block.
    """
    world = stage.world(setting, num_blocks=32, token_budget=3 * BLOCK_SIZE)
    num_tokens = 2 * BLOCK_SIZE + 8
    secret, unrelated, strange, other = _prompts(stage, world, num_tokens, 4)
    if setting.has_public_head:
        world.ask("stranger", other)  # so that the head is resident
    world.wait_until(100.0)
    world.add("stranger", TokenIds.from_ids(list(strange)[-num_tokens:]))
    world.add(VICTIM, secret if is_same else unrelated, max_new_tokens=3)
    world.step()
    request_id = world.add(ATTACKER, secret, max_new_tokens=3)
    ended = world.drain()[request_id]
    scheduled = ended.timeline.first_scheduled_s
    waited = None if scheduled is None else round(scheduled - 101)
    lines = (*world.seen_by(ATTACKER), repr(ended))
    return {"waiting": Sight(lines=lines, number=waited)}


def _against(
    stage: Stage, setting: Setting, *, is_same: bool | None
) -> dict[str, Sight]:
    """Let the victim use the attacker's oldest prompt, then fill the cache."""
    num_blocks = 5 + setting.has_public_head
    world = stage.world(setting, num_blocks=num_blocks)
    prompts = _prompts(stage, world, BLOCK_SIZE + 1, 6)
    own, (unrelated, *load) = prompts[:3], prompts[3:]
    for prompt in own:
        world.ask(ATTACKER, prompt)
    world.ask(VICTIM, own[0] if is_same else unrelated)
    for prompt in load:
        world.ask(VICTIM, prompt)
    left = [world.found_by(ATTACKER, prompt) for prompt in own]
    lines = (repr(left), repr(world.engine.usage_of(ATTACKER)))
    # Whether its oldest prompt is still there, counted behind a public head.
    head = BLOCK_SIZE * setting.has_public_head
    return {
        "eviction": Sight(
            lines=(*lines, *world.seen_by(ATTACKER)), number=max(0, left[0] - head)
        )
    }


def _prompts(
    stage: Stage, world: World, num_tokens: int, num: int
) -> Sequence[TokenIds]:
    """Return prompts that begin differently, behind the public head if there is one."""
    head: list[int] = []
    if world.setting.has_public_head:
        (head,) = stage.prompts(BLOCK_SIZE, 1)
        world.engine.declare_public(TokenIds.from_ids(head))
    return [TokenIds.from_ids([*head, *ids]) for ids in stage.prompts(num_tokens, num)]
