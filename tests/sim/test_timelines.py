"""Sessions on one clock: what changes is when, never what is asked."""

from __future__ import annotations

import itertools
import statistics
from array import array
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.errors import ConfigError
from stemkv.sim.timelines import cut_at, in_units_of, overlapped
from stemkv.sim.trace import Trace, TraceRequest

UNIT_SIZE = 16


def build_trace(
    num_sessions: int = 5, num_turns: int = 4, gap_s: float = 7.0, num_alone: int = 2
) -> Trace:
    """Sessions one after the other, each of growing prompts, and some lone requests."""
    requests: list[TraceRequest] = []
    for session in range(num_sessions):
        for turn in range(num_turns):
            units = array("i", range(1000 * session, 1000 * session + 3 * (turn + 1)))
            requests.append(
                TraceRequest(
                    request_id=f"{session}/{turn}",
                    input_length=UNIT_SIZE * len(units) + 5,
                    output_length=1,
                    units=units,
                    arrival_s=gap_s * len(requests),
                    session=f"session-{session}",
                    parent=len(requests) - 1 if turn else None,
                    think_s=gap_s if turn else 0.0,
                )
            )
    for number in range(num_alone):
        requests.append(
            TraceRequest(
                request_id=f"alone-{number}",
                input_length=UNIT_SIZE,
                output_length=1,
                units=array("i", [10**6 + number]),
                arrival_s=gap_s * len(requests),
            )
        )
    return Trace(name="test", format="test", unit_size=UNIT_SIZE, requests=requests)


def by_session(trace: Trace) -> Mapping[str, list[TraceRequest]]:
    sessions: dict[str, list[TraceRequest]] = {}
    for request in trace.requests:
        if request.session is not None:
            sessions.setdefault(request.session, []).append(request)
    return sessions


def plain(trace: Trace) -> list[tuple[str, float, int | None, float]]:
    return [(r.request_id, r.arrival_s, r.parent, r.think_s) for r in trace.requests]


# Overlapped sessions


@given(
    seed=st.integers(0, 2**32),
    spread_s=st.floats(0, 1e5),
    pause_s=st.none() | st.floats(0.1, 100),
)
@settings(deadline=None)
def test_each_session_asks_the_same_in_the_same_order(
    seed: int, spread_s: float, pause_s: float | None
) -> None:
    before = build_trace()

    after = overlapped(before, spread_s=spread_s, seed=seed, median_pause_s=pause_s)

    assert after.requests[0].arrival_s == 0
    arrivals = [request.arrival_s for request in after.requests]
    assert arrivals == sorted(arrivals)
    asked = {
        name: [request.request_id for request in requests]
        for name, requests in by_session(before).items()
    }
    assert asked == {
        name: [request.request_id for request in requests]
        for name, requests in by_session(after).items()
    }
    assert sorted(r.request_id for r in after.requests) == sorted(
        r.request_id for r in before.requests
    )
    for index, request in enumerate(after.requests):
        if request.parent is not None:
            assert request.parent < index
            session, turn = request.request_id.split("/")
            parent = after.requests[request.parent].request_id
            assert parent == f"{session}/{int(turn) - 1}"


def test_recorded_gaps_are_kept() -> None:
    after = overlapped(build_trace(gap_s=7.0), spread_s=100.0, seed=3)

    for requests in by_session(after).values():
        for last, turn in itertools.pairwise(requests):
            assert turn.arrival_s - last.arrival_s == pytest.approx(7.0, abs=1e-5)
            assert turn.think_s == 7.0


def test_drawn_pauses_have_their_median_and_become_think_times() -> None:
    trace = build_trace(num_sessions=100, num_turns=20, gap_s=1.0)

    after = overlapped(trace, spread_s=100.0, seed=3, median_pause_s=15.0)

    gaps = [
        turn.arrival_s - last.arrival_s
        for requests in by_session(after).values()
        for last, turn in itertools.pairwise(requests)
    ]
    assert statistics.median(gaps) == pytest.approx(15.0, rel=0.1)
    assert after.has_arrivals
    for request in after.requests:
        if request.parent is not None:
            parent = after.requests[request.parent]
            assert request.think_s == pytest.approx(
                request.arrival_s - parent.arrival_s, abs=1e-5
            )


def test_the_spread_decides_how_many_sessions_run_at_once() -> None:
    trace = build_trace(num_sessions=50)

    at_once = overlapped(trace, spread_s=0.0, seed=1)
    apart = overlapped(trace, spread_s=50_000.0, seed=1)

    # A session lasts 21 s, a lone request no time.
    assert at_once.duration_s == pytest.approx(21.0, abs=1e-5)
    assert apart.duration_s > 40_000


