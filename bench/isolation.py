"""What isolation costs: the worked example shared, behind a public prefix, private.

`python -m bench.isolation [--quick] [--json FILE] [--check]`

The same requests of two tenants arrive in the same order three times: with both in one
group, with the shared beginning declared public, and with nothing shared. Cached tokens
are the price, and exact: requests arrive at fixed times of a virtual clock that each
step advances by a made-up cost, so no step depends on how fast the machine is. Seconds
are measured; a request that arrives within a step counts its wait from there.

The bars on cached tokens follow from the example. Of `k` requests that begin alike, of
`t` tenants, one computes the beginning and k - 1 hit it where all share; k - t hit it
where nobody does. A public prefix is shared in whole blocks, so a hit loses less than a
block by it, and what chat templates have in common beside.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.report import Bar, finish, parser
from stemkv.cli.worked_example import ExampleRequest, load_requests, shared_messages
from stemkv.core.core import CoreConfig
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.sharing import SharingPolicy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine import (
    Completion,
    Engine,
    EngineConfig,
    LoadedModel,
    SamplingParams,
    load_model,
)
from stemkv.measure.steps import StepRecord, prefill_seconds
from stemkv.measure.timeline import percentile

__all__ = [
    "Arrival",
    "Clock",
    "Price",
    "Setting",
    "arrivals_of",
    "bars_of",
    "run_setting",
    "settings_for",
]

BLOCK_SIZE = 16
KV_TOKENS = 8192
SEED = 0
NUM_QUICK = 8  # requests, half of them sharing
# What a step is made to cost. Near the embedded model's on two slow cores, but only
# the order of arrivals and steps follows from it.
STEP_S = 0.04
TOKEN_S = 0.0026
LOAD = 2.0  # virtual seconds of prefill, if nothing is reused, per second of arrivals
# Share of the cached tokens that may be lost besides what the arithmetic says: partial
# blocks, and what chat templates have in common.
SLACK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of the example, encoded, with its arrival in virtual seconds."""

    example: ExampleRequest
    prompt: TokenIds
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Who shares with whom."""

    name: str
    sharing: SharingPolicy
    public: TokenIds | None = None  # declared by the operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one setting gave."""

    setting: str
    num_reused: int  # cached prompt tokens; exact
    num_computed: int  # prompt tokens; exact
    num_recomputed: int  # after preemptions; exact
    prefill_s: float  # measured, step times shared out by tokens
    ttft_s: tuple[float, ...] = field(repr=False)  # measured
    cached_bytes: int  # at the end; exact
    num_evicted: int  # blocks; exact


class Clock:
    """Virtual seconds by steps, and the wall's beside them."""

    def __init__(self, wall: Callable[[], float] = time.monotonic) -> None:
        self.wall = wall
        self.virtual_s = 0.0
        self._before = (0.0, 0.0)  # virtual, wall: when the last step began
        self._after = (0.0, wall())

    def wait_until(self, virtual_s: float) -> None:
        """Let idle virtual time pass, which takes no time."""
        self.virtual_s = virtual_s
        self._before = self._after = (virtual_s, self.wall())

    def begin(self) -> None:
        """Note that a step begins."""
        self._before = (self.virtual_s, self.wall())

    def end(self, record: StepRecord) -> None:
        """Advance by what the step is made to cost."""
        num_tokens = record.num_prefill_tokens + record.num_decode_tokens
        self.virtual_s += STEP_S + TOKEN_S * num_tokens
        self._after = (self.virtual_s, self.wall())

    def wall_at(self, virtual_s: float) -> float:
        """Return the wall's time of a moment within the last step."""
        (v0, w0), (v1, w1) = self._before, self._after
        if v1 <= v0:
            return w1
        return w0 + (w1 - w0) * (virtual_s - v0) / (v1 - v0)


