"""What waiting requests match is known without matching them again.

Everything is compared with what the tree says when it is asked (`check`), after every
event, in a cache with public and private paths, late declarations, spans and fences.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from stemkv.core import CacheConfig, Domain, Lease, Lru, PrefixCache, RequestId
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.waiting import WaitingMatches
from stemkv.errors import InvariantError
from tests.core.scheduling import NAMESPACE, tokens

OTHER = b"o" * 32
TEXTS = st.text("ab", min_size=1, max_size=12) | st.sampled_from(
    ["abababab", "abababba", "aaaaaaaa", "abX", "abXab", "aXb", "abY"]
)
TENANTS = ("x", "y")


def watching(cache: PrefixCache) -> WaitingMatches:
    matches = WaitingMatches(cache.tree)
    cache.watch(matches)
    return matches


class WaitingMachine(RuleBasedStateMachine):
    """A cache in use, and requests that wait beside it."""

    @initialize(block_size=st.integers(1, 3), num_blocks=st.integers(8, 24))
    def build(self, block_size: int, num_blocks: int) -> None:
        config = CacheConfig(num_blocks=num_blocks, block_size=block_size)
        self.cache = PrefixCache(config, Retention(Lru))
        self.matches = watching(self.cache)
        self.waiting: dict[RequestId, tuple[bytes, Domain, bytes]] = {}
        self.leases: list[tuple[Lease, bytes]] = []
        self.counts: dict[RequestId, tuple[int, int]] = {}
        self.now = 0.0
        self.num_added = 0

    @rule(
        text=TEXTS,
        tenant=st.sampled_from(TENANTS),
        namespace=st.sampled_from([NAMESPACE, NAMESPACE, OTHER]),
    )
    def wait(self, text: str, tenant: str, namespace: bytes) -> None:
        request_id = RequestId(f"r{self.num_added}")
        self.num_added += 1
        key = (namespace, Domain.private(tenant), tokens(text).buffer)
        self.waiting[request_id] = key
        self.matches.add(request_id, *key)
        self.note(request_id)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.waiting:
            request_id = data.draw(st.sampled_from(sorted(self.waiting)))
            del self.waiting[request_id], self.counts[request_id]
            self.matches.remove(request_id)

    @rule(
        text=TEXTS,
        tenant=st.sampled_from(TENANTS),
        namespace=st.sampled_from([NAMESPACE, NAMESPACE, OTHER]),
        num_computed=st.integers(0, 20),
    )
    def run(self, text: str, tenant: str, namespace: bytes, num_computed: int) -> None:
        self.now += 1
        buffer = tokens(text).buffer
        num_tokens = len(buffer) // TOKEN_BYTES
        if self.cache.num_blocks_for(num_tokens) > self.cache.config.num_blocks:
            return
        lease = self.cache.acquire(
            namespace,
            Domain.private(tenant),
            buffer,
            Demand(num_slots=num_tokens),
            now=self.now,
        )
        if lease is not None:
            self.cache.copied(lease, self.now)
            self.leases.append((lease, buffer))
            self.publish_to(lease, buffer, num_computed)

    @rule(data=st.data(), num_computed=st.integers(0, 20))
    def publish(self, data: st.DataObject, num_computed: int) -> None:
        if self.leases:
            self.now += 1
            lease, buffer = data.draw(st.sampled_from(self.leases))
            self.publish_to(lease, buffer, num_computed)

    def publish_to(self, lease: Lease, buffer: bytes, num_computed: int) -> None:
        num_computed = min(num_computed, len(buffer) // TOKEN_BYTES)
        self.cache.publish(lease, buffer, num_computed, self.now)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            self.now += 1
            index = data.draw(st.integers(0, len(self.leases) - 1))
            lease, _ = self.leases.pop(index)
            self.cache.release(lease, self.now)

    @rule(num_blocks=st.integers(1, 6))
    def evict(self, num_blocks: int) -> None:
        self.now += 1
        self.cache.evict(num_blocks, self.now)

    @rule(text=TEXTS, namespace=st.sampled_from([NAMESPACE, OTHER]))
    def declare_public(self, text: str, namespace: bytes) -> None:
        self.cache.declare_public(namespace, tokens(text))

    @rule(namespace=st.sampled_from([NAMESPACE, OTHER]))
    def retire(self, namespace: bytes) -> None:
        self.now += 1
        self.cache.retire(namespace, self.now)

    @invariant()
    def counts_are_those_of_a_match(self) -> None:
        if not hasattr(self, "matches"):
            return
        self.matches.check()
        moved = set(self.matches.take_moved())
        for request_id, key in self.waiting.items():
            before = self.counts[request_id]
            self.note(request_id)
            # Whoever is told of nothing has not moved.
            assert request_id in moved or self.counts[request_id] == before
            has_span = any(byte >= 0x80 for byte in key[2][3::TOKEN_BYTES])
            if not has_span:  # too little of a span may end a match earlier
                peek = self.cache.peek(*key)
                assert self.counts[request_id][0] == peek.num_whole_blocks

    def note(self, request_id: RequestId) -> None:
        self.counts[request_id] = (
            self.matches.num_blocks(request_id),
            self.matches.num_public_blocks(request_id),
        )


TestWaitingMachine = WaitingMachine.TestCase
TestWaitingMachine.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None
)


@pytest.mark.slow
def test_many_more_random_walks() -> None:
    run_state_machine_as_test(
        WaitingMachine,
        settings=settings(max_examples=2_000, stateful_step_count=60, deadline=None),
    )


def build(num_blocks: int = 64, block_size: int = 2) -> PrefixCache:
    return PrefixCache(
        CacheConfig(num_blocks=num_blocks, block_size=block_size), Retention(Lru)
    )


def publish(cache: PrefixCache, text: str, *, tenant: str = "x") -> Lease:
    buffer = tokens(text).buffer
    lease = cache.acquire(
        NAMESPACE, Domain.private(tenant), buffer, Demand(num_slots=len(text)), now=0.0
    )
    assert lease is not None
    cache.copied(lease, 0.0)
    cache.publish(lease, buffer, len(text), 0.0)
    return lease


def follow(matches: WaitingMatches, name: str, text: str, *, tenant: str = "x") -> None:
    matches.add(RequestId(name), NAMESPACE, Domain.private(tenant), tokens(text).buffer)


def test_no_event_matches_a_waiting_request_again() -> None:
    cache = build(num_blocks=400)
    matches = watching(cache)
    publish(cache, "ab")  # before the first block of a namespace there is no root
    chance = random.Random(1)
    for index in range(100):
        text = "abab" + "".join(chance.choices("abcd", k=6))
        follow(matches, f"r{index}", text)
    num_matches = matches.num_matches

    for index in range(40):
        lease = publish(cache, "abab" + "".join(chance.choices("abcd", k=6)))
        cache.release(lease, float(index))
    cache.evict(200, 99.0)

    matches.check()
    assert matches.num_matches == num_matches == 100


def test_only_those_who_want_a_block_move_when_it_is_published() -> None:
    cache = build()
    matches = watching(cache)
    publish(cache, "ab")
    follow(matches, "wants", "abcdx")
    follow(matches, "differs", "abddx")
    follow(matches, "other-tenant", "abcdx", tenant="y")

    publish(cache, "abcd")

    assert matches.take_moved() == ("wants",)
    assert matches.num_blocks(RequestId("wants")) == 2


def test_only_those_who_match_a_block_move_when_it_is_evicted() -> None:
    cache = build()
    matches = watching(cache)
    cache.release(publish(cache, "abcd"), 1.0)
    follow(matches, "deep", "abcdx")
    follow(matches, "shallow", "abddx")

    cache.evict(1, 2.0)

    assert matches.take_moved() == ("deep",)
    assert matches.num_blocks(RequestId("deep")) == 1


def test_what_is_public_is_counted_apart() -> None:
    cache = build()
    matches = watching(cache)
    cache.declare_public(NAMESPACE, tokens("ab"))
    publish(cache, "abcd")
    follow(matches, "own", "abcdx")
    follow(matches, "other", "abcdx", tenant="y")

    assert [matches.num_blocks(RequestId(r)) for r in ("own", "other")] == [2, 1]
    assert [matches.num_public_blocks(RequestId(r)) for r in ("own", "other")] == [1, 1]


def test_a_block_that_is_published_again_after_it_was_declared_public_is_followed() -> (
    None
):
    cache = build()
    matches = watching(cache)
    first = publish(cache, "abcdef")  # private, and held
    cache.declare_public(NAMESPACE, tokens("abcd"))
    publish(cache, "abcd", tenant="y")
    follow(matches, "own", "abcdefx")
    follow(matches, "other", "abcdefx", tenant="y")
    matches.check()

    cache.release(first, 1.0)
    cache.evict(1, 2.0)

    matches.check()


def test_a_request_cannot_wait_twice() -> None:
    matches = watching(build())
    follow(matches, "r", "abc")

    with pytest.raises(InvariantError, match="waits already"):
        follow(matches, "r", "abc")


def test_a_request_that_shares_with_nobody_matches_nothing() -> None:
    cache = build()
    matches = watching(cache)
    matches.add(RequestId("r"), None, Domain.private("x"), tokens("abc").buffer)

    publish(cache, "ab")

    assert matches.num_blocks(RequestId("r")) == 0
    assert matches.take_moved() == ()
