"""Claims about the scheduler, each on the smallest case that could refute it.

Every `Driver.step` also checks plan, cache and virtual KV; see `scheduling.py`.
"""

from __future__ import annotations

import math
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core import (
    PUBLIC,
    CacheConfig,
    Domain,
    FinishReason,
    Lru,
    PrefixCache,
    Sample,
    StepPlan,
    StepResult,
)
from stemkv.core.check import check_scheduler
from stemkv.core.prefix.events import BlocksEvicted, BlocksPublished
from stemkv.core.prefix.room import Demand
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.events import (
    Event,
    PrefixAwaited,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    TokenSampled,
)
from stemkv.core.schedule.request import RequestId, RequestState, TokenCounts
from stemkv.errors import (
    DuplicateRequest,
    EmptyPrompt,
    InvalidLimit,
    InvariantError,
    PromptTooLong,
    RequestError,
)
from tests.core.scheduling import (
    NAMESPACE,
    Driver,
    build_spec,
    generate_alone,
    of_type,
    tokens,
)

# Five blocks of four; no letter of it is ever generated, so nobody meets it by chance.
LONG = "efghijklmnopqrstuvwx"


def shape(plan: StepPlan) -> list[tuple[str, int]]:
    """Who computes how many tokens, in the order of the plan."""
    return [(chunk.request_id, chunk.num_tokens) for chunk in plan.chunks]


def admitted(events: list[Event]) -> list[str]:
    return [event.request_id for event in of_type(events, RequestAdmitted)]


# Who computes what in a step


def test_running_decodes_get_one_token_each_in_every_step_of_a_long_prefill() -> None:
    driver = Driver(token_budget=4)
    driver.add("first", "e", max_new_tokens=20)
    driver.add("second", "f", max_new_tokens=20)
    driver.step()
    driver.add("long", LONG, max_new_tokens=1)

    plans = [driver.step() for _ in range(10)]

    for plan in plans:
        assert shape(plan) == [("first", 1), ("second", 1), ("long", 2)]
    assert driver.reason("long") is FinishReason.LENGTH
    driver.finish()


def test_decodes_come_first_even_if_the_prefill_is_older() -> None:
    driver = Driver(token_budget=4)
    driver.add("decode", "e", max_new_tokens=20, arrival_s=2.0)
    driver.step()
    driver.add("prefill", LONG, arrival_s=1.0)

    plan = driver.step()

    assert shape(plan) == [("decode", 1), ("prefill", 3)]


def test_a_running_prefill_goes_before_a_new_request() -> None:
    driver = Driver(token_budget=12)
    driver.add("running", LONG, arrival_s=2.0)
    driver.step()
    driver.add("new", "abcdabcd", arrival_s=1.0)

    plan = driver.step()

    assert shape(plan) == [("running", 8), ("new", 4)]


def test_at_most_one_prefill_is_unfinished_after_a_step() -> None:
    driver = Driver(token_budget=8, num_blocks=100)
    for index in range(4):
        driver.add(f"r{index}", "abcd"[index] + LONG, arrival_s=9.0 - index)

    while driver.scheduler.has_work:
        driver.step()
        running = [r for r in driver.scheduler.requests() if r.lease is not None]
        assert sum(request.is_prefilling for request in running) <= 1

    driver.finish()


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 16, 512])
def test_a_step_computes_no_more_than_its_budget_and_no_less_if_work_waits(
    budget: int,
) -> None:
    driver = Driver(token_budget=budget, num_blocks=200)
    for index in range(6):
        driver.add(f"r{index}", "abcdefgh"[index:] + LONG, max_new_tokens=1)

    while driver.scheduler.has_work:
        requests = driver.scheduler.requests()
        num_left = sum(request.num_remaining for request in requests)
        plan = driver.step()
        assert plan.num_tokens == min(budget, num_left)

    driver.finish()


def test_several_requests_start_in_one_step_while_budget_places_and_blocks_last() -> (
    None
):
    driver = Driver(token_budget=8, max_num_running=3)
    for index in range(5):
        driver.add(f"r{index}", "efgh"[index % 4 :][:2], max_new_tokens=2)

    plan = driver.step()

    assert shape(plan) == [("r0", 2), ("r1", 2), ("r2", 2)]
    assert driver.scheduler.num_running == 3
    assert driver.scheduler.num_waiting == 2
    driver.finish()


def test_a_request_ends_in_the_step_that_samples_its_last_token() -> None:
    driver = Driver()
    driver.add("r", "efg", max_new_tokens=3)

    plans = [driver.step() for _ in range(3)]

    assert [shape(plan) for plan in plans] == [[("r", 3)], [("r", 1)], [("r", 1)]]
    assert not driver.scheduler.has_work
    assert driver.outputs["r"] == generate_alone("efg", 3)


def test_a_plan_is_empty_when_nobody_waits_and_still_wants_a_commit() -> None:
    driver = Driver()

    plan = driver.schedule()

    assert plan.chunks == plan.copies == ()
    assert plan.num_tokens == 0
    with pytest.raises(InvariantError):
        driver.scheduler.schedule(driver.now)
    assert driver.commit(plan, StepResult({})) == ()


def test_a_plan_shows_no_tokens_in_its_representation() -> None:
    driver = Driver()
    driver.add("r", LONG)

    plan = driver.schedule()

    # A failed step gets logged with its plan; prompts must not reach logs this way.
    assert repr(plan.chunks[0].tokens) not in repr(plan)


# Chunking does not matter (I21)


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 20), st.text("ab", min_size=1, max_size=5)),
        min_size=1,
        max_size=5,
    ),
    block_size=st.integers(1, 5),
)
@settings(max_examples=30, deadline=None)
def test_keys_hits_and_outputs_are_the_same_for_each_chunk_size(
    prompts: list[tuple[int, str]], block_size: int
) -> None:
    seen = []
    for budget in (1, 2, 3, 7, 64):
        num_blocks = 5 * 30 // block_size  # no eviction: that would be another matter
        driver = Driver(
            num_blocks=num_blocks, block_size=block_size, token_budget=budget
        )
        counts = []
        for index, (num_shared, rest) in enumerate(prompts):
            request = driver.serve(f"r{index}", LONG[:num_shared] + rest)
            counts.append(request.counts)
        seen.append((driver.resident(), counts, dict(driver.outputs)))
        driver.finish()

    assert all(one == seen[0] for one in seen)


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 19, 20, 21])
def test_the_match_sees_the_whole_prompt_whatever_the_chunk_size(budget: int) -> None:
    driver = Driver(token_budget=budget)
    driver.serve("first", LONG, max_new_tokens=1)

    second = driver.serve("second", LONG + "yz", max_new_tokens=1)

    assert second.counts.reused == 20
    assert second.counts.computed == 2
    driver.finish()


# Followers wait for a prefix that is being computed (C6)


def test_of_two_equal_prompts_in_one_step_the_second_waits_and_computes_one_token() -> (
    None
):
    driver = Driver()
    driver.add("leader", LONG)
    follower = driver.add("follower", LONG)

    assert shape(driver.step()) == [("leader", 20)]
    assert shape(driver.step()) == [("leader", 1), ("follower", 1)]

    assert follower.counts.reused == 19
    assert follower.counts.computed == 1
    assert of_type(driver.events, PrefixAwaited) == [
        PrefixAwaited(now=3.0, request_id=follower.request_id)
    ]
    driver.finish()


def test_a_follower_waits_for_the_shared_blocks_only_and_then_computes_its_own() -> (
    None
):
    driver = Driver()
    driver.add("leader", LONG)
    follower = driver.add("follower", LONG[:9] + "abcabc")

    driver.step()
    plan = driver.step()

    # Two whole blocks and one token, which is copied out of the leader's third block.
    assert shape(plan) == [("leader", 1), ("follower", 6)]
    assert (follower.counts.reused, follower.counts.copied) == (9, 1)
    driver.finish()


def test_a_follower_that_arrives_in_the_middle_of_a_prefill_waits_too() -> None:
    driver = Driver(token_budget=8)
    driver.add("leader", LONG)
    driver.step()
    follower = driver.add("follower", LONG + "yz")

    assert shape(driver.step()) == [("leader", 8)]
    assert shape(driver.step()) == [("leader", 4)]
    assert shape(driver.step()) == [("leader", 1), ("follower", 2)]

    assert follower.counts.reused == 20
    driver.finish()


