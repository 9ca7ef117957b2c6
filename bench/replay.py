"""Replaying traces: the hit rates that are known, and how long finding them takes.

Hit rates of the Mooncake conversation trace are compared with figures published beside
it and with another simulator's. That one (kvcache-simulator 0.1.3, its own C++ cache)
was run on the same files; its curves come with the traces. Two rules differ there: it
lets a hit cover a whole prompt, where we compute the last token, and its optimum may
leave units out of the cache, as `clairvoyant_selective` does. libCacheSim knows blocks
as unrelated objects only, may evict a block under its children and counts hits behind a
miss, so no token hit rate of a prefix cache can be had from it.

The timed replay is compared with AISimulate, a compiled simulator, when it is
importable by the interpreter that STEMKV_AISIMULATE_PYTHON names: the same trace, one
H200 with Qwen3-32B in FP8, the same memory and limits.

The traces are looked for in `../shared/traces`.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.report import Bar, finish, parser, pin_to_one_core
from stemkv.core.retention.policies import EvictionConfig
from stemkv.sim.bounds import clairvoyant, clairvoyant_selective, infinite
from stemkv.sim.catalogue import device_named, model_named
from stemkv.sim.config import ReplayConfig
from stemkv.sim.distance import lru_curve
from stemkv.sim.formats import read_trace
from stemkv.sim.hits import Hits
from stemkv.sim.presets import LARGE
from stemkv.sim.pricing import roofline
from stemkv.sim.replay import replay
from stemkv.sim.reuse import Reuses, find_reuses
from stemkv.sim.sequence import replay_sequence
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
CONVERSATION = TRACES / "mooncake" / "conversation_trace.jsonl.gz"
CURVES = TRACES / "reference" / "kvcache_simulator_0.1.3_curves.csv"

TOLERANCE = 0.2  # points
CAPACITIES = (500, 1_000, 2_000, 4_000, 8_000, 16_000)  # blocks of 512 tokens
# Published to three digits, path pinned, forced insertion, sequential.
PUBLISHED_LRU = (0.043, 0.045, 0.055, 0.088, 0.182, 0.268)
PUBLISHED_CLAIRVOYANT = (0.117, 0.183, 0.254, 0.327, 0.373, 0.374)
PUBLISHED_COLD = 0.374
PUBLISHED_STEADY = 0.398

MIN_UNITS_PER_S = 0.3e6
MAX_CURVE_S = 10.0
SPEED_CAPACITY = 4_000
MAX_TIMED_S = 30.0
MAX_DEMO_S = 30.0
MAX_AGENTS_GIB = 2.0
MIN_CORES_OF_SWEEP = 1.5  # of two
NUM_CONFIGURATIONS = 24

AGENTS = TRACES / "kv-cache-tester" / "sessions.jsonl.zst"
COMMAND = Path(sys.executable).with_name("stemkv")
PEER = Path(__file__).with_name("aisimulate_replay.py")
# What AISimulate finds for Qwen3-32B-FP8 on an H200: KV memory and context in tokens.
PEER_KV_TOKENS = 737_808
PEER_CONTEXT = 40_960
PEER_BLOCK_SIZE = 64

# One tenant: what is shared is all there is to reuse.
RULE = SharingRule()


def main() -> int:
    """Compare and measure everything, print the table, return the exit code."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    all_cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
    facts = {"machine": pin_to_one_core()}
    facts["repeats"] = "one (--quick)" if options.quick else "median of 3, timed 2"
    facts["measured"] = "CPU time of this process, which has one thread"
    facts["exact"] = "counts, the same in every run"
    conversation = read_trace(CONVERSATION)
    facts["conversation"] = (
        f"{len(conversation.requests):,} requests, "
        f"{conversation.num_input_tokens:,} prompt tokens, "
        f"{num_units(conversation):,} units of {conversation.unit_size}"
    )
    repeats = 1 if options.quick else 3
    bars = compare_with_published(conversation, CAPACITIES)
    bars += compare_with_simulator(CURVES)
    bars += measure_sequence(conversation, repeats)
    bars += measure_curve(conversation, repeats)
    bars += measure_timed(repeats)
    if all_cores:
        os.sched_setaffinity(0, all_cores)  # what follows runs as a user would run it
    bars += measure_demo()
    bars += measure_sweep()
    if not options.quick:
        bars += measure_agents()
    return finish("bench.replay: traces through the core", bars, options, facts=facts)


