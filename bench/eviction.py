"""Eviction policies: what each closes of the gap to the clairvoyant one, and its price.

Replays one request after another (`replay_sequence`), so LRU and the clairvoyant policy
are known exactly. Promised are

- shares of the gap between LRU and clairvoyant, without hints, on the Mooncake
  conversation trace and on agent sessions composed with seeds: started uniformly within
  24 hours (seed 0, cut at 24 hours) and within 2 hours (seed 1, cut at 4 hours), units of
  512 tokens;
- never more than 1 % below LRU where LRU hits at least 1 %, over those traces, other
  seeds of them, all generators and traffic made to be hard (`bench.made_traffic`), at
  eight sizes each from the longest prompt to all that is ever used again;
- what hints are worth when a fifth of them is wrong or half of them is missing;
- the time of the hooks in pure Python, and of freeing 512 tokens among 100,000 leaves;
- that floors keep a tenant's hits when another floods.

In seconds a block costs `1 + p / 30000` behind `p` tokens, in units of a first block's.
The traces are looked for in `../shared/traces`.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from bench.made_traffic import MADE_TRAFFIC
from bench.report import Bar, finish, parser, pin_to_one_core
from stemkv.core.books.cost import FittedCost
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.hints import Hints
from stemkv.core.retention.policies import EVICTIONS, EvictionConfig
from stemkv.core.retention.policy import EvictionPolicy, Lru, ReuseIndex
from stemkv.sim.bounds import clairvoyant
from stemkv.sim.catalogue import device_named, model_named
from stemkv.sim.distance import LruCurve, lru_curve
from stemkv.sim.flood import FloodConfig, study_flood
from stemkv.sim.formats import read_trace
from stemkv.sim.hits import Hits
from stemkv.sim.oracle import declared_next_uses, session_ends
from stemkv.sim.pricing import roofline
from stemkv.sim.reuse import Reuses, find_reuses
from stemkv.sim.sequence import replay_sequence
from stemkv.sim.sharing import SharingRule
from stemkv.sim.timelines import cut_at, in_units_of, overlapped
from stemkv.sim.trace import Trace
from stemkv.sim.workloads import WORKLOADS, workload_named

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
CONVERSATION = TRACES / "mooncake" / "conversation_trace.jsonl.gz"
SESSIONS = TRACES / "kv-cache-tester" / "sessions.jsonl.zst"
RULE = SharingRule(name="shared")
HOUR_S = 3_600.0

# A block costs 1 + p / 30000 behind p tokens; only ratios matter.
COST = FittedCost(
    source="1 + p / 30000",
    bytes_per_token=1,
    step_s=1.0,
    prefill_chunk_s=0.0,
    prefill_token_s=1.0,
    prefill_pair_s=1 / 30_000,
    decode_s=0.0,
    decode_context_s=0.0,
    flops_per_token=1.0,
    flops_per_pair=0.0,
    assumed_watts=1.0,
)

MOST_BELOW_LRU = 1.0  # percent of its hit rate
LEAST_HIT_RATE = 0.01  # of LRU, for that to be promised
MAX_TOUCH_US = 3.0
MAX_FREE_US = 150.0
MIN_KEPT_SHARE = 0.98
NUM_LEAVES = 100_000
NUM_TOUCHED = 20_000


REUSE_INDEX = EvictionConfig()
LRU = EvictionConfig(name="lru")


class Subject:
    """A trace, and what is known of it beforehand."""

    def __init__(self, name: str, trace: Trace) -> None:
        self.name = name
        self.trace = trace
        self._ends: dict[int, tuple[Hits, Hits]] = {}

    @cached_property
    def reuses(self) -> Reuses:
        return find_reuses(self.trace, RULE)

    @cached_property
    def curve(self) -> LruCurve:
        return lru_curve(self.reuses)

    def play(
        self,
        num_blocks: int,
        eviction: EvictionConfig,
        *,
        hints: Sequence[Hints] | None = None,
    ) -> Hits:
        """Replay with a policy, which weighs blocks as `COST` does if it weighs them."""
        cache = CacheConfig(num_blocks=num_blocks, block_size=self.trace.unit_size)
        return replay_sequence(
            self.trace,
            num_blocks=num_blocks,
            rule=RULE,
            policy=eviction.make(cache, COST)(),
            cost=COST,
            reuses=self.reuses,
            hints=hints,
        ).hits

    def gap(
        self,
        num_blocks: int,
        eviction: EvictionConfig = REUSE_INDEX,
        *,
        hints: Sequence[Hints] | None = None,
        in_seconds: bool = False,
    ) -> float:
        """Return what a policy closes of the gap from LRU to clairvoyant, in percent."""
        lru, best = self.ends(num_blocks)
        found = self.play(num_blocks, eviction, hints=hints)

        def value(hits: Hits) -> float:
            return (hits.saved_s or 0.0) if in_seconds else float(hits.hit_tokens)

        return 100 * (value(found) - value(lru)) / (value(best) - value(lru))

    def ends(self, num_blocks: int) -> tuple[Hits, Hits]:
        """Return what LRU and the clairvoyant policy find."""
        if num_blocks not in self._ends:
            self._ends[num_blocks] = (
                self.play(num_blocks, LRU),
                clairvoyant(self.reuses, num_blocks, cost=COST),
            )
        return self._ends[num_blocks]

    def sizes(self) -> list[int]:
        """Return eight sizes, from the longest prompt to all that is used again."""
        low = max(self.curve.longest_request, 2)
        high = max(low + 1, self.curve.num_blocks_for_all)
        return sorted({round(low * (high / low) ** (step / 8)) for step in range(8)})


def main() -> int:
    """Measure everything, print the table, return the exit code."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    facts = {"machine": pin_to_one_core()}
    facts["exact"] = "hits, the same in every run"
    facts["measured"] = "wall-clock time of one thread, least of 5"
    conversation = Subject("conversation", read_trace(CONVERSATION))
    day = composed(spread_s=24 * HOUR_S, seed=0, end_s=24 * HOUR_S)
    bars = measure_hooks()
    bars += measure_freeing()
    bars += measure_memory()
    bars += close_gaps(conversation, day)
    bars += save_seconds(day)
    bars += use_hints(conversation)
    bars += withstand_flood()
    if not options.quick:
        bars += compare_policies(conversation)
    bars += stay_near_lru(options.quick)
    return finish("bench.eviction: which block goes", bars, options, facts=facts)


