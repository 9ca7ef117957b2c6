from __future__ import annotations

import inspect
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.retention import policy as eviction
from stemkv.core.retention.policy import EvictionPolicy
from stemkv.core.retention.retention import Retention
from stemkv.errors import InvariantError
from stemkv.sim.bounds import clairvoyant
from stemkv.sim.clairvoyant import Clairvoyant
from stemkv.sim.reuse import find_reuses
from stemkv.sim.sequence import replay_sequence
from stemkv.sim.sharing import SharingRule
from stemkv.sim.stopwatch import Stopwatch
from stemkv.sim.workloads.registry import WORKLOADS, workload_named
from tests.sim.depth_cost import DepthCost
from tests.sim.small_traces import Drawn, Unit, paths, random_traces, rules, trace

FREELY = settings(deadline=None)  # a busy machine is no failure

POLICIES = sorted(set(eviction.__all__) - {"EvictionPolicy"})


def policy_named(name: str, num_blocks: int) -> EvictionPolicy:
    """Make any policy of the core with its defaults."""
    make = getattr(eviction, name)
    knows_size = "num_blocks" in inspect.signature(make).parameters
    policy: EvictionPolicy = make(num_blocks) if knows_size else make()
    return policy


class Checked(Clairvoyant):
    """Compares every victim with one that is found by reading the trace."""

    def __init__(self, drawn: Drawn, rule: SharingRule) -> None:
        super().__init__(find_reuses(drawn.trace, rule))
        self.requests = paths(drawn, rule)
        self.index = 0
        self.units: dict[int, list[Unit]] = {}  # by node id
        self.leaves: set[int] = set()
        self.num_victims = 0

    def serving(self, index: int) -> None:
        self.index = index
        super().serving(index)

    def published(
        self,
        node_id: int,
        *,
        start: int,
        num_blocks: int,
        keys: Sequence[int],
        hint: int,
        tick: int,
        now: float,
    ) -> None:
        new = self.requests[self.index][start : start + num_blocks]
        self.units.setdefault(node_id, []).extend(new)
        super().published(
            node_id,
            start=start,
            num_blocks=num_blocks,
            keys=keys,
            hint=hint,
            tick=tick,
            now=now,
        )

    def split(self, upper_id: int, lower_id: int, *, num_blocks: int) -> None:
        whole = self.units[lower_id]
        self.units[upper_id], self.units[lower_id] = (
            whole[:num_blocks],
            whole[num_blocks:],
        )
        super().split(upper_id, lower_id, num_blocks=num_blocks)

    def merged(self, upper_id: int, lower_id: int) -> None:
        self.units[lower_id] = self.units.pop(upper_id) + self.units[lower_id]
        super().merged(upper_id, lower_id)

    def became_evictable(self, node_id: int, *, now: float) -> None:
        self.leaves.add(node_id)
        super().became_evictable(node_id, now=now)

    def became_pinned(self, node_id: int) -> None:
        self.leaves.discard(node_id)
        super().became_pinned(node_id)

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        gone = self.units[node_id][num_left:]
        needs = {self.next_use(unit) for unit in gone}
        assert len(needs) == 1, "a part that is needed sooner went with it"
        del self.units[node_id][num_left:]
        if not num_left:
            self.leaves.discard(node_id)
        super().dropped(node_id, num_left, may_return=may_return)

    def victim(self, now: float) -> int | None:
        found = super().victim(now)
        assert found == max(self.leaves, key=self.lateness, default=None)
        self.num_victims += 1
        return found

    def next_use(self, unit: Unit) -> int:
        later = range(self.index + 1, len(self.requests))
        uses = (index for index in later if unit in self.requests[index])
        return next(uses, len(self.requests))

    def lateness(self, node_id: int) -> tuple[int, int, int]:
        tail = self.units[node_id][-1]
        return self.next_use(tail), len(tail[2]), -node_id


@FREELY
@given(drawn=random_traces(), rule=st.sampled_from(rules()))
def test_the_policy_behind_the_hooks_hits_what_the_bound_says(
    drawn: Drawn, rule: SharingRule
) -> None:
    reuses = find_reuses(drawn.trace, rule)

    for num_blocks in range(1, reuses.num_distinct + 2):
        replayed = replay_sequence(
            drawn.trace,
            num_blocks=num_blocks,
            rule=rule,
            policy=Clairvoyant(reuses),
            cost=DepthCost(),
        )
        assert replayed.hits == clairvoyant(reuses, num_blocks, cost=DepthCost())