def main() -> int:
    """Run the example three times, print the price, return the exit code."""
    options = parser((__doc__ or "").splitlines()[0]).parse_args()
    loaded = load_model()
    encoder = _engine(loaded, SharingPolicy())
    arrivals = arrivals_of(encoder, is_quick=options.quick)
    public = encoder.encode(shared_messages(), is_answer_next=False)
    prices = []
    for setting in settings_for(arrivals, public):
        print(f"{setting.name} …", file=sys.stderr)
        prices.append(run_setting(_engine(loaded, setting.sharing), setting, arrivals))
    num_tokens = sum(len(arrival.prompt) for arrival in arrivals)
    facts = {
        "model": loaded.name,
        "requests": f"{len(arrivals)} of {len(_tenants(arrivals))} tenants, "
        f"{num_tokens:,} prompt tokens, {sum(_shares(arrivals))} begin with the same "
        f"{len(public):,}" + (" (--quick: a part of the example)" * options.quick),
        "cache": f"{KV_TOKENS:,} tokens in blocks of {BLOCK_SIZE}",
        "arrivals": f"open loop on a virtual clock, load {LOAD:g}, seed {SEED}",
        "exact": "counts, the same in every run",
        "measured": "seconds, one run of each setting",
    }
    return finish(
        "bench.isolation: the price of isolation",
        bars_of(prices, arrivals),
        options,
        facts=facts,
    )


def arrivals_of(engine: Engine, *, is_quick: bool) -> list[Arrival]:
    """Return the requests in order of arrival."""
    rng = random.Random(SEED)
    examples = list(load_requests(rng))
    if is_quick:
        examples = _part_of(examples)
    prompts = [engine.encode(e.messages, is_answer_next=True) for e in examples]
    gaps = [rng.expovariate(1.0) for _ in examples]
    span = TOKEN_S * sum(map(len, prompts)) / LOAD
    arrivals, at_s = [], 0.0
    for example, prompt, gap in zip(examples, prompts, gaps, strict=True):
        arrivals.append(Arrival(example=example, prompt=prompt, at_s=at_s))
        at_s += gap * span / sum(gaps)
    return arrivals