def test_any_number_of_followers_wait_for_one_leader() -> None:
    driver = Driver(num_blocks=100)
    requests = [driver.add(f"r{index}", LONG) for index in range(6)]

    driver.step()
    driver.step()

    assert [request.counts.computed for request in requests] == [20, 1, 1, 1, 1, 1]
    driver.finish()


def test_whoever_shares_nothing_overtakes_a_waiting_follower() -> None:
    driver = Driver()
    driver.add("leader", LONG)
    driver.add("follower", LONG)
    driver.add("other", "abcabc")

    plan = driver.step()

    assert shape(plan) == [("leader", 20), ("other", 6)]
    driver.finish()


@pytest.mark.parametrize(
    "prompt",
    ["efg", "efgh", "efgzzzzz", "z" + LONG],
    ids=["below a block", "one block, which is computed anyway", "block differs", "z"],
)
def test_nobody_waits_without_a_whole_block_to_gain(prompt: str) -> None:
    driver = Driver()
    driver.add("leader", LONG)
    driver.add("other", prompt)

    plan = driver.step()

    assert shape(plan) == [("leader", 20), ("other", len(prompt))]
    driver.finish()


def test_nobody_waits_for_a_request_that_is_decoding() -> None:
    driver = Driver()
    driver.add("first", LONG, max_new_tokens=9)
    driver.step()
    text = LONG + generate_alone(LONG, 9)
    driver.add("second", text)  # the first one will publish more of it, block by block

    plan = driver.step()

    assert shape(plan) == [("first", 1), ("second", 9)]
    driver.finish()


def test_a_follower_computes_when_its_leader_is_cancelled_between_steps() -> None:
    driver = Driver(token_budget=8)
    driver.add("leader", LONG)
    follower = driver.add("follower", LONG)
    driver.step()

    assert driver.cancel("leader")
    plan = driver.step()

    # What the leader had published stays.
    assert shape(plan) == [("follower", 8)]
    assert driver.num_cached("follower") == 8
    driver.finish()
    assert driver.reason("follower") is FinishReason.LENGTH
    assert follower.counts.reused == 8


def test_a_follower_computes_when_its_leader_is_cancelled_in_flight() -> None:
    driver = Driver(token_budget=64)
    driver.add("leader", LONG)
    follower = driver.add("follower", LONG)
    plan = driver.schedule()
    assert shape(plan) == [("leader", 20)]

    assert driver.cancel("leader")
    driver.execute_and_commit(plan)

    # The step ran, so its KV is good; only the leader has gone.
    assert driver.reasons() == {"leader": FinishReason.CANCELLED}
    driver.finish()
    assert follower.counts.reused == 19


def test_a_follower_computes_when_the_step_of_its_leader_fails() -> None:
    driver = Driver(token_budget=64)
    driver.add("leader", LONG)
    follower = driver.add("follower", LONG)
    plan = driver.schedule()
    driver.runner.execute(plan)

    driver.abandon(plan)

    assert driver.reasons() == {"leader": FinishReason.FAILED}
    assert shape(driver.step()) == [("follower", 20)]
    assert follower.counts.reused == 0
    driver.finish()


def test_the_next_follower_leads_when_the_leader_fails() -> None:
    driver = Driver(token_budget=64)
    for name in ("leader", "second", "third"):
        driver.add(name, LONG)
    driver.abandon(driver.schedule())

    assert shape(driver.step()) == [("second", 20)]
    assert shape(driver.step()) == [("second", 1), ("third", 1)]
    driver.finish()


@pytest.mark.parametrize("max_steps_awaiting", [0, 1, 2, 3])
def test_a_follower_waits_no_longer_than_its_bound(max_steps_awaiting: int) -> None:
    driver = Driver(max_steps_awaiting=max_steps_awaiting, num_blocks=100)
    # Each one shares a block more with the follower, so it has one to wait for in
    # each of four steps.
    for num_blocks in range(1, 5):
        driver.add(f"leader{num_blocks}", LONG[: 4 * num_blocks] + "zz")
    follower = driver.add("follower", LONG + "yy")

    num_waited = 0
    while follower.state is RequestState.WAITING:
        driver.step()
        num_waited += follower.state is RequestState.WAITING

    assert num_waited == max_steps_awaiting
    driver.finish()


def test_awaiting_is_told_once_however_long_it_lasts() -> None:
    driver = Driver()
    for num_blocks in range(1, 5):
        driver.add(f"leader{num_blocks}", LONG[: 4 * num_blocks] + "zz")
    follower = driver.add("follower", LONG + "yy")

    driver.run()

    assert follower.num_steps_awaiting == 4
    assert len(of_type(driver.events_of("follower"), PrefixAwaited)) == 1


def test_a_preempted_request_may_wait_again_as_long_as_before() -> None:
    driver = Driver(num_blocks=8, max_steps_awaiting=1)
    driver.add("old", "abcd", max_new_tokens=17)
    driver.add("leader", LONG[:8] + "a", max_new_tokens=1)
    driver.add("follower", LONG[:8] + "b", max_new_tokens=12)
    driver.run_until(RequestPreempted)
    driver.retire()  # so that nothing of it is cached when it returns
    driver.add("next leader", LONG[:8] + "c", max_new_tokens=1, arrival_s=0.5)

    driver.finish()

    assert len(of_type(driver.events_of("follower"), PrefixAwaited)) == 2
    assert driver.requests["follower"].num_preemptions == 1
    assert driver.requests["follower"].counts.recomputed > 0


# Tenants (I3)


def test_nobody_waits_for_the_private_prefill_of_another_tenant() -> None:
    driver = Driver()
    driver.add("mine", LONG, tenant="a")
    other = driver.add("other", LONG, tenant="b")

    plan = driver.step()

    assert shape(plan) == [("mine", 20), ("other", 20)]
    assert other.counts.reused == 0
    assert of_type(driver.events, PrefixAwaited) == []
    driver.finish()


def test_a_declared_public_prefix_is_awaited_across_tenants() -> None:
    driver = Driver()
    driver.declare_public(LONG[:12])
    driver.add("mine", LONG, tenant="a")
    other = driver.add("other", LONG, tenant="b")

    assert shape(driver.step()) == [("mine", 20)]
    # Nothing of the private continuation, not even by copying a part of a block.
    assert shape(driver.step()) == [("mine", 1), ("other", 8)]

    assert (other.counts.reused, other.counts.copied) == (12, 0)
    driver.finish()


def test_the_private_continuation_of_a_public_prefix_is_not_awaited() -> None:
    driver = Driver()
    driver.declare_public(LONG[:12])
    driver.serve("before", LONG[:12] + "a", tenant="c")
    driver.add("mine", LONG, tenant="a")
    driver.add("other", LONG, tenant="b")

    plan = driver.step()

    assert shape(plan) == [("mine", 8), ("other", 8)]
    driver.finish()


def test_nobody_waits_for_blocks_that_stay_private_despite_a_declaration() -> None:
    driver = Driver()
    for tenant in ("a", "b"):
        driver.serve(f"before-{tenant}", LONG[:8] + "a", tenant=tenant)
    driver.declare_public(LONG)
    # Both continue private blocks of their own, so what they compute is private too.
    driver.add("mine", LONG + "a", tenant="a")
    driver.add("other", LONG + "a", tenant="b")

    plan = driver.step()

    assert shape(plan) == [("mine", 13), ("other", 13)]
    assert of_type(driver.events, PrefixAwaited) == []
    driver.finish()


def test_publishing_for_the_public_domain_itself_comes_to_an_end() -> None:
    class Impatient(Lru):
        num_published = 0

        def published(self, node_id: int, **how: Any) -> None:
            self.num_published += 1
            assert self.num_published < 10, "the same blocks are published for ever"
            super().published(node_id, **how)

    cache = PrefixCache(CacheConfig(num_blocks=8, block_size=4), Retention(Impatient))
    text = tokens(LONG).buffer
    lease = cache.acquire(NAMESPACE, PUBLIC, text, Demand(num_slots=20), now=0.0)
    assert lease is not None

    cache.publish(lease, text, 20, 0.0)

    assert lease.num_published_blocks == 5


def test_what_a_tenant_observes_is_the_same_with_and_without_another() -> None:
    def observe(others: tuple[str, ...]) -> list[Event]:
        driver = Driver(num_blocks=500, max_num_running=64)
        for index, length in enumerate((20, 9, 20, 14, 3)):
            for tenant in others:
                driver.add(f"{tenant}{index}", LONG[:length], tenant=tenant)
            driver.add(f"mine{index}", LONG[:length], tenant="mine")
            driver.step()
        driver.finish()
        return [
            replace(event, now=0.0)
            for event in driver.events
            if getattr(event, "request_id", "").startswith("mine")
        ]

    alone = observe(())

    assert observe(("b", "c")) == alone
    # The positive control: it does share with itself.
    assert any(event.num_cached_tokens for event in of_type(alone, RequestAdmitted))