@pytest.mark.parametrize("sharing", ["isolated", "public"])
@pytest.mark.parametrize("workload", [each.name for each in WORKLOADS])
def test_policy_and_bound_agree_on_generated_workloads(
    workload: str, sharing: str
) -> None:
    rule = SharingRule(name=sharing)
    generated = workload_named(workload, num_requests=120, seed=3)
    reuses = find_reuses(generated, rule)
    longest = max(len(request.units) for request in generated.requests)
    hits = []

    for share in (0.02, 0.1, 0.3, 0.7):
        # Also below the longest request, where bound and replay leave it out alike.
        num_blocks = max(longest // 2, int(share * reuses.num_distinct))
        replayed = replay_sequence(
            generated,
            num_blocks=num_blocks,
            rule=rule,
            policy=Clairvoyant(reuses),
            reuses=reuses,
        )
        assert replayed.hits == clairvoyant(reuses, num_blocks)
        hits.append(replayed.hits.hit_units)

    assert hits[-1] > 0


@FREELY
@given(
    drawn=random_traces(max_requests=12),
    rule=st.sampled_from(rules()),
    num_blocks=st.integers(1, 12),
)
def test_every_victim_is_the_leaf_that_is_needed_again_last(
    drawn: Drawn, rule: SharingRule, num_blocks: int
) -> None:
    policy = Checked(drawn, rule)

    result = replay_sequence(
        drawn.trace, num_blocks=num_blocks, rule=rule, policy=policy
    )

    assert policy.num_victims <= result.num_evicted_units


@pytest.mark.parametrize("name", POLICIES)
@settings(FREELY, max_examples=40)
@given(drawn=random_traces(), rule=st.sampled_from(rules()))
def test_no_policy_hits_more_units(name: str, drawn: Drawn, rule: SharingRule) -> None:
    reuses = find_reuses(drawn.trace, rule)
    longest = max(len(request.units) for request in drawn.trace.requests)

    for num_blocks in range(max(1, longest), reuses.num_distinct + 2):
        known, learnt = (
            replay_sequence(
                drawn.trace, num_blocks=num_blocks, rule=rule, policy=policy
            ).hits.hit_units
            for policy in (Clairvoyant(reuses), policy_named(name, num_blocks))
        )
        assert learnt <= known


def test_only_the_part_of_an_edge_that_is_needed_last_goes() -> None:
    # "wx" needs two. The deepest that nobody needs again is "q"; "p" stands before it
    # on the same edge, and "r" goes instead.
    prompts = trace("pq", "r", "wx", "p")
    reuses = find_reuses(prompts, SharingRule())

    result = replay_sequence(
        prompts, num_blocks=3, rule=SharingRule(), policy=Clairvoyant(reuses)
    )

    assert result.hits.hit_units == 1


def test_of_what_is_never_needed_again_the_deepest_goes_first() -> None:
    prompts = trace("vwxyz", "pq", "r", "vwxy")
    reuses = find_reuses(prompts, SharingRule())

    result = replay_sequence(
        prompts, num_blocks=7, rule=SharingRule(), policy=Clairvoyant(reuses)
    )

    assert result.hits.hit_units == 4
    assert result.num_evicted_units == 1  # "z"; not "q", which is less deep


def test_a_stopwatch_does_not_hide_it_from_the_driver() -> None:
    prompts = trace("x", "y", "z", "x", "y", "z")
    reuses = find_reuses(prompts, SharingRule())
    watch = Stopwatch(Clairvoyant(reuses))

    result = replay_sequence(prompts, num_blocks=2, rule=SharingRule(), policy=watch)

    assert result.hits.hit_units == clairvoyant(reuses, 2).hit_units


def test_it_serves_a_trace_once() -> None:
    prompts = trace("x", "y")
    policy = Clairvoyant(find_reuses(prompts, SharingRule()))
    replay_sequence(prompts, num_blocks=2, rule=SharingRule(), policy=policy)

    with pytest.raises(InvariantError, match="request 0 after request 1"):
        replay_sequence(prompts, num_blocks=2, rule=SharingRule(), policy=policy)


def test_it_refuses_a_driver_that_does_not_say_which_request_runs() -> None:
    policy = Clairvoyant(find_reuses(trace("x"), SharingRule()))
    cache = PrefixCache(
        CacheConfig(num_blocks=4, block_size=1), Retention(lambda: policy)
    )
    tokens = TokenIds.from_ids([1, 2]).buffer
    lease = cache.acquire(
        bytes(32), Domain.private("a"), tokens, Demand(num_slots=2), now=0.0
    )
    assert lease is not None

    with pytest.raises(InvariantError, match="timed replay"):
        cache.publish(lease, tokens, 1, 0.0)