def composed(*, spread_s: float, seed: int, end_s: float) -> Subject:
    """Return agent sessions on one clock, in units of 512 tokens."""
    trace = read_trace(SESSIONS, session_spread_s=spread_s, seed=seed)
    hours = spread_s / HOUR_S
    name = f"sessions within {hours:g} h, seed {seed}"
    return Subject(name, in_units_of(cut_at(trace, end_s), 512))


# What is closed of the gap


def close_gaps(conversation: Subject, day: Subject) -> list[Bar]:
    """No hints, in tokens."""
    two_hours = composed(spread_s=2 * HOUR_S, seed=1, end_s=4 * HOUR_S)
    promised: list[tuple[Subject, int, float | None]] = [
        (conversation, 1_000, 20.0),
        (conversation, 2_000, 25.0),
        (conversation, 4_000, 25.0),
        (conversation, 8_000, 8.0),
        (conversation, 16_000, 10.0),
        (conversation, 32_000, None),
        (day, 1_000, 25.0),
        (day, 2_000, 12.0),
        (day, 4_000, None),
        (day, 8_000, None),
        (two_hours, 4_000, 40.0),
        (two_hours, 16_000, None),
    ]
    return [
        share(f"{subject.name}, {size:,} blocks", subject.gap(size), limit)
        for subject, size, limit in promised
    ]


def save_seconds(day: Subject) -> list[Bar]:
    """Objective seconds, in seconds."""
    seconds = EvictionConfig(objective="seconds")
    return [
        share(
            f"objective seconds, {day.name}, {size:,} blocks, in seconds",
            day.gap(size, seconds, in_seconds=True),
            limit,
        )
        for size, limit in ((1_000, 25.0), (2_000, 18.0), (4_000, 12.0))
    ]


