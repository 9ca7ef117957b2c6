"""What becomes of requests in flight when models and adapters change under them.

`restart`, `fence`, `retire` and cancelling as replaced, in every state a request can
be in. The driver of `scheduling` computes other tokens for every adapter, start
position and generation of weights, so a request that ran on the wrong one, kept output
of the old one, or read its KV, is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stemkv.core import FinishReason, RequestId
from stemkv.core.check import check_cache, check_scheduler, check_tree
from stemkv.core.prefix.events import BlocksPublished, BlocksRetired
from stemkv.core.schedule.events import (
    PrefixAwaited,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    RequestRestarted,
    TokenSampled,
)
from stemkv.core.schedule.request import RequestState, TokenCounts
from stemkv.errors import DuplicateRequest, InvariantError, RequestError
from tests.core.builders import build_cache, hold, serve, snapshot
from tests.core.scheduling import (
    BASE,
    NAMESPACE,
    Driver,
    Model,
    build_spec,
    generate_alone,
    namespace_of,
    of_type,
)

PROMPT = "abcabcabca"  # two and a half blocks of four
NEW = Model("v2")


# A request in every state it can be in between two steps


def waiting() -> Driver:
    driver = Driver(block_size=4)
    driver.add("r", PROMPT)
    return driver


def awaiting_a_prefix() -> Driver:
    driver = Driver(block_size=4, token_budget=6)
    driver.add("leader", PROMPT + "b", max_new_tokens=2)
    driver.add("r", PROMPT)
    driver.run_until(PrefixAwaited)
    assert driver.requests["r"].num_steps_awaiting
    return driver


def prefilling() -> Driver:
    driver = Driver(block_size=4, token_budget=5)
    driver.add("r", PROMPT)
    driver.step()
    assert driver.requests["r"].num_computed == 5
    return driver


def prefilling_after_a_hit() -> Driver:
    driver = Driver(block_size=4, token_budget=3)
    driver.serve("before", PROMPT[:6])
    driver.add("r", PROMPT)
    driver.step()
    assert driver.requests["r"].counts.reused == 6
    assert driver.requests["r"].is_prefilling
    return driver


def decoding() -> Driver:
    driver = Driver(block_size=4)
    driver.add("r", PROMPT, max_new_tokens=6)
    for _ in range(3):
        driver.step()
    assert driver.requests["r"].num_output_tokens == 3
    return driver


def preempted() -> Driver:
    driver = Driver(num_blocks=6, block_size=4, max_num_running=2)
    driver.add("older", "bbbbbbbb", max_new_tokens=14)
    driver.add("r", PROMPT, max_new_tokens=6)
    driver.run_until(RequestPreempted)
    assert driver.requests["r"].state is RequestState.PREEMPTED
    assert driver.requests["r"].num_output_tokens
    return driver


def before_the_fork() -> Driver:
    driver = Driver(block_size=4, token_budget=5)
    driver.add("r", PROMPT, num_samples=3)
    driver.step()
    return driver


def forked_root() -> Driver:
    driver = Driver(block_size=4)
    driver.add("r", PROMPT, num_samples=3, max_new_tokens=6)
    driver.run_until(RequestForked)
    driver.step()
    return driver


STATES: list[tuple[Callable[[], Driver], str]] = [
    (waiting, "r"),
    (awaiting_a_prefix, "r"),
    (prefilling, "r"),
    (prefilling_after_a_hit, "r"),
    (decoding, "r"),
    (preempted, "r"),
    (before_the_fork, "r"),
    (forked_root, "r"),
    (forked_root, "r#1"),
    (forked_root, "r#2"),
]
in_every_state = pytest.mark.parametrize(
    "build, request_id",
    STATES,
    ids=[f"{build.__name__}-{request_id}" for build, request_id in STATES],
)


def steps_until_the_end_of(driver: Driver, request_id: str) -> Iterator[None]:
    """Step, with a look in between, as often as a small request can need."""
    for _ in range(100):
        if request_id in driver.ends:
            return
        yield
        driver.step()
    raise AssertionError(f"{request_id} does not end: {driver.describe()}")


# Restart


@in_every_state
@pytest.mark.parametrize("shares", [True, False])
def test_a_restarted_request_gets_what_a_new_one_would_get(
    build: Callable[[], Driver], request_id: str, shares: bool
) -> None:
    driver = build()
    driver.restart(request_id, "v2", shares=shares)
    driver.run()

    sample = int(request_id.partition("#")[2] or 0)
    request = driver.requests[request_id]
    assert driver.outputs[request_id] == generate_alone(
        PROMPT, request.spec.max_new_tokens, sample=sample, model=NEW
    )
    driver.finish()


@in_every_state
def test_a_restart_keeps_the_id_the_place_and_the_request(
    build: Callable[[], Driver], request_id: str
) -> None:
    driver = build()
    request = driver.requests[request_id]
    order = [r.request_id for r in driver.scheduler.requests()]
    key, arrival_s = request.order_key, request.spec.arrival_s

    driver.restart(request_id, "v2")

    assert driver.scheduler.request(RequestId(request_id)) is request
    assert request.request_id == request_id
    assert [r.request_id for r in driver.scheduler.requests()] == order
    assert (request.order_key, request.spec.arrival_s) == (key, arrival_s)
    driver.finish()


@in_every_state
def test_nothing_of_before_a_restart_is_left(
    build: Callable[[], Driver], request_id: str
) -> None:
    driver = build()
    request = driver.requests[request_id]
    fork_is_ahead = request.num_output_tokens == 0

    driver.restart(request_id, "v2")

    assert request.tokens == request.spec.prompt.buffer
    assert request.state is RequestState.WAITING
    assert request.lease is None
    assert (request.num_computed, request.num_counted) == (0, 0)
    assert request.num_steps_awaiting == 0
    assert request.namespace == request.spec.namespace == namespace_of(NEW)
    assert request.spec.adapter == "v2"
    assert request.spec.num_samples == (3 if build is before_the_fork else 1)
    assert fork_is_ahead or request.spec.num_samples == 1
    check_scheduler(driver.scheduler)
    driver.finish()


@in_every_state
def test_counts_after_a_restart_are_those_of_a_new_request(
    build: Callable[[], Driver], request_id: str
) -> None:
    driver = build()
    counts = driver.requests[request_id].counts
    in_vain = counts.reused + counts.computed + counts.recomputed

    driver.restart(request_id, "v2")
    driver.run()

    end = driver.ends[request_id].counts
    assert end.discarded == in_vain
    assert end.reused + end.computed == len(PROMPT)
    assert (end.inherited, end.recomputed) == (0, 0)
    driver.finish()


def test_a_second_restart_discards_on_top_of_the_first() -> None:
    driver = prefilling()
    driver.restart("r", "v2")
    driver.step()
    driver.restart("r", "v3")
    driver.run()

    assert driver.ends["r"].counts == TokenCounts(computed=10, discarded=10)
    assert driver.outputs["r"] == generate_alone(PROMPT, 4, model=Model("v3"))
    driver.finish()


def test_a_restarted_request_reuses_what_is_cached_for_the_new_state() -> None:
    driver = Driver(block_size=4)
    driver.serve("before", PROMPT, adapter="v2", max_new_tokens=1)
    driver.add("r", PROMPT, max_new_tokens=6)
    driver.step()
    driver.restart("r", "v2")
    driver.run()

    assert driver.ends["r"].counts == TokenCounts(reused=8, computed=2, discarded=10)
    driver.finish()


def test_a_restart_under_the_same_namespace_reuses_what_the_request_computed() -> None:
    """Nothing is wrong with it: it was published as any other."""
    driver = decoding()
    driver.restart("r", None)
    driver.run()

    assert driver.ends["r"].counts == TokenCounts(
        reused=9, copied=1, computed=1, discarded=10
    )
    driver.finish()


def test_a_restart_tells_how_much_output_is_taken_back() -> None:
    driver = decoding()
    driver.restart("r", "v2")
    driver.run()

    (event,) = of_type(driver.events, RequestRestarted)
    assert (event.request_id, event.num_discarded_tokens) == ("r", 3)
    kinds = [type(e) for e in driver.events_of("r")]
    assert kinds == [
        RequestAdmitted,
        *[TokenSampled] * 3,
        RequestRestarted,
        RequestAdmitted,
        *[TokenSampled] * 6,
        RequestFinished,
    ]
    indices = [e.index for e in of_type(driver.events_of("r"), TokenSampled)]
    assert indices == [0, 1, 2, 0, 1, 2, 3, 4, 5]
    admissions = of_type(driver.events_of("r"), RequestAdmitted)
    assert not any(event.is_resumed for event in admissions), "it begins, not resumes"
    driver.finish()


def test_a_restart_gives_all_blocks_back_but_what_is_published() -> None:
    driver = decoding()
    driver.restart("r", "v2")

    usage = driver.cache.usage()
    assert usage.num_active_blocks == 0
    assert usage.num_cached_blocks == 3, "of prompt and output that were computed"
    driver.finish()


def test_a_restarted_request_goes_before_those_who_came_later() -> None:
    driver = Driver(block_size=4, token_budget=20, max_num_running=2)
    for request_id in ("r", "second", "third", "fourth"):
        driver.add(request_id, PROMPT + "b", max_new_tokens=6)
    driver.step()
    driver.restart("r", "v2")
    driver.run()

    starts = [e.request_id for e in of_type(driver.events, RequestAdmitted)]
    assert starts.index("third") > len(starts) - 1 - starts[::-1].index("r")
    driver.finish()


def test_before_the_fork_a_restart_is_of_all_samples_and_later_of_one() -> None:
    driver = before_the_fork()
    driver.restart("r", "v2")
    driver.run()
    models = {driver.models[each] for each in ("r", "r#1", "r#2")}
    assert models == {NEW}
    driver.finish()

    driver = forked_root()
    driver.restart("r#1", "v2")
    driver.run()
    models_by_id = [driver.models[each] for each in ("r", "r#1", "r#2")]
    assert models_by_id == [BASE, NEW, BASE]
    driver.finish()


def test_a_restarted_root_does_not_fork_again() -> None:
    driver = forked_root()
    driver.restart("r", "v2")
    driver.run()

    assert len(of_type(driver.events, RequestForked)) == 1
    assert set(driver.ends) == {"r", "r#1", "r#2"}
    driver.finish()


def test_the_id_of_a_restarted_sample_stays_taken() -> None:
    driver = forked_root()
    driver.restart("r#2", "v2")
    driver.cancel("r")
    driver.cancel("r#1")
    with pytest.raises(DuplicateRequest):
        driver.scheduler.add(build_spec("r"))
    driver.run()
    driver.scheduler.add(build_spec("r"))
    driver.cancel("r")
    driver.check()


def test_a_restarted_request_can_be_cancelled_or_preempted_like_any_other() -> None:
    driver = decoding()
    driver.restart("r", "v2")
    assert driver.cancel("r")
    driver.step()
    assert driver.reason("r") is FinishReason.CANCELLED
    driver.finish()

    driver = preempted()
    driver.restart("r", "v2")
    driver.run()
    assert driver.requests["r"].num_preemptions >= 1
    driver.finish()


def test_others_are_not_touched_by_a_restart() -> None:
    driver = Driver(block_size=4, token_budget=5, max_num_running=4)
    for request_id, prompt in (("r", PROMPT), ("other", PROMPT), ("third", "bbbb")):
        driver.add(request_id, prompt, max_new_tokens=6)
    driver.step()
    driver.step()
    others = [driver.requests[each] for each in ("other", "third")]

    def states() -> list[tuple[Any, ...]]:
        return [(r.state, r.num_computed, r.tokens, r.lease) for r in others]

    before = states()
    driver.restart("r", "v2")
    assert states() == before
    driver.finish()


def test_a_follower_does_not_wait_for_a_leader_that_began_again() -> None:
    driver = awaiting_a_prefix()
    driver.restart("leader", "v2")
    num_awaited = len(of_type(driver.events, PrefixAwaited))
    driver.step()
    driver.step()  # the budget is enough for the rest of the leader and for some of r

    assert driver.requests["r"].first_scheduled_s is not None
    assert driver.num_executed["r"]
    assert len(of_type(driver.events, PrefixAwaited)) == num_awaited
    driver.finish()


def test_nobody_is_restarted_who_is_not_in_flight() -> None:
    driver = waiting()
    driver.run()
    for request_id in ("r", "nobody"):
        with pytest.raises(RequestError, match="no request '[a-z]+' is in flight"):
            driver.scheduler.restart(RequestId(request_id), None, None, 0.0)


@pytest.mark.parametrize(
    "verb, act",
    [
        ("restart", lambda driver: driver.restart("r", "v2")),
        ("retire", lambda driver: driver.retire_for_all()),
    ],
)
def test_nothing_is_changed_under_a_step_in_flight(
    verb: str, act: Callable[[Driver], None]
) -> None:
    driver = prefilling()
    plan = driver.schedule()
    before = snapshot(driver.cache)

    with pytest.raises(InvariantError, match=f"{verb} while step 1 is pending"):
        act(driver)

    assert snapshot(driver.cache) == before
    driver.execute_and_commit(plan)
    driver.finish()


# Fences


def test_later_requests_wait_while_earlier_ones_run_to_their_end() -> None:
    driver = Driver(block_size=4)
    driver.add("early", PROMPT, max_new_tokens=5)
    driver.step()
    epoch = driver.fence()
    driver.add("late", PROMPT, max_new_tokens=5)

    for _ in steps_until_the_end_of(driver, "early"):
        assert driver.requests["late"].state is RequestState.WAITING
        assert driver.scheduler.num_before(epoch) == 1

    assert driver.scheduler.num_before(epoch) == 0
    assert driver.reason("early") is FinishReason.LENGTH
    assert driver.step().chunks == (), "there is work, and it is held"
    assert driver.scheduler.has_work
    driver.lift_fence(epoch)
    driver.step()
    assert driver.requests["late"].state is RequestState.RUNNING
    driver.finish()


def test_earlier_requests_that_have_not_started_still_do() -> None:
    driver = Driver(block_size=4, max_num_running=1)
    for number in range(3):
        driver.add(f"early{number}", PROMPT)
    driver.step()
    driver.fence()
    driver.add("late", PROMPT)
    for _ in range(30):
        driver.step()

    assert {f"early{number}" for number in range(3)} == set(driver.ends)
    driver.finish()


def test_an_earlier_request_that_is_preempted_comes_back_inside_the_fence() -> None:
    driver = preempted()
    driver.fence()
    driver.add("late", "c")
    for _ in steps_until_the_end_of(driver, "r"):
        assert driver.requests["late"].first_scheduled_s is None
    driver.finish()


def test_held_requests_do_not_stand_in_the_way_of_earlier_ones() -> None:
    """Neither in the order nor for a place: an earlier one may come back behind."""
    driver = Driver(num_blocks=6, block_size=4, max_num_running=2)
    driver.add("older", "bbbbbbbb", max_new_tokens=14, arrival_s=10.0)
    driver.add("r", PROMPT, max_new_tokens=6, arrival_s=11.0)
    driver.run_until(RequestPreempted)
    driver.fence()
    driver.add("late", "c", arrival_s=0.0)
    assert driver.scheduler.num_waiting == 2
    for _ in steps_until_the_end_of(driver, "r"):
        assert driver.requests["late"].first_scheduled_s is None
    driver.finish()


@in_every_state
def test_a_fence_cannot_be_lifted_before_everybody_inside_has_ended(
    build: Callable[[], Driver], request_id: str
) -> None:
    driver = build()
    epoch = driver.fence()
    num_before = len(driver.scheduler.requests())
    assert driver.scheduler.num_before(epoch) == num_before

    with pytest.raises(
        InvariantError, match=f"fence 1 lifted with {num_before} samples of before it"
    ):
        driver.scheduler.lift_fence(epoch)

    driver.add("late", "c")
    driver.step()
    assert driver.requests["late"].first_scheduled_s is None
    driver.finish()


def test_all_samples_of_an_earlier_request_count_until_they_end() -> None:
    driver = before_the_fork()
    epoch = driver.fence()
    assert driver.scheduler.num_before(epoch) == 1
    driver.run_until(RequestForked)
    assert driver.scheduler.num_before(epoch) == 3

    driver.cancel("r")
    driver.cancel("r#1")

    assert driver.scheduler.num_before(epoch) == 1
    with pytest.raises(InvariantError):
        driver.scheduler.lift_fence(epoch)
    driver.cancel("r#2")
    driver.lift_fence(epoch)
    driver.finish()


def test_a_fence_that_was_not_set_up_cannot_be_lifted() -> None:
    driver = Driver()
    with pytest.raises(InvariantError, match="fence 1 lifted .* of 0 fences"):
        driver.scheduler.lift_fence(1)
    driver.fence()
    with pytest.raises(InvariantError, match="fence 2 lifted"):
        driver.scheduler.lift_fence(2)
    driver.lift_fence(1)


def test_lifting_a_fence_again_does_nothing_more() -> None:
    driver = Driver()
    first, second = driver.fence(), driver.fence()
    driver.lift_fence(second)
    driver.scheduler.lift_fence(second)
    driver.scheduler.lift_fence(first)
    driver.scheduler.lift_fence(0)

    driver.serve("r", PROMPT)
    assert driver.reason("r") is FinishReason.LENGTH
    driver.finish()


def test_held_requests_can_be_cancelled() -> None:
    driver = decoding()
    epoch = driver.fence()
    for request_id in ("late", "later"):
        driver.add(request_id, PROMPT)
    driver.step()

    assert driver.cancel("late")
    assert not driver.cancel("late")

    driver.run()
    assert driver.scheduler.num_before(epoch + 1) == 0
    assert driver.reason("late") is FinishReason.CANCELLED
    assert driver.reason("later") is FinishReason.LENGTH
    assert driver.ends["late"].counts == TokenCounts()
    driver.finish()


def test_fences_are_passed_one_after_another() -> None:
    driver = Driver(block_size=4)
    driver.add("r0", PROMPT, max_new_tokens=3)
    driver.step()
    for number in range(1, 4):
        driver.fence()
        driver.add(f"r{number}", PROMPT)

    for number in range(4):
        assert driver.lift_due() == number
        for _ in steps_until_the_end_of(driver, f"r{number}"):
            assert driver.lift_due() == number
            started = [r for r in driver.scheduler.requests() if r.first_scheduled_s]
            assert {r.request_id for r in started} <= {f"r{number}"}

    assert driver.scheduler.num_before(99) == 0
    driver.finish()


def test_several_fences_without_requests_between_fall_together() -> None:
    driver = decoding()
    for _ in range(3):
        last = driver.fence()
    driver.add("late", "c", namespace=None)
    with pytest.raises(InvariantError):
        driver.scheduler.lift_fence(1)
    driver.cancel("r")

    driver.lift_fence(last)
    driver.step()

    assert driver.requests["late"].first_scheduled_s is not None
    driver.finish()


@in_every_state
def test_a_restart_moves_a_request_beyond_the_fence(
    build: Callable[[], Driver], request_id: str
) -> None:
    driver = build()
    epoch = driver.fence()
    num_before = driver.scheduler.num_before(epoch)

    driver.restart(request_id)

    assert driver.scheduler.num_before(epoch) == num_before - 1
    assert driver.requests[request_id].epoch == epoch
    driver.step()
    if num_before > 1:
        assert driver.requests[request_id].state is RequestState.WAITING
    driver.run()
    assert driver.models[request_id] == Model(weights=1)
    driver.finish()


def test_samples_of_a_request_keep_the_epoch_of_its_start() -> None:
    driver = before_the_fork()
    driver.fence()
    driver.run_until(RequestForked)
    epochs = {r.request_id: r.epoch for r in driver.scheduler.requests()}
    assert epochs == {"r": 0, "r#1": 0, "r#2": 0}
    driver.finish()


def test_a_fence_can_be_set_up_while_a_step_is_in_flight() -> None:
    driver = prefilling()
    plan = driver.schedule()
    epoch = driver.fence()
    driver.add("late", "c")
    driver.execute_and_commit(plan)

    assert driver.scheduler.num_before(epoch) == 1
    driver.finish()


# Retiring a namespace


@in_every_state
def test_a_request_in_flight_ends_well_and_shares_nothing_any_more(
    build: Callable[[], Driver], request_id: str
) -> None:
    driver = build()
    num_published = driver.cache.usage().num_published_blocks
    driver.retire_for_all()

    driver.run()
    driver.scheduler.take_events()

    assert driver.cache.usage().num_published_blocks == num_published
    assert driver.cache.tree.num_blocks == 0
    assert driver.cache.num_retired_blocks == 0
    assert driver.cache.pool.num_free == driver.cache.pool.num_total
    assert NAMESPACE not in driver.cache.tree.roots(), "nobody planted it again"
    driver.finish()


@in_every_state
def test_nothing_older_is_matched_after_a_retirement(
    build: Callable[[], Driver], request_id: str
) -> None:
    driver = build()
    driver.retire_for_all()
    assert driver.num_findable(PROMPT) == 0
    num_admitted = len(of_type(driver.events, RequestAdmitted))
    driver.run()

    later = of_type(driver.events, RequestAdmitted)[num_admitted:]
    assert [event.num_cached_tokens for event in later] == [0] * len(later)
    driver.finish()


@in_every_state
def test_blocks_come_back_as_leases_end(
    build: Callable[[], Driver], request_id: str
) -> None:
    driver = build()
    usage = driver.cache.usage()

    num_remaining = driver.retire_for_all()

    assert num_remaining == driver.cache.num_retired_blocks
    assert driver.cache.usage().num_cached_blocks == 0, "what nobody holds goes at once"
    assert driver.cache.usage().num_active_blocks == usage.num_active_blocks
    for request in driver.scheduler.requests():
        driver.cancel(request.request_id)
        check_scheduler(driver.scheduler)
    assert driver.cache.num_retired_blocks == 0
    assert driver.cache.pool.num_free == driver.cache.pool.num_total
    driver.step()
    retired = of_type(driver.events, BlocksRetired)
    assert sum(e.num_blocks for e in retired) == usage.num_published_blocks
    driver.finish()


@in_every_state
def test_retiring_again_changes_nothing(
    build: Callable[[], Driver], request_id: str
) -> None:
    driver = build()
    driver.retire_for_all()
    before = snapshot(driver.cache)
    requests = [(r.request_id, r.namespace) for r in driver.scheduler.requests()]

    driver.retire_for_all()

    assert snapshot(driver.cache) == before
    assert [
        (r.request_id, r.namespace) for r in driver.scheduler.requests()
    ] == requests
    driver.finish()


def test_retiring_what_nobody_knows_does_nothing() -> None:
    driver = decoding()
    before = snapshot(driver.cache)
    assert driver.retire_for_all(b"x" * 32) == 0
    assert snapshot(driver.cache) == before
    assert driver.requests["r"].namespace == NAMESPACE
    driver.finish()


def test_only_the_requests_of_a_namespace_are_cut_off() -> None:
    driver = Driver(block_size=4)
    driver.add("old", PROMPT)
    driver.add("new", PROMPT, adapter="v2")
    driver.step()
    driver.retire_for_all(NAMESPACE)
    driver.run()

    assert driver.num_findable(PROMPT) == 0
    assert driver.num_findable(PROMPT, namespace=namespace_of(NEW)) == len(PROMPT)
    driver.finish()


def test_a_retired_request_that_is_preempted_starts_from_nothing() -> None:
    driver = Driver(num_blocks=6, block_size=4, max_num_running=2)
    driver.add("older", "bbbbbbbb", max_new_tokens=14)
    driver.add("r", PROMPT, max_new_tokens=6)
    driver.step()
    driver.retire_for_all()
    driver.serve("other", "c")

    assert driver.requests["r"].num_preemptions
    resumed = of_type(driver.events_of("r"), RequestAdmitted)[1:]
    assert resumed
    assert all(event.num_cached_tokens == 0 for event in resumed)
    driver.finish()


def test_samples_forked_after_a_retirement_share_nothing_with_others() -> None:
    driver = before_the_fork()
    driver.retire_for_all()
    driver.run_until(RequestForked)
    assert {r.namespace for r in driver.scheduler.requests()} == {None}
    driver.run()
    assert driver.num_findable(PROMPT) == 0
    driver.finish()


def test_nobody_awaits_a_prefill_that_was_cut_off() -> None:
    driver = awaiting_a_prefix()
    driver.retire_for_all()
    driver.step()
    assert driver.requests["r"].first_scheduled_s is not None
    driver.finish()


def test_a_new_request_plants_the_namespace_anew_beside_its_retired_tree() -> None:
    """Equal bytes, another tree: what is retired is not joined to it."""
    driver = Driver(block_size=4, token_budget=5)
    driver.add("old", PROMPT)
    driver.step()
    driver.retire_for_all()
    driver.add("new", PROMPT)
    driver.run()

    assert driver.ends["new"].counts.reused == 0
    assert driver.num_findable(PROMPT) == len(PROMPT), "the new one published"
    driver.finish()


def test_a_declaration_is_taken_back_with_its_namespace() -> None:
    driver = Driver(block_size=4)
    driver.declare_public(PROMPT[:8])
    driver.serve("a", PROMPT, tenant="a")
    assert driver.num_findable(PROMPT, tenant="b") == 8
    driver.retire_for_all()

    driver.serve("a2", PROMPT, tenant="a")

    assert driver.num_findable(PROMPT, tenant="a") == len(PROMPT)
    assert driver.num_findable(PROMPT, tenant="b") == 0
    driver.finish()


@pytest.mark.parametrize("num_steps", range(6))
def test_a_rollout_in_place_never_mixes_the_old_with_the_new(num_steps: int) -> None:
    """Retire, fence, let everybody finish, replace."""
    driver = Driver(block_size=4, token_budget=7)
    for number in range(3):
        driver.add(f"old{number}", PROMPT, max_new_tokens=2 + number)
    for _ in range(num_steps):
        driver.step()
    driver.retire_for_all(NAMESPACE)
    num_before = len(driver.events)
    driver.fence()
    for number in range(3):
        driver.add(f"new{number}", PROMPT)
    driver.run()

    new = namespace_of(Model(weights=1))
    published = of_type(driver.events[num_before:], BlocksPublished)
    assert {event.namespace for event in published} == {new}
    assert driver.num_findable(PROMPT) == 0
    assert driver.num_findable(PROMPT, namespace=new) == len(PROMPT)
    driver.finish()


# Ending as replaced


@in_every_state
def test_a_request_ends_with_the_reason_it_is_given(
    build: Callable[[], Driver], request_id: str
) -> None:
    driver = build()
    driver.scheduler.cancel(
        RequestId(request_id), driver.now, reason=FinishReason.REPLACED
    )
    driver.step()

    end = driver.ends[request_id]
    assert isinstance(end, RequestAborted)
    assert end.reason is FinishReason.REPLACED
    assert driver.requests[request_id].finish_reason is FinishReason.REPLACED
    driver.finish()


def test_while_its_step_is_in_flight_a_request_ends_as_cancelled() -> None:
    driver = prefilling()
    plan = driver.schedule()
    driver.scheduler.cancel(RequestId("r"), driver.now, reason=FinishReason.REPLACED)
    driver.execute_and_commit(plan)
    assert driver.reason("r") is FinishReason.CANCELLED
    driver.finish()


# Adapters and start positions


def test_a_chunk_carries_the_adapter_and_the_start_position_it_needs() -> None:
    driver = Driver(block_size=4, token_budget=5)
    driver.add("r", PROMPT, adapter="v1", start_position=64)
    driver.add("plain", "b")
    driver.run()

    chunks = [chunk for plan in driver.plans for chunk in plan.chunks]
    seen = {(c.request_id, c.adapter, c.start_position) for c in chunks}
    assert seen == {("r", "v1", 64), ("plain", None, 0)}
    driver.finish()


def test_the_same_tokens_at_another_start_position_share_nothing() -> None:
    """At another position they are another namespace, and positive at the same."""
    driver = Driver(block_size=4)
    for number, start in enumerate([0, 64, 0, 64, 65]):
        driver.serve(f"r{number}", PROMPT, start_position=start)
    reused = [driver.ends[f"r{number}"].counts.reused for number in range(5)]
    assert reused == [0, 0, 9, 9, 0]
    driver.finish()


def test_samples_inherit_adapter_and_start_position() -> None:
    driver = Driver(block_size=4)
    driver.add("r", PROMPT, num_samples=3, adapter="v1", start_position=7)
    driver.run_until(RequestForked)
    for request in driver.scheduler.requests():
        assert (request.spec.adapter, request.spec.start_position) == ("v1", 7)
    driver.finish()


def test_a_start_position_counts_against_the_context() -> None:
    driver = Driver(max_request_tokens=20)
    driver.add("fits", PROMPT, max_new_tokens=4, start_position=6, namespace=None)
    with pytest.raises(ValueError, match=r"start_position 7 \+ 10 prompt tokens"):
        driver.add("not", PROMPT, max_new_tokens=4, start_position=7, namespace=None)
    driver.finish()


# What `check` knows of all this


def miscount_an_epoch(driver: Driver) -> None:
    driver.scheduler._lives.epochs._num_by_epoch[0] += 1


def keep_an_empty_epoch(driver: Driver) -> None:
    driver.scheduler._lives.epochs._num_by_epoch[5] = 0


def miscount_the_samples(driver: Driver) -> None:
    driver.scheduler._lives._by_root[RequestId("r")].clear()


def lift_what_was_not_set_up(driver: Driver) -> None:
    driver.scheduler._lives.epochs.opened = 9


def change_an_epoch(driver: Driver, epoch: int) -> None:
    request = driver.requests["r"]
    driver.scheduler._lives.epochs.leave(request)
    request.epoch = epoch
    driver.scheduler._lives.epochs.enter(request)


def run_before_the_fence_is_lifted(driver: Driver) -> None:
    driver.fence()
    change_an_epoch(driver, 1)


def be_of_an_epoch_to_come(driver: Driver) -> None:
    change_an_epoch(driver, 7)


def lift_too_early(driver: Driver) -> None:
    driver.fence()
    driver.scheduler._lives.epochs.opened = 1


def cut_off_without_retiring(driver: Driver) -> None:
    driver.requests["r"].namespace = None


def change_the_namespace_of_a_running_request(driver: Driver) -> None:
    driver.requests["r"].namespace = b"x" * 32


def publish_into_another_namespace(driver: Driver) -> None:
    lease = driver.requests["r"].lease
    assert lease is not None
    driver.requests["r"].namespace = lease.namespace = b"x" * 32


def hold_a_node_without_a_namespace(driver: Driver) -> None:
    lease = driver.requests["r"].lease
    assert lease is not None
    driver.requests["r"].namespace = lease.namespace = None


def hold_no_node_under_a_namespace(driver: Driver) -> None:
    driver.add("alone", "bb", namespace=None)
    driver.step()
    lease = driver.requests["alone"].lease
    assert lease is not None
    driver.requests["alone"].namespace = lease.namespace = NAMESPACE


@pytest.mark.parametrize(
    "damage, message",
    [
        (miscount_an_epoch, "requests by epoch"),
        (keep_an_empty_epoch, "requests by epoch"),
        (miscount_the_samples, "samples in flight by id"),
        (lift_what_was_not_set_up, "a fence is lifted that was not set up"),
        (run_before_the_fence_is_lifted, "started before its fence was lifted"),
        (be_of_an_epoch_to_come, "epoch 7, which is not one of 0 to 0"),
        (lift_too_early, "epoch 0, which is not one of 1 to 1"),
        (cut_off_without_retiring, "shares nothing and could publish"),
        (change_the_namespace_of_a_running_request, "namespace of r's lease"),
        (publish_into_another_namespace, "neither retired nor its namespace's"),
        (hold_a_node_without_a_namespace, "without a namespace holds a node|could pub"),
        (hold_no_node_under_a_namespace, "with a namespace holds no node"),
    ],
)
def test_damage_by_a_rollout_is_found(
    damage: Callable[[Driver], None], message: str
) -> None:
    driver = Driver(block_size=4)
    driver.add("r", PROMPT, num_samples=2, max_new_tokens=9)
    driver.step()
    driver.step()
    driver.cancel("r#1")
    check_scheduler(driver.scheduler)

    damage(driver)

    with pytest.raises(InvariantError, match=message):
        check_scheduler(driver.scheduler)


def test_a_retired_root_that_can_be_matched_is_found() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    serve(cache, "abcd")
    cache.tree.roots()[b"n" * 32].is_retired = True
    with pytest.raises(InvariantError, match="a retired root can be matched"):
        check_tree(cache.tree, 2)


def test_a_root_kept_as_retired_that_is_not_or_is_empty_is_found() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    lease = hold(cache, "abcd")
    cache.retire(b"n" * 32, 0.0)
    check_cache(cache, [lease])
    (root,) = cache.tree.retired_roots()
    root.is_retired = False
    with pytest.raises(InvariantError, match="kept as retired and is not"):
        check_tree(cache.tree, 2)
    root.is_retired = True
    root.children.clear()
    with pytest.raises(InvariantError, match="without blocks is kept"):
        check_tree(cache.tree, 2)


def test_retired_blocks_that_nobody_holds_are_found() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    serve(cache, "abcd")
    cache.tree.retire(b"n" * 32)  # as the cache does, without freeing anything
    with pytest.raises(InvariantError, match="held by no lease and not freed"):
        check_cache(cache, [])
