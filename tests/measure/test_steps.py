"""What a step cost and how its seconds are shared out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.measure.steps import StepRecord, prefill_seconds


def step(seconds: float, num_prefill: int, num_decode: int) -> StepRecord:
    return StepRecord(
        step=0,
        start_s=100.0,
        end_s=100.0 + seconds,
        num_prefill_tokens=num_prefill,
        num_decode_tokens=num_decode,
    )


steps = st.lists(
    st.builds(step, st.floats(0, 100), st.integers(0, 600), st.integers(0, 64)),
    max_size=10,
)


def test_a_step_lasts_from_start_to_end() -> None:
    assert step(2.5, 1, 1).seconds == 2.5


def test_seconds_are_shared_out_by_tokens() -> None:
    assert prefill_seconds([step(2.0, 30, 0)]) == 2.0
    assert prefill_seconds([step(2.0, 0, 8)]) == 0.0
    assert prefill_seconds([step(2.0, 30, 10)]) == 1.5
    assert prefill_seconds([step(2.0, 30, 10), step(1.0, 1, 0)]) == 2.5


def test_an_empty_step_counts_for_nobody() -> None:
    assert prefill_seconds([step(2.0, 0, 0)]) == 0.0
    assert prefill_seconds([]) == 0.0


@given(steps)
def test_prefill_and_decode_share_all_seconds_of_steps_with_tokens(
    records: list[StepRecord],
) -> None:
    swapped = [
        step(each.seconds, each.num_decode_tokens, each.num_prefill_tokens)
        for each in records
    ]
    total = sum(
        each.seconds
        for each in records
        if each.num_prefill_tokens + each.num_decode_tokens
    )
    shared = prefill_seconds(records) + prefill_seconds(swapped)
    assert shared == pytest.approx(total)


@given(steps, steps)
def test_seconds_of_two_runs_add_up(
    some: list[StepRecord], more: list[StepRecord]
) -> None:
    together = prefill_seconds([*some, *more])
    assert together == pytest.approx(prefill_seconds(some) + prefill_seconds(more))
    assert prefill_seconds(iter(some)) == prefill_seconds(some)
