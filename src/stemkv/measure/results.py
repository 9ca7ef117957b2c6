"""What a replay, a sweep or a value study found: the numbers, without a picture.

Owns the shape of results and their JSON. Reports draw them, the command line prints
them. Every group of numbers says how it was obtained (`Source`). Times are seconds from
the first arrival, sizes are bytes or GiB (2**30) as named, shares are in [0, 1].
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from stemkv.measure.opportunity import Opportunity, opportunity_of

__all__ = [
    "Bound",
    "CapacityCurve",
    "CurvePoint",
    "Check",
    "LatencySummary",
    "MemorySample",
    "PrefixValue",
    "ReplayResult",
    "RequestResult",
    "SavedWork",
    "Scheduling",
    "Source",
    "StallSpan",
    "StepSpan",
    "SweepCell",
    "SweepResult",
    "TenantResult",
    "TokenTotals",
    "TraceFacts",
    "WaitSpan",
    "WriterReader",
    "to_json",
]

GIB = 2**30


class Source(Enum):
    """How a number was obtained."""

    EXACT = "exact"  # counted
    MEASURED = "measured"  # read off a clock or a meter
    ESTIMATED = "estimated"  # follows from a model of costs or of text


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTotals:
    """Where prompt tokens went: `prompt == reused + computed`, misses sum to computed.

    `misses` has every `core.entry.MissReason` by its value, zeros included.
    """

    prompt: int
    reused: int
    computed: int
    copied: int = 0  # of `reused`, out of partly matching blocks
    recomputed: int = 0  # again after a preemption; in neither of the above
    output: int = 0
    misses: dict[str, int]

    @property
    def hit_rate(self) -> float:
        """Reused over prompt tokens; NaN without prompts."""
        return self.reused / self.prompt if self.prompt else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWork:
    """What reuse saved and what keeping KV for it took."""

    seconds: float  # of prefill on one replica
    joules: float
    flops: float
    retained_gib_s: float  # cached, in use by nobody
    active_gib_s: float  # in use by running requests

    @property
    def seconds_per_gib_s(self) -> float:
        """Saved seconds per retained GiB-second; NaN if nothing was retained."""
        return self.seconds / self.retained_gib_s if self.retained_gib_s else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySummary:
    """Percentiles of one latency over finished requests (seconds)."""

    name: str  # "TTFT", "TPOT", "ITL", "E2E", "queue"
    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    # (share of requests, seconds), ascending, at most ~100 points, for a picture
    distribution: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantResult:
    """One tenant's share; sums over tenants equal the totals."""

    tenant: str
    num_requests: int
    tokens: TokenTotals
    saved: SavedWork
    num_evicted_blocks: int
    num_refused_blocks: int  # not retained after their last use, as the tenant had said
    regret_tokens: int  # evicted and asked for again
    num_stalls: int
    stall_s: float
    ttft: LatencySummary | None
    tpot: LatencySummary | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterReader:
    """Tokens that `reader` reused and `writer` was the first to put in the cache."""

    writer: str
    reader: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixValue:
    """One shared run of tokens and what keeping it was worth."""

    digest: str  # hex, of namespace, domain and all tokens up to its end
    domain: str  # "public", "private:acme", "group:team"
    start: int  # first token of the run
    end: int  # one past its last token
    num_hits: int  # requests that reused all or part of it
    hit_tokens: int
    saved_s: float
    retained_gib_s: float
    active_gib_s: float
    num_evicted_blocks: int
    text: str | None = None  # only where the user asked for it

    @property
    def seconds_per_gib_s(self) -> float:
        """Saved seconds per retained GiB-second; infinite if it was never idle."""
        if not self.retained_gib_s:
            return math.inf if self.saved_s else 0.0
        return self.saved_s / self.retained_gib_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One capacity on a curve."""

    num_blocks: int
    gib: float
    hit_rate: float
    saved_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityCurve:
    """Hit rate and saved seconds against memory, sequential replay (no clock)."""

    name: str  # "shared", "isolated", "clairvoyant, isolated" …
    points: tuple[CurvePoint, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A limit no policy of this kind can exceed, and what it bounds."""

    name: str
    hit_rate: float
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Blocks by state at one moment, and what happened since the previous sample.

    Sums over replicas.
    """

    at_s: float
    active: int
    cached: int
    free: int
    evicted: int = 0
    stalled: int = 0  # requests waiting for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """One step, for a timeline, or a stretch of steps that only decode."""

    replica: int
    start_s: float
    end_s: float
    num_prefill_tokens: int
    num_decodes: int  # in each of the steps
    num_steps: int = 1
    # What the hits of requests that were admitted into it saved, of prefill.
    saved_tokens: int = 0
    saved_s: float = 0.0
    saved_joules: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSpan:
    """A time in which nothing of a request was computed, and why."""

    reason: str  # a `core.waits.WaitReason` by its value
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StallSpan:
    """A time in which a request waited for memory, and who held it at its beginning."""

    start_s: float
    end_s: float
    num_missing_blocks: int
    active: tuple[tuple[str, int], ...]  # running requests and their blocks, the most
    retained: tuple[tuple[str, int], ...]  # accounts and their cached blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """One line of the per-request ledger; a `None` time means it never came to that."""

    request_id: str
    tenant: str
    domain: str
    identity: str
    namespace: str  # hex digest, "" for unsharable
    prefix: str  # hex digest of namespace and the reused tokens, "" without reuse
    replica: int
    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    end_s: float | None
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    reused_tokens: int
    computed_tokens: int
    copied_tokens: int
    recomputed_tokens: int
    reused_blocks: int
    retained_blocks: int  # published by it
    saved_s: float
    saved_how: str  # the cost model's `source`
    misses: dict[str, int]  # reason → tokens, only those that occur
    regret_tokens: int  # evicted and asked for again
    first_miss_position: int | None  # first token that was not reused
    first_miss_reason: str | None
    differing_fields: tuple[str, ...]  # for the reason "identity_differs"
    num_preemptions: int
    stall_s: float
    stalls: tuple[StallSpan, ...] = ()
    waits: tuple[WaitSpan, ...] = ()  # the first ones, in order
    wait_s: dict[str, float] = field(default_factory=dict)  # by reason, all of them
    # Uncached tokens of its tenant that were ahead when it came, itself included, and
    # prefill tokens that its tenant ran until its first token.
    own_backlog_tokens: int | None = None
    own_run_tokens: int | None = None
    # What of the former was cached, or computed, when it came and was evicted since.
    own_lost_tokens: int | None = None
    backlog_tokens: int | None = None  # the same of all tenants
    run_tokens: int | None = None

    @property
    def wait_ratio(self) -> float | None:
        """Its wait in units of its own backlog; 1 if nobody overtook it."""
        if self.own_run_tokens is None or self.own_backlog_tokens is None:
            return None
        return self.own_run_tokens / max(1, self.own_backlog_tokens)

    @property
    def wait_ratio_with_lost(self) -> float | None:
        """The same, with what was evicted of the work ahead counted as ahead."""
        if self.own_run_tokens is None or self.own_backlog_tokens is None:
            return None
        ahead = self.own_backlog_tokens + (self.own_lost_tokens or 0)
        return self.own_run_tokens / max(1, ahead)

    @property
    def wait_ratio_of_all(self) -> float | None:
        """The same in work of all tenants: who shares with others waits longer."""
        if self.run_tokens is None or self.backlog_tokens is None:
            return None
        return self.run_tokens / max(1, self.backlog_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """What an admission order did: who waited, and was it fair.

    The definitions are in `measure.scheduling`. Of requests that finished; `slo_share`
    is of all.
    """

    order: str
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    slo_share: float
    goodput_rps: float
    most_wait_ratio: float | None  # exact; None: nothing finished
    most_wait_request: str | None  # whose that is
    most_wait_ratio_of_all: float | None  # in work of all tenants, exact
    tenant_gap_tokens: float | None  # weighted, exact; None: fewer than two tenants
    # TTFT of "all", "cold", "warm", "light tenants" and the largest tenants.
    classes: tuple[LatencySummary, ...]
    wait_s: dict[str, float]  # by reason, sums over requests
    hit_tokens: int
    requests_per_s: float
    # Measured, so different from run to run, and in no JSON unless it was asked for.
    scheduler_cpu_s: float | None = None

    def ttft(self, name: str) -> LatencySummary | None:
        """Return the TTFT of a class; `None` if nobody is in it."""
        return next((each for each in self.classes if each.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """An equation that must hold, and its two sides."""

    name: str
    left: float
    right: float

    @property
    def holds(self) -> bool:
        """Whether both sides agree, to rounding of sums of floats."""
        return math.isclose(self.left, self.right, rel_tol=1e-9, abs_tol=1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """What was replayed."""

    name: str
    format: str
    num_requests: int
    num_tenants: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    unit_size: int
    is_exact: bool
    has_arrivals: bool = True  # False: the trace has no clock, its times are made up
    num_skipped_lines: int
    num_opaque: int = 0  # requests of which only the length of the prompt is known
    problems: tuple[str, ...] = ()  # the first few, as text
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # why nothing could be reused, whatever was asked

    @property
    def is_opaque(self) -> bool:
        """Whether no prompt is known, so that nothing can be said of reuse."""
        return 0 < self.num_requests == self.num_opaque


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Everything one replay found."""

    trace: TraceFacts
    config: dict[str, str | int | float | None]  # every setting, for the method box
    cost_source: str
    cost_kind: Source  # how the times were obtained
    num_blocks: int
    block_size: int
    block_bytes: int
    num_replicas: int
    end_s: float  # when the last request ended
    num_finished: int
    num_refused: int  # could never run: longer than memory or context
    tokens: TokenTotals
    saved: SavedWork
    request_hit_rate: float  # share of requests that reused anything
    steady_hit_rate: float  # token hit rate over the last half of the requests
    num_evicted_blocks: int
    num_refused_blocks: int  # not retained after their last use, as somebody had said
    num_published_blocks: int
    peak_active_blocks: int
    # Slots of them that were in use: of the replica, and after the step, with most.
    peak_active_tokens: int = 0
    regret_tokens: int
    regret_delay_s: LatencySummary | None  # eviction to the next request for it
    num_preemptions: int
    num_stalls: int
    stall_s: float
    # who held the memory while admissions waited: mean blocks by state at the stalls
    stall_active_blocks: float
    stall_shared_blocks: float  # of those, published ones that leases pin
    stall_cached_blocks: float  # evictable, and still not enough
    # Account and its mean active blocks at the stalls, the largest first.
    stall_accounts: tuple[tuple[str, float], ...] = ()
    latencies: tuple[LatencySummary, ...]
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    goodput_rps: float | None  # finished within both limits, per second
    goodput_share: float | None
    output_tokens_per_s: float
    busy_share: float  # of replica-seconds, spent in steps
    tenants: tuple[TenantResult, ...]
    writers: tuple[WriterReader, ...]
    prefixes: tuple[PrefixValue, ...]  # the most valuable per byte first
    bounds: tuple[Bound, ...]
    curves: tuple[CapacityCurve, ...]
    memory: tuple[MemorySample, ...]
    steps: tuple[StepSpan, ...]  # thinned for long runs; `num_steps` counts all
    num_steps: int
    requests: tuple[RequestResult, ...]
    checks: tuple[Check, ...]
    scheduling: Scheduling | None = None

    @property
    def capacity_gib(self) -> float:
        """KV memory of one replica."""
        return self.num_blocks * self.block_bytes / GIB

    @property
    def evicted_bytes(self) -> int:
        """Retained KV that was dropped to make room."""
        return self.num_evicted_blocks * self.block_bytes

    @property
    def opportunity(self) -> Opportunity | None:
        """What the last retained GiB saves, beside what requests wait for memory.

        `None` where no curve of this memory was studied.
        """
        own = [c for c in self.curves if c.name == self.config.get("sharing")]
        points = [
            (point.gib, point.saved_s)
            for curve in own[:1]
            for point in curve.points
            if point.saved_s is not None
        ]
        cached = self.stall_cached_blocks
        return opportunity_of(
            sorted(points),
            capacity_gib=self.capacity_gib,
            memory_wait_s=math.fsum(r.wait_s.get("memory", 0.0) for r in self.requests),
            retained_gib=0.0 if math.isnan(cached) else cached * self.block_bytes / GIB,
        )

    @property
    def refused_bytes(self) -> int:
        """KV that was not retained, as it would be used once."""
        return self.num_refused_blocks * self.block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCell:
    """One configuration of a sweep and its headline numbers."""

    num_blocks: int
    gib: float
    eviction: str
    order: str
    sharing: str
    num_refused: int  # could never run: longer than this memory
    hit_rate: float  # of all prompt tokens of the trace, refused requests included
    saved_s: float
    seconds_per_gib_s: float  # NaN: replayed without a clock
    ttft_p50_s: float | None  # None: replayed without a clock
    ttft_p99_s: float | None
    goodput_rps: float | None
    num_evicted_blocks: int
    # Not retained after their last use, as somebody had said. None: not counted, as
    # without a clock.
    num_refused_blocks: int | None
    regret_tokens: int  # evicted and asked for again
    num_preemptions: int
    worst_tenant_ttft_p99_s: float | None
    # Whether eviction was told anything of the future: hints, or who comes next.
    is_hinted: bool = False
    # Share of the way from LRU to the clairvoyant policy in this memory, see
    # `measure.gap`. None: they were not both replayed, or there is no way to speak of.
    token_gap: float | None = None
    seconds_gap: float | None = None
    # Measured, so different from run to run, and in no JSON unless it was asked for:
    # CPU seconds in the eviction policy's hooks.
    policy_cpu_s: float | None = None
    # What its admission order did; None without a clock.
    scheduling: Scheduling | None = None

    @property
    def evicted_gib(self) -> float:
        """Retained KV that was dropped to make room."""
        return self.num_evicted_blocks * self.gib / self.num_blocks

    @property
    def net_saved_s(self) -> float | None:
        """Saved seconds less those that the policy took; as measured as these."""
        return None if self.policy_cpu_s is None else self.saved_s - self.policy_cpu_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """A grid of replays of one trace."""

    trace: TraceFacts
    config: dict[str, str | int | float | None]
    cost_source: str
    cells: tuple[SweepCell, ...]
    curves: tuple[CapacityCurve, ...]
    # Where eviction policies are compared with a clock: the same ones without, and the
    # clairvoyant one, as a gap between two policies is one of a single order.
    clockless: tuple[SweepCell, ...] = ()


def to_json(
    result: object, *, schema: str, beside: Mapping[str, object] | None = None
) -> str:
    """Return deterministic JSON text: sorted keys, derived shares included.

    NaN and infinities, which JSON has not, become `null`. `schema` names the form,
    e.g. "stemkv.replay/1"; equal results give equal bytes. `beside` are other results
    that stand in the same document, by key.
    """
    document = {"schema": schema, **_plain(result), **_plain(dict(beside or {}))}
    return json.dumps(document, sort_keys=True, indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {
            f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)
        }
        for name, member in vars(type(value)).items():
            if isinstance(member, property):
                plain[name] = _plain(getattr(value, name))
        return plain
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
