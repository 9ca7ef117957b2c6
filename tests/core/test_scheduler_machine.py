"""Random walks over everything a caller can do, against the transparency oracle.

After every act the whole state is checked, block by block and slot by slot; at the end
everybody has what he would have got alone, and nothing is lost.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stemkv.core import FinishReason, OrderConfig
from stemkv.core.prefix.events import BlocksEvicted, BlocksRetired
from stemkv.core.schedule import step
from stemkv.core.schedule.events import (
    PrefixAwaited,
    RequestAdmitted,
    RequestForked,
    RequestPreempted,
    RequestRestarted,
)
from stemkv.core.schedule.request import RequestState
from stemkv.errors import (
    DuplicateRequest,
    InvalidLimit,
    InvariantError,
    PromptTooLong,
)
from tests.core.scheduling import (
    BASE,
    COSTS,
    Driver,
    Model,
    build_spec,
    namespace_of,
    of_type,
    tokens,
)
from tests.seeds import slow

TENANTS = "xyz"
PUBLIC_TEXT = "abcaabbacb"
# Prompts start like one of these, so that tenants, samples and outputs keep meeting.
STEMS = (PUBLIC_TEXT, "bbacabcabb", "abcabbbbbb", "abXcYabbac")
MAX_STEM = 10
# One token in four ends a request, if any does.
STOPS: tuple[dict[str, FinishReason], ...] = (
    {},
    {},
    {"d": FinishReason.STOP_TOKEN},
    {"d": FinishReason.FAILED},
)
ORDER_CONFIGS = (
    OrderConfig(name="fcfs"),
    OrderConfig(name="lpm"),
    OrderConfig(name="dfs"),
    OrderConfig(name="residual", pauses_prefills=False),
    OrderConfig(name="residual"),
    OrderConfig(lane=1, quantum=1),
    OrderConfig(lane=2, quantum=8, pauses_prefills=False, weights={"a": 2.5}),
    OrderConfig(lane=4, quantum=16, decode_weight=0.3),
    OrderConfig(name="deadline", quantum=16, slo_ttft_s={"chat": 0.05}),
)
# Versions that a request may ask for; most ask for the same.
ADAPTERS = (None, None, None, "v1")


def add(
    driver: Driver,
    prompt: str,
    *,
    shares: bool = True,
    adapter: str | None = None,
    **spec: int | str,
) -> None:
    """Add a request; it is refused exactly if it could never run."""
    model = Model(adapter, weights=driver.num_fences)
    spec |= {"namespace": namespace_of(model) if shares else None, "adapter": adapter}  # type: ignore[dict-item]
    num_samples, max_new_tokens = spec["num_samples"], spec["max_new_tokens"]
    assert isinstance(num_samples, int)
    assert isinstance(max_new_tokens, int)
    num_slots = len(tokens(prompt)) + max_new_tokens - 1
    num_needed = driver.cache.num_blocks_for(num_slots)
    before = driver.scheduler.requests()
    request_id = f"r{len(driver.requests)}-{len(driver.plans)}"
    if num_samples > driver.config.max_num_running:
        with pytest.raises(InvalidLimit):
            driver.add(request_id, prompt, **spec)  # type: ignore[arg-type]
    elif num_needed > driver.cache.pool.num_total:
        with pytest.raises(PromptTooLong):
            driver.add(request_id, prompt, **spec)  # type: ignore[arg-type]
    else:
        request = driver.add(request_id, prompt, **spec)  # type: ignore[arg-type]
        before = (*before, request)
    assert driver.scheduler.requests() == before


def cancel(driver: Driver, request_id: str) -> None:
    """Cancel a request; yes is answered exactly once, and never after the end."""
    request = driver.requests[request_id]
    can_end = request_id not in driver.ends and not request.is_cancelled
    can_end = can_end and request.state is not RequestState.ABORTED

    assert driver.cancel(request_id) is can_end

    assert not driver.cancel(request_id)


def abandon(driver: Driver, num_done: int) -> None:
    """Fail a step after some of its copies and chunks; the rest is garbage."""
    plan = driver.scheduler.pending
    assert plan is not None
    planned = {chunk.request_id for chunk in plan.chunks}
    survivors = {r.request_id for r in driver.scheduler.requests()} - planned
    driver.runner.fail(plan, num_done)

    driver.abandon(plan)

    assert {r.request_id for r in driver.scheduler.requests()} == survivors
    assert planned <= set(driver.ends)


def commit_but_for(driver: Driver, request_id: str) -> None:
    """Fail one chunk of a step; everybody else gets what he would have got."""
    plan = driver.scheduler.pending
    assert plan is not None

    driver.commit(plan, driver.runner.execute(plan, failed=[request_id]))

    assert request_id in driver.ends


def retire(driver: Driver, adapter: str | None = None) -> None:
    """Fence a namespace; nothing of it can be found by anybody."""
    namespace = namespace_of(Model(adapter, weights=driver.num_fences))
    driver.retire(namespace)
    check_nothing_is_found(driver, namespace)


def retire_for_all(driver: Driver, namespace: bytes) -> None:
    """Fence a namespace for requests in flight; they are cut off from it for good."""
    driver.retire_for_all(namespace)
    num_retired = driver.cache.num_retired_blocks
    check_nothing_is_found(driver, namespace)
    assert all(r.namespace != namespace for r in driver.scheduler.requests())

    assert driver.retire_for_all(namespace) == 0
    assert driver.cache.num_retired_blocks == num_retired


def check_nothing_is_found(driver: Driver, namespace: bytes) -> None:
    for stem in STEMS:
        for tenant in TENANTS:
            found = driver.num_findable(stem, tenant=tenant, namespace=namespace)
            assert found == 0


def roll_out(driver: Driver, in_flight: str) -> None:
    """Replace the weights: fence first, then deal with requests, then change."""
    for namespace in driver.cache.tree.roots():
        retire_for_all(driver, namespace)
    driver.fence()
    for request in driver.scheduler.requests():
        if in_flight == "abort":
            cancel(driver, request.request_id)
        elif in_flight == "restart":
            driver.restart(
                request.request_id,
                request.spec.adapter,
                shares=request.spec.namespace is not None,
            )
    if in_flight != "finish":
        assert driver.scheduler.num_before(driver.num_fences) == 0
    driver.lift_due()


@st.composite
def prompts(draw: st.DrawFn) -> str:
    stem = draw(st.sampled_from(STEMS))[: draw(st.integers(0, MAX_STEM))]
    rest = draw(st.text("abc", min_size=0 if stem else 1, max_size=3))
    return stem + rest


class SchedulerMachine(RuleBasedStateMachine):
    """Callers who add and cancel, an operator who fences, and steps that may fail."""

    driver: Driver

    @initialize(
        block_size=st.integers(1, 4),
        num_slots=st.integers(14, 60),
        token_budget=st.integers(1, 16),
        max_num_running=st.integers(1, 5),
        max_steps_awaiting=st.sampled_from([0, 1, 256]),
        watermark=st.sampled_from([0.0, 0.3]),
        num_public=st.integers(0, MAX_STEM),
        stops=st.sampled_from(STOPS),
        order=st.sampled_from(ORDER_CONFIGS),
        step_time_s=st.sampled_from([None, None, 0.002, 0.02]),
        retained_floor_blocks=st.sampled_from([0, 0, 2]),
    )
    def build(
        self,
        block_size: int,
        num_slots: int,
        token_budget: int,
        max_num_running: int,
        max_steps_awaiting: int,
        watermark: float,
        num_public: int,
        stops: dict[str, FinishReason],
        order: OrderConfig,
        step_time_s: float | None,
        retained_floor_blocks: int,
    ) -> None:
        self.driver = Driver(
            num_blocks=num_slots // block_size,
            block_size=block_size,
            token_budget=token_budget,
            max_num_running=max_num_running,
            max_steps_awaiting=max_steps_awaiting,
            watermark=watermark,
            stops=stops,
            order=order,
            step_time_s=step_time_s,
            retained_floor_blocks=retained_floor_blocks,
        )
        self.driver.declare_public(PUBLIC_TEXT[:num_public])

    @property
    def is_pending(self) -> bool:
        return self.driver.scheduler.pending is not None

    @rule(
        prompt=prompts(),
        max_new_tokens=st.integers(1, 12),
        tenant=st.sampled_from(TENANTS),
        num_samples=st.sampled_from([1, 1, 1, 2, 3]),
        shares=st.sampled_from([True, True, True, False]),
        adapter=st.sampled_from(ADAPTERS),
    )
    def add(self, prompt: str, **spec: Any) -> None:
        add(self.driver, prompt, **spec)

    @rule(
        prompt=prompts(),
        max_new_tokens=st.integers(1, 12),
        tenants=st.lists(st.sampled_from(TENANTS), min_size=2, max_size=4),
    )
    def add_equal_prompts(
        self, prompt: str, max_new_tokens: int, tenants: list[str]
    ) -> None:
        for tenant in tenants:
            add(
                self.driver,
                prompt,
                max_new_tokens=max_new_tokens,
                tenant=tenant,
                num_samples=1,
            )

    @precondition(lambda self: self.driver.scheduler.has_work)
    @rule(data=st.data())
    def add_an_id_in_flight(self, data: st.DataObject) -> None:
        requests = self.driver.scheduler.requests()
        request = data.draw(st.sampled_from(requests))
        if request.sample == 0:
            with pytest.raises(DuplicateRequest):
                self.driver.scheduler.add(build_spec(request.request_id))
        assert self.driver.scheduler.requests() == requests

    @precondition(lambda self: not self.is_pending)
    @rule(num_steps=st.integers(1, 5))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.step()

    @precondition(lambda self: not self.is_pending)
    @rule()
    def schedule(self) -> None:
        self.driver.schedule()

    @precondition(lambda self: self.is_pending)
    @rule()
    def commit(self) -> None:
        plan = self.driver.scheduler.pending
        assert plan is not None
        self.driver.execute_and_commit(plan)

    @precondition(lambda self: self.is_pending)
    @rule(data=st.data())
    def commit_but_for_a_chunk(self, data: st.DataObject) -> None:
        plan = self.driver.scheduler.pending
        assert plan is not None
        if plan.chunks:
            ids = [chunk.request_id for chunk in plan.chunks]
            commit_but_for(self.driver, data.draw(st.sampled_from(ids)))

    @precondition(lambda self: self.is_pending)
    @rule(num_done=st.integers(0, 4))
    def abandon(self, num_done: int) -> None:
        abandon(self.driver, num_done)

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        cancel(self.driver, data.draw(st.sampled_from(sorted(self.driver.requests))))

    @rule()
    def retire(self) -> None:
        retire(self.driver)

    @rule(num_public=st.integers(0, MAX_STEM), adapter=st.sampled_from(ADAPTERS))
    def declare_public(self, num_public: int, adapter: str | None) -> None:
        model = Model(adapter, weights=self.driver.num_fences)
        self.driver.declare_public(PUBLIC_TEXT[:num_public], namespace_of(model))

    # What an operator changes while requests are in flight

    @precondition(lambda self: not self.is_pending and self.driver.scheduler.has_work)
    @rule(data=st.data(), adapter=st.sampled_from(ADAPTERS), shares=st.booleans())
    def restart(self, data: st.DataObject, adapter: str | None, shares: bool) -> None:
        requests = self.driver.scheduler.requests()
        request = data.draw(st.sampled_from(requests))
        place = request.order_key

        self.driver.restart(request.request_id, adapter, shares=shares)

        assert self.driver.scheduler.requests() == requests
        assert request.state is RequestState.WAITING
        assert request.order_key == place
        assert request.tokens == request.spec.prompt.buffer

    @precondition(lambda self: not self.is_pending)
    @rule(data=st.data())
    def retire_for_all(self, data: st.DataObject) -> None:
        roots = sorted(self.driver.cache.tree.roots())
        if roots:
            retire_for_all(self.driver, data.draw(st.sampled_from(roots)))

    @precondition(lambda self: not self.is_pending)
    @rule(in_flight=st.sampled_from(["finish", "finish", "restart", "abort"]))
    def roll_out(self, in_flight: str) -> None:
        roll_out(self.driver, in_flight)

    @precondition(lambda self: self.driver.runner.weights < self.driver.num_fences)
    @rule()
    def lift_fence(self) -> None:
        epoch = self.driver.runner.weights + 1
        if self.driver.scheduler.num_before(epoch):
            with pytest.raises(InvariantError):
                self.driver.lift_fence(epoch)
        elif not self.is_pending:
            self.driver.lift_fence(epoch)

    @precondition(lambda self: self.is_pending)
    @rule(data=st.data())
    def nothing_is_changed_while_a_step_is_pending(self, data: st.DataObject) -> None:
        scheduler, requests = self.driver.scheduler, self.driver.scheduler.requests()
        with pytest.raises(InvariantError, match="is pending"):
            scheduler.retire(namespace_of(BASE), self.driver.now)
        if requests:
            request_id = data.draw(st.sampled_from(requests)).request_id
            with pytest.raises(InvariantError, match="is pending"):
                scheduler.restart(request_id, None, None, self.driver.now)

    @invariant()
    def is_consistent(self) -> None:
        self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            if self.is_pending:
                self.commit()
            self.driver.finish()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=70, stateful_step_count=40, deadline=None
)


@pytest.mark.slow
def test_many_more_random_walks() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(max_examples=800, stateful_step_count=60, deadline=None),
    )


def live_long(seed: int, num_acts: int) -> Driver:
    """One scheduler that never comes to rest."""
    rng = random.Random(seed)
    block_size = rng.randint(1, 4)
    token_budget = rng.choice([1, 4, 9, 24])
    driver = Driver(
        num_blocks=rng.randint(24, 48) // block_size,
        block_size=block_size,
        token_budget=token_budget,
        max_num_running=rng.randint(1, 8),
        max_steps_awaiting=rng.choice([0, 2, 256]),
        watermark=rng.choice([0.0, 0.2]),
        stops=rng.choice(STOPS),
        order=rng.choice(ORDER_CONFIGS),
        step_time_s=rng.choice([None, 0.01]),
        retained_floor_blocks=rng.choice([0, 3]),
    )
    driver.declare_public(PUBLIC_TEXT)
    for _ in range(num_acts):
        if rng.random() < 0.25 and len(driver.scheduler.requests()) < 20:
            prompt = rng.choice(STEMS)[: rng.randint(1, MAX_STEM)]
            spec: dict[str, Any] = {
                "max_new_tokens": rng.randint(1, 14),
                "num_samples": rng.choice([1, 1, 1, 3]),
                "shares": rng.random() < 0.8,
                "adapter": rng.choice(ADAPTERS),
            }
            for _ in range(rng.choice([1, 1, 3])):
                rest = "".join(rng.choices("abc", k=rng.choice([0, 0, 1, 3])))
                tenant = rng.choice(TENANTS)
                add(driver, prompt + rest, tenant=tenant, **spec)
        change_what_is_served(driver, rng)
        plan = driver.schedule()
        driver.check()
        if rng.random() < 0.05 and driver.scheduler.requests():
            cancel(driver, rng.choice(driver.scheduler.requests()).request_id)
        if rng.random() < 0.005:
            retire(driver)
            driver.declare_public(
                PUBLIC_TEXT, namespace_of(Model(weights=driver.num_fences))
            )
        if rng.random() < 0.02:
            abandon(driver, rng.randint(0, len(plan.copies) + len(plan.chunks)))
        else:
            driver.execute_and_commit(plan)
        driver.check()
    driver.finish()
    return driver


def change_what_is_served(driver: Driver, rng: random.Random) -> None:
    """Seldom, and never twice at a time: somebody must get to the end."""
    driver.lift_due()
    if rng.random() < 0.03 and driver.scheduler.requests():
        request = rng.choice(driver.scheduler.requests())
        adapter = rng.choice(ADAPTERS)
        driver.restart(request.request_id, adapter, shares=rng.random() < 0.8)
    if rng.random() < 0.01:
        retire_for_all(driver, namespace_of(Model(weights=driver.num_fences)))
    if rng.random() < 0.01:
        roll_out(driver, rng.choice(["finish", "finish", "restart", "abort"]))
    if rng.random() < 0.01:
        driver.fence()  # without a change of what is cached
        driver.declare_public(
            PUBLIC_TEXT, namespace_of(Model(weights=driver.num_fences))
        )


@pytest.mark.parametrize("seed", [*range(6), *slow(range(6, 10))])
def test_a_scheduler_keeps_its_promises_for_a_while(seed: int) -> None:
    live_long(seed, num_acts=400)


def fail_often(seed: int) -> Driver:
    """Prompts end inside each other's blocks, time is short, and passes fail.

    Deep tokens cost most of a step's time, so many start by a copy and get no chunk.
    """
    rng = random.Random(seed)
    block_size = rng.randint(3, 6)
    driver = Driver(
        num_blocks=150 // block_size,
        block_size=block_size,
        max_steps_awaiting=rng.choice([0, 0, 4]),
        order=rng.choice(ORDER_CONFIGS),
        step_time_s=0.01 * rng.randint(8, 30),
        costs=replace(COSTS, prefill_pair_s=0.01),
    )
    for _ in range(80):
        while len(driver.scheduler.requests()) < 6:
            prompt = "abcaabbacbccab"[: rng.randint(4, 14)]
            prompt += "".join(rng.choices("abc", k=rng.randint(1, 3)))
            add(driver, prompt, max_new_tokens=rng.randint(1, 4), num_samples=1)
        plan = driver.schedule()
        if rng.random() < 0.25:
            abandon(driver, rng.randint(0, len(plan.copies) + len(plan.chunks)))
        elif plan.chunks and rng.random() < 0.2:
            commit_but_for(driver, rng.choice(plan.chunks).request_id)
        else:
            driver.execute_and_commit(plan)
        driver.check()
    driver.finish()
    return driver


@pytest.mark.parametrize("seed", range(10))
def test_failed_passes_leave_nothing_that_anybody_relies_on(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "_LEAST_PREFILL", 1)
    fail_often(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_scheduler_keeps_its_promises_for_a_long_time(seed: int) -> None:
    live_long(seed, num_acts=2_500)


def test_the_walks_meet_everything_they_are_meant_to_meet() -> None:
    drivers = [live_long(seed, num_acts=150) for seed in range(50, 62)]

    events = [event for driver in drivers for event in driver.events]
    for kind in (
        RequestPreempted,
        RequestForked,
        RequestRestarted,
        PrefixAwaited,
        BlocksEvicted,
        BlocksRetired,
    ):
        assert of_type(events, kind), f"no {kind.__name__}"
    assert any(
        event.num_discarded_tokens for event in of_type(events, RequestRestarted)
    )
    assert any(driver.runner.weights for driver in drivers), "no fence was lifted"
    starts = of_type(events, RequestAdmitted)
    assert any(event.is_resumed and event.num_cached_tokens for event in starts)
    assert any(event.num_copied_tokens for event in starts)
    reasons = {end.reason for driver in drivers for end in driver.ends.values()}
    assert reasons == {
        FinishReason.LENGTH,
        FinishReason.STOP_TOKEN,
        FinishReason.CANCELLED,
        FinishReason.FAILED,
    }
