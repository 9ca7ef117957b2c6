"""Least recently used: the end of the last use decides, and nothing else."""

from __future__ import annotations

import pytest

from stemkv.core.retention.policy import Lru
from tests.core.builders import (
    ALICE,
    NAMESPACE,
    build_cache,
    cached,
    hold,
    policy_of,
    serve,
    tokens,
)
from tests.core.eviction.script import Script


def test_the_leaf_used_longest_ago_goes_first() -> None:
    script = Script(Lru())
    script.serve("a", "b", "c", "a")

    assert script.evict(4) == ["b", "c", "a"]


def test_a_use_that_lasts_long_ends_when_it_ends() -> None:
    script = Script(Lru())
    script.publish("long")
    script.serve("short")
    script.release("long")

    assert script.evict(2) == ["short", "long"]


def test_becoming_evictable_is_no_use() -> None:
    script = Script(Lru())
    script.publish("above", "below")
    script.release("below", inner=["above"])
    script.serve("other")
    script.drop("below")
    script.become_leaf("above")

    assert script.evict(2) == ["above", "other"]


def test_of_nodes_used_at_the_same_time_the_younger_goes_first() -> None:
    script = Script(Lru())
    script.publish("a", "b", "c")
    script.release("b", "a", "c")

    assert script.evict(3) == ["c", "b", "a"]


def test_the_clock_does_not_matter() -> None:
    script = Script(Lru())
    script.serve("a")
    script.wait(1e9)
    script.serve("b")

    assert script.evict(2) == ["a", "b"]


@pytest.mark.parametrize("between", ["upper", "lower"])
def test_both_parts_of_a_split_keep_the_last_use_of_the_whole(between: str) -> None:
    script = Script(Lru())
    script.serve("whole", num_blocks=4)
    script.serve("later")
    script.policy.split(99, script.id_of("whole"), num_blocks=2)
    if between == "upper":
        script.drop("whole", 4)  # the lower part
    script.policy.became_evictable(99, now=0.0)
    victims = []
    while (victim := script.policy.victim(0.0)) is not None:
        victims.append(victim)
        script.policy.dropped(victim, 0, may_return=True)

    assert victims[-1] == 2, "what was used later"
    assert set(victims) <= {99, 1, 2}


def test_parts_in_use_may_merge_and_idle_ones_only_if_used_alike() -> None:
    policy = Lru()
    script = Script(policy)
    script.serve("whole", num_blocks=4)
    whole = script.id_of("whole")
    policy.split(99, whole, num_blocks=2)
    assert policy.can_merge(99, whole)

    policy.used(99, hint=0, tick=50, now=0.0)
    assert not policy.can_merge(99, whole)
    policy.used(whole, hint=0, tick=51, now=0.0)
    assert policy.can_merge(99, whole), "both are in use"
    policy.released(99, tick=52, now=0.0)
    policy.released(whole, tick=52, now=0.0)
    assert policy.can_merge(99, whole), "both were used until the same time"


def test_nothing_is_known_of_nodes_that_have_gone() -> None:
    cache = build_cache(num_blocks=20, block_size=1)
    policy = policy_of(cache)
    assert isinstance(policy, Lru)
    for time in range(500):
        serve(cache, f"{chr(200 + time % 37)}abc", now=float(time))
        assert len(policy._last_used) == cache.tree.num_nodes


def test_retired_generations_leave_nothing_in_the_heap() -> None:
    """With room to spare nobody asks for a victim, so nothing else clears it up."""
    cache = build_cache(num_blocks=100, block_size=1)
    policy = policy_of(cache)
    assert isinstance(policy, Lru)
    for generation in range(200):
        namespace = generation.to_bytes(32, "big")
        for text in ("abc", "abd", "xyz"):
            serve(cache, text, namespace=namespace, now=float(generation))
        cache.retire(namespace, float(generation))

    assert cache.tree.num_nodes == 0
    assert len(policy._leaves) == len(policy._last_used) == 0
    assert len(policy._leaves._heap) <= 64


# What it means for the cache


def test_the_prefix_used_longest_ago_goes_first() -> None:
    cache = build_cache(num_blocks=6, block_size=1)
    for time, text in enumerate(["ab", "cd", "ef", "ab"]):
        serve(cache, text, now=float(time))

    cache.evict(2, 9.0)

    assert [cached(cache, text + "!") for text in ("ab", "cd", "ef")] == [2, 0, 2]


def test_a_lease_that_ends_counts_as_a_use() -> None:
    cache = build_cache(num_blocks=6, block_size=1)
    lease = hold(cache, "ab", now=0.0)
    serve(cache, "cd", now=1.0)
    cache.release(lease, 2.0)

    cache.evict(2, 3.0)

    assert cached(cache, "ab!") == 2
    assert cached(cache, "cd!") == 0


def test_a_prefix_is_not_used_by_what_reads_only_its_head() -> None:
    cache = build_cache(num_blocks=9, block_size=1)
    serve(cache, "abcd", now=0.0)
    serve(cache, "xy", now=1.0)
    serve(cache, "ab", now=2.0)

    cache.evict(3, 3.0)

    assert cached(cache, "abcd!") == 2
    assert cached(cache, "xy!") == 1


def test_looking_is_no_use() -> None:
    cache = build_cache(num_blocks=6, block_size=1)
    serve(cache, "ab", now=0.0)
    serve(cache, "cd", now=1.0)
    for _ in range(3):
        cache.peek(NAMESPACE, ALICE, tokens("ab!"))

    cache.evict(2, 3.0)

    assert cached(cache, "ab!") == 0
    assert cached(cache, "cd!") == 2
