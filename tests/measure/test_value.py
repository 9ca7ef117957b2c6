"""What `stemkv value` calls break-even, retention and copies."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.core.books.cost import RooflineCost
from stemkv.measure.results import GIB, ReplayResult
from stemkv.measure.value import BreakEven, ValueRun, value_run
from stemkv.sim.arrivals import LoadConfig
from stemkv.sim.replay import replay
from stemkv.sim.sharing import SharingRule
from stemkv.sim.workloads.worked_example import worked_example
from tests.knobs import replay_config

COSTS = RooflineCost(
    source="a small accelerator",
    bytes_per_token=4096,
    flops_per_token=2e9,
    flops_per_pair=1e5,
    weight_bytes=2e9,
    flops_per_s=1e14,
    bytes_per_s=1e12,
    watts=100.0,
)


def replayed(*, rate: float = 30.0, num_blocks: int = 2_000) -> ReplayResult:
    trace = worked_example(
        num_requests=60,
        rate=1.0,
        seed=3,
        prefix_length=1_600,
        one_off_length=(100, 900),
    )
    config = replay_config(
        num_blocks=num_blocks,
        sharing=SharingRule(name="shared"),
        load=LoadConfig(rate=rate),
    )
    return replay(trace, config, COSTS)


def break_even(**changes: float | None) -> BreakEven:
    settings: dict[str, float | None] = dict(
        gib=6.0, one_off_rate=4.0, displaced_rate=3.0, prefix_gib=1.5, prefill_s=0.5
    )
    return BreakEven(**settings | changes)  # type: ignore[arg-type]


@given(
    rate=st.floats(0.1, 1e3),
    lost=st.floats(0, 1),
    prefix_gib=st.floats(0.01, 100),
    prefill_s=st.floats(1e-3, 100),
)
def test_at_the_break_even_share_both_sides_carry_the_same_per_gib_second(
    rate: float, lost: float, prefix_gib: float, prefill_s: float
) -> None:
    found = break_even(
        one_off_rate=rate,
        displaced_rate=rate * (1 - lost),
        prefix_gib=prefix_gib,
        prefill_s=prefill_s,
    )

    assert found.kept_s_per_gib_s(found.share) == pytest.approx(
        found.active_s_per_gib_s
    )


def test_break_even_by_hand() -> None:
    # A quarter of the rate is lost: a quarter of a second per second. Each hit saves
    # half a second, so one in eight of four requests a second makes up for it.
    found = break_even()

    assert found.lost_share == 0.25
    assert found.share == 0.125
    assert found.active_s_per_gib_s == pytest.approx(0.25 / 1.5)


def test_memory_that_nobody_misses_costs_nothing() -> None:
    assert break_even(displaced_rate=4.0).share == 0.0
    assert break_even(displaced_rate=4.1).share == 0.0, "noise between two replays"


def test_memory_without_which_nothing_runs_costs_all_of_the_rate() -> None:
    found = break_even(displaced_rate=None)

    assert found.lost_share == 1.0
    assert found.share == 0.5


@pytest.mark.parametrize("rate", [5.0, 30.0, 1e6])
@pytest.mark.parametrize("num_blocks", [300, 2_000])
def test_copies_are_what_all_running_requests_would_hold_alone(
    rate: float, num_blocks: int
) -> None:
    result = replayed(rate=rate, num_blocks=num_blocks)
    run = value_run(result, reuse="shared")

    def blocks_at(moment: float) -> int:
        return sum(
            math.ceil((r.prompt_tokens + r.output_tokens) / result.block_size)
            for r in result.requests
            if r.admitted_s is not None
            and r.end_s is not None
            and r.admitted_s <= moment < r.end_s
        )

    moments = sorted({t for r in result.requests for t in (r.admitted_s, r.end_s) if t})
    gib = result.block_bytes / GIB
    peak = max(map(blocks_at, [0.0, *moments]))
    assert run.peak_copies_gib == pytest.approx(peak * gib)
    # Constant between two moments at which somebody is admitted or ends.
    spans = zip([0.0, *moments], moments, strict=False)
    area = math.fsum(blocks_at(start) * (end - start) for start, end in spans)
    assert run.mean_copies_gib == pytest.approx(area * gib / result.end_s)
    assert run.peak_copies_gib >= run.peak_active_gib


def test_what_is_kept_was_in_use_or_idle() -> None:
    run = value_run(replayed(rate=5.0), reuse="shared")

    assert run.idle_gib_s is not None
    assert run.used_gib_s is not None
    assert run.idle_gib_s > 0
    assert run.used_share == pytest.approx(
        run.used_gib_s / (run.idle_gib_s + run.used_gib_s)
    )
    assert run.saved_s_per_idle_gib_s == pytest.approx(run.saved_s / run.idle_gib_s)
    # One copy of the prefix, never longer than the whole run.
    copy_gib = 1_600 * COSTS.bytes_per_token / GIB
    assert run.idle_gib_s + run.used_gib_s <= copy_gib * run.end_s * (1 + 1e-9)


def test_pieces_that_the_replay_does_not_list_leave_the_sums_unknown() -> None:
    result = replayed()
    cut = replace(result, prefixes=result.prefixes[1:])

    run = value_run(cut, reuse="shared")

    assert run.idle_gib_s is None
    assert run.used_share is None
    assert run.saved_s_per_idle_gib_s is None


def test_with_reuse_off_evictions_are_nobodys_business() -> None:
    run = value_run(replayed(num_blocks=300), reuse="off")

    assert run.num_evicted_blocks is None
    assert run.regret_tokens is None
    assert run.retention_s == math.inf


def test_a_minute_has_sixty_seconds() -> None:
    run = value_run(replayed(), reuse="shared")

    assert run.saved_s > 0
    assert run.saved_s_per_min * run.end_s == pytest.approx(60 * run.saved_s)
    assert run.saved_joules_per_min == pytest.approx(100 * run.saved_s_per_min)


def test_a_block_lives_until_all_idle_memory_has_been_published_over() -> None:
    run = replace(
        value_run(replayed(), reuse="shared"),
        gib=10.0,
        mean_active_gib=4.0,
        published_gib=30.0,
        end_s=100.0,
        num_finished=200,
    )

    assert run.retention_s == pytest.approx(20.0)  # 6 GiB at 0.3 a second
    # Two requests a second; one in forty is one every twenty seconds.
    assert run.retention_share == pytest.approx(1 / 40)
    assert full(run).retention_s == 0.0
    assert full(run).retention_share == math.inf


def full(run: ValueRun) -> ValueRun:
    return replace(run, mean_active_gib=run.gib)
