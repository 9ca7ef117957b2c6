"""Orders: who gets the next chunk, and the bounds that `fair` promises.

The scheduler is the real one, requests compute virtual KV (`tests.core.scheduling`) or
nothing at all (`play`, for loads of thousands of tokens). Bounds are in work, so no clock
is read.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core import (
    CacheConfig,
    Domain,
    FittedCost,
    Ledger,
    LedgerEntry,
    Lru,
    OrderConfig,
    PrefixCache,
    Request,
    RequestId,
    RequestSpec,
    Sample,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
    TokenIds,
)
from stemkv.core.books.cost import StepShape
from stemkv.core.books.waits import WaitReason
from stemkv.core.check import check_scheduler
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.events import RequestPreempted
from stemkv.core.schedule.order.keys import by_cached
from stemkv.core.schedule.order.queue import RequestQueue
from stemkv.core.schedule.order.ranking import Ranking, request_of
from stemkv.core.schedule.orders import ORDERS
from stemkv.core.schedule.request import RequestState
from stemkv.errors import ConfigError
from stemkv.measure.scheduling import TenantGap
from tests.core.scheduling import COSTS, NAMESPACE, Driver, build_spec

BLOCK = 16
SLO = {"chat": 0.05}


def config_of(name: str, **changes: Any) -> OrderConfig:
    slo: dict[str, Any] = {"slo_ttft_s": SLO} if name == "deadline" else {}
    return OrderConfig(name=name, **slo, **changes)


EVERY_ORDER = tuple(
    config_of(name, quantum=64, pauses_prefills=pauses)
    for name in ORDERS
    for pauses in (
        (True, False) if name in ("fair", "residual", "deadline") else (True,)
    )
)


def named(config: OrderConfig) -> str:
    return f"{config.name}-{'pausing' if config.pauses_prefills else 'not-pausing'}"


# A load of long prompts


@dataclass
class Load:
    """Arrivals by step, and what became of them."""

    order: OrderConfig
    num_blocks: int = 4_000
    token_budget: int = 256
    max_num_running: int = 64
    step_time_s: float | None = None
    costs: FittedCost = COSTS
    entries: list[LedgerEntry] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(BLOCK, self.costs)
        cache = PrefixCache(
            CacheConfig(num_blocks=self.num_blocks, block_size=BLOCK),
            Retention(Lru),
            watchers=(self.ledger,),
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                token_budget=self.token_budget,
                max_num_running=self.max_num_running,
                step_time_s=self.step_time_s,
            ),
            cache,
            self.order.make(self.costs),
            costs=self.costs,
            ledger=self.ledger,
        )
        self.now = 0.0
        self.numbers = count()
        self.leaves_idle = (
            False  # the last step, a place and tokens that somebody wants
        )
        self.num_preempted = 0

    def add(
        self,
        prompt: Sequence[int],
        *,
        tenant: str = "a",
        domain: str = "all",
        shares: bool = True,
        max_new_tokens: int = 1,
        num_samples: int = 1,
        request_class: str | None = None,
    ) -> str:
        request_id = f"r{next(self.numbers)}"
        self.scheduler.add(
            RequestSpec(
                request_id=RequestId(request_id),
                prompt=TokenIds.from_ids(list(prompt)),
                max_new_tokens=max_new_tokens,
                num_samples=num_samples,
                arrival_s=self.now,
                domain=Domain.group(domain),
                namespace=NAMESPACE if shares else None,
                tenant=tenant,
                request_class=request_class,
            )
        )
        return request_id

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now)
        self.plans.append(plan)
        num_preempted = self.num_preempted
        self.leaves_idle = (
            self.scheduler.num_waiting > 0
            and self.scheduler.num_running < self.max_num_running
            and plan.num_tokens < self.token_budget
        )
        for chunk in plan.chunks:
            if chunk.request_id not in self.starts:
                self.starts.append(chunk.request_id)
        samples = {
            chunk.request_id: (Sample(7),) * chunk.num_samples
            for chunk in plan.chunks
            if chunk.num_samples
        }
        self.now += 0.01
        events = self.scheduler.commit(plan, StepResult(samples), self.now)
        self.num_preempted += sum(isinstance(e, RequestPreempted) for e in events)
        if self.num_preempted > num_preempted:  # what that frees is for the next step
            self.leaves_idle = False
        self.entries += self.ledger.take_entries()
        return plan

    def run(self, gap: TenantGap | None = None) -> None:
        while self.scheduler.has_work:
            plan = self.step()
            assert plan.chunks, "somebody is in flight and nothing is planned"
            if gap is not None:
                gap.note(self.scheduler.service.tenants)

    def ratio(self, request_id: str) -> float:
        return next(
            e.share.ratio or 0.0
            for e in self.entries
            if e.request_id == request_id and e.share is not None
        )

    @property
    def worst_ratio(self) -> float:
        return max((e.share.ratio or 0.0) for e in self.entries if e.share is not None)


class Author:
    """Prompts that share a long prefix, or nothing."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._next = 0

    def new(self, num_tokens: int) -> list[int]:
        self._next += 1_000_000
        return [self._next + place for place in range(num_tokens)]


