"""Quotas, hints and an operator's orders under any sequence of events (I22, I36, I37).

Whoever acts, after every act the whole state is checked, and what quotas promise is
looked for in the tree itself: no domain was pushed below its floor by another, none is
over its cap, and what a domain is told it can get, it gets.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stemkv.core.check import check_cache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.hints import Hints
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.table import Lease
from stemkv.core.prefix.tokens import MIN_SPAN_TOKENS, TOKEN_BYTES, TokenIds
from stemkv.core.prefix.tree import PrefixTree
from stemkv.core.retention.lookahead import Waiting
from stemkv.core.retention.policies import EVICTIONS, EvictionConfig
from stemkv.core.retention.quota import Quota, QuotaConfig
from stemkv.errors import ConfigError, PromptTooLong
from tests.core.builders import ALICE, BOB, CREW, NAMESPACE, OTHER_NAMESPACE
from tests.core.picture import picture
from tests.core.scheduling import tokens
from tests.core.watching import WatchedCache
from tests.seeds import slow

DAVE = Domain.private("dave")
POLICIES = ["lru", "reuse_index", *EVICTIONS]
DOMAINS = [ALICE, ALICE, BOB, BOB, CREW, DAVE]
NAMESPACES = [NAMESPACE] * 6 + [OTHER_NAMESPACE, None]
STEMS = ["abbabaabbaab", "abbabbbabaaa", "abbXbbbabaaa", "abYabXab"]  # capitals: spans
TAILS = ["a", "b", "ab", "bb", "Xa", "Z"]
OUTPUTS = ["a", "ab", "bba"]
HINTS = [
    *[Hints()] * 4,
    Hints(session="s"),
    Hints(session="s", ends_session=True),
    Hints(session="t", ephemeral_from=4),
    Hints(ephemeral_from=0),
    Hints(ephemeral_from=7),
    Hints(next_use_s=math.inf),
    Hints(session="t", next_use_s=20.0),
]


NOWHERE = PrefixTree(1).root(b"")


@dataclass(eq=False)
class Live:
    """A request that holds a lease."""

    lease: Lease
    tokens: bytes
    num_computed: int
    hints: Hints

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class QuotaMachine(RuleBasedStateMachine):
    """Domains with and without quotas share one cache, and an operator interferes."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Live] = []
        self.queue: list[Waiting] = []
        self.now = 0.0

    namespaces = st.sampled_from(NAMESPACES)
    domains = st.sampled_from(DOMAINS)
    texts = st.builds(
        lambda stem, length, tail: stem[:length] + tail,
        st.sampled_from(STEMS),
        st.integers(0, 12),
        st.sampled_from(TAILS),
    )
    hints = st.sampled_from(HINTS)
    picks = st.integers(0, 7)
    pauses = st.sampled_from([0.0, 1.0, 30.0])

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(6, 26),
        shares=st.tuples(*[st.integers(0, 3)] * 4),
        caps=st.tuples(*[st.none() | st.integers(0, 8)] * 3),
        weights=st.tuples(*[st.sampled_from([0.5, 1.0, 3.0])] * 3),
        policy=st.sampled_from(POLICIES),
        looks_ahead=st.booleans(),
        has_spans=st.booleans(),
    )
    def create(
        self,
        block_size: int,
        num_blocks: int,
        shares: tuple[int, ...],
        caps: tuple[int | None, ...],
        weights: tuple[float, ...],
        policy: str,
        looks_ahead: bool,
        has_spans: bool,
    ) -> None:
        floors = [share * num_blocks // 12 for share in shares]
        while sum(floors) >= num_blocks:
            floors[floors.index(max(floors))] -= 1
        self.has_spans = has_spans
        self.block_size = block_size
        self.num_blocks = num_blocks
        quotas = {
            domain: Quota(
                floor_blocks=floor,
                cap_blocks=None if cap is None else max(cap, floor),
                weight=weight,
            )
            for domain, floor, cap, weight in zip(
                (ALICE, BOB, CREW), floors, caps, weights, strict=False
            )
        }
        self.quotas = QuotaConfig(quotas=quotas, public_blocks=floors[3])

        config = CacheConfig(num_blocks=num_blocks, block_size=block_size)
        make_policy = EvictionConfig(name=policy).make(config)
        self.cache = WatchedCache(
            config, make_policy, quotas=self.quotas, has_spans=has_spans
        )
        if looks_ahead:
            self.cache.watch_queue(lambda now: self.queue)

    # Requests

    @rule(namespace=namespaces, domain=domains, text=texts, hints=hints, pause=pauses)
    def serve(
        self,
        namespace: bytes | None,
        domain: Domain,
        text: str,
        hints: Hints,
        pause: float,
    ) -> None:
        self.now += pause
        live = self.admit(namespace, domain, text, hints)
        if live is not None:
            self.compute(live, live.num_tokens)
            self.let_go(live)

    @rule(
        namespace=namespaces,
        domain=domains,
        text=texts,
        hints=hints,
        num_extra=st.sampled_from([0, 0, 0, 1, 5]),
        num_spare=st.sampled_from([0, 0, 0, 1, 2]),
        spares_floor=st.booleans(),
    )
    def come(
        self,
        namespace: bytes | None,
        domain: Domain,
        text: str,
        hints: Hints,
        num_extra: int,
        num_spare: int,
        spares_floor: bool,
    ) -> None:
        self.admit(namespace, domain, text, hints, num_extra, num_spare, spares_floor)

    @precondition(lambda self: self.live)
    @rule(pick=picks, num_tokens=st.integers(1, 10))
    def go_on(self, pick: int, num_tokens: int) -> None:
        self.compute(self.chosen(pick), num_tokens)

    @precondition(lambda self: self.live)
    @rule(pick=picks, output=st.sampled_from(OUTPUTS))
    def sample(self, pick: int, output: str) -> None:
        """The next tokens come, and need slots."""
        live = self.chosen(pick)
        if live.num_tokens > 30:
            return
        wanted = live.tokens + tokens(output).buffer
        num_slots = len(wanted) // TOKEN_BYTES
        lease = live.lease
        num_fresh = -(-num_slots // self.block_size) - len(lease.table)
        fits = num_fresh <= self.available(lease.domain)
        before = picture(self.cache)
        with self.act_of(lease.domain):
            assert self.cache.grow(lease, num_slots, self.now) is fits
        if not fits:
            assert picture(self.cache) == before, "a refusal left traces"
            return
        live.tokens = wanted
        self.check()

    @precondition(lambda self: self.live)
    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        live = self.chosen(pick)
        if len(self.live) > 7 or live.lease.copy_source is not None:
            return
        self.publish(live)
        with self.act_of(live.lease.domain):
            twin = self.cache.fork(live.lease, self.now)
        self.live.append(Live(twin, live.tokens, live.num_computed, live.hints))
        self.check()

    @precondition(lambda self: self.live)
    @rule(pick=picks, pause=pauses, is_sound=st.sampled_from([True, True, False]))
    def go(self, pick: int, pause: float, is_sound: bool) -> None:
        self.now += pause
        self.let_go(self.chosen(pick), is_sound=is_sound)

    @precondition(lambda self: self.live)
    @rule(pick=picks)
    def cut_off(self, pick: int) -> None:
        self.cache.cut_off(self.chosen(pick).lease)

    # What is said of the future

    @rule(domain=domains, session=st.sampled_from("st"))
    def end_session(self, domain: Domain, session: str) -> None:
        self.cache.end_session(domain, session, self.now)
        self.check()

    @rule(waiting=st.lists(st.tuples(domains, texts), max_size=3))
    def wait(self, waiting: list[tuple[Domain, str]]) -> None:
        self.queue = [Waiting(NAMESPACE, d, self.tokens(t).buffer) for d, t in waiting]

    # The operator

    @rule(num_blocks=st.integers(0, 6))
    def evict(self, num_blocks: int) -> None:
        lendable = sum(
            max(0, n - self.quotas.of(d).floor_blocks)
            for d, n in self.retained().items()
            if d != PUBLIC
        )
        with self.act_of(None):
            dropped = self.cache.evict(num_blocks, self.now)
        assert dropped >= min(num_blocks, lendable)
        self.check()

    @rule(
        domain=st.sampled_from([*DOMAINS, PUBLIC]),
        text=texts,
        seconds=st.sampled_from([-1.0, 0.0, 2.0, 40.0]),
    )
    def keep(self, domain: Domain, text: str, seconds: float) -> None:
        before = picture(self.cache)
        prefix, until = self.tokens(text), self.now + seconds
        try:
            self.cache.keep(NAMESPACE, domain, prefix, until=until, now=self.now)
        except ConfigError:
            assert picture(self.cache) == before, "a refusal left traces"
        self.check()

    @rule(text=texts)
    def declare_public(self, text: str) -> None:
        before = picture(self.cache)
        try:
            self.cache.declare_public(NAMESPACE, self.tokens(text))
        except ConfigError:
            assert picture(self.cache) == before, "a refusal left traces"

    @rule(pick=picks)
    def retire(self, pick: int) -> None:
        if pick == 0:
            self.cache.retire(NAMESPACE, self.now)
            self.check()

    # Acts

    def admit(
        self,
        namespace: bytes | None,
        domain: Domain,
        text: str,
        hints: Hints,
        num_extra: int = 0,
        num_spare: int = 0,
        spares_floor: bool = False,
    ) -> Live | None:
        wanted = self.tokens(text).buffer
        num_slots = len(wanted) // TOKEN_BYTES + num_extra
        num_needed = -(-num_slots // self.block_size)
        before = picture(self.cache)

        def ask() -> Lease | None:
            return self.cache.acquire(
                namespace,
                domain,
                wanted,
                Demand(
                    num_slots=num_slots, num_spare=num_spare, spares_floor=spares_floor
                ),
                hints=hints,
                now=self.now,
            )

        others = self.quotas.num_promised_blocks - self.quotas.of(domain).floor_blocks
        if num_needed > self.num_blocks - others:
            with pytest.raises(PromptTooLong, match=f" {num_needed} blocks .* have "):
                ask()
            assert picture(self.cache) == before, "a refusal left traces"
            return None
        peek = self.cache.peek(namespace, domain, wanted)
        num_missing = self.cache.num_missing_blocks(
            namespace,
            domain,
            wanted,
            Demand(num_slots=num_slots, num_spare=num_spare, spares_floor=spares_floor),
        )
        assert picture(self.cache) == before, "a question changed something"
        own = self.retained()[domain]
        with self.act_of(domain):
            lease = ask()
        assert (lease is None) == (num_missing > 0)
        if lease is not None and spares_floor:
            floor = self.quotas.of(domain).floor_blocks
            found = sum(
                node.num_blocks
                for node in (lease.copy_source or lease.node or NOWHERE).path()
                if node.domain == domain
            )
            if not self.has_spans:
                least = min(own - found, floor)
                assert self.retained()[domain] >= least, "its own floor was not spared"
        if lease is None:
            assert picture(self.cache) == before, "a refusal left traces"
            return None
        # A source that there is no room for is not copied.
        assert lease.num_matched_tokens <= peek.num_tokens
        assert lease.num_published_blocks == peek.num_whole_blocks
        live = Live(lease, wanted, lease.num_matched_tokens, hints)
        self.live.append(live)
        self.check()
        return live

    def compute(self, live: Live, num_tokens: int) -> None:
        """Run the copy, write some tokens, and publish them."""
        lease = live.lease
        with self.act_of(lease.domain):
            self.cache.copied(lease, self.now)
        end = min(live.num_tokens, live.num_computed + num_tokens)
        num_slots = len(lease.table) * self.block_size
        position = live.num_computed
        while position < min(end, num_slots):
            index = position // self.block_size
            if index >= lease.num_published_blocks:
                before = picture(self.cache)
                is_shared = self.cache.pool.ref_count(lease.table[index]) > 1
                fits = self.available(lease.domain) > 0
                with self.act_of(lease.domain):
                    is_ready, _ = self.cache.prepare_write(lease, position, self.now)
                assert is_ready == (fits or not is_shared)
                if not is_ready:
                    assert picture(self.cache) == before, "a refusal left traces"
                    break
            position = (index + 1) * self.block_size
        live.num_computed = max(live.num_computed, min(end, position))
        self.check()
        self.publish(live)

    def publish(self, live: Live) -> None:
        with self.act_of(live.lease.domain):
            self.cache.publish(live.lease, live.tokens, live.num_computed, self.now)
        self.check()

    def let_go(self, live: Live, *, is_sound: bool = True) -> None:
        lease = live.lease
        self.live.remove(live)
        path = [] if lease.node is None else lease.node.path()
        with self.act_of(lease.domain):
            self.cache.release(lease, self.now)
        self.check()
        if not is_sound:
            self.cache.forget(lease, self.now)
            self.check()
            # From the tail up, whatever nobody else holds or continues is gone.
            for node in reversed(path):
                if node.num_blocks == 0:
                    continue
                assert node.ref_count or node.children, "unsound KV can be matched"
                break
        if live.hints.ends_session and live.hints.session is not None:
            self.end_session(lease.domain, live.hints.session)

    def tokens(self, text: str) -> TokenIds:
        return tokens(text if self.has_spans else text.lower())

    def chosen(self, pick: int) -> Live:
        return self.live[pick % len(self.live)]

    # What must be true

    def retained(self) -> Counter[Domain]:
        found: Counter[Domain] = Counter()
        for node in self.cache.tree.nodes():
            if node.ref_count == 0:
                found[node.domain] += node.num_blocks
        return found

    def available(self, domain: Domain) -> int:
        """By the words of the quota: free ones, one's own, and others' above floors."""
        total = self.cache.pool.num_free
        for other, num_blocks in self.retained().items():
            if other == domain:
                total += num_blocks
            elif other != PUBLIC:
                total += max(0, num_blocks - self.quotas.of(other).floor_blocks)
        return total

    @contextmanager
    def act_of(self, domain: Domain | None) -> Iterator[None]:
        before = self.retained()
        yield
        after = self.retained()
        for other, num_before in before.items():
            if other in (domain, PUBLIC):
                continue
            floor = self.quotas.of(other).floor_blocks
            least = min(num_before, floor)
            if num_before > floor and self.has_spans:
                # The last block it gives may part a span, whose head goes with it; a
                # text has no more than three spans side by side.
                least -= 3 * -(-(MIN_SPAN_TOKENS - 1) // self.block_size)
            assert after[other] >= least, (
                f"{domain} took {other} from {num_before} to {after[other]} blocks, "
                f"its floor is {floor}"
            )
        if domain != PUBLIC:
            num_public = sum(
                n.num_blocks for n in self.cache.tree.nodes() if n.domain == PUBLIC
            )
            assert num_public >= before[PUBLIC], "public blocks were evicted"

    def check(self) -> None:
        check_cache(self.cache, [live.lease for live in self.live])
        for domain in {*DOMAINS}:
            assert self.cache.available_to(domain) == self.available(domain)

    def check_promises(self) -> None:
        """What is available can be had, all of it, by whomever."""
        for domain in (ALICE, BOB, CREW, DAVE):
            cache, leases = copy.deepcopy(
                (self.cache, [live.lease for live in self.live])
            )
            promised = cache.available_to(domain) - cache.pool.num_free
            assert cache.evict(promised, self.now, domain=domain) >= promised
            check_cache(cache, leases)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.check_promises()
        for live in tuple(self.live):
            self.let_go(live)
        for namespace in (NAMESPACE, OTHER_NAMESPACE):
            self.cache.retire(namespace, self.now)
        assert self.cache.usage().num_free_blocks == self.num_blocks
        check_cache(self.cache, [])


WALK = {
    "serve": 6,
    "come": 6,
    "go_on": 8,
    "sample": 4,
    "fork": 2,
    "go": 8,
    "cut_off": 0.3,
    "end_session": 1,
    "wait": 2,
    "evict": 1,
    "keep": 2,
    "declare_public": 1,
    "retire": 0.5,
    "check_promises": 1,
}
NEEDS_LIVE = {"go_on", "sample", "fork", "go", "cut_off"}


def walk(seed: int, *, num_steps: int) -> QuotaMachine:
    rng = random.Random(seed)

    def text() -> str:
        return rng.choice(STEMS)[: rng.randrange(13)] + rng.choice(TAILS)

    arguments: dict[str, Callable[[], object]] = {
        "namespace": lambda: rng.choice(NAMESPACES),
        "domain": lambda: rng.choice(DOMAINS),
        "text": text,
        "output": lambda: rng.choice(OUTPUTS),
        "hints": lambda: rng.choice(HINTS),
        "pause": lambda: rng.choice([0.0, 1.0, 30.0]),
        "num_extra": lambda: rng.choice([0, 0, 0, 1, 5]),
        "spares_floor": lambda: rng.random() < 0.5,
        "num_spare": lambda: rng.choice([0, 0, 0, 1, 2]),
        "pick": lambda: rng.randrange(8),
        "num_tokens": lambda: rng.randrange(1, 11),
        "is_sound": lambda: rng.random() < 0.8,
        "session": lambda: rng.choice("st"),
        "waiting": lambda: [
            (rng.choice(DOMAINS), text()) for _ in range(rng.randrange(4))
        ],
        "num_blocks": lambda: rng.randrange(6),
        "seconds": lambda: rng.choice([-1.0, 0.0, 2.0, 40.0]),
    }
    machine = QuotaMachine()
    machine.create(
        block_size=rng.randrange(1, 5),
        num_blocks=rng.randrange(6, 27),
        shares=tuple(rng.randrange(4) for _ in range(4)),
        caps=tuple(rng.choice([None, None, rng.randrange(9)]) for _ in range(3)),
        weights=tuple(rng.choice([0.5, 1.0, 3.0]) for _ in range(3)),
        policy=rng.choice(POLICIES),
        looks_ahead=rng.random() < 0.5,
        has_spans=rng.random() < 0.5,
    )
    for name in rng.choices(list(WALK), list(WALK.values()), k=num_steps):
        if name in NEEDS_LIVE and not machine.live:
            continue
        act = getattr(machine, name)
        needed = inspect.signature(act).parameters
        act(**{key: arguments[key]() for key in needed})
    machine.teardown()
    return machine


@pytest.mark.parametrize("seed", [*range(16), *slow(range(16, 40))])
def test_no_random_walk_breaks_a_quota(seed: int) -> None:
    walk(seed, num_steps=150)


def run_machine(*, max_examples: int, num_steps: int) -> None:
    run_state_machine_as_test(
        QuotaMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            phases=set(Phase) - {Phase.explain},
            print_blob=True,
        ),
    )


def test_no_sequence_of_events_breaks_a_quota() -> None:
    run_machine(max_examples=40, num_steps=40)


@pytest.mark.slow
def test_no_long_sequence_of_events_breaks_a_quota() -> None:
    run_machine(max_examples=600, num_steps=80)