# Preemption


def build_crowded() -> Driver:
    """Two requests of five blocks each at the end, in a cache of six blocks."""
    driver = Driver(num_blocks=6)
    driver.add("old", "efghijkl", max_new_tokens=12)
    driver.add("young", "mnopqrst", max_new_tokens=12)
    return driver


def test_the_youngest_goes_when_a_decode_needs_a_block() -> None:
    driver = build_crowded()

    driver.finish()

    preempted = of_type(driver.events, RequestPreempted)
    assert {event.request_id for event in preempted} == {"young"}
    assert driver.requests["old"].num_preemptions == 0
    assert [event.request_id for event in of_type(driver.events, RequestFinished)] == [
        "old",
        "young",
    ]


def test_what_a_preempted_request_computed_is_matched_when_it_returns() -> None:
    driver = build_crowded()

    driver.finish()

    [preempted] = of_type(driver.events, RequestPreempted)
    first, resumed = of_type(driver.events_of("young"), RequestAdmitted)
    assert (first.is_resumed, resumed.is_resumed) == (False, True)
    # Of its three blocks the last two went to the old one, which grew by as many.
    assert preempted.num_computed_tokens == 12
    assert resumed.num_cached_tokens == 4
    counts = driver.requests["young"].counts
    assert (counts.reused, counts.computed, counts.recomputed) == (0, 8, 8)


def test_an_unsharable_request_starts_over_when_it_was_preempted() -> None:
    driver = Driver(num_blocks=6)
    driver.add("old", "efghijkl", max_new_tokens=12, namespace=None)
    driver.add("young", "mnopqrst", max_new_tokens=12, namespace=None)

    driver.finish()

    resumed = of_type(driver.events_of("young"), RequestAdmitted)[1]
    assert (resumed.is_resumed, resumed.num_cached_tokens) == (True, 0)
    counts = driver.requests["young"].counts
    assert (counts.reused, counts.computed, counts.recomputed) == (0, 8, 12)


def test_nobody_starts_in_a_step_that_preempts() -> None:
    driver = build_crowded()
    driver.step()
    driver.step()
    assert driver.cache.pool.num_free == 0
    driver.add("tiny", "e", max_new_tokens=1, arrival_s=0.5)

    plan = driver.run_until(RequestPreempted)

    # Blocks were short a moment ago; what was freed is for those who run.
    assert shape(plan) == [("old", 1)]
    assert shape(driver.step()) == [("old", 1), ("tiny", 1)]
    driver.finish()


def test_a_preempted_request_comes_back_before_younger_ones() -> None:
    driver = build_crowded()
    driver.run_until(RequestPreempted)
    driver.add("late", "e", max_new_tokens=1)

    driver.finish()

    assert admitted(driver.events) == ["old", "young", "young", "late"]


def test_a_request_may_preempt_itself_but_no_older_one() -> None:
    driver = Driver(num_blocks=5)
    driver.add("old", "efghijk", max_new_tokens=12)
    driver.add("young", "mnopqrst", max_new_tokens=12)

    # The young one reaches the end of its blocks first and finds one last free block;
    # the next one is the old one's.
    driver.finish()

    assert driver.requests["old"].num_preemptions == 0
    assert driver.requests["young"].num_preemptions == 1


def test_a_cache_that_holds_only_one_serves_everybody_in_turn() -> None:
    driver = Driver(num_blocks=4)
    for index in range(6):
        # Each needs all four blocks at its end, and half of them at its start.
        driver.add(f"r{index}", LONG[index : index + 8], max_new_tokens=9)

    driver.finish()

    finished = of_type(driver.events, RequestFinished)
    assert [event.request_id for event in finished] == [f"r{i}" for i in range(6)]
    # An older one takes at most its two blocks of growth from a younger one.
    for index in range(6):
        assert driver.requests[f"r{index}"].num_preemptions <= 2 * index


def test_samples_of_a_request_are_preempted_and_come_back_one_by_one() -> None:
    driver = Driver(num_blocks=6)
    driver.add("r", "efghij", max_new_tokens=15, num_samples=3)

    driver.finish()

    preempted = of_type(driver.events, RequestPreempted)
    assert {event.request_id for event in preempted} == {"r#1", "r#2"}
    for sample in range(3):
        request_id = f"r#{sample}" if sample else "r"
        expected = generate_alone("efghij", 15, sample=sample)
        assert driver.outputs[request_id] == expected


def test_a_prefill_is_preempted_by_an_older_decode() -> None:
    driver = Driver(num_blocks=6, token_budget=3)
    driver.add("old", "efg", max_new_tokens=20)
    driver.step()
    young = driver.add("young", LONG[3:19], max_new_tokens=1)

    driver.finish()

    [preempted] = of_type(driver.events, RequestPreempted)
    assert preempted.request_id == "young"
    assert 0 < preempted.num_computed_tokens < 16
    # It was in the middle of its prefill, so the rest was computed for the first time.
    assert young.counts.reused + young.counts.computed == 16


def test_a_prefill_that_finds_more_after_its_preemption_counts_it_as_reused() -> None:
    driver = Driver(num_blocks=6, token_budget=3)
    driver.add("old", "a", max_new_tokens=9)
    driver.step()
    young = driver.add("young", LONG[:16], max_new_tokens=1)
    driver.run_until(RequestPreempted)
    assert young.counts.computed == 14
    # Somebody older comes late, computes the same, and is gone before it returns.
    driver.add("same", LONG[:17], max_new_tokens=1, arrival_s=0.5)

    driver.finish()

    resumed = of_type(driver.events_of("young"), RequestAdmitted)[1]
    assert (resumed.num_cached_tokens, resumed.num_copied_tokens) == (15, 3)
    counts = young.counts
    assert (counts.reused, counts.copied, counts.computed) == (1, 1, 15)
    assert counts.recomputed == 0


# Refusals: at once, with the numbers, and nobody else is harmed


@pytest.fixture
def busy() -> Driver:
    driver = Driver(
        num_blocks=8, token_budget=4, max_num_running=3, max_request_tokens=30
    )
    driver.add("decoding", "abc")
    driver.step()
    driver.add("prefilling", LONG[:12])
    driver.step()
    driver.add("waiting", LONG[4:], arrival_s=100.0)
    return driver


def assert_unharmed(driver: Driver) -> None:
    assert driver.scheduler.num_running == 2
    assert driver.scheduler.num_waiting == 1
    driver.finish()
    assert set(driver.ends) == {"decoding", "prefilling", "waiting"}
    assert set(driver.reasons().values()) == {FinishReason.LENGTH}


def test_a_request_that_exceeds_the_cache_is_refused() -> None:
    driver = Driver(num_blocks=5)
    driver.add("other", LONG, max_new_tokens=1)

    with pytest.raises(
        PromptTooLong,
        match="20 prompt tokens [+] max_new_tokens 2 need 6 blocks but the cache has 5",
    ) as caught:
        driver.add("r", LONG, max_new_tokens=2)

    assert caught.value.field == "prompt"
    driver.finish()
    assert driver.reasons() == {"other": FinishReason.LENGTH}


def test_a_request_that_fills_the_cache_exactly_is_served() -> None:
    driver = Driver(num_blocks=5)

    # The last output token needs no slot.
    request = driver.serve("r", LONG, max_new_tokens=1)

    assert request.finish_reason is FinishReason.LENGTH
    driver.finish()


def test_a_request_that_exceeds_the_context_is_refused(busy: Driver) -> None:
    with pytest.raises(
        PromptTooLong,
        match="27 prompt tokens [+] max_new_tokens 4 exceed the context of 30 tokens; "
        "shorten the prompt by 1 tokens or lower max_new_tokens",
    ) as caught:
        busy.add("r", "a" * 27, max_new_tokens=4)

    assert caught.value.field == "prompt"
    assert_unharmed(busy)


def test_a_request_that_fills_the_context_exactly_is_served(busy: Driver) -> None:
    request = busy.add("r", "a" * 26, max_new_tokens=4)

    busy.finish()

    assert request.finish_reason is FinishReason.LENGTH