def poisson_load(load: Load, seed: int, *, tenants: Sequence[str], num: int) -> None:
    """Arrivals a little faster than they are served, most of them cheap."""
    author = Author(seed)
    prefix = author.new(40 * BLOCK)
    chance = author.chance
    for _ in range(num):
        for _ in range(chance.choice([0, 0, 1, 1, 2])):
            tenant = chance.choice(tenants)
            if chance.random() < 0.6:
                load.add(prefix + author.new(chance.randint(1, 60)), tenant=tenant)
            else:
                load.add(author.new(chance.randint(50, 1_200)), tenant=tenant)
        load.step()


@pytest.mark.parametrize("lane", [1, 2, 4])
@pytest.mark.parametrize("pauses", [True, False], ids=["pausing", "not-pausing"])
def test_nobody_waits_for_more_than_k_times_what_was_ahead(
    lane: int, pauses: bool
) -> None:
    worst = 0.0
    for seed in range(4):
        load = Load(OrderConfig(lane=lane, quantum=512, pauses_prefills=pauses))
        poisson_load(load, seed, tenants="aaab", num=150)
        load.run()
        for entry in load.entries:
            share = entry.share
            assert share is not None
            assert share.own_run is not None
            # The lane's credit is spent in whole chunks, so one may be ahead of it; a
            # prefill that is not paused is one chunk. The half is for lanes that serve
            # the leader of a held request: on small backlogs it shows, on those of
            # `bench.scheduling` the whole bound is k + 0.5.
            chunk = load.token_budget if pauses else 1_200
            most = (lane + 0.5) * share.own_backlog + lane * chunk
            assert share.own_run <= most
        worst = max(worst, load.worst_ratio)
    assert worst > 1.0  # somebody was overtaken, so something was bounded


def test_without_a_lane_a_large_request_waits_as_long_as_small_ones_come() -> None:
    def wait_of_the_large(order: OrderConfig) -> float:
        load = Load(order)
        author = Author(0)
        for _ in range(4):
            load.add(author.new(200))
        large = load.add(author.new(2_000))
        for _ in range(120):
            load.add(author.new(250))  # as much as a step takes
            load.step()
        load.run()
        return load.ratio(large)

    assert wait_of_the_large(OrderConfig(lane=4, pauses_prefills=False)) <= 4.5
    assert wait_of_the_large(config_of("residual", pauses_prefills=False)) > 4.5


@pytest.mark.parametrize("shares", [True, False], ids=["cold", "unsharable"])
def test_a_flood_of_cheap_hits_keeps_nobody_waiting_beyond_the_bound(
    shares: bool,
) -> None:
    author = Author(3)
    prefix = author.new(60 * BLOCK)
    load = Load(OrderConfig(lane=4))
    load.add([*prefix, 1])
    load.run()
    cold = load.add(author.new(1_500), shares=shares)
    for _ in range(200):
        for _ in range(3):
            load.add(prefix + author.new(80))
        load.step()
    load.run()

    assert load.ratio(cold) <= 4.5
    assert load.starts.index(cold) < len(load.starts) - 100  # it did not come last


@pytest.mark.parametrize("pauses", [True, False], ids=["pausing", "not-pausing"])
def test_backlogged_tenants_are_never_three_quanta_apart(pauses: bool) -> None:
    order = OrderConfig(quantum=2_048, pauses_prefills=pauses)
    load = Load(order)
    gap = TenantGap("ab", decode_weight=order.decode_weight)
    author = Author(5)
    for index in range(120):
        load.add(
            author.new(author.chance.randint(50, 1_000)),
            tenant="a" if index % 3 else "b",
            max_new_tokens=author.chance.randint(1, 20),
        )
    load.run(gap)

    assert 0 < gap.largest <= 3 * 2_048


