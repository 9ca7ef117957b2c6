"""The study of one kept prefix: its replays, and what its definitions are worth."""

from __future__ import annotations

import dataclasses
import math
from array import array
from functools import cache

import pytest

from stemkv.core.books.cost import RooflineCost
from stemkv.errors import ConfigError
from stemkv.measure.results import GIB, to_json
from stemkv.measure.value import ValueResult, ValueRun, value_run
from stemkv.sim.arrivals import LoadConfig
from stemkv.sim.catalogue import device_named, model_named
from stemkv.sim.pricing import num_blocks, roofline
from stemkv.sim.replay import replay
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace
from stemkv.sim.value import ValueConfig, study_value
from stemkv.sim.workloads.worked_example import worked_example
from tests.knobs import replay_config


def costs() -> RooflineCost:
    return roofline(model_named("llama-3.1-8b"), device_named("h100"))


@cache
def study(
    *,
    num_requests: int = 40,
    share: float = 0.4,
    memory_gib: float = 12.0,
    num_tenants: int = 3,
    prefix_tokens: int = 12_000,
    rates: tuple[float, ...] = (),
) -> ValueResult:
    config = ValueConfig(
        num_requests=num_requests,
        share=share,
        memory_bytes=int(memory_gib * GIB),
        num_tenants=num_tenants,
        prefix_tokens=prefix_tokens,
        rates=rates,
    )
    return study_value(config, costs())


def small_memory() -> ValueResult:
    """The prefix leaves little more of it than the longest request needs."""
    return study(memory_gib=1.56, num_requests=16)


def all_runs(result: ValueResult) -> list[ValueRun]:
    points = [result.capacity, *result.loads, *result.memories]
    return [run for point in points for run in point.runs()]


def test_the_default_prefix_takes_one_and_a_half_gib() -> None:
    prefix = study().prefix

    assert prefix.num_tokens == 12_000
    assert prefix.num_bytes == 12_000 * 128 * 1024
    # Llama-3.1-8B on an H100 at half its peak: 230 TFLOP, 0.47 s, 326 J.
    assert prefix.prefill_s == pytest.approx(0.466, abs=0.001)
    assert prefix.prefill_joules == pytest.approx(326, abs=1)


def test_with_reuse_off_nothing_is_reused() -> None:
    for run in all_runs(study()):
        if run.reuse == "off":
            assert run.hit_rate == run.saved_s == run.saved_joules == 0


def test_with_room_for_all_only_the_first_request_computes_the_prefix() -> None:
    result = study()
    light = result.loads[0].shared

    num_hits = result.mix.num_sharing - 1
    assert light.saved_s == pytest.approx(num_hits * result.prefix.prefill_s)
    assert light.saved_joules == pytest.approx(num_hits * result.prefix.prefill_joules)
    assert light.hit_rate == pytest.approx(
        num_hits
        * 12_000
        / (result.mix.num_requests * result.mix.mean_tokens - outputs(result))
    )


def outputs(result: ValueResult) -> int:
    """Output tokens of the mix, from the generator."""
    trace = mix(result.mix.num_requests, result.mix.share, num_tenants=3)
    return trace.num_output_tokens


def test_sharing_saves_no_less_than_isolation() -> None:
    for point in (study().capacity, *study().loads):
        assert point.shared.saved_s >= point.isolated.saved_s > 0


def test_one_tenant_is_isolated_from_nobody() -> None:
    for point in study(num_tenants=1, rates=(2.0,), num_requests=20).loads:
        shared = dataclasses.replace(point.shared, reuse="isolated")
        assert to_json(shared, schema="run") == to_json(point.isolated, schema="run")