def test_more_samples_than_places_are_refused(busy: Driver) -> None:
    with pytest.raises(
        InvalidLimit, match="num_samples is 4 but at most 3 requests run at once"
    ) as caught:
        busy.add("r", "a", num_samples=4)

    assert caught.value.field == "num_samples"
    assert_unharmed(busy)


def test_any_number_of_samples_is_refused_in_constant_time(busy: Driver) -> None:
    class CountedId(str):
        num_formatted = 0

        def __format__(self, spec: str) -> str:
            CountedId.num_formatted += 1
            if CountedId.num_formatted > 100:
                raise AssertionError("the id of every sample is made before the limit")
            return super().__format__(spec)

    with pytest.raises(InvalidLimit):
        busy.add(CountedId("r"), "a", num_samples=10**9)

    assert_unharmed(busy)


@pytest.mark.parametrize("request_id", ["decoding", "prefilling", "waiting"])
def test_an_id_in_flight_is_refused(busy: Driver, request_id: str) -> None:
    # Not `busy.add`: the driver would remember the wrong request.
    with pytest.raises(
        DuplicateRequest, match=f"request id '{request_id}' is in flight"
    ) as caught:
        busy.scheduler.add(build_spec(request_id))

    assert caught.value.field == "request_id"
    assert_unharmed(busy)


def test_the_ids_of_samples_in_flight_are_refused() -> None:
    driver = Driver()
    driver.add("r", "efg", max_new_tokens=9, num_samples=3)
    driver.step()
    assert driver.cancel("r")  # the first sample; two go on

    for num_samples in (1, 2):
        with pytest.raises(DuplicateRequest, match="request id 'r' is in flight"):
            driver.scheduler.add(build_spec("r", num_samples=num_samples))

    assert len(driver.scheduler.requests()) == 2
    driver.finish()


def test_an_id_can_be_used_again_once_its_request_has_ended() -> None:
    driver = Driver()
    driver.serve("r", "efg", num_samples=2)

    again = driver.scheduler.add(build_spec("r", "efg", num_samples=2))

    assert driver.scheduler.request(again.request_id) is again
    driver.schedule()
    assert again.state is RequestState.RUNNING


@pytest.mark.parametrize(
    "refused, field, changes",
    [
        (EmptyPrompt, "prompt", {"prompt": ""}),
        (RequestError, "request_id", {"request_id": "r#1"}),
        (RequestError, "request_id", {"request_id": ""}),
        (InvalidLimit, "max_new_tokens", {"max_new_tokens": 0}),
        (InvalidLimit, "max_new_tokens", {"max_new_tokens": -1}),
        (InvalidLimit, "num_samples", {"num_samples": 0}),
        (InvalidLimit, "num_samples", {"num_samples": -3}),
    ],
)
def test_a_malformed_request_is_refused(
    busy: Driver,
    refused: type[RequestError],
    field: str,
    changes: dict[str, object],
) -> None:
    with pytest.raises(refused) as caught:
        busy.add(**{"request_id": "r", "prompt": "abc", **changes})  # type: ignore[arg-type]

    assert caught.value.field == field
    assert_unharmed(busy)


# Cancelling


def test_a_waiting_request_can_be_cancelled() -> None:
    driver = Driver()
    driver.add("r", LONG)

    assert driver.cancel("r")

    assert not driver.scheduler.has_work
    assert driver.scheduler.take_events() == (
        RequestAborted(
            now=2.0,
            request_id="r",
            reason=FinishReason.CANCELLED,
            counts=TokenCounts(),
            num_preemptions=0,
        ),
    )


@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_a_running_request_can_be_cancelled_between_steps(num_steps: int) -> None:
    driver = Driver(token_budget=8)
    driver.add("r", LONG, max_new_tokens=9)
    driver.add("other", "abc", max_new_tokens=9)
    for _ in range(num_steps):
        driver.step()

    assert driver.cancel("r")

    check_scheduler(driver.scheduler)
    assert driver.scheduler.request(driver.requests["r"].request_id) is None
    assert driver.requests["r"].finish_reason is FinishReason.CANCELLED
    driver.finish()
    assert driver.reasons() == {
        "r": FinishReason.CANCELLED,
        "other": FinishReason.LENGTH,
    }


def test_a_request_whose_step_is_in_flight_ends_at_its_commit() -> None:
    driver = Driver(block_size=1)
    driver.add("r", "efg", max_new_tokens=9)
    driver.step()
    plan = driver.schedule()

    assert driver.cancel("r")
    assert driver.requests["r"].state is RequestState.RUNNING  # its blocks are in use
    assert not driver.cancel("r")
    events = driver.execute_and_commit(plan)

    # The token was computed for nobody; its KV stays.
    assert of_type(events, TokenSampled) == []
    assert [e.reason for e in of_type(events, RequestAborted)] == [
        FinishReason.CANCELLED
    ]
    assert not driver.cancel("r")
    assert driver.num_findable("efg" + generate_alone("efg", 9)) == 4
    driver.finish()


def test_a_request_that_waits_beside_the_step_in_flight_ends_at_once() -> None:
    driver = Driver(token_budget=8)
    driver.add("planned", LONG)
    driver.add("waiting", "abc")
    plan = driver.schedule()
    assert shape(plan) == [("planned", 8)]

    assert driver.cancel("waiting")

    assert driver.requests["waiting"].state is RequestState.ABORTED
    events = driver.execute_and_commit(plan)
    assert [event.request_id for event in of_type(events, RequestAborted)] == [
        "waiting"
    ]
    driver.finish()


def test_a_request_preempted_by_the_step_in_flight_ends_at_once() -> None:
    driver = build_crowded()
    plan = driver.schedule()
    while driver.requests["young"].num_preemptions == 0:
        driver.execute_and_commit(plan)
        plan = driver.schedule()

    assert driver.cancel("young")

    assert driver.requests["young"].state is RequestState.ABORTED
    driver.execute_and_commit(plan)
    driver.finish()
    assert driver.reason("old") is FinishReason.LENGTH


def test_a_preempted_request_can_be_cancelled() -> None:
    driver = build_crowded()
    driver.run_until(RequestPreempted)

    assert driver.cancel("young")

    driver.finish()
    assert driver.reasons() == {
        "old": FinishReason.LENGTH,
        "young": FinishReason.CANCELLED,
    }


def test_a_request_that_awaits_a_prefix_can_be_cancelled() -> None:
    driver = Driver(token_budget=8)
    driver.add("leader", LONG)
    driver.add("follower", LONG)
    driver.step()

    assert driver.cancel("follower")

    driver.finish()
    assert driver.reason("leader") is FinishReason.LENGTH


def test_cancelling_after_the_end_or_of_nobody_says_no() -> None:
    driver = Driver()
    driver.serve("done", "abc")
    driver.add("twice", "abc")

    assert not driver.cancel("done")
    assert not driver.cancel("never added")
    assert driver.cancel("twice")
    assert not driver.cancel("twice")

    check_scheduler(driver.scheduler)


@pytest.mark.parametrize("victim", ["r", "r#1", "r#2"])
def test_one_sample_can_be_cancelled_and_the_others_go_on(victim: str) -> None:
    driver = Driver()
    driver.add("r", "efghij", max_new_tokens=8, num_samples=3)
    driver.step()

    assert driver.cancel(victim)

    driver.finish()
    assert driver.reason(victim) is FinishReason.CANCELLED
    others = {request_id for request_id in driver.ends if request_id != victim}
    assert len(others) == 2
    assert {driver.reason(other) for other in others} == {FinishReason.LENGTH}


def test_cancelling_before_the_fork_ends_all_samples() -> None:
    driver = Driver()
    driver.add("r", "efghij", num_samples=3)
    plan = driver.schedule()

    assert not driver.cancel("r#1")  # there is no such request yet
    assert driver.cancel("r")
    events = driver.execute_and_commit(plan)

    assert of_type(events, RequestForked) == []
    assert not driver.scheduler.has_work
    driver.finish()


def test_cancelling_one_request_leaves_the_blocks_it_shares_to_the_others() -> None:
    driver = Driver()
    driver.serve("before", LONG, max_new_tokens=1)
    driver.add("first", LONG + "a", max_new_tokens=5)
    driver.add("second", LONG + "b", max_new_tokens=5)
    driver.step()

    driver.cancel("first")

    driver.finish()
    assert driver.reason("second") is FinishReason.LENGTH


# Failed steps