def test_a_weight_of_two_is_served_twice_as_much() -> None:
    load = Load(OrderConfig(quantum=512, decode_weight=0.0, weights={"a": 2.0}))
    author = Author(6)
    for index in range(160):
        load.add(author.new(400), tenant="ab"[index % 2])
    for _ in range(100):
        load.step()

    served = load.scheduler.service.tenants
    assert served["a"].num_prefill / served["b"].num_prefill == pytest.approx(
        2, rel=0.1
    )


def test_a_lane_that_is_not_paused_pays_for_the_whole_prompt_it_begins() -> None:
    """Else every second request is the oldest one, and the order first come."""
    load = Load(OrderConfig(lane=4, pauses_prefills=False), token_budget=128)
    author = Author(7)
    large = [load.add(author.new(1_280)) for _ in range(6)]
    small = [load.add(author.new(128)) for _ in range(60)]
    load.run()

    before_second_large = load.starts.index(large[1])
    assert before_second_large >= 20  # three times its size was served in between
    assert load.starts.index(small[0]) < load.starts.index(large[1])


# What every order keeps


@pytest.mark.parametrize("order", EVERY_ORDER, ids=named)
def test_every_running_decode_gets_a_token_in_every_step(order: OrderConfig) -> None:
    load = Load(order, step_time_s=0.05)
    author = Author(8)
    for _ in range(6):
        load.add(author.new(30), max_new_tokens=40, request_class="chat")
    for _ in range(12):
        load.step()
    load.add(author.new(4_000))
    while load.scheduler.has_work:
        decoding = {
            request.request_id
            for request in load.scheduler.requests()
            if request.state is RequestState.RUNNING and not request.is_unfinished
        }
        plan = load.step()
        assert decoding <= {chunk.request_id for chunk in plan.chunks}


@pytest.mark.parametrize("order", EVERY_ORDER, ids=named)
def test_no_step_is_predicted_to_take_longer_than_it_may(order: OrderConfig) -> None:
    limit = 0.12
    load = Load(order, step_time_s=limit)
    author = Author(9)
    for index in range(30):
        load.add(
            author.new(author.chance.randint(20, 900)),
            tenant="ab"[index % 2],
            max_new_tokens=4,
        )
    num_limited = 0
    while load.scheduler.has_work:
        unfinished = {
            r.request_id for r in load.scheduler.requests() if r.num_output_tokens == 0
        }
        plan = load.step()
        num_prefill = sum(
            c.num_tokens for c in plan.chunks if c.request_id in unfinished
        )
        seconds = predicted(plan, unfinished)
        assert seconds <= limit or num_prefill <= 64
        num_limited += num_prefill < load.token_budget and seconds > 0.9 * limit
    assert num_limited  # the time was what ended some step


def predicted(plan: StepPlan, prefills: set[RequestId]) -> float:
    shape = StepShape()
    for chunk in plan.chunks:
        is_decode = chunk.request_id not in prefills
        shape.add_chunk(chunk.start, chunk.end, is_decode=is_decode)
    return COSTS.step_seconds(shape)


@pytest.mark.parametrize("order", EVERY_ORDER, ids=named)
@given(seed=st.integers(0, 10_000))
@settings(deadline=None, max_examples=8)
def test_everybody_ends_under_arrivals_aborts_and_memory_pressure(
    order: OrderConfig, seed: int
) -> None:
    chance = random.Random(seed)
    load = Load(order, num_blocks=40, token_budget=64)
    author = Author(seed)
    prefixes = [author.new(6 * BLOCK) for _ in range(3)]
    live: list[str] = []
    for _ in range(80):
        if chance.random() < 0.4:
            prompt = chance.choice([*prefixes, []]) + author.new(chance.randint(1, 150))
            live.append(
                load.add(
                    prompt,
                    tenant=chance.choice("ab"),
                    domain=chance.choice("pq"),
                    shares=chance.random() < 0.8,
                    max_new_tokens=chance.randint(1, 60),
                    request_class=chance.choice(["chat", None]),
                )
            )
        if live and chance.random() < 0.1:
            load.scheduler.cancel(RequestId(chance.choice(live)), load.now)
        if load.scheduler.has_work:
            oldest = next(iter(load.scheduler._lives.running.all), None)
            plan = load.step()
            assert plan.chunks or not load.scheduler.has_work
            check_scheduler(load.scheduler)
            if oldest is not None:  # it ends, and then the next oldest does
                assert oldest.state is not RequestState.PREEMPTED
    load.run()
    assert load.scheduler.num_waiting == 0