def test_requests_of_the_mix_are_counted_from_the_trace() -> None:
    result = study()
    trace = mix(40, 0.4, num_tenants=3)
    sizes = [r.input_length + r.output_length for r in trace.requests]

    assert result.mix.num_sharing == 16
    assert result.mix.mean_tokens == pytest.approx(sum(sizes) / 40)
    assert result.mix.mean_own_tokens == pytest.approx((sum(sizes) - 16 * 12_000) / 40)
    weighted = 24 * result.mix.one_off_tokens + 16 * result.mix.own_tokens
    assert weighted == pytest.approx(40 * result.mix.mean_own_tokens)
    assert result.active_requests * result.mix.mean_tokens == pytest.approx(12_000)


def test_no_request_is_refused_whatever_the_memory() -> None:
    for result in (study(), small_memory()):
        assert all(run.num_refused == 0 for run in all_runs(result))
        assert all(
            run.num_finished == result.mix.num_requests for run in all_runs(result)
        )


def test_memories_halve_while_the_longest_request_fits() -> None:
    assert [point.gib for point in study().memories] == [12.0, 6.0, 3.0]
    assert [point.gib for point in small_memory().memories] == [
        pytest.approx(1.56, abs=0.01)
    ]


def test_no_run_holds_more_than_there_is() -> None:
    for run in all_runs(study()):
        assert run.mean_active_gib <= run.peak_active_gib <= run.gib


def test_where_the_prefix_leaves_no_room_it_costs_all_of_the_rate() -> None:
    found = small_memory().memories[0].break_even

    assert found.displaced_rate is None
    assert found.lost_share == 1.0


def test_without_a_prefix_in_the_mix_nothing_is_saved() -> None:
    result = study(share=0.0, rates=(2.0,), num_requests=20)

    assert all(run.saved_s == 0 for run in all_runs(result))
    assert math.isnan(result.mix.own_tokens)
    assert result.is_conclusive


def test_a_mix_of_the_prefix_only() -> None:
    result = study(share=1.0, rates=(2.0,), num_requests=20)

    assert result.mix.num_sharing == 20
    assert math.isnan(result.mix.one_off_tokens)
    assert result.loads[0].shared.saved_s == pytest.approx(19 * result.prefix.prefill_s)


@pytest.mark.parametrize(
    "share, is_conclusive", [(0.0, True), (0.01, False), (0.1, False), (0.2, True)]
)
def test_one_request_with_the_prefix_decides_nothing(
    share: float, is_conclusive: bool
) -> None:
    result = study(share=share, num_requests=10, rates=(2.0,))

    assert result.is_conclusive is is_conclusive


def test_a_prefix_is_kept_in_whole_blocks() -> None:
    result = study(prefix_tokens=1_610, num_requests=10, rates=(2.0,))

    assert result.prefix.num_tokens == 1_600
    light = result.loads[0].shared
    assert light.saved_s == pytest.approx(3 * result.prefix.prefill_s)


def test_given_rates_are_sorted_and_tried_once() -> None:
    result = study(rates=(3.0, 1.0, 3.0), num_requests=10)

    assert [point.rate for point in result.loads] == [1.0, 3.0]
    most = result.capacity.off.requests_per_s
    assert [point.load for point in result.loads] == [1.0 / most, 3.0 / most]


