"""The shadow of LRU counts what a real cache with LRU does."""

from __future__ import annotations

import pytest

from stemkv.core.retention.policy import EvictionPolicy, Lru, ReuseIndex, reuse_times
from stemkv.core.retention.policy.lru_shadow import LruShadow
from stemkv.sim.sequence import SequenceResult, replay_sequence
from stemkv.sim.sharing import SharingRule
from stemkv.sim.timelines import in_units_of
from stemkv.sim.trace import Trace
from stemkv.sim.workloads import workload_named

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
    assert shadow._num_held == shadow._num_both == shadow._num_idle
    assert (shadow._balance, shadow._num_lost, shadow._num_spared) == (0, 0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_says_of_hits_is_what_a_cache_with_lru_has(name: str) -> None:
    trace = traffic(name)
    num_blocks = size_for(trace)
    policy = ReuseIndex(num_blocks)
    own = replay(trace, num_blocks, policy)
    lru = replay(trace, num_blocks, Lru())

    # What would have been a hit in a cache without limit is a hit or a regret.
    ahead = lru.regret_units - own.regret_units
    shadow = policy._shadow
    assert shadow._num_lru_hits > 100
    # Blocks that LRU would pin while a request makes room are trimmed before that.
    assert abs(shadow._balance - ahead) <= 0.02 * shadow._num_lru_hits + 2


def test_blocks_of_one_release_leave_from_the_tail_and_are_used_from_the_head() -> None:
    shadow = LruShadow(8)
    shadow.released(1, 0, 4)
    shadow.released(2, 0, 4)
    shadow.dropped(2, 2, is_choice=True)  # LRU evicts two as well

    assert [shadow.holds(1, depth) for depth in range(4)] == [True, True, False, False]
    assert all(shadow.holds(2, depth) for depth in range(4))
    shadow.hit(1, 0, 3)  # of these the third is a hit of the policy only
    assert not any(shadow.holds(1, depth) for depth in range(4))
    assert shadow._balance == 1
    shadow.missed(2, 2, 2)
    assert shadow._balance == -1
