"""Documents read in turn, from the first to the last and again.

Owns the order that LRU is worst at: what comes next was evicted last.
"""

from __future__ import annotations

import random
from itertools import islice

from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace
from stemkv.sim.workloads.arrivals import poisson
from stemkv.sim.workloads.draft import Draft, trace_of
from stemkv.sim.workloads.draws import Bounds, check_count, draw_length, draw_tenant
from stemkv.sim.workloads.prompts import PromptWriter

__all__ = ["cyclic"]


def cyclic(
    *,
    num_requests: int,
    rate: float,
    seed: int,
    num_tenants: int = 1,
    num_documents: int = 100,
    one_off_share: float = 0.0,
    document_length: Bounds = (1_000, 4_000),
    question_length: Bounds = (20, 80),
    output_length: Bounds = (50, 200),
) -> Trace:
    """Return one question per document, round after round, as a nightly job asks them.

    A request is, by chance, none of that but about a text of its own, of a document's
    length, with a chance of `one_off_share`. A cache that holds fewer than all documents
    and evicts the least recently used reuses nothing of them.
    """
    if not 0 <= one_off_share <= 1:
        raise ConfigError(f"one_off_share must be from 0 to 1, got {one_off_share}")
    check_count("num_documents", num_documents)
    rng = random.Random(seed)
    writer = PromptWriter()
    shelf = [
        writer.new(draw_length(rng, document_length)) for _ in range(num_documents)
    ]
    drafts = []
    num_asked = 0
    for at_s in islice(poisson(rng, rate), num_requests):
        if rng.random() < one_off_share:
            document = writer.new(draw_length(rng, document_length))
        else:
            document = shelf[num_asked % num_documents]
            num_asked += 1
        drafts.append(
            Draft(
                prompt=writer.extend(document, draw_length(rng, question_length)),
                output_length=draw_length(rng, output_length),
                arrival_s=at_s,
                tenant=draw_tenant(rng, num_tenants),
            )
        )
    return trace_of(drafts, name="cyclic")
