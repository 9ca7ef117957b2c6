"""Replays against a driver that takes one step after another and spells out everything.

The naive driver uses the same scheduler, because what that decides is tested elsewhere;
nobody coasts, nothing is skipped, and it keeps its own clock, gaps and memory.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from stemkv.core import (
    OrderConfig,
    PrefixCache,
    Sample,
    Scheduler,
    StepPlan,
    StepResult,
)
from stemkv.core.books.cost import FittedCost, StepShape
from stemkv.core.check import check_scheduler
from stemkv.core.prefix.events import BlocksEvicted, BlocksRefused
from stemkv.core.retention.memory import MemoryQuota
from stemkv.core.retention.policies import EVICTIONS as ONLINE_EVICTIONS
from stemkv.core.retention.policies import OBJECTIVES
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.events import (
    RequestAdmitted,
    RequestFinished,
    RequestPreempted,
    TokenSampled,
)
from stemkv.core.schedule.orders import ORDERS
from stemkv.errors import ConfigError, InvariantError, PromptTooLong
from stemkv.measure.latency import summarize
from stemkv.measure.results import GIB, LatencySummary, ReplayResult, to_json
from stemkv.sim.arrivals import Arrivals, LoadConfig, public_tokens
from stemkv.sim.config import ROUTINGS, ReplayConfig
from stemkv.sim.hinting import HINTS, HintRule
from stemkv.sim.quotas import TenantQuotas
from stemkv.sim.replay import _Loop, replay
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace, TraceRequest
from tests.knobs import replay_config
from tests.seeds import slow

COSTS = FittedCost(
    source="test",
    bytes_per_token=1_000,
    step_s=0.0113,
    prefill_chunk_s=0.0007,
    prefill_token_s=0.00031,
    prefill_pair_s=0.0000071,
    decode_s=0.00093,
    decode_context_s=0.000023,
    copied_token_s=0.000011,
    flops_per_token=3.0,
    flops_per_pair=0.25,
    assumed_watts=70.0,
)


@dataclass
class Naive:
    """What happened to one request, token by token."""

    arrival_s: float
    admitted_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    reused: int = 0
    computed: int = 0
    recomputed: int = 0
    num_preemptions: int = 0


@dataclass
class NaiveReplica:
    """The plain loop of an engine."""

    cache: PrefixCache
    scheduler: Scheduler
    plan: StepPlan | None = None
    ends_s: float = 0.0
    busy_s: float = 0.0
    num_steps: int = 0
    num_evicted: int = 0
    num_refused: int = 0
    cached_block_s: float = 0.0
    noted_s: float = 0.0

    def note(self, now: float) -> None:
        """Integrate the cached blocks up to now; call it before anything changes."""
        seconds = now - self.noted_s
        self.cached_block_s += self.cache.usage().num_cached_blocks * seconds
        self.noted_s = now


class NaiveDriver:
    """Replays a trace; `placed` says on which replica each request was."""

    def __init__(
        self, trace: Trace, config: ReplayConfig, placed: dict[int, int]
    ) -> None:
        self.requests: dict[int, Naive] = {}
        self.refused: set[int] = set()
        self._trace = trace
        self._placed = placed
        self._arrivals = Arrivals(trace, config.sharing, config.load)
        self._hints = config.hints.of(trace, config.sharing)
        self.replicas = [self._replica(config) for _ in range(config.num_replicas)]
        self._coming = self._arrivals.first()

    def run(self) -> float:
        now = 0.0
        while True:
            times = [arrival_s for arrival_s, _ in self._coming]
            times += [each.ends_s for each in self.replicas if each.plan is not None]
            if not times:
                return now
            now = min(times)
            self._happen(now)

    def _happen(self, now: float) -> None:
        """Arrivals, then the ends of steps, one by one; then steps begin."""
        while True:
            due = [index for arrival_s, index in self._coming if arrival_s == now]
            ended = [r for r in self.replicas if r.plan is not None and r.ends_s == now]
            if due:
                self._coming.remove((now, min(due)))
                self._arrive(min(due), now)
            elif ended:
                self._finish(ended[0], now)
            else:
                break
        for replica in self.replicas:
            if replica.plan is None and replica.scheduler.has_work:
                self._start(replica, now)

    def _replica(self, config: ReplayConfig) -> NaiveReplica:
        core = config.of_replica(config.block_size * COSTS.bytes_per_token)
        make_policy = core.eviction.make(core.cache, COSTS)
        cache = PrefixCache(
            core.cache, Retention.of(make_policy, core.cache, core.quotas)
        )
        for namespace, prefix in public_tokens(self._trace, config.sharing):
            cache.declare_public(namespace, prefix)
        scheduler = Scheduler(
            core.scheduler, cache, core.order.make(COSTS), costs=COSTS
        )
        return NaiveReplica(cache, scheduler)

    def _arrive(self, index: int, now: float) -> None:
        self.requests[index] = Naive(now)
        try:
            spec = replace(self._arrivals.spec(index, now), hints=self._hints[index])
            self.replicas[self._placed[index]].scheduler.add(spec)
        except PromptTooLong:
            self.refused.add(index)
            self._coming += self._arrivals.after(index, now)

    def _start(self, replica: NaiveReplica, now: float) -> None:
        replica.note(now)
        plan = replica.plan = replica.scheduler.schedule(now)
        shape = StepShape(num_copied_tokens=sum(c.num_tokens for c in plan.copies))
        for chunk in plan.chunks:
            shape.add_chunk(chunk.start, chunk.end, is_decode=chunk.is_decode)
        seconds = COSTS.step_seconds(shape)
        replica.ends_s = now + seconds
        replica.busy_s += seconds
        replica.num_steps += 1

    def _finish(self, replica: NaiveReplica, now: float) -> None:
        plan = replica.plan
        assert plan is not None
        replica.note(now)
        replica.plan = None
        samples = {
            chunk.request_id: (
                Sample(self._arrivals.output_token(int(chunk.request_id))),
            )
            for chunk in plan.chunks
            if chunk.num_samples
        }
        for event in replica.scheduler.commit(plan, StepResult(samples), now):
            match event:
                case RequestAdmitted(is_resumed=False):
                    self.requests[int(event.request_id)].admitted_s = event.now
                case TokenSampled():
                    self.requests[int(event.request_id)].token_times_s.append(now)
                case RequestPreempted():
                    self.requests[int(event.request_id)].num_preemptions += 1
                case BlocksEvicted():
                    replica.num_evicted += event.num_blocks
                case BlocksRefused():
                    replica.num_refused += event.num_blocks
                case RequestFinished():
                    request = self.requests[int(event.request_id)]
                    request.reused = event.counts.reused
                    request.computed = event.counts.computed
                    request.recomputed = event.counts.recomputed
                    self._coming += self._arrivals.after(int(event.request_id), now)
        check_scheduler(replica.scheduler)


# Traffic


def traffic(seed: int, *, num_requests: int = 24, unit_size: int = 6) -> Trace:
    """Sessions of a few tenants whose prompts grow, and some that stand alone.

    Many say something of their future, and mostly it is not true.
    """
    rng, words = random.Random(seed), random.Random(seed + 2)
    ids: dict[tuple[int, ...], int] = {}
    requests: list[TraceRequest] = []
    paths: list[tuple[int, ...]] = []
    arrival_s = 0.0
    for index in range(num_requests):
        arrival_s += rng.choice([0.0, 0.0, 0.001, 0.02, 0.3])
        parent = rng.choice([None, *range(max(0, index - 4), index)])
        if parent is None:
            path = tuple(rng.randrange(2) for _ in range(rng.randint(1, 4)))
            tenant, session = rng.choice("xyz"), f"s{index}"
        else:
            path = paths[parent] + (rng.randrange(3),)
            tenant = requests[parent].tenant
            session = requests[parent].session or ""
        paths.append(path)
        heads = [path[: end + 1] for end in range(len(path))]
        length = len(path) * unit_size - rng.choice([0, 0, 1, unit_size - 1])
        length += rng.choice([0, 0, 0, unit_size, 40])  # some are not described
        requests.append(
            TraceRequest(
                request_id=f"request-{index}",
                input_length=max(1, length),
                output_length=rng.choice([0, 1, 2, 7, 30]),
                units=array("i", [ids.setdefault(head, len(ids)) for head in heads]),
                arrival_s=arrival_s if index else 0.0,
                tenant=tenant,
                identity=rng.choice("mmmn"),
                session=session,
                parent=parent,
                think_s=rng.choice([0.0, 0.01, 0.5]),
                ends_session=words.random() < 0.2,
                next_use_s=words.choice([None, None, 0.0, 1.0, 70.0, math.inf]),
                ephemeral_from=words.choice([None, None, None, 0, 9]),
            )
        )
    first = requests[0].arrival_s
    for request in requests:
        request.arrival_s -= first
    return Trace(name="t", format="f", unit_size=unit_size, requests=requests)


def settings_of(seed: int) -> ReplayConfig:
    rng, policies = random.Random(seed + 1), random.Random(seed + 3)
    orders = random.Random(seed + 4)
    num_running = rng.choice([1, 3, 8])
    block_size = rng.choice([4, 4, 16])
    num_blocks = rng.choice([14, 20, 60]) * 4 // block_size
    config = replay_config(
        num_blocks=num_blocks,
        block_size=block_size,
        token_budget=rng.choice([8, 16, 256]),
        max_num_running=num_running,
        max_steps_awaiting=rng.choice([0, 2, 256]),
        watermark=rng.choice([0.0, 0.1]),
        num_replicas=rng.choice([1, 1, 2, 3]),
        routing=rng.choice(ROUTINGS),
        sharing=SharingRule(name=rng.choice(["isolated", "shared", "public"])),
        load=LoadConfig(
            loop=rng.choice(["open", "closed"]),
            rate=rng.choice([1.0, 0.5, 3.0]),
            spread_s=rng.choice([0.0, 0.01]),
        ),
        slo_ttft_s=0.1,
        slo_tpot_s=0.03,
        eviction=policies.choice(ONLINE_EVICTIONS),
        objective=policies.choice(OBJECTIVES),
        hints=HintRule(name=policies.choice([*HINTS, "trace", "trace"])),
        lookahead=policies.choice([None, 0, 1, 3]),
        order=OrderConfig(
            name=orders.choice(ORDERS),
            lane=orders.choice([1, 4]),
            quantum=orders.choice([1, 40, 8192]),
            decode_weight=orders.choice([0.3, 2.0]),
            pauses_prefills=orders.random() < 0.6,
            weights={"x": 2.5},
            slo_ttft_s={"y": 0.1},
        ),
        step_time_s=orders.choice([None, None, 0.02]),
        retained_floor_blocks=orders.choice([0, 0, 3]),
    )
    if config.sharing.name != "isolated":
        return config
    memory_bytes = num_blocks * block_size * COSTS.bytes_per_token
    return replace(config, quotas=policies.choice([None, *some_quotas(memory_bytes)]))


def some_quotas(memory_bytes: int) -> list[TenantQuotas]:
    quarter, half = memory_bytes // 4, memory_bytes // 2
    return [
        TenantQuotas(
            tenants={
                "x": MemoryQuota(floor_bytes=quarter),
                "y": MemoryQuota(floor_bytes=quarter, cap_bytes=half, weight=3.0),
            }
        ),
        TenantQuotas(
            tenants={"z": MemoryQuota(floor_bytes=half)},
            default=MemoryQuota(cap_bytes=quarter, weight=0.5),
        ),
    ]


def index_of(request_id: str) -> int:
    return int(request_id.removeprefix("request-"))


@cache  # several tests look at one replay
def replayed(seed: int) -> ReplayResult:
    return replay(traffic(seed), settings_of(seed), COSTS)


def summary(result: ReplayResult, name: str) -> LatencySummary | None:
    found = [each for each in result.latencies if each.name == name]
    return found[0] if found else None


# Against the naive driver


@pytest.mark.parametrize("seed", [*range(24), *slow(range(24, 60))])
def test_a_replay_is_what_one_step_after_another_gives(seed: int) -> None:
    trace, config, result = traffic(seed), settings_of(seed), replayed(seed)
    placed = {index_of(r.request_id): r.replica for r in result.requests}
    driver = NaiveDriver(trace, config, placed)
    end_s = driver.run()

    assert len(result.requests) == len(trace.requests)
    assert result.num_refused == len(driver.refused)
    for told in result.requests:
        index = index_of(told.request_id)
        naive = driver.requests[index]
        assert told.arrival_s == naive.arrival_s
        if index in driver.refused:
            assert told.finish_reason == "refused"
            continue
        assert told.admitted_s == naive.admitted_s
        assert told.first_token_s == naive.token_times_s[0]
        assert told.end_s == naive.token_times_s[-1]
        assert told.output_tokens == len(naive.token_times_s)
        assert told.reused_tokens == naive.reused
        assert told.computed_tokens == naive.computed
        assert told.recomputed_tokens == naive.recomputed
        assert told.num_preemptions == naive.num_preemptions
        assert sum(told.misses.values()) == told.computed_tokens

    gaps = [
        later - earlier
        for naive in driver.requests.values()
        for earlier, later in pairwise(naive.token_times_s)
    ]
    assert summary(result, "ITL") == summarize("ITL", gaps)
    assert result.num_steps == sum(each.num_steps for each in driver.replicas)
    assert result.num_evicted_blocks == sum(r.num_evicted for r in driver.replicas)
    assert result.num_refused_blocks == sum(r.num_refused for r in driver.replicas)
    if not gaps and not end_s:
        return
    usages = [replica.cache.usage() for replica in driver.replicas]
    last = result.memory[-1]
    assert last.cached == sum(usage.num_cached_blocks for usage in usages)
    assert (last.active, last.at_s) == (0, result.end_s)
    busy_s = sum(replica.busy_s for replica in driver.replicas)
    assert result.busy_share == pytest.approx(
        busy_s / result.end_s / config.num_replicas
    )
    for replica in driver.replicas:
        replica.note(result.end_s)
    cached = sum(replica.cached_block_s for replica in driver.replicas)
    retained = result.saved.retained_gib_s * GIB / result.block_bytes
    assert retained == pytest.approx(cached)


def test_the_replays_meet_everything_they_are_meant_to_meet() -> None:
    results = [replayed(seed) for seed in range(60)]

    assert sum(r.num_preemptions for r in results) > 10
    assert sum(r.num_refused for r in results) > 10
    assert sum(r.num_stalls for r in results) > 10
    assert sum(r.num_evicted_blocks for r in results) > 100
    assert sum(r.regret_tokens for r in results) > 100
    assert sum(r.num_refused_blocks for r in results) > 100
    assert {r.config["eviction"] for r in results} == {*ONLINE_EVICTIONS}
    assert {r.config["objective"] for r in results} == {*OBJECTIVES}
    assert sum(r.config["quotas"] is not None for r in results) > 5
    assert {r.num_replicas for r in results} == {1, 2, 3}
    assert {r.config["routing"] for r in results} == set(ROUTINGS)
    reasons = Counter[str]()
    for each in results:
        reasons.update(each.tokens.misses)
    assert all(reasons[name] for name in reasons if name != "unsharable")
    spans = [span for each in results for span in each.steps]
    assert any(span.num_steps > 5 for span in spans)


# Numbers


@pytest.mark.parametrize("seed", range(0, 60, 5))
def test_numbers_follow_from_the_requests(seed: int) -> None:
    trace, result = traffic(seed), replayed(seed)
    ran = [r for r in result.requests if r.end_s is not None]

    assert result.tokens.prompt == sum(r.prompt_tokens for r in ran)
    assert result.tokens.reused == sum(r.reused_tokens for r in ran)
    assert result.tokens.computed == sum(r.computed_tokens for r in ran)
    assert result.tokens.output == sum(r.output_tokens for r in ran)
    assert result.num_finished == len(ran)
    assert result.saved.seconds == pytest.approx(sum(r.saved_s for r in ran))
    assert result.stall_s == pytest.approx(sum(r.stall_s for r in ran))
    if not ran:
        return
    assert result.end_s == max(r.end_s for r in ran if r.end_s is not None)
    hits = [r.reused_tokens > 0 for r in ran]
    assert result.request_hit_rate == pytest.approx(sum(hits) / len(hits))
    late = sorted(ran, key=lambda r: (r.arrival_s, index_of(r.request_id)))
    late = late[len(late) // 2 :]
    steady = sum(r.reused_tokens for r in late) / sum(r.prompt_tokens for r in late)
    assert result.steady_hit_rate == pytest.approx(steady)

    ttfts = [r.first_token_s - r.arrival_s for r in ran if r.first_token_s is not None]
    tpots = [
        (r.end_s - r.first_token_s) / (r.output_tokens - 1)
        for r in ran
        if r.output_tokens > 1 and r.end_s is not None and r.first_token_s is not None
    ]
    queues = [r.admitted_s - r.arrival_s for r in ran if r.admitted_s is not None]
    e2es = [r.end_s - r.arrival_s for r in ran if r.end_s is not None]
    for name, values in (
        ("TTFT", ttfts),
        ("TPOT", tpots),
        ("queue", queues),
        ("E2E", e2es),
    ):
        told = summary(result, name)
        assert (told is None) == (not values)
        if told is None:
            continue
        assert told.count == len(values)
        for share in (50, 90, 95, 99):
            expected = float(np.percentile(values, share))
            assert getattr(told, f"p{share}") == pytest.approx(expected)
    good = sum(
        r.first_token_s - r.arrival_s <= 0.1
        and (
            r.output_tokens < 2
            or (r.end_s - r.first_token_s) / (r.output_tokens - 1) <= 0.03
        )
        for r in ran
        if r.first_token_s is not None and r.end_s is not None
    )
    assert result.goodput_rps == pytest.approx(good / result.end_s)
    assert result.goodput_share == pytest.approx(good / len(trace.requests))


@pytest.mark.parametrize("seed", range(0, 60, 5))
def test_tenants_prefixes_and_readers_have_the_same_sums(seed: int) -> None:
    result = replayed(seed)
    ran = [r for r in result.requests if r.end_s is not None]

    for tenant in result.tenants:
        own = [r for r in ran if r.tenant == tenant.tenant]
        assert tenant.num_requests == len(own)
        assert tenant.tokens.reused == sum(r.reused_tokens for r in own)
        assert tenant.tokens.output == sum(r.output_tokens for r in own)
        assert tenant.saved.seconds == pytest.approx(sum(r.saved_s for r in own))
        read = [pair.tokens for pair in result.writers if pair.reader == tenant.tenant]
        assert sum(read) == tenant.tokens.reused
    names = [tenant.tenant for tenant in result.tenants]
    assert len(names) == len(set(names))
    if result.config["sharing"] == "isolated":
        assert all(pair.writer == pair.reader for pair in result.writers)
        assert "(public)" not in names
    for sample in result.memory:
        total = sample.active + sample.cached + sample.free
        assert total == result.num_blocks * result.num_replicas
    assert sum(s.evicted for s in result.memory) == result.num_evicted_blocks
    assert all(check.holds for check in result.checks)


def test_saved_joules_and_seconds_are_of_the_same_tokens() -> None:
    for seed in range(60):
        result = replayed(seed)
        assert result.saved.joules == pytest.approx(70.0 * result.saved.seconds), seed


# Outcomes check themselves

Tamper = Callable[[_Loop], object]


def _entry(loop: _Loop, name: str, change: float) -> None:
    entry = loop._replicas[0].entries[-1]
    setattr(entry, name, getattr(entry, name) + change)


def _account(loop: _Loop, name: str, change: float) -> None:
    account = loop._replicas[0].ledger._accounts.of("x", 0.0)
    setattr(account, name, getattr(account, name) + change)


TAMPERS: dict[str, Tamper] = {
    "reused": lambda loop: _entry(loop, "num_reused_tokens", 1),
    "computed": lambda loop: _entry(loop, "num_computed_tokens", 1),
    "output": lambda loop: _entry(loop, "num_output_tokens", 1),
    "saved": lambda loop: _entry(loop, "saved_s", 1.0),
    "stalled": lambda loop: _entry(loop, "stall_s", 1.0),
    "a miss": lambda loop: loop._replicas[0].entries[-1].misses.pop(),
    "a writer": lambda loop: loop._replicas[0].entries[-1].writers.update(x=10_000),
    "an entry": lambda loop: loop._replicas[0].entries.pop(),
    "a refusal": lambda loop: loop._refused.append((0, "")),
    "evicted": lambda loop: _account(loop, "num_evicted_blocks", 1),
    "refused": lambda loop: _account(loop, "num_refused_blocks", 1),
    "retained": lambda loop: _account(loop, "retained_block_s", 1.0),
    "stall of a tenant": lambda loop: _account(loop, "stall_s", 1.0),
    "evicted by the cache": lambda loop: setattr(
        loop._replicas[0].cache.residency,
        "num_evicted",
        loop._replicas[0].cache.residency.num_evicted + 1,
    ),
    "credited": lambda loop: setattr(
        loop._replicas[0].ledger._totals, "num_credited", 0
    ),
    "a prefix": lambda loop: [
        node.accounts.clear() for node in loop._replicas[0].ledger._history._nodes()
    ],
}


def tampered() -> _Loop:
    config = replay_config(
        num_blocks=20, block_size=4, token_budget=16, max_num_running=8
    )
    return _Loop(traffic(2), config, COSTS)


@pytest.mark.parametrize("what", TAMPERS)
def test_a_number_that_was_changed_is_not_printed(what: str) -> None:
    loop = tampered()
    loop.run(None)
    honest = loop.outcome()
    assert honest.tokens.reused
    assert honest.num_evicted_blocks
    TAMPERS[what](loop)

    with pytest.raises(InvariantError, match="does not add up"):
        loop.outcome()


# Same in, same out


def test_equal_replays_are_equal_bytes() -> None:
    for seed in range(0, 20, 3):
        again = replay(traffic(seed), settings_of(seed), COSTS)
        assert to_json(again, schema="test") == to_json(replayed(seed), schema="test")


HASHES = """
import hashlib
from stemkv.measure.results import to_json
from stemkv.sim.replay import replay
from tests.sim.test_replay import COSTS, settings_of, traffic
for seed in range(20):
    result = replay(traffic(seed), settings_of(seed), COSTS)
    print(hashlib.sha256(to_json(result, schema="test").encode()).hexdigest())
