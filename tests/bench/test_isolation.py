from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bench.isolation import (
    BLOCK_SIZE,
    Arrival,
    Clock,
    Price,
    bars_of,
    run_setting,
    settings_for,
)
from stemkv.cli.worked_example import ExampleRequest
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine import LoadedModel
from stemkv.measure.steps import StepRecord
from tests.engine.models import VOCABULARY, build_engine, tiny_once

_NUM_PREFIX = 4 * BLOCK_SIZE + 5  # so that its last block stays private


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    threads = torch.get_num_threads()
    yield tiny_once("llama-group1", torch.float32)
    torch.set_num_threads(threads)


def ids(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


def build_arrivals(num_sharing: int = 6) -> tuple[list[Arrival], TokenIds]:
    """Requests of two tenants in turn, each after the one before has ended."""
    rng = random.Random(0)
    prefix = ids(rng, _NUM_PREFIX)
    arrivals = [
        Arrival(
            example=ExampleRequest(
                name=f"shared-{index}",
                tenant=("ann", "bob")[index % 2],
                messages=(),
                max_new_tokens=2,
                shares_prefix=True,
            ),
            prompt=TokenIds.from_ids([*prefix, index, *ids(rng, 30)]),
            at_s=10.0 * index,
        )
        for index in range(num_sharing)
    ]
    return arrivals, TokenIds.from_ids(prefix)


class Ticks:
    """A wall clock on which everything takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self._seconds = seconds

    def __call__(self) -> float:
        self.now += self._seconds
        return self.now


def run_all(
    loaded: LoadedModel, arrivals: list[Arrival], public: TokenIds
) -> list[Price]:
    prices = []
    for setting in settings_for(arrivals, public):
        engine = build_engine(
            loaded, num_blocks=64, block_size=BLOCK_SIZE, sharing=setting.sharing
        )
        prices.append(run_setting(engine, setting, arrivals))
    return prices


def test_cached_tokens_are_what_the_arithmetic_says(loaded: LoadedModel) -> None:
    arrivals, public = build_arrivals()

    prices = run_all(loaded, arrivals, public)

    num_whole = _NUM_PREFIX // BLOCK_SIZE * BLOCK_SIZE
    reused = {price.setting: price.num_reused for price in prices}
    # Five hit all of the prefix; four hit their own tenant's and one the whole blocks
    # of the public one; four hit their own tenant's.
    assert reused["shared"] == 5 * _NUM_PREFIX
    assert reused["public"] == 4 * _NUM_PREFIX + num_whole
    assert reused["private"] == 4 * _NUM_PREFIX
    num_tokens = sum(len(arrival.prompt) for arrival in arrivals)
    for price in prices:
        assert price.num_reused + price.num_computed == num_tokens
        assert len(price.ttft_s) == len(arrivals)
        assert min(price.ttft_s) > 0


def test_the_promises_follow_from_the_number_of_tenants(loaded: LoadedModel) -> None:
    arrivals, public = build_arrivals()
    prices = run_all(loaded, arrivals, public)

    promised = [bar for bar in bars_of(prices, arrivals) if bar.limit is not None]

    limits = {bar.name: bar.limit for bar in promised}
    assert limits == {
        "public / shared: cached tokens": pytest.approx(0.98),
        "private / shared: cached tokens": pytest.approx(4 / 5 - 0.02),
    }
    assert all(bar.is_met and bar.basis == "exact" for bar in promised)


def test_a_public_prefix_that_is_not_shared_falls_short(loaded: LoadedModel) -> None:
    arrivals, public = build_arrivals()
    shared, _, private = run_all(loaded, arrivals, public)
    broken = replace(private, setting="public")

    bars = bars_of([shared, broken, private], arrivals)

    missed = [bar.name for bar in bars if not bar.is_met]
    assert missed == ["public / shared: cached tokens"]


def test_how_fast_the_machine_is_changes_no_count(loaded: LoadedModel) -> None:
    arrivals, public = build_arrivals()
    crowded = [
        replace(arrival, at_s=0.03 * index) for index, arrival in enumerate(arrivals)
    ]
    # Few blocks, so that requests wait, and what is evicted depends on their order.
    prices = []
    for seconds in (1e-6, 0.5):
        for setting in settings_for(crowded, public):
            engine = build_engine(
                loaded, num_blocks=16, block_size=BLOCK_SIZE, sharing=setting.sharing
            )
            clock = Clock(wall=Ticks(seconds))
            price = run_setting(engine, setting, crowded, clock)
            prices.append(replace(price, ttft_s=(), prefill_s=0.0))

    assert prices[:3] == prices[3:]
    assert any(price.num_evicted for price in prices)


def test_a_request_that_arrives_within_a_step_waits_from_there() -> None:
    wall = iter([0.0, 100.0, 100.0, 104.0])
    clock = Clock(wall=lambda: next(wall))
    clock.wait_until(1.0)
    clock.begin()
    record = StepRecord(
        step=0, start_s=0, end_s=0, num_prefill_tokens=100, num_decode_tokens=0
    )

    clock.end(record)

    duration = clock.virtual_s - 1.0
    assert clock.wall_at(1.0 + duration / 4) == pytest.approx(101.0)
    assert clock.wall_at(clock.virtual_s) == pytest.approx(104.0)
