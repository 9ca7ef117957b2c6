"""One engine that is not there, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from stemkv.core import CacheConfig, Domain, SchedulerConfig
from stemkv.core.books.cost import StepShape
from stemkv.core.core import CoreConfig
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.schedule.orders import OrderConfig
from stemkv.core.schedule.request import RequestId, RequestSpec
from stemkv.errors import InvariantError, PromptTooLong
from stemkv.measure.results import MemorySample
from stemkv.sim.replica import Replica, join_samples
from tests.sim.depth_cost import DepthCost

FOREVER = math.inf


class Watching(DepthCost):
    """Every step takes a second; remembers what each was made of."""

    def __init__(self) -> None:
        self.shapes: list[StepShape] = []

    def step_seconds(self, shape: StepShape) -> float:
        self.shapes.append(replace(shape))
        return 1.0


def build(
    num_blocks: int = 40,
    *,
    on_end: Callable[[RequestId, float], None] = lambda request_id, now: None,
    token_budget: int = 64,
) -> Replica:
    return Replica(
        0,
        config=CoreConfig(
            cache=CacheConfig(num_blocks=num_blocks, block_size=4),
            scheduler=SchedulerConfig(
                token_budget=token_budget, max_num_running=8, watermark=0.0
            ),
            eviction=EvictionConfig(name="lru"),
            order=OrderConfig(name="fcfs"),
        ),
        costs=Watching(),
        on_end=on_end,
    )


def add(
    replica: Replica, name: str, prompt: list[int], num_output: int, *, at: float = 0.0
) -> None:
    spec = RequestSpec(
        request_id=RequestId(name),
        prompt=TokenIds.from_ids(prompt),
        max_new_tokens=num_output,
        arrival_s=at,
        domain=Domain.private("a"),
        namespace=b"n" * 32,
    )
    replica.add(spec, 1_000 + len(replica.times))


def run(replica: Replica, now: float = 0.0, until: float = FOREVER) -> float:
    while replica.has_work:
        now = replica.start_step(now, until)
        replica.finish_step()
    return now


def shapes(replica: Replica) -> list[StepShape]:
    assert isinstance(replica.costs, Watching)
    return replica.costs.shapes


@pytest.mark.parametrize("until", [0.0, 3.5, FOREVER], ids=str)
def test_a_request_alone_gets_one_token_a_step(until: float) -> None:
    ends: list[tuple[str, float]] = []
    replica = build(on_end=lambda *end: ends.append(end))
    add(replica, "r", [1] * 6, 30)

    assert run(replica, until=until) == 30.0
    assert ends == [("r", 30.0)]
    times = replica.times[RequestId("r")]
    assert (times.first_token_s, times.end_s) == (1.0, 30.0)
    assert replica.itl_s == {1.0: 29}
    assert (replica.num_steps, replica.busy_s) == (30, 30.0)
    contexts = [shape.num_decode_context for shape in shapes(replica)]
    assert contexts == [0, *range(7, 36)]


def test_a_stretch_begins_no_step_when_somebody_may_have_arrived() -> None:
    replica = build()
    add(replica, "r", [1] * 5, 30)
    now = replica.start_step(0.0, FOREVER)
    replica.finish_step()
    assert replica.scheduler.num_quiet_steps == 2

    assert replica.start_step(now, until=now) == now + 1.0, "one step at least"
    replica.finish_step()
    assert replica.num_steps == 2


def test_a_stretch_ends_after_the_step_in_which_somebody_arrives() -> None:
    replica = build()
    add(replica, "r", [1] * 5, 30)
    now = replica.start_step(0.0, FOREVER)
    replica.finish_step()

    assert replica.start_step(now, until=now + 1.5) == now + 2.0
    replica.finish_step()
    assert not replica.is_busy


def test_who_arrives_when_a_step_ends_is_considered_for_the_next() -> None:
    replica = build()
    add(replica, "r", [1] * 5, 30)
    now = replica.start_step(0.0, FOREVER)
    replica.finish_step()

    assert replica.start_step(now, until=now + 1.0) == now + 1.0


def test_samples_that_are_joined_keep_all_evictions_and_the_later_state() -> None:
    one = MemorySample(at_s=1.0, active=1, cached=2, free=3, evicted=4, stalled=5)
    two = MemorySample(at_s=2.0, active=3, cached=2, free=1, evicted=6, stalled=0)

    assert join_samples(one, two) == replace(two, evicted=10, stalled=5)


def test_the_one_token_that_a_hit_leaves_is_a_prefill() -> None:
    replica = build()
    add(replica, "first", [1] * 9, 1)
    now = run(replica)
    add(replica, "again", [1] * 9, 1, at=now)
    run(replica, now)

    whole, rest = shapes(replica)
    assert (whole.num_prefill_tokens, whole.num_decodes) == (9, 0)
    assert (rest.num_prefill_tokens, rest.num_prefill_context) == (1, 9)
    assert rest.num_decodes == 0
    assert [span.num_prefill_tokens for span in replica.steps.points()] == [9, 1]


def test_a_copy_is_paid_for_in_the_step_that_makes_it() -> None:
    replica = build()
    add(replica, "first", [1] * 8, 1)
    now = run(replica)
    add(replica, "other", [1] * 6 + [2] * 3, 1, at=now)
    run(replica, now)

    assert [shape.num_copied_tokens for shape in shapes(replica)] == [0, 2]


def test_a_gap_that_a_preemption_tore_is_one_long_gap() -> None:
    """Two requests on memory for less: the younger yields, and comes back."""
    replica = build(num_blocks=8)
    add(replica, "old", [1] * 5, 20)
    add(replica, "young", [2] * 5, 20, at=0.5)
    run(replica)

    assert replica.num_preemptions >= 1
    assert sum(replica.itl_s.values()) == 2 * 19
    old, young = replica.times[RequestId("old")], replica.times[RequestId("young")]
    assert old.end_s == 20.0
    assert young.end_s is not None
    assert young.first_token_s is not None
    # All gaps of both together are what lies between first and last tokens.
    total = 19.0 + young.end_s - young.first_token_s
    assert sum(gap * count for gap, count in replica.itl_s.items()) == total
    assert max(replica.itl_s) > 1.0
    assert young.lost_s is None


def test_memory_is_noted_after_every_step_and_adds_up() -> None:
    replica = build(num_blocks=8)
    for number in range(4):
        add(replica, f"r{number}", [number] * 9, 9, at=float(number))
    run(replica)

    samples = replica.memory.points()
    assert all(s.active + s.cached + s.free == 8 for s in samples)
    assert sum(s.evicted for s in samples) == replica.cache.usage().num_evicted_blocks
    assert any(s.evicted for s in samples)
    assert [s.at_s for s in samples] == sorted(s.at_s for s in samples)
    assert samples[-1].active == 0


def test_steps_follow_each_other_and_count_all_steps() -> None:
    replica = build()
    add(replica, "r", [1] * 5, 30)
    end = run(replica)

    spans = replica.steps.points()
    assert sum(span.num_steps for span in spans) == replica.num_steps == 30
    assert len(spans) < 30, "stretches are one span"
    bounds = [span.start_s for span in spans] + [end]
    assert [span.end_s for span in spans] == bounds[1:]


def test_one_that_can_never_run_leaves_nothing_behind() -> None:
    replica = build(num_blocks=4)
    with pytest.raises(PromptTooLong):
        add(replica, "large", [1] * 17, 1)

    assert not replica.has_work
    assert not replica.times
    add(replica, "large", [1] * 9, 1)  # the name is free
    run(replica)
    assert len(replica.entries) == 1


def test_a_step_ends_once() -> None:
    replica = build()
    with pytest.raises(InvariantError, match="replica 0 runs no step"):
        replica.finish_step()
    add(replica, "r", [1], 1)
    assert not replica.is_busy
    replica.start_step(0.0, FOREVER)
    assert replica.is_busy
    replica.finish_step()
    with pytest.raises(InvariantError, match="replica 0 runs no step"):
        replica.finish_step()
