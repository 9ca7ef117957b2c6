"""A trace through the real cache, one request at a time: order only, no durations.

Owns the walk and what it counts besides hits: by tenant, whose KV whom it served, and
what was there once and had to be computed again. Knows no scheduler and no costs of
waiting. "Now" is when a request arrived; where a trace has no clock, what was made up.
It moves only policies that learn from times.

One unit is one block of one token, so the cache compares unit ids as it compares tokens.
A request is there alone: its path is pinned while it runs, whatever it lacks is
inserted, and only its leading run of cached units is a hit.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from stemkv.core.books.cost import CostModel
from stemkv.core.core import CoreConfig, make_cache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.table import Lease
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.retention.lookahead import Waiting
from stemkv.core.retention.policy.base import EvictionPolicy
from stemkv.core.retention.policy.lru import Lru
from stemkv.errors import ConfigError
from stemkv.measure.results import WriterReader
from stemkv.sim.clairvoyant import Clairvoyant
from stemkv.sim.hits import HitCounter, Hits, hit_tokens
from stemkv.sim.reuse import Reuses, find_reuses
from stemkv.sim.sharing import SharingRule
from stemkv.sim.stopwatch import Stopwatch
from stemkv.sim.trace import Trace, TraceRequest

__all__ = ["SequenceResult", "TenantHits", "replay_sequence"]

# The core computes at least the last token of a prompt; this one stands behind the
# units, so that all of them can be matched. It is never published.
_LAST = array("i", (0,))
_REQUESTS_PER_REPORT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantHits:
    """One tenant's share; sums over tenants equal the totals."""

    tenant: str
    num_requests: int
    num_hit_requests: int
    input_tokens: int
    hit_tokens: int
    regret_units: int
    regret_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceResult:
    """What a sequential replay found.

    Regret is what a cache without limit would have hit and this one did not: it was
    evicted and asked for again, or (see `num_too_long`) never inserted. Exact.
    """

    hits: Hits
    num_requests: int
    num_hit_requests: int  # reused at least one token
    num_too_long: int  # longer than the cache: their hits count, they insert nothing
    num_evicted_units: int
    regret_units: int
    regret_tokens: int
    tenants: tuple[TenantHits, ...]  # by name
    # The writer is who put the copy there that was reused. After an eviction that is
    # whoever computed it anew: the one whose work was saved from being repeated.
    writers: tuple[WriterReader, ...]

    @property
    def request_hit_rate(self) -> float:
        """Share of requests that reused anything; NaN without requests."""
        return (
            self.num_hit_requests / self.num_requests if self.num_requests else math.nan
        )