def use_hints(conversation: Subject) -> list[Bar]:
    """Hints from hindsight, some of them wrong or missing."""
    reuses = conversation.reuses
    declared = declared_next_uses(reuses, wrong_share=0.2)
    bars = [
        share(
            f"next use declared, 20 % wrong, {size:,} blocks",
            conversation.gap(size, hints=declared),
            45.0,
        )
        for size in (2_000, 4_000, 8_000, 16_000)
    ]
    for told, limit in ((1.0, 60.0), (0.5, 33.0)):
        ends = session_ends(reuses, share=told)
        bars.append(
            share(
                f"session ends of {told:.0%}, 4,000 blocks",
                conversation.gap(4_000, hints=ends),
                limit,
            )
        )
    lies = declared_next_uses(reuses, wrong_share=1.0)
    bars.append(
        share(
            "next use declared, all of it wrong, 4,000 blocks",
            conversation.gap(4_000, hints=lies),
        )
    )
    return bars


def compare_policies(conversation: Subject) -> list[Bar]:
    """Every policy, for information."""
    return [
        share(f"{name}, {size:,} blocks", conversation.gap(size, _named(name)))
        for name in EVICTIONS
        if name not in ("lru", "reuse_index")
        for size in (1_000, 2_000, 4_000, 8_000, 16_000)
    ]


def share(name: str, measured: float, limit: float | None = None) -> Bar:
    """Return what is closed of the gap."""
    return Bar(
        name=name,
        measured=measured,
        limit=limit,
        sense="at least",
        unit="% of the gap",
        basis="exact",
    )


# Never much worse than LRU


def stay_near_lru(is_quick: bool) -> list[Bar]:
    """Look for the worst of all traces and sizes; the worst three are named."""
    found: list[tuple[float, str]] = []
    num_traces = 0
    for subject in panel(is_quick):
        num_traces += 1
        print(f"  {subject.name}", file=sys.stderr)
        for size in subject.sizes():
            lru = subject.curve.at(size)
            if lru.hit_rate < LEAST_HIT_RATE:
                continue
            ours = subject.play(size, REUSE_INDEX)
            below = 100 * (1 - ours.hit_tokens / lru.hit_tokens)
            found.append((below, f"{subject.name}, {size:,} blocks"))
    found.sort(reverse=True)
    return [
        Bar(
            name=f"most below LRU in {len(found)} points of {num_traces} traces: {where}"
            if rank == 0
            else f"  next: {where}",
            measured=below,
            limit=MOST_BELOW_LRU if rank == 0 else None,
            unit="% of its hits",
            basis="exact",
        )
        for rank, (below, where) in enumerate(found[:4])
    ]


def panel(is_quick: bool) -> Iterator[Subject]:
    """Yield traces, each made or read when its turn comes."""
    yield Subject("conversation", read_trace(CONVERSATION))
    for name in ("magagent", "miniswe", "taubench"):
        native = read_trace(TRACES / "lmcache-agent" / f"{name}_cl100k_blk16.jsonl.gz")
        yield Subject(name, native)
        for seed in range(1 if is_quick else 3):
            yield Subject(
                f"{name}, overlapped, seed {seed}",
                overlapped(
                    native,
                    spread_s=native.duration_s * 0.1,
                    seed=seed,
                    median_pause_s=15.0,
                ),
            )
    airline = read_trace(TRACES / "tau-bench" / "gpt-4o-airline_cl100k_blk16.jsonl.gz")
    yield Subject("tau-bench", airline)
    for seed in range(1 if is_quick else 3):
        yield Subject(
            f"tau-bench, overlapped, seed {seed}",
            overlapped(airline, spread_s=900.0, seed=seed, median_pause_s=15.0),
        )
    yield Subject(
        "sharegpt",
        read_trace(TRACES / "sharegpt-sample" / "sharegpt300_qwen3_blk16.jsonl.gz"),
    )
    for workload in WORKLOADS:
        for seed, rate in ((1, 2.0),) if is_quick else ((0, 0.2), (1, 2.0), (2, 20.0)):
            trace = workload_named(
                workload.name, num_requests=4_000, rate=rate, seed=seed
            )
            yield Subject(f"{workload.name}, {rate:g}/s, seed {seed}", trace)
    for name, make in MADE_TRAFFIC.items():
        for seed in range(1 if is_quick else 2):
            yield Subject(f"{name}, seed {seed}", make(seed))
    if is_quick:
        return
    yield composed(spread_s=24 * HOUR_S, seed=7, end_s=24 * HOUR_S)
    yield composed(spread_s=2 * HOUR_S, seed=2, end_s=4 * HOUR_S)


