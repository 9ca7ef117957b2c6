"""First come, first served: by arrival, whatever happens in between."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core import Domain, Fcfs, OrderConfig, Request, RequestId
from stemkv.core.schedule.request import RequestState
from tests.core.scheduling import build_spec


def build_request(request_id: str, *, arrival_s: float, added: int = 0) -> Request:
    return Request(build_spec(request_id, arrival_s=arrival_s), sequence_number=added)


def order_of(order: Fcfs) -> list[str]:
    """Who would start one after another if everybody fitted; pure."""
    return [request.request_id for request in order.first(len(order), 0.0)]


def test_an_empty_order_picks_nobody() -> None:
    order = Fcfs()
    order.begin(0.0, admits=True)

    assert order.pick() is None
    assert len(order) == 0


def test_the_earliest_arrival_is_next_in_whatever_order_they_were_added() -> None:
    order = Fcfs()
    for added, (name, arrival_s) in enumerate([("b", 2.0), ("c", 3.0), ("a", 1.0)]):
        order.add(build_request(name, arrival_s=arrival_s, added=added))

    assert order_of(order) == ["a", "b", "c"]
    assert len(order) == 3


def test_equal_arrivals_go_in_the_order_they_were_added() -> None:
    order = Fcfs()
    for added, name in enumerate("zya"):
        order.add(build_request(name, arrival_s=1.0, added=added))

    assert order_of(order) == ["z", "y", "a"]


def test_samples_of_one_request_stand_side_by_side() -> None:
    order = Fcfs()
    parent = build_request("r", arrival_s=1.0, added=0)
    for sample in (2, 1):
        child = build_request("r", arrival_s=1.0, added=0)
        child.become_sample(parent, sample)
        child.state = RequestState.PREEMPTED
        order.add(child)
    order.add(build_request("later", arrival_s=1.0, added=1))
    order.add(parent)

    assert order_of(order) == ["r", "r#1", "r#2", "later"]


def test_anybody_can_be_removed_wherever_he_stands() -> None:
    for removed in "abc":
        order = Fcfs()
        requests = {
            name: build_request(name, arrival_s=1.0, added=added)
            for added, name in enumerate("abc")
        }
        for request in requests.values():
            order.add(request)

        order.remove(requests[removed])

        assert order_of(order) == [name for name in "abc" if name != removed]
        assert len(order) == 2


def test_a_preempted_request_returns_to_its_place() -> None:
    order = Fcfs()
    first, second = (
        build_request(name, arrival_s=1.0, added=added)
        for added, name in enumerate("ab")
    )
    order.add(first)
    order.add(second)
    first.state = RequestState.RUNNING
    order.start(first)
    order.remove(first)  # its prefill is done
    first.state = RequestState.PREEMPTED

    order.add(first)

    assert order_of(order) == ["a", "b"]


def test_an_unfinished_prefill_goes_before_all_who_wait() -> None:
    order = Fcfs()
    late, early = (
        build_request("late", arrival_s=2.0, added=0),
        build_request("early", arrival_s=1.0, added=1),
    )
    order.add(late)
    late.state = RequestState.RUNNING
    order.start(late)
    order.add(early)

    order.begin(0.0, admits=True)

    pick = order.pick()
    assert pick is not None
    assert pick.request is late


@given(
    acts=st.lists(
        st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 5)), max_size=40
    )
)
@settings(deadline=None)
def test_the_order_is_always_that_of_sorted_arrivals(
    acts: list[tuple[str, int]],
) -> None:
    order = Fcfs()
    waiting: list[Request] = []
    for added, (act, number) in enumerate(acts):
        if act == "add":
            request = build_request(f"r{added}", arrival_s=float(number), added=added)
            order.add(request)
            waiting.append(request)
        elif waiting:
            order.remove(waiting.pop(number % len(waiting)))

        expected = sorted(waiting, key=lambda request: request.order_key)
        assert order_of(order) == [request.request_id for request in expected]
        order.begin(0.0, admits=True)
        pick = order.pick()
        assert (pick and pick.request) == (expected[0] if expected else None)


@dataclass
class Plain:
    """As little as an order may see of a request."""

    request_id: RequestId
    arrival_s: float
    num_tokens: int = 8
    domain: Domain = field(default_factory=lambda: Domain.private("a"))
    owner: str = "a"
    request_class: str | None = None
    state: RequestState = RequestState.WAITING
    num_ready: int = 0
    num_ready_in_public: int = 0
    is_late: bool = False

    @property
    def spec(self) -> Plain:
        return self

    @property
    def order_key(self) -> tuple[float, int, int]:
        return (self.arrival_s, 0, 0)


@pytest.mark.parametrize("name", ["fair", "fcfs", "lpm", "residual"])
def test_an_order_needs_nothing_of_a_request_but_what_a_candidate_has(
    name: str,
) -> None:
    order = OrderConfig(name=name).make()
    late, early = Plain(RequestId("late"), 2.0), Plain(RequestId("early"), 1.0)
    for each in (late, early):
        order.add(each)
    assert [each.request_id for each in order.first(2, 3.0)] == ["early", "late"]

    order.begin(3.0, admits=True)
    pick = order.pick()

    assert pick is not None
    assert pick.request is early
    early.state = RequestState.RUNNING
    order.start(early)
    order.ran(pick, 8, is_last=True)
    order.remove(early)
    assert len(order) == 1
    assert order.victim([early, late]) is late