# Hit rates


def compare_with_published(trace: Trace, capacities: Sequence[int]) -> list[Bar]:
    """Infinite cache, LRU through the real cache, the curve, and Belady's choice."""
    reuses = find_reuses(trace, RULE)
    curve = lru_curve(reuses)
    top = infinite(reuses)
    bars = [
        rate("infinite cache", top.hit_rate, PUBLISHED_COLD),
        rate("infinite cache, steady half", top.steady_hit_rate, PUBLISHED_STEADY),
    ]
    apart = 0
    for size, lru, optimum in zip(
        capacities, PUBLISHED_LRU, PUBLISHED_CLAIRVOYANT, strict=True
    ):
        replayed = replay_sequence(trace, num_blocks=size, rule=RULE).hits
        apart = max(apart, abs(replayed.hit_tokens - curve.at(size).hit_tokens))
        bars.append(rate(f"LRU, {size:,} blocks", replayed.hit_rate, lru))
        chosen = clairvoyant(reuses, size)
        bars.append(rate(f"clairvoyant, {size:,} blocks", chosen.hit_rate, optimum))
    bars.append(
        Bar(
            name="most that curve and replay differ at one of these",
            measured=apart,
            limit=0,
            unit="tokens",
            basis="exact",
        )
    )
    return bars


def compare_with_simulator(curves: Path) -> list[Bar]:
    """Every capacity of the other simulator's curves, over the steady half."""
    bars = []
    for name, points in points_by_trace(curves).items():
        reuses = reuses_of(name)
        curve = lru_curve(reuses)
        top = infinite(reuses)
        optimum = partial(clairvoyant_selective, reuses)
        of: dict[str, list[Point]] = {}
        for point in points:
            is_small = (
                point.policy == "lru" and point.num_blocks < curve.longest_request
            )
            of.setdefault("small" if is_small else point.policy, []).append(point)
        bars += [
            most_apart(f"infinite, {name}", of["infinite"], lambda _, top=top: top),
            most_apart(f"LRU, {name}", of["lru"], curve.at),
            most_apart(f"optimal, {name}", of["optimal"], optimum),
        ]
        # Such a cache cannot hold every request, and the rules for those differ.
        small = most_apart("  LRU, smaller than a request", of["small"], curve.at)
        bars.append(replace(small, limit=None))
    return bars


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the other simulator's curves."""

    policy: str
    num_blocks: int
    hit_tokens: int
    input_tokens: int

    def apart(self, hits: Hits) -> float:
        """Return how far ours are, in points of its prompt tokens."""
        return 100 * abs(hits.steady_hit_tokens - self.hit_tokens) / self.input_tokens


def points_by_trace(curves: Path) -> dict[str, list[Point]]:
    """Read the curves; an infinite cache has blocks enough."""
    result: dict[str, list[Point]] = {}
    with curves.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            result.setdefault(row["trace"], []).append(
                Point(
                    policy=row["policy"],
                    num_blocks=int(row["capacity_blocks"] or 2**30),
                    hit_tokens=int(row["hit_tokens"]),
                    input_tokens=int(row["measured_input_tokens"]),
                )
            )
    return result


def most_apart(name: str, points: list[Point], ours: Callable[[int], Hits]) -> Bar:
    """Compare ours with some points and report the largest difference."""
    return Bar(
        name=f"{name}: most apart of {len(points)}",
        measured=max(point.apart(ours(point.num_blocks)) for point in points),
        limit=TOLERANCE,
        unit="points",
        basis="exact",
    )


def reuses_of(name: str) -> Reuses:
    """Read one of the traces as the other simulator does: without unit, no request."""
    trace = read_trace(TRACES / f"{name}.jsonl.gz")
    hashed = [request for request in trace.requests if request.units]
    return find_reuses(replace(trace, requests=hashed), RULE)


def rate(name: str, measured: float, published: float) -> Bar:
    """Compare a share with a published one."""
    return Bar(
        name=f"{name}: {measured:.2%}, published {published:.1%}; apart",
        measured=100 * abs(measured - published),
        limit=TOLERANCE,
        unit="points",
        basis="exact",
    )


