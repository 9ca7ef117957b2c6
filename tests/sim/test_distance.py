from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.sim.distance import lru_curve
from stemkv.sim.hits import HitCounter, Hits
from stemkv.sim.reuse import find_reuses
from stemkv.sim.sequence import replay_sequence
from stemkv.sim.sharing import SharingRule
from tests.sim.depth_cost import DepthCost
from tests.sim.small_traces import Drawn, Unit, paths, random_traces, rules, trace

FREELY = settings(deadline=None)  # a busy machine is no failure


def naive_lru(drawn: Drawn, rule: SharingRule, num_blocks: int) -> Hits:
    """Keep the last use of every resident unit; evict the oldest leaf, one by one."""
    counter = HitCounter(drawn.trace, DepthCost())
    last_used: dict[Unit, int] = {}
    for index, path in enumerate(paths(drawn, rule)):
        found = 0
        while found < len(path) and path[found] in last_used:
            found += 1
        counter.count(index, found)
        for unit in path:
            last_used[unit] = index
        while len(last_used) > num_blocks:
            # A child is never used later than its parent, and it is the longer one.
            victim = min(last_used, key=lambda unit: (last_used[unit], -len(unit[2])))
            del last_used[victim]
    return counter.hits(num_blocks)


def same(left: Hits, right: Hits) -> bool:
    """Whether all counts are equal, and seconds to rounding."""
    return (
        left.num_blocks == right.num_blocks
        and left.hit_units == right.hit_units
        and left.hit_tokens == right.hit_tokens
        and left.steady_hit_tokens == right.steady_hit_tokens
        and left.hit_rate == right.hit_rate
        and left.steady_hit_rate == right.steady_hit_rate
        and left.saved_s is not None
        and right.saved_s is not None
        and abs(left.saved_s - right.saved_s) < 1e-6
    )


@FREELY
@given(drawn=random_traces(), rule=st.sampled_from(rules()))
def test_the_curve_is_lru_at_every_capacity(drawn: Drawn, rule: SharingRule) -> None:
    curve = lru_curve(find_reuses(drawn.trace, rule), cost=DepthCost())

    for num_blocks in range(curve.longest_request, curve.num_blocks_for_all + 3):
        assert same(curve.at(num_blocks), naive_lru(drawn, rule, num_blocks))


@FREELY
@given(drawn=random_traces(), rule=st.sampled_from(rules()))
def test_the_curve_is_what_the_cache_does(drawn: Drawn, rule: SharingRule) -> None:
    curve = lru_curve(find_reuses(drawn.trace, rule), cost=DepthCost())

    for num_blocks in range(curve.longest_request, curve.num_blocks_for_all + 3):
        replayed = replay_sequence(
            drawn.trace, num_blocks=num_blocks, rule=rule, cost=DepthCost()
        )
        assert same(curve.at(num_blocks), replayed.hits)


@FREELY
@given(drawn=random_traces(), rule=st.sampled_from(rules()))
def test_more_memory_never_has_fewer_hits(drawn: Drawn, rule: SharingRule) -> None:
    curve = lru_curve(find_reuses(drawn.trace, rule))

    hits = [curve.at(size).hit_tokens for size in range(curve.num_blocks_for_all + 2)]

    assert hits == sorted(hits)
    assert hits[0] == 0


def test_a_use_of_half_an_edge_counts_for_that_half_only() -> None:
    # The third prompt uses the first half of the first one, whose second half is then
    # the oldest there is: "rs" takes its room.
    prompts = trace("wxyz", "pq", "wx", "rs", "wxyz", "pq")
    rule = SharingRule()

    curve = lru_curve(find_reuses(prompts, rule)).at(6)
    replayed = replay_sequence(prompts, num_blocks=6, rule=rule).hits

    assert (curve.hit_units, replayed.hit_units) == (2 + 2, 2 + 2)


def test_a_request_longer_than_the_cache_pushes_out_everything_but_its_start() -> None:
    prompts = trace("pq", "wxyz", "wx", "pq")
    rule = SharingRule()

    curve = lru_curve(find_reuses(prompts, rule))
    replayed = replay_sequence(prompts, num_blocks=2, rule=rule)

    assert curve.longest_request == 4
    assert curve.at(2).hit_units == 2  # "wx"
    assert replayed.num_too_long == 1
    assert replayed.hits.hit_units == 0  # it inserted nothing, and "wx" pushed out "pq"


def test_a_trace_without_reuse_has_a_flat_curve() -> None:
    curve = lru_curve(find_reuses(trace("ab", "cd"), SharingRule()))

    assert curve.num_blocks_for_all == 0
    assert curve.at(0) == curve.no_hits
    assert curve.at(100).hit_tokens == 0
