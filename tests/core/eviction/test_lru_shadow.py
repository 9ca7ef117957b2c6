"""The shadow of LRU counts what a real cache with LRU does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.retention.policy import (
    EvictionPolicy,
    Lru,
    ReuseIndex,
    lru_shadow,
    reuse_times,
)
from stemkv.core.retention.policy.lru_shadow import LruShadow
from stemkv.sim.sequence import SequenceResult, replay_sequence
from stemkv.sim.sharing import SharingRule
from stemkv.sim.timelines import in_units_of
from stemkv.sim.trace import Trace
from stemkv.sim.workloads import workload_named
from tests.core.builders import acquire, build_cache, tokens

NAMES = ["few-shot", "chat", "documents", "worked-example"]


def traffic(name: str) -> Trace:
    trace = workload_named(name, num_requests=600, seed=7)
    return in_units_of(trace, 32 * trace.unit_size)


def replay(trace: Trace, num_blocks: int, policy: EvictionPolicy) -> SequenceResult:
    rule = SharingRule(name="shared")
    return replay_sequence(trace, num_blocks=num_blocks, rule=rule, policy=policy)


def size_for(trace: Trace) -> int:
    return max(len(request.units) for request in trace.requests) * 5


@pytest.mark.parametrize("name", NAMES)
def test_whoever_evicts_as_lru_does_has_no_more_and_no_less(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse_times, "_FIT_RUNS", 1e9)  # nothing is learnt
    trace = traffic(name)
    policy = ReuseIndex(size_for(trace))
    result = replay(trace, size_for(trace), policy)

    shadow = policy._shadow
    assert result.num_evicted_units > 100
    assert shadow.num_held == shadow.num_idle
    assert (shadow.num_missing, shadow.balance) == (0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_says_of_hits_is_what_a_cache_with_lru_has(name: str) -> None:
    trace = traffic(name)
    num_blocks = size_for(trace)
    policy = ReuseIndex(num_blocks)
    own = replay(trace, num_blocks, policy)
    lru = replay(trace, num_blocks, Lru())

    shadow = policy._shadow
    assert shadow.num_lru_hits == lru.hits.hit_units > 100
    assert shadow.balance == own.hits.hit_units - lru.hits.hit_units


prompts = st.lists(
    st.tuples(
        st.text("abc", min_size=1, max_size=6), st.sampled_from([0.0, 1.0, 30.0])
    ),
    min_size=30,
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(prompts)
def test_it_knows_what_lru_holds_and_the_policy_does_not(
    prompts: list[tuple[str, float]],
) -> None:
    """Two caches side by side; learning at once, so that the policy does differ."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reuse_times, "_FIT_RUNS", 1.0)
        patch.setattr(lru_shadow, "_LEAST", 4.0)
        policy = ReuseIndex(9)
        own = build_cache(num_blocks=9, block_size=1, make_policy=lambda: policy)
        lru = build_cache(num_blocks=9, block_size=1, make_policy=Lru)
        num_hits = num_lru_hits = 0
        now = 0.0
        for text, pause in prompts:
            now += pause
            num_hits += ask(own, text, now)
            num_lru_hits += ask(lru, text, now)
            shadow = policy._shadow
            assert shadow.num_lru_hits == num_lru_hits
            assert shadow.balance == num_hits - num_lru_hits
            missing = resident(lru) - resident(own)
            shadow._trim()
            assert shadow.num_missing == len(missing)
            assert len(missing) <= max(0, 4 + num_hits - num_lru_hits)


def ask(cache: PrefixCache, text: str, now: float) -> int:
    """Serve a prompt whose last token is never published, so that all others can hit."""
    lease = acquire(cache, text + "!", now=now)
    assert lease is not None
    cache.publish(lease, tokens(text + "!"), len(text), now)
    cache.release(lease, now)
    return lease.num_matched_tokens


def resident(cache: PrefixCache) -> set[bytes]:
    """Every resident block, as the path that it ends."""
    paths = set()
    for node in cache.tree.nodes():
        path = b"".join(bytes(step.edge) for step in node.path())
        size = len(path) // 4 - node.num_blocks
        paths |= {path[: 4 * (size + at + 1)] for at in range(node.num_blocks)}
    return paths


def test_blocks_of_one_release_leave_from_the_tail_and_are_used_from_the_head() -> None:
    shadow = LruShadow()
    first = shadow.released(1, 0, 4)
    second = shadow.released(2, 0, 4)
    shadow.evicted(second, 2, 2, is_choice=True)
    shadow.released(3, 0, 2)  # by then LRU has evicted two as well

    assert (first.start, first.end) == (0, 2)
    assert (second.start, second.end) == (0, 4)
    assert shadow.num_missing == 2
    shadow.hit(first, 0, 3)  # of these the third is a hit of the policy only
    assert shadow.balance == 1
    shadow.missed(second, 2, 2)
    assert (shadow.balance, shadow.num_missing) == (-1, 0)


def test_no_more_may_go_than_could_be_paid_for() -> None:
    shadow = LruShadow()
    group = shadow.released(1, 0, 50)
    assert shadow.room == 1
    shadow.evicted(group, 49, 1, is_choice=True)
    assert shadow.room == 0
    shadow.shared(1000)  # of LRU's hits a hundredth, nearly
    assert shadow.room == 8


def test_evidence_counts_a_smaller_share_many_times() -> None:
    def room(num_unused: int, num_used: int) -> int:
        shadow = LruShadow()
        shadow.shared(1000)
        for tick in range(num_unused + num_used):
            group = shadow.released(tick, 0, 1)
            shadow.ranked(group, 0)
            if tick < num_unused:
                shadow.evicted(group, 0, 1, is_choice=False)
            else:
                shadow.hit(group, 0, 1)
        shadow.released(10_000, 0, 1)
        return shadow.room

    assert room(200, 0) == 9
    assert room(600, 0) == 38
    assert room(600, 14) < 12
