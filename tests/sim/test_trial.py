"""The trial's truth table, from our replay and from a simulator that shares no code.

The simulator keeps blocks as unrelated objects in order of last use, as vLLM's free
queue does: full blocks only, never the last token, a request's blocks freed last to
first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import pytest

from stemkv.sim.bounds import clairvoyant, infinite
from stemkv.sim.distance import lru_curve
from stemkv.sim.reuse import find_reuses
from stemkv.sim.sequence import replay_sequence
from stemkv.sim.sharing import SharingRule
from tests.sim.trial import NUM_TOKENS, PUBLISHED, trial, trial_trace

SHARED = SharingRule(name="shared")
ISOLATED = SharingRule(name="isolated")
PUBLIC = SharingRule(name="public")
RULES = pytest.mark.parametrize("rule", [SHARED, ISOLATED], ids=lambda rule: rule.name)
NEAR = 2.5  # points: who came when is another draw
CAPACITIES = pytest.mark.parametrize("num_blocks", list(PUBLISHED), ids=str)


@dataclass(slots=True)
class Truth:
    """What the simulator found."""

    hit_tokens: int = 0
    hit_blocks: int = 0
    num_blocks: int = 0
    served: Counter[str] = field(default_factory=Counter)  # "writer→reader" → tokens


def truth(
    num_blocks: int | None,
    rule: SharingRule,
    *,
    block_size: int = 16,
    freed_first: str = "tail",
) -> Truth:
    found = Truth()
    names: dict[tuple[object, bytes], int] = {}  # (what is before it, content) → block
    cached: OrderedDict[int, str] = OrderedDict()  # block → writer, oldest use first
    for request in trial():
        prompt = request.prompt
        before: object = request.tenant if rule is ISOLATED else "all"
        blocks: list[int] = []
        for start in range(0, len(prompt) - block_size + 1, block_size):
            content = prompt[start : start + block_size].tobytes()
            before = names.setdefault((before, content), len(names))
            blocks.append(before)
        hits = 0
        for block in blocks[: (len(prompt) - 1) // block_size]:
            if block not in cached:
                break
            hits += 1
            found.served[f"{cached[block]}→{request.tenant}"] += block_size
        found.hit_tokens += hits * block_size
        found.hit_blocks += hits
        found.num_blocks += len(blocks)
        for block in blocks[::-1] if freed_first == "tail" else blocks:
            cached.setdefault(block, request.tenant)
            cached.move_to_end(block)
        while num_blocks is not None and len(cached) > num_blocks:
            cached.popitem(last=False)
    return found


def test_the_trial_is_what_is_known_of_it() -> None:
    beginnings = Counter(request.prompt[:12_000].tobytes() for request in trial())
    (beginning, _) = beginnings.most_common(1)[0]
    sharing = [
        request.tenant
        for request in trial()
        if request.prompt[:12_000].tobytes() == beginning
    ]

    assert len(trial()) == 200
    assert sum(len(request.prompt) for request in trial()) == NUM_TOKENS
    assert len(sharing) == 80
    assert sharing[0] == "globex"
    assert sharing.count("globex") == 46


@RULES
@CAPACITIES
def test_every_cell_of_the_truth_table(
    num_blocks: int | None, rule: SharingRule
) -> None:
    expected = truth(num_blocks, rule)

    found = replay_sequence(trial_trace(16), num_blocks=num_blocks, rule=rule)

    assert found.hits.hit_tokens == expected.hit_tokens
    served = {f"{each.writer}→{each.reader}": each.tokens for each in found.writers}
    assert served == dict(expected.served)
    assert found.num_too_long == 0


@RULES
def test_one_pass_gives_the_same_cells(rule: SharingRule) -> None:
    curve = lru_curve(find_reuses(trial_trace(16), rule))

    for num_blocks in PUBLISHED:
        size = num_blocks or curve.num_blocks_for_all
        assert curve.at(size).hit_tokens == truth(num_blocks, rule).hit_tokens


def test_what_follows_from_the_published_totals_is_the_published_figure() -> None:
    trace = trial_trace(16)
    shared = replay_sequence(trace, num_blocks=None, rule=SHARED)
    isolated = replay_sequence(trace, num_blocks=None, rule=ISOLATED)

    assert {f"{each.writer}→{each.reader}": each.tokens for each in shared.writers} == {
        "globex→acme": 408_000,
        "globex→globex": 540_000,
    }
    found = (round(100 * each.hits.hit_rate, 2) for each in (shared, isolated))
    assert tuple(found) == PUBLISHED[None]
    # Here the shared beginning never goes: 79 hits of 12,000.
    held = replay_sequence(trace, num_blocks=4_000, rule=SHARED)
    assert round(100 * held.hits.hit_rate, 1) == PUBLISHED[4_000][0]


@RULES
@CAPACITIES
def test_all_cells_are_near_the_published_ones(
    num_blocks: int | None, rule: SharingRule
) -> None:
    found = replay_sequence(trial_trace(16), num_blocks=num_blocks, rule=rule)

    published = PUBLISHED[num_blocks][0 if rule is SHARED else 1]
    assert 100 * found.hits.hit_rate == pytest.approx(published, abs=NEAR)


def test_declaring_the_beginning_public_pays_for_isolation() -> None:
    trace = trial_trace(16)

    hits = {
        rule.name: replay_sequence(trace, num_blocks=1_000, rule=rule).hits.hit_tokens
        for rule in (SHARED, ISOLATED, PUBLIC)
    }

    assert hits["public"] == hits["shared"] > 1.5 * hits["isolated"]


def test_which_end_of_a_prefix_goes_first_is_worth_much() -> None:
    tail = truth(28, SHARED, block_size=512)
    root = truth(28, SHARED, block_size=512, freed_first="root")
    trace = trial_trace(512)

    found = replay_sequence(trace, num_blocks=28, rule=SHARED).hits

    assert (found.hit_units, found.hit_tokens) == (tail.hit_blocks, tail.hit_tokens)
    assert tail.hit_blocks > 1.4 * root.hit_blocks
    reuses = find_reuses(trace, SHARED)
    assert found.hit_units < clairvoyant(reuses, 28).hit_units
    assert clairvoyant(reuses, 28).hit_units <= infinite(reuses).hit_units
