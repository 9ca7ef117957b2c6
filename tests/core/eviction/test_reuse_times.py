"""How long until what was released is used again, against a log that forgets nothing."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.retention.policy import reuse_times
from stemkv.core.retention.policy.reuse_times import AGE_EDGES, Cohort, ReuseTimes
from tests.core.builders import count_calls
from tests.core.eviction.twin_reuse_index import Idle, Learner

MAX_RUNS = 60.0  # where counts are halved very soon
PAUSES = [0.0, 0.25, 0.5, 1.0, 7.0, 60.0, 1000.0]
AGES = [0.0, 0.5, *AGE_EDGES[1:], 6000.0]

acts = st.lists(
    st.tuples(
        st.booleans(), st.integers(0, 2), st.integers(0, 50), st.sampled_from(PAUSES)
    ),
    max_size=80,
)


class Both:
    """The learner and its twin hear of the same idle times, of a few blocks each."""

    def __init__(self, *, max_runs: float = 10_000.0) -> None:
        self.times = ReuseTimes()
        self.learner = Learner(max_runs=max_runs)
        self.now = 0.0
        self.lasting: list[tuple[int, Cohort, list[Idle]]] = []

    def begin(self, kind: int, num_blocks: int) -> None:
        cohort = self.times.begin(kind, num_blocks, self.now)
        idle = [self.learner.begin((0, kind, 0), self.now) for _ in range(num_blocks)]
        self.lasting.append((kind, cohort, idle))

    def end(self, pick: int) -> None:
        kind, cohort, blocks = self.lasting.pop(pick % len(self.lasting))
        self.times.end(cohort, kind, len(blocks), self.now)
        for idle in blocks:
            self.learner.end(idle, self.now)
        self.learner.settle(self.now)

    def compare(self) -> None:
        for kind in range(4):  # of the last one nobody has heard
            own = (0, kind, 0)
            for age in AGES:
                rate = self.times.rate(kind, age)
                assert rate == pytest.approx(self.learner.rate(own, age), rel=1e-12)

    def act(self, ends: bool, kind: int, pick: int, pause: float) -> None:
        self.now += pause
        if ends and self.lasting:
            self.end(pick)
        else:
            self.begin(kind, 1 + pick % 5)


@settings(max_examples=60, deadline=None)
@given(acts)
def test_the_rates_are_those_of_the_log(
    acts: list[tuple[bool, int, int, float]],
) -> None:
    both = Both()
    for act in acts:
        both.act(*act)
        both.compare()


@pytest.mark.parametrize("seed", range(5))
def test_the_rates_are_those_of_the_log_when_counts_were_halved(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse_times, "_MAX_RUNS", MAX_RUNS)
    rng = random.Random(seed)
    both = Both(max_runs=MAX_RUNS)
    for number in range(700):
        both.act(
            rng.random() < 0.5, rng.randrange(3), rng.randrange(50), rng.choice(PAUSES)
        )
        if number % 20 == 0:
            both.compare()

    assert both.learner.num_halvings > 2


# What that means


def learnt(idle_s: dict[int, float], *, num: int = 300) -> ReuseTimes:
    """Of each class: idle times that all last as long. Infinity is never."""
    times = ReuseTimes()
    now = 0.0
    for _ in range(num):
        for kind, seconds in idle_s.items():
            cohort = times.begin(kind, 1.0, now)
            if seconds < float("inf"):
                times.end(cohort, kind, 1.0, now + seconds)
        now += 5000.0
    return times


def test_before_anything_is_learnt_the_rate_falls_with_age() -> None:
    times = ReuseTimes()
    for kind in (0, 7):
        rates = [times.rate(kind, age) for age in AGES]
        assert all(late <= early for early, late in pairwise(rates))
        assert rates[0] > rates[-1] > 0


def test_before_anything_is_learnt_all_classes_are_alike() -> None:
    times = ReuseTimes()
    assert all(times.rate(0, age) == times.rate(1, age) for age in AGES)


def test_beyond_the_last_edge_the_rate_is_small_and_falls() -> None:
    times = learnt({0: 3.0, 1: 200.0})
    last = [times.rate(kind, 4900.0) for kind in (0, 1)]
    beyond = [times.rate(0, age) for age in (5000.0, 5001.0, 1e6)]

    assert beyond == [times.rate(1, age) for age in (5000.0, 5001.0, 1e6)]
    assert min(last) > beyond[0] > beyond[1] > beyond[2] > 0


def test_a_class_that_is_reused_pays_more_than_one_that_is_not() -> None:
    times = learnt({0: 10.0, 1: float("inf")})

    assert times.rate(0, 0.0) > 5 * times.rate(1, 0.0)


def test_a_class_that_is_reused_sooner_pays_more() -> None:
    times = learnt({0: 10.0, 1: 500.0})

    assert times.rate(0, 0.0) > times.rate(1, 0.0)


def test_waiting_for_a_reuse_that_is_near_pays_more_than_it_did() -> None:
    times = learnt({0: 100.0})

    assert times.rate(0, 60.0) > times.rate(0, 0.0)


def test_what_was_learnt_is_forgotten_when_it_no_longer_holds() -> None:
    times = learnt({0: 10.0, 1: 500.0})
    before = times.rate(0, 0.0) / times.rate(1, 0.0)
    now = 1e8
    for _ in range(1500):  # what is forgotten is halved every 100,000 events
        for kind, seconds in ((0, 500.0), (1, 10.0)):
            times.end(times.begin(kind, 100.0, now), kind, 100.0, now + seconds)
        now += 5000.0

    assert before > 1
    assert times.rate(0, 0.0) < times.rate(1, 0.0)


def test_idle_times_of_one_class_that_never_end_are_no_events() -> None:
    times = learnt({0: float("inf")})

    assert times.rate(0, 0.0) == ReuseTimes().rate(0, 0.0)


def test_time_that_passes_costs_nothing() -> None:
    def calls(pause: float) -> int:
        times = ReuseTimes()

        def live() -> None:
            for number in range(100):
                times.begin(0, 1.0, number * pause)
                times.rate(0, pause)

        return count_calls(live)

    assert calls(1.0) == calls(1000.0)
