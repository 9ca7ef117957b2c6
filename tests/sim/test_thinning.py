"""A long series kept short: nothing is lost that is a sum."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.sim.thinning import Thinned


@given(values=st.lists(st.integers(0, 9), max_size=200), limit=st.integers(2, 9))
@settings(deadline=None)
def test_joined_points_add_up_to_everything_that_was_added(
    values: list[int], limit: int
) -> None:
    thinned = Thinned[int](limit, operator.add)
    for number, value in enumerate(values, 1):
        thinned.add(value)
        assert len(thinned.points()) <= limit
        assert sum(thinned.points()) == sum(values[:number])
    assert thinned.num_added == len(values)


@given(num_points=st.integers(0, 200), limit=st.integers(2, 9))
@settings(deadline=None)
def test_points_that_are_not_joined_are_examples_in_order(
    num_points: int, limit: int
) -> None:
    thinned = Thinned[int](limit, None)
    for number in range(num_points):
        thinned.add(number)
    points = thinned.points()
    assert list(points) == sorted(set(points))
    assert set(points) <= set(range(num_points))
    assert points[:1] == tuple(range(num_points))[:1], "the first one stays"


@pytest.mark.parametrize("num_points", [0, 1, 5, 6])
def test_up_to_the_limit_every_point_is_kept(num_points: int) -> None:
    thinned = Thinned[int](6, operator.add)
    for number in range(num_points):
        thinned.add(number)
    assert thinned.points() == tuple(range(num_points))


def test_of_many_points_at_least_half_the_limit_is_kept() -> None:
    thinned = Thinned[int](8, operator.add)
    for number in range(1_000):
        thinned.add(1)
        if number >= 8:
            assert len(thinned.points()) >= 5
    # Neighbours, two by two: every point but the last stands for equally many.
    *full, last = thinned.points()
    assert len(set(full)) == 1
    assert last <= full[0]


def test_the_later_state_is_kept_where_the_join_says_so() -> None:
    thinned = Thinned[tuple[int, int]](2, lambda one, two: (two[0], one[1] + two[1]))
    for number in range(5):
        thinned.add((number, 1))
    assert thinned.points() == ((3, 4), (4, 1))
