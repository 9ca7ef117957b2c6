"""Questions about documents, a few of which many ask about.

Owns retrieval with one document per prompt.
"""

from __future__ import annotations

import random
from itertools import islice

from stemkv.sim.trace import Trace
from stemkv.sim.workloads.arrivals import poisson
from stemkv.sim.workloads.draft import Draft, trace_of
from stemkv.sim.workloads.draws import (
    Bounds,
    Zipf,
    check_count,
    draw_length,
    draw_tenant,
)
from stemkv.sim.workloads.prompts import PromptWriter

__all__ = ["documents"]


def documents(
    *,
    num_requests: int,
    rate: float,
    seed: int,
    num_tenants: int = 4,
    instructions_length: int = 200,
    num_documents: int = 1_000,
    exponent: float = 1.1,
    document_length: Bounds = (2_000, 8_000),
    question_length: Bounds = (20, 80),
    output_length: Bounds = (100, 300),
) -> Trace:
    """Return questions: instructions, then a document picked by Zipf, then a question.

    All tenants ask about the same documents. At the default exponent 3 % of the
    documents get 62 % of the questions; RAGCache found 60 % (arXiv 2404.12457).
    """
    check_count("num_documents", num_documents)
    rng = random.Random(seed)
    writer = PromptWriter()
    instructions = writer.new(instructions_length)
    shelf = [
        writer.extend(instructions, draw_length(rng, document_length))
        for _ in range(num_documents)
    ]
    popularity = Zipf(num_documents, exponent)
    drafts = [
        Draft(
            prompt=writer.extend(
                shelf[popularity.pick(rng)], draw_length(rng, question_length)
            ),
            output_length=draw_length(rng, output_length),
            arrival_s=at_s,
            tenant=draw_tenant(rng, num_tenants),
        )
        for at_s in islice(poisson(rng, rate), num_requests)
    ]
    return trace_of(drafts, name="documents")