# Speed


def measure_sequence(trace: Trace, repeats: int) -> list[Bar]:
    """Units per second through the real cache, with evictions and without."""
    bars = []
    for name, size in (("evicting", SPEED_CAPACITY), ("unlimited", None)):
        seconds = time_calls(
            lambda size=size: replay_sequence(trace, num_blocks=size, rule=RULE),
            repeats,
        )
        bars.append(
            Bar(
                name=f"sequential replay, {name}",
                measured=num_units(trace) / seconds / 1e6,
                limit=MIN_UNITS_PER_S / 1e6,
                sense="at least",
                unit="M units/s",
            )
        )
    return bars


def measure_curve(trace: Trace, repeats: int) -> list[Bar]:
    """The whole LRU curve, and one point of the clairvoyant one."""
    reuses = find_reuses(trace, RULE)
    return [
        Bar(
            name="LRU at every capacity, from the trace",
            measured=time_calls(lambda: lru_curve(find_reuses(trace, RULE)), repeats),
            limit=MAX_CURVE_S,
            unit="s",
        ),
        Bar(
            name=f"clairvoyant, {SPEED_CAPACITY:,} blocks",
            measured=time_calls(lambda: clairvoyant(reuses, SPEED_CAPACITY), repeats),
            unit="s",
        ),
    ]


def measure_timed(repeats: int) -> list[Bar]:
    """Batching, chunks and latency, from the file to the result."""
    num_runs = 1 if repeats == 1 else 2
    bars = []
    for name, num_replicas, block_size, limit in (
        ("one H200 with Qwen3-32B FP8, blocks of 64", 1, PEER_BLOCK_SIZE, MAX_TIMED_S),
        ("the same, blocks of 16", 1, 16, None),
        ("four of them, blocks of 64", 4, PEER_BLOCK_SIZE, None),
    ):
        rates: list[float] = []

        def run(
            num_replicas: int = num_replicas,
            block_size: int = block_size,
            rates: list[float] = rates,
        ) -> None:
            rates.append(timed_hit_rate(num_replicas, block_size))

        seconds = time_calls(run, num_runs)
        bars.append(
            Bar(
                name=f"timed replay, whole trace, {name}: hit rate {rates[0]:.3%}",
                measured=seconds,
                limit=limit,
                unit="s",
            )
        )
    return bars + compare_with_peer()


def compare_with_peer() -> list[Bar]:
    """The requests that AISimulate runs: those within its model's context."""
    peer = peer_replay()
    if peer is None:
        return []
    start = time.process_time()
    hit_rate = timed_hit_rate(1, PEER_BLOCK_SIZE, max_input_length=PEER_CONTEXT)
    seconds = time.process_time() - start
    return [
        Bar(
            name=f"prompts up to {PEER_CONTEXT:,} tokens: hit rate {hit_rate:.3%}",
            measured=seconds,
            unit="s",
        ),
        Bar(
            name=f"AISimulate {peer['version']}: hit rate {peer['hit_rate']:.3%}",
            measured=peer["simulation_s"],
            unit="s",
        ),
        Bar(
            name="ours / AISimulate, seconds",
            measured=seconds / peer["simulation_s"],
            unit="x",
        ),
        Bar(
            name="hit rates apart",
            measured=100 * abs(hit_rate - peer["hit_rate"]),
            limit=TOLERANCE,
            unit="points",
            basis="exact",
        ),
    ]