def test_an_abandoned_step_aborts_its_requests_and_no_others() -> None:
    driver = Driver(token_budget=8)
    driver.add("planned", LONG)
    driver.add("waiting", "abcabc")
    plan = driver.schedule()
    driver.runner.execute(plan)

    events = driver.abandon(plan)

    [aborted] = of_type(events, RequestAborted)
    assert (aborted.request_id, aborted.reason) == ("planned", FinishReason.FAILED)
    assert aborted.counts == TokenCounts()  # nothing of the step counts
    driver.finish()
    assert driver.reasons() == {
        "planned": FinishReason.FAILED,
        "waiting": FinishReason.LENGTH,
    }


def test_an_abandoned_step_publishes_nothing_it_should_have_computed() -> None:
    driver = Driver(token_budget=8)
    driver.add("r", LONG)
    driver.step()
    plan = driver.schedule()
    driver.runner.execute(plan)

    driver.abandon(plan)

    assert driver.num_findable(LONG) == 8  # of the step before
    assert driver.cache.num_active_blocks == 0
    driver.finish()


def test_an_abandoned_decode_leaves_no_half_written_block() -> None:
    driver = Driver(block_size=2)
    driver.add("r", "efg", max_new_tokens=9, num_samples=2)
    driver.step()
    plan = driver.schedule()
    assert len(plan.copies) == 1
    driver.runner.fail(plan, 1)

    driver.abandon(plan)

    assert driver.reasons() == {"r": FinishReason.FAILED, "r#1": FinishReason.FAILED}
    assert driver.num_findable("efg" + generate_alone("efg", 9)) == 2
    driver.finish()


def test_a_cancelled_request_in_a_failed_step_was_cancelled() -> None:
    driver = Driver()
    driver.add("cancelled", "abc")
    driver.add("failed", "efg")
    plan = driver.schedule()
    driver.cancel("cancelled")

    driver.abandon(plan)

    assert driver.reasons() == {
        "cancelled": FinishReason.CANCELLED,
        "failed": FinishReason.FAILED,
    }


def test_the_copy_of_an_abandoned_step_gives_its_source_back() -> None:
    driver = Driver()
    driver.serve("before", LONG, max_new_tokens=1)
    driver.add("r", LONG[:18] + "abc")
    plan = driver.schedule()
    [copy] = plan.copies
    assert copy.num_tokens == 2

    driver.abandon(plan)

    assert driver.num_findable(LONG) == 20
    driver.finish()


# Samples


def test_samples_share_the_whole_blocks_and_copy_the_partial_one_on_write() -> None:
    driver = Driver()
    driver.add("r", "efghijklmn", max_new_tokens=3, num_samples=3)
    driver.step()
    assert driver.cache.num_active_blocks == 3

    plan = driver.step()

    # The last one to write finds the block its own.
    assert [copy.num_tokens for copy in plan.copies] == [2, 2]
    tables = [chunk.block_ids.tolist() for chunk in plan.chunks]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    assert driver.cache.num_active_blocks == 5
    assert driver.step().copies == ()
    driver.finish()


def test_samples_of_a_prompt_in_whole_blocks_copy_nothing() -> None:
    driver = Driver()
    driver.add("r", "efghijkl", max_new_tokens=3, num_samples=3)
    driver.step()

    plan = driver.step()

    assert plan.copies == ()
    assert driver.cache.num_active_blocks == 5
    driver.finish()


@pytest.mark.parametrize("namespace", [NAMESPACE, None])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9])
def test_each_sample_gets_what_it_would_have_got_alone(
    length: int, namespace: bytes | None
) -> None:
    driver = Driver()
    prompt = LONG[:length]
    driver.serve("r", prompt, max_new_tokens=10, num_samples=4, namespace=namespace)

    for sample in range(4):
        request_id = f"r#{sample}" if sample else "r"
        expected = generate_alone(prompt, 10, sample=sample)
        assert driver.outputs[request_id] == expected
    driver.finish()


def test_the_prompt_of_several_samples_is_computed_once() -> None:
    driver = Driver()
    parent = driver.add("r", LONG, max_new_tokens=3, num_samples=3)

    driver.finish()

    assert sum(driver.num_executed.values()) == 20 + 3 * 2
    assert parent.counts.computed == 20
    for sample in (1, 2):
        counts = driver.requests[f"r#{sample}"].counts
        assert (counts.inherited, counts.computed, counts.reused) == (20, 0, 0)


def test_samples_take_places_as_they_come_and_answer_as_ever() -> None:
    driver = Driver(max_num_running=4, num_blocks=100)
    driver.add("four", "efghij", max_new_tokens=4, num_samples=4)
    driver.add("two", "ijklmn", max_new_tokens=4, num_samples=2)
    driver.add("one", "mnopqr", max_new_tokens=4)

    while driver.scheduler.has_work:
        driver.step()
        assert driver.scheduler.num_running <= 4

    # All three have a place at once. Five first tokens later one is left for samples,
    # and the first request's come first.
    assert admitted(driver.events)[:4] == ["four", "two", "one", "four#2"]
    preempted = of_type(driver.events, RequestPreempted)
    assert [e.request_id for e in preempted] == ["four#3", "four#2", "two#1"]
    for sample in range(4):
        request_id = f"four#{sample}" if sample else "four"
        assert driver.outputs[request_id] == generate_alone("efghij", 4, sample=sample)
    # What they had computed was cached but for the last token.
    assert driver.requests["four#3"].counts.recomputed <= 4  # a block
    driver.finish()


def test_samples_without_a_place_that_may_share_nothing_compute_their_prompt() -> None:
    driver = Driver(max_num_running=2)
    driver.add("r", "efghij", max_new_tokens=3, num_samples=2, namespace=None)
    driver.add("s", "ijklmn", max_new_tokens=3)

    driver.finish()

    assert driver.requests["r#1"].num_preemptions == 1
    assert driver.outputs["r#1"] == generate_alone("efghij", 3, sample=1)


def test_a_sample_that_ends_at_once_needs_no_place() -> None:
    driver = Driver(max_num_running=4)
    driver.add("long", "ab", max_new_tokens=9)
    driver.step()
    driver.add("r", "efghij", max_new_tokens=1, num_samples=4)

    driver.step()

    assert {"r", "r#1", "r#2", "r#3"} <= set(driver.ends)
    assert not of_type(driver.events, RequestPreempted)
    driver.finish()


def test_a_sample_may_end_while_the_others_go_on() -> None:
    stop = generate_alone("efg", 9, sample=1)[1]
    driver = Driver(stops={stop: FinishReason.STOP_TOKEN})
    driver.add("r", "efg", max_new_tokens=9, num_samples=4)

    driver.finish()

    assert driver.reason("r#1") is FinishReason.STOP_TOKEN
    assert len(driver.outputs["r#1"]) <= 2
    assert set(driver.ends) == {"r", "r#1", "r#2", "r#3"}


def test_all_samples_may_end_with_their_first_token() -> None:
    driver = Driver()
    driver.add("r", "efghij", max_new_tokens=1, num_samples=3)

    driver.step()

    assert set(driver.ends) == {"r", "r#1", "r#2"}
    driver.finish()


def test_a_following_request_finds_what_any_sample_generated() -> None:
    driver = Driver(block_size=2)
    driver.serve("r", "ef", max_new_tokens=7, num_samples=3)

    for sample in range(3):
        text = "ef" + generate_alone("ef", 7, sample=sample)
        assert driver.num_findable(text) == 8
    driver.finish()


# Lengths at the edges of blocks (I25)


@pytest.mark.parametrize("max_new_tokens", [1, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13])
def test_a_repeated_prompt_reuses_all_but_its_last_token_at_most(
    length: int, max_new_tokens: int
) -> None:
    driver = Driver()
    prompt = LONG[:length]
    driver.serve("first", prompt, max_new_tokens=max_new_tokens)

    second = driver.serve("second", prompt, max_new_tokens=max_new_tokens)

    num_published = (length + max_new_tokens - 1) // 4 * 4
    assert second.counts.reused == min(num_published, length - 1)
    assert second.counts.computed == length - second.counts.reused >= 1
    # Blocks that match as a whole are referenced, the rest is copied.
    num_whole = second.counts.reused // 4 * 4
    assert second.counts.copied == second.counts.reused - num_whole
    driver.finish()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_a_later_longer_prompt_finds_the_whole_chain(length: int) -> None:
    driver = Driver()
    driver.serve("first", LONG[:length], max_new_tokens=1)
    driver.serve("second", LONG[:length], max_new_tokens=1)

    third = driver.serve("third", LONG, max_new_tokens=1)

    assert third.counts.reused == length // 4 * 4
    driver.finish()


