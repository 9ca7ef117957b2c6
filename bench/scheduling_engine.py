"""The engine's part of `bench.scheduling`: a backlog on the embedded model.

64 requests over 6 prefixes of 3 tenants are there at once, and the pool holds two and a
half prefixes, so two beside what runs. Tenants are in one sharing group, as an order can
gain only by prefixes that requests share. Counts are exact, as all requests wait before
the first step and no plan depends on the clock. Seconds are measured, one run of each
order.

How much there is to gain hangs on the pool: the more prefixes it holds, the more of them
FCFS finds as well. The pool was chosen with that in view.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, field

from bench.report import Bar
from stemkv.core.core import CoreConfig
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.sharing import SharingPolicy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.orders import OrderConfig
from stemkv.core.schedule.request import Request, RequestId
from stemkv.engine import (
    Engine,
    EngineConfig,
    LoadedModel,
    SamplingParams,
    load_model,
)
from stemkv.measure.timeline import percentile

__all__ = ["Asked", "Outcome", "backlog", "engine_backlog", "engine_for", "serve"]

SEED = 0
NUM_REQUESTS = 64
NUM_QUICK = 24
NUM_PREFIXES = 6
TENANTS = ("ann", "bob", "cleo")
BLOCK_SIZE = 16
PREFIX_TOKENS = 320
OWN_TOKENS = (8, 40)  # behind the prefix, from and to
NEW_TOKENS = 4
POOL_TOKENS = 800  # two and a half prefixes
MAX_NUM_RUNNING = 4
TOKEN_BUDGET = 256
MIN_HITS = 1.9  # times FCFS


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request of the backlog."""

    name: str
    tenant: str
    prompt: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one order gave."""

    num_reused: int  # cached prompt tokens; exact
    num_computed: int  # prompt tokens, those computed again as well; exact
    num_evicted: int  # blocks; exact
    # Of each request, what its tenant ran until its first token over what was ahead.
    ratios: tuple[float, ...]
    ttft_s: tuple[float, ...] = field(repr=False)  # measured
    outputs: dict[str, tuple[int, ...]] = field(repr=False)


def engine_backlog(is_quick: bool) -> list[Bar]:
    """Serve the backlog in both orders on the embedded model."""
    loaded = load_model()
    asked = backlog(loaded.vocab_size, NUM_QUICK if is_quick else NUM_REQUESTS)
    outcomes = {}
    for name in ("fcfs", "fair"):
        print(f"engine, {name} …", file=sys.stderr)
        outcomes[name] = serve(engine_for(loaded, OrderConfig(name=name)), asked)
    return bars_of(outcomes["fcfs"], outcomes["fair"], OrderConfig().lane)


def backlog(vocab_size: int, num_requests: int) -> list[Asked]:
    """Return the requests in order of arrival: prefixes and tenants in turn by chance."""
    rng = random.Random(SEED)

    def ids(num_tokens: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(num_tokens)]

    prefixes = [ids(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    return [
        Asked(
            name=f"r{index}",
            tenant=rng.choice(TENANTS),
            prompt=TokenIds.from_ids(
                [*rng.choice(prefixes), *ids(rng.randint(*OWN_TOKENS))]
            ),
        )
        for index in range(num_requests)
    ]


def engine_for(
    loaded: LoadedModel,
    order: OrderConfig,
    *,
    pool_tokens: int = POOL_TOKENS,
    max_num_running: int = MAX_NUM_RUNNING,
) -> Engine:
    """Return an engine whose pool is too small for all prefixes."""
    return Engine(
        loaded,
        EngineConfig(
            kv_memory_bytes=pool_tokens * loaded.kv_bytes_per_token,
            core=CoreConfig(
                cache=CacheConfig(block_size=BLOCK_SIZE),
                scheduler=SchedulerConfig(
                    token_budget=TOKEN_BUDGET, max_num_running=max_num_running
                ),
                order=order,
            ),
            sharing=SharingPolicy(groups={"everybody": set(TENANTS)}),
            # What is measured is the order, not whether this build keeps every bit.
            runs_self_test=False,
        ),
    )


def serve(engine: Engine, asked: list[Asked]) -> Outcome:
    """Queue the whole backlog, then serve it."""
    requests: list[Request] = []
    for each in asked:
        engine.add(
            each.prompt,
            SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True),
            tenant=each.tenant,
            request_id=each.name,
        )
        request = engine.scheduler.request(RequestId(each.name))
        assert request is not None, "it was just added"
        requests.append(request)
    completions = engine.drain()
    ratios = [request.share.ratio for request in requests]
    ttfts = [completion.timeline.ttft_s for completion in completions]
    counts = [completion.counts for completion in completions]
    return Outcome(
        num_reused=sum(each.reused for each in counts),
        num_computed=sum(each.computed + each.recomputed for each in counts),
        num_evicted=engine.usage().num_evicted_blocks,
        ratios=tuple(ratio for ratio in ratios if ratio is not None),
        ttft_s=tuple(ttft for ttft in ttfts if ttft is not None),
        outputs={c.request_id: c.token_ids for c in completions},
    )


def bars_of(fcfs: Outcome, fair: Outcome, lane: int) -> list[Bar]:
    """Return all rows and what is promised of them."""
    bars = [bar for each in (("fcfs", fcfs), ("fair", fair)) for bar in _rows(*each)]
    num_differing = sum(
        fair.outputs.get(name) != output for name, output in fcfs.outputs.items()
    )
    return [
        *bars,
        Bar(
            name="engine, fair / fcfs: cached tokens",
            measured=fair.num_reused / fcfs.num_reused,
            unit="×",
            limit=MIN_HITS,
            sense="at least",
            basis="exact",
        ),
        Bar(
            name="engine, fair / fcfs: TTFT p50",
            measured=percentile(fair.ttft_s, 50) / percentile(fcfs.ttft_s, 50),
            unit="×",
            limit=1.0,
        ),
        Bar(
            name="engine, fair: longest wait over its own backlog",
            measured=max(fair.ratios),
            unit="×",
            limit=lane + 0.5,
            basis="exact",
        ),
        Bar(
            name="engine: answers that differ between the orders",
            measured=num_differing,
            unit="answers",
            limit=0,
            basis="exact",
        ),
    ]


def _rows(name: str, outcome: Outcome) -> list[Bar]:
    counts = (
        ("cached tokens", outcome.num_reused, "tokens"),
        ("prompt tokens computed", outcome.num_computed, "tokens"),
        ("evictions", outcome.num_evicted, "blocks"),
        ("longest wait over its own backlog", max(outcome.ratios), "×"),
    )
    rows = [
        Bar(name=f"engine, {name}: {what}", measured=value, unit=unit, basis="exact")
        for what, value, unit in counts
    ]
    return rows + [
        Bar(
            name=f"engine, {name}: TTFT p{percent}",
            measured=percentile(outcome.ttft_s, percent),
            unit="s",
        )
        for percent in (50, 95)
    ]