# Quotas


def withstand_flood() -> list[Bar]:
    """The worked example, and a tenant that floods it."""
    costs = roofline(model_named("llama-3.1-8b"), device_named("h100"))
    result = study_flood(FloodConfig(rate=2.0), costs)
    kept = result.least_kept_share
    return [
        Bar(
            name="hits of the tenant that loses most to a flood, with floors",
            measured=100 * (kept if kept is not None else float("nan")),
            limit=100 * MIN_KEPT_SHARE,
            sense="at least",
            unit="% of those alone",
            basis="exact",
        ),
        Bar(
            name="hits of all of them, without floors",
            measured=100 * result.flooded_share,
            unit="% of those alone",
            basis="exact",
        ),
    ]


# The price in time and memory


def measure_hooks() -> list[Bar]:
    """A node that is used and released, through the hooks alone."""
    lru = min(touch_us(Lru()) for _ in range(5))
    ours = min(touch_us(ReuseIndex(8 * NUM_TOUCHED)) for _ in range(5))
    return [
        Bar(name="a touched node, LRU", measured=lru, unit="us"),
        Bar(
            name="a touched node, what the reuse index adds",
            measured=ours - lru,
            limit=MAX_TOUCH_US,
            unit="us",
        ),
    ]


def touch_us(policy: EvictionPolicy) -> float:
    """Return microseconds for a node that is pinned, used, released and a leaf again."""
    fill(policy, NUM_TOUCHED)
    chance = random.Random(0)
    order = [1 + chance.randrange(NUM_TOUCHED) for _ in range(3 * NUM_TOUCHED)]
    now, tick = 0.01 * NUM_TOUCHED, 2 * NUM_TOUCHED
    start = time.perf_counter()
    for node_id in order:
        now += 0.02
        tick += 2
        policy.became_pinned(node_id)
        policy.used(node_id, hint=0, tick=tick, now=now)
        policy.released(node_id, tick=tick + 1, now=now)
        policy.became_evictable(node_id, now=now)
    return (time.perf_counter() - start) / len(order) * 1e6


def measure_freeing() -> list[Bar]:
    """512 tokens from leaves of 64, as in `bench.index`: 8 victims."""
    policy = ReuseIndex(NUM_LEAVES)
    fill(policy, NUM_LEAVES)
    now = 0.01 * NUM_LEAVES
    times = []
    for _ in range(200):
        start = time.perf_counter()
        for _ in range(8):
            victim = policy.victim(now)
            assert victim is not None, "there are leaves"
            policy.dropped(victim, 0, may_return=True)
        times.append((time.perf_counter() - start) * 1e6)
    return [
        Bar(
            name=f"to free 512 tokens among {NUM_LEAVES:,} leaves of 64, median",
            measured=statistics.median(times),
            limit=MAX_FREE_US,
            unit="us",
        )
    ]


def measure_memory() -> list[Bar]:
    """What a policy keeps of a node of four blocks."""
    bars = []
    for name in EVICTIONS:
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        policy = _named(name).make(CacheConfig(num_blocks=80_000))()
        fill(policy, 20_000)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        bars.append(
            Bar(
                name=f"memory of a node of four blocks, {name}",
                measured=(after - before) / 20_000,
                unit="bytes",
            )
        )
    return bars


def fill(policy: EvictionPolicy, num_nodes: int, *, blocks_per_node: int = 4) -> None:
    """Publish leaves, 100 a second, and release them."""
    for index in range(num_nodes):
        now = 0.01 * index
        first = index * blocks_per_node
        keys = range(first, first + blocks_per_node) if policy.needs_keys else ()
        policy.published(
            index + 1,
            start=0,
            num_blocks=blocks_per_node,
            keys=keys,
            hint=0,
            tick=2 * index,
            now=now,
        )
        policy.released(index + 1, tick=2 * index + 1, now=now)
        policy.became_evictable(index + 1, now=now)


def _named(name: str) -> EvictionConfig:
    return EvictionConfig(name=name)


if __name__ == "__main__":
    sys.exit(main())