"""


def test_the_order_of_sets_is_in_no_result() -> None:
    root = Path(__file__).resolve().parents[2]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", HASHES],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 20


# Small stories


def request(units: Iterable[int], input_length: int, **changes: object) -> TraceRequest:
    values: dict[str, object] = {
        "request_id": "",
        "input_length": input_length,
        "output_length": 2,
        "units": array("i", units),
        "arrival_s": 0.0,
    }
    return TraceRequest(**(values | changes))  # type: ignore[arg-type]


def story(*requests: TraceRequest, unit_size: int = 8) -> Trace:
    numbered = [
        replace(each, request_id=f"request-{index}")
        for index, each in enumerate(requests)
    ]
    return Trace(name="t", format="f", unit_size=unit_size, requests=numbered)


def config_of(**changes: object) -> ReplayConfig:
    values: dict[str, object] = {
        "num_blocks": 40,
        "block_size": 4,
        "token_budget": 256,
        "max_num_running": 8,
    }
    return replay_config(**(values | changes))  # type: ignore[arg-type]


CLOSED = LoadConfig(loop="closed")


def test_a_child_arrives_its_thinking_time_after_its_parents_end() -> None:
    trace = story(
        request([1], 9),
        request([1], 9, parent=0, think_s=0.25, arrival_s=9.0),
        request([1], 9, parent=1, think_s=0.0, arrival_s=9.5),
    )
    result = replay(trace, config_of(load=CLOSED), COSTS)

    first, second, third = sorted(result.requests, key=lambda r: r.request_id)
    assert first.end_s is not None
    assert second.arrival_s == first.end_s + 0.25
    assert third.arrival_s == second.end_s
    assert result.end_s < 9.0, "recorded times do not count"


def test_who_waits_for_a_refused_request_does_not_wait_for_ever() -> None:
    trace = story(
        request([1], 400, arrival_s=0.0),
        request([1], 9, parent=0, think_s=0.25),
        request([1], 400, parent=1, think_s=0.5),
        request([1], 9, parent=2, think_s=0.0),
    )
    result = replay(trace, config_of(load=CLOSED), COSTS)

    first, second, third, fourth = sorted(result.requests, key=lambda r: r.request_id)
    assert (first.finish_reason, third.finish_reason) == ("refused", "refused")
    assert (first.end_s, first.admitted_s, first.prompt_tokens) == (None, None, 400)
    assert second.arrival_s == 0.25
    assert second.end_s is not None
    assert third.arrival_s == second.end_s + 0.5
    assert fourth.arrival_s == third.arrival_s
    assert (result.num_refused, result.num_finished) == (2, 2)
    assert result.tokens.prompt == 18, "of those that ran"


def test_a_refused_request_is_no_good_one() -> None:
    trace = story(request([1], 400), request([1], 9))
    result = replay(trace, config_of(slo_ttft_s=10.0), COSTS)

    assert result.goodput_share == 0.5
    assert result.goodput_rps == pytest.approx(1 / result.end_s)


def test_a_replay_in_which_nobody_runs_has_no_numbers() -> None:
    result = replay(story(request([1], 400)), config_of(slo_ttft_s=1.0), COSTS)

    assert (result.num_finished, result.num_refused, result.end_s) == (0, 1, 0.0)
    assert result.latencies == ()
    assert result.goodput_share == 0.0
    document = to_json(result, schema="test")
    assert '"request_hit_rate": null' in document
    assert '"busy_share": null' in document


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="t has no requests"):
        replay(story(), config_of(), COSTS)


@pytest.mark.parametrize("num_output", [0, 1])
def test_a_request_that_logged_no_output_samples_one_token(num_output: int) -> None:
    trace = story(request([1], 9, output_length=num_output))
    result = replay(trace, config_of(), COSTS)

    (told,) = result.requests
    assert told.output_tokens == 1
    assert told.first_token_s == told.end_s == result.end_s
    assert summary(result, "TPOT") is None
    assert summary(result, "ITL") is None


def test_tails_that_the_trace_does_not_describe_are_never_shared() -> None:
    trace = story(
        request([1], 30),
        request([1], 30, arrival_s=5.0),
        request([1], 8, arrival_s=9.0),
    )
    result = replay(trace, config_of(), COSTS)

    first, second, third = result.requests
    assert [r.reused_tokens for r in (first, second, third)] == [0, 8, 7]


def test_units_that_go_beyond_a_prompt_are_cut() -> None:
    trace = story(request([1, 2], 11), request([1, 2], 11, arrival_s=5.0))
    result = replay(trace, config_of(), COSTS)

    assert [r.prompt_tokens for r in result.requests] == [11, 11]
    assert [r.reused_tokens for r in result.requests] == [0, 10], "two of them copied"


def test_what_was_answered_is_never_reused() -> None:
    """A trace does not tell which tokens of the next prompt an answer became."""
    trace = story(
        request([1], 8, output_length=20),
        request([1, 2, 3], 24, arrival_s=5.0),
    )
    result = replay(trace, config_of(), COSTS)
    assert [r.reused_tokens for r in result.requests] == [0, 8]


@pytest.mark.parametrize(
    "rule, reused, writer",
    [("isolated", 0, None), ("shared", 8, "x"), ("public", 8, "x")],
)
def test_a_sharing_rule_decides_what_another_tenant_reuses(
    rule: str, reused: int, writer: str | None
) -> None:
    trace = story(
        request([1, 2], 16, tenant="x"),
        request([1, 3], 16, tenant="y", arrival_s=5.0),
    )
    result = replay(trace, config_of(sharing=SharingRule(name=rule)), COSTS)

    assert result.requests[1].reused_tokens == reused
    assert result.tokens.misses["other_domain"] == 8 - reused
    assert [(p.writer, p.reader) for p in result.writers] == (
        [(writer, "y")] if writer else []
    )
    names = [tenant.tenant for tenant in result.tenants]
    assert names == ["x", "y"] + ["(public)"] * (rule == "public")


@pytest.mark.parametrize("name", ["(public)", ":", "a:", "\n", "ü"])
@pytest.mark.parametrize("rule", ["isolated", "public"])
def test_a_tenant_may_have_any_name(name: str, rule: str) -> None:
    trace = story(
        request([1, 2], 17, tenant=name),
        request([1, 2], 17, tenant=name, arrival_s=5.0),
        request([1], 9, tenant="y", arrival_s=9.0),
    )
    result = replay(trace, config_of(sharing=SharingRule(name=rule)), COSTS)

    told = [tenant for tenant in result.tenants if tenant.tenant == name]
    assert told[0].num_requests == 2
    assert result.requests[0].domain == f"private:{name}"
    domains = {prefix.domain for prefix in result.prefixes if prefix.num_hits}
    assert domains == {f"private:{name}"} | ({"public"} if rule == "public" else set())


def test_a_faster_rate_ends_sooner() -> None:
    trace = story(*[request([n], 9, arrival_s=float(n)) for n in range(4)])
    slow, fast = (
        replay(trace, config_of(load=LoadConfig(rate=rate)), COSTS)
        for rate in (1.0, 10.0)
    )
    assert [r.arrival_s for r in slow.requests] == [0.0, 1.0, 2.0, 3.0]
    assert [r.arrival_s for r in fast.requests] == [0.0, 0.1, 0.2, 0.3]
    assert fast.end_s < slow.end_s


# Policies, quotas and hints


def reused(trace: Trace, **changes: object) -> list[int]:
    result = replay(trace, config_of(**changes), COSTS)
    ordered = sorted(result.requests, key=lambda told: index_of(told.request_id))
    return [told.reused_tokens for told in ordered]


def test_a_policy_that_knows_the_future_is_refused_with_a_clock() -> None:
    with pytest.raises(ConfigError, match="replay without a clock"):
        replay(story(request([1], 9)), config_of(eviction="clairvoyant"), COSTS)


def test_what_is_said_to_be_used_once_is_not_retained_and_the_books_say_so() -> None:
    trace = story(
        request([1, 2], 16, ephemeral_from=8),
        request([1, 2], 17, arrival_s=5.0),
        request([1, 2], 17, arrival_s=9.0),
    )
    result = replay(trace, config_of(), COSTS)

    assert reused(trace) == [0, 8, 16]
    assert result.num_refused_blocks == 2
    assert result.refused_bytes == 2 * 4 * COSTS.bytes_per_token
    assert [tenant.num_refused_blocks for tenant in result.tenants] == [2]
    assert result.requests[1].misses == {"below_block": 1, "not_retained": 8}
    assert result.requests[1].regret_tokens == 0, "nobody regrets what was promised"


def test_hints_of_a_trace_count_unless_they_are_ignored() -> None:
    trace = story(
        request([1, 2], 16, ephemeral_from=0), request([1, 2], 17, arrival_s=5.0)
    )

    assert reused(trace) == [0, 0]
    assert reused(trace, hints=HintRule(name="none")) == [0, 16]


def test_blocks_of_a_session_that_has_ended_go_first() -> None:
    def told(is_last: bool) -> Trace:
        return story(
            request([1, 2], 16, session="s"),
            request([3, 4], 16, session="t", ends_session=is_last, arrival_s=5.0),
            request([5, 6, 7], 24, arrival_s=10.0),  # four blocks must go
            request([1, 2], 17, arrival_s=15.0),
        )

    for eviction in ONLINE_EVICTIONS:
        with_end, without = (
            reused(told(is_last), num_blocks=11, eviction=eviction)[-1]
            for is_last in (True, False)
        )
        assert (with_end, without < 16) == (16, True), eviction


def test_two_tenants_with_one_name_for_a_session_have_two_sessions() -> None:
    trace = story(
        request([1, 2], 16, session="s", tenant="x"),
        request([3, 4], 16, session="s", tenant="y", ends_session=True, arrival_s=5.0),
        request([5, 6, 7], 24, arrival_s=10.0),
        request([1, 2], 17, tenant="x", arrival_s=15.0),
    )
    shared = SharingRule(name="shared")

    assert reused(trace, num_blocks=11, sharing=shared)[-1] == 16


def flooded(quotas: TenantQuotas | None, **changes: object) -> ReplayResult:
    flood = [
        request([100 + 3 * n, 101 + 3 * n, 102 + 3 * n], 24, tenant="y", arrival_s=n)
        for n in range(1, 9)
    ]
    trace = story(
        request([1, 2], 16, tenant="x"),
        *flood,
        request([1, 2], 17, tenant="x", arrival_s=20.0),
    )
    config = config_of(num_blocks=16, quotas=quotas, **changes)
    return replay(trace, config, COSTS)


BLOCK_BYTES = 4 * COSTS.bytes_per_token


@pytest.mark.parametrize("eviction", ONLINE_EVICTIONS)
def test_a_floor_that_covers_a_tenants_blocks_keeps_them(eviction: str) -> None:
    floor = TenantQuotas(tenants={"x": MemoryQuota(floor_bytes=4 * BLOCK_BYTES)})

    bare, kept = (
        flooded(quotas, eviction=eviction).requests[-1].reused_tokens
        for quotas in (None, floor)
    )

    assert (bare, kept) == (0, 16)


def test_a_tenant_over_its_cap_evicts_its_own() -> None:
    cap = TenantQuotas(default=MemoryQuota(cap_bytes=5 * BLOCK_BYTES))
    result = flooded(cap)

    assert result.requests[-1].reused_tokens == 16
    evicted = {each.tenant: each.num_evicted_blocks for each in result.tenants}
    assert evicted == {"x": 0, "y": 8 * 6 - 5}
    assert max(sample.cached for sample in result.memory) <= 4 + 5
    assert result.config["quotas"] == "others: cap 1.86e-05 GiB"


def test_quotas_by_tenant_need_tenants_with_blocks_of_their_own() -> None:
    with pytest.raises(ConfigError, match="quotas are by tenant"):
        config_of(quotas=TenantQuotas(), sharing=SharingRule(name="shared"))


def test_floors_that_leave_no_memory_are_refused_before_anything_runs() -> None:
    floors = {name: MemoryQuota(floor_bytes=8 * BLOCK_BYTES) for name in "xy"}

    with pytest.raises(ConfigError, match="leave nothing of"):
        flooded(TenantQuotas(tenants=floors))


def test_what_a_rule_declares_public_must_fit_its_budget() -> None:
    trace = story(
        request([1, 2], 16, tenant="x"), request([1, 3], 16, tenant="y", arrival_s=5.0)
    )
    public = SharingRule(name="public")

    def played(num_blocks: int) -> ReplayResult:
        quotas = TenantQuotas(public_bytes=num_blocks * BLOCK_BYTES)
        return replay(trace, config_of(sharing=public, quotas=quotas), COSTS)

    assert played(2).tokens.reused == 8
    with pytest.raises(ConfigError, match="declares public takes"):
        played(1)


# Routing


def routed(trace: Trace, routing: str, num_replicas: int = 3) -> list[int]:
    config = config_of(routing=routing, num_replicas=num_replicas)
    result = replay(trace, config, COSTS)
    return [r.replica for r in sorted(result.requests, key=lambda r: r.arrival_s)]


def test_round_robin_goes_round_in_the_order_of_arrival() -> None:
    trace = story(*[request([n], 9, arrival_s=float(n)) for n in range(7)])
    assert routed(trace, "round_robin") == [0, 1, 2, 0, 1, 2, 0]


def test_a_session_stays_where_it_is_and_without_one_a_tenant_does() -> None:
    trace = story(
        *[
            request(
                [n],
                9,
                arrival_s=float(n),
                session=f"s{n % 5}" if n < 10 else None,
                tenant=f"t{n % 3}",
            )
            for n in range(30)
        ]
    )
    places = routed(trace, "session")
    for n in range(5, 10):
        assert places[n] == places[n - 5]
    for n in range(13, 30):
        assert places[n] == places[n - 3]
    assert len(set(places)) > 1


def test_a_prefix_goes_where_it_is_cached_and_else_where_fewest_are() -> None:
    trace = story(
        request([1, 2], 17, output_length=40),
        request([3, 4], 17, output_length=40, arrival_s=0.001),
        request([1, 5], 17, arrival_s=0.2),
        request([3, 6], 17, arrival_s=0.21),
        request([7, 8], 17, arrival_s=0.22),
    )
    assert routed(trace, "prefix") == [0, 1, 0, 1, 2]


def test_progress_ends_with_everything() -> None:
    calls: list[tuple[int, int]] = []
    trace = story(*[request([n], 9, arrival_s=float(n)) for n in range(250)])
    replay(trace, config_of(), COSTS, progress=lambda *call: calls.append(call))

    assert calls[-1] == (250, 250)
    assert calls == sorted(calls)
    assert len(calls) >= 3


def test_an_outcome_can_be_asked_again() -> None:
    """Reading the books does not change them."""
    loop = tampered()
    loop.run(None)
    assert to_json(loop.outcome(), schema="t") == to_json(loop.outcome(), schema="t")


def test_a_miss_names_what_of_the_identity_differs() -> None:
    trace = story(
        request([1, 2, 3], 24, identity="model=m1&salt=1"),
        request([1, 2, 3], 24, arrival_s=50.0, identity="model=m1&salt=2"),
        request([1, 2, 3], 24, arrival_s=99.0, identity="model=m2&salt=2"),
    )
    result = replay(trace, config_of(), COSTS)

    first, second, third = result.requests
    assert (first.first_miss_reason, first.differing_fields) == ("never_seen", ())
    assert second.first_miss_reason == third.first_miss_reason == "identity_differs"
    assert second.differing_fields == ("salt",)
    assert "model" in third.differing_fields


def test_those_who_held_the_memory_at_stalls_are_named_and_sum_up() -> None:
    trace = story(
        request([1, 2, 3], 24, output_length=30, tenant="large"),
        request([4, 5, 6], 24, arrival_s=0.001, output_length=4, tenant="small"),
    )
    result = replay(trace, config_of(num_blocks=7, block_size=8), COSTS)

    assert result.num_stalls > 0
    held = dict(result.stall_accounts)
    assert held.keys() <= {"large", "small"}
    assert sum(held.values()) == pytest.approx(result.stall_active_blocks)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_no_time_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match="slo_ttft_s"):
        config_of(slo_ttft_s=limit)
