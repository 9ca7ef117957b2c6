"""What the latency words mean."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.measure.timeline import RequestTimeline, percentile

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-12, abs=1e-9)


@given(st.lists(finite, min_size=1, max_size=30))
def test_percentiles_begin_and_end_with_the_extremes(values: list[float]) -> None:
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)


@given(st.lists(finite, min_size=1, max_size=30), st.floats(0, 100), st.floats(0, 100))
def test_percentiles_stay_inside_and_in_order(
    values: list[float], one: float, other: float
) -> None:
    low, high = sorted((one, other))
    assert min(values) <= percentile(values, low)
    assert percentile(values, low) <= percentile(values, high) + 1e-9
    assert percentile(values, high) <= max(values) + 1e-9


def test_percentiles_by_hand() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 50) == 3.0
    assert percentile([0.0, 10.0], 95) == 9.5
    assert percentile([7.0], 99) == 7.0
    assert percentile((value for value in (1.0, 3.0)), 50) == 2.0


def test_the_percentile_of_nothing_is_not_a_number() -> None:
    assert math.isnan(percentile([], 50))


@pytest.mark.parametrize("percent", [-1, 100.5])
def test_there_are_no_percentiles_beyond_the_extremes(percent: float) -> None:
    with pytest.raises(ValueError, match="percent"):
        percentile([1.0, 2.0, 3.0], percent)


def test_a_request_that_was_never_scheduled_has_no_latencies() -> None:
    timeline = RequestTimeline(arrival_s=5.0)
    assert timeline.queue_s is None
    assert timeline.ttft_s is None
    assert timeline.tpot_s is None
    assert timeline.e2e_s is None
    assert timeline.itl_s == []


def test_a_request_with_one_token_has_no_time_between_tokens() -> None:
    timeline = RequestTimeline(
        arrival_s=5.0, first_scheduled_s=6.0, token_times_s=[8.0]
    )
    assert timeline.queue_s == 1.0
    assert timeline.ttft_s == timeline.e2e_s == 3.0
    assert timeline.tpot_s is None
    assert timeline.itl_s == []


def test_latencies_of_a_request_by_hand() -> None:
    timeline = RequestTimeline(
        arrival_s=5.0, first_scheduled_s=6.0, token_times_s=[8.0, 8.5, 10.5]
    )
    assert timeline.queue_s == 1.0
    assert timeline.ttft_s == 3.0
    assert timeline.itl_s == [0.5, 2.0]
    assert timeline.tpot_s == 1.25
    assert timeline.e2e_s == 5.5


@given(
    st.floats(0, 1e3),
    st.floats(0, 10),
    st.lists(st.floats(0, 10), min_size=1, max_size=20),
)
def test_the_parts_add_up(arrival_s: float, queue_s: float, gaps: list[float]) -> None:
    times = [arrival_s + queue_s + sum(gaps[: i + 1]) for i in range(len(gaps))]
    timeline = RequestTimeline(
        arrival_s=arrival_s,
        first_scheduled_s=arrival_s + queue_s,
        token_times_s=times,
    )
    assert timeline.ttft_s is not None
    assert timeline.e2e_s is not None
    assert timeline.e2e_s == pytest.approx(timeline.ttft_s + sum(timeline.itl_s))
    if len(times) > 1:
        mean = sum(timeline.itl_s) / len(timeline.itl_s)
        assert timeline.tpot_s == pytest.approx(mean)


def test_timelines_do_not_share_their_token_times() -> None:
    one, other = RequestTimeline(arrival_s=0.0), RequestTimeline(arrival_s=0.0)
    one.token_times_s.append(1.0)
    assert other.token_times_s == []