# Whatever one tenant sends


@dataclass(frozen=True)
class Ask:
    """What a request is like; all that matters of it to others."""

    num_tokens: int
    max_new_tokens: int
    num_samples: int


PLACES = 8
ASKS = st.builds(
    Ask,
    st.sampled_from([1, 40, 600]),
    st.sampled_from([1, 5, 80]),
    st.sampled_from([1, 2, PLACES]),
)
PLENTY, SHORT = 4_000, 100  # blocks
QUANTUM = 64


def send(load: Load, asks: Sequence[Ask], tenant: str, author: Author) -> list[str]:
    return [
        load.add(
            author.new(ask.num_tokens),
            tenant=tenant,
            max_new_tokens=ask.max_new_tokens,
            num_samples=ask.num_samples,
            request_class="chat",
        )
        for ask in asks
    ]


def steps_alone(order: OrderConfig, asks: Sequence[Ask]) -> int:
    load = Load(order, max_num_running=PLACES)
    send(load, asks, "a", Author(0))
    load.run()
    return len(load.plans)


@pytest.mark.parametrize("order", EVERY_ORDER, ids=named)
def test_samples_that_wait_for_places_keep_nobody_waiting(order: OrderConfig) -> None:
    load = Load(order, max_num_running=16)
    author = Author(0)
    send(load, [Ask(4, 200, 1)], "a", author)
    load.step()
    [gang] = send(load, [Ask(8, 1, 16)], "b", author)
    [other] = send(load, [Ask(8, 1, 1)], "c", author)

    load.step()

    ended = {e.request_id for e in load.entries}
    assert {gang, other} <= ended


@pytest.mark.parametrize("order", EVERY_ORDER, ids=named)
@given(
    running=st.lists(ASKS, max_size=4),
    asks=st.lists(ASKS, min_size=1, max_size=4),
    later=st.lists(ASKS, max_size=4),
)
@settings(deadline=None, max_examples=8)
def test_no_place_is_idle_while_somebody_waits(
    order: OrderConfig, running: list[Ask], asks: list[Ask], later: list[Ask]
) -> None:
    """So nobody waits longer than all that others ask for takes without it."""
    load = Load(order, max_num_running=PLACES)
    author = Author(0)
    send(load, running, "a", author)
    load.step()
    send(load, asks, "b", author)
    load.step()
    send(load, later, "a", author)
    while load.scheduler.has_work:
        load.step()
        assert not load.leaves_idle
    alone = steps_alone(order, running + later) + steps_alone(order, asks)
    assert len(load.plans) <= alone + 2 * (1 + load.num_preempted)


@pytest.mark.parametrize("num_blocks", [PLENTY, SHORT], ids=["plenty", "short"])
@pytest.mark.parametrize("pauses", [True, False], ids=["pausing", "not-pausing"])
@given(
    running=st.lists(ASKS, max_size=8),
    ask=ASKS,
    later=st.lists(st.tuples(st.integers(0, 9), ASKS), max_size=12),
)
@settings(deadline=None, max_examples=25)
def test_whatever_another_tenant_sends_nobody_waits_beyond_its_turn(
    num_blocks: int,
    pauses: bool,
    running: list[Ask],
    ask: Ask,
    later: list[tuple[int, Ask]],
) -> None:
    order = OrderConfig(quantum=QUANTUM, pauses_prefills=pauses)
    load = Load(order, num_blocks=num_blocks, max_num_running=PLACES, token_budget=64)
    author = Author(0)
    send(load, running, "a", author)
    for _ in range(5):
        if load.scheduler.has_work:
            load.step()
    served = load.scheduler.service.of("a")
    [mine] = send(load, [ask], "b", author)
    before = served.num_prefill + 2 * served.num_decode
    request = load.scheduler.request(RequestId(mine))
    assert request is not None
    share = request.share
    by_step = sorted(later, key=lambda each: each[0])
    num_steps = 0
    while share.run is None:
        send(load, [a for at, a in by_step if at == num_steps], "a", author)
        oldest = load.scheduler._running[0] if load.scheduler._running else None
        load.step()
        num_steps += 1
        if num_blocks == SHORT and oldest is not None and oldest.spec.tenant == "a":
            # What the oldest one decodes nobody can take back.
            before += 2
    while_waiting = served.num_prefill + 2 * served.num_decode - before
    # Three quanta and its own work that others are ahead by before one of them yields;
    # a quantum that was left when it came, one that it may take last, and the step in
    # which all of that is found out.
    most = ask.num_tokens + 5 * QUANTUM + 2 * (load.token_budget + 2 * PLACES)
    if not pauses:
        most += 600  # a prefill that is not paused
    assert while_waiting <= most


