"""Least recently used: victim by victim the same as a loop over all nodes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.eviction import EvictionPolicy, Lru
from tests.core.builders import (
    ALICE,
    NAMESPACE,
    build_cache,
    cached,
    count_calls,
    hold,
    serve,
    tokens,
)


class NaiveLru:
    """The same hooks, and a look at every node for every victim."""

    def __init__(self) -> None:
        self.last_used: dict[int, float] = {}
        self.evictable: set[int] = set()

    def published(self, node_id: int, *, num_blocks: int, now: float) -> None:
        self.last_used[node_id] = now

    def touched(self, node_id: int, *, now: float) -> None:
        self.last_used[node_id] = now

    def split(self, upper_id: int, lower_id: int) -> None:
        self.last_used[upper_id] = self.last_used[lower_id]

    def merged(self, upper_id: int, lower_id: int) -> None:
        last_uses = self.last_used.pop(upper_id), self.last_used[lower_id]
        self.last_used[lower_id] = max(last_uses)

    def became_evictable(self, node_id: int, *, now: float) -> None:
        self.evictable.add(node_id)

    def became_pinned(self, node_id: int) -> None:
        self.evictable.discard(node_id)

    def removed(self, node_id: int) -> None:
        self.evictable.discard(node_id)
        del self.last_used[node_id]

    def victim(self) -> int | None:
        oldest = [(self.last_used[node], -node) for node in self.evictable]
        return -min(oldest)[1] if oldest else None


HOOKS = ["published", "touched", "split", "became_evictable", "became_pinned"]
HOOKS += ["removed", "merged", "evict", "victim"]


def drive(policies: list[EvictionPolicy], acts: list[tuple[str, int, float]]) -> int:
    """Give all the same legal hooks and compare victims; return the nodes left."""
    now = 0.0
    next_id = 1
    state: dict[int, str] = {}  # node id → "pinned" or "evictable"

    def tell(hook: str, *args: int, **kwargs: float) -> None:
        for policy in policies:
            getattr(policy, hook)(*args, **kwargs)

    for act, pick, pause in acts:
        now += pause
        among = sorted(state)
        node = among[pick % len(among)] if among else None
        if act == "published":
            tell(act, next_id, num_blocks=1 + pick % 3, now=now)
            state[next_id] = "pinned"
            next_id += 1
        elif act in ("evict", "victim"):
            victims = {policy.victim() for policy in policies}
            assert len(victims) == 1
            victim = victims.pop()
            evictable = [n for n in state if state[n] == "evictable"]
            assert (victim is None) == (not evictable)
            if act == "evict" and victim is not None:
                tell("removed", victim)
                del state[victim]
        elif node is None:
            continue
        elif act == "touched":
            tell(act, node, now=now)
        elif act == "split":
            tell(act, next_id, node)
            state[next_id] = "pinned"  # not a leaf, so never a candidate as yet
            next_id += 1
        elif act == "merged" and state[node] == "pinned" and len(among) > 1:
            lower = among[(pick + 1) % len(among)]  # in whatever state
            tell(act, node, lower)
            del state[node]
        elif act == "became_evictable" and state[node] == "pinned":
            tell(act, node, now=now)
            state[node] = "evictable"
        elif act == "became_pinned" and state[node] == "evictable":
            tell(act, node)
            state[node] = "pinned"
        elif act == "removed":
            tell(act, node)  # not the victim: its namespace was retired
            del state[node]
    return len(state)


acts = st.lists(
    st.tuples(
        st.sampled_from(HOOKS),
        st.integers(0, 30),
        st.sampled_from([1.0, 0.0]),  # many ties
    ),
    max_size=120,
)


@given(acts)
def test_every_victim_is_the_naive_one(acts: list[tuple[str, int, float]]) -> None:
    policy, twin = Lru(), NaiveLru()
    drive([policy, twin], acts)

    while (victim := twin.victim()) is not None:
        assert policy.victim() == victim
        policy.removed(victim)
        twin.removed(victim)
    assert policy.victim() is None


@given(acts)
def test_a_node_has_at_most_one_heap_entry(acts: list[tuple[str, int, float]]) -> None:
    policy = Lru()
    drive([policy], acts)

    ids = [-negative_id for _, negative_id in policy._heap]
    assert len(ids) == len(set(ids))
    assert set(ids) == policy._in_heap
    assert policy._evictable <= policy._in_heap


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(acts)
def test_every_victim_is_the_naive_one_for_long(
    acts: list[tuple[str, int, float]],
) -> None:
    drive([Lru(), NaiveLru()], acts)


def test_asking_for_the_victim_twice_gives_the_same() -> None:
    policy = Lru()
    for node in (1, 2, 3):
        policy.published(node, num_blocks=1, now=float(node))
        policy.became_evictable(node, now=float(node))
    policy.touched(1, now=9.0)

    assert [policy.victim() for _ in range(3)] == [2, 2, 2]


def test_an_empty_policy_has_no_victim() -> None:
    assert Lru().victim() is None


def test_of_nodes_used_at_the_same_time_the_younger_goes_first() -> None:
    policy = Lru()
    for node in (1, 2, 3):
        policy.published(node, num_blocks=1, now=0.0)
    for node in (2, 3, 1):
        policy.became_evictable(node, now=0.0)

    victims = []
    while (victim := policy.victim()) is not None:
        victims.append(victim)
        policy.removed(victim)
    assert victims == [3, 2, 1]


def test_becoming_evictable_is_no_use() -> None:
    policy = Lru()
    policy.published(1, num_blocks=1, now=0.0)
    policy.published(2, num_blocks=1, now=1.0)
    policy.became_evictable(2, now=2.0)
    policy.became_evictable(1, now=3.0)

    assert policy.victim() == 1


@pytest.mark.parametrize("upper, lower", [(3.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("is_candidate", [False, True])
def test_a_merged_node_was_used_when_either_part_was(
    upper: float, lower: float, is_candidate: bool
) -> None:
    policy = Lru()
    policy.published(1, num_blocks=1, now=lower)
    if is_candidate:
        policy.became_evictable(1, now=lower)
    policy.published(2, num_blocks=1, now=upper)
    policy.published(3, num_blocks=1, now=2.0)
    policy.became_evictable(3, now=2.0)
    policy.merged(2, 1)
    policy.became_evictable(1, now=4.0)

    assert policy.victim() == 3
    assert policy._last_used.keys() == {1, 3}


@pytest.mark.parametrize("other, first", [(1.0, 2), (3.0, 3)])
def test_both_parts_of_a_split_keep_the_last_use_of_the_whole(
    other: float, first: int
) -> None:
    policy = Lru()
    policy.published(1, num_blocks=4, now=2.0)
    policy.published(2, num_blocks=1, now=other)
    policy.split(3, 1)
    policy.removed(1)
    for node in (2, 3):
        policy.became_evictable(node, now=5.0)

    assert policy.victim() == first


# Costs


def test_pinning_and_releasing_again_and_again_grows_nothing() -> None:
    policy = Lru()
    for node in range(10):
        policy.published(node, num_blocks=1, now=0.0)
    for time in range(1000):
        node = time % 10
        policy.became_evictable(node, now=float(time))
        policy.touched(node, now=float(time))
        policy.became_pinned(node)

    assert len(policy._heap) == 10


def test_serving_for_ever_keeps_the_heap_no_larger_than_the_tree() -> None:
    cache = build_cache(num_blocks=20, block_size=1)
    policy = cache._policy
    assert isinstance(policy, Lru)
    for time in range(500):
        serve(cache, f"{chr(200 + time % 37)}abc", now=float(time))
        assert len(policy._heap) <= cache.tree.num_nodes + 1
        assert len(policy._last_used) == cache.tree.num_nodes


def test_retired_generations_leave_nothing_in_the_heap() -> None:
    """With room to spare nobody asks for a victim, so nothing else clears it up."""
    cache = build_cache(num_blocks=100, block_size=1)
    policy = cache._policy
    assert isinstance(policy, Lru)
    for generation in range(200):
        namespace = generation.to_bytes(32, "big")
        for text in ("abc", "abd", "xyz"):
            serve(cache, text, namespace=namespace, now=float(generation))
        cache.retire(namespace, float(generation))

    assert cache.tree.num_nodes == 0
    assert len(policy._heap) <= 100
    assert len(policy._in_heap) <= 100


def test_finding_victims_takes_no_look_at_every_node() -> None:
    def calls(num_nodes: int) -> int:
        policy = Lru()
        for node in range(num_nodes):
            policy.published(node, num_blocks=1, now=float(node))
            policy.became_evictable(node, now=float(node))

        def evict_ten() -> None:
            for _ in range(10):
                victim = policy.victim()
                assert victim is not None
                policy.removed(victim)

        return count_calls(evict_ten)

    assert calls(100_000) == calls(100)


def test_a_touched_node_costs_one_correction_when_it_is_reached() -> None:
    """Amortised: a thousand touches of one node are one heap operation."""
    policy = Lru()
    for node in range(2):
        policy.published(node, num_blocks=1, now=0.0)
        policy.became_evictable(node, now=0.0)
    for time in range(1, 1000):
        policy.touched(1, now=float(time))

    assert count_calls(policy.victim) < 10
    assert policy.victim() == 0


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


def test_looking_is_no_use() -> None:
    cache = build_cache(num_blocks=6, block_size=1)
    serve(cache, "ab", now=0.0)
    serve(cache, "cd", now=1.0)
    for _ in range(3):
        cache.peek(NAMESPACE, ALICE, tokens("ab!"))

    cache.evict(2, 3.0)

    assert cached(cache, "ab!") == 0
    assert cached(cache, "cd!") == 2