def test_a_prompt_as_long_as_the_whole_cache_is_served_again_and_again() -> None:
    driver = Driver(num_blocks=4)
    prompt = LONG[:16]

    requests = [driver.serve(f"r{i}", prompt, max_new_tokens=1) for i in range(3)]

    # The last block is needed for writing, so it cannot be a copy's source as well.
    assert [request.counts.reused for request in requests] == [0, 12, 12]
    driver.serve("other", LONG[4:], max_new_tokens=1)
    driver.finish()


def test_two_thousand_short_requests_leave_nothing_behind() -> None:
    driver = Driver(num_blocks=32, max_num_running=4)
    rng = random.Random(7)

    for index in range(2_000):
        length = rng.randint(1, 9)
        driver.add(
            f"r{index}",
            LONG[:length] + rng.choice("abcd"),
            max_new_tokens=rng.randint(1, 3),
            tenant=rng.choice("ab"),
        )
        driver.step()

    driver.finish()
    assert len(driver.ends) == 2_000


# Ends: cached length never exceeds the tokens with KV (I16)


@pytest.mark.parametrize(
    "reason",
    [FinishReason.LENGTH, FinishReason.STOP_TOKEN, FinishReason.STOP_STRING],
)
def test_the_last_sampled_token_is_not_published(reason: FinishReason) -> None:
    alone = generate_alone("efg", 20)
    if reason is FinishReason.LENGTH:
        stops, output = {}, alone[:6]
    else:
        stops = {alone[5]: reason}
        output = generate_alone("efg", 20, stops=stops)
    driver = Driver(block_size=1, stops=stops)

    request = driver.serve("r", "efg", max_new_tokens=6 if not stops else 20)

    assert driver.reason("r") is reason
    assert driver.outputs["r"] == output
    assert driver.num_findable("efg" + output) == 3 + len(output) - 1
    assert request.state is RequestState.FINISHED
    driver.finish()


def test_a_request_cancelled_between_steps_leaves_what_it_computed() -> None:
    driver = Driver(block_size=1)
    driver.add("r", "efg", max_new_tokens=20)
    for _ in range(4):
        driver.step()

    driver.cancel("r")

    assert driver.num_findable("efg" + generate_alone("efg", 20)) == 3 + 4 - 1
    driver.finish()


def fail_at_second_token() -> Driver:
    alone = generate_alone("efg", 20)
    driver = Driver(block_size=1, stops={alone[1]: FinishReason.FAILED})
    assert alone[0] != alone[1]
    driver.add("r", "efg")
    driver.run()
    return driver


def test_a_request_whose_logits_were_not_finite_is_aborted_without_a_token() -> None:
    driver = fail_at_second_token()

    assert driver.reason("r") is FinishReason.FAILED
    assert driver.requests["r"].state is RequestState.ABORTED
    assert driver.outputs["r"] == generate_alone("efg", 1)
    assert of_type(driver.events_of("r"), RequestFinished) == []
    driver.finish()


def test_a_step_whose_logits_were_not_finite_publishes_nothing() -> None:
    driver = fail_at_second_token()

    # KV from which no finite logits follow must not be handed to the next request, and
    # neither must what came before it: where it went wrong is not known.
    assert driver.num_findable("efg" + generate_alone("efg", 2)) == 0
    driver.finish()


# Fences (I9)


def test_requests_in_flight_end_well_when_their_namespace_is_retired() -> None:
    driver = Driver(token_budget=8)
    driver.serve("before", LONG[:12], max_new_tokens=1)
    driver.add("decoding", LONG[:12] + "ab", max_new_tokens=12)
    driver.step()
    driver.add("prefilling", "z" + LONG, max_new_tokens=12)
    driver.step()

    driver.retire()

    driver.run()
    driver.check_outputs()
    assert driver.resident() == set()  # and nothing was published across the fence
    driver.finish()


def test_later_requests_match_nothing_older_than_the_fence() -> None:
    driver = Driver()
    driver.serve("before", LONG)
    driver.retire()

    after = driver.serve("after", LONG)
    again = driver.serve("again", LONG)

    assert after.counts.reused == 0
    assert again.counts.reused == 19
    driver.finish()


def test_a_preempted_request_matches_nothing_older_than_the_fence() -> None:
    driver = build_crowded()
    driver.run_until(RequestPreempted)

    driver.retire()

    driver.finish()
    resumed = of_type(driver.events_of("young"), RequestAdmitted)[1]
    assert (resumed.is_resumed, resumed.num_cached_tokens) == (True, 0)


def test_nobody_waits_for_a_prefill_that_was_fenced() -> None:
    driver = Driver(token_budget=3)
    driver.add("leader", LONG[:5])
    driver.step()
    driver.retire()
    driver.add("follower", LONG[:5])

    plan = driver.step()

    # The leader will never publish, so there is nothing to wait for.
    assert shape(plan) == [("leader", 2), ("follower", 1)]
    driver.finish()


def test_nobody_waits_for_what_was_computed_before_the_fence() -> None:
    driver = Driver(token_budget=8)
    driver.add("leader", LONG)
    driver.step()
    driver.step()
    driver.retire()
    driver.add("follower", LONG)

    plan = driver.step()

    assert shape(plan) == [("leader", 4), ("follower", 4)]
    driver.finish()


# Requests that share with nobody


def test_an_unsharable_request_neither_reuses_nor_publishes() -> None:
    driver = Driver()
    driver.serve("public", LONG)
    resident = driver.resident()

    first = driver.serve("first", LONG, namespace=None)
    second = driver.serve("second", LONG, namespace=None)

    assert (first.counts.reused, second.counts.reused) == (0, 0)
    assert driver.resident() == resident
    driver.finish()


@pytest.mark.parametrize(
    "leader, follower", [(None, NAMESPACE), (NAMESPACE, None), (None, None)]
)
def test_an_unsharable_request_neither_waits_nor_is_waited_for(
    leader: bytes | None, follower: bytes | None
) -> None:
    driver = Driver()
    driver.add("leader", LONG, namespace=leader)
    driver.add("follower", LONG, namespace=follower)

    plan = driver.step()

    assert shape(plan) == [("leader", 20), ("follower", 20)]
    driver.finish()


def test_nobody_waits_for_or_reuses_another_namespace() -> None:
    driver = Driver()
    driver.add("leader", LONG, namespace=b"m" * 32)
    other = driver.add("other", LONG)

    plan = driver.step()

    assert shape(plan) == [("leader", 20), ("other", 20)]
    assert other.counts.reused == 0
    driver.finish()


# Admission


def test_a_small_request_does_not_overtake_a_large_one_that_does_not_fit() -> None:
    driver = Driver(num_blocks=6)
    driver.add("running", LONG[:12], max_new_tokens=4)
    driver.step()
    driver.add("large", LONG, max_new_tokens=1)
    driver.add("small", "a", max_new_tokens=1)

    plan = driver.step()

    assert shape(plan) == [("running", 1)]
    driver.finish()
    assert admitted(driver.events) == ["running", "large", "small"]


def test_requests_start_by_arrival_and_not_by_the_order_of_their_adding() -> None:
    driver = Driver(max_num_running=1)
    driver.add("later", "abc", arrival_s=2.0)
    driver.add("sooner", "efg", arrival_s=1.0)
    driver.add("also later", "ijk", arrival_s=2.0)

    driver.finish()

    assert admitted(driver.events) == ["sooner", "later", "also later"]


def test_a_failed_admission_changes_nothing() -> None:
    driver = Driver(num_blocks=8)
    driver.serve("cached", LONG[:8], max_new_tokens=1)
    driver.add("running", "abcd" * 4, max_new_tokens=4)
    driver.step()
    usage, resident = driver.cache.usage(), driver.resident()
    driver.add("large", LONG, max_new_tokens=9)

    plan = driver.step()

    assert shape(plan) == [("running", 1)]
    assert driver.resident() == resident
    # One block more, for the running request's first output token.
    assert driver.cache.usage() == replace(
        usage,
        num_free_blocks=usage.num_free_blocks - 1,
        num_active_blocks=usage.num_active_blocks + 1,
        num_active_tokens=usage.num_active_tokens + 1,
        peak_active_blocks=usage.peak_active_blocks + 1,
    )
    driver.finish()


