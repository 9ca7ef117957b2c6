"""The cache under any sequence of events, against memory that is really written.

Two oracles run beside the cache. `blocks` says which prefixes are resident for whom,
kept as a plain dict. `memory` is the KV memory: what a request writes into a slot is
the prefix that slot stands for, so whoever reads KV that is not its own, not computed
yet, overwritten or from before a fence reads the wrong prefix, and we see it
(I1, I3, I4, I5, I9, I16, I19, I25, I34, I35, I36).

Events come in steps, as from a scheduler: writes are planned (copies are queued,
blocks made writable), others come and go meanwhile, then the step runs: all queued
copies in their order, then all writes.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stemkv.core.check import check_cache
from stemkv.core.prefix.blocks import BlockState
from stemkv.core.prefix.cache import Peek, PrefixCache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.events import BlocksEvicted, BlocksPublished
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.table import BlockCopy, Lease
from stemkv.core.prefix.tokens import TOKEN_BYTES, TokenIds
from stemkv.core.retention.retention import Retention
from stemkv.errors import DoubleRelease, PromptTooLong
from tests.core.builders import (
    ALICE,
    BOB,
    CREW,
    NAMESPACE,
    OTHER_NAMESPACE,
    ResidentBlock,
    Sink,
    resident,
    resident_block,
    snapshot,
    tokens,
)
from tests.core.eviction.cases import LRU, Case
from tests.core.eviction.watched import Watched
from tests.seeds import slow

# Few stems, cut anywhere, and uneven odds: most prompts share a prefix with another.
STEMS = ["abbabaabbaab", "abbabbbabaaa"]
TAILS = ["a", "b", "ab", "bb"]
NAMESPACES = [NAMESPACE] * 6 + [OTHER_NAMESPACE, None]
DOMAINS = [ALICE] * 3 + [BOB, CREW]
PAUSES = [0.0] * 3 + [0.25, 1.0, 1.0, 20.0, 100.0]  # seconds

# What a slot holds: whose KV (namespace and generation, or one request's own) and the
# tokens up to and including that position.
Content = tuple[object, bytes]


@dataclass(eq=False)
class Live:
    """A request that holds a lease."""

    lease: Lease
    owner: object  # of what it computes; equal for requests that may share
    namespace: bytes | None
    domain: Domain
    tokens: bytes
    num_computed: int
    num_declared: int  # leading blocks inside a declared prefix, at its start
    num_public: int  # leading published blocks that are public
    is_retired: bool = False
    planned: range | None = None  # positions to write in this step
    queued_targets: set[int] = field(default_factory=set)  # of copies yet to run

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    def prefix(self, num_tokens: int) -> bytes:
        return self.tokens[: num_tokens * TOKEN_BYTES]


class CacheMachine(RuleBasedStateMachine):
    """Requests come, compute, share, fork, go; blocks are evicted and fenced."""

    def __init__(self, case: Case = LRU) -> None:
        super().__init__()
        self.case = case  # the policy, which is watched
        self.live: list[Live] = []
        self.blocks: dict[ResidentBlock, int] = {}
        self.memory: dict[tuple[int, int], Content] = {}
        self.copies: list[BlockCopy] = []
        self.declared: dict[bytes, list[bytes]] = {}
        self.generations = {NAMESPACE: 0, OTHER_NAMESPACE: 0}
        self.num_loners = 0
        self.now = 0.0

    namespaces = st.sampled_from(NAMESPACES)
    domains = st.sampled_from(DOMAINS)
    texts = st.builds(
        lambda stem, length, tail: stem[:length] + tail,
        st.sampled_from(STEMS),
        st.integers(0, 12),
        st.sampled_from(TAILS),
    )
    picks = st.integers(0, 7)

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(2, 20),
        public=st.none() | texts,
    )
    def create(self, block_size: int, num_blocks: int, public: str | None) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.policy = self.case.watched(num_blocks)
        self.cache = self.build(
            CacheConfig(num_blocks=num_blocks, block_size=block_size)
        )
        self.events = Sink()
        self.cache.subscribe(self.events)
        if public is not None:
            self.declare_public(NAMESPACE, public)

    # What is driven; another pool's machine overrides these

    def build(self, config: CacheConfig) -> Any:
        return PrefixCache(config, Retention(lambda: self.policy))

    def check(self, leases: list[Any]) -> None:
        check_cache(self.cache, leases)

    def snapshot(self) -> Any:
        return snapshot(self.cache)

    def num_public_blocks(self, lease: Lease) -> int:
        path = lease.node.path() if lease.node else []
        return sum(node.num_blocks for node in path if node.domain == PUBLIC)

    # Requests come

    @rule(
        namespace=namespaces,
        domain=domains,
        text=texts,
        num_steps=st.integers(1, 4),
        stays=st.booleans(),
    )
    def serve(
        self,
        namespace: bytes | None,
        domain: Domain,
        text: str,
        num_steps: int,
        stays: bool,
    ) -> None:
        """Come, compute everything in a few steps, publish and maybe go."""
        self.now += 1.0
        live = self.admit(namespace, domain, text)
        if live is None:
            return
        for _ in range(num_steps):
            self.step()
            if live.num_computed < live.num_tokens:
                self.plan(live, -(-live.num_tokens // num_steps))
        self.step()
        self.publish(live)
        if not stays:
            self.live.remove(live)
            self.cache.release(live.lease, self.now)
        self.settle(0)

    @rule(
        namespace=namespaces,
        domain=domains,
        text=texts,
        num_extra=st.sampled_from([0, 0, 0, 1, 5]),
        num_spare=st.sampled_from([0, 0, 0, 1, 2]),
        pause=st.sampled_from(PAUSES),
    )
    def acquire(
        self,
        namespace: bytes | None,
        domain: Domain,
        text: str,
        num_extra: int,
        num_spare: int,
        pause: float,
    ) -> None:
        self.now += pause
        self.admit(namespace, domain, text, num_extra, num_spare)

    def admit(
        self,
        namespace: bytes | None,
        domain: Domain,
        text: str,
        num_extra: int = 0,
        num_spare: int = 0,
    ) -> Live | None:
        wanted = tokens(text)
        num_slots = len(text) + num_extra
        num_needed = self.num_blocks_for(num_slots)
        before = self.snapshot()

        def ask() -> Lease | None:
            return self.cache.acquire(
                namespace,
                domain,
                wanted,
                Demand(num_slots=num_slots, num_spare=num_spare),
                now=self.now,
            )

        if num_needed > self.num_blocks:
            with pytest.raises(PromptTooLong):
                ask()
            assert self.snapshot() == before
            return None

        num_whole, num_tail = self.longest(namespace, domain, wanted)
        match = self.cache._match(namespace, domain, wanted)
        peek = self.cache.peek(namespace, domain, wanted)
        assert self.snapshot() == before, "a question changed something"
        source: set[int] = set()
        if match.partial is not None:
            source.update(match.partial.node.block_ids[match.partial.index :])
        assert peek == Peek(num_whole * self.block_size + num_tail, num_whole)

        num_free = self.cache.pool.num_free
        active = self.active_blocks()
        matched = self.matched_blocks(namespace, domain, wanted[: self.at(num_whole)])
        num_fresh = num_needed - num_whole
        num_left = self.num_blocks - len(active) - num_spare - num_fresh
        # Where public and private chains tie, either may be taken.
        fits = {num_left - len(chain - active) >= 0 for chain in matched}
        lease = ask()
        assert (lease is not None) in fits
        if lease is None:
            assert self.snapshot() == before, "a refusal left traces"
            return None

        assert lease.num_published_blocks == num_whole
        assert len(lease.table) == num_needed
        taken = set(lease.table.ids(0, num_whole))
        assert taken in matched
        if num_left - len(taken - active) < len(source - active):
            num_tail = 0  # no room to keep the source; computed instead
        assert lease.num_matched_tokens == num_whole * self.block_size + num_tail
        assert lease.num_matched_tokens <= len(text) - 1
        assert (lease.copy is None) == (num_tail == 0)
        num_evicted = max(0, num_fresh - num_free)
        if namespace is None:
            self.num_loners += 1
            owner: object = self.num_loners
        else:
            owner = (namespace, self.generations[namespace])
        live = Live(
            lease=lease,
            owner=owner,
            namespace=namespace,
            domain=domain,
            tokens=wanted,
            num_computed=lease.num_matched_tokens,
            num_declared=self.num_declared(namespace, wanted),
            num_public=self.num_public_blocks(lease),
        )
        self.live.append(live)
        if lease.copy is not None:
            assert lease.copy.target == lease.table[num_whole]
            assert lease.copy.num_tokens == num_tail
            self.queue(live, lease.copy)
        self.settle(num_evicted, held=active | taken)
        return live

    @rule(namespace=namespaces, text=texts)
    def declare_public(self, namespace: bytes | None, text: str) -> None:
        if namespace is None:
            return
        prefix = tokens(text)
        num_blocks = self.cache.declare_public(namespace, TokenIds(prefix))
        assert num_blocks == len(text) // self.block_size
        self.declared.setdefault(namespace, []).append(prefix[: self.at(num_blocks)])

    # They compute

    @precondition(lambda self: self.plannable())
    @rule(pick=picks, num_tokens=st.integers(1, 10))
    def plan_write(self, pick: int, num_tokens: int) -> None:
        self.plan(chosen(self.plannable(), pick), num_tokens)

    def plan(self, live: Live, num_tokens: int) -> None:
        """Make blocks writable for the next tokens; the write is in the step."""
        lease = live.lease
        num_fresh = self.num_blocks_for(live.num_tokens) - len(lease.table)
        num_free = self.cache.pool.num_free
        before = self.snapshot()
        held = self.active_blocks()
        available = self.num_blocks - len(held)
        fits = num_fresh <= available
        assert self.cache.grow(lease, live.num_tokens, self.now) == fits
        if not fits:
            assert self.snapshot() == before, "a refusal left traces"
            return
        num_evicted = max(0, max(0, num_fresh) - num_free)
        start = position = live.num_computed
        stop = min(live.num_tokens, start + num_tokens)
        while position < stop:
            num_free = self.cache.pool.num_free
            is_shared = self.num_holders(lease.table[position // self.block_size]) > 1
            available = self.num_blocks - len(self.active_blocks())
            before = self.snapshot()
            is_ready, copy = self.cache.prepare_write(lease, position, self.now)
            assert is_ready == (not is_shared or available > 0)
            if not (is_ready and is_shared):
                assert self.snapshot() == before, "nothing had to be done"
            if not is_ready:
                break
            offset = position % self.block_size
            assert (copy is not None) == (is_shared and offset > 0)
            if copy is not None:
                assert copy.num_tokens == offset
                self.queue(live, copy)
            num_evicted += is_shared and num_free == 0
            position += self.block_size - offset
        stop = min(stop, position)
        if stop > start:
            live.planned = range(start, stop)
        self.settle(num_evicted, held)

    @precondition(lambda self: self.live)
    @rule(plans_all=st.booleans(), publishes=st.sets(st.integers(0, 7)))
    def run_step(self, plans_all: bool, publishes: set[int]) -> None:
        if plans_all:
            for live in self.plannable():
                self.plan(live, 14)
        for number, live in enumerate(self.step()):
            if number in publishes:
                self.publish(live)
        self.settle(0)

    def step(self) -> list[Live]:
        """Run the copies in their order, then the writes; return who wrote."""
        for copy in self.copies:
            for offset in range(copy.num_tokens):
                content = self.memory.get((copy.source, offset))
                if content is None:
                    self.memory.pop((copy.target, offset), None)
                else:
                    self.memory[copy.target, offset] = content
        self.copies.clear()
        for live in self.live:
            live.queued_targets.clear()
            if live.lease.copy is not None:
                self.cache.copied(live.lease, self.now)
        planned = [live for live in self.live if live.planned is not None]
        for live in planned:
            assert live.planned is not None
            for position in live.planned:
                self.write(live, position)
            live.num_computed = live.planned.stop
            live.planned = None
        return planned

    def write(self, live: Live, position: int) -> None:
        block_id = live.lease.table[position // self.block_size]
        assert self.cache.pool.state(block_id) is BlockState.PRIVATE
        assert self.cache.pool.ref_count(block_id) == 1, "a shared block is written"
        content = (live.owner, live.prefix(position + 1))
        self.memory[block_id, position % self.block_size] = content

    @precondition(lambda self: self.live)
    @rule(pick=picks)
    def publish_late(self, pick: int) -> None:
        self.publish(chosen(self.live, pick))
        self.settle(0)

    def publish(self, live: Live) -> None:
        """Publish, and do the same to the dict: a block that is there is taken over."""
        lease = live.lease
        start = lease.num_published_blocks
        end = live.num_computed // self.block_size
        own = list(lease.table.ids())
        is_silent = live.namespace is None or live.is_retired
        num_added = 0
        for index in range(start, start if is_silent else end):
            is_public = live.num_public == index < live.num_declared
            live.num_public += is_public
            assert live.namespace is not None
            key = resident_block(
                live.namespace,
                PUBLIC if is_public else live.domain,
                live.num_public,
                live.tokens[: self.at(index + 1)],
            )
            num_added += key not in self.blocks
            own[index] = self.blocks.setdefault(key, own[index])

        added = self.cache.publish(lease, live.tokens, live.num_computed, self.now)

        assert added == num_added == self.events.total(BlocksPublished)
        assert list(lease.table.ids()) == own
        assert lease.num_published_blocks == (start if is_silent else max(start, end))

    @precondition(lambda self: self.finished())
    @rule(pick=picks, text=st.text("ab", min_size=1, max_size=3))
    def sample(self, pick: int, text: str) -> None:
        """All tokens are computed: the next ones come."""
        chosen(self.finished(), pick).tokens += tokens(text)

    @precondition(lambda self: self.forkable())
    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        live = chosen(self.forkable(), pick)
        self.publish(live)  # whole blocks that are shared could not be published later
        lease = self.cache.fork(live.lease, self.now)
        assert list(lease.table.ids()) == list(live.lease.table.ids())
        twin = Live(
            lease=lease,
            owner=live.owner,
            namespace=live.namespace,
            domain=live.domain,
            tokens=live.tokens,
            num_computed=live.num_computed,
            num_declared=live.num_declared,
            num_public=live.num_public,
            is_retired=live.is_retired,
        )
        self.live.append(twin)
        self.settle(0)

    # They go

    @precondition(lambda self: self.live)
    @rule(pick=picks, pause=st.sampled_from(PAUSES))
    def release(self, pick: int, pause: float) -> None:
        """In whatever state it is: planned, not yet copied, retired, half computed."""
        self.now += pause
        live = chosen(self.live, pick)
        self.live.remove(live)
        self.cache.release(live.lease, self.now)
        before = self.snapshot()
        with pytest.raises(DoubleRelease):
            self.cache.release(live.lease, self.now)
        assert self.snapshot() == before
        self.settle(0)

    @precondition(lambda self: self.blocks)
    @rule(num_blocks=st.integers(0, 5))
    def evict(self, num_blocks: int) -> None:
        held = self.active_blocks()
        dropped = self.cache.evict(num_blocks, self.now)
        assert dropped == min(num_blocks, len(set(self.blocks.values()) - held))
        self.settle(dropped, held)

    @precondition(lambda self: self.blocks)
    @rule(namespace=namespaces, pick=picks)
    def retire(self, namespace: bytes | None, pick: int) -> None:
        if namespace is None or pick:
            return  # seldom, or nothing would ever be shared
        inside = {b for key, b in self.blocks.items() if key.namespace == namespace}
        held = inside & self.active_blocks()
        assert self.cache.retire(namespace, self.now) == len(held)
        self.generations[namespace] += 1
        self.declared.pop(namespace, None)
        for key in [key for key in self.blocks if key.namespace == namespace]:
            del self.blocks[key]
        for live in self.live:
            live.is_retired |= live.namespace == namespace
        self.settle(0)

    # The dict

    def at(self, num_blocks: int) -> int:
        return num_blocks * self.block_size * TOKEN_BYTES

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def visible(self, namespace: bytes | None, domain: Domain) -> list[ResidentBlock]:
        names = {(owner.kind.value, owner.name) for owner in (PUBLIC, domain)}
        return [
            key
            for key in self.blocks
            if key.namespace == namespace
            and (key.domain_kind, key.domain_name) in names
        ]

    def longest(
        self, namespace: bytes | None, domain: Domain, wanted: bytes
    ) -> tuple[int, int]:
        """The whole blocks that match, and how many tokens match after them."""
        visible = self.visible(namespace, domain)
        end = len(wanted) - TOKEN_BYTES
        whole = [k.prefix for k in visible if wanted[:end].startswith(k.prefix)]
        longest = max(map(len, whole), default=0)
        tails = [
            common_tokens(key.prefix[longest:], wanted[longest:end])
            for key in visible
            if len(key.prefix) - longest == self.at(1)
            and key.prefix[:longest] == wanted[:longest]
        ]
        return longest // self.at(1), max(tails, default=0)

    def matched_blocks(
        self, namespace: bytes | None, domain: Domain, prefix: bytes
    ) -> list[set[int]]:
        """The blocks that spell the prefix, once for every chain that does."""
        if not prefix:
            return [set()]
        visible = self.visible(namespace, domain)
        chains = []
        for last in visible:
            if last.prefix == prefix:
                chain = {
                    self.blocks[key]
                    for key in visible
                    if prefix.startswith(key.prefix)
                    and (
                        key.num_public == last.num_public
                        if key.domain_name
                        else key.num_public <= last.num_public
                    )
                }
                assert len(chain) == len(prefix) // self.at(1)
                chains.append(chain)
        return chains

    def num_declared(self, namespace: bytes | None, wanted: bytes) -> int:
        declared = self.declared.get(namespace, []) if namespace else []
        same = [common_tokens(prefix, wanted) for prefix in declared]
        return max(same, default=0) // self.block_size

    def active_blocks(self) -> set[int]:
        """Blocks that a live request holds, or whose copy it waits for."""
        held: set[int] = set()
        for live in self.live:
            held.update(live.lease.table.ids())
            if live.lease.copy_source is not None:
                for node in live.lease.copy_source.path():
                    held.update(node.block_ids)
        return held

    def num_holders(self, block_id: int) -> int:
        return sum(block_id in live.lease.table.ids() for live in self.live)

    def plannable(self) -> list[Live]:
        return [
            live
            for live in self.live
            if live.planned is None and live.num_computed < live.num_tokens
        ]

    def finished(self) -> list[Live]:
        return [
            live for live in self.live if live.num_computed == live.num_tokens <= 12
        ]

    def forkable(self) -> list[Live]:
        if len(self.live) > 6:
            return []
        return [
            live
            for live in self.live
            if live.planned is None and live.lease.copy_source is None
        ]

    def queue(self, live: Live, copy: BlockCopy) -> None:
        self.copies.append(copy)
        live.queued_targets.add(copy.target)

    def settle(self, num_evicted: int, held: set[int] | None = None) -> None:
        """Take over what was evicted, which must be that many, and none of `held`."""
        found = resident(self.cache)
        gone = self.blocks.keys() - found.keys()
        assert not found.keys() - self.blocks.keys(), "resident, never published"
        assert len(gone) == num_evicted, "more was evicted than needed, or less"
        assert self.events.total(BlocksEvicted) == num_evicted
        assert not {self.blocks[key] for key in gone} & (held or set())
        assert all(self.blocks[key] == block_id for key, block_id in found.items())
        self.blocks = found

    # What always holds

    @invariant()
    def everything_holds(self) -> None:
        self.every_counter_is_true()
        self.the_policy_knows_exactly_the_unpinned_leaves()
        self.whoever_matches_now_reads_the_kv_of_those_very_tokens()
        self.every_request_keeps_the_kv_it_has()
        self.what_a_resident_block_stands_on_is_resident()

    def every_counter_is_true(self) -> None:
        self.check([live.lease for live in self.live])
        active = self.active_blocks()
        usage = self.cache.usage()
        assert usage.num_active_blocks == len(active)
        assert usage.num_cached_blocks == len(set(self.blocks.values()) - active)

    def the_policy_knows_exactly_the_unpinned_leaves(self) -> None:
        nodes = list(self.cache.tree.nodes())
        leaves = {n.id for n in nodes if n.is_leaf and n.ref_count == 0}
        assert self.policy.evictable == leaves
        assert self.policy.num_blocks == {node.id: node.num_blocks for node in nodes}

    def whoever_matches_now_reads_the_kv_of_those_very_tokens(self) -> None:
        for key, block_id in self.blocks.items():
            owner = (key.namespace, self.generations[key.namespace])
            start = len(key.prefix) // TOKEN_BYTES - self.block_size
            for offset in range(self.block_size):
                expected = (owner, key.prefix[: (start + offset + 1) * TOKEN_BYTES])
                assert self.memory.get((block_id, offset)) == expected

    def every_request_keeps_the_kv_it_has(self) -> None:
        for live in self.live:
            ids = live.lease.table.ids()
            assert len(set(ids)) == len(ids)
            for position in range(live.num_computed):
                block_id = ids[position // self.block_size]
                if block_id in live.queued_targets:
                    continue
                expected = (live.owner, live.prefix(position + 1))
                slot = (block_id, position % self.block_size)
                assert self.memory.get(slot) == expected

    def what_a_resident_block_stands_on_is_resident(self) -> None:
        for key in self.blocks:
            above = key.prefix[: -self.at(1)]
            if not above:
                continue
            if key.domain_name:
                num_public, is_public = (
                    key.num_public,
                    len(above) <= self.at(key.num_public),
                )
            else:
                num_public, is_public = key.num_public - 1, True
            owner = PUBLIC.name if is_public else key.domain_name
            kind = PUBLIC.kind.value if is_public else key.domain_kind
            parent = ResidentBlock(key.namespace, owner, kind, num_public, above)
            assert parent in self.blocks

    def teardown(self) -> None:
        """When all have gone nothing is held, and every block can be had again."""
        if not hasattr(self, "cache"):
            return
        for live in self.live:
            self.cache.release(live.lease, self.now)
        self.live.clear()
        self.check([])
        usage = self.cache.usage()
        assert usage.num_active_blocks == 0
        assert usage.num_cached_blocks == len(self.blocks)
        assert self.cache.tree.retired_roots() == ()
        assert self.cache.evict(self.num_blocks + 1, self.now) == len(self.blocks)
        assert self.cache.usage().num_free_blocks == self.num_blocks
        assert self.cache.tree.num_nodes == 0
        self.check([])


def chosen(among: list[Live], pick: int) -> Live:
    return among[pick % len(among)]


def common_tokens(left: bytes, right: bytes) -> int:
    same = 0
    while (
        same < min(len(left), len(right)) // TOKEN_BYTES
        and left[: (same + 1) * TOKEN_BYTES] == right[: (same + 1) * TOKEN_BYTES]
    ):
        same += 1
    return same


# Rules by weight, for walks that mix all of them; Hypothesis leaves some out each time.
WALK = {
    "serve": 6,
    "acquire": 5,
    "plan_write": 5,
    "run_step": 5,
    "publish_late": 2,
    "sample": 6,
    "fork": 4,
    "release": 7,
    "evict": 1,
    "retire": 3,
    "declare_public": 1,
}
NEEDS: dict[str, Callable[[CacheMachine], object]] = {
    "plan_write": CacheMachine.plannable,
    "run_step": lambda machine: machine.live,
    "publish_late": lambda machine: machine.live,
    "sample": CacheMachine.finished,
    "fork": CacheMachine.forkable,
    "release": lambda machine: machine.live,
}


def walk(
    seed: int,
    *,
    num_steps: int,
    case: Case = LRU,
    make_machine: Callable[[Case], CacheMachine] = CacheMachine,
) -> Watched:
    """Take random steps; return the policy as it is when everything was dropped."""
    rng = random.Random(seed)

    def text() -> str:
        return rng.choice(STEMS)[: rng.randrange(13)] + rng.choice(TAILS)

    arguments: dict[str, Callable[[], object]] = {
        "namespace": lambda: rng.choice(NAMESPACES),
        "domain": lambda: rng.choice(DOMAINS),
        "text": text,
        "num_extra": lambda: rng.choice([0, 0, 0, 1, 5]),
        "num_spare": lambda: rng.choice([0, 0, 0, 1, 2]),
        "pause": lambda: rng.choice(PAUSES),
        "num_steps": lambda: rng.randrange(1, 5),
        "stays": lambda: rng.random() < 0.3,
        "pick": lambda: rng.randrange(8),
        "num_tokens": lambda: rng.randrange(1, 11),
        "plans_all": lambda: rng.random() < 0.5,
        "publishes": lambda: {n for n in range(8) if rng.random() < 0.6},
        "num_blocks": lambda: rng.randrange(6),
    }
    machine = make_machine(case)
    machine.create(
        block_size=rng.randrange(1, 5), num_blocks=rng.randrange(4, 32), public=text()
    )
    for name in rng.choices(list(WALK), list(WALK.values()), k=num_steps):
        is_possible = NEEDS.get(name, bool)
        if is_possible(machine):
            act = getattr(machine, name)
            needed = inspect.signature(act).parameters
            act(**{key: arguments[key]() for key in needed})
            machine.everything_holds()
    machine.teardown()
    return machine.policy


@pytest.mark.parametrize("seed", [*range(20), *slow(range(20, 40))])
def test_no_random_walk_breaks_the_cache(seed: int) -> None:
    walk(seed, num_steps=250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_no_long_random_walk_breaks_the_cache(seed: int) -> None:
    for part in range(10):
        walk(seed * 10 + part, num_steps=1000)


def run_machine(
    *,
    max_examples: int,
    num_steps: int,
    case: Case = LRU,
    make_machine: Callable[[Case], CacheMachine] = CacheMachine,
) -> None:
    run_state_machine_as_test(
        lambda: make_machine(case),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            phases=set(Phase) - {Phase.explain},  # tracing every line costs minutes
            print_blob=True,
        ),
    )


def test_no_sequence_of_events_breaks_the_cache() -> None:
    run_machine(max_examples=80, num_steps=40)


@pytest.mark.slow
def test_no_long_sequence_of_events_breaks_the_cache() -> None:
    run_machine(max_examples=600, num_steps=80)
