"""The gap between LRU and the clairvoyant policy, and who closes how much of it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from stemkv.measure.gap import with_gaps
from stemkv.measure.results import SweepCell


def cell(
    eviction: str,
    hit_rate: float,
    saved_s: float,
    *,
    num_blocks: int = 8,
    sharing: str = "isolated",
) -> SweepCell:
    return SweepCell(
        num_blocks=num_blocks,
        gib=num_blocks / 4,
        eviction=eviction,
        order="fcfs",
        sharing=sharing,
        num_refused=0,
        hit_rate=hit_rate,
        saved_s=saved_s,
        seconds_per_gib_s=math.nan,
        ttft_p50_s=None,
        ttft_p99_s=None,
        goodput_rps=None,
        num_evicted_blocks=16,
        num_refused_blocks=0,
        regret_tokens=0,
        num_preemptions=0,
        worst_tenant_ttft_p99_s=None,
    )


def test_lru_closes_nothing_and_the_clairvoyant_policy_all_of_it() -> None:
    cells = with_gaps(
        [
            cell("lru", 0.2, 10.0),
            cell("good", 0.3, 14.0),
            cell("bad", 0.1, 8.0),
            cell("clairvoyant", 0.6, 18.0),
        ]
    )

    assert [each.token_gap for each in cells] == pytest.approx([0, 0.25, -0.25, 1])
    assert [each.seconds_gap for each in cells] == pytest.approx([0, 0.5, -0.25, 1])


def test_sizes_and_sharing_rules_have_gaps_of_their_own() -> None:
    cells = with_gaps(
        cell(eviction, rate * scale, rate, num_blocks=blocks, sharing=sharing)
        for blocks, sharing, scale in ((8, "isolated", 1), (8, "shared", 1.5), (16, "shared", 2))
        for eviction, rate in (("lru", 0.1), ("other", 0.2), ("clairvoyant", 0.3))
    )  # fmt: skip

    assert [each.token_gap for each in cells] == pytest.approx([0, 0.5, 1] * 3)


@pytest.mark.parametrize("missing", ["lru", "clairvoyant"])
def test_without_both_ends_there_is_no_gap(missing: str) -> None:
    cells = [cell(name, 0.2, 1.0) for name in ("lru", "x", "clairvoyant")]

    found = with_gaps(each for each in cells if each.eviction != missing)

    assert [(each.token_gap, each.seconds_gap) for each in found] == [(None, None)] * 2


def test_where_lru_is_as_good_as_any_a_share_of_the_gap_says_nothing() -> None:
    near = [cell("lru", 0.2, 1.0), cell("x", 0.1, 1.0), cell("clairvoyant", 0.2009, 2)]

    assert all(each.token_gap is None for each in with_gaps(near))


def test_with_hints_the_gap_begins_at_lru_without_them() -> None:
    told = dataclasses.replace(cell("lru", 0.4, 14.0), is_hinted=True)
    blind, best = cell("lru", 0.2, 10.0), cell("clairvoyant", 0.6, 18.0)

    found = with_gaps([told, blind, best])
    alone = with_gaps([told, best])

    assert [each.token_gap for each in found] == pytest.approx([0.5, 0, 1])
    assert [each.token_gap for each in alone] == [0, 1]


def test_a_clairvoyant_policy_may_save_fewer_seconds() -> None:
    cells = with_gaps([cell("lru", 0.2, 9.0), cell("clairvoyant", 0.4, 9.0)])

    assert [each.token_gap for each in cells] == [0, 1]
    assert [each.seconds_gap for each in cells] == [None, None]


def test_what_a_policy_took_is_charged_against_what_it_saved() -> None:
    found = dataclasses.replace(cell("x", 0.2, 9.0), policy_cpu_s=0.25)

    assert found.net_saved_s == 8.75
    assert cell("x", 0.2, 9.0).net_saved_s is None
    assert found.evicted_gib == 4.0
