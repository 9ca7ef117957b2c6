"""What every policy has to do, without exceptions: as told, and by the real cache."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.retention.policy import EvictionPolicy
from stemkv.sim.sequence import replay_sequence
from stemkv.sim.sharing import SharingRule
from stemkv.sim.timelines import in_units_of
from stemkv.sim.workloads import workload_named
from tests.core.builders import (
    acquire,
    build_cache,
    count_calls,
    hold,
    policy_of,
    resident,
    serve,
)
from tests.core.eviction.cases import CASES, Case, each_case
from tests.core.eviction.hooks import ACTS, Act, HookTree
from tests.core.eviction.script import Script
from tests.core.picture import picture
from tests.core.test_cache_machine import run_machine, walk
from tests.seeds import slow

PAUSES = [0.0, 0.0, 0.25, 1.0, 20.0, 100.0]  # many ties
SIZES = [2, 5, 20]

acts = st.lists(
    st.tuples(
        st.sampled_from(ACTS),
        st.integers(0, 60),
        st.integers(0, 60),
        st.sampled_from(PAUSES),
    ),
    max_size=80,
)


def random_acts(seed: int, num_acts: int) -> list[Act]:
    rng = random.Random(seed)
    return [
        (rng.choice(ACTS), rng.randrange(99), rng.randrange(99), rng.choice(PAUSES))
        for _ in range(num_acts)
    ]


# Against the twin, and against what the hooks promise (see `Watched`)


@each_case
@settings(max_examples=60, deadline=None)
@given(acts=acts, num_blocks=st.sampled_from(SIZES))
def test_after_any_legal_hooks_the_twin_answers_the_same(
    case: Case, acts: list[Act], num_blocks: int
) -> None:
    policy = case.watched(num_blocks)
    tree = HookTree(policy)
    for act in acts:
        tree.act(act)

    for lease in [*tree.leases]:
        tree.release(lease)
    while tree.evict(1) is not None:
        pass


@each_case
@pytest.mark.parametrize("seed", range(20))
def test_after_many_random_hooks_the_twin_answers_the_same(
    case: Case, seed: int
) -> None:
    policy = case.watched(SIZES[seed % 3])
    tree = HookTree(policy)
    for act in random_acts(seed, 400):
        tree.act(act)
    assert len(policy.victims) > 20


@each_case
@pytest.mark.parametrize("seed", [*range(4), *slow(range(4, 8))])
def test_in_a_real_cache_the_twin_answers_the_same(case: Case, seed: int) -> None:
    """With forks, copies, splits, trims, fences, three tenants and a public prefix."""
    walk(seed, num_steps=250, case=case)


@each_case
def test_no_sequence_of_events_in_a_real_cache_parts_it_from_the_twin(
    case: Case,
) -> None:
    run_machine(max_examples=15, num_steps=40, case=case)


@pytest.mark.slow
@each_case
@pytest.mark.parametrize("seed", range(2000, 2005))
def test_in_a_real_cache_the_twin_answers_the_same_for_long(
    case: Case, seed: int
) -> None:
    walk(seed, num_steps=800, case=case)


@pytest.mark.slow
@each_case
def test_no_long_sequence_of_events_parts_it_from_the_twin(case: Case) -> None:
    run_machine(max_examples=80, num_steps=60, case=case)


@each_case
@pytest.mark.parametrize("rule", ["public", *slow(["shared", "isolated"])])
@pytest.mark.parametrize("name", ["chat", "few-shot", "documents", "heavy-tenant"])
def test_made_up_traffic_finds_the_victims_of_the_twin(
    case: Case, name: str, rule: str
) -> None:
    trace = workload_named(name, num_requests=150, seed=3)
    trace = in_units_of(trace, 32 * trace.unit_size)
    num_blocks = max(len(request.units) for request in trace.requests) * 5
    policy = case.watched(num_blocks)

    result = replay_sequence(
        trace, num_blocks=num_blocks, rule=SharingRule(name=rule), policy=policy
    )

    assert len(policy.victims) > 20
    assert 0 < result.hits.hit_rate < 1


# Determinism


def victims_of(policy: EvictionPolicy, seed: int) -> list[int]:
    tree = HookTree(policy)
    victims = []
    for act in random_acts(seed, 300):
        if act[0] == "evict":
            tree.now += act[3]
            victims.append(tree.evict(1 + act[2] % 3) or 0)
        else:
            tree.act(act)
    return victims


@each_case
@pytest.mark.parametrize("seed", range(3))
def test_equal_hooks_give_equal_victims(case: Case, seed: int) -> None:
    assert victims_of(case.make(5), seed) == victims_of(case.make(5), seed)


def print_victims() -> None:
    """What another process prints, see below."""
    for case in CASES:
        print(case.name, victims_of(case.make(5), 0))


def test_victims_do_not_depend_on_how_python_hashes() -> None:
    def output(seed: str) -> str:
        statement = f"import {__name__} as this; this.print_victims()"
        done = subprocess.run(
            [sys.executable, "-c", statement],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = output("0")
    assert first.count("\n") == len(CASES)
    assert output("1") == first


# What may be asked of it


@each_case
def test_keys_are_computed_only_for_who_needs_them(case: Case) -> None:
    policy = case.watched(8)  # it refuses keys that it did not ask for, or lacks
    cache = build_cache(num_blocks=8, block_size=1, make_policy=lambda: policy)
    for time, text in enumerate(["abcd", "abxy", "abcd"]):
        serve(cache, text, now=float(time))

    assert bool(cache.residency._keys._spaces) == policy.needs_keys


@each_case
def test_of_keys_that_nothing_is_known_of_all_are_alike(case: Case) -> None:
    policy = case.make(8)
    if policy.needs_keys:
        assert policy.num_alike([3, 1, 2]) == 3
        assert policy.num_alike([7]) == 1


@each_case
def test_an_empty_policy_has_no_victim(case: Case) -> None:
    assert case.make(4).victim(0.0) is None


@each_case
def test_nothing_that_is_held_or_set_aside_is_named(case: Case) -> None:
    script = Script(case.make(8))
    script.publish("held")
    script.serve("aside", "free")
    script.policy.became_pinned(script.id_of("aside"))

    assert script.evict(2) == ["free"]
    script.policy.became_evictable(script.id_of("aside"), now=script.now)
    assert script.evict(2) == ["aside"]


# Tail first


@each_case
def test_blocks_of_a_branch_go_from_the_tail_and_before_what_they_stand_on(
    case: Case,
) -> None:
    cache = build_cache(
        num_blocks=30, block_size=1, make_policy=lambda: case.watched(30)
    )
    for time, text in enumerate(["abcd", "abxy", "abxz", "ab", "abcd", "q"]):
        serve(cache, text, now=float(time))
    prefixes = {key.prefix for key in resident(cache)}

    while prefixes:
        assert cache.evict(1, 9.0) == 1
        left = {key.prefix for key in resident(cache)}
        (gone,) = prefixes - left
        assert not any(prefix.startswith(gone) for prefix in left)
        prefixes = left


@each_case
def test_a_lease_that_comes_for_what_is_next_to_go_is_safe(case: Case) -> None:
    cache = build_cache(num_blocks=4, block_size=1, make_policy=lambda: case.watched(4))
    serve(cache, "ab")
    serve(cache, "cd", now=1.0)
    policy_of(cache).victim(1.0)
    lease = hold(cache, "abx", now=1.0)
    lease_2 = acquire(cache, "y", now=1.0)

    assert lease.num_matched_tokens == 2
    assert lease_2 is not None
    cache.release(lease_2, 1.0)
    cache.release(lease, 1.0)


# Nothing is kept for ever


def size_of(policy: EvictionPolicy) -> int:
    """How many values the policy consists of, lazy heaps and caches included."""

    def num_values(thing: object) -> int:
        if isinstance(thing, list | tuple):
            return sum(map(num_values, thing))
        return 1

    return num_values(picture(policy))


@each_case
def test_what_has_gone_leaves_no_more_behind_than_is_said(case: Case) -> None:
    """Nodes without number come, are used, trimmed and dropped, an hour apart."""
    script = Script(case.make(16))
    sizes = []
    for number in range(2000):
        name = f"{number}"
        for _ in range(6):
            script.serve(name, num_blocks=2)
            script.wait(30.0)
        assert script.evict() == [name]
        script.drop(name, may_return=number % 2 == 0)
        assert script.victim() is None
        script.wait(3600.0)
        if number % 50 == 0:
            sizes.append(size_of(script.policy))

    half = len(sizes) // 2
    # What is kept for a time comes and goes; what is kept for ever would double.
    assert max(sizes[half:]) <= 1.25 * max(sizes[:half])


@each_case
def test_pinning_and_releasing_again_and_again_grows_nothing(case: Case) -> None:
    script = Script(case.make(16))
    script.serve(*"abcdefghij")
    sizes = []
    for _ in range(400):
        script.serve(*"abcdefghij")
        sizes.append(size_of(script.policy))

    assert max(sizes[200:]) <= max(sizes[:200])


# Costs


@each_case
def test_an_eviction_among_20_000_leaves_costs_as_much_as_among_1_000(
    case: Case,
) -> None:
    """In calls, heap operations included; what a heap does inside is O(log n)."""

    def calls(num_leaves: int) -> int:
        policy = case.make(num_leaves)
        tick = 0
        for node in range(1, num_leaves + 1):
            policy.published(
                node,
                start=0,
                num_blocks=1,
                keys=[node] if policy.needs_keys else (),
                hint=0,
                tick=(tick := tick + 1),
                now=0.0,
            )
            policy.released(node, tick=(tick := tick + 1), now=0.0)
            policy.became_evictable(node, now=0.0)

        def evict_32_blocks() -> None:
            for _ in range(32):
                victim = policy.victim(1.0)
                assert victim is not None
                policy.dropped(victim, 0, may_return=True)

        return count_calls(evict_32_blocks)

    assert calls(20_000) <= calls(1_000)


@each_case
def test_serving_costs_as_much_in_a_full_cache_as_in_a_small_one(case: Case) -> None:
    def calls(num_leaves: int) -> int:
        script = Script(case.make(num_leaves))
        names = [f"{number}" for number in range(num_leaves)]
        script.serve(*names)
        script.evict(2)

        def serve_ten() -> None:
            for name in names[-10:]:
                script.serve(name)

        return count_calls(serve_ten)

    assert calls(5_000) <= calls(500)


@each_case
def test_looking_for_victims_is_paid_for_by_what_was_used(case: Case) -> None:
    """Amortised: a victim may cost much, but not again before anything happens."""
    script = Script(case.make(1000))
    names = [f"{number}" for number in range(1000)]
    num_calls = 0
    for _ in range(4):
        script.serve(*names)
        num_calls += count_calls(lambda: script.policy.victim(0.0))

    assert num_calls < 20 * 4 * len(names)
    assert count_calls(lambda: script.policy.victim(0.0)) < 100