@pytest.mark.parametrize("order", EVERY_ORDER, ids=named)
def test_answers_do_not_depend_on_the_order(order: OrderConfig) -> None:
    """Virtual KV: whatever is computed from the wrong blocks is noticed."""
    outputs = []
    for each in (config_of("fcfs"), order):
        driver = Driver(num_blocks=14, block_size=2, token_budget=5, order=each)
        for index, prompt in enumerate(["abcabcab", "abcabb", "abcabcabca", "c", "ab"]):
            driver.add(f"r{index}", prompt, max_new_tokens=5, tenant="ab"[index % 2])
        driver.run()
        outputs.append({name: driver.outputs[name] for name in sorted(driver.outputs)})
    assert outputs[0] == outputs[1]


# Between domains


def test_what_another_domain_has_cached_decides_nothing_between_domains() -> None:
    """My request and theirs want equal work by what is public; theirs may be a hit."""
    starts = []
    for warms in (False, True):
        for order in EVERY_ORDER:
            load = Load(order, token_budget=64)
            author = Author(11)
            theirs = author.new(20 * BLOCK)
            if warms:
                load.add([*theirs, 1], tenant="them", domain="them")
            else:
                load.add([*author.new(20 * BLOCK), 1], tenant="them", domain="them")
            load.run()
            mine = load.add(author.new(10 * BLOCK), tenant="me", domain="me")
            hit = load.add([*theirs, 2], tenant="them", domain="them")
            load.run()
            starts.append(load.starts.index(mine) < load.starts.index(hit))
    half = len(starts) // 2
    assert starts[:half] == starts[half:]


def test_within_one_domain_a_hit_goes_first() -> None:
    load = Load(config_of("lpm"), token_budget=64)
    author = Author(12)
    prefix = author.new(20 * BLOCK)
    load.add([*prefix, 1])
    load.run()
    cold = load.add(author.new(30))
    hit = load.add([*prefix, 2])
    load.run()

    assert load.starts.index(hit) < load.starts.index(cold)


def test_siblings_go_together_with_dfs() -> None:
    load = Load(config_of("dfs"), token_budget=64)
    author = Author(13)
    large, small = author.new(4 * BLOCK), author.new(4 * BLOCK)
    for prefix in (large, small):
        load.add([*prefix, 1])
    load.run()
    names = {}
    for index in range(8):
        prefix = small if index in (0, 1) else large
        names[load.add(prefix + author.new(30))] = (
            "small" if prefix is small else "large"
        )
    load.run()

    # Until as many are left of one branch as of the other.
    assert [names[each] for each in load.starts[2:]][:4] == ["large"] * 4


# Holding followers


def test_followers_wait_for_their_prefix_and_compute_it_never_again() -> None:
    for order in EVERY_ORDER:
        load = Load(order, token_budget=64)
        author = Author(14)
        prefix = author.new(30 * BLOCK)
        for _ in range(8):
            load.add(prefix + author.new(10))
        load.run()

        computed = sum(entry.num_computed_tokens for entry in load.entries)
        assert computed == len(prefix) + 8 * 10, order.name
        waited = [e.wait_s.get(WaitReason.PREFIX, 0.0) for e in load.entries]
        assert sum(seconds > 0 for seconds in waited) == 7


