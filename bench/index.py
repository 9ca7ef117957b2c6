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
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from bench.report import Bar, finish, parser, pin_to_one_core
from stemkv.core import CacheConfig, Domain, Lru, PrefixCache, TokenIds
from stemkv.core.tokens import TOKEN_BYTES

BLOCK_SIZE = 16
NUM_PREFIX = 12_000
NUM_NEW = 500
NUM_SEQUENCES = 2_000
NUM_LEAVES = 100_000
LEAF_TOKENS = 64

NAMESPACE = bytes(range(32))
TENANT = Domain.private("tenant")

# What one admission adds to the tree, and what it holds while it runs.
NUM_TAIL_BLOCKS = (NUM_PREFIX + NUM_NEW) // BLOCK_SIZE - NUM_PREFIX // BLOCK_SIZE
NUM_FRESH_BLOCKS = NUM_TAIL_BLOCKS + 1

T = TypeVar("T")


def main() -> int:
    """Measure everything, print the table, return the exit code."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    facts = {"machine": pin_to_one_core()}
    facts["repeats"] = "few (--quick)" if options.quick else "full"
    facts["values"] = (
        "medians over single calls by the wall clock, clock overhead included; "
        "exact ones are counts"
    )
    repeats = 256 if options.quick else 2048
    bars = [*measure_hits(repeats), *measure_prefixes(repeats)]
    bars += measure_scaling(repeats)
    bars += measure_eviction(repeats // 4)
    bars += measure_depth(repeats // 4)
    bars += measure_memory()
    bars += compare_with_vllm(bars, facts, repeats // 8)
    return finish("bench.index: prefix hits", bars, options, facts=facts)


# Scenarios


def measure_hits(repeats: int) -> list[Bar]:
    """Match and admission behind one prefix, and what converting a list adds."""
    scene = Scene(num_prefixes=1, num_sequences=NUM_SEQUENCES)
    name = f"{NUM_PREFIX:,}-token hit + {NUM_NEW} new"
    peeks = [us for us, _ in scene.time(scene.peek, repeats)]
    same = scene.new_prompt(0)
    warm = [time_call(scene.peek, same) for _ in range(repeats)]
    cycles, evictions = [], []
    for us, num_evicted in scene.time(scene.admit, repeats):
        cycles.append(us)
        evictions.append(num_evicted)
    lists = [list(TokenIds(scene.new_prompt(0))) for _ in range(64)]
    conversions = [
        time_call(TokenIds.from_ids, ids) for _ in range(repeats // 64) for ids in lists
    ]
    checks = [time_call(TokenIds, scene.new_prompt(0)) for _ in range(repeats // 8)]
    from_lists = [
        time_call(scene.admit_list, list(TokenIds(scene.new_prompt(0))))
        for _ in range(repeats // 8)
    ]
    return [
        microseconds(f"match (peek), {name}", peeks, limit=15),
        microseconds("  the same prompt again and again", warm),
        microseconds(
            f"admission (acquire, publish, release), {name}", cycles, limit=60
        ),
        exact("  blocks evicted per admission", statistics.mean(evictions), "blocks"),
        microseconds(f"list of {NUM_PREFIX + NUM_NEW:,} ids to buffer", conversions),
        microseconds("buffer checked for negative ids", checks),
        microseconds("admission from a list (conversion included)", from_lists),
    ]


def measure_prefixes(repeats: int) -> list[Bar]:
    """The same work with 50 prefixes in turn, so that edges are colder, too."""
    scene = Scene(num_prefixes=50, num_sequences=NUM_SEQUENCES)
    peeks = [us for us, _ in scene.time(scene.peek, repeats)]
    cycles = [us for us, _ in scene.time(scene.admit, repeats)]
    return [
        microseconds("match, 50 distinct prefixes", peeks),
        microseconds("admission, 50 distinct prefixes", cycles),
    ]


def measure_scaling(repeats: int) -> list[Bar]:
    """Match time among few and among many cached sequences, measured in turn."""
    few = Scene(num_prefixes=1, num_sequences=200)
    many = Scene(num_prefixes=1, num_sequences=20_000)
    few_us, many_us = [], []
    pairs = zip(few.time(few.peek, repeats), many.time(many.peek, repeats), strict=True)
    for (one, _), (other, _) in pairs:
        few_us.append(one)
        many_us.append(other)
    ratio = statistics.median(many_us) / statistics.median(few_us)
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
    scene = Scene.empty(num_blocks=NUM_LEAVES * blocks_per_leaf + 64)
    leaves = [scene.publish_leaf() for _ in range(NUM_LEAVES)]
    times, dropped = [], []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        num_dropped = scene.cache.evict(num_victims * blocks_per_leaf, scene.now)
        times.append((time.perf_counter_ns() - start) / 1000)
        dropped.append(num_dropped)
        for _ in range(num_victims):
            leaves.append(scene.publish_leaf())
            scene.use(scene.rng.choice(leaves[-NUM_LEAVES:]))
    return [
        microseconds(
            f"evict 512 tokens among {NUM_LEAVES:,} leaves", times, limit=150
        ),
        exact("  blocks dropped per call", statistics.mean(dropped), "blocks"),
    ]


def measure_depth(repeats: int) -> list[Bar]:
    """Match and admission when the prefix is cut into many nodes."""
    bars = []
    for blocks_per_node in (7, 1):
        scene = Scene(num_prefixes=1, num_sequences=100, num_spare=800)
        num_nodes = scene.cut_prefix(blocks_per_node)
        peeks = [us for us, _ in scene.time(scene.peek, repeats)]
        cycles = [us for us, _ in scene.time(scene.admit, repeats)]
        bars += [
            microseconds(f"match, path of {num_nodes} nodes", peeks),
            microseconds(f"admission, path of {num_nodes} nodes", cycles),
        ]
    return bars


def measure_memory() -> list[Bar]:
    """Heap bytes of tree, pool and policy; prompts and KV are not in it."""
    tracemalloc.start()
    scene = Scene(num_prefixes=1, num_sequences=NUM_SEQUENCES, overfill=0)
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
    done = subprocess.run(
        [interpreter, str(script), *map(str, numbers)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        facts["vllm"] = f"absent ({interpreter} failed: {reason})"
        return []
    theirs = json.loads(done.stdout.strip().splitlines()[-1])
    assert theirs["cached"] == NUM_PREFIX, "vLLM hits the whole prefix as well"
    facts["vllm"] = (
        f"{theirs['version']}, KVCacheManager with {theirs['hash']}, prompts as lists"
    )
    request, match, pool = theirs["request"], theirs["match"], theirs["pool"]
    our = {bar.name.partition(",")[0].partition(" (")[0]: bar.measured for bar in ours}
    rows = [
        ("vLLM: match", match, our["match"]),
        ("vLLM: match, allocate, free", match + pool, our["admission"]),
        (
            "vLLM: the same with request and hashing",
            request + match + pool,
            our["admission from a list"],
        ),
    ]
    bars = [Bar(name="vLLM: request and hashing", measured=request, unit="µs")]
    for name, value, our_value in rows:
        bars.append(Bar(name=name, measured=value, unit="µs"))
        bars.append(Bar(name="  vLLM / ours", measured=value / our_value, unit="×"))
    return bars


# Arrangement


class Scene:
    """A full cache with seeded prompts, and a clock that only it advances."""

    def __init__(
        self,
        *,
        num_prefixes: int,
        num_sequences: int,
        num_spare: int = 0,
        overfill: int = 300,
    ) -> None:
        num_prefix_blocks = num_prefixes * (NUM_PREFIX // BLOCK_SIZE)
        num_blocks = num_prefix_blocks + num_sequences * NUM_TAIL_BLOCKS
        self._start(num_blocks + NUM_FRESH_BLOCKS + num_spare)
        self.prefixes = [self.tokens(NUM_PREFIX) for _ in range(num_prefixes)]
        # More than fit, so that evicting is the steady state.
        for index in range(num_sequences + overfill):
            self.admit(self.new_prompt(index))

    @classmethod
    def empty(cls, num_blocks: int) -> Scene:
        """Return a scene with nothing cached."""
        scene = cls.__new__(cls)
        scene._start(num_blocks)
        return scene

    def _start(self, num_blocks: int) -> None:
        config = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.cache = PrefixCache(config, Lru())
        self.rng = random.Random(1)
        self.now = 0.0
        self.prefixes: list[bytes] = []

    def tokens(self, num_tokens: int) -> bytes:
        """Return seeded token ids below 131,072 as a buffer."""
        size = num_tokens * TOKEN_BYTES
        mask = int.from_bytes(b"\xff\xff\x01\x00" * num_tokens, "little")
        ids = int.from_bytes(self.rng.randbytes(size), "little") & mask
        return ids.to_bytes(size, "little")

    def new_prompt(self, index: int) -> bytes:
        """Return a known prefix with a suffix never seen before."""
        return self.prefixes[index % len(self.prefixes)] + self.tokens(NUM_NEW)

    def time(
        self, verb: Callable[[bytes], T], repeats: int
    ) -> Iterator[tuple[float, T]]:
        """Call `verb` with new prompts; yield microseconds and its answer.

        Prompts are made 256 at a time, outside the clock: 13 MB, so that each has
        left the innermost CPU caches when its turn comes.
        """
        for start in range(0, repeats, 256):
            prompts = [self.new_prompt(start + i) for i in range(256)]
            for prompt in prompts[: repeats - start]:
                begin = time.perf_counter_ns()
                answer = verb(prompt)
                yield (time.perf_counter_ns() - begin) / 1000, answer

    def peek(self, prompt: bytes) -> int:
        """Match without touching anything."""
        return self.cache.peek(NAMESPACE, TENANT, prompt).num_tokens

    def admit(self, prompt: bytes) -> int:
        """Acquire, publish and release; return how many blocks that evicted."""
        cache = self.cache
        num_evicted = cache._num_evicted
        self.now = now = self.now + 0.001
        num_tokens = len(prompt) // TOKEN_BYTES
        lease = cache.acquire(NAMESPACE, TENANT, prompt, num_slots=num_tokens, now=now)
        assert lease is not None, "the cache has room for one request at a time"
        cache.publish(lease, prompt, num_tokens, now)
        cache.release(lease, now)
        return cache._num_evicted - num_evicted

    def admit_list(self, ids: list[int]) -> int:
        """Convert a list of ids, then admit it."""
        return self.admit(TokenIds.from_ids(ids).buffer)

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
            NAMESPACE, TENANT, prompt, num_slots=LEAF_TOKENS + 1, now=self.now
        )
        assert lease is not None, "a private block is free"
        self.cache.release(lease, self.now)

    def cut_prefix(self, blocks_per_node: int) -> int:
        """Branch off the prefix every so many blocks; return the nodes of its path."""
        (prefix,) = self.prefixes
        step = blocks_per_node * BLOCK_SIZE * TOKEN_BYTES
        for end in range(step, len(prefix), step):
            self.admit(prefix[:end] + self.tokens(BLOCK_SIZE))
        # One block more: the branches there are, and the whole prefix is matched.
        match = self.cache.tree.match(
            NAMESPACE, TENANT, self.new_prompt(0), limit=NUM_PREFIX + NUM_NEW - 1
        )
        assert match.num_blocks * BLOCK_SIZE == NUM_PREFIX, "all of it is cached"
        assert match.node is not None, "something matched"
        return len(match.node.path())


# Measuring


def time_call(verb: Callable[[T], object], argument: T) -> float:
    """Return the microseconds of one call."""
    start = time.perf_counter_ns()
    verb(argument)
    return (time.perf_counter_ns() - start) / 1000


def microseconds(
    name: str, samples: Iterable[float], limit: float | None = None
) -> Bar:
    """Return a bar on the median."""
    value = statistics.median(samples)
    return Bar(name=name, measured=value, limit=limit, unit="µs")


def exact(name: str, value: float, unit: str) -> Bar:
    """Return a row of counts."""
    return Bar(name=name, measured=value, unit=unit, basis="exact")


if __name__ == "__main__":
    sys.exit(main())
