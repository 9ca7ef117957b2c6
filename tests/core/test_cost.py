"""Prices: what adds up, what a step is bound by, and known figures."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.core.books.cost import CostModel, FittedCost, RooflineCost, StepShape
from stemkv.errors import ConfigError

# A dense model of 8 billion parameters in bfloat16 on a device of round numbers.
ROOFLINE = RooflineCost(
    source="made up",
    bytes_per_token=131_072,
    flops_per_token=16e9,
    flops_per_pair=524_288,
    weight_bytes=16e9,
    flops_per_s=1e15,
    bytes_per_s=4e12,
    watts=700,
    mfu=0.5,
    bandwidth_efficiency=0.8,
    step_overhead_s=0.001,
)
FITTED = FittedCost(
    source="made up",
    bytes_per_token=23_040,
    step_s=0.003,
    prefill_chunk_s=0.0005,
    prefill_token_s=0.0002,
    prefill_pair_s=3e-8,
    decode_s=0.001,
    decode_context_s=2e-7,
    copied_token_s=1e-6,
    flops_per_token=269e6,
    flops_per_pair=69_120,
    assumed_watts=65,
)
MODELS: tuple[CostModel, ...] = (ROOFLINE, FITTED)
BOTH = pytest.mark.parametrize("cost", MODELS, ids=["roofline", "fitted"])


def prefill(*chunks: tuple[int, int]) -> StepShape:
    shape = StepShape()
    for start, end in chunks:
        shape.add_chunk(start, end, is_decode=False)
    return shape


def decode(*contexts: int) -> StepShape:
    shape = StepShape()
    for context in contexts:
        shape.add_chunk(context - 1, context, is_decode=True)
    return shape


# What a step's shape counts


@given(start=st.integers(0, 300), length=st.integers(1, 300))
def test_a_chunk_has_a_pair_for_every_query_and_every_key_up_to_it(
    start: int, length: int
) -> None:
    shape = prefill((start, start + length))

    assert shape.num_prefill_pairs == sum(
        position + 1 for position in range(start, start + length)
    )
    assert shape.num_prefill_tokens == length


# Prefill


@BOTH
@given(
    cuts=st.lists(st.integers(0, 200_000), min_size=2, max_size=8, unique=True).map(
        sorted
    )
)
def test_prefill_of_consecutive_chunks_costs_what_the_whole_does(
    cost: CostModel, cuts: list[int]
) -> None:
    chunks = list(itertools.pairwise(cuts))
    for price in (cost.prefill_seconds, cost.prefill_flops, cost.prefill_joules):
        whole = price(cuts[0], cuts[-1])

        assert whole > 0
        assert math.isclose(math.fsum(price(*c) for c in chunks), whole, rel_tol=1e-12)


@BOTH
def test_the_same_tokens_cost_more_behind_a_longer_prefix(cost: CostModel) -> None:
    near, far = cost.prefill_seconds(0, 1_000), cost.prefill_seconds(50_000, 51_000)

    assert far > near
    assert cost.prefill_seconds(7, 7) == 0


def test_prefill_flops_are_the_textbook_sum() -> None:
    # Tokens 2 and 3 attend to 3 and 4 keys.
    assert ROOFLINE.prefill_flops(2, 4) == 2 * 16e9 + 524_288 * (3 + 4)
    assert ROOFLINE.prefill_seconds(2, 4) == ROOFLINE.prefill_flops(2, 4) / 0.5e15
    assert ROOFLINE.prefill_joules(2, 4) == 700 * ROOFLINE.prefill_seconds(2, 4)


def test_more_devices_are_faster_and_draw_more_but_use_the_same_energy() -> None:
    four = dataclasses.replace(ROOFLINE, num_devices=4, step_overhead_s=0.0)
    one = dataclasses.replace(ROOFLINE, step_overhead_s=0.0)

    assert four.prefill_seconds(0, 999) == pytest.approx(
        one.prefill_seconds(0, 999) / 4
    )
    assert four.prefill_joules(0, 999) == pytest.approx(one.prefill_joules(0, 999))
    assert four.prefill_flops(0, 999) == one.prefill_flops(0, 999)
    for shape in (decode(5_000), prefill((0, 4_000))):
        assert four.step_seconds(shape) == pytest.approx(one.step_seconds(shape) / 4)


# Steps of a roofline


def test_a_long_prefill_step_takes_its_prefill_seconds_and_the_overhead() -> None:
    seconds = ROOFLINE.step_seconds(prefill((3_000, 7_000)))

    assert seconds == pytest.approx(0.001 + ROOFLINE.prefill_seconds(3_000, 7_000))


def test_a_decode_step_takes_as_long_as_reading_weights_and_contexts() -> None:
    # Both contexts are read, both new tokens written.
    num_bytes = 16e9 + 131_072 * (2_000 + 3_000 + 2)

    assert ROOFLINE.step_seconds(decode(2_000, 3_000)) == pytest.approx(
        0.001 + num_bytes / (4e12 * 0.8)
    )


def test_decoding_together_reads_the_weights_once() -> None:
    together = ROOFLINE.step_seconds(decode(*[100] * 8))
    alone = ROOFLINE.step_seconds(decode(100))

    assert together < 1.1 * alone


def test_copies_are_read_and_written() -> None:
    shape = decode(100)
    before = ROOFLINE.step_seconds(shape)
    shape.num_copied_tokens = 1_000

    assert ROOFLINE.step_seconds(shape) - before == pytest.approx(
        2 * 1_000 * 131_072 / (4e12 * 0.8)
    )


@given(
    chunks=st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(1, 3_000)), min_size=1, max_size=4
    ),
    contexts=st.lists(st.integers(1, 50_000), max_size=8),
)
def test_a_step_never_gets_cheaper_by_more_work(
    chunks: list[tuple[int, int]], contexts: list[int]
) -> None:
    for cost in MODELS:
        shape = StepShape()
        last = 0.0
        for start, length in chunks:
            shape.add_chunk(start, start + length, is_decode=False)
            assert cost.step_seconds(shape) > last
            last = cost.step_seconds(shape)
        for context in contexts:
            shape.add_chunk(context - 1, context, is_decode=True)
            assert cost.step_seconds(shape) > last
            last = cost.step_seconds(shape)


def test_a_steps_prefill_contexts_are_read_once_each() -> None:
    # Nothing but KV costs anything here.
    cost = dataclasses.replace(
        ROOFLINE,
        flops_per_token=1e-9,
        flops_per_pair=0,
        weight_bytes=1e-9,
        step_overhead_s=0,
    )
    seconds = cost.step_seconds(prefill((4_000, 4_100), (0, 30)))

    num_tokens = 4_100 + 30 + 130  # read, read and written
    assert seconds == pytest.approx(num_tokens * 131_072 / (4e12 * 0.8))


def test_a_window_saves_reading_but_not_writing() -> None:
    half = dataclasses.replace(ROOFLINE, read_bytes_per_token=65_536)
    saved = ROOFLINE.step_seconds(decode(10_000)) - half.step_seconds(decode(10_000))

    assert saved == pytest.approx(10_000 * 65_536 / (4e12 * 0.8))


def test_a_token_reads_its_experts_and_a_big_batch_all_of_them() -> None:
    sparse = dataclasses.replace(ROOFLINE, expert_bytes=12e9, expert_share=0.25)

    assert sparse.step_weight_bytes(0) == 0
    assert sparse.step_weight_bytes(1) == pytest.approx(4e9 + 12e9 / 4)
    assert sparse.step_weight_bytes(2) == pytest.approx(4e9 + 12e9 * (1 - 0.75**2))
    assert sparse.step_weight_bytes(1_000) == pytest.approx(16e9)
    assert ROOFLINE.step_weight_bytes(1) == 16e9


# Fitted coefficients


def test_a_fitted_step_is_the_sum_of_its_terms() -> None:
    shape = StepShape(
        num_prefill_tokens=100,
        num_prefill_pairs=9_000,
        num_prefills=2,
        num_decodes=3,
        num_decode_context=700,
        num_copied_tokens=5,
    )

    assert FITTED.step_seconds(shape) == pytest.approx(
        0.003 + 2 * 0.0005 + 100 * 0.0002 + 9_000 * 3e-8 + 3 * 0.001 + 700 * 2e-7 + 5e-6
    )


def test_a_hit_saves_the_terms_of_tokens_and_pairs_only() -> None:
    shape = prefill((100, 300))
    rest = FITTED.step_s + FITTED.prefill_chunk_s

    assert FITTED.prefill_seconds(100, 300) == pytest.approx(
        FITTED.step_seconds(shape) - rest
    )


def test_a_meter_replaces_the_assumed_watts() -> None:
    metered = dataclasses.replace(FITTED, measured_watts=40.0)

    assert FITTED.watts == 65
    assert metered.prefill_joules(0, 10) == 40.0 * FITTED.prefill_seconds(0, 10)


# Bad numbers


@pytest.mark.parametrize(
    "cost, field, value, message",
    [
        (ROOFLINE, "mfu", 0.0, "mfu must be above 0 and at most 1, got 0.0"),
        (ROOFLINE, "mfu", 1.1, "mfu must be above 0 and at most 1, got 1.1"),
        (ROOFLINE, "expert_share", math.nan, "expert_share must be above 0"),
        (ROOFLINE, "watts", -1, "watts must be above 0 and finite, got -1"),
        (ROOFLINE, "num_devices", 0, "num_devices must be above 0"),
        (ROOFLINE, "read_bytes_per_token", 0, "read_bytes_per_token must be above 0"),
        (ROOFLINE, "expert_bytes", 17e9, "expert_bytes is a part of weight_bytes"),
        (FITTED, "decode_s", -1e-9, "decode_s must be at least 0 and finite"),
        (FITTED, "step_s", math.inf, "step_s must be at least 0 and finite, got inf"),
        (FITTED, "measured_watts", 0, "measured_watts must be above 0"),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(
    cost: RooflineCost | FittedCost, field: str, value: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        dataclasses.replace(cost, **{field: value})


def test_a_fit_in_which_prefill_or_decoding_is_free_is_refused() -> None:
    with pytest.raises(ConfigError, match="a hit would save nothing"):
        dataclasses.replace(FITTED, prefill_token_s=0, prefill_pair_s=0)
    with pytest.raises(ConfigError, match="decoding would take no time"):
        dataclasses.replace(FITTED, step_s=0, decode_s=0, decode_context_s=0)
