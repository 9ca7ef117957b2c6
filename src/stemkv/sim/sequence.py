"""A trace through the real cache, one request at a time and without a clock.

Owns the walk and what it counts besides hits: by tenant, and whose KV whom it served.
Knows no scheduler and no costs of waiting. "Now" is a request's place in the trace.

One unit is one block of one token, so the cache compares unit ids as it compares tokens.
A request is there alone: its path is pinned while it runs, whatever it lacks is
inserted, and only its leading run of cached units is a hit.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from stemkv.core.cache import PrefixCache
from stemkv.core.config import CacheConfig
from stemkv.core.cost import CostModel
from stemkv.core.eviction.base import EvictionPolicy
from stemkv.core.eviction.lru import Lru
from stemkv.core.identity import Domain
from stemkv.core.table import Lease
from stemkv.core.tokens import TokenIds
from stemkv.measure.results import WriterReader
from stemkv.sim.hits import HitCounter, Hits
from stemkv.sim.sharing import SharingRule
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceResult:
    """What a sequential replay found."""

    hits: Hits
    num_requests: int
    num_hit_requests: int  # reused at least one token
    num_too_long: int  # longer than the cache: their hits count, they insert nothing
    num_evicted_units: int
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
    progress: Callable[[int, int], None] | None = None,
) -> SequenceResult:
    """Replay a trace in a cache of `num_blocks` units; `None` never evicts.

    `policy` is a fresh one, `Lru` unless given. `progress` is told now and then how
    many requests of how many are done.
    """
    sequence = _Sequence(trace, num_blocks, rule, policy or Lru(), cost)
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
        trace: Trace,
        num_blocks: int | None,
        rule: SharingRule,
        policy: EvictionPolicy,
        cost: CostModel | None,
    ) -> None:
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
        self._cache = PrefixCache(config, policy)
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
        self._num_too_long = 0

    def serve(self, index: int, request: TraceRequest) -> None:
        """Look up, insert and let go of one request."""
        names = request.identity, request.tenant
        if names not in self._places:
            self._places[names] = self._rule.of(request)
        namespace, domain = self._places[names]
        units = request.units
        now = request.arrival_s
        if len(units) > self._capacity:
            self._num_too_long += 1
            peek = self._cache.peek(namespace, domain, (units + _LAST).tobytes())
            units = units[: peek.num_whole_blocks]
        tokens = (units + _LAST).tobytes()
        lease = self._cache.acquire(
            namespace, domain, tokens, num_slots=len(units) + 1, now=now
        )
        assert lease is not None, "nobody else holds blocks"
        self._count(index, request, lease)
        self._cache.publish(lease, tokens, len(units), now)
        self._cache.release(lease, now)

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
            tenants=tuple(
                TenantHits(
                    tenant=tenant,
                    num_requests=num_requests[tenant],
                    num_hit_requests=self._num_hit_requests[tenant],
                    input_tokens=input_tokens[tenant],
                    hit_tokens=self._hit_tokens[tenant],
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
