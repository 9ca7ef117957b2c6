"""What isolation does not hide, with figures.

Owns the measurements of what a tenant can still learn of others: that they are busy,
how much memory they need, that a chosen request id is taken. Saying so is part of the
audit: a claim without its limits is no claim.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from stemkv.audit.isolation.probes import Stage
from stemkv.audit.isolation.scene import Scene, made_up_prompt
from stemkv.audit.isolation.worlds import (
    ATTACKER,
    BLOCK_SIZE,
    PRIVATE,
    VICTIM,
    World,
    random_ids,
)
from stemkv.core.prefix.tokens import TokenIds

__all__ = ["Pressure", "Wait", "measure_pressure", "measure_wait"]

_NUM_BLOCKS = 16
_NUM_OWN = 8
_NUM_SAMPLES = 5
_NUM_BUSY = 8 * BLOCK_SIZE  # tokens the victim computes meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """What others' load does to an attacker's blocks, without quotas. Exact."""

    deed: str  # what the victim did
    num_taken: int  # blocks the victim's deed newly takes
    num_lost: int  # blocks the attacker lost by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Time to first token of equal requests, in seconds; medians, measured."""

    alone_s: float
    beside_s: float  # while the victim's prompt is computed
    num_samples: int
    num_victim_tokens: int  # computed meanwhile


def measure_pressure() -> list[Pressure]:
    """Count in a cache of its own, no tensors needed: blocks are blocks."""
    rows = []
    deeds: list[tuple[str, int, int]] = [
        (f"uses {num} new blocks", num, 0) for num in (0, 4, 8, 12, 16)
    ]
    deeds.append(("uses 8 blocks, then the same again", 8, 8))
    for deed, num_new, num_again in deeds:
        scene = Scene(_NUM_BLOCKS)
        now = 0.0
        # Whole blocks only, so that what is taken is what is published.
        for index in range(_NUM_OWN):
            scene.wait_until(now := now + 1)
            scene.use(ATTACKER, made_up_prompt(f"own {index}", 1, num_more=0))
        before = scene.num_taken
        for index in [*range(num_new), *range(num_again)]:
            scene.wait_until(now := now + 1)
            scene.use(VICTIM, made_up_prompt(f"other {index}", 1, num_more=0))
        rows.append(
            Pressure(
                deed=deed,
                num_taken=scene.num_taken - before,
                num_lost=_NUM_OWN - scene.num_held_by(ATTACKER),
            )
        )
    return rows


def measure_wait(
    stage: Stage, progress: Callable[[str], None], *, clock: Callable[[], float]
) -> Wait:
    """Measure how much longer an attacker waits while a victim's prompt is computed."""
    progress("what remains visible: waiting for others")
    rng = random.Random(stage.seed)
    world = World(
        stage.loaded,
        PRIVATE,
        num_blocks=4 * _NUM_BUSY // BLOCK_SIZE,
        numerics=stage.numerics,
        num_threads=stage.num_threads,
        clock=clock,
    )

    def prompt(num_tokens: int) -> TokenIds:
        return TokenIds.from_ids(random_ids(rng, stage.loaded, num_tokens))

    alone, beside = [], []
    for _ in range(_NUM_SAMPLES):
        world.engine.reset()
        alone.append(world.ask(ATTACKER, prompt(BLOCK_SIZE)).timeline.ttft_s)
        world.add(VICTIM, prompt(_NUM_BUSY))
        request_id = world.add(ATTACKER, prompt(BLOCK_SIZE))
        beside.append(world.drain()[request_id].timeline.ttft_s)
    return Wait(
        alone_s=median(t for t in alone if t is not None),
        beside_s=median(t for t in beside if t is not None),
        num_samples=_NUM_SAMPLES,
        num_victim_tokens=_NUM_BUSY,
    )
