"""What keeping one prefix is worth: the words and the arithmetic of `stemkv value`.

Owns the definitions: what one replay says of a kept prefix, what its memory would hold
otherwise, seconds per GiB-second on both sides, and the share of traffic from which
keeping pays. Runs nothing (see `sim.value`) and words nothing. Counts of the mix are
exact; whatever depends on when things happen is estimated by a cost model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from stemkv.measure.results import (
    GIB,
    LatencySummary,
    ReplayResult,
    RequestResult,
    Source,
)

__all__ = [
    "BreakEven",
    "KeptPrefix",
    "LoadPoint",
    "MemoryPoint",
    "Mix",
    "ValueResult",
    "ValueRun",
    "value_run",
]

_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPrefix:
    """The tokens that are kept, and what computing them once costs."""

    num_tokens: int  # in whole blocks
    num_bytes: int  # of KV
    prefill_s: float
    prefill_joules: float

    @property
    def gib(self) -> float:
        """Memory of one copy."""
        return self.num_bytes / GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What requests are made of; lengths count prompt and output. All exact."""

    num_requests: int
    num_sharing: int  # begin with the prefix
    one_off_tokens: float  # mean of those that do not; NaN if all do
    own_tokens: float  # mean of those that do, without the prefix; NaN if none does
    mean_tokens: float  # of all, each with a copy of its own
    mean_own_tokens: float  # of all, the prefix not counted

    @property
    def share(self) -> float:
        """Share of requests that begin with the prefix."""
        return self.num_sharing / self.num_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRun:
    """One replay of the mix: through how much memory, how fast, and who may reuse."""

    reuse: str  # "off", "isolated" (within a tenant) or "shared" (by everybody)
    gib: float  # KV memory
    num_finished: int
    num_refused: int
    end_s: float  # first arrival to last token
    hit_rate: float  # by token
    saved_s: float  # of prefill
    saved_joules: float
    ttft: LatencySummary | None
    tpot: LatencySummary | None
    goodput_rps: float | None  # within both limits
    goodput_share: float | None
    mean_running: float  # requests, over the whole run
    mean_active_gib: float
    peak_active_gib: float
    # The same requests at the same times, each with all its blocks to itself.
    mean_copies_gib: float
    peak_copies_gib: float
    published_gib: float  # became reusable, the same tokens again if evicted between
    # `None` with reuse off, which has nothing to keep.
    num_evicted_blocks: int | None
    regret_tokens: int | None  # evicted and asked for again
    num_preemptions: int
    num_stalls: int  # admissions that waited for memory
    stall_s: float
    # Who held the memory at those moments, on average; NaN without stalls.
    stall_active_gib: float
    stall_cached_gib: float  # idle: could be evicted at once, and still not enough
    # What was ever hit, while nobody and while somebody used it. `None` where there
    # are too many pieces for the replay to list them all.
    idle_gib_s: float | None
    used_gib_s: float | None

    @property
    def requests_per_s(self) -> float:
        """Finished requests over the whole run."""
        return self.num_finished / self.end_s if self.end_s else math.nan

    @property
    def saved_s_per_min(self) -> float:
        """Seconds of prefill saved per minute of the run."""
        return _MINUTE_S * self.saved_s / self.end_s if self.end_s else math.nan

    @property
    def saved_joules_per_min(self) -> float:
        """Energy of the same."""
        return _MINUTE_S * self.saved_joules / self.end_s if self.end_s else math.nan

    @property
    def retention_s(self) -> float:
        """How long an idle block lives: idle memory over what is published a second.

        Under LRU a block that nobody touches is evicted when as much as all the idle
        memory has been published since.
        """
        if not self.published_gib:
            return math.inf
        idle_gib = max(0.0, self.gib - self.mean_active_gib)
        return idle_gib * self.end_s / self.published_gib

    @property
    def retention_share(self) -> float:
        """Share of requests with whom the mean gap between two is `retention_s`."""
        if not self.retention_s:
            return math.inf
        return 1 / (self.requests_per_s * self.retention_s)

    @property
    def used_share(self) -> float | None:
        """Share of the kept GiB-seconds in which somebody used what was kept."""
        if self.idle_gib_s is None or self.used_gib_s is None:
            return None
        total = self.idle_gib_s + self.used_gib_s
        return self.used_gib_s / total if total else math.nan

    @property
    def saved_s_per_idle_gib_s(self) -> float | None:
        """Saved seconds per GiB-second that only keeping took; the ledger's ratio."""
        if self.idle_gib_s is None:
            return None
        if not self.idle_gib_s:
            return math.inf if self.saved_s else math.nan
        return self.saved_s / self.idle_gib_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """The same requests at one rate of arrival, without and with reuse."""

    rate: float  # requests a second
    load: float  # of what all memory serves with reuse off
    off: ValueRun
    isolated: ValueRun
    shared: ValueRun

    def runs(self) -> tuple[ValueRun, ...]:
        """Return all three, the least reuse first."""
        return (self.off, self.isolated, self.shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """From which share of requests on a prefix is worth memory of its own.

    The other side of the scale is what its memory does as active KV: one-off requests
    are replayed through all of the memory and through what the prefix leaves of it, all
    arriving at once. What is lost of their rate is what displacing them costs. Suppose
    the prefix is never evicted, and saves its prefill every time. Then a share `s` of
    `one_off_rate` saves `s * one_off_rate * prefill_s` seconds per second, and keeping
    costs `lost_share`. Two things make the share an upper limit: the core evicts what
    nobody uses as soon as it is needed, and requests that hold the prefix anyway would
    displace others even if it were not kept.
    """

    gib: float  # all of the memory
    one_off_rate: float  # requests a second through it
    # Through what the prefix leaves; `None` if that cannot hold the longest of them.
    displaced_rate: float | None
    prefix_gib: float
    prefill_s: float  # of the prefix

    @property
    def lost_share(self) -> float:
        """Share of the one-off rate that the prefix's memory carries, in [0, 1]."""
        if self.displaced_rate is None:
            return 1.0
        return max(0.0, 1 - self.displaced_rate / self.one_off_rate)

    @property
    def active_s_per_gib_s(self) -> float:
        """Seconds of work that a GiB-second carries as active KV, at the margin."""
        return self.lost_share / self.prefix_gib

    @property
    def share(self) -> float:
        """Smallest share that saves as much as it costs; above 1: no share does."""
        return self.lost_share / (self.one_off_rate * self.prefill_s)

    def kept_s_per_gib_s(self, share: float) -> float:
        """Return seconds saved per GiB-second of the prefix, never evicted."""
        return share * self.one_off_rate * self.prefill_s / self.prefix_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """The same requests at the same rate through one size of memory."""

    gib: float
    off: ValueRun
    isolated: ValueRun
    shared: ValueRun
    break_even: BreakEven

    def runs(self) -> tuple[ValueRun, ...]:
        """Return all three, the least reuse first."""
        return (self.off, self.isolated, self.shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueResult:
    """Everything that `stemkv value` found."""

    config: dict[str, str | int | float | None]
    cost_source: str
    mix_source: Source  # of `prefix.num_tokens`, `prefix.num_bytes` and `mix`
    time_source: Source  # of all else
    num_tenants: int
    prefix: KeptPrefix
    mix: Mix
    capacity: LoadPoint  # everybody arrives at once; its `rate` is infinite
    loads: tuple[LoadPoint, ...]  # ascending
    memories: tuple[MemoryPoint, ...]  # descending, at the rate of `pivot()`

    def pivot(self) -> LoadPoint:
        """Return the load nearest to what all memory serves with reuse off."""
        return min(self.loads, key=lambda point: (abs(point.load - 1), point.load))

    @property
    def is_conclusive(self) -> bool:
        """Whether the mix could have shown a reuse, or is meant to have none."""
        return self.mix.num_sharing != 1 and (
            self.mix.num_sharing > 1 or not self.config["share"]
        )

    # What the prefix's memory holds as active KV instead.

    @property
    def active_one_offs(self) -> float:
        """One-off requests of mean length."""
        return self.prefix.num_tokens / self.mix.one_off_tokens

    @property
    def active_requests(self) -> float:
        """Requests of the mix, each with a copy of its own."""
        return self.prefix.num_tokens / self.mix.mean_tokens

    @property
    def active_reusing_requests(self) -> float:
        """Requests of the mix that find the prefix cached elsewhere."""
        return self.prefix.num_tokens / self.mix.mean_own_tokens


def value_run(result: ReplayResult, *, reuse: str) -> ValueRun:
    """Return what one replay says.

    In a replay with reuse off everybody is in a namespace of its own; what it publishes
    and evicts is then of no interest to anybody, and left out.
    """
    latencies = {summary.name: summary for summary in result.latencies}
    ran = [r for r in result.requests if r.end_s is not None]
    mean_copies, peak_copies = _copies(ran, result.block_size, result.end_s)
    is_off = reuse == "off"
    hit = [prefix for prefix in result.prefixes if prefix.num_hits]
    is_complete = sum(prefix.hit_tokens for prefix in hit) == result.tokens.reused

    def gib(num_blocks: float) -> float:
        return num_blocks * result.block_bytes / GIB

    return ValueRun(
        reuse=reuse,
        gib=result.capacity_gib,
        num_finished=result.num_finished,
        num_refused=result.num_refused,
        end_s=result.end_s,
        hit_rate=result.tokens.hit_rate,
        saved_s=result.saved.seconds,
        saved_joules=result.saved.joules,
        ttft=_without_picture(latencies.get("TTFT")),
        tpot=_without_picture(latencies.get("TPOT")),
        goodput_rps=result.goodput_rps,
        goodput_share=result.goodput_share,
        mean_running=_over(math.fsum(_spans(ran)), result.end_s),
        mean_active_gib=_over(result.saved.active_gib_s, result.end_s),
        peak_active_gib=gib(result.peak_active_blocks),
        mean_copies_gib=gib(mean_copies),
        peak_copies_gib=gib(peak_copies),
        published_gib=0.0 if is_off else gib(result.num_published_blocks),
        num_evicted_blocks=None if is_off else result.num_evicted_blocks,
        regret_tokens=None if is_off else result.regret_tokens,
        num_preemptions=result.num_preemptions,
        num_stalls=result.num_stalls,
        stall_s=result.stall_s,
        stall_active_gib=gib(result.stall_active_blocks),
        stall_cached_gib=gib(result.stall_cached_blocks),
        idle_gib_s=(
            math.fsum(prefix.retained_gib_s for prefix in hit) if is_complete else None
        ),
        used_gib_s=(
            math.fsum(prefix.active_gib_s for prefix in hit) if is_complete else None
        ),
    )


def _without_picture(summary: LatencySummary | None) -> LatencySummary | None:
    return None if summary is None else replace(summary, distribution=())


def _copies(
    requests: list[RequestResult], block_size: int, end_s: float
) -> tuple[float, int]:
    """Return (mean, peak) blocks if every running request had all its blocks alone.

    Counted from admission to end, at the length that a request ends with; a preempted
    one counts on.
    """
    changes: list[tuple[float, int]] = []
    block_s = []
    for request, span_s in zip(requests, _spans(requests), strict=True):
        num_tokens = request.prompt_tokens + request.output_tokens
        num_blocks = -(-num_tokens // block_size)
        block_s.append(num_blocks * span_s)
        changes.append((_time(request.admitted_s), num_blocks))
        changes.append((_time(request.end_s), -num_blocks))
    peak = held = 0
    # Whoever ends at a moment has left when the next one starts.
    for _, change in sorted(changes):
        held += change
        peak = max(peak, held)
    return _over(math.fsum(block_s), end_s), peak


def _spans(requests: Iterable[RequestResult]) -> list[float]:
    return [_time(r.end_s) - _time(r.admitted_s) for r in requests]


def _time(value: float | None) -> float:
    assert value is not None, "a finished request has all its times"
    return value


def _over(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else math.nan
