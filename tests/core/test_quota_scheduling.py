"""Quotas, hints and look-ahead under a scheduler: everybody gets what is his, in the end.

The transparency oracle of the scheduler's own walks applies here as well: whatever a
caller hints and whatever quotas there are, tokens are those of a request alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from stemkv.core import (
    CacheConfig,
    Domain,
    Fcfs,
    FinishReason,
    Lru,
    PrefixCache,
    RequestId,
    RequestSpec,
    Sample,
    Scheduler,
    SchedulerConfig,
    StepResult,
    TokenIds,
)
from stemkv.core.books.entry import MissReason
from stemkv.core.prefix.events import BlocksEvicted, BlocksRefused
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.table import Lease
from stemkv.core.retention.policies import EVICTIONS, EvictionConfig
from stemkv.core.retention.quota import Quota, QuotaConfig
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.events import (
    RequestAborted,
    RequestFinished,
    RequestPreempted,
)
from stemkv.core.schedule.request import RequestState
from stemkv.errors import ConfigError, PromptTooLong
from tests.core.bookkeeping import BookedDriver
from tests.core.scheduling import NAMESPACE, Model, namespace_of, of_type, tokens
from tests.core.test_scheduler_machine import (
    ADAPTERS,
    MAX_STEM,
    PUBLIC_TEXT,
    STEMS,
    STOPS,
    TENANTS,
    abandon,
    cancel,
    retire_for_all,
    roll_out,
)
from tests.core.watching import WatchedCache
from tests.seeds import slow

CREW = Domain.group("crew")
DOMAINS = [*map(Domain.private, TENANTS), CREW]
HINTS = [
    NO_HINTS,
    Hints(session="s"),
    Hints(session="s", ends_session=True),
    Hints(session="t", ends_session=True),
    Hints(ephemeral_from=4),
    Hints(session="t", ephemeral_from=0),
    Hints(next_use_s=3.0),
    Hints(next_use_s=float("inf")),
]


class QuotaDriver(BookedDriver):
    """A driver whose cache has quotas, and objects when a block goes out of turn."""

    cache: WatchedCache

    def __init__(
        self,
        quotas: QuotaConfig | None,
        policy: str = "lru",
        *,
        has_spans: bool = False,
        **kw: Any,
    ) -> None:
        def make_cache(config: CacheConfig) -> PrefixCache:
            make_policy = EvictionConfig(name=policy).make(config)
            return WatchedCache(config, make_policy, quotas=quotas, has_spans=has_spans)

        super().__init__(make_cache=make_cache, **kw)
        self.quotas = quotas

    def most_blocks(self, domain: Domain) -> int:
        """What a request may hold, by the words of the quota."""
        total = self.cache.config.num_blocks
        if self.quotas is None:
            return total
        promised = self.quotas.num_promised_blocks
        return total - promised + self.quotas.of(domain).floor_blocks

    def add_or_refuse(
        self, prompt: str, domain: Domain, *, max_new_tokens: int, **spec: Any
    ) -> None:
        """Add a request; it is refused exactly if it could never run."""
        num_slots = len(tokens(prompt)) + max_new_tokens - 1
        num_blocks = self.cache.num_blocks_for(num_slots)
        request_id = f"q{len(self.requests)}-{len(self.plans)}"
        spec |= {"max_new_tokens": max_new_tokens}
        if num_blocks > self.most_blocks(domain):
            with pytest.raises(PromptTooLong, match=f"need {num_blocks} blocks"):
                self.add_in(request_id, prompt, domain, **spec)
            assert request_id not in self.requests
        else:
            self.add_in(request_id, prompt, domain, **spec)

    def check_baseline(self) -> None:
        """What is retained at the end can all be had again, by whoever may."""
        promised = self.cache.available_to(CREW) - self.cache.pool.num_free
        assert self.cache.evict(promised, self._tick(), domain=CREW) >= promised
        kept = {order.namespace for order in self.cache.residency.standing._keeps}
        for namespace in sorted({*self.cache.tree.roots(), *kept}):
            self.cache.retire(namespace, self._tick())
        super().check_baseline()
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """No mark outlives its node."""
        retention = self.cache.keeper
        assert not retention._session_of
        assert not retention._nodes_of
        assert not retention._ephemeral
        assert not retention._ended
        assert not retention._kept_until
        assert not retention._awaited
        assert not retention._stock_of
        assert not self.cache.residency.standing._keeps


def quotas_of(rng: random.Random, num_blocks: int) -> QuotaConfig:
    floors = [rng.randrange(num_blocks // 5 + 1) for _ in range(4)]
    return QuotaConfig(
        quotas={
            domain: Quota(
                floor_blocks=floor,
                cap_blocks=rng.choice([None, None, floor + rng.randrange(4)]),
                weight=rng.choice([0.5, 1.0, 2.0]),
            )
            for domain, floor in zip(DOMAINS, floors[:3], strict=False)
        },
        public_blocks=floors[3],
    )


def lives(seed: int, *, is_hinted: bool = True, num_acts: int = 200) -> QuotaDriver:
    """Everything that can happen, with an operator who orders and interferes."""
    rng = random.Random(seed)
    has_spans = rng.random() < 0.5
    stems = STEMS if has_spans else [stem.lower() for stem in STEMS]
    block_size = rng.randint(1, 4)
    num_blocks = rng.randint(24, 48) // block_size
    driver = QuotaDriver(
        quotas_of(rng, num_blocks) if rng.random() < 0.8 else None,
        rng.choice(["lru", "reuse_index", *EVICTIONS]),
        has_spans=has_spans,
        num_blocks=num_blocks,
        block_size=block_size,
        token_budget=rng.choice([4, 9, 24]),
        max_num_running=rng.randint(1, 8),
        max_steps_awaiting=rng.choice([0, 2, 256]),
        watermark=rng.choice([0.0, 0.2]),
        lookahead=rng.choice([0, 2, 32]),
        stops=rng.choice(STOPS),
        max_history_blocks=rng.choice([None, 8]),
    )
    with suppress(ConfigError):
        driver.declare_public(PUBLIC_TEXT)
    for _ in range(num_acts):
        if rng.random() < 0.3 and len(driver.scheduler.requests()) < 20:
            prompt = rng.choice(stems)[: rng.randint(1, MAX_STEM)]
            prompt += "".join(rng.choices("abc", k=rng.choice([0, 0, 1, 3])))
            hints = rng.choice(HINTS)
            driver.add_or_refuse(
                prompt,
                rng.choice(DOMAINS),
                max_new_tokens=rng.randint(1, 14),
                num_samples=rng.choice(
                    [1, 1, 1, min(3, driver.config.max_num_running)]
                ),
                tenant=rng.choice([None, *TENANTS]),
                hints=hints if is_hinted else NO_HINTS,
            )
        operate(driver, rng, stems)
        plan = driver.schedule()
        if rng.random() < 0.05 and driver.scheduler.requests():
            cancel(driver, rng.choice(driver.scheduler.requests()).request_id)
        if rng.random() < 0.03:
            abandon(driver, rng.randint(0, len(plan.chunks)))
        else:
            driver.execute_and_commit(plan)
        driver.check()
    return driver


def operate(driver: QuotaDriver, rng: random.Random, stems: Sequence[str]) -> None:
    """What an operator does between steps."""
    driver.lift_due()
    scheduler, cache = driver.scheduler, driver.cache
    namespace = namespace_of(Model(weights=driver.num_fences))
    requests = scheduler.requests()
    match rng.randrange(60):
        case 0 if requests:
            adapter = rng.choice(ADAPTERS)
            driver.restart(rng.choice(requests).request_id, adapter)
        case 1:
            retire_for_all(driver, namespace)
        case 2:
            roll_out(driver, rng.choice(["finish", "finish", "restart", "abort"]))
        case 3:
            with suppress(ConfigError):
                driver.declare_public(PUBLIC_TEXT[: rng.randint(0, 10)], namespace)
        case 4 | 5 | 6:
            prefix = tokens(rng.choice(stems)[: rng.randint(1, MAX_STEM)])
            until = driver.now + rng.choice([-1.0, 9.0, 99.0])
            with suppress(ConfigError):
                cache.keep(
                    namespace, rng.choice(DOMAINS), prefix, until=until, now=driver.now
                )
        case 7:
            cache.evict(rng.randint(1, 3), driver._tick())
        case 8:
            cache.end_session(rng.choice(DOMAINS), rng.choice("st"), driver._tick())
        case 9 if requests:
            driver.cut_off(rng.choice(requests).request_id)


@pytest.mark.parametrize("seed", [*range(12), *slow(range(12, 20))])
def test_everybody_gets_to_the_end_whatever_quotas_and_hints_there_are(
    seed: int,
) -> None:
    driver = lives(seed)

    driver.finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_everybody_gets_to_the_end_in_many_longer_lives(seed: int) -> None:
    lives(seed, num_acts=600).finish()


def test_the_lives_meet_everything_they_are_meant_to_meet() -> None:
    drivers = [lives(seed) for seed in range(16)]

    with_quotas = [driver for driver in drivers if driver.quotas is not None]
    assert 8 < len(with_quotas) < 16
    events = [event for driver in drivers for event in driver.events]
    for kind in (BlocksEvicted, BlocksRefused, RequestPreempted, RequestAborted):
        assert of_type(events, kind), f"no {kind.__name__}"
    for tier in ("ended", "ordinary", "awaited", "kept"):
        assert sum(d.cache.num_gone(tier) for d in drivers), f"nothing {tier} went"
    assert any(e.domain == CREW for e in of_type(events, BlocksEvicted))
    reasons = {
        miss.reason for d in drivers for entry in d.entries for miss in entry.misses
    }
    assert reasons == set(MissReason)


def outputs_of(driver: QuotaDriver) -> dict[str, str]:
    driver.run()
    return dict(driver.outputs)


@pytest.mark.parametrize("seed", [*range(2), *slow(range(2, 4))])
def test_quotas_policies_and_hints_never_change_a_token(seed: int) -> None:
    """One list of requests, however memory is divided and whatever is said."""
    rng = random.Random(seed)
    wanted = [
        (
            rng.choice(STEMS)[: rng.randint(1, MAX_STEM)] + rng.choice(["", "b", "ca"]),
            rng.choice(DOMAINS),
            rng.randint(1, 9),
            rng.choice(HINTS),
        )
        for _ in range(30)
    ]
    floors = {domain: Quota(floor_blocks=3, cap_blocks=4) for domain in DOMAINS}
    outputs = []
    for quotas in (None, QuotaConfig(quotas=floors, public_blocks=2)):
        for policy in EVICTIONS:
            for is_hinted in (False, True):
                driver = QuotaDriver(
                    quotas, policy, has_spans=True, num_blocks=28, block_size=3
                )
                for number, (prompt, domain, num_new, hints) in enumerate(wanted):
                    driver.add_in(
                        f"r{number}",
                        prompt,
                        domain,
                        max_new_tokens=num_new,
                        hints=hints if is_hinted else NO_HINTS,
                    )
                    driver.step()
                outputs.append(outputs_of(driver))
                driver.finish()

    assert all(each == outputs[0] for each in outputs)


# Whoever was taken in runs in the end


def crowded(num_blocks: int, quotas: QuotaConfig, **limits: Any) -> QuotaDriver:
    """All floors and the public budget are filled, and the rest as well."""
    driver = QuotaDriver(quotas, num_blocks=num_blocks, block_size=1, **limits)
    driver.declare_public("dddddd"[: quotas.public_blocks])
    for number, domain in enumerate(DOMAINS * 2):
        for letter in "abc":
            prompt = letter + "abc"[number % 3] + letter * 4
            driver.add_in(f"{number}{letter}", prompt, domain, max_new_tokens=1)
        driver.add_in(f"{number}d", "dddddd", domain, max_new_tokens=1)
    driver.run()
    return driver


FLOORS = QuotaConfig(
    quotas={
        domain: Quota(floor_blocks=num_blocks)
        for domain, num_blocks in zip(DOMAINS, (5, 3, 0, 2), strict=True)
    },
    public_blocks=4,
)


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda domain: domain.name)
@pytest.mark.parametrize("num_prompt", [1, 5, 10])
def test_the_largest_request_runs_however_floors_are_filled(
    domain: Domain, num_prompt: int
) -> None:
    driver = crowded(28, FLOORS)
    most = driver.most_blocks(domain)
    prompt = "ddddaaaaaa"[:num_prompt]
    for name in ("first", "second"):
        driver.add_in(name, prompt, domain, max_new_tokens=most + 1 - num_prompt)
    with pytest.raises(
        PromptTooLong,
        match=f"need {most + 1} blocks but the cache has 28 less {28 - most} promised "
        f"to others",
    ):
        driver.add_in("third", "a", domain, max_new_tokens=most + 1)

    driver.run()

    for name in ("first", "second"):
        assert driver.reason(name) is FinishReason.LENGTH
    driver.finish()


@pytest.mark.parametrize("max_num_running", [1, 2, 6])
def test_large_requests_of_all_domains_at_once_all_run(max_num_running: int) -> None:
    driver = crowded(28, FLOORS, max_num_running=max_num_running)
    for number in range(3):
        for domain in DOMAINS:
            num_prompt = 2 + 3 * number
            driver.add_in(
                f"large {number} {domain.name}",
                "abcabcabcabc"[:num_prompt],
                domain,
                max_new_tokens=driver.most_blocks(domain) + 1 - num_prompt,
            )

    driver.run()

    assert driver.scheduler.num_waiting == 0
    driver.finish()


def retire_it(driver: QuotaDriver) -> None:
    driver.retire_for_all()


def cut_it_off(driver: QuotaDriver) -> None:
    driver.cut_off("large")


@pytest.mark.parametrize("act", [retire_it, cut_it_off])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_a_request_that_loses_its_public_prefix_runs_all_the_same(
    act: Callable[[QuotaDriver], None], num_steps: int
) -> None:
    """Public blocks of its prompt make no larger request possible than there may be."""
    driver = QuotaDriver(QuotaConfig(public_blocks=4), num_blocks=10, block_size=1)
    driver.declare_public("dddd")
    driver.serve("before", "ddddd", tenant="y", max_new_tokens=1)
    with pytest.raises(PromptTooLong):
        driver.add("larger", "dddd", tenant="x", max_new_tokens=4)
    driver.add("large", "dddd", tenant="x", max_new_tokens=3)
    for _ in range(num_steps):
        driver.step()
    if driver.scheduler.request(RequestId("large")) is not None:
        act(driver)
    driver.run()

    assert driver.reason("large") is FinishReason.LENGTH


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_request_that_its_new_domain_cannot_hold_ends_and_stops_nobody(
    num_steps: int,
) -> None:
    quotas = QuotaConfig(quotas={DOMAINS[0]: Quota(floor_blocks=6)})
    driver = QuotaDriver(quotas, num_blocks=10, block_size=1)
    driver.add_in("large", "abcabca", DOMAINS[0], max_new_tokens=4)
    driver.add_in("small", "ab", DOMAINS[1], max_new_tokens=3)
    for _ in range(num_steps):
        driver.step()

    driver.scheduler.restart(
        RequestId("large"), NAMESPACE, None, driver.now, domain=DOMAINS[1]
    )
    driver._note(driver.scheduler.take_events())

    assert driver.reason("large") is FinishReason.REPLACED
    assert driver.requests["large"].state is RequestState.ABORTED
    driver.check()
    driver.run()
    assert driver.reason("small") is FinishReason.LENGTH
    driver.check_books()


def test_a_request_that_its_new_domain_can_hold_begins_again_there() -> None:
    quotas = QuotaConfig(quotas={DOMAINS[0]: Quota(floor_blocks=6)})
    driver = QuotaDriver(quotas, num_blocks=10, block_size=1)
    driver.add_in("r", "aba", DOMAINS[0], max_new_tokens=2)
    driver.scheduler.restart(
        RequestId("r"), NAMESPACE, None, driver.now, domain=DOMAINS[1]
    )

    assert driver.requests["r"].state is RequestState.WAITING
    assert driver.scheduler.num_waiting == 1


# Beside whom


X, Y = DOMAINS[0], DOMAINS[1]


def beside(seed: int, others: str, policy: str) -> tuple[list[int], list[int]]:
    """What X hits and loses within its floor, beside somebody else.

    X holds at most four blocks at a time and retains no more than its floor covers. The
    other may do as it likes with the rest of the memory.
    """
    rng, their = random.Random(seed), random.Random(f"{seed} {others}")
    floor_blocks, num_rest = 10, 12
    config = CacheConfig(num_blocks=floor_blocks + 4 + num_rest, block_size=1)
    quotas = QuotaConfig(
        quotas={X: Quota(floor_blocks=floor_blocks, cap_blocks=floor_blocks)}
    )
    cache = PrefixCache(
        config, Retention.of(EvictionConfig(name=policy).make(config), config, quotas)
    )
    hits: list[int] = []
    losses: list[int] = []

    def note(event: object) -> None:
        if isinstance(event, BlocksEvicted) and event.domain == X:
            losses.append(event.num_blocks)

    cache.subscribe(note)
    held: list[Lease] = []

    def serve(domain: Domain, text: str, hints: Hints, now: float) -> Lease | None:
        lease = cache.acquire(
            NAMESPACE,
            domain,
            tokens(text).buffer,
            Demand(num_slots=len(text)),
            hints=hints,
            now=now,
        )
        if lease is not None:
            cache.publish(lease, tokens(text).buffer, len(text), now)
        return lease

    for now in range(150):
        text = rng.choice(["abca", "abcb", "bbca", "cabc", "ccca", "acca"])
        text = text[: rng.randint(1, 4)]
        hints = rng.choice(HINTS)
        lease = serve(X, text, hints, float(now))
        assert lease is not None, "there is room within its floor"
        hits.append(lease.num_matched_tokens)
        cache.release(lease, now + 0.5)
        losses.append(0)  # so that it matters when it loses
        if rng.random() < 0.1:
            cache.end_session(X, "s", now + 0.5)
        if others == "nobody":
            continue
        for _ in range(their.randrange(4)):
            size = their.randint(1, 6)
            num_held = sum(len(each.table) for each in held)
            if held and (num_held + size > num_rest or their.random() < 0.4):
                cache.release(held.pop(their.randrange(len(held))), now + 0.6)
            elif num_held + size <= num_rest:
                prompt = "".join(their.choices("abcdefgh", k=size))
                if others == "copies":
                    prompt = text
                other = serve(Y, prompt, their.choice(HINTS), now + 0.6)
                if other is not None:
                    held.append(other)
            if their.random() < 0.1:
                cache.end_session(Y, "s", now + 0.7)
                cache.evict(their.randrange(9), now + 0.7, domain=Y)
    return hits, losses


@pytest.mark.parametrize("policy", EVICTIONS)
@pytest.mark.parametrize("seed", [*range(3), *slow(range(3, 6))])
def test_within_its_floor_a_domain_cannot_tell_what_others_do(
    seed: int, policy: str
) -> None:
    """The same hits and the same losses, one by one, whatever the neighbour's (I3)."""
    alone = beside(seed, "nobody", policy)

    assert sum(alone[0]) > 100
    assert sum(alone[1]) > 20
    for others in ("strangers", "copies"):
        assert beside(seed, others, policy) == alone