@pytest.mark.parametrize("order", EVERY_ORDER, ids=named)
@pytest.mark.parametrize("end", ["done", "cancelled", "failed"])
def test_followers_go_on_by_themselves_when_their_leader_ends(
    order: OrderConfig, end: str
) -> None:
    load = Load(order, token_budget=64)
    author = Author(15)
    prefix = author.new(30 * BLOCK)
    leader = load.add(prefix + author.new(10))
    follower = load.add(prefix + author.new(10))
    scheduler = load.scheduler
    for _ in range(7):
        load.step()  # 448 of its 490 tokens
    # The rest of it leaves room in the step, so the other one is looked at, and held.
    plan = scheduler.schedule(load.now)
    assert list(scheduler._lives.followers.holds) == [follower]

    if end == "failed":
        scheduler.abandon(plan, load.now)
    else:
        if end == "cancelled":
            scheduler.cancel(RequestId(leader), load.now)
        samples = {RequestId(leader): (Sample(7),)}
        scheduler.commit(plan, StepResult(samples), load.now)
    assert not scheduler._lives.followers.holds
    load.run()

    ended = {entry.request_id: entry.finish_reason for entry in load.entries}
    assert ended[follower] == "length"


def test_a_lane_whose_oldest_is_held_serves_its_leader() -> None:
    """Else cheap requests would keep the leader, and all who wait for it, for ever."""
    load = Load(OrderConfig(lane=2), token_budget=64)
    author = Author(16)
    prefix = author.new(60 * BLOCK)
    leader = load.add([*prefix, 1])
    load.step()
    follower = load.add([*prefix, 2])
    for _ in range(100):
        load.add(author.new(60))
        load.step()

    ended = [entry.request_id for entry in load.entries]
    assert leader in ended
    assert follower in ended


# Why requests waited


def test_the_reasons_of_a_wait_add_up_to_it() -> None:
    load = Load(OrderConfig(quantum=256), num_blocks=100, token_budget=64)
    poisson_load(load, 17, tenants="ab", num=120)
    load.run()
    num_reasons = set()
    for entry in load.entries:
        before = [w for w in entry.waits if w.start_s < entry.admitted_s]
        waited = sum(wait.end_s - wait.start_s for wait in before)
        assert waited == pytest.approx(entry.admitted_s - entry.arrival_s)
        assert sum(entry.wait_s.values()) >= waited - 1e-9
        num_reasons |= set(entry.wait_s)
    assert {WaitReason.QUEUE, WaitReason.MEMORY, WaitReason.PAUSED} <= num_reasons


def test_a_stall_names_who_held_the_memory() -> None:
    load = Load(config_of("fcfs"), num_blocks=20)
    author = Author(18)
    holder = load.add(author.new(12 * BLOCK), max_new_tokens=30, tenant="holder")
    load.step()
    stalled = load.add(author.new(14 * BLOCK), tenant="other")
    load.run()

    (stall,) = next(e.stalls for e in load.entries if e.request_id == stalled)
    assert stall.active[0][0] == holder
    assert stall.active[0][1] >= 12
    assert stall.num_missing_blocks > 0
    assert stall.end_s > stall.start_s


def test_admission_leaves_what_is_to_stay_retained() -> None:
    for floor in (0, 10):
        config = SchedulerConfig(
            token_budget=64, max_num_running=8, retained_floor_blocks=floor
        )
        load = Load(config_of("fcfs"), num_blocks=30)
        load.scheduler = Scheduler(
            config,
            load.scheduler.cache,
            config_of("fcfs").make(COSTS),
            ledger=load.ledger,
        )
        author = Author(19)
        load.add(author.new(14 * BLOCK))
        load.run()  # 14 retained
        load.add(author.new(8 * BLOCK), max_new_tokens=40)
        load.step()
        load.add(author.new(14 * BLOCK))
        least = 99
        while load.scheduler.num_running:
            load.step()
            cached = load.scheduler.cache.tree.num_unpinned_blocks
            if load.scheduler.num_running > 1 or load.scheduler.num_waiting:
                least = min(least, cached)
        assert (least >= 10) == bool(floor)


# Deadlines


def test_who_has_least_time_left_goes_first_and_who_is_late_last() -> None:
    order = OrderConfig(name="deadline", slo_ttft_s={"tight": 1.0, "loose": 5.0})
    load = Load(order, token_budget=64)
    author = Author(20)
    loose = load.add(author.new(60), request_class="loose")
    tight = load.add(author.new(60), request_class="tight")
    hopeless = load.add(author.new(900), request_class="tight")
    indifferent = load.add(author.new(60))
    load.run()

    assert load.starts == [tight, loose, indifferent, hopeless]


