"""What a domain can observe depends on its own requests and on public prefixes alone.

The same history runs with and without somebody else's requests, at the same times and
in a cache that never evicts; then everything the one domain sees is compared bit for
bit: matches, copies, counts, events, steps, and the content of what it reads. A cache
under pressure shows other lengths, since memory is shared, but never other contents.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core import (
    PUBLIC,
    CacheConfig,
    Domain,
    Fcfs,
    Lru,
    PrefixCache,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
    TokenIds,
)
from stemkv.core.check import check_cache, check_scheduler
from stemkv.core.prefix.cache import DomainUsage
from stemkv.core.prefix.events import BlocksEvicted, BlocksPublished, BlocksRetired
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.table import Lease
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.retention.retention import Retention
from stemkv.errors import RequestError
from tests.core.builders import (
    ALICE,
    BOB,
    CREW,
    NAMESPACE,
    OTHER_NAMESPACE,
    build_cache,
    cached,
    hold,
    serve,
    spelled,
    tokens,
)
from tests.core.scheduling import FakeRunner, build_spec

PUBLIC_TEXT = "pqrspqrspqrs"
DOMAINS = [ALICE, BOB, CREW]


# One history, twice


@dataclass(frozen=True)
class Act:
    """Somebody's request begins, goes on or ends; `now` is when."""

    now: float
    name: str  # of the request
    domain: Domain | None  # `None`: it shares with nobody
    text: str
    verb: str  # "begin", "publish" or "end"
    num_computed: int = 0