class Flood:
    """Sessions of one tenant, beside another who asks for more than there is."""

    def __init__(self, *, floods: bool, floor_blocks: int, num_blocks: int) -> None:
        rng = random.Random(7)
        config = CacheConfig(num_blocks=num_blocks, block_size=4)
        quotas = QuotaConfig(quotas={X: Quota(floor_blocks=floor_blocks)})
        self.cache = PrefixCache(config, Retention.of(Lru, config, quotas))
        self.scheduler = Scheduler(
            SchedulerConfig(token_budget=256, max_num_running=32), self.cache, Fcfs()
        )
        self.hits: dict[str, int] = {}
        chats = [[chat] * 8 for chat in range(4)]
        for step in range(900):
            if step % 12 == 0:
                number = step // 12
                chat = chats[number % 4]
                chat += [rng.randrange(9) for _ in range(20)]
                if len(chat) > 100:
                    del chat[8:]
                self._add(f"x{number}", X, [*chat, 1], 3, step)
            if floods and self.scheduler.num_waiting < 6:
                prompt = [rng.randrange(99) for _ in range(rng.choice([5, 12, 20]))]
                self._add(f"y{step}", Y, prompt, rng.choice([20, 40]), step)
            self._step(float(step))

    def _add(
        self, name: str, domain: Domain, prompt: list[int], num_new: int, step: int
    ) -> None:
        self.scheduler.add(
            RequestSpec(
                request_id=RequestId(name),
                prompt=TokenIds.from_ids(prompt),
                max_new_tokens=num_new,
                arrival_s=float(step),
                domain=domain,
                namespace=NAMESPACE,
            )
        )

    def _step(self, now: float) -> None:
        plan = self.scheduler.schedule(now)
        samples = {c.request_id: (Sample(7),) for c in plan.chunks if c.num_samples}
        for event in self.scheduler.commit(plan, StepResult(samples), now + 0.5):
            if isinstance(event, RequestFinished) and event.request_id[0] == "x":
                self.hits[event.request_id] = event.counts.reused


@pytest.mark.parametrize("num_blocks", [150, 180])
def test_a_flood_leaves_a_tenant_the_hits_that_its_floor_covers(
    num_blocks: int,
) -> None:
    """Not even running requests, which cannot be evicted, squeeze it out."""
    solo = Flood(floods=False, floor_blocks=120, num_blocks=400).hits
    flooded = Flood(floods=True, floor_blocks=120, num_blocks=num_blocks).hits
    unprotected = Flood(floods=True, floor_blocks=0, num_blocks=num_blocks).hits

    assert len(flooded) > 60
    expected = sum(solo[name] for name in flooded)
    assert sum(flooded.values()) >= 0.98 * expected
    assert sum(unprotected.values()) < 0.5 * expected, "or this says nothing"