def timed_hit_rate(
    num_replicas: int, block_size: int, *, max_input_length: int | None = None
) -> float:
    """Read and replay the conversation trace as the peer does; return the hit rate."""
    trace = read_trace(CONVERSATION)
    if max_input_length is not None:
        fitting = [r for r in trace.requests if r.input_length <= max_input_length]
        trace = replace(trace, requests=fitting)
    costs = roofline(
        model_named("qwen3-32b"),
        device_named("h200"),
        kv_dtype="fp8",
        weight_dtype="fp8",
    )
    config = ReplayConfig(
        core=replace(
            LARGE.sized(PEER_KV_TOKENS // block_size, block_size=block_size),
            scheduler=replace(LARGE.scheduler, watermark=0.0, lookahead=0),
            eviction=EvictionConfig(name="lru"),  # as the peer's
        ),
        num_replicas=num_replicas,
    )
    return replay(trace, config, costs).tokens.hit_rate


def peer_replay() -> dict[str, Any] | None:
    """Return what AISimulate says of the same; `None` where there is none."""
    python = os.environ.get("STEMKV_AISIMULATE_PYTHON")
    if not python:
        return None
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(gzip.decompress(CONVERSATION.read_bytes()))
        file.flush()
        done = subprocess.run(
            [python, str(PEER), file.name], capture_output=True, text=True, check=True
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_demo() -> list[Bar]:
    """The command without input, as a newcomer runs it."""
    with tempfile.TemporaryDirectory() as folder:
        run = run_command("replay", "--demo", "--html", f"{folder}/report.html")
        size = Path(folder, "report.html").stat().st_size
    return [
        Bar(
            name=f"stemkv replay --demo, with a report of {size / 1e6:.1f} MB",
            measured=run.wall_s,
            limit=MAX_DEMO_S,
            unit="s",
        )
    ]


def measure_sweep() -> list[Bar]:
    """24 configurations: progress on standard error, and both cores at work."""
    memories = [f"{gib}GiB" for gib in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32)]
    run = run_command(
        "sweep", str(CONVERSATION), "--limit", "1500", "--memory", ",".join(memories),
        "--sharing", "isolated,shared", "--block-size", "64", "--json", "-",
    )  # fmt: skip
    num_cells = len(json.loads(run.out)["cells"])
    return [
        Bar(
            name="sweep, configurations",
            measured=num_cells,
            limit=NUM_CONFIGURATIONS,
            sense="at least",
            unit="",
            basis="exact",
        ),
        Bar(
            name=f"sweep in {run.wall_s:.0f} s, cores used",
            measured=run.cpu_s / run.wall_s,
            limit=MIN_CORES_OF_SWEEP,
            sense="at least",
            unit="cores",
        ),
        Bar(
            name="sweep, bytes of progress",
            measured=len(run.err),
            limit=1,
            sense="at least",
            unit="B",
            basis="exact",
        ),
    ]


def measure_agents() -> list[Bar]:
    """The largest trace: 33,609 requests, 4.3 billion prompt tokens."""
    run = run_command("replay", str(AGENTS), "--no-clock", "--json", "-")
    return [
        Bar(
            name=f"agent sessions, sequential, in {run.wall_s:.0f} s: peak memory",
            measured=run.peak_gib,
            limit=MAX_AGENTS_GIB,
            unit="GiB",
        )
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished command."""

    out: str
    err: str
    wall_s: float
    cpu_s: float  # of it and its children
    peak_gib: float  # largest resident set of it or one of its children


def run_command(*arguments: str) -> Run:
    """Run `stemkv` in a process of its own and measure that."""
    code = (
        "import json, resource, subprocess, sys, time\n"
        "start = time.perf_counter()\n"
        "done = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
        "wall = time.perf_counter() - start\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([done.returncode, done.stdout, done.stderr, wall,"
        " used.ru_utime + used.ru_stime, used.ru_maxrss]))\n"
    )
    # In between, so that the children counted are those of this command only.
    done = subprocess.run(
        [sys.executable, "-c", code, str(COMMAND), *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    exit_code, out, err, wall_s, cpu_s, peak_kib = json.loads(done.stdout)
    if exit_code:
        raise SystemExit(f"stemkv {' '.join(arguments)} exited {exit_code}:\n{err}")
    return Run(out=out, err=err, wall_s=wall_s, cpu_s=cpu_s, peak_gib=peak_kib / 2**20)


def num_units(trace: Trace) -> int:
    """Return how many units the trace's requests have, repeated ones again."""
    return sum(len(request.units) for request in trace.requests)


def time_calls(call: Callable[[], object], repeats: int) -> float:
    """Return the median CPU time of a call in seconds."""
    return statistics.median(durations(call, repeats))


def durations(call: Callable[[], object], repeats: int) -> Iterator[float]:
    """Yield the CPU time of each call: it never waits, so others must not count."""
    for _ in range(repeats):
        start = time.process_time()
        call()
        yield time.process_time() - start


if __name__ == "__main__":
    raise SystemExit(main())
