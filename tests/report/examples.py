"""A replay's result as the replayer would give it, without the replayer.

A toy queue fills it: sums hold, times are in order, and shapes look like real ones.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

from stemkv.core.books.entry import MissReason
from stemkv.measure.gap import with_gaps
from stemkv.measure.results import (
    GIB,
    Bound,
    CapacityCurve,
    Check,
    CurvePoint,
    LatencySummary,
    MemorySample,
    PrefixValue,
    ReplayResult,
    RequestResult,
    SavedWork,
    Source,
    StepSpan,
    SweepCell,
    SweepResult,
    TenantResult,
    TokenTotals,
    TraceFacts,
    WriterReader,
)
from stemkv.measure.timeline import percentile

BLOCK_SIZE = 16
BLOCK_BYTES = 2 * 1024 * 1024
NUM_BLOCKS = 768  # 1.5 GiB
TENANTS = {"acme": 0.45, "beta": 0.25, "globex": 0.15, "initech": 0.1, "umbrella": 0.05}
CATALOGUE = "llama-3.1-8b on h100, estimated"


def make_result(
    *,
    num_requests: int = 400,
    tenants: Sequence[str] = tuple(TENANTS),
    checks: Sequence[Check] = (),
    text: str | None = None,
) -> ReplayResult:
    rng = random.Random(7)
    requests = _requests(rng, num_requests, tenants)
    totals = _totals(requests)
    ttft = _summary("TTFT", _ttfts(requests))
    end_s = max((r.end_s or 0.0 for r in requests), default=0.0)
    own = [[r for r in requests if r.tenant == name] for name in tenants]
    by_tenant = tuple(
        _tenant(name, part) for name, part in zip(tenants, own, strict=True)
    )
    return ReplayResult(
        trace=TraceFacts(
            name="five-tenants.jsonl.gz",
            format="openai-chat",
            num_requests=num_requests,
            num_tenants=len(tenants),
            duration_s=max((r.arrival_s for r in requests), default=0.0),
            prompt_tokens=totals.prompt,
            output_tokens=totals.output,
            unit_size=BLOCK_SIZE,
            is_exact=True,
            num_skipped_lines=7,
            problems=("five-tenants.jsonl.gz:31: messages: not a list",),
            notes=("arrivals were sorted",),
        ),
        config={
            "model": "llama-3.1-8b",
            "device": "h100",
            "memory": "1.5 GiB",
            "sharing": "shared",
            "eviction": "reuse_index",
            "objective": "tokens",
            "hints": "trace",
            "lookahead": 32,
            "quotas": None,
            "order": "fcfs",
            "seed": 0,
            "rate": None,
        },
        cost_source=CATALOGUE,
        cost_kind=Source.ESTIMATED,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        block_bytes=BLOCK_BYTES,
        num_replicas=1,
        end_s=end_s,
        num_finished=num_requests,
        num_refused=0,
        tokens=totals,
        saved=_saved(requests),
        request_hit_rate=_share(
            sum(r.reused_tokens > 0 for r in requests), num_requests
        ),
        steady_hit_rate=_share(totals.reused, totals.prompt),
        num_evicted_blocks=sum(t.num_evicted_blocks for t in by_tenant),
        num_refused_blocks=sum(t.num_refused_blocks for t in by_tenant),
        num_published_blocks=sum(r.retained_blocks for r in requests),
        peak_active_blocks=700,
        regret_tokens=sum(t.regret_tokens for t in by_tenant),
        regret_delay_s=_summary("regret", [rng.expovariate(0.02) for _ in range(90)]),
        num_preemptions=3,
        num_stalls=sum(t.num_stalls for t in by_tenant),
        stall_s=math.fsum(t.stall_s for t in by_tenant),
        stall_active_blocks=702.5,
        stall_shared_blocks=210.0,
        stall_cached_blocks=31.0,
        stall_accounts=(("acme", 500.5), ("(public)", 190.0), ("beta", 12.0)),
        latencies=(
            ttft,
            _summary("TPOT", [rng.uniform(0.011, 0.024) for _ in requests]),
            _summary("ITL", [rng.expovariate(70) for _ in requests]),
            _summary(
                "E2E", [r.end_s - r.arrival_s for r in requests if r.end_s is not None]
            ),
            _summary(
                "queue",
                [
                    r.admitted_s - r.arrival_s
                    for r in requests
                    if r.admitted_s is not None
                ],
            ),
        ),
        slo_ttft_s=1.0,
        slo_tpot_s=0.05,
        goodput_rps=2.31,
        goodput_share=0.874,
        output_tokens_per_s=_share(totals.output, end_s),
        busy_share=0.731,
        tenants=by_tenant,
        writers=_writers(tenants, totals.reused),
        prefixes=_prefixes(rng, tenants, text),
        bounds=(
            Bound(name="infinite cache", hit_rate=0.61, note="any policy, any memory"),
            Bound(
                name="clairvoyant eviction",
                hit_rate=0.55,
                note="any eviction at this size, requests in order",
            ),
        ),
        curves=_curves(),
        memory=_memory(rng, end_s) if requests else (),
        steps=_steps(rng, end_s) if requests else (),
        num_steps=48_210,
        requests=requests,
        checks=tuple(checks)
        or (
            Check(
                name="prompt = reused + computed",
                left=totals.prompt,
                right=totals.reused + totals.computed,
            ),
            Check(
                name="misses = computed",
                left=sum(totals.misses.values()),
                right=totals.computed,
            ),
        ),
    )


def make_sweep() -> SweepResult:
    cells = []
    sizes = (64, 128, 256, 512, 1024)
    for sharing, loss in (("shared", 0.0), ("isolated", 0.13)):
        for eviction, gain in (("lru", 0.0), ("s3fifo", 0.02), ("value", 0.035)):
            for index, blocks in enumerate(sizes):
                hit_rate = 0.6 * (1 - math.exp(-(index + 1) / 2.4)) - loss + gain
                cells.append(
                    SweepCell(
                        num_blocks=blocks,
                        gib=blocks * BLOCK_BYTES / GIB,
                        eviction=eviction,
                        order="fcfs",
                        sharing=sharing,
                        num_refused=0,
                        hit_rate=hit_rate,
                        saved_s=hit_rate * 540,
                        seconds_per_gib_s=hit_rate / (index + 1),
                        ttft_p50_s=0.4 - hit_rate / 3,
                        ttft_p99_s=3.2 - 2 * hit_rate,
                        goodput_rps=1.4 + hit_rate,
                        num_evicted_blocks=20_000 >> index,
                        num_refused_blocks=0,
                        regret_tokens=90_000 >> index,
                        num_preemptions=5 - index,
                        worst_tenant_ttft_p99_s=4.1 - 2 * hit_rate,
                    )
                )
    result = make_result(num_requests=40)
    return SweepResult(
        trace=result.trace,
        config={"seed": 0, "model": "llama-3.1-8b"},
        cost_source=CATALOGUE,
        cells=tuple(cells),
        curves=_curves(),
    )


def make_comparison(*, sizes: Sequence[int] = (64, 128, 256, 512, 1024)) -> SweepResult:
    """Return every eviction policy at every size, without a clock."""
    gains = {
        "lru": 0.0,
        "lfu_da": -0.06,
        "gdsf": -0.02,
        "s3fifo": 0.03,
        "reuse_index": 0.08,
        "clairvoyant": 0.3,
    }
    cells = []
    for index, blocks in enumerate(sizes):
        for eviction, gain in gains.items():
            wave = 1 - 0.12 * index + 0.04 * math.sin(3 * index + 20 * gain)
            hit_rate = 0.12 * (index + 1) + gain * wave / 2
            cells.append(
                SweepCell(
                    num_blocks=blocks,
                    gib=blocks * BLOCK_BYTES / GIB,
                    eviction=eviction,
                    order="fcfs",
                    sharing="isolated",
                    num_refused=0,
                    hit_rate=hit_rate,
                    saved_s=hit_rate * 540 + (9 if gain > 0 else 0),
                    seconds_per_gib_s=math.nan,
                    ttft_p50_s=None,
                    ttft_p99_s=None,
                    goodput_rps=None,
                    num_evicted_blocks=20_000 >> index,
                    num_refused_blocks=0,
                    regret_tokens=int(400_000 * (1 - hit_rate)),
                    num_preemptions=0,
                    worst_tenant_ttft_p99_s=None,
                    policy_cpu_s=None if eviction == "clairvoyant" else 0.2 + gain,
                )
            )
    return dataclasses.replace(make_sweep(), cells=with_gaps(cells))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _requests(
    rng: random.Random, number: int, tenants: Sequence[str]
) -> tuple[RequestResult, ...]:
    weights = [TENANTS.get(name, 0.02) for name in tenants]
    arrival = free_at = 0.0
    requests = []
    for index in range(number):
        # Two bursts in an otherwise even stream.
        burst = (
            4.0 if 0.3 < index / number < 0.4 or 0.7 < index / number < 0.75 else 1.0
        )
        arrival += rng.expovariate(1.1 * burst) if index else 0.0
        tenant = rng.choices(tenants, weights)[0]
        prompt = int(rng.lognormvariate(7.6, 0.7)) + 2
        reused = (
            int(prompt * rng.choice((0, 0.3, 0.6, 0.85))) // BLOCK_SIZE * BLOCK_SIZE
        )
        misses = _split(rng, prompt - reused)
        output = rng.randint(16, 400)
        prefill = (prompt - reused) / 3500
        admitted = max(arrival, free_at)
        first_token = admitted + prefill
        free_at = admitted + prefill * 0.9 + output * 0.0006
        requests.append(
            RequestResult(
                request_id=f"chatcmpl-{rng.getrandbits(64):016x}",
                tenant=tenant,
                domain=f"private:{tenant}",
                identity="llama-3.1-8b",
                namespace=f"{rng.getrandbits(64):016x}",
                prefix=f"{rng.getrandbits(64):016x}" if reused else "",
                replica=0,
                arrival_s=arrival,
                admitted_s=admitted,
                first_token_s=first_token,
                end_s=first_token + output * 0.016,
                finish_reason="length",
                prompt_tokens=prompt,
                output_tokens=output,
                reused_tokens=reused,
                computed_tokens=prompt - reused,
                copied_tokens=min(reused, rng.choice((0, 0, 5))),
                recomputed_tokens=0,
                reused_blocks=reused // BLOCK_SIZE,
                retained_blocks=(prompt - reused) // BLOCK_SIZE,
                saved_s=reused / 3500,
                saved_how=CATALOGUE,
                misses=misses,
                regret_tokens=misses.get("evicted", 0),
                first_miss_position=reused,
                first_miss_reason=next(iter(misses), None),
                differing_fields=("adapter",) if "identity_differs" in misses else (),
                num_preemptions=0,
                stall_s=0.0,
            )
        )
    return tuple(requests)


def _split(rng: random.Random, computed: int) -> dict[str, int]:
    shares = {
        MissReason.NEVER_SEEN: 0.62,
        MissReason.EVICTED: 0.2 * rng.random(),
        MissReason.NOT_RETAINED: 0.03,
        MissReason.OTHER_DOMAIN: rng.choice((0, 0.15)),
        MissReason.IDENTITY_DIFFERS: rng.choice((0, 0, 0.1)),
        MissReason.NOT_YET_COMPUTED: rng.choice((0, 0, 0, 0.05)),
    }
    misses = {reason.value: int(computed * share) for reason, share in shares.items()}
    misses[MissReason.BELOW_BLOCK.value] = computed - sum(misses.values())
    return {reason: tokens for reason, tokens in misses.items() if tokens}


def _totals(requests: Sequence[RequestResult]) -> TokenTotals:
    return TokenTotals(
        prompt=sum(r.prompt_tokens for r in requests),
        reused=sum(r.reused_tokens for r in requests),
        computed=sum(r.computed_tokens for r in requests),
        copied=sum(r.copied_tokens for r in requests),
        output=sum(r.output_tokens for r in requests),
        misses={
            reason.value: sum(r.misses.get(reason.value, 0) for r in requests)
            for reason in MissReason
        },
    )


def _saved(requests: Sequence[RequestResult]) -> SavedWork:
    seconds = math.fsum(r.saved_s for r in requests)
    return SavedWork(
        seconds=seconds,
        joules=seconds * 650,
        flops=seconds * 4e14,
        retained_gib_s=math.fsum(r.retained_blocks for r in requests) * 0.011,
        active_gib_s=math.fsum(r.prompt_tokens for r in requests) * 0.0004,
    )


def _ttfts(requests: Sequence[RequestResult]) -> list[float]:
    return [
        r.first_token_s - r.arrival_s for r in requests if r.first_token_s is not None
    ]


def _summary(name: str, values: Sequence[float]) -> LatencySummary:
    return LatencySummary(
        name=name,
        count=len(values),
        mean=_share(math.fsum(values), len(values)),
        p50=percentile(values, 50),
        p90=percentile(values, 90),
        p95=percentile(values, 95),
        p99=percentile(values, 99),
        max=max(values, default=math.nan),
        distribution=tuple(
            (share / 100, percentile(values, share)) for share in range(0, 101)
        )
        if values
        else (),
    )


def _tenant(name: str, requests: Sequence[RequestResult]) -> TenantResult:
    evicted = sum(r.misses.get(MissReason.EVICTED.value, 0) for r in requests)
    return TenantResult(
        tenant=name,
        num_requests=len(requests),
        tokens=_totals(requests),
        saved=_saved(requests),
        num_evicted_blocks=evicted // BLOCK_SIZE,
        num_refused_blocks=len(requests) // 9,
        regret_tokens=evicted,
        num_stalls=len(requests) // 40,
        stall_s=len(requests) / 170,
        ttft=_summary("TTFT", _ttfts(requests)) if requests else None,
        tpot=None,
    )


def _writers(tenants: Sequence[str], reused: int) -> tuple[WriterReader, ...]:
    flows = []
    for i, writer in enumerate(tenants):
        for j, reader in enumerate(tenants):
            share = 0.5 ** (i + 1) if i == j else 0.04 / (1 + abs(i - j)) ** 2
            if (i + 2 * j) % 3 or i == j:
                tokens = int(reused * share)
                flows.append(WriterReader(writer=writer, reader=reader, tokens=tokens))
    return tuple(flows)


def _prefixes(
    rng: random.Random, tenants: Sequence[str], text: str | None
) -> tuple[PrefixValue, ...]:
    prefixes = []
    for index in range(24):
        domain = (
            "public" if index % 5 == 0 else f"private:{tenants[index % len(tenants)]}"
        )
        start = 0 if index % 3 else 1024
        prefixes.append(
            PrefixValue(
                digest=f"{rng.getrandbits(256):064x}",
                domain=domain,
                start=start,
                end=start + 256 * rng.randint(1, 40),
                num_hits=400 // (index + 2),
                hit_tokens=900_000 // (index + 2),
                saved_s=180 / (index + 2),
                retained_gib_s=20.0 + 8 * index if index else 0.0,
                active_gib_s=30.0,
                num_evicted_blocks=index * 3,
                text=text,
            )
        )
    return tuple(prefixes)


def _curves() -> tuple[CapacityCurve, ...]:
    def curve(name: str, hit_rate: Callable[[float], float]) -> CapacityCurve:
        sizes = [2**power for power in range(5, 14)]
        return CapacityCurve(
            name=name,
            points=tuple(
                CurvePoint(
                    num_blocks=blocks,
                    gib=blocks * BLOCK_BYTES / GIB,
                    hit_rate=hit_rate(math.log2(blocks)),
                    saved_s=540 * hit_rate(math.log2(blocks)),
                )
                for blocks in sizes
            ),
        )

    def rise(middle: float, width: float) -> Callable[[float], float]:
        return lambda power: 0.61 / (1 + math.exp((middle - power) / width))

    return (
        curve("shared", rise(9.2, 1.0)),
        curve("isolated", lambda power: 0.86 * rise(9.8, 1.0)(power)),
        curve("clairvoyant, shared", rise(8.0, 1.1)),
    )


def _memory(rng: random.Random, end_s: float) -> tuple[MemorySample, ...]:
    samples = []
    cached = 0
    for index in range(900):
        at = index / 899
        load = 0.45 + 0.2 * math.sin(9 * at) + (0.35 if 0.3 < at < 0.42 else 0)
        active = min(NUM_BLOCKS, int(NUM_BLOCKS * (load * min(1, at * 30)) * 0.9))
        cached = min(NUM_BLOCKS - active, cached + rng.randint(0, 9))
        is_full = active + cached == NUM_BLOCKS
        samples.append(
            MemorySample(
                at_s=at * end_s,
                active=active,
                cached=cached,
                free=NUM_BLOCKS - active - cached,
                evicted=rng.randint(0, 12) if is_full else 0,
                stalled=rng.randint(0, 5) if active > 600 else 0,
            )
        )
    return tuple(samples)


def _steps(rng: random.Random, end_s: float) -> tuple[StepSpan, ...]:
    steps = []
    at = 0.0
    while at < end_s:
        is_prefill = rng.random() < 0.4
        length = rng.uniform(0.1, 0.5) if is_prefill else rng.uniform(0.02, 0.2)
        steps.append(
            StepSpan(
                replica=0,
                start_s=at,
                end_s=at + length,
                num_prefill_tokens=rng.randint(100, 2048) if is_prefill else 0,
                num_decodes=rng.randint(1, 24),
            )
        )
        at += length + (0.1 if rng.random() < 0.1 else 0)
    return tuple(steps)
