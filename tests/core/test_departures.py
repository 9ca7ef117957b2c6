"""What tenants leave behind when they go: nothing that grows with how many there were.

Names come from requests, so there may be any number of them. Everything that a
scheduler can reach is walked, whoever owns it; what is found must be bounded by who is
there, what is cached and remembered, and a few constants.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType

import pytest

from stemkv.core import (
    CacheConfig,
    Domain,
    EvictionConfig,
    Hints,
    OrderConfig,
    PrefixCache,
    QuotaConfig,
    Sample,
    Scheduler,
    SchedulerConfig,
    StepResult,
)
from stemkv.core.books.ledger import Ledger
from stemkv.core.check import check_scheduler
from stemkv.core.retention.retention import Retention
from tests.core.scheduling import COSTS, build_spec

NUM_BLOCKS = 64
LEAF_TYPES = (str, bytes, int, float, type, ModuleType, FunctionType)


def build(order: str, *, has_quotas: bool) -> Scheduler:
    config = CacheConfig(num_blocks=NUM_BLOCKS, block_size=4)
    quotas = QuotaConfig(public_blocks=2) if has_quotas else None
    ledger = Ledger(4, COSTS, max_history_blocks=128, max_idle_accounts=16)
    cache = PrefixCache(
        config,
        Retention.of(EvictionConfig().make(config), config, quotas),
        watchers=[ledger],
    )
    order_config = OrderConfig(
        name=order, slo_ttft_s={"chat": 1.0} if order == "deadline" else {}
    )
    return Scheduler(
        SchedulerConfig(token_budget=64, max_num_running=8),
        cache,
        order_config.make(COSTS),
        costs=COSTS,
        ledger=ledger,
    )


def ledger_of(scheduler: Scheduler) -> Ledger:
    ledger = scheduler._lives.journal.ledger
    assert ledger is not None
    return ledger


def come_and_go(scheduler: Scheduler, num_tenants: int) -> None:
    """Each has one request, eight at a time; then it is never heard of again."""
    rng = random.Random(num_tenants)
    ledger = ledger_of(scheduler)
    for number in range(num_tenants):
        now = number / 1000
        prompt = "".join(rng.choices("abcd", k=rng.randint(5, 20)))
        name = f"tenant-{number}"
        hints = Hints(session="s", next_use_s=30.0)
        spec = build_spec(
            name, prompt, tenant=name, max_new_tokens=2, arrival_s=now, hints=hints
        )
        scheduler.add(spec)
        if number % 8 == 7:
            drain(scheduler, now)
            ledger.take_entries()
    drain(scheduler, num_tenants / 1000)
    ledger.take_entries()


def drain(scheduler: Scheduler, now: float) -> None:
    while scheduler.has_work:
        plan = scheduler.schedule(now)
        samples = {
            chunk.request_id: (Sample(0),) for chunk in plan.chunks if chunk.num_samples
        }
        scheduler.commit(plan, StepResult(samples), now)
    scheduler.take_events()


def reachable(root: object) -> Iterator[object]:
    """Yield all that an object leads to, itself first, each once."""
    seen = {id(root)}
    stack = [root]
    while stack:
        each = stack.pop()
        yield each
        if isinstance(each, LEAF_TYPES):
            continue
        for other in referents(each):
            if id(other) not in seen:
                seen.add(id(other))
                stack.append(other)


def referents(each: object) -> list[object]:
    if isinstance(each, dict):
        return [*each.keys(), *each.values()]
    if isinstance(each, BuiltinFunctionType):
        return [each.__self__]
    found: list[object] = list(each) if isinstance(each, list | tuple | set) else []
    found.extend(getattr(each, "__dict__", {}).values())
    for kind in type(each).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            found.append(getattr(each, name, None))
    if hasattr(each, "__func__"):  # a bound method
        found.append(each.__self__)  # type: ignore[attr-defined]
    return found


def names_in(scheduler: Scheduler) -> set[str]:
    """Names of tenants that are still known anywhere."""
    return {
        each
        for each in reachable(scheduler)
        if isinstance(each, str) and each.startswith("tenant-")
    }


def num_entries(scheduler: Scheduler) -> int:
    return sum(
        len(each)
        for each in reachable(scheduler)
        if isinstance(each, dict | list | set | tuple)
    )


def test_whoever_is_there_is_found() -> None:
    """The control: the walk sees a tenant wherever it has something."""
    scheduler = build("fcfs", has_quotas=True)
    scheduler.add(build_spec("r", "abcdabcd", tenant="tenant-1"))

    assert names_in(scheduler) == {"tenant-1"}
    reached = [type(each).__name__ for each in reachable(scheduler)]
    assert {"Ledger", "Quotas", "ReuseIndex", "Served", "_Node"} <= set(reached)


@pytest.mark.parametrize(
    "order, has_quotas, num_tenants",
    [
        ("fcfs", True, 10_000),
        ("fcfs", False, 2_500),
        ("lpm", False, 2_500),
        ("dfs", True, 2_500),
        ("residual", False, 2_500),
    ],
)
def test_tenants_that_came_and_went_are_not_known_any_more(
    order: str, has_quotas: bool, num_tenants: int
) -> None:
    few, many = (build(order, has_quotas=has_quotas) for _ in range(2))
    come_and_go(few, 1_000)
    come_and_go(many, num_tenants)

    # A domain keeps its number for keys as long as a policy may remember a block of it.
    assert len(names_in(many)) <= 9 * NUM_BLOCKS + 300
    assert num_entries(many) <= 1.2 * num_entries(few)
    check_scheduler(many)


def test_what_departed_tenants_held_stays_in_the_sums() -> None:
    scheduler = build("fcfs", has_quotas=False)
    come_and_go(scheduler, 200)

    ledger, cache = ledger_of(scheduler), scheduler.cache
    ledger.check(cache.tree.nodes(), 1_000.0)
    accounts = ledger.accounts(1_000.0)
    present = {name for name, a in accounts.items() if a.num_cached_blocks}
    assert present
    assert len(accounts) <= len(present) + 16
    num_published = sum(each.num_published_blocks for each in accounts.values())
    num_published += ledger.departed.num_published_blocks
    assert num_published == cache.usage().num_published_blocks
    assert ledger.departed.num_published_blocks > 0
    assert ledger.forgotten.num_evicted_blocks > 0


def test_who_comes_again_opens_an_account_again() -> None:
    scheduler = build("fcfs", has_quotas=False)
    come_and_go(scheduler, 200)
    ledger = ledger_of(scheduler)
    before = ledger.departed
    assert "tenant-0" not in ledger.accounts(500.0)

    spec = build_spec("again", "abcdabcda", tenant="tenant-0", arrival_s=500.0)
    scheduler.add(spec)
    drain(scheduler, 500.0)

    account = ledger.accounts(501.0)["tenant-0"]
    assert account.num_published_blocks == 3
    assert account.active_block_s == 0.0, "not since it was closed"
    assert before.num_published_blocks <= ledger.departed.num_published_blocks
    assert Domain.private("tenant-0") in {
        node.domain for node in scheduler.cache.tree.nodes()
    }
