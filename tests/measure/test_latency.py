"""Summaries against numpy, and goodput against counting."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.measure.latency import goodput, summarize, summarize_weighted
from stemkv.measure.timeline import percentile

seconds = st.floats(0, 1e6, allow_nan=False)
weighted = st.lists(st.tuples(seconds, st.integers(0, 5)), max_size=30)


def close(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-9)


@given(values=st.lists(seconds, min_size=1, max_size=60))
@settings(deadline=None)
def test_a_summary_is_what_numpy_says_of_the_values(values: list[float]) -> None:
    summary = summarize("TTFT", values)

    assert summary is not None
    assert summary.count == len(values)
    assert close(summary.mean, float(np.mean(values)))
    assert summary.max == max(values)
    for percent in (50, 90, 95, 99):
        told = getattr(summary, f"p{percent}")
        assert close(told, float(np.percentile(values, percent)))
        assert close(told, percentile(values, percent))


@given(values=st.lists(seconds, min_size=1, max_size=60))
@settings(deadline=None)
def test_a_distribution_rises_from_the_least_to_the_most(values: list[float]) -> None:
    summary = summarize("TTFT", values)

    assert summary is not None
    shares = [share for share, _ in summary.distribution]
    points = [point for _, point in summary.distribution]
    assert shares == [percent / 100 for percent in range(101)]
    assert (points[0], points[-1]) == (min(values), max(values))
    # Interpolation may round a step down by one unit in the last place.
    assert all(right >= left or close(left, right) for left, right in pairwise(points))
    expected = np.percentile(values, [100 * share for share in shares])
    assert all(close(*pair) for pair in zip(points, expected.tolist(), strict=True))


@given(values=weighted)
@settings(deadline=None)
def test_weights_are_so_many_equal_values(values: list[tuple[float, int]]) -> None:
    spelled_out = [value for value, count in values for _ in range(count)]

    assert summarize_weighted("ITL", values) == summarize("ITL", spelled_out)


@pytest.mark.parametrize("values", [[], [(1.0, 0)]], ids=["none", "none-of-it"])
def test_no_values_have_no_summary(values: list[tuple[float, int]]) -> None:
    assert summarize_weighted("ITL", values) is None
    assert summarize("ITL", []) is None


limits = st.none() | st.sampled_from([0.0, 1.0, 2.0])
latencies = st.lists(
    st.tuples(
        st.none() | st.sampled_from([0.5, 1.0, 1.5, 2.5]),
        st.none() | st.sampled_from([0.5, 1.0, 1.5, 2.5]),
    ),
    min_size=1,
    max_size=20,
)


@given(values=latencies, ttft_s=limits, tpot_s=limits, duration_s=st.integers(1, 9))
@settings(deadline=None)
def test_goodput_counts_those_who_kept_both_limits(
    values: list[tuple[float | None, float | None]],
    ttft_s: float | None,
    tpot_s: float | None,
    duration_s: int,
) -> None:
    found = goodput(iter(values), duration_s, ttft_s=ttft_s, tpot_s=tpot_s)

    good = 0
    for ttft, tpot in values:
        if ttft is None:
            continue  # not served
        if ttft_s is not None and ttft > ttft_s:
            continue
        if tpot_s is not None and tpot is not None and tpot > tpot_s:
            continue
        good += 1
    assert found.per_second == good / duration_s
    assert found.share == good / len(values)


def test_a_single_token_keeps_any_limit_on_the_others() -> None:
    found = goodput([(1.0, None)], 1.0, ttft_s=1.0, tpot_s=0.0)
    assert (found.per_second, found.share) == (1.0, 1.0)


def test_goodput_of_nobody_or_of_no_time_is_not_a_number() -> None:
    assert math.isnan(goodput([], 1.0, ttft_s=1.0, tpot_s=None).share)
    assert math.isnan(goodput([(1.0, 1.0)], 0.0, ttft_s=1.0, tpot_s=None).per_second)