# The parts


@given(
    acts=st.lists(
        st.tuples(st.integers(0, 6), st.integers(-2, 4), st.booleans()), max_size=60
    )
)
@settings(deadline=None)
def test_a_ranking_is_sorted_whatever_is_moved(
    acts: list[tuple[int, int, bool]],
) -> None:
    ranking = Ranking()
    requests = [
        Request(build_spec(f"r{number}", arrival_s=number % 3), number)
        for number in range(7)
    ]
    keys: dict[str, int] = {}
    for number, key, is_removed in acts:
        request = requests[number]
        if is_removed:
            if request in ranking:
                ranking.remove(request)
                del keys[request.request_id]
        else:
            ranking.put(request, (key,))
            keys[request.request_id] = key
        expected = sorted(
            (key, *request.order_key, request.request_id)
            for request in requests
            if (key := keys.get(request.request_id)) is not None
        )
        found = [request_of(row).request_id for row in ranking.rows()]
        assert found == [row[-1] for row in expected]


@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from(
                ["add", "move", "hold", "release", "pass", "begin", "stop"]
            ),
            st.integers(0, 7),
            st.integers(0, 5),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
@settings(deadline=None)
def test_a_queue_picks_what_a_naive_one_picks(
    acts: list[tuple[str, int, int, int]],
) -> None:
    queue = RequestQueue(by_cached, pauses=True)
    requests = [
        Request(build_spec(f"r{n}", arrival_s=n % 3, tenant="xyz"[n % 3]), n)
        for n in range(8)
    ]
    waiting: set[int] = set()
    held: set[int] = set()
    passed: set[int] = set()
    admits = True
    for act, number, cached, public in acts:
        request = requests[number]
        if act == "add" and number not in waiting:
            request.num_cached, request.num_public = max(cached, public), public
            queue.add(request)
            waiting.add(number)
        elif act == "move" and number in waiting:
            request.num_cached, request.num_public = max(cached, public), public
            queue.moved(request)
        elif act == "hold" and number in waiting - held:
            queue.hold(request)
            held.add(number)
        elif act == "release" and number in held:
            queue.release(request)
            held.remove(number)
        elif act == "pass":
            queue.pass_over(request)
            passed.add(number)
        elif act == "begin":
            admits = cached > 0
            queue.begin(admits=admits)
            passed.clear()
        elif act == "stop":
            queue.stop_admitting()
            admits = False
        ready = [requests[n] for n in waiting - held - passed] if admits else []
        groups = queue.candidates()
        assert bool(groups) == bool(ready)
        if not ready:
            continue
        # Between domains by what is public, within one by all that is cached.
        everybody = [requests[n] for n in waiting - held]
        chosen = ready
        if len({r.spec.domain for r in everybody}) > 1:
            first = min(ready, key=lambda r: (-r.num_public, r.order_key))
            chosen = [r for r in ready if r.spec.domain == first.spec.domain]
        expected = min(chosen, key=lambda r: (-r.num_cached, r.order_key))
        assert queue.best(groups) is expected


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("name", "random"),
        ("lane", 0),
        ("lane", True),
        ("quantum", 0),
        ("decode_weight", -1.0),
        ("decode_weight", float("nan")),
        ("pauses_prefills", 1),
        ("weights", {"a": 0.0}),
        ("slo_ttft_s", {"chat": float("inf")}),
    ],
)
def test_a_bad_setting_is_named(field_name: str, value: Any) -> None:
    expected = "order" if field_name == "name" else field_name
    with pytest.raises(ConfigError, match=expected):
        OrderConfig(**{field_name: value})


def test_deadlines_need_limits_and_costs() -> None:
    with pytest.raises(ConfigError, match="slo_ttft_s"):
        OrderConfig(name="deadline")
    with pytest.raises(ConfigError, match="cost model"):
        config_of("deadline").make()


def test_a_limit_of_time_needs_costs() -> None:
    cache = PrefixCache(CacheConfig(num_blocks=4), Retention(Lru))
    with pytest.raises(ConfigError, match="step_time_s needs a cost model"):
        Scheduler(SchedulerConfig(step_time_s=0.1), cache, OrderConfig().make())
