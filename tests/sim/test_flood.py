"""A tenant that floods costs the others their cache, unless floors keep it."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import pytest

from stemkv.core import OrderConfig
from stemkv.core.books.cost import RooflineCost
from stemkv.core.retention.policies import EVICTIONS
from stemkv.errors import ConfigError
from stemkv.measure.flood import FloodedTenant, FloodResult
from stemkv.measure.results import GIB
from stemkv.sim.catalogue import device_named, model_named
from stemkv.sim.flood import FloodConfig, study_flood
from stemkv.sim.pricing import roofline
from tests.seeds import slow


@cache
def costs() -> RooflineCost:
    return roofline(model_named("llama-3.1-8b"), device_named("h100"))


@cache
def study(
    *,
    eviction: str = "reuse_index",
    memory_gib: float = 24.0,
    rate: float = 0.6,
    num_requests: int = 80,
    share: float = 0.4,
    num_tenants: int = 4,
    order: str = "fair",
) -> FloodResult:
    config = FloodConfig(
        rate=rate,
        eviction=eviction,
        memory_bytes=int(memory_gib * GIB),
        num_requests=num_requests,
        share=share,
        num_tenants=num_tenants,
        order=OrderConfig(name=order),
    )
    return study_flood(config, costs())


@pytest.mark.parametrize(
    "eviction",
    ["reuse_index", *slow(name for name in EVICTIONS if name != "reuse_index")],
)
def test_floors_that_cover_working_sets_keep_what_a_flood_would_take(
    eviction: str,
) -> None:
    result = study(eviction=eviction)

    assert result.flooded_share < 0.95
    for tenant in result.tenants:
        assert tenant.kept_share is not None
        assert tenant.kept_share >= 0.98, tenant
    assert result.floors_gib < result.gib


@pytest.mark.parametrize(
    ("order", "least"),
    # A floor is against others. With `fair` a tenant's own requests run side by side,
    # some of them paused, and take a little of what the tenant itself has retained.
    [("fcfs", 0.98), pytest.param("fair", 0.95, marks=pytest.mark.slow)],
)
def test_floors_keep_hits_in_overload_as_well(order: str, least: float) -> None:
    result = study(rate=1.0, order=order)

    assert result.flooded_share < 0.9
    assert result.least_kept_share is not None
    assert result.least_kept_share >= least


def test_a_memory_that_cannot_promise_the_floors_is_no_error() -> None:
    result = study(memory_gib=6.0, num_requests=60)

    assert result.floors_gib > result.gib
    assert result.least_kept_share is None
    assert all(tenant.kept_tokens is None for tenant in result.tenants)
    assert result.flooded_share < 1


def test_alone_a_tenant_finds_its_prefix_every_time_but_the_first() -> None:
    result = study(num_tenants=1, num_requests=40)

    (tenant,) = result.tenants
    assert tenant.alone_tokens == (16 - 1) * 12_000
    assert tenant.working_set_gib > 12_000 * costs().bytes_per_token / GIB


def test_without_a_prefix_there_is_nothing_to_lose() -> None:
    result = study(share=0.0, num_requests=20)

    assert not result.is_conclusive
    assert math.isnan(result.flooded_share)


def test_the_flood_sends_as_many_times_what_the_others_do() -> None:
    result = study(eviction="reuse_index")

    assert (result.rate, result.flood_rate) == (0.6, pytest.approx(2.4))
    assert "flood" not in {tenant.tenant for tenant in result.tenants}


@pytest.mark.parametrize("memory_gib", [2, 24])
def test_progress_counts_every_replay_also_one_that_cannot_be(memory_gib: int) -> None:
    seen: list[tuple[int, int]] = []
    config = FloodConfig(
        rate=0.6, num_requests=20, num_tenants=3, memory_bytes=memory_gib * GIB
    )

    study_flood(config, costs(), progress=lambda *pair: seen.append(pair))

    assert seen == [(done, 5) for done in range(1, 6)]


def test_equal_floods_are_equal() -> None:
    config = FloodConfig(rate=0.6, num_requests=20)

    assert study_flood(config, costs()) == study_flood(config, costs())


@pytest.mark.parametrize("field", ["num_tenants", "num_requests", "flood"])
def test_nobody_is_no_flood(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be at least 1"):
        FloodConfig(rate=1.0, **{field: 0})  # type: ignore[arg-type]


def test_shares_are_of_what_a_tenant_finds_alone() -> None:
    one = FloodedTenant(
        tenant="a",
        working_set_gib=2.0,
        alone_tokens=400,
        flooded_tokens=100,
        kept_tokens=396,
    )
    other = dataclasses.replace(one, tenant="b", flooded_tokens=300, kept_tokens=400)
    result = FloodResult(
        eviction="lru", gib=8.0, rate=1.0, flood_rate=4.0, tenants=(one, other)
    )

    assert (one.flooded_share, one.kept_share) == (0.25, 0.99)
    assert (result.flooded_share, result.least_kept_share) == (0.5, 0.99)
    assert result.floors_gib == 4.0