@dataclass
class Stage:
    """A cache, memory that is really written, and what each domain saw of it."""

    cache: PrefixCache
    memory: dict[tuple[int, int], tuple[Domain | None, str]] = field(
        default_factory=dict
    )
    leases: dict[str, Lease] = field(default_factory=dict)
    seen: dict[Domain | None, list[object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cache.subscribe(self._see_event)

    def _see(self, domain: Domain | None, what: object) -> None:
        self.seen.setdefault(domain, []).append(what)

    def _see_event(self, event: Any) -> None:
        self._see(event.domain, without_ids(event))

    def play(self, act: Act) -> None:
        if act.verb == "begin":
            self._begin(act)
        elif act.name in self.leases:
            lease = self.leases[act.name]
            if act.verb == "publish":
                self._compute(act, lease)
                ids = tokens(act.text)
                num = self.cache.publish(lease, ids, act.num_computed, act.now)
                self._see(act.domain, ("published", act, num, self._read(act, lease)))
            else:
                del self.leases[act.name]
                self.cache.release(lease, act.now)
        if act.domain is not None:
            self._see(act.domain, self.cache.usage_of(act.domain))

    def _begin(self, act: Act) -> None:
        namespace = None if act.domain is None else NAMESPACE
        domain = act.domain or ALICE
        ids = tokens(act.text)
        peek = self.cache.peek(namespace, domain, ids)
        lease = self.cache.acquire(
            namespace, domain, ids, Demand(num_slots=len(act.text)), now=act.now
        )
        if lease is None:
            return  # no room
        copy = None
        if lease.copy is not None:
            copy = lease.copy.num_tokens
            for offset in range(copy):
                content = self.memory[lease.copy.source, offset]
                self.memory[lease.copy.target, offset] = content
        self.cache.copied(lease, act.now)
        self.leases[act.name] = lease
        read = self._read(act, lease, lease.num_matched_tokens)
        self._see(
            act.domain,
            (
                act,
                peek,
                lease.num_matched_tokens,
                lease.num_published_blocks,
                lease.num_public_blocks,
                len(lease.table),
                copy,
                read,
            ),
        )

    def _compute(self, act: Act, lease: Lease) -> None:
        size = self.cache.config.block_size
        for position in range(lease.num_matched_tokens, act.num_computed):
            index, offset = divmod(position, size)
            if index >= lease.num_published_blocks:
                slot = (lease.table[index], offset)
                self.memory[slot] = (act.domain, act.text[: position + 1])

    def _read(self, act: Act, lease: Lease, end: int | None = None) -> list[str]:
        """What a request reads of what it did not compute: whose, and of what text."""
        size = self.cache.config.block_size
        end = lease.num_published_blocks * size if end is None else end
        num_public = len(PUBLIC_TEXT) // size * size
        read = []
        for position in range(end):
            index, offset = divmod(position, size)
            owner, text = self.memory[lease.table[index], offset]
            assert text == act.text[: position + 1], "KV of other tokens"
            is_public = position < num_public and PUBLIC_TEXT.startswith(text)
            assert owner == act.domain or is_public, "KV of another domain"
            read.append("public" if is_public else str(owner))
        return read


def without_ids(event: BlocksPublished | BlocksEvicted | BlocksRetired) -> object:
    """Which blocks are free next tells of others: ids are the operator's, as tables are."""
    return type(event), event.now, event.namespace, event.domain, event.num_blocks


def build_stage(*, num_blocks: int, block_size: int) -> Stage:
    """Public prefixes are declared, and computed before anybody comes."""
    stage = Stage(build_cache(num_blocks=num_blocks, block_size=block_size))
    stage.cache.declare_public(NAMESPACE, TokenIds(tokens(PUBLIC_TEXT)))
    operator = Domain.private("operator")
    for verb in ("begin", "publish", "end"):
        num_computed = len(PUBLIC_TEXT)
        stage.play(Act(0.0, "warm", operator, PUBLIC_TEXT, verb, num_computed))
    return stage


texts = st.builds(
    lambda num_public, own, tail: PUBLIC_TEXT[:num_public] + own + tail,
    st.sampled_from([0, 0, 3, 8, 12]),
    st.sampled_from(["", "abcabc", "abcabd", "abc"]),
    st.text("ab", min_size=1, max_size=3),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Act]:
    """Requests of several domains, each begun, published in parts, and ended."""
    acts: list[Act] = []
    for number in range(draw(st.integers(2, 10))):
        domain = draw(st.sampled_from([ALICE, ALICE, BOB, CREW, None]))
        text = draw(texts)
        start = draw(st.integers(0, 6))
        times = sorted(draw(st.lists(st.integers(1, 12), min_size=2, max_size=3)))
        name = f"r{number}"
        acts.append(Act(start, name, domain, text, "begin"))
        for time, part in zip(times[:-1], (0.5, 1.0)[-len(times) + 1 :], strict=True):
            num_computed = int(len(text) * part)
            acts.append(Act(start + time, name, domain, text, "publish", num_computed))
        if draw(st.booleans()):
            acts.append(Act(start + times[-1], name, domain, text, "end"))
    return sorted(acts, key=lambda act: act.now)  # stable: a request stays in order


def play(acts: Iterable[Act], *, num_blocks: int, block_size: int) -> Stage:
    stage = build_stage(num_blocks=num_blocks, block_size=block_size)
    for act in acts:
        stage.play(act)
        check_cache(stage.cache, stage.leases.values())
    return stage


@settings(max_examples=80, deadline=None)
@given(histories(), st.integers(1, 5), st.sampled_from([ALICE, BOB, CREW, None]))
def test_what_a_domain_observes_does_not_depend_on_other_domains(
    acts: list[Act], block_size: int, observer: Domain | None
) -> None:
    own = [act for act in acts if act.domain == observer]
    among_others = play(acts, num_blocks=250, block_size=block_size)
    alone = play(own, num_blocks=250, block_size=block_size)

    assert not among_others.cache.usage().num_evicted_blocks
    assert among_others.seen.get(observer) == alone.seen.get(observer)
    if observer is not None:
        usage = among_others.cache.usage_of(observer)
        assert usage == alone.cache.usage_of(observer)


def play_walk(seed: int, *, num_blocks: int) -> tuple[Stage, int]:
    rng = random.Random(seed)
    block_size = rng.randint(1, 4)
    stage = build_stage(num_blocks=num_blocks // block_size, block_size=block_size)
    num_hits = 0
    for number in range(150):
        own = rng.choice(["", "abcabc", "abcabd"])
        text = PUBLIC_TEXT[: rng.choice([0, 0, 8, 12])] + own + rng.choice("abc")
        domain = rng.choice([*DOMAINS, None])
        name = f"r{number}"
        for verb in ("begin", "publish", "end"):
            if verb == "end" and rng.random() < 0.2 and len(stage.leases) < 3:
                break
            stage.play(Act(float(number), name, domain, text, verb, len(text)))
            if verb == "begin" and name in stage.leases:
                num_hits += bool(stage.leases[name].num_matched_tokens)
        if rng.random() < 0.3 and stage.leases:
            name = rng.choice(sorted(stage.leases))
            stage.cache.release(stage.leases.pop(name), float(number))
        check_cache(stage.cache, stage.leases.values())
    return stage, num_hits


def test_under_pressure_hits_come_from_visible_domains_only() -> None:
    """`Stage` looks at every slot that anybody reads."""
    num_evicted = num_hits = 0
    for seed in range(20):
        stage, num_more = play_walk(seed, num_blocks=60)
        num_evicted += stage.cache.usage().num_evicted_blocks
        num_hits += num_more
    assert num_evicted > 400
    assert num_hits > 400


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_under_pressure_hits_come_from_visible_domains_only_for_long(
    seed: int,
) -> None:
    play_walk(seed, num_blocks=30 + seed % 80)


def test_the_stage_would_notice_kv_of_another_domain() -> None:
    """A positive control of the oracle: one that reads across domains is caught."""
    stage = build_stage(num_blocks=40, block_size=2)
    for verb in ("begin", "publish", "end"):
        stage.play(Act(1.0, "a", ALICE, "abcdef", verb, 6))
    (node,) = (n for n in stage.cache.tree.nodes() if n.domain == ALICE)
    children = node.parent.children  # type: ignore[union-attr]
    children[BOB] = children.pop(ALICE)
    node.domain = BOB
    with pytest.raises(AssertionError, match="KV of another domain"):
        stage.play(Act(2.0, "b", BOB, "abcdef", "begin"))


# The same through the scheduler, where others could change waits and steps as well


@dataclass(frozen=True)
class Arrival:
    step: int
    name: str
    tenant: str
    prompt: str
    max_new_tokens: int
    shares: bool


def run_scheduler(arrivals: list[Arrival]) -> dict[str, list[object]]:
    """Everything that reaches a tenant, with the step at which it does."""
    cache = PrefixCache(CacheConfig(num_blocks=200, block_size=3), Retention(Lru))
    config = SchedulerConfig(token_budget=4000, max_num_running=1000, watermark=0.0)
    scheduler = Scheduler(config, cache, Fcfs())
    runner = FakeRunner(scheduler)
    public = "abcabcabcabc"
    cache.declare_public(NAMESPACE, TokenIds(bytes_of(public)))
    runner.public[NAMESPACE].append(bytes_of(public))
    seen: dict[str, list[object]] = {"": []}
    tenant_of = {arrival.name: arrival.tenant for arrival in arrivals}
    todo = [Arrival(0, "warm", "operator", public + "a", 1, True), *arrivals]
    tenant_of["warm"] = "operator"
    for step in range(20):
        now = float(step)
        for arrival in todo:
            if arrival.step == step:
                scheduler.add(
                    build_spec(
                        arrival.name,
                        arrival.prompt,
                        max_new_tokens=arrival.max_new_tokens,
                        tenant=arrival.tenant,
                        arrival_s=now,
                        namespace=NAMESPACE if arrival.shares else None,
                    )
                )
        plan = scheduler.schedule(now)
        for chunk in plan.chunks:
            work = (step, chunk.request_id, chunk.start, chunk.end)
            seen.setdefault(tenant_of[chunk.request_id], []).append(work)
        for event in scheduler.commit(plan, runner.execute(plan), now):
            if isinstance(event, BlocksPublished | BlocksEvicted | BlocksRetired):
                tenant, what = event.domain.name, without_ids(event)
            else:
                tenant, what = tenant_of[event.request_id], event
            seen.setdefault(tenant, []).append((step, what))
        check_scheduler(scheduler)
        runner.check()
        for tenant in ("x", "y", "z"):
            usage = cache.usage_of(Domain.private(tenant))
            seen.setdefault(tenant, []).append((step, usage))
    assert not scheduler.has_work
    return seen


def bytes_of(text: str) -> bytes:
    return TokenIds.from_ids([ord(letter) - ord("a") for letter in text]).buffer


arrivals = st.lists(
    st.builds(
        lambda step, has_twin, tenant, num_public, rest, max_new_tokens, shares: (
            has_twin,
            step,
            tenant,
            "abcabcabcabc"[:num_public] + rest,
            max_new_tokens,
            shares,
        ),
        st.integers(1, 4),
        st.booleans(),
        st.sampled_from("xxyz"),
        st.sampled_from([0, 0, 4, 9, 12]),
        st.sampled_from(["a", "abb", "abbaab", "abbaabb", "abbbab"]),
        st.integers(1, 6),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(arrivals)
def test_what_a_tenant_observes_of_its_requests_does_not_depend_on_other_tenants(
    drawn: list[tuple[bool, int, str, str, int, bool]],
) -> None:
    everybody = []
    for number, (has_twin, step, tenant, *rest) in enumerate(drawn):
        if has_twin:  # somebody else asks the very same, just before
            everybody.append(Arrival(step, f"twin{number}", "y", *rest))
        everybody.append(Arrival(step, f"r{number}", tenant, *rest))
    own = [arrival for arrival in everybody if arrival.tenant == "x"]

    assert run_scheduler(everybody)["x"] == run_scheduler(own)["x"]


# The scenarios that went wrong elsewhere


def test_a_public_prefix_of_forty_blocks_is_shared_and_private_tails_are_not() -> None:
    cache = build_cache(num_blocks=200, block_size=4)
    public = "".join(chr(ord("a") + n % 23) for n in range(160))
    assert cache.declare_public(NAMESPACE, TokenIds(tokens(public))) == 40
    tail = "TAILTAILTAIL"

    assert serve(cache, public + tail, domain=ALICE) == 0
    assert serve(cache, public + tail, domain=BOB) == 160, "the tail is another's"
    assert serve(cache, public + tail, domain=CREW) == 160
    assert serve(cache, public + tail, domain=ALICE) == 171, "and one's own is found"

    assert cache.usage_of(PUBLIC) == DomainUsage(
        num_pinned_blocks=0, num_cached_blocks=40
    )
    for domain in DOMAINS:
        assert cache.usage_of(domain).num_cached_blocks == 3
    check_cache(cache, [])


def test_a_declared_boundary_inside_a_block_leaves_that_block_private() -> None:
    cache = build_cache(num_blocks=60, block_size=4)
    assert cache.declare_public(NAMESPACE, TokenIds(tokens("abcdefghij"))) == 2
    serve(cache, "abcdefghijklmn", domain=ALICE)

    assert serve(cache, "abcdefghijklmn", domain=BOB) == 8
    check_cache(cache, [])


@pytest.mark.parametrize("probe", ["secret", "secreX", "secr", "s"])
def test_probing_for_a_secret_looks_like_asking_for_anything(probe: str) -> None:
    """Guesses of another tenant's prompt are as cold as any text (CVE-2025-46570)."""
    cache = build_cache(num_blocks=60, block_size=1)
    serve(cache, "secretsecret", domain=ALICE)
    lease = hold(cache, "secretsecrets", domain=ALICE)

    assert cached(cache, probe + "?", domain=BOB) == 0
    assert cached(cache, probe + "?", domain=CREW) == 0
    assert cache.usage_of(BOB) == DomainUsage(num_pinned_blocks=0, num_cached_blocks=0)
    assert serve(cache, probe + "?", domain=BOB) == 0
    assert cached(cache, probe + "?", domain=ALICE) == len(probe) - probe.count("X")
    check_cache(cache, [lease])


def test_usage_tells_a_domain_of_its_own_blocks_only() -> None:
    cache = build_cache(num_blocks=60, block_size=2)
    cache.declare_public(NAMESPACE, TokenIds(tokens("pq")))
    before = cache.usage_of(ALICE)
    lease = hold(cache, "pqabcd", domain=BOB)
    serve(cache, "pqxy", domain=CREW)

    assert cache.usage_of(ALICE) == before
    assert cache.usage_of(BOB) == DomainUsage(num_pinned_blocks=2, num_cached_blocks=0)
    assert cache.usage_of(CREW) == DomainUsage(num_pinned_blocks=0, num_cached_blocks=1)
    cache.release(lease, 0.0)
    assert cache.usage_of(BOB) == DomainUsage(num_pinned_blocks=0, num_cached_blocks=2)


def test_usage_of_all_domains_adds_up_to_the_tree() -> None:
    stage, _ = play_walk(3, num_blocks=70)
    domains = {node.domain for node in stage.cache.tree.nodes()}
    usages = [stage.cache.usage_of(domain) for domain in domains]

    total = sum(each.num_pinned_blocks + each.num_cached_blocks for each in usages)
    assert total == stage.cache.tree.num_blocks
    assert len(domains) > 2


# Who may ask


@pytest.mark.parametrize("make", [lambda: PUBLIC, lambda: Domain(PUBLIC.kind, "")])
def test_a_request_cannot_ask_in_the_name_of_the_public(
    make: Callable[[], Domain],
) -> None:
    with pytest.raises(RequestError, match="declared by the operator") as error:
        RequestSpec(**spec_facts() | {"domain": make()})
    assert error.value.field == "domain"


@pytest.mark.parametrize("name", ["public", "PUBLIC", " ", "\0", "operator"])
def test_no_name_makes_a_domain_public(name: str) -> None:
    cache = build_cache(num_blocks=40, block_size=2)
    for domain in (Domain.private(name), Domain.group(name)):
        assert domain != PUBLIC
        serve(cache, "abcdef", domain=domain)
    assert cached(cache, "abcdef", domain=ALICE) == 0


def spec_facts() -> dict[str, Any]:
    spec = build_spec()
    names = ("request_id", "prompt", "max_new_tokens", "arrival_s", "domain")
    return {name: getattr(spec, name) for name in (*names, "namespace")}


# A block is what all before it make it (I19)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_an_equal_block_behind_another_prefix_is_a_miss(block_size: int) -> None:
    cache = build_cache(num_blocks=200, block_size=block_size)
    serve(cache, "aaaa" + "same" * 3)

    assert cached(cache, "bbbb" + "same" * 3) == 0
    assert cached(cache, "baaa" + "same" * 3) == 0
    assert cached(cache, "aaaa" + "same" * 3) == 15


@pytest.mark.parametrize("position", range(12))
def test_a_match_ends_at_the_first_token_that_differs(position: int) -> None:
    cache = build_cache(num_blocks=60, block_size=4)
    text = "abcdefghijkl"
    serve(cache, text)
    other = text[:position] + "X" + text[position + 1 :]

    assert cached(cache, other + "m") == position


@pytest.mark.parametrize("num_before", [1, 3, 4, 8])
def test_equal_blocks_at_another_place_are_a_miss(num_before: int) -> None:
    cache = build_cache(num_blocks=60, block_size=4)
    serve(cache, "same" * 4)

    expected = 16 if num_before % 4 == 0 else 0  # then it is the very same prompt
    found = cached(cache, ("same" * 4)[-num_before:] + "same" * 4)
    assert found == expected
    assert cached(cache, "x" * num_before + "same" * 4) == 0


def test_the_same_tokens_from_another_start_are_another_namespace() -> None:
    cache = build_cache(num_blocks=60, block_size=4)
    serve(cache, "abcdefgh", namespace=NAMESPACE)

    assert serve(cache, "abcdefgh", namespace=OTHER_NAMESPACE) == 0
    assert serve(cache, "abcdefgh", namespace=NAMESPACE) == 7
    assert serve(cache, "abcdefgh", namespace=OTHER_NAMESPACE) == 7


@given(
    st.lists(
        st.tuples(st.sampled_from(DOMAINS), st.text("ab", min_size=1, max_size=10)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
)
def test_the_way_to_a_block_spells_all_that_is_before_it(
    requests: list[tuple[Domain, str]], block_size: int
) -> None:
    cache = build_cache(num_blocks=400, block_size=block_size)
    asked = {(domain, tokens(text)) for domain, text in requests}
    for domain, text in requests:
        serve(cache, text, domain=domain)

    for node in cache.tree.nodes():
        prefix = spelled(node)
        assert len(prefix) % (block_size * TOKEN_BYTES) == 0
        assert any(
            domain == node.domain and ids.startswith(prefix) for domain, ids in asked
        )
