"""A request that coasts is scheduled as if it did not."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from stemkv.core import (
    CacheConfig,
    Domain,
    Fcfs,
    FinishReason,
    Lru,
    PrefixCache,
    RequestSpec,
    Sample,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
    TokenIds,
)
from stemkv.core.check import check_scheduler
from stemkv.core.events import (
    BlocksPublished,
    Event,
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    TokenSampled,
)
from stemkv.core.tokens import TOKEN_BYTES

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Script:
    """One request whose output is known."""

    spec: RequestSpec
    output: bytes
    stops: bool  # the last token of the output ends it, not `max_new_tokens`


def script(rng: random.Random, index: int, now: float) -> Script:
    prompt = [rng.randrange(2) for _ in range(rng.randint(1, 18))]
    num_output = rng.randint(1, 16)
    output = [rng.randrange(2) for _ in range(num_output)]
    stops = rng.random() < 0.5
    spec = RequestSpec(
        request_id=f"r{index}",
        prompt=TokenIds.from_ids(prompt),
        max_new_tokens=num_output + (rng.randint(1, 5) if stops else 0),
        arrival_s=now,
        domain=Domain.private(rng.choice("ab")),
        namespace=rng.choice([b"n", b"n", None]),
    )
    return Script(spec, TokenIds.from_ids(output).buffer, stops)


@dataclass
class Run:
    """The loop of a driver that knows all outputs."""

    scheduler: Scheduler
    coasts: bool
    scripts: dict[str, Script] = field(default_factory=dict)
    work: list[tuple[int, int, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    num_coasted: int = 0

    def step(self, now: float) -> None:
        plan = self.scheduler.schedule(now)
        check_scheduler(self.scheduler)
        self.work.append(work_of(plan))
        self.num_coasted += plan.num_coasting
        samples = {
            chunk.request_id: (self.sample(chunk.request_id),)
            for chunk in plan.chunks
            if chunk.num_samples
        }
        events = self.scheduler.commit(plan, StepResult(samples), now + 0.5)
        check_scheduler(self.scheduler)
        self.events += [
            e for e in events if not isinstance(e, TokenSampled | BlocksPublished)
        ]
        if not self.coasts:
            return
        for event in events:
            if isinstance(event, TokenSampled):
                start = (event.index + 1) * TOKEN_BYTES
                output = self.scripts[event.request_id].output
                # The last token is sampled, not coasted: it may end the request.
                self.scheduler.coast(event.request_id, output[start:-TOKEN_BYTES])

    def sample(self, request_id: str) -> Sample:
        request = self.scheduler.request(request_id)
        assert request is not None
        script = self.scripts[request_id]
        index = request.num_output_tokens
        end = (index + 1) * TOKEN_BYTES
        token = int.from_bytes(script.output[end - TOKEN_BYTES : end], "little")
        is_last = end == len(script.output)
        stops = script.stops and is_last
        return Sample(token, FinishReason.STOP_TOKEN if stops else None)


def work_of(plan: StepPlan) -> tuple[int, int, int]:
    """Tokens, requests and positions of a step, coasting or not."""
    return (
        plan.num_tokens,
        len(plan.chunks) + plan.num_coasting,
        sum(chunk.end for chunk in plan.chunks) + plan.num_coasting_context,
    )


def build(coasts: bool, num_blocks: int) -> Run:
    cache = PrefixCache(
        CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE), Lru()
    )
    config = SchedulerConfig(token_budget=12, max_num_running=6)
    return Run(Scheduler(config, cache, Fcfs()), coasts)


@pytest.mark.parametrize("seed", range(60))
def test_coasting_changes_no_step_no_event_and_no_state(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks = rng.choice([10, 14, 40])
    runs = [build(coasts, num_blocks) for coasts in (False, True)]
    index = 0
    now = 0.0
    for step in range(400):
        while step < 120 and rng.random() < 0.25:
            each = script(rng, index, now)
            index += 1
            for run in runs:
                run.scripts[each.spec.request_id] = each
                run.scheduler.add(each.spec)
        cancelled = rng.randrange(index) if index and rng.random() < 0.05 else None
        for run in runs:
            if cancelled is not None:
                run.scheduler.cancel(f"r{cancelled}", now)
            run.step(now)
        if step > 120 and not runs[0].scheduler.has_work:
            break
        now += 1.0

    plain, coasting = runs
    assert not plain.scheduler.has_work
    assert not coasting.scheduler.has_work
    assert coasting.work == plain.work
    assert coasting.events == plain.events
    assert coasting.scheduler.cache.usage() == plain.scheduler.cache.usage()
    assert {type(e) for e in plain.events} >= {RequestAdmitted, RequestFinished}
    assert coasting.num_coasted > 30


def test_the_random_runs_preempt_requests_that_coast() -> None:
    """Else the test above would not say much about it."""
    rng = random.Random(3)
    run = build(coasts=True, num_blocks=10)
    for index in range(6):
        each = script(rng, index, 0.0)
        run.scripts[each.spec.request_id] = each
        run.scheduler.add(each.spec)
    now = 0.0
    while run.scheduler.has_work:
        run.step(now)
        now += 1.0
    assert any(isinstance(e, RequestPreempted) for e in run.events)
    assert run.num_coasted