def test_admission_leaves_the_watermark_to_those_who_run() -> None:
    driver = Driver(num_blocks=8, watermark=0.5)
    driver.add("running", LONG[:7], max_new_tokens=2)
    driver.step()
    driver.add("waiting", LONG[8:16] + "a", max_new_tokens=1)

    # Six blocks are available and three are wanted, but four must be left.
    assert shape(driver.step()) == [("running", 1)]
    assert shape(driver.step()) == [("waiting", 9)]
    driver.finish()


def test_one_block_is_left_even_without_a_watermark() -> None:
    driver = Driver(num_blocks=4, watermark=0.0)
    driver.add("running", LONG[:7], max_new_tokens=2)
    driver.step()
    driver.add("waiting", LONG[8:16], max_new_tokens=1)

    assert shape(driver.step()) == [("running", 1)]
    driver.finish()


def test_alone_a_request_may_use_what_the_watermark_would_leave() -> None:
    driver = Driver(num_blocks=8, watermark=0.9)

    request = driver.serve("r", LONG + LONG[:12], max_new_tokens=1)

    assert request.finish_reason is FinishReason.LENGTH
    driver.finish()


# Steps in order


def test_a_second_step_cannot_be_scheduled_before_the_first_is_committed() -> None:
    driver = Driver()
    driver.add("r", "abc")
    plan = driver.schedule()

    with pytest.raises(InvariantError, match="step 0 is neither committed nor aband"):
        driver.scheduler.schedule(driver.now)

    assert driver.scheduler.pending is plan
    driver.execute_and_commit(plan)
    assert driver.scheduler.pending is None
    driver.finish()


@pytest.mark.parametrize("verb", ["commit", "abandon"])
def test_a_plan_is_committed_or_abandoned_once(verb: str) -> None:
    driver = Driver()
    driver.add("r", "abc")
    stale = driver.step()

    def end_again() -> None:
        if verb == "commit":
            driver.scheduler.commit(stale, StepResult({}), driver.now)
        else:
            driver.scheduler.abandon(stale, driver.now)

    with pytest.raises(InvariantError, match="step 0 is not the pending one: none"):
        end_again()
    plan = driver.schedule()
    with pytest.raises(InvariantError, match="step 0 is not the pending one: 1"):
        end_again()

    driver.execute_and_commit(plan)
    driver.finish()


@pytest.mark.parametrize(
    ("samples", "failed", "message"),
    [
        ({"a": (Sample(1),)}, (), "needs 1 samples of request b, got 0"),
        ({"a": (Sample(1),), "b": (Sample(1),) * 2}, (), "request b, got 2"),
        ({"a": (Sample(1),), "b": (Sample(1),), "c": ()}, (), "no chunk of c"),
        ({"a": (Sample(1),), "b": (Sample(1),)}, ("c",), "no chunk of c"),
        ({"a": (Sample(1),), "b": (7,)}, (), "not a Sample, got 7"),
        ({"a": (Sample(1),), "b": (Sample(2**31),)}, (), "not an int32 token id"),
        ({"a": (Sample(1),), "b": (Sample(1.0),)}, (), "not an int32 token id"),
        ({"a": (Sample(1),), "b": (Sample(1, "stop"),)}, (), "stop must be a Finish"),
    ],
)
@pytest.mark.parametrize("verb", ["commit", "abandon"])
def test_a_result_that_does_not_fit_changes_nothing(
    samples: dict[RequestId, Any],
    failed: tuple[RequestId, ...],
    message: str,
    verb: str,
) -> None:
    driver = Driver()
    driver.add("a", "abc")
    driver.add("b", "cba")
    plan = driver.schedule()
    before = driver.cache.usage(), driver.describe()

    with pytest.raises(InvariantError, match=message):
        driver.scheduler.commit(
            plan, StepResult(samples, frozenset(failed)), driver.now
        )

    assert driver.scheduler.pending is plan
    assert (driver.cache.usage(), driver.describe()) == before
    assert driver.scheduler.take_events()[-1] == RequestAdmitted(
        now=plan.now,
        request_id=RequestId("b"),
        num_cached_tokens=0,
        num_copied_tokens=0,
        is_resumed=False,
    )
    if verb == "commit":
        driver.execute_and_commit(plan)
    else:
        driver.abandon(plan)
    driver.finish()


def test_another_plan_of_the_same_number_is_not_the_pending_one() -> None:
    driver = Driver()
    driver.add("r", "abc")
    plan = driver.schedule()

    with pytest.raises(InvariantError, match="not the pending one"):
        driver.scheduler.commit(replace(plan), driver.runner.execute(plan), driver.now)


def test_only_a_request_whose_chunk_failed_is_aborted() -> None:
    driver = Driver(block_size=2)
    driver.add("guilty", LONG, max_new_tokens=9)
    driver.add("other", "abcd", max_new_tokens=3)
    driver.step()
    plan = driver.schedule()

    driver.commit(plan, driver.runner.execute(plan, failed=["guilty"]))

    assert driver.reasons() == {"guilty": FinishReason.FAILED}
    assert driver.num_findable(LONG) == 0
    driver.finish()
    assert driver.reason("other") is FinishReason.LENGTH


def test_a_failed_chunk_takes_nothing_from_those_who_share_its_prefix() -> None:
    driver = Driver(block_size=2, token_budget=64)
    driver.add("first", LONG, max_new_tokens=9)
    driver.step()
    driver.add("guilty", LONG + "ab", max_new_tokens=9)
    plan = driver.schedule()
    assert {chunk.request_id for chunk in plan.chunks} == {"first", "guilty"}
    driver.cancel("guilty")

    driver.commit(plan, driver.runner.execute(plan, failed=["guilty"]))

    assert driver.reasons() == {"guilty": FinishReason.CANCELLED}
    assert driver.num_findable(LONG) == len(LONG)
    driver.finish()


def test_one_token_that_a_preemption_left_to_compute_is_no_decode() -> None:
    # Blocks of one token: all that the younger one computed is published, and found.
    driver = Driver(block_size=1, num_blocks=9)
    driver.add("old", "ab", max_new_tokens=4)
    driver.add("young", "ba", max_new_tokens=4)
    driver.run_until(RequestPreempted)
    plan = driver.run_until(RequestAdmitted)

    admitted = of_type(driver.events, RequestAdmitted)[-1]
    assert (admitted.request_id, admitted.is_resumed) == ("young", True)
    (chunk,) = (c for c in plan.chunks if c.request_id == "young")
    assert chunk.num_tokens == 1
    assert not chunk.is_decode
    assert driver.plans[1].chunks[0].is_decode
    driver.finish()


def test_what_a_commit_copies_does_not_grow_with_the_context() -> None:
    def peak(num_prompt: int) -> int:
        """Most bytes that a commit took, of steps that fill a block and that do not."""
        driver = Driver(num_blocks=num_prompt, token_budget=num_prompt)
        request = driver.add("r", "e" * num_prompt, max_new_tokens=64)
        peaks = []
        for now in range(10, 42):
            plan = driver.scheduler.schedule(float(now))
            result = StepResult({request.request_id: (Sample(1),)})
            tracemalloc.start()
            driver.scheduler.commit(plan, result, float(now))
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        # The buffers are copied when they begin to grow, and once when they are full.
        return sorted(peaks[16:])[-3]

    assert peak(8000) < 2 * peak(400) < 16_000, "a copy of the tokens alone is 32,000"


BAD_TIMES = [math.nan, math.inf, "1", None, True, -1.0]


