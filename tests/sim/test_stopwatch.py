from __future__ import annotations

import inspect
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.retention.policy import EvictionPolicy, Lru
from stemkv.sim.sequence import replay_sequence
from stemkv.sim.sharing import SharingRule
from stemkv.sim.stopwatch import Stopwatch
from tests.sim.small_traces import Drawn, random_traces, rules, trace

FREELY = settings(deadline=None)  # a busy machine is no failure

HOOKS = [
    name
    for name, member in inspect.getmembers(EvictionPolicy, inspect.isfunction)
    if not name.startswith("_")
]


class Clock:
    """Moves by `step` with every reading, and by what others add."""

    def __init__(self, step: int) -> None:
        self.time = 0
        self.step = step
        self.num_readings = 0

    def __call__(self) -> int:
        self.time += self.step
        self.num_readings += 1
        return self.time


class Slow(Lru):
    """Thinks 100 ns about every victim."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.num_victims = 0

    def victim(self, now: float) -> int | None:
        self.clock.time += 100
        self.num_victims += 1
        return super().victim(now)


@FREELY
@given(
    drawn=random_traces(),
    rule=st.sampled_from(rules()),
    num_blocks=st.none() | st.integers(1, 12),
)
def test_a_policy_that_is_timed_decides_the_same(
    drawn: Drawn, rule: SharingRule, num_blocks: int | None
) -> None:
    plain, timed = (
        replay_sequence(drawn.trace, num_blocks=num_blocks, rule=rule, policy=policy)
        for policy in (Lru(), Stopwatch(Lru(), clock=count().__next__))
    )

    assert timed == plain


def test_time_in_hooks_adds_up_without_what_the_clock_takes() -> None:
    clock = Clock(step=7)
    policy = Slow(clock)
    watch = Stopwatch(policy, clock=clock)

    replay_sequence(
        trace("x", "y", "z", "x"), num_blocks=2, rule=SharingRule(), policy=watch
    )

    assert policy.num_victims == 2
    assert watch.overhead_s == 7e-9
    assert watch.seconds == pytest.approx(200e-9)


def test_calibration_is_not_charged_to_the_policy() -> None:
    watch = Stopwatch(Lru(), clock=Clock(step=7))

    assert (watch.num_calls, watch.seconds) == (0, 0.0)


def test_a_clock_that_was_slower_at_first_gives_no_negative_time() -> None:
    clock = Clock(step=7)
    watch = Stopwatch(Lru(), clock=clock)
    clock.step = 0

    watch.victim(0.0)

    assert (watch.num_calls, watch.seconds) == (1, 0.0)


def test_every_hook_is_timed_and_reads_the_clock_twice() -> None:
    clock = Clock(step=1)
    watch = Stopwatch(Lru(), clock=clock)
    before = clock.num_readings

    replay_sequence(
        trace("xy", "x", "pq", "xz", "xy"),
        num_blocks=4,
        rule=SharingRule(),
        policy=watch,
    )

    assert watch.num_calls > 20
    assert clock.num_readings - before == 2 * watch.num_calls


@pytest.mark.parametrize("hook", HOOKS)
def test_it_passes_on_exactly_what_the_protocol_has(hook: str) -> None:
    ours = inspect.signature(getattr(Stopwatch, hook))

    assert ours == inspect.signature(getattr(EvictionPolicy, hook))