def test_equal_studies_give_equal_bytes_and_seeds_matter() -> None:
    def text(seed: int) -> str:
        config = ValueConfig(num_requests=6, rates=(2.0,), seed=seed)
        return to_json(study_value(config, costs()), schema="stemkv.value/1")

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_progress_counts_every_replay() -> None:
    seen: list[tuple[int, int]] = []
    config = ValueConfig(num_requests=8, memory_bytes=int(1.56 * GIB), rates=(1.0, 2.0))

    study_value(config, costs(), progress=lambda *pair: seen.append(pair))

    total = seen[0][1]
    assert seen == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"share": -0.1}, "share must be from 0 to 1, got -0.1"),
        ({"share": math.nan}, "share must be from 0 to 1, got nan"),
        ({"prefix_tokens": 15}, "at least one block of 16 tokens, got 15"),
        ({"num_tenants": 0}, "num_tenants must be at least 1"),
        ({"num_requests": 0}, "num_requests must be at least 1"),
        ({"slo_ttft_s": 0.0}, "slo_ttft_s must be above 0"),
        ({"slo_tpot_s": math.inf}, "slo_tpot_s must be above 0 and finite"),
        ({"rates": (1.0, 0.0)}, "rate must be above 0 and finite, got 0.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_sense_is_refused(
    settings: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ValueConfig(**settings)  # type: ignore[arg-type]


def test_memory_that_cannot_hold_the_longest_request_is_refused_with_numbers() -> None:
    config = ValueConfig(memory_bytes=GIB, prefix_tokens=10**9)

    with pytest.raises(
        ConfigError, match=r"8,192 tokens, .* 1,000,000,700, .* shorter"
    ):
        study_value(config, costs())


# What the definitions claim, against replays that know nothing of them


def mix(num_requests: int, share: float, *, num_tenants: int = 4) -> Trace:
    return worked_example(
        num_requests=num_requests,
        rate=1.0,
        seed=0,
        num_tenants=num_tenants,
        share=share,
    )


def served(trace: Trace, blocks: int) -> float:
    config = replay_config(num_blocks=blocks, load=LoadConfig(rate=1e9))
    return len(trace.requests) / replay(trace, config, costs()).end_s


@pytest.mark.parametrize("memory_gib", [3, 6])
def test_the_break_even_share_is_an_upper_limit(memory_gib: int) -> None:
    blocks = num_blocks(
        memory_gib * GIB, bytes_per_token=costs().bytes_per_token, block_size=16
    )
    (found,) = (
        point.break_even
        for point in study(memory_gib=6.0, num_requests=80, rates=(2.0,)).memories
        if point.gib == memory_gib
    )

    def gain(share: float) -> float:
        """Rate with the prefix always in memory, over that with a copy each."""
        alone = [
            dataclasses.replace(request, identity=request.request_id)
            for request in mix(80, share).requests
        ]
        # Pinned: its blocks are gone, and whoever begins with it brings only the rest.
        pinned = [
            dataclasses.replace(
                request,
                input_length=request.input_length - 12_000,
                units=array("i"),
            )
            if request.input_length > 12_000
            else request
            for request in alone
        ]
        trace = mix(80, share)
        trace.requests = alone
        with_copies = served(trace, blocks)
        trace.requests = pinned
        return served(trace, blocks - 750) / with_copies

    assert 0 < found.share < 0.4
    assert gain(found.share) >= 1
    assert gain(found.share / 10) < 1, "and a limit that says something"


@pytest.mark.parametrize("eviction", ["lru", "reuse_index"])
@pytest.mark.parametrize("gap, is_kept", [(0.7, True), (1.4, False)])
def test_an_idle_prefix_lives_for_the_retention_time(
    gap: float, is_kept: bool, eviction: str
) -> None:
    """A prefix that is asked for twice, with one-off requests before and between.

    A policy that learns knows nothing of it either: so far it was used once.
    """
    blocks = 4_000
    trace = mix(200, 0.0)

    def run_with(second_s: float | None) -> tuple[ValueRun, int]:
        requests = list(trace.requests)
        start = 60.0  # the memory is full of one-offs by then
        if second_s is not None:
            for number, at_s in enumerate((start, start + second_s)):
                requests.append(
                    dataclasses.replace(
                        requests[0],
                        request_id=f"prefix-{number}",
                        input_length=1_601,
                        units=array("i", range(10**6, 10**6 + 100)),
                        arrival_s=at_s,
                    )
                )
        requests.sort(key=lambda request: request.arrival_s)
        config = replay_config(
            num_blocks=blocks, sharing=SharingRule(name="shared"), eviction=eviction
        )
        result = replay(dataclasses.replace(trace, requests=requests), config, costs())
        return value_run(result, reuse="shared"), result.tokens.reused

    run, num_reused = run_with(None)
    assert num_reused == 0
    assert 5 < run.retention_s < 100

    _, num_reused = run_with(gap * run.retention_s)

    assert (num_reused == 1_600) is is_kept