@pytest.mark.parametrize("bad", BAD_TIMES)
@pytest.mark.parametrize(
    "verb", ["schedule", "commit", "abandon", "cancel", "restart", "retire"]
)
def test_a_time_that_is_none_or_goes_back_is_refused_and_changes_nothing(
    verb: str, bad: Any
) -> None:
    driver = Driver()
    request_id = driver.add("r", "abc").request_id
    driver.step()
    scheduler, plan = driver.scheduler, None
    if verb in ("commit", "abandon"):
        plan = driver.schedule()
    before = driver.describe(), driver.cache.usage()
    calls: dict[str, Callable[[], object]] = {
        "schedule": lambda: scheduler.schedule(bad),
        "commit": lambda: scheduler.commit(plan, driver.runner.execute(plan), bad),  # type: ignore[arg-type]
        "abandon": lambda: scheduler.abandon(plan, bad),  # type: ignore[arg-type]
        "cancel": lambda: scheduler.cancel(request_id, bad),
        "restart": lambda: scheduler.restart(request_id, NAMESPACE, None, bad),
        "retire": lambda: scheduler.retire(NAMESPACE, bad),
    }

    with pytest.raises(RequestError, match="now must") as refusal:
        calls[verb]()

    assert refusal.value.field == "now"
    assert scheduler.pending is plan
    assert (driver.describe(), driver.cache.usage()) == before
    if plan is not None:
        driver.execute_and_commit(plan)
    driver.finish()


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda s: s.add("hello"), "spec"),
        (lambda s: s.check(None), "spec"),
        (lambda s: s.cancel("r", 9.0, reason="tired"), "reason"),
        (lambda s: s.restart("nobody", NAMESPACE, None, 9.0), "request_id"),
        (lambda s: s.restart("r", "text", None, 9.0), "namespace"),
        (lambda s: s.restart("r", NAMESPACE, None, 9.0, domain="a"), "domain"),
        (lambda s: s.cut_off("nobody"), "request_id"),
        (lambda s: s.retire("text", 9.0), "namespace"),
        (lambda s: s.lift_fence("1"), "epoch"),
        (lambda s: s.skip(1.5), "num_steps"),
        (lambda s: s.coast("r", bytearray(4)), "tokens"),
        (lambda s: s.coast("r", bytes(5)), "tokens"),
    ],
)
def test_wrong_types_are_refused_at_the_door(
    call: Callable[[Any], object], field: str
) -> None:
    driver = Driver()
    driver.add("r", "abc")
    driver.step()
    before = driver.describe(), driver.cache.usage()

    with pytest.raises(RequestError) as refusal:
        call(driver.scheduler)

    assert refusal.value.field == field
    assert (driver.describe(), driver.cache.usage()) == before
    driver.finish()


def test_steps_are_numbered_and_carry_their_time() -> None:
    driver = Driver()
    driver.add("r", "abc", max_new_tokens=3)

    plans = [driver.step() for _ in range(3)]

    assert [plan.step for plan in plans] == [0, 1, 2]
    assert [plan.now for plan in plans] == [2.0, 4.0, 6.0]


def test_equal_calls_give_equal_plans_and_equal_events() -> None:
    def play() -> Driver:
        rng = random.Random(11)
        driver = Driver(num_blocks=12, token_budget=24, max_num_running=5)
        driver.declare_public(LONG[:8])
        for index in range(120):
            for burst in range(rng.choice([0, 0, 1, 2])):
                driver.add(
                    f"r{index}-{burst}",
                    LONG[: rng.randint(0, 16)] + rng.choice("abc"),
                    max_new_tokens=rng.randint(1, 9),
                    tenant=rng.choice("ab"),
                    num_samples=rng.choice([1, 1, 3]),
                )
            plan = driver.schedule()
            if rng.random() < 0.1:
                driver.cancel(rng.choice(sorted(driver.requests)))
            driver.execute_and_commit(plan)
        driver.finish()
        return driver

    first, second = play(), play()

    assert first.plans == second.plans
    assert first.events == second.events
    kinds = {type(event) for event in first.events}
    assert {RequestPreempted, PrefixAwaited, BlocksEvicted, RequestForked} <= kinds


# Events


def test_the_events_of_one_request_in_order() -> None:
    driver = Driver()
    driver.add("r", LONG[:6], max_new_tokens=3)

    driver.run()

    first, second, third = [ord(c) - ord("a") for c in generate_alone(LONG[:6], 3)]
    published = partial(
        BlocksPublished, namespace=NAMESPACE, domain=Domain.private("a")
    )
    assert driver.events == [
        RequestAdmitted(
            now=2.0,
            request_id="r",
            num_cached_tokens=0,
            num_copied_tokens=0,
            is_resumed=False,
        ),
        published(now=3.0, block_ids=(0,), start=0, parent_block_id=None),
        TokenSampled(now=3.0, request_id="r", token=first, index=0),
        TokenSampled(now=5.0, request_id="r", token=second, index=1),
        published(now=7.0, block_ids=(1,), start=1, parent_block_id=0),
        TokenSampled(now=7.0, request_id="r", token=third, index=2),
        RequestFinished(
            now=7.0,
            request_id="r",
            reason=FinishReason.LENGTH,
            counts=TokenCounts(computed=6),
            num_preemptions=0,
        ),
    ]


def test_the_events_of_a_fork_in_order() -> None:
    driver = Driver()
    driver.add("r", "efg", max_new_tokens=1, num_samples=2)

    driver.run()

    first, second = [
        ord(generate_alone("efg", 1, sample=k)) - ord("a") for k in range(2)
    ]
    end = RequestFinished(
        now=3.0,
        request_id="r",
        reason=FinishReason.LENGTH,
        counts=TokenCounts(computed=3),
        num_preemptions=0,
    )
    assert driver.events[1:] == [
        RequestForked(now=3.0, request_id="r", child_ids=("r#1",)),
        TokenSampled(now=3.0, request_id="r", token=first, index=0),
        end,
        TokenSampled(now=3.0, request_id="r#1", token=second, index=0),
        replace(end, request_id="r#1", counts=TokenCounts(inherited=3)),
    ]


def test_the_events_of_a_hit_count_what_was_copied() -> None:
    driver = Driver()
    driver.serve("first", LONG, max_new_tokens=1)
    driver.serve("second", LONG[:10] + "abc", max_new_tokens=1)

    [event] = of_type(driver.events_of("second"), RequestAdmitted)

    assert (event.num_cached_tokens, event.num_copied_tokens) == (10, 2)


def test_what_happens_between_steps_comes_out_once_and_in_order() -> None:
    driver = Driver()
    driver.add("first", "abc")
    driver.add("second", "abc")
    driver.cancel("second")
    driver.cancel("first")

    events = driver.scheduler.take_events()

    assert [event.request_id for event in events] == ["second", "first"]
    assert driver.scheduler.take_events() == ()
    assert driver.commit(driver.schedule(), StepResult({})) == ()


def test_the_events_of_the_cache_are_counted_by_domain() -> None:
    driver = Driver(num_blocks=6)
    driver.declare_public(LONG[:8])
    driver.serve("first", LONG[:16], max_new_tokens=1, tenant="a")
    driver.serve("second", "abcd" * 4, max_new_tokens=1, tenant="b")

    published = of_type(driver.events, BlocksPublished)
    assert [(e.domain.name, e.num_blocks) for e in published] == [
        ("", 2),
        ("a", 2),
        ("b", 4),
    ]
    evicted = of_type(driver.events, BlocksEvicted)
    assert [(e.domain.name, e.num_blocks) for e in evicted] == [("a", 2)]


def test_no_event_carries_tokens_but_the_one_that_brings_a_token_to_its_owner() -> None:
    driver = Driver(num_blocks=6)
    driver.add("r", LONG[:6], max_new_tokens=12, num_samples=3)
    driver.add("follower", LONG[:6], max_new_tokens=12)
    driver.finish()
    kinds = {type(event) for event in driver.events}
    assert RequestPreempted in kinds

    for kind in kinds - {TokenSampled}:
        assert is_dataclass(kind)
        for field in fields(kind):
            assert "token" not in field.name or field.name.startswith("num_")
    for event in driver.events:
        values = (getattr(event, f.name) for f in fields(event))
        assert tokens(LONG[:6]).buffer not in list(values)


# Counting (I7)


def test_a_hit_is_counted_at_the_first_admission_only() -> None:
    driver = Driver(num_blocks=7)
    driver.serve("before", "mnopqrst", max_new_tokens=1)
    driver.add("old", "efghijkl", max_new_tokens=16)
    young = driver.add("young", "mnopqrst", max_new_tokens=12)

    driver.finish()

    assert young.num_preemptions >= 1
    assert young.counts.reused == 7
    assert young.counts.computed == 1
    assert young.counts.recomputed > 0


def test_counts_of_everybody_add_up_to_what_was_executed() -> None:
    driver = Driver(num_blocks=12, token_budget=9)
    for index in range(20):
        driver.add(
            f"r{index}",
            LONG[: index % 13] + "ab"[index % 2],
            max_new_tokens=1 + index % 7,
            num_samples=1 + index % 3,
        )
        driver.step()

    driver.finish()

    counts = [request.counts for request in driver.requests.values()]
    decoded = sum(len(output) - 1 for output in driver.outputs.values())
    assert sum(plan.num_tokens for plan in driver.plans) == decoded + sum(
        one.computed + one.recomputed for one in counts
    )


def test_the_first_admission_fixes_the_queue_time() -> None:
    driver = build_crowded()

    driver.finish()

    assert driver.requests["young"].num_preemptions == 1
    assert driver.requests["young"].first_scheduled_s == 3.0