def replay_sequence(
    trace: Trace,
    *,
    num_blocks: int | None,
    rule: SharingRule,
    policy: EvictionPolicy | None = None,
    cost: CostModel | None = None,
    reuses: Reuses | None = None,
    lookahead: int = 0,
    hints: Sequence[Hints] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SequenceResult:
    """Replay a trace in a cache of `num_blocks` units; `None` never evicts.

    `policy` is a fresh one, `Lru` unless given; a `Clairvoyant` is told which request
    is served, also under a `Stopwatch`. `reuses` is what `find_reuses` says of this
    trace and rule, for whoever replays them more than once. So many requests as
    `lookahead` says, behind the one that runs, stand for the waiting queue; the cache
    spares what they will hit. `hints` has one for each request; those that end their
    session do so when they are done. `progress` is told now and then how many requests
    of how many are done.
    """
    if lookahead < 0:
        raise ConfigError(f"lookahead must be at least 0 requests, got {lookahead}")
    if hints is not None and len(hints) != len(trace.requests):
        raise ConfigError(f"{len(hints)} hints for {len(trace.requests)} requests")
    if reuses is None:
        reuses = find_reuses(trace, rule)
    sequence = _Sequence(
        reuses,
        num_blocks,
        rule,
        policy or Lru(),
        cost,
        lookahead=lookahead,
        hints=hints,
    )
    num_requests = len(trace.requests)
    for index, request in enumerate(trace.requests):
        sequence.serve(index, request)
        if progress is not None and (index + 1) % _REQUESTS_PER_REPORT == 0:
            progress(index + 1, num_requests)
    if progress is not None and num_requests % _REQUESTS_PER_REPORT:
        progress(num_requests, num_requests)
    return sequence.result()


class _Sequence:
    """The cache and the sums while a trace goes through."""

    def __init__(
        self,
        reuses: Reuses,
        num_blocks: int | None,
        rule: SharingRule,
        policy: EvictionPolicy,
        cost: CostModel | None,
        *,
        lookahead: int,
        hints: Sequence[Hints] | None,
    ) -> None:
        trace = reuses.trace
        if num_blocks is None:
            capacity = sum(len(request.units) for request in trace.requests)
        else:
            capacity = num_blocks
        # One more for the token behind the units of the request that runs.
        config = CacheConfig(num_blocks=capacity + 1, block_size=1)
        self._trace = trace
        self._num_blocks = num_blocks
        self._capacity = capacity
        self._rule = rule
        self._cache = make_cache(CoreConfig(cache=config), make_policy=lambda: policy)
        self._clairvoyant = _clairvoyant(policy)
        self._reuses = reuses
        for namespace, prefixes in rule.public_prefixes(trace).items():
            for prefix in prefixes:
                self._cache.declare_public(namespace, TokenIds.from_buffer(prefix))
        self._counter = HitCounter(trace, cost)
        # Equal domains are one object: the tree's look-ups then compare no names.
        self._places: dict[tuple[str, str], tuple[bytes, Domain]] = {}
        self._tenants = trace.tenants()
        self._numbers = {name: number for number, name in enumerate(self._tenants)}
        self._writer_of = array("i", bytes(4 * (capacity + 1)))  # by block id
        self._served: Counter[tuple[int, int]] = Counter()  # (writer, reader) → tokens
        self._num_hit_requests: Counter[str] = Counter()
        self._hit_tokens: Counter[str] = Counter()
        self._regret_units: Counter[str] = Counter()
        self._regret_tokens: Counter[str] = Counter()
        self._num_too_long = 0
        self._now = 0.0
        self._hints = hints
        self._lookahead = lookahead
        self._queue: deque[Waiting] = deque()  # behind the request that runs
        self._num_queued = 0  # requests that are or were in the queue
        if lookahead:
            self._cache.watch_queue(self._waiting)

    def serve(self, index: int, request: TraceRequest) -> None:
        """Look up, insert and let go of one request."""
        namespace, domain = self._place(request)
        units = request.units
        # A clock never goes back. In a trace that is out of order it stands still.
        now = self._now = max(self._now, request.arrival_s)
        self._fill_queue(index)
        if self._clairvoyant is not None:
            self._clairvoyant.serving(index)
        if len(units) > self._capacity:
            self._num_too_long += 1
            peek = self._cache.peek(namespace, domain, (units + _LAST).tobytes())
            units = units[: peek.num_whole_blocks]
        tokens = (units + _LAST).tobytes()
        hints = NO_HINTS if self._hints is None else self._hints[index]
        if hints.ephemeral_from is not None:
            # A unit is a token here.
            first = hints.ephemeral_from // self._trace.unit_size
            hints = replace(hints, ephemeral_from=first)
        lease = self._cache.acquire(
            namespace,
            domain,
            tokens,
            Demand(num_slots=len(units) + 1),
            hints=hints,
            now=now,
        )
        assert lease is not None, "nobody else holds blocks"
        self._count(index, request, lease)
        self._cache.publish(lease, tokens, len(units), now)
        self._cache.release(lease, now)
        if hints.ends_session and hints.session is not None:
            self._cache.end_session(domain, hints.session, now)
        if self._clairvoyant is not None:
            for depth in self._clairvoyant.cuts(len(units)):
                self._cut(namespace, domain, units[:depth], now)

    def result(self) -> SequenceResult:
        """Return the sums so far."""
        requests = self._trace.requests
        num_requests = Counter(request.tenant for request in requests)
        input_tokens: Counter[str] = Counter()
        for request in requests:
            input_tokens[request.tenant] += request.input_length
        return SequenceResult(
            hits=self._counter.hits(self._num_blocks),
            num_requests=len(requests),
            num_hit_requests=self._num_hit_requests.total(),
            num_too_long=self._num_too_long,
            num_evicted_units=self._cache.usage().num_evicted_blocks,
            regret_units=self._regret_units.total(),
            regret_tokens=self._regret_tokens.total(),
            tenants=tuple(
                TenantHits(
                    tenant=tenant,
                    num_requests=num_requests[tenant],
                    num_hit_requests=self._num_hit_requests[tenant],
                    input_tokens=input_tokens[tenant],
                    hit_tokens=self._hit_tokens[tenant],
                    regret_units=self._regret_units[tenant],
                    regret_tokens=self._regret_tokens[tenant],
                )
                for tenant in self._tenants
            ),
            writers=tuple(
                WriterReader(
                    writer=self._tenants[writer],
                    reader=self._tenants[reader],
                    tokens=tokens,
                )
                for (writer, reader), tokens in sorted(self._served.items())
            ),
        )

    def _place(self, request: TraceRequest) -> tuple[bytes, Domain]:
        names = request.identity, request.tenant
        if names not in self._places:
            self._places[names] = self._rule.of(request)
        return self._places[names]

    def _fill_queue(self, index: int) -> None:
        """Let those wait that come right behind request `index`."""
        if not self._lookahead:
            return
        requests = self._trace.requests
        if self._queue:
            self._queue.popleft()  # it runs now
        first = max(self._num_queued, index + 1)
        self._num_queued = min(index + 1 + self._lookahead, len(requests))
        for request in requests[first : self._num_queued]:
            tokens = (request.units + _LAST).tobytes()
            self._queue.append(Waiting(*self._place(request), tokens))

    def _waiting(self, now: float) -> Iterable[Waiting]:
        return self._queue

    def _cut(
        self, namespace: bytes, domain: Domain, units: array[int], now: float
    ) -> None:
        """Divide a resident edge behind these units, unless it ends there.

        A match that ends inside an edge splits it, and nothing merges what the policy
        keeps apart. The one block that this takes is there: no request holds any.
        """
        lease = self._cache.acquire(
            namespace,
            domain,
            (units + _LAST).tobytes(),
            Demand(num_slots=len(units) + 1),
            now=now,
        )
        assert lease is not None, "nobody else holds blocks"
        self._cache.release(lease, now)

    def _count(self, index: int, request: TraceRequest, lease: Lease) -> None:
        """Count what the lease found, and take what it lacks for this tenant's work."""
        found = lease.num_matched_tokens
        reader = self._numbers[request.tenant]
        block_ids = lease.table.ids()
        writer_of = self._writer_of
        tokens = self._counter.count(index, found)
        if tokens:
            self._num_hit_requests[request.tenant] += 1
            self._hit_tokens[request.tenant] += tokens
            for block_id in block_ids[: found - 1]:
                self._served[writer_of[block_id], reader] += self._trace.unit_size
            # The last one may be partly filled.
            of_last = tokens - (found - 1) * self._trace.unit_size
            self._served[writer_of[block_ids[found - 1]], reader] += of_last
        for block_id in block_ids[found:]:
            writer_of[block_id] = reader
        runs = self._reuses.runs[index]
        if runs and runs[-1].end > found:
            seen = runs[-1].end
            self._regret_units[request.tenant] += seen - found
            self._regret_tokens[request.tenant] += (
                hit_tokens(request, seen, self._trace.unit_size) - tokens
            )


def _clairvoyant(policy: EvictionPolicy) -> Clairvoyant | None:
    """Return the policy that wants to know which request is served, if it is one."""
    if isinstance(policy, Stopwatch):
        policy = policy.policy
    return policy if isinstance(policy, Clairvoyant) else None
