from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.errors import InvariantError
from stemkv.sim.bounds import clairvoyant, clairvoyant_selective, infinite
from stemkv.sim.distance import lru_curve
from stemkv.sim.reuse import Run, find_reuses
from stemkv.sim.sequence import replay_sequence
from stemkv.sim.sharing import SharingRule
from tests.sim.depth_cost import DepthCost
from tests.sim.small_traces import Drawn, Unit, paths, random_traces, rules, trace

FREELY = settings(deadline=None)  # a busy machine is no failure

Path = list[Unit]
Resident = frozenset[Unit]


def num_found(path: Path, resident: set[Unit] | Resident) -> int:
    found = 0
    while found < len(path) and path[found] in resident:
        found += 1
    return found


def continues(child: Unit, parent: Unit) -> bool:
    return (
        child[0] == parent[0]
        and parent[1] in ("public", child[1])
        and child[2][:-1] == parent[2]
    )


def naive_clairvoyant(requests: list[Path], num_blocks: int, *, keep_all: bool) -> int:
    """Look ahead for every unit at every eviction; return the units found.

    `keep_all`: the running path stays and is inserted as a whole (forced), else its
    units may be evicted at once.
    """

    def next_use(unit: Unit, now: int) -> int:
        later = (i for i in range(now + 1, len(requests)) if unit in requests[i])
        return next(later, len(requests))

    resident: set[Unit] = set()
    hits = 0
    for now, path in enumerate(requests):
        hits += num_found(path, resident)
        if keep_all and len(path) > num_blocks:
            continue
        resident |= set(path)
        while len(resident) > num_blocks:
            pinned = set(path) if keep_all else set()
            leaves = [
                unit
                for unit in resident - pinned
                if not any(continues(each, unit) for each in resident)
            ]
            victim = max(leaves, key=lambda u: (next_use(u, now), len(u[2]), u))
            resident.remove(victim)
    return hits


def most_hits(requests: list[Path], num_blocks: int, *, keep_all: bool) -> int:
    """Try everything that a cache could keep, leaves or not; return the most hits."""
    states: dict[Resident, int] = {frozenset(): 0}  # what is resident → hits so far
    for path in requests:
        after: dict[Resident, int] = {}
        for resident, hits in states.items():
            total = hits + num_found(path, resident)
            for kept in choices(path, resident, num_blocks, keep_all=keep_all):
                after[kept] = max(total, after.get(kept, 0))
        states = after
    return max(states.values())


def choices(
    path: Path, resident: Resident, num_blocks: int, *, keep_all: bool
) -> Iterator[Resident]:
    own = frozenset(path)
    if not keep_all:
        own, resident = frozenset(), resident | own
    others = sorted(resident - own)
    for size in range(min(len(others), num_blocks - len(own)) + 1):
        for kept in combinations(others, size):
            yield own | frozenset(kept)


@FREELY
@given(drawn=random_traces(max_requests=12), rule=st.sampled_from(rules()))
def test_what_is_evicted_is_needed_again_last(drawn: Drawn, rule: SharingRule) -> None:
    reuses = find_reuses(drawn.trace, rule)
    requests = paths(drawn, rule)

    for num_blocks in range(1, reuses.num_distinct + 2):
        forced = clairvoyant(reuses, num_blocks)
        selective = clairvoyant_selective(reuses, num_blocks)
        assert forced.hit_units == naive_clairvoyant(
            requests, num_blocks, keep_all=True
        )
        assert selective.hit_units == naive_clairvoyant(
            requests, num_blocks, keep_all=False
        )


@FREELY
@given(
    prompts=st.lists(st.text("xy", max_size=3), min_size=1, max_size=7),
    tenants=st.text("ab", min_size=1, max_size=3),
    num_blocks=st.integers(3, 5),
    rule=st.sampled_from(rules()),
)
def test_no_choice_whatever_finds_more(
    prompts: list[str], tenants: str, num_blocks: int, rule: SharingRule
) -> None:
    drawn = Drawn(tuple(prompts), trace(*prompts, tenants=tenants))
    reuses = find_reuses(drawn.trace, rule)
    requests = paths(drawn, rule)

    forced = clairvoyant(reuses, num_blocks)
    selective = clairvoyant_selective(reuses, num_blocks)

    assert forced.hit_units == most_hits(requests, num_blocks, keep_all=True)
    assert selective.hit_units == most_hits(requests, num_blocks, keep_all=False)


