"""A sweep's cells are replays, in the order of its grid, whoever plays them."""

from __future__ import annotations

import math
import multiprocessing
import os
from dataclasses import replace
from functools import cache

import pytest

from stemkv.core.books.cost import CostModel
from stemkv.errors import ConfigError, StemKVError
from stemkv.measure.results import SweepCell
from stemkv.sim.bounds import clairvoyant
from stemkv.sim.catalogue import device_named, model_named
from stemkv.sim.config import EVICTIONS, ReplayConfig
from stemkv.sim.pricing import roofline
from stemkv.sim.quotas import TenantQuotas
from stemkv.sim.replay import replay
from stemkv.sim.reuse import find_reuses
from stemkv.sim.sequence import replay_sequence
from stemkv.sim.sharing import SharingRule
from stemkv.sim.sweep import Grid, UntimedPlay, sweep, timed_cell
from stemkv.sim.trace import Trace
from stemkv.sim.workloads.registry import workload_named
from tests.knobs import replay_config

GRID = Grid(num_blocks=(900, 2_048), sharings=("isolated", "shared"))
BASE = replay_config(num_blocks=1, slo_ttft_s=1.0)


@cache
def costs() -> CostModel:
    return roofline(model_named("llama-3.1-8b"), device_named("h100"))


@cache
def example() -> Trace:
    return workload_named("worked-example", num_requests=40, num_tenants=3, rate=2.0)


def test_a_grid_is_every_combination_with_sizes_changing_slowest() -> None:
    configs = GRID.configs(BASE)

    assert [(c.num_blocks, c.sharing.name) for c in configs] == [
        (900, "isolated"),
        (900, "shared"),
        (2_048, "isolated"),
        (2_048, "shared"),
    ]
    assert all(config.slo_ttft_s == 1.0 for config in configs)


def test_a_grid_keeps_how_many_tenants_make_something_public() -> None:
    base = replay_config(
        num_blocks=1, sharing=SharingRule(name="public", public_min_tenants=3)
    )

    for config in Grid(num_blocks=(9,), sharings=("public", "shared")).configs(base):
        assert config.sharing.public_min_tenants == 3


def test_a_policy_that_does_not_exist_is_found_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="eviction must be one of"):
        Grid(num_blocks=(9,), evictions=("lru", "mru")).configs(BASE)


def test_processes_find_what_one_process_finds_in_the_same_order() -> None:
    configs = GRID.configs(BASE)
    seen: list[tuple[int, int]] = []

    alone = sweep(example(), configs, costs(), timed_cell)
    together = sweep(
        example(),
        configs,
        costs(),
        timed_cell,
        num_jobs=2,
        progress=lambda done, total: seen.append((done, total)),
    )

    assert together == alone
    assert [(cell.num_blocks, cell.sharing) for cell in together] == [
        (config.num_blocks, config.sharing.name) for config in configs
    ]
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_timed_cell_has_the_numbers_of_its_replay() -> None:
    config = GRID.configs(BASE)[0]
    result = replay(example(), config, costs())

    cell = timed_cell(example(), config, costs())

    ttft = next(summary for summary in result.latencies if summary.name == "TTFT")
    assert cell.hit_rate == result.tokens.hit_rate
    assert cell.saved_s == result.saved.seconds
    assert cell.gib == result.capacity_gib
    assert (cell.ttft_p50_s, cell.ttft_p99_s) == (ttft.p50, ttft.p99)
    assert cell.goodput_rps == result.goodput_rps is not None
    assert cell.num_evicted_blocks == result.num_evicted_blocks > 0
    assert cell.regret_tokens == result.regret_tokens
    assert cell.num_refused_blocks == result.num_refused_blocks
    assert cell.worst_tenant_ttft_p99_s == max(
        tenant.ttft.p99 for tenant in result.tenants if tenant.ttft is not None
    )


def test_a_cell_in_which_nothing_finished_has_no_latencies() -> None:
    config = replay_config(num_blocks=10)

    cell = timed_cell(example(), config, costs())

    assert (cell.ttft_p50_s, cell.worst_tenant_ttft_p99_s) == (None, None)
    assert (cell.hit_rate, cell.num_refused) == (0.0, 40)


