"""First come, first served: by arrival, whatever happens in between."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core import Fcfs, Request, RequestId
from stemkv.core.request import RequestState
from tests.core.scheduling import build_spec


def build_request(request_id: str, *, arrival_s: float, added: int = 0) -> Request:
    return Request(build_spec(request_id, arrival_s=arrival_s), sequence_number=added)


def order_of(order: Fcfs) -> list[str]:
    return [request.request_id for request in order.candidates(0.0)]


def test_an_empty_order_has_no_candidates() -> None:
    order = Fcfs()

    assert order_of(order) == []
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
        order.add(child)
    order.add(build_request("later", arrival_s=1.0, added=1))
    order.add(parent)

    assert order_of(order) == ["r", "r#1", "r#2", "later"]


def test_anybody_can_be_removed_wherever_he_stands() -> None:
    for removed in "abc":
        order = Fcfs()
        for added, name in enumerate("abc"):
            order.add(build_request(name, arrival_s=1.0, added=added))

        order.remove(RequestId(removed))

        assert order_of(order) == [name for name in "abc" if name != removed]
        assert len(order) == 2


def test_a_preempted_request_returns_to_its_place() -> None:
    order = Fcfs()
    first = build_request("first", arrival_s=1.0)
    order.add(first)
    order.add(build_request("second", arrival_s=2.0))
    order.remove(first.request_id)
    order.add(build_request("third", arrival_s=3.0))

    first.state = RequestState.PREEMPTED
    order.add(first)

    assert order_of(order) == ["first", "second", "third"]


def test_asking_for_candidates_changes_nothing_and_survives_admission() -> None:
    order = Fcfs()
    for added, name in enumerate("abc"):
        order.add(build_request(name, arrival_s=1.0, added=added))

    seen = []
    for request in order.candidates(5.0):
        seen.append(request.request_id)
        order.remove(request.request_id)

    assert seen == ["a", "b", "c"]
    assert len(order) == 0


def test_time_does_not_change_the_order() -> None:
    order = Fcfs()
    for added, name in enumerate("abc"):
        order.add(build_request(name, arrival_s=float(added), added=added))

    for now in (0.0, 1.5, 1e9):
        names = [request.request_id for request in order.candidates(now)]
        assert names == ["a", "b", "c"]


@given(
    arrivals=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1e9]), max_size=12),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_it_agrees_with_sorting_by_arrival_and_order_of_add(
    arrivals: list[float], data: st.DataObject
) -> None:
    requests = [
        build_request(f"r{added}", arrival_s=arrival_s, added=added)
        for added, arrival_s in enumerate(arrivals)
    ]
    order, waiting = Fcfs(), []
    for request in data.draw(st.permutations(requests)):
        order.add(request)
        waiting.append(request)
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(waiting))
            waiting.remove(gone)
            order.remove(gone.request_id)

        waiting.sort(key=lambda r: (r.spec.arrival_s, r.sequence_number))
        assert list(order.candidates(0.0)) == waiting
        assert len(order) == len(waiting)