@FREELY
@given(prompts=st.lists(st.text("xy", max_size=3), min_size=1, max_size=6))
def test_no_choice_finds_more_in_a_cache_smaller_than_a_request(
    prompts: list[str],
) -> None:
    drawn = Drawn(tuple(prompts), trace(*prompts))
    rule = SharingRule()
    requests = paths(drawn, rule)

    for num_blocks in (1, 2):
        hits = clairvoyant_selective(find_reuses(drawn.trace, rule), num_blocks)
        assert hits.hit_units == most_hits(requests, num_blocks, keep_all=False)


@FREELY
@given(drawn=random_traces(), rule=st.sampled_from(rules()))
def test_bounds_stand_in_order(drawn: Drawn, rule: SharingRule) -> None:
    reuses = find_reuses(drawn.trace, rule)
    curve = lru_curve(reuses)
    top = infinite(reuses).hit_units

    for num_blocks in range(curve.longest_request, reuses.num_distinct + 2):
        forced = clairvoyant(reuses, num_blocks).hit_units
        selective = clairvoyant_selective(reuses, num_blocks).hit_units
        assert curve.at(num_blocks).hit_units <= forced <= selective <= top
    # Then nothing is ever evicted.
    for bound in (clairvoyant, clairvoyant_selective):
        assert bound(reuses, max(1, reuses.num_distinct)).hit_units == top


@FREELY
@given(drawn=random_traces(), rule=st.sampled_from(rules()))
def test_the_infinite_bound_is_the_cache_that_never_evicts(
    drawn: Drawn, rule: SharingRule
) -> None:
    reuses = find_reuses(drawn.trace, rule)

    replayed = replay_sequence(
        drawn.trace, num_blocks=None, rule=rule, cost=DepthCost()
    )

    assert infinite(reuses, cost=DepthCost()) == replayed.hits
    assert replayed.num_evicted_units == 0


def test_the_future_is_worth_something() -> None:
    # Two blocks: LRU always evicts what comes next.
    prompts = trace("x", "y", "z", "x", "y", "z")
    reuses = find_reuses(prompts, SharingRule())

    assert lru_curve(reuses).at(2).hit_units == 0
    assert clairvoyant(reuses, 2).hit_units == 2


def test_leaving_a_unit_out_is_worth_something() -> None:
    prompts = trace("x", "y", "x", "z", "x")
    reuses = find_reuses(prompts, SharingRule())

    assert clairvoyant(reuses, 1).hit_units == 0
    assert clairvoyant_selective(reuses, 1).hit_units == 2


def test_a_hit_never_covers_the_last_token() -> None:
    hits = infinite(find_reuses(trace("xy", "xy"), SharingRule()))

    assert (hits.hit_units, hits.hit_tokens) == (2, 19)


def test_a_partly_filled_last_unit_counts_its_own_tokens() -> None:
    hits = infinite(find_reuses(trace("xy", "xy", lacking=4), SharingRule()))

    assert hits.hit_tokens == 15
    assert hits.steady_hit_tokens == 15
    assert (hits.input_tokens, hits.steady_input_tokens) == (32, 16)


def test_what_is_public_is_so_within_its_identity() -> None:
    prompts = trace(*["xy"] * 4, tenants="aabb", identities="mn")
    rule = SharingRule(name="public")

    hits = infinite(find_reuses(prompts, rule))

    assert hits.hit_units == 2 + 2
    assert hits == replay_sequence(prompts, num_blocks=None, rule=rule).hits


def test_runs_tell_who_touched_a_unit_last() -> None:
    reuses = find_reuses(trace("wxyz", "wxp", "w", "wxyz"), SharingRule())

    assert reuses.runs == [
        [],
        [Run(last=0, start=0, end=2)],
        [Run(last=1, start=0, end=1)],
        [Run(last=2, start=0, end=1), Run(1, 1, 2), Run(0, 2, 4)],
    ]
    assert reuses.num_distinct == 5


@pytest.mark.parametrize(
    "units",
    [
        pytest.param([9, 1], id="seen-below-unseen"),
        pytest.param([0, 9, 1], id="seen-below-unseen-below-seen"),
        pytest.param([0, 5], id="later-below-earlier"),
    ],
)
def test_ids_that_are_not_chained_are_refused(units: list[int]) -> None:
    prompts = trace("abc", "xyz", "p")
    prompts.requests[-1].units = array("i", units)

    with pytest.raises(InvariantError, match="request-2.*not chained"):
        find_reuses(prompts, SharingRule())
