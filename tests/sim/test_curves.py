"""Lines and limits beside a replay say what replays at those sizes find."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.books.cost import RooflineCost
from stemkv.errors import ConfigError
from stemkv.measure.results import CapacityCurve
from stemkv.sim.bounds import infinite
from stemkv.sim.catalogue import device_named, model_named
from stemkv.sim.curves import Study, lru_curves, study, units_in, with_study
from stemkv.sim.pricing import roofline
from stemkv.sim.replay import replay
from stemkv.sim.reuse import find_reuses
from stemkv.sim.sequence import replay_sequence
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace
from stemkv.sim.workloads.registry import workload_named
from tests.knobs import replay_config
from tests.sim.small_traces import UNIT, Drawn, random_traces, rules, trace

BLOCK = 16
ISOLATED, SHARED = SharingRule(name="isolated"), SharingRule(name="shared")


@cache
def costs() -> RooflineCost:
    return roofline(model_named("llama-3.1-8b"), device_named("h100"))


@cache
def example() -> Trace:
    """Three tenants; the longest prompt fills 1.6 GiB."""
    return workload_named("worked-example", num_requests=150, num_tenants=3, rate=2.0)


def studied(
    num_blocks: int, *, rule: SharingRule = ISOLATED, replicas: int = 1
) -> Study:
    return study(
        example(),
        rule,
        costs(),
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_replicas=replicas,
    )


def line_named(found: Study, name: str) -> CapacityCurve:
    return next(curve for curve in found.curves if curve.name == name)


@given(drawn=random_traces(ending="!"), rule=st.sampled_from(rules()))
@settings(deadline=None, max_examples=60)
def test_every_point_of_a_line_is_what_a_replay_of_that_size_finds(
    drawn: Drawn, rule: SharingRule
) -> None:
    # One unit is one block here, so sizes are capacities of the replay.
    unit = drawn.trace.unit_size
    found = study(drawn.trace, rule, costs(), num_blocks=9, block_size=unit)

    longest = max(len(request.units) for request in drawn.trace.requests)
    for point in line_named(found, rule.name).points:
        if point.num_blocks >= longest:
            replayed = replay_sequence(
                drawn.trace, num_blocks=point.num_blocks, rule=rule, cost=costs()
            ).hits
            assert point.hit_rate == replayed.hit_rate
            assert point.saved_s == pytest.approx(replayed.saved_s, abs=1e-9)


@pytest.mark.parametrize("num_blocks", [1, 700, 2_048, 60_000])
def test_every_lru_line_has_a_point_at_the_operators_own_size(num_blocks: int) -> None:
    found = studied(num_blocks)

    assert [curve.name for curve in found.curves] == [
        "shared",
        "isolated",
        "clairvoyant, isolated",
    ]
    for curve in found.curves:
        sizes = [point.num_blocks for point in curve.points]
        assert sizes == sorted(set(sizes))
        assert num_blocks in sizes or (num_blocks < 781 and "clair" in curve.name)


def test_a_line_ends_where_more_memory_changes_nothing() -> None:
    found = studied(2_048)

    for name, rule in (("shared", SHARED), ("isolated", ISOLATED)):
        last = line_named(found, name).points[-1]
        assert last.hit_rate == infinite(find_reuses(example(), rule)).hit_rate


def test_lru_never_gets_worse_with_memory() -> None:
    for name in ("shared", "isolated"):
        points = line_named(studied(2_048), name).points
        assert all(a.hit_rate <= b.hit_rate for a, b in pairwise(points))


def test_bounds_are_in_order_and_above_lru() -> None:
    found = studied(2_048)
    unlimited, shared, selective, clairvoyant = (b.hit_rate for b in found.bounds)
    own = next(
        p.hit_rate
        for p in line_named(found, "isolated").points
        if p.num_blocks == 2_048
    )

    assert own < clairvoyant < selective < unlimited < shared
    lru = {p.num_blocks: p.hit_rate for p in line_named(found, "isolated").points}
    for point in line_named(found, "clairvoyant, isolated").points:
        assert point.hit_rate >= lru[point.num_blocks]


def test_replicas_are_bounded_by_all_their_memory_in_one() -> None:
    one, two = studied(2_048), studied(1_024, replicas=2)

    assert [b.hit_rate for b in two.bounds] == [b.hit_rate for b in one.bounds]


def test_memory_below_the_longest_prompt_has_no_clairvoyant_that_keeps_it() -> None:
    found = studied(100)

    names = [bound.name for bound in found.bounds]
    assert "clairvoyant that may leave blocks out, isolated, 0.195 GiB" in names
    assert not any(name.startswith("clairvoyant, ") for name in names)
    assert "an estimate" in line_named(found, "isolated").note


def test_one_tenant_has_one_line_and_no_bound_for_sharing() -> None:
    alone = trace("abc", "abd", "abc", tenants="a")
    found = study(alone, ISOLATED, costs(), num_blocks=5, block_size=alone.unit_size)

    assert [c.name for c in found.curves] == ["isolated", "clairvoyant, isolated"]
    assert not any("shared" in bound.name for bound in found.bounds)


def test_the_public_rule_has_a_line_between_isolated_and_shared() -> None:
    found = studied(2_048, rule=SharingRule(name="public"))

    at_own = {
        curve.name: next(p.hit_rate for p in curve.points if p.num_blocks == 2_048)
        for curve in found.curves
    }
    assert at_own["isolated"] < at_own["public"] <= at_own["shared"]


def test_a_trace_of_empty_and_tiny_prompts_can_be_studied() -> None:
    tiny = trace("", "a", "", "a", lacking=3)
    found = study(tiny, ISOLATED, costs(), num_blocks=4, block_size=BLOCK)

    assert all(0 <= p.hit_rate <= 1 for c in found.curves for p in c.points)


def test_a_study_changes_nothing_else_of_a_result() -> None:
    config = replay_config(num_blocks=2_048)
    result = replay(example(), config, costs())
    found = studied(2_048)

    joined = with_study(result, found)

    assert (joined.curves, joined.bounds) == (found.curves, found.bounds)
    assert joined.requests == result.requests
    assert joined.checks == result.checks
    own = joined.capacity_gib
    assert any(point.gib == own for point in line_named(found, "shared").points)


def test_lines_of_a_sweep_cover_its_sizes() -> None:
    lines = lru_curves(
        example(), [SHARED, ISOLATED], costs(), sizes=(900, 4_000), block_size=BLOCK
    )

    assert [line.name for line in lines] == ["shared", "isolated"]
    for line in lines:
        sizes = [point.num_blocks for point in line.points]
        assert (sizes[0], sizes[-1]) == (900, 4_000)
        replayed = replay_sequence(
            example(),
            num_blocks=900,
            rule=SharingRule(name=line.name),
        )
        assert line.points[0].hit_rate == replayed.hits.hit_rate


def test_memory_smaller_than_a_unit_is_refused_with_both_sizes() -> None:
    coarse = trace("ab", unit_size=512)

    assert units_in(coarse, 32, 16) == 1
    with pytest.raises(ConfigError, match="31 blocks of 16 tokens .* 512 tokens"):
        units_in(coarse, 31, 16)


def test_without_a_known_prompt_there_is_nothing_to_draw() -> None:
    unknown = opaque(num_opaque=3)

    found = study(unknown, ISOLATED, costs(), num_blocks=5, block_size=UNIT)
    lines = lru_curves(unknown, [ISOLATED], costs(), sizes=[5], block_size=UNIT)

    assert (found.curves, found.bounds, lines) == ((), (), ())


def test_notes_say_how_many_prompts_are_not_known() -> None:
    found = study(
        opaque(num_opaque=1), ISOLATED, costs(), num_blocks=5, block_size=UNIT
    )

    assert all(
        "a lower bound, as 1 of 3 prompts are not known" in curve.note
        for curve in found.curves
    )
    assert all("1 of 3 prompts are not known" in bound.note for bound in found.bounds)


def opaque(*, num_opaque: int) -> Trace:
    """Three prompts, of which the first ones are not known."""
    some = trace("abc", "xyz", "xyw")
    for request in some.requests[:num_opaque]:
        request.is_opaque = True
    return some