def test_equal_seeds_give_equal_timelines_and_others_do_not() -> None:
    first, again, other = (
        plain(overlapped(build_trace(), spread_s=500.0, seed=seed))
        for seed in (7, 7, 8)
    )

    assert first == again
    assert first != other


def test_equal_names_of_two_tenants_are_two_sessions() -> None:
    trace = build_trace(num_sessions=2, num_turns=2, num_alone=0)
    for index, request in enumerate(trace.requests):
        request.session, request.tenant = "the same", f"tenant-{index // 2}"

    after = overlapped(trace, spread_s=1e6, seed=0)

    arrivals = {r.request_id: r.arrival_s for r in after.requests}
    assert abs(arrivals["0/0"] - arrivals["1/0"]) > 100
    assert arrivals["1/1"] - arrivals["1/0"] == pytest.approx(7.0, abs=1e-5)


def test_the_notes_say_what_was_drawn() -> None:
    kept = overlapped(build_trace(), spread_s=7_200.0, seed=1)
    drawn = overlapped(build_trace(), spread_s=60.0, seed=2, median_pause_s=15.0)

    assert kept.notes == [
        "sessions start uniformly within 7,200 s (seed 1), recorded gaps kept"
    ]
    assert drawn.notes == [
        "sessions start uniformly within 60 s (seed 2), gaps drawn with a median of 15 s"
    ]


def test_a_trace_without_requests_stays_one() -> None:
    empty = Trace(name="none", format="test", unit_size=UNIT_SIZE, requests=[])

    assert overlapped(empty, spread_s=10.0, seed=0).requests == []
    assert cut_at(empty, 10.0).requests == []
    assert in_units_of(empty, 32).requests == []


# Cut


def test_what_arrives_at_the_end_or_later_is_left_out() -> None:
    trace = build_trace(gap_s=1.0, num_sessions=3, num_turns=4, num_alone=0)

    cut = cut_at(trace, 6.0)

    assert [r.arrival_s for r in cut.requests] == [0, 1, 2, 3, 4, 5]
    assert cut.notes == ["cut at 6 s: 6 requests are left"]
    assert cut_at(trace, 12.0) is trace


# Larger units


@given(
    pair=st.tuples(
        st.lists(st.integers(0, 1), max_size=40),
        st.lists(st.integers(0, 1), max_size=40),
    ),
    joined=st.integers(1, 9),
    is_partial=st.booleans(),
)
def test_prompts_share_the_larger_units_that_they_share_all_parts_of(
    pair: tuple[list[int], list[int]], joined: int, is_partial: bool
) -> None:
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for number, letters in enumerate(pair):
        units = array(
            "i",
            [
                ids.setdefault(tuple(letters[: end + 1]), len(ids))
                for end in range(len(letters))
            ],
        )
        lacking = 3 if is_partial and letters else 0
        requests.append(
            TraceRequest(
                request_id=str(number),
                input_length=max(1, UNIT_SIZE * len(units) - lacking),
                output_length=1,
                units=units,
                arrival_s=float(number),
            )
        )
    trace = Trace(name="test", format="test", unit_size=UNIT_SIZE, requests=requests)

    larger = in_units_of(trace, UNIT_SIZE * joined)

    def shared(one: array[int], two: array[int]) -> int:
        both = zip(one, two, strict=False)
        return sum(
            1 for _ in itertools.takewhile(lambda units: units[0] == units[1], both)
        )

    before = shared(requests[0].units, requests[1].units)
    one, two = larger.requests
    assert shared(one.units, two.units) == before // joined
    assert len(set(one.units) & set(two.units)) == before // joined
    assert larger.unit_size == UNIT_SIZE * joined
    for request in larger.requests:
        whole = request.input_length // larger.unit_size
        assert whole <= len(request.units) <= whole + 1


# What makes no sense


def test_what_makes_no_sense_is_refused() -> None:
    trace = build_trace()

    with pytest.raises(ConfigError, match="spread_s must be at least 0"):
        overlapped(trace, spread_s=-1.0, seed=0)
    with pytest.raises(ConfigError, match="median_pause_s must be above 0"):
        overlapped(trace, spread_s=1.0, seed=0, median_pause_s=0.0)
    with pytest.raises(ConfigError, match="end_s must be above 0, got 0"):
        cut_at(trace, 0.0)
    with pytest.raises(ConfigError, match="a multiple of the trace's 16, got 24"):
        in_units_of(trace, 24)
    with pytest.raises(ConfigError, match="a multiple of the trace's 16, got 8"):
        in_units_of(trace, 8)