def _part_of(examples: list[ExampleRequest]) -> list[ExampleRequest]:
    """Return some requests that share, of every tenant, and as many that don't."""
    sharing = [e for e in examples if e.shares_prefix]
    tenants = sorted({e.tenant for e in sharing})
    chosen: list[ExampleRequest] = []
    for tenant in tenants:
        of_tenant = [e for e in sharing if e.tenant == tenant]
        chosen += of_tenant[: NUM_QUICK // 2 // len(tenants)]
    singles = [e for e in examples if not e.shares_prefix]
    chosen += singles[: NUM_QUICK - len(chosen)]
    return [e for e in examples if e in chosen]


def settings_for(arrivals: list[Arrival], public: TokenIds) -> list[Setting]:
    """Return the three settings, the most sharing first."""
    everybody = SharingPolicy(groups={"everybody": _tenants(arrivals)})
    return [
        Setting(name="shared", sharing=everybody),
        Setting(name="public", sharing=SharingPolicy(), public=public),
        Setting(name="private", sharing=SharingPolicy()),
    ]


def run_setting(
    engine: Engine,
    setting: Setting,
    arrivals: list[Arrival],
    clock: Clock | None = None,
) -> Price:
    """Serve all requests; the order of steps depends on nothing measured."""
    clock = Clock() if clock is None else clock
    if setting.public is not None:
        engine.declare_public(setting.public)
    waiting = list(reversed(arrivals))
    completions: list[Completion] = []
    while waiting or engine.has_work:
        if not engine.has_work and waiting[-1].at_s > clock.virtual_s:
            clock.wait_until(waiting[-1].at_s)
        while waiting and waiting[-1].at_s <= clock.virtual_s:
            _add(engine, waiting.pop(), clock)
        clock.begin()
        completions += engine.step()
        clock.end(engine.steps[-1])
    usage = engine.usage()
    ttfts = [completion.timeline.ttft_s for completion in completions]
    counts = [completion.counts for completion in completions]
    return Price(
        setting=setting.name,
        num_reused=sum(each.reused for each in counts),
        num_computed=sum(each.computed for each in counts),
        num_recomputed=sum(each.recomputed for each in counts),
        prefill_s=prefill_seconds(engine.steps),
        ttft_s=tuple(ttft for ttft in ttfts if ttft is not None),
        cached_bytes=usage.num_cached_blocks * engine.kv.bytes_per_block,
        num_evicted=usage.num_evicted_blocks,
    )


def bars_of(prices: list[Price], arrivals: list[Arrival]) -> list[Bar]:
    """Return all rows, and the promises on cached tokens."""
    bars = [bar for price in prices for bar in _rows(price)]
    shared, public, private = prices
    num_sharing = sum(_shares(arrivals))
    num_tenants = len({a.example.tenant for a in arrivals if a.example.shares_prefix})
    kept = (num_sharing - num_tenants) / (num_sharing - 1)
    for price, share in ((public, 1.0), (private, kept)):
        name = f"{price.setting} / shared"
        bars += [
            Bar(
                name=f"{name}: cached tokens",
                measured=price.num_reused / shared.num_reused,
                unit="×",
                limit=share - SLACK,
                sense="at least",
                basis="exact",
            ),
            Bar(
                name=f"{name}: prompt tokens computed",
                measured=price.num_computed / shared.num_computed,
                unit="×",
                basis="exact",
            ),
            Bar(
                name=f"{name}: prefill seconds",
                measured=price.prefill_s / shared.prefill_s,
                unit="×",
            ),
            Bar(
                name=f"{name}: TTFT p50",
                measured=percentile(price.ttft_s, 50) / percentile(shared.ttft_s, 50),
                unit="×",
            ),
        ]
    return bars


def _rows(price: Price) -> list[Bar]:
    counts = (
        ("cached tokens", price.num_reused, "tokens"),
        ("prompt tokens computed", price.num_computed, "tokens"),
        ("tokens recomputed", price.num_recomputed, "tokens"),
        ("cached at the end", price.cached_bytes / 2**20, "MiB"),
        ("evictions", price.num_evicted, "blocks"),
    )
    seconds = (
        ("prefill", price.prefill_s),
        ("TTFT p50", percentile(price.ttft_s, 50)),
        ("TTFT p95", percentile(price.ttft_s, 95)),
    )
    name = price.setting
    rows = [
        Bar(name=f"{name}: {what}", measured=value, unit=unit, basis="exact")
        for what, value, unit in counts
    ]
    return rows + [
        Bar(name=f"{name}: {what}", measured=value, unit="s") for what, value in seconds
    ]


def _engine(loaded: LoadedModel, sharing: SharingPolicy) -> Engine:
    return Engine(
        loaded,
        EngineConfig(
            kv_memory_bytes=KV_TOKENS * loaded.kv_bytes_per_token,
            core=CoreConfig(cache=CacheConfig(block_size=BLOCK_SIZE)),
            sharing=sharing,
            # What is measured is who shares, not whether this build keeps every bit.
            runs_self_test=False,
        ),
    )


def _add(engine: Engine, arrival: Arrival, clock: Clock) -> None:
    example = arrival.example
    engine.add(
        arrival.prompt,
        SamplingParams(max_new_tokens=example.max_new_tokens, ignore_eos=True),
        tenant=example.tenant,
        request_id=example.name,
        arrival_s=clock.wall_at(arrival.at_s),
    )


def _tenants(arrivals: list[Arrival]) -> set[str]:
    return {arrival.example.tenant for arrival in arrivals}


def _shares(arrivals: list[Arrival]) -> list[bool]:
    return [arrival.example.shares_prefix for arrival in arrivals]


if __name__ == "__main__":
    sys.exit(main())
