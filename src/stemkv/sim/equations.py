"""The equations that a result fulfils before anybody sees it.

Owns them and their names. A number that is part of another gets one here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stemkv.core.books.entry import LedgerEntry
from stemkv.measure.results import Check, PrefixValue, ReplayResult
from stemkv.sim.replica import Replica
from stemkv.sim.trace import Trace

__all__ = ["checks_of"]


def checks_of(
    result: ReplayResult,
    prefixes: Sequence[PrefixValue],
    *,
    trace: Trace,
    entries: Sequence[LedgerEntry],
    replicas: Sequence[Replica],
) -> tuple[Check, ...]:
    """Return both sides of every equation."""
    tokens, tenants = result.tokens, result.tenants
    finished = sum(
        trace.requests[int(entry.request_id)].input_length for entry in entries
    )
    num_output = sum(
        max(1, trace.requests[int(entry.request_id)].output_length) for entry in entries
    )
    num_requests = len(trace.requests)
    pairs: list[tuple[str, float, float]] = [
        (
            "prompt tokens of the trace that ran = reused + computed",
            finished,
            tokens.reused + tokens.computed,
        ),
        (
            "computed tokens = misses by reason",
            tokens.computed,
            sum(tokens.misses.values()),
        ),
        (
            "requests = finished + refused",
            num_requests,
            result.num_finished + result.num_refused,
        ),
        (
            "reused tokens = those by writer and reader",
            tokens.reused,
            sum(pair.tokens for pair in result.writers),
        ),
        (
            "reused tokens by the books = those of the tenants",
            sum(replica.ledger.num_reused_tokens for replica in replicas),
            sum(tenant.tokens.reused for tenant in tenants),
        ),
        (
            "reused tokens = those of the prefixes",
            tokens.reused,
            sum(prefix.hit_tokens for prefix in prefixes),
        ),
        (
            "saved seconds by the books = those of the tenants",
            math.fsum(replica.ledger.saved_s for replica in replicas),
            math.fsum(tenant.saved.seconds for tenant in tenants),
        ),
        (
            "saved seconds = those of the prefixes",
            result.saved.seconds,
            math.fsum(prefix.saved_s for prefix in prefixes),
        ),
        (
            "retained GiB-seconds = those of the prefixes",
            result.saved.retained_gib_s,
            math.fsum(prefix.retained_gib_s for prefix in prefixes),
        ),
        (
            "evicted blocks = those of the tenants",
            result.num_evicted_blocks,
            sum(tenant.num_evicted_blocks for tenant in tenants),
        ),
        (
            "refused blocks = those of the tenants",
            result.num_refused_blocks,
            sum(tenant.num_refused_blocks for tenant in tenants),
        ),
        (
            "stall seconds = those of the tenants",
            result.stall_s,
            math.fsum(tenant.stall_s for tenant in tenants),
        ),
        (
            "output tokens = those of the trace that ran, at least one each",
            tokens.output,
            num_output,
        ),
    ]
    return tuple(Check(name=n, left=left, right=right) for n, left, right in pairs)
