"""What a prefix hit costs: match, admission, eviction, and how they scale.

The scenario is a 12,000-token cached prefix with 500 new tokens behind it, blocks of
16, among 2,000 cached sequences. Prompts are int32 buffers and all differ, as waiting
requests do, so a prompt is rarely in the innermost CPU caches when it is matched. The
cache is full: every admission evicts what an old one left.

Set STEMKV_VLLM_PYTHON to an interpreter that can import vllm to see the same work done
by vLLM's cache manager beside ours.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from bench.report import Bar, finish, parser, pin_to_one_core
from stemkv.core import (
    CacheConfig,
    ComputeIdentity,
    Domain,
    Fcfs,
    FittedCost,
    Identities,
    Lru,
    PrefixCache,
    RequestId,
    RequestSpec,
    Sample,
    Scheduler,
    SchedulerConfig,
    Sharing,
    SharingPolicy,
    StepResult,
    TokenIds,
)
from stemkv.core.books.ledger import Ledger
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.retention.retention import Retention

BLOCK_SIZE = 16
NUM_PREFIX = 12_000
NUM_NEW = 500
NUM_SEQUENCES = 2_000
NUM_LEAVES = 100_000
LEAF_TOKENS = 64
NUM_ROUNDS = 8
NUM_DECODES = 32
CONTEXTS = (4_000, 32_000, 128_000)
DEPTHS = (12_000, 128_000)  # tokens of a prefix, for what must not depend on it

MATCH = f"match (peek), {NUM_PREFIX:,}-token hit + {NUM_NEW} new"
ADMISSION = "admission (acquire, publish, release), same hit"
FROM_LIST = "admission from a list of ids, conversion included"

NAMESPACE = bytes(range(32))
TENANT = Domain.private("tenant")
COST = FittedCost(
    source="made up",
    bytes_per_token=1,
    step_s=0.004,
    prefill_chunk_s=0.0,
    prefill_token_s=1e-4,
    prefill_pair_s=1e-8,
    decode_s=1e-3,
    decode_context_s=0.0,
    flops_per_token=1.0,
    flops_per_pair=1.0,
    assumed_watts=1.0,
)

# What one admission adds to the tree, and what it holds while it runs.
NUM_TAIL_BLOCKS = (NUM_PREFIX + NUM_NEW) // BLOCK_SIZE - NUM_PREFIX // BLOCK_SIZE
NUM_FRESH_BLOCKS = NUM_TAIL_BLOCKS + 1

T = TypeVar("T")


def main() -> int:
    """Measure everything, print the table, return the exit code."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    facts = {"machine": pin_to_one_core()}
    facts["repeats"] = "few (--quick)" if options.quick else "full"
    facts["measured"] = f"median call of {NUM_ROUNDS} rounds, by the wall clock"
    facts["exact"] = "counts, the same in every run"
    repeats = 256 if options.quick else 2048
    bars = [*measure_hits(repeats), *measure_prefixes(repeats)]
    bars += measure_scaling(repeats)
    bars += measure_eviction(repeats // 4)
    bars += measure_depth(repeats // 4)
    bars += measure_identity(repeats)
    bars += measure_commits(max(64, repeats // 16))
    bars += measure_memory()
    bars += measure_books(repeats // 4)
    bars += measure_books_memory()
    bars += compare_with_vllm(bars, facts, repeats // 8)
    return finish("bench.index: prefix hits", bars, options, facts=facts)


# Scenarios


def measure_hits(repeats: int) -> list[Bar]:
    """Match and admission behind one prefix, and what converting a list adds."""
    scene = Scene.full()
    peeks = scene.time(scene.peek, repeats)
    prompt = scene.new_prompt(0)
    warm = [time_call(scene.peek, prompt) for _ in range(repeats)]
    num_evicted = scene.cache.usage().num_evicted_blocks
    cycles = scene.time(scene.admit, repeats)
    num_evicted = scene.cache.usage().num_evicted_blocks - num_evicted
    few = repeats // 8
    conversions = [time_call(TokenIds.from_ids, scene.new_list()) for _ in range(few)]
    checks = [time_call(TokenIds, scene.new_prompt(0)) for _ in range(few)]
    from_lists = [time_call(scene.admit_list, scene.new_list()) for _ in range(few)]
    return [
        microseconds(MATCH, peeks, limit=15),
        slowest_round(peeks),
        microseconds("  the same prompt again and again", warm),
        microseconds(ADMISSION, cycles, limit=60),
        slowest_round(cycles),
        exact("  blocks evicted per admission", num_evicted / len(cycles), "blocks"),
        microseconds(f"list of {NUM_PREFIX + NUM_NEW:,} ids to buffer", conversions),
        microseconds("buffer checked for negative ids", checks),
        microseconds(FROM_LIST, from_lists),
    ]


def measure_prefixes(repeats: int) -> list[Bar]:
    """The same work with 50 prefixes in turn, so that edges are colder, too."""
    scene = Scene.full(num_prefixes=50)
    peeks = scene.time(scene.peek, repeats)
    cycles = scene.time(scene.admit, repeats)
    return [
        microseconds("match, 50 distinct prefixes", peeks),
        microseconds("admission, 50 distinct prefixes", cycles),
    ]


def measure_identity(repeats: int) -> list[Bar]:
    """What finding a request's namespace and domain adds to its admission."""
    policy = SharingPolicy(
        groups={
            f"group-{g}": {f"tenant-{g}-{t}" for t in range(50)} for g in range(20)
        },
        classes={"chat": Sharing.GROUP},
    )
    identities = Identities(identity())
    for adapter in range(8):
        identities.load(f"adapter-{adapter}", bytes([adapter] * 32), 1.0)
    requests = [
        (f"tenant-{i % 20}-{i % 50}", f"adapter-{i % 8}") for i in range(repeats)
    ]

    def look_up(request: tuple[str, str]) -> object:
        tenant, adapter = request
        return (
            policy.domain(tenant, "chat"),
            identities.adapter(adapter).version,
            identities.namespace(adapter),
        )

    encodings = [
        time_call(lambda adapter: identities.identity(adapter).namespace(), "adapter-0")
        for _ in range(64)
    ]
    times = [time_call(look_up, request) for request in requests]
    return [
        microseconds("identity of a request (domain, namespace)", times, limit=5),
        microseconds("  naming a namespace the first time", encodings),
    ]


def identity() -> ComputeIdentity:
    """Return an identity with every fact known."""
    return ComputeIdentity(
        model_architecture="LlamaForCausalLM",
        weights_digest=bytes(32),
        weights_generation=0,
        adapter_digest=None,
        adapter_scale=None,
        adapter_generation=None,
        position_scheme="{}",
        start_position=0,
        mask_rule="causal",
        attention_window=None,
        kv_dtype="bfloat16",
        kv_scales_digest=None,
        kv_layout="block,slot,head,dim",
        block_size=BLOCK_SIZE,
        parallel_layout="single",
        tokenizer_digest=None,
        chat_template_digest=None,
        tool_schema_version=None,
        media_preprocessing_version=None,
        numerics_class="exact",
        numerics_tile=64,
        engine_build="bench",
    )


def measure_scaling(repeats: int) -> list[Bar]:
    """Match time among few and among many cached sequences, measured in turn."""
    few = Scene.full(num_sequences=200)
    many = Scene.full(num_sequences=20_000)
    few_us, many_us = [], []
    for _ in range(repeats // 64):  # in turn, so that a noisy moment meets both
        few_us += few.time(few.peek, 64)
        many_us += many.time(many.peek, 64)
    ratio = min(medians(many_us)) / min(medians(few_us))
    return [
        microseconds("match among 200 sequences", few_us),
        microseconds("match among 20,000 sequences", many_us),
        Bar(
            name="  ratio (tests assert it as counts, too)",
            measured=ratio,
            limit=1.5,
            unit="×",
        ),
    ]


def measure_eviction(repeats: int) -> list[Bar]:
    """Free 512 tokens among 100,000 leaves of 64.

    Between two evictions as many leaves are published as were dropped, and eight
    random ones are used again, so that the policy has stale keys to correct.
    """
    num_victims = 512 // LEAF_TOKENS
    blocks_per_leaf = LEAF_TOKENS // BLOCK_SIZE
    # Some blocks more than leaves, so that only the timed call ever evicts.
    scene = Scene(NUM_LEAVES * blocks_per_leaf + 64)
    leaves = [scene.publish_leaf() for _ in range(NUM_LEAVES)]
    num_blocks = num_victims * blocks_per_leaf
    times, num_dropped = [], 0
    for _ in range(repeats):
        start = time.perf_counter_ns()
        num_dropped += scene.cache.evict(num_blocks, scene.now)
        times.append((time.perf_counter_ns() - start) / 1000)
        for _ in range(num_victims):
            leaves.append(scene.publish_leaf())
            scene.use(leaves[-scene.rng.randrange(1, NUM_LEAVES)])
    return [
        microseconds(f"evict 512 tokens among {NUM_LEAVES:,} leaves", times, limit=150),
        slowest_round(times),
        exact("  blocks dropped per call", num_dropped / repeats, "blocks"),
    ]


def measure_depth(repeats: int) -> list[Bar]:
    """Match and admission when the prefix is cut into many nodes."""
    bars = []
    for num_nodes in (107, 749):
        scene = Scene.full(num_sequences=100, num_spare=2000)
        scene.cut_prefix(num_nodes)
        peeks = scene.time(scene.peek, repeats)
        cycles = scene.time(scene.admit, repeats)
        bars += [
            microseconds(f"match, path of {num_nodes} nodes", peeks),
            microseconds(f"admission, path of {num_nodes} nodes", cycles),
        ]
    return bars


def measure_commits(repeats: int) -> list[Bar]:
    """Commits of steps that decode only: what a token costs behind a long context."""
    medians = {num: median_commit_us(num, repeats) for num in CONTEXTS}
    bars = [
        Bar(
            name=f"commit of {NUM_DECODES} decodes, context {num:,}",
            measured=us,
            unit="us",
        )
        for num, us in medians.items()
    ]
    worst = max(medians.values()) / min(medians.values())
    bars.append(
        Bar(
            name="  slowest over fastest context",
            measured=worst,
            unit="x",
            limit=1.2,
        )
    )
    return bars


def median_commit_us(num_context: int, repeats: int) -> float:
    """Microseconds of a median commit, blocks that fill included."""
    num_blocks = NUM_DECODES * (num_context // BLOCK_SIZE + repeats)
    cache = PrefixCache(CacheConfig(num_blocks=num_blocks), Retention(Lru))
    limits = SchedulerConfig(
        token_budget=NUM_DECODES * num_context, max_num_running=NUM_DECODES
    )
    scheduler = Scheduler(limits, cache, Fcfs())
    for index in range(NUM_DECODES):
        scheduler.add(
            RequestSpec(
                request_id=RequestId(f"r{index}"),
                prompt=TokenIds.from_ids([index] * num_context),
                max_new_tokens=repeats + 32,
                arrival_s=0.0,
                domain=TENANT,
                namespace=NAMESPACE,
            )
        )
    times = []
    for step in range(repeats + 16):
        plan = scheduler.schedule(float(step))
        samples = {chunk.request_id: (Sample(5),) for chunk in plan.chunks}
        start = time.perf_counter()
        scheduler.commit(plan, StepResult(samples), float(step))
        times.append(time.perf_counter() - start)
    return statistics.median(times[16:]) * 1e6


def measure_memory() -> list[Bar]:
    """Heap bytes of tree, pool and policy; prompts and KV are not in it."""
    tracemalloc.start()
    scene = Scene.full(overfill=0)
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    num_tokens = scene.cache.usage().num_cached_blocks * BLOCK_SIZE
    return [
        Bar(
            name=f"index memory, {num_tokens:,} cached tokens",
            measured=num_bytes / num_tokens,
            unit="bytes/token",
        )
    ]


def measure_books(repeats: int) -> list[Bar]:
    """What a ledger costs behind a short prefix and a long one, measured in turn."""
    bars = []
    for kind in ("", ", history full"):
        scenes = []
        for depth in DEPTHS:
            # What is resident fits in, and nothing else.
            most = depth // BLOCK_SIZE + NUM_SEQUENCES if kind else None
            ledger = Ledger(BLOCK_SIZE, COST, max_history_blocks=most)
            scenes.append(Scene.behind(depth, ledger))
        for name, verb in (
            ("evict a block", evict_one),
            ("book a lookup", book_lookup),
        ):
            pairs = [[verb(scene) for scene in scenes] for _ in range(repeats)]
            times = [min(medians(column)) for column in zip(*pairs, strict=True)]
            bars += [
                Bar(
                    name=f"{name} behind {depth:,} tokens, ledger{kind}",
                    measured=time_us,
                    unit="µs",
                )
                for depth, time_us in zip(DEPTHS, times, strict=True)
            ]
            ratio = times[1] / times[0]
            bars.append(Bar(name="  ratio", measured=ratio, limit=1.25, unit="×"))
    return bars


def evict_one(scene: Scene) -> float:
    """Return the microseconds of dropping a leaf of one block."""
    time_us = time_call(lambda now: scene.cache.evict(1, now), scene.now)
    scene.admit(scene.prefixes[0] + scene.tokens(BLOCK_SIZE))
    return time_us


def book_lookup(scene: Scene) -> float:
    """Return the microseconds of writing down what a request found, and its end."""
    ledger = scene.ledger
    assert ledger is not None, "measured with books only"
    prompt = scene.prefixes[0] + scene.tokens(BLOCK_SIZE + 1)
    num_prompt = len(prompt) // TOKEN_BYTES
    demand = Demand(num_slots=num_prompt)
    lease = scene.cache.acquire(NAMESPACE, TENANT, prompt, demand, now=scene.now)
    assert lease is not None, "the cache has room for one request at a time"
    assert lease.node is not None, "its prefix is cached"
    path = lease.node.path()
    num_reused = sum(node.num_blocks for node in path) * BLOCK_SIZE

    def book(request_id: str) -> None:
        ledger.admitted(
            request_id,
            tenant=TENANT.name,
            domain=TENANT,
            namespace=NAMESPACE,
            prompt=prompt,
            path=path,
            copied=None,
            num_awaitable=0,
            arrival_s=scene.now,
            now=scene.now,
        )
        ledger.ended(
            request_id,
            reason="length",
            num_reused=num_reused,
            num_computed=num_prompt - num_reused,
            num_recomputed=0,
            num_output=1,
            num_preemptions=0,
            now=scene.now,
        )

    time_us = time_call(book, "r")
    ledger.take_entries()
    scene.cache.release(lease, scene.now)
    return time_us


def measure_books_memory() -> list[Bar]:
    """Heap bytes that books add at their peak, which is when a report is asked for."""
    added = []
    for depth in DEPTHS:
        peaks = []
        for ledger in (None, Ledger(BLOCK_SIZE, COST)):
            tracemalloc.start()
            scene = Scene.behind(depth, ledger)
            if ledger is not None:
                ledger.prefixes(scene.cache.tree.nodes(), scene.now)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        added.append((peaks[1] - peaks[0]) / NUM_SEQUENCES)
    bars = [
        Bar(
            name=f"books of {NUM_SEQUENCES:,} suffixes behind {depth:,} tokens, each",
            measured=num_bytes,
            unit="bytes",
        )
        for depth, num_bytes in zip(DEPTHS, added, strict=True)
    ]
    # Not 1, as the prefix itself is remembered once, at five bytes a token.
    ratio = added[1] / added[0]
    return [*bars, Bar(name="  ratio", measured=ratio, limit=1.25, unit="×")]


def compare_with_vllm(
    ours: Sequence[Bar], facts: dict[str, str], repeats: int
) -> list[Bar]:
    """Run `bench/vllm_index.py` under the interpreter the environment names."""
    interpreter = os.environ.get("STEMKV_VLLM_PYTHON")
    if not interpreter:
        facts["vllm"] = "absent (STEMKV_VLLM_PYTHON names no interpreter)"
        return []
    script = Path(__file__).with_name("vllm_index.py")
    numbers = (NUM_PREFIX, NUM_NEW, BLOCK_SIZE, NUM_SEQUENCES, repeats)
    command = [interpreter, str(script), *map(str, numbers)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        facts["vllm"] = f"absent ({error})"
        return []
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
        facts["vllm"] = f"absent ({interpreter} failed: {reason})"
        return []
    theirs = json.loads(done.stdout.strip().splitlines()[-1])
    rows = theirs["rows"]
    assert {row["cached"] for row in rows} == {NUM_PREFIX}, "vLLM hits all of it, too"
    facts["vllm"] = (
        f"{theirs['version']}, KVCacheManager with {theirs['hash']}, prompts as lists, "
        f"by the CPU clock"
    )
    our = {bar.name: bar.measured for bar in ours}
    bars = [microseconds("vLLM: request and hashing", [r["request"] for r in rows])]
    for name, steps, counterpart in (
        ("vLLM: match", ("match",), MATCH),
        ("vLLM: match, allocate, free", ("match", "pool"), ADMISSION),
        ("vLLM: request and all that", ("request", "match", "pool"), FROM_LIST),
    ):
        bar = microseconds(name, [sum(row[step] for step in steps) for row in rows])
        ratio = bar.measured / our[counterpart]
        bars += [bar, Bar(name="  as a multiple of ours", measured=ratio, unit="×")]
    return bars


# Arrangement


class Scene:
    """A cache with seeded prompts, and a clock that only it advances."""

    def __init__(self, num_blocks: int, ledger: Ledger | None = None) -> None:
        config = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.ledger = ledger
        watchers = [] if ledger is None else [ledger]
        self.cache = PrefixCache(config, Retention(Lru), watchers=watchers)
        self.peek = partial(self.cache.peek, NAMESPACE, TENANT)
        self.rng = random.Random(1)
        self.now = 0.0
        self.prefixes: list[bytes] = []

    @classmethod
    def full(
        cls,
        *,
        num_prefixes: int = 1,
        num_sequences: int = NUM_SEQUENCES,
        num_spare: int = 0,
        overfill: int = 300,
    ) -> Scene:
        """Return a cache that holds so many sequences behind so many prefixes."""
        num_prefix_blocks = num_prefixes * (NUM_PREFIX // BLOCK_SIZE)
        num_blocks = num_prefix_blocks + num_sequences * NUM_TAIL_BLOCKS
        scene = cls(num_blocks + NUM_FRESH_BLOCKS + num_spare)
        scene.prefixes = [scene.tokens(NUM_PREFIX) for _ in range(num_prefixes)]
        # More than fit, so that evicting is the steady state.
        for index in range(num_sequences + overfill):
            scene.admit(scene.new_prompt(index))
        return scene

    @classmethod
    def behind(cls, num_prefix: int, ledger: Ledger | None) -> Scene:
        """Return a full cache of suffixes of one block behind a prefix of that length."""
        num_blocks = num_prefix // BLOCK_SIZE + NUM_SEQUENCES
        scene = cls(num_blocks + 2, ledger)
        scene.prefixes = [scene.tokens(num_prefix)]
        for _ in range(NUM_SEQUENCES):
            scene.admit(scene.prefixes[0] + scene.tokens(BLOCK_SIZE))
        return scene

    def tokens(self, num_tokens: int) -> bytes:
        """Return seeded token ids below 131,072 as a buffer."""
        size = num_tokens * TOKEN_BYTES
        mask = int.from_bytes(b"\xff\xff\x01\x00" * num_tokens, "little")
        ids = int.from_bytes(self.rng.randbytes(size), "little") & mask
        return ids.to_bytes(size, "little")

    def new_prompt(self, index: int) -> bytes:
        """Return a known prefix with a suffix never seen before."""
        return self.prefixes[index % len(self.prefixes)] + self.tokens(NUM_NEW)

    def new_list(self) -> list[int]:
        """Return a new prompt as a list of Python integers."""
        return list(TokenIds(self.new_prompt(0)))

    def time(self, verb: Callable[[bytes], object], repeats: int) -> list[float]:
        """Call `verb` with new prompts; return the microseconds of each call.

        Prompts are made 256 at a time, outside the clock: 13 MB, so that each has
        left the innermost CPU caches when its turn comes.
        """
        samples: list[float] = []
        while len(samples) < repeats:
            num_prompts = min(256, repeats - len(samples))
            prompts = [self.new_prompt(index) for index in range(num_prompts)]
            samples += [time_call(verb, prompt) for prompt in prompts]
        return samples

    def admit(self, prompt: bytes) -> None:
        """Acquire, publish and release."""
        cache = self.cache
        self.now = now = self.now + 0.001
        num_tokens = len(prompt) // TOKEN_BYTES
        lease = cache.acquire(
            NAMESPACE, TENANT, prompt, Demand(num_slots=num_tokens), now=now
        )
        assert lease is not None, "the cache has room for one request at a time"
        cache.publish(lease, prompt, num_tokens, now)
        cache.release(lease, now)

    def admit_list(self, ids: list[int]) -> None:
        """Convert a list of ids, then admit it."""
        self.admit(TokenIds.from_ids(ids).buffer)

    def publish_leaf(self) -> bytes:
        """Publish a prompt that shares with nobody."""
        prompt = self.tokens(LEAF_TOKENS)
        self.admit(prompt)
        return prompt

    def use(self, leaf: bytes) -> None:
        """Hit a leaf, if it is still there; publish nothing."""
        self.now += 0.001
        prompt = leaf + self.tokens(1)
        lease = self.cache.acquire(
            NAMESPACE, TENANT, prompt, Demand(num_slots=LEAF_TOKENS + 1), now=self.now
        )
        assert lease is not None, "a private block is free"
        self.cache.release(lease, self.now)

    def cut_prefix(self, num_nodes: int) -> None:
        """Branch off the prefix so often that its path has this many nodes."""
        (prefix,) = self.prefixes
        num_blocks = NUM_PREFIX // BLOCK_SIZE
        for cut in range(1, num_nodes):
            end = cut * num_blocks // num_nodes * BLOCK_SIZE * TOKEN_BYTES
            self.admit(prefix[:end] + self.tokens(BLOCK_SIZE))
        prompt = self.new_prompt(0)
        match = self.cache.tree.match(
            NAMESPACE, TENANT, prompt, limit=NUM_PREFIX + NUM_NEW - 1
        )
        assert match.num_blocks == num_blocks, "the whole prefix is cached"
        assert match.node is not None, "something matched"
        assert len(match.node.path()) == num_nodes, "and it is cut as asked"


# Measuring


def time_call(verb: Callable[[T], object], argument: T) -> float:
    """Return the microseconds of one call."""
    start = time.perf_counter_ns()
    verb(argument)
    return (time.perf_counter_ns() - start) / 1000


def microseconds(
    name: str, samples: Sequence[float], limit: float | None = None
) -> Bar:
    """Return a bar on the median call of all rounds."""
    return Bar(name=name, measured=statistics.median(samples), limit=limit, unit="µs")


def slowest_round(samples: Sequence[float]) -> Bar:
    """Return how much the rest of the machine disturbed a measurement."""
    name = f"  median of the slowest of {NUM_ROUNDS} rounds"
    return Bar(name=name, measured=max(medians(samples)), unit="µs")


def medians(samples: Sequence[float]) -> list[float]:
    """Cut samples into rounds; return the median of each."""
    bounds = [len(samples) * i // NUM_ROUNDS for i in range(NUM_ROUNDS + 1)]
    return [statistics.median(samples[a:b]) for a, b in pairwise(bounds)]


def exact(name: str, value: float, unit: str) -> Bar:
    """Return a row of counts."""
    return Bar(name=name, measured=value, unit=unit, basis="exact")


if __name__ == "__main__":
    sys.exit(main())
