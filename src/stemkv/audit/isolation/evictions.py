"""What do a tenant's evictions tell of others: how much they take, how they come back?

Owns the attacks on retained memory, and what a floor changes about them. All answers are
exact: twin worlds differ in what the victim does, and what the attacker sees is compared.

*Volume*: the victim does nothing in one world and takes new blocks in the other. On the
engine, so all that a tenant is shown is compared.

*Habits*: the victim takes the same blocks in both worlds, asks as often and hits as
often; but in one it comes back within seconds and in the other much later. A policy that
learns from all tenants together learns that, and evicts others' blocks by it. On a cache
alone: there is much to learn before there is something to see.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from stemkv.audit.isolation.probes import Sight, Stage
from stemkv.audit.isolation.scene import Scene, made_up_prompt
from stemkv.audit.isolation.worlds import ATTACKER, BLOCK_SIZE, PRIVATE, VICTIM
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.retention.policies import EvictionConfig

__all__ = [
    "LEARNING",
    "NUM_OWN_PROMPTS",
    "Beyond",
    "Habits",
    "Volume",
    "measure_beyond",
    "try_habits",
    "try_volume",
]

# Volume, in blocks. The attacker retains two, and a request of its needs two while it
# runs, of which one is its own already.
_NUM_BLOCKS = 6
_NUM_OWN = 2
_FLOOR = 4
_NUM_LOAD = 5

# Habits
_NUM_PLAYS = 4
_NUM_SCENE_BLOCKS = 64
_NUM_PROMPT_BLOCKS = 2
NUM_OWN_PROMPTS = 8
_NUM_VICTIM_PROMPTS = 16
_NUM_ROUNDS = 60
_ROUND_S = 80.0
_SOON_S, _LATE_S = 4.0, 40.0  # from one use to the next, in the two worlds
_NUM_FLOOD_PROMPTS = 12
_NUM_MORE_PROMPTS = 16  # of the attacker's, so that it evicts some of its own
_SCENE_FLOOR = 20  # blocks: the attacker's prompts, a request, and a little more
LEARNING = EvictionConfig(name="reuse_index")


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """What an attacker sees of how much a victim takes."""

    has_floor: bool
    idle: Sight  # the victim did nothing; `number`: blocks the attacker lost
    busy: Sight  # it took new blocks, more than there were free

    @property
    def is_signal(self) -> bool:
        """Whether the attacker saw any difference."""
        return self.idle.lines != self.busy.lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """What an attacker sees of how soon a victim comes back."""

    has_floor: bool
    num_plays: int
    num_told: int  # plays in which the two habits looked different
    # Of the attacker's prompts, after the victim took new blocks; means over the plays.
    lost_if_soon: float
    lost_if_late: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """What a floor does not cover, in blocks. Exact."""

    floor: int
    num_retained: int  # of a tenant that has filled the cache, floor and beyond
    num_left: int  # of that, after others took all that they could get
    # Of a tenant that stays below its floor: lost by a request of its own that grows,
    # because others' requests hold all other memory while they run.
    num_lost_running: int


def try_volume(stage: Stage, progress: Callable[[str], None]) -> list[Volume]:
    """Let a victim fill the cache, or not; first without floors, then with one."""
    found = []
    for has_floor in (False, True):
        progress(
            f"evictions by others' load, {'with' if has_floor else 'without'} floor"
        )
        idle, busy = (
            _volume(stage, has_floor=has_floor, is_busy=is_busy)
            for is_busy in (False, True)
        )
        found.append(Volume(has_floor=has_floor, idle=idle, busy=busy))
    return found


def _volume(stage: Stage, *, has_floor: bool, is_busy: bool) -> Sight:
    world = stage.world(
        PRIVATE,
        num_blocks=_NUM_BLOCKS,
        floors={ATTACKER: _FLOOR} if has_floor else None,
    )
    ids = stage.prompts(BLOCK_SIZE + 1, _NUM_OWN + _NUM_LOAD)
    prompts = [TokenIds.from_ids(each) for each in ids]
    own, load = prompts[:_NUM_OWN], prompts[_NUM_OWN:]
    for prompt in own:
        world.ask(ATTACKER, prompt)
    if is_busy:
        for prompt in load:
            world.ask(VICTIM, prompt)
    world.wait_until(100.0)
    usage = repr(world.engine.usage_of(ATTACKER))
    left = [world.found_by(ATTACKER, prompt) for prompt in own]
    answers = [repr(world.ask(ATTACKER, prompt)) for prompt in own]
    return Sight(
        lines=(usage, repr(left), *answers, *world.seen_by(ATTACKER)),
        number=sum(tokens < BLOCK_SIZE for tokens in left),
    )


def try_habits(progress: Callable[[str], None], *, seed: int) -> list[Habits]:
    """Let a victim come back soon, or late; first without quotas, then with a floor."""
    found = []
    for has_floor in (False, True):
        name = "with a floor" if has_floor else "without quotas"
        progress(f"evictions by a policy that has learnt others' habits, {name}")
        lost: dict[float, list[int]] = {_SOON_S: [], _LATE_S: []}
        num_told = 0
        for play in range(_NUM_PLAYS):
            sights = {}
            for gap_s in lost:
                sights[gap_s] = _habits(f"{seed}/{play}", gap_s, has_floor=has_floor)
                lost[gap_s].append(sights[gap_s].number or 0)
            num_told += sights[_SOON_S].lines != sights[_LATE_S].lines
        found.append(
            Habits(
                has_floor=has_floor,
                num_plays=_NUM_PLAYS,
                num_told=num_told,
                lost_if_soon=sum(lost[_SOON_S]) / _NUM_PLAYS,
                lost_if_late=sum(lost[_LATE_S]) / _NUM_PLAYS,
            )
        )
    return found


def _habits(seed: str, gap_s: float, *, has_floor: bool) -> Sight:
    """Play the victim's rounds, then its flood, then the attacker's own."""
    scene = Scene(
        _NUM_SCENE_BLOCKS,
        eviction=LEARNING,
        floors={ATTACKER: _SCENE_FLOOR} if has_floor else None,
    )
    own = _prompts("own", NUM_OWN_PROMPTS)
    flood = _prompts("flood", _NUM_FLOOD_PROMPTS)
    for now, tenant, prompt in _life(seed, gap_s, own):
        scene.wait_until(now)
        scene.use(tenant, prompt)
    for prompt in flood:
        scene.use(VICTIM, prompt)
    left = [scene.found_by(ATTACKER, prompt) for prompt in own]
    # What it loses to itself must tell nothing either.
    more = _prompts("more", _NUM_MORE_PROMPTS)
    for prompt in more:
        scene.use(ATTACKER, prompt)
    last = [scene.found_by(ATTACKER, prompt) for prompt in (*own, *more)]
    whole = _NUM_PROMPT_BLOCKS * BLOCK_SIZE
    return Sight(
        lines=(repr(left), repr(last)), number=sum(tokens < whole for tokens in left)
    )


def _life(
    seed: str, gap_s: float, own: list[TokenIds]
) -> list[tuple[float, str, TokenIds]]:
    """Return who asks what and when: in both worlds as often, and nothing is evicted.

    Each prompt of the victim is used twice in a round, `gap_s` apart, and all of them
    once more in the end, so that the order of last uses does not tell the worlds apart.
    """
    rng = random.Random(seed)
    victims = _prompts("victim", _NUM_VICTIM_PROMPTS)
    end = _NUM_ROUNDS * _ROUND_S + _LATE_S
    life: list[tuple[float, str, TokenIds]] = []
    for index, prompt in enumerate(victims):
        start = rng.uniform(0, _LATE_S)
        for number in range(_NUM_ROUNDS):
            now = start + number * _ROUND_S
            life += [(now, VICTIM, prompt), (now + gap_s, VICTIM, prompt)]
        life.append((end + index / 100, VICTIM, prompt))
    for index, prompt in enumerate(own):
        now = end - 30.0 - index
        life.append((now, ATTACKER, prompt))
        if index % 2:  # so that it has prompts of more than one class
            life.append((now - 20.0, ATTACKER, prompt))
    return sorted(life, key=lambda event: event[0])


def measure_beyond() -> Beyond:
    """Count what a tenant loses of what it borrowed, and while others run."""
    lending = Scene(_NUM_SCENE_BLOCKS, floors={ATTACKER: _SCENE_FLOOR})
    for prompt in _prompts("own", _NUM_SCENE_BLOCKS):
        lending.use(ATTACKER, prompt)
    num_retained = lending.num_held_by(ATTACKER)
    for prompt in _prompts("flood", _NUM_SCENE_BLOCKS):
        lending.use(VICTIM, prompt)
    running = Scene(_NUM_SCENE_BLOCKS, floors={ATTACKER: _SCENE_FLOOR})
    for prompt in _prompts("own", NUM_OWN_PROMPTS):
        running.use(ATTACKER, prompt)
    lease = running.begin(ATTACKER, made_up_prompt("grows", 1, num_more=0))
    assert lease is not None, "the cache is not full yet"
    num_before = running.num_held_by(ATTACKER)
    number = 0
    while True:
        prompt = made_up_prompt(f"runs {number}", 1, num_more=0)
        if running.begin(VICTIM, prompt) is None:
            break
        number += 1
    assert 0 < number <= _NUM_SCENE_BLOCKS, "each of them holds a block"
    running.grow(lease, _NUM_PROMPT_BLOCKS * BLOCK_SIZE)
    return Beyond(
        floor=_SCENE_FLOOR,
        num_retained=num_retained,
        num_left=lending.num_held_by(ATTACKER),
        num_lost_running=num_before - running.num_held_by(ATTACKER),
    )


def _prompts(kind: str, num: int) -> list[TokenIds]:
    return [made_up_prompt(f"{kind} {i}", _NUM_PROMPT_BLOCKS) for i in range(num)]