def test_an_untimed_cell_has_hits_and_evictions_and_nothing_of_time() -> None:
    config = GRID.configs(BASE)[0].evicting("lru")
    found = replay_sequence(
        example(), num_blocks=900, rule=config.sharing, cost=costs()
    )

    cell = UntimedPlay()(example(), config, costs())

    assert example().unit_size == config.block_size
    assert cell.hit_rate == found.hits.hit_rate
    assert cell.saved_s == found.hits.saved_s
    assert cell.num_evicted_blocks == found.num_evicted_units
    assert cell.regret_tokens == found.regret_tokens > 0
    assert cell.policy_cpu_s is None
    assert (cell.ttft_p50_s, cell.ttft_p99_s, cell.goodput_rps) == (None, None, None)
    assert math.isnan(cell.seconds_per_gib_s)


def test_a_grid_without_a_clock_may_know_the_future() -> None:
    grid = Grid(num_blocks=(900,), evictions=EVICTIONS)
    play = UntimedPlay(measures=True)

    cells = [play(example(), config, costs()) for config in grid.configs(BASE)]

    best = cells.pop()
    assert best.eviction == "clairvoyant"
    reuses = find_reuses(example(), SharingRule())
    assert best.hit_rate == clairvoyant(reuses, 900).hit_rate
    assert best.policy_cpu_s is None, "nobody can look up what it looks up"
    for cell in cells:
        assert cell.hit_rate <= best.hit_rate
        assert cell.policy_cpu_s is not None
        assert cell.policy_cpu_s > 0
        assert cell.net_saved_s == cell.saved_s - cell.policy_cpu_s


def test_measuring_a_policy_changes_nothing_that_it_does() -> None:
    for config in Grid(num_blocks=(900,), evictions=EVICTIONS).configs(BASE):
        plain = UntimedPlay()(example(), config, costs())
        timed = UntimedPlay(measures=True)(example(), config, costs())

        assert replace(timed, policy_cpu_s=None) == plain


def test_reuses_are_those_of_the_trace_that_is_played() -> None:
    config = BASE.sized(900).evicting("clairvoyant")
    other = workload_named("chat", num_requests=40, rate=2.0, seed=3)
    play = UntimedPlay()

    cells = [play(each, config, costs()) for each in (example(), other, example())]

    assert cells[0] == cells[2] != cells[1]
    assert cells[1] == UntimedPlay()(other, config, costs())


def test_quotas_need_the_clock() -> None:
    config = replace(BASE.sized(900), quotas=TenantQuotas())

    with pytest.raises(ConfigError, match="quotas need the clock"):
        UntimedPlay()(example(), config, costs())


# What workers are sent is found by name, so these are functions of the module.


def _refuse(trace: Trace, config: ReplayConfig, costs: CostModel) -> SweepCell:
    raise ConfigError(f"{config.num_blocks} blocks are wrong")


def _die(trace: Trace, config: ReplayConfig, costs: CostModel) -> SweepCell:
    os._exit(9)


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_an_error_of_a_configuration_is_raised_here(num_jobs: int) -> None:
    with pytest.raises(ConfigError, match="900 blocks are wrong"):
        sweep(example(), GRID.configs(BASE)[:2], costs(), _refuse, num_jobs=num_jobs)

    assert multiprocessing.active_children() == []


def test_a_worker_that_dies_is_reported_with_what_it_was_at() -> None:
    with pytest.raises(StemKVError, match="code 9 .* 900 blocks, reuse_index, fair, "):
        sweep(example(), GRID.configs(BASE)[:2], costs(), _die, num_jobs=2)

    assert multiprocessing.active_children() == []


def test_no_process_outlives_a_sweep_that_is_interrupted() -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(
            example(),
            GRID.configs(BASE),
            costs(),
            UntimedPlay(),
            num_jobs=2,
            progress=interrupt,
        )

    assert multiprocessing.active_children() == []


def test_less_than_one_job_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_jobs must be at least 1, got 0"):
        sweep(example(), (), costs(), timed_cell, num_jobs=0)
