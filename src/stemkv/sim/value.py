"""The worked example replayed from all sides: what is keeping its prefix worth?

Owns which replays are run: all at once, from light load to overload, through less and
less memory; each with reuse off, within tenants, and by everybody. The numbers are
defined in `measure.value`; deciding and timing are the replay's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stemkv.core.books.cost import CostModel
from stemkv.errors import ConfigError, InvariantError
from stemkv.measure.results import GIB, Source
from stemkv.measure.value import (
    BreakEven,
    KeptPrefix,
    LoadPoint,
    MemoryPoint,
    Mix,
    ValueResult,
    ValueRun,
    value_run,
)
from stemkv.sim.arrivals import LoadConfig
from stemkv.sim.config import LARGE, ReplayConfig
from stemkv.sim.pricing import num_blocks
from stemkv.sim.replay import replay
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace, TraceRequest
from stemkv.sim.workloads.prompts import UNIT_SIZE
from stemkv.sim.workloads.worked_example import worked_example

__all__ = ["REUSES", "ValueConfig", "study_value"]

REUSES = ("off", "isolated", "shared")

# Shares of what the memory serves with reuse off, unless rates are given.
_LOADS = (0.25, 0.5, 1.0, 1.5, 2.5)
_MAX_MEMORIES = 4  # each half of the one before
_AT_ONCE = 1e9  # arrivals a second: before anybody has been served, all are there

# Tokens; see `worked_example`.
_TAIL = (150, 500)
_ONE_OFF = (1_500, 6_000)
_OUTPUT = (50, 200)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueConfig:
    """The mix, the memory and the limits of a study."""

    prefix_tokens: int = 12_000
    share: float = 0.4  # of requests that begin with the prefix
    memory_bytes: int = 24 * GIB  # for KV, of one replica
    num_tenants: int = 4
    num_requests: int = 300  # in every replay
    seed: int = 0
    rates: tuple[float, ...] = ()  # requests a second; empty: around the capacity
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ConfigError(f"share must be from 0 to 1, got {self.share}")
        if self.prefix_tokens < UNIT_SIZE:
            raise ConfigError(
                f"prefix_tokens must be at least one block of {UNIT_SIZE} tokens, got "
                f"{self.prefix_tokens}"
            )
        for name in ("memory_bytes", "num_tenants", "num_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        for name in ("slo_ttft_s", "slo_tpot_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be above 0 and finite, got {getattr(self, name)}"
                )
        for rate in self.rates:
            if not 0 < rate < math.inf:
                raise ConfigError(f"rate must be above 0 and finite, got {rate}")

    @property
    def longest_tokens(self) -> int:
        """Most tokens that a request can have, with its output."""
        return max(self.prefix_tokens + _TAIL[1], _ONE_OFF[1]) + _OUTPUT[1]


def study_value(
    config: ValueConfig,
    costs: CostModel,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ValueResult:
    """Run all replays and return what they say; `progress` counts replays.

    Raises `ConfigError` where the memory cannot hold the longest request.
    """
    total = num_blocks(
        config.memory_bytes,
        bytes_per_token=costs.bytes_per_token,
        block_size=UNIT_SIZE,
    )
    _check_memory(config, costs, total)
    return _Study(config, costs, total, progress).result()


class _Study:
    """The replays of one study, which share traces and a count of what is done."""

    def __init__(
        self,
        config: ValueConfig,
        costs: CostModel,
        num_blocks: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._config = config
        self._costs = costs
        self._num_blocks = num_blocks
        self._progress = progress
        self._trace = _mix(config, config.share)
        self._alone = _alone(self._trace)
        self._one_offs = _alone(_mix(config, 0.0))
        self._prefix = _prefix(config, costs)
        self._memories = self._sizes()
        self._num_done = 0
        num_loads = len(config.rates) or len(_LOADS)
        # The first of the memories is that of the loads.
        num_three = 1 + num_loads + len(self._memories) - 1
        self._num_replays = len(REUSES) * num_three + 2 * len(self._memories)

    def result(self) -> ValueResult:
        config, costs = self._config, self._costs
        off, isolated, shared = self._three(_AT_ONCE, self._num_blocks)
        capacity = LoadPoint(
            rate=math.inf, load=math.inf, off=off, isolated=isolated, shared=shared
        )
        most = capacity.off.requests_per_s
        rates = sorted(set(config.rates)) or [load * most for load in _LOADS]
        result = ValueResult(
            config=self._settings(),
            cost_source=costs.source,
            mix_source=Source.EXACT,
            time_source=Source.ESTIMATED,
            num_tenants=config.num_tenants,
            prefix=self._prefix,
            mix=_mix_facts(self._trace, config, self._prefix),
            capacity=capacity,
            loads=tuple(self._load(rate, most) for rate in rates),
            memories=(),
        )
        memories = tuple(self._memory(size, result.pivot()) for size in self._memories)
        return dataclasses.replace(result, memories=memories)

    def _load(self, rate: float, most: float) -> LoadPoint:
        off, isolated, shared = self._three(rate, self._num_blocks)
        return LoadPoint(
            rate=rate, load=rate / most, off=off, isolated=isolated, shared=shared
        )

    def _memory(self, num_blocks: int, pivot: LoadPoint) -> MemoryPoint:
        if num_blocks == self._num_blocks:
            off, isolated, shared = pivot.runs()
        else:
            off, isolated, shared = self._three(pivot.rate, num_blocks)
        return MemoryPoint(
            gib=off.gib,
            off=off,
            isolated=isolated,
            shared=shared,
            break_even=self._break_even(num_blocks),
        )

    def _break_even(self, num_blocks: int) -> BreakEven:
        whole = self._run("off", self._one_offs, _AT_ONCE, num_blocks)
        left = num_blocks - self._prefix.num_tokens // UNIT_SIZE
        displaced = None
        if left >= _blocks_for(_ONE_OFF[1] + _OUTPUT[1]):
            displaced = self._run("off", self._one_offs, _AT_ONCE, left)
        else:
            self._count()
        return BreakEven(
            gib=whole.gib,
            one_off_rate=whole.requests_per_s,
            displaced_rate=None if displaced is None else displaced.requests_per_s,
            prefix_gib=self._prefix.gib,
            prefill_s=self._prefix.prefill_s,
        )

    def _three(self, rate: float, num_blocks: int) -> list[ValueRun]:
        return [
            self._run(
                reuse,
                self._alone if reuse == "off" else self._trace,
                rate,
                num_blocks,
            )
            for reuse in REUSES
        ]

    def _run(self, reuse: str, trace: Trace, rate: float, num_blocks: int) -> ValueRun:
        rule = SharingRule(name="shared" if reuse == "shared" else "isolated")
        config = ReplayConfig(
            core=LARGE.sized(num_blocks, block_size=UNIT_SIZE),
            sharing=rule,
            load=LoadConfig(rate=rate),
            slo_ttft_s=self._config.slo_ttft_s,
            slo_tpot_s=self._config.slo_tpot_s,
        )
        result = replay(trace, config, self._costs)
        self._count()
        return value_run(result, reuse=reuse)

    def _count(self) -> None:
        self._num_done += 1
        if self._progress is not None:
            self._progress(self._num_done, self._num_replays)

    def _sizes(self) -> list[int]:
        least = _blocks_for(self._config.longest_tokens)
        sizes = [self._num_blocks >> halvings for halvings in range(_MAX_MEMORIES)]
        return [size for size in sizes if size >= least]

    def _settings(self) -> dict[str, str | int | float | None]:
        config = self._config
        return {
            "prefix_tokens": config.prefix_tokens,
            "share": config.share,
            "memory_gib": config.memory_bytes / GIB,
            "num_tenants": config.num_tenants,
            "num_requests": config.num_requests,
            "seed": config.seed,
            "rates": ", ".join(f"{rate:g}" for rate in config.rates) or None,
            "slo_ttft_s": config.slo_ttft_s,
            "slo_tpot_s": config.slo_tpot_s,
            "tail_tokens": _bounds(_TAIL),
            "one_off_tokens": _bounds(_ONE_OFF),
            "output_tokens": _bounds(_OUTPUT),
            "block_size": UNIT_SIZE,
            "token_budget": LARGE.scheduler.token_budget,
            "max_num_running": LARGE.scheduler.max_num_running,
            "eviction": LARGE.eviction.name,
            "order": LARGE.order.name,
        }


def _mix(config: ValueConfig, share: float) -> Trace:
    return worked_example(
        num_requests=config.num_requests,
        rate=1.0,
        seed=config.seed,
        num_tenants=config.num_tenants,
        share=share,
        prefix_length=config.prefix_tokens,
        tail_length=_TAIL,
        one_off_length=_ONE_OFF,
        output_length=_OUTPUT,
    )


def _alone(trace: Trace) -> Trace:
    """Return the same requests, each in a namespace of its own: nothing is reused."""
    return dataclasses.replace(
        trace,
        requests=[
            dataclasses.replace(request, identity=request.request_id)
            for request in trace.requests
        ],
    )


def _prefix(config: ValueConfig, costs: CostModel) -> KeptPrefix:
    num_tokens = config.prefix_tokens // UNIT_SIZE * UNIT_SIZE
    return KeptPrefix(
        num_tokens=num_tokens,
        num_bytes=num_tokens * costs.bytes_per_token,
        prefill_s=costs.prefill_seconds(0, num_tokens),
        prefill_joules=costs.prefill_joules(0, num_tokens),
    )


def _mix_facts(trace: Trace, config: ValueConfig, prefix: KeptPrefix) -> Mix:
    num_sharing = round(config.share * config.num_requests)
    # The prefix is written first, so its units have the lowest ids.
    sharing = [r for r in trace.requests if num_sharing and r.units[0] == 0]
    one_offs = [r for r in trace.requests if not (num_sharing and r.units[0] == 0)]
    if len(sharing) != num_sharing:
        raise InvariantError(
            f"{len(sharing)} requests begin with the prefix, not {num_sharing}"
        )
    num_saved = num_sharing * prefix.num_tokens
    return Mix(
        num_requests=len(trace.requests),
        num_sharing=num_sharing,
        one_off_tokens=_mean_tokens(one_offs),
        own_tokens=_mean_tokens(sharing) - prefix.num_tokens,
        mean_tokens=_mean_tokens(trace.requests),
        mean_own_tokens=_mean_tokens(trace.requests) - num_saved / len(trace.requests),
    )


def _mean_tokens(requests: Sequence[TraceRequest]) -> float:
    if not requests:
        return math.nan
    total = sum(request.input_length + request.output_length for request in requests)
    return total / len(requests)


def _check_memory(config: ValueConfig, costs: CostModel, total: int) -> None:
    needed = _blocks_for(config.longest_tokens)
    if total < needed:
        block_bytes = UNIT_SIZE * costs.bytes_per_token
        raise ConfigError(
            f"memory of {total * block_bytes / GIB:.2f} GiB holds "
            f"{total * UNIT_SIZE:,} tokens, but a request of this mix can have "
            f"{config.longest_tokens:,}, which take "
            f"{needed * block_bytes / GIB:.2f} GiB; give more memory or a shorter prefix"
        )


def _blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // UNIT_SIZE)


def _bounds(bounds: Sequence[int]) -> str:
    return f"{bounds[0]} to {bounds[1]}"
