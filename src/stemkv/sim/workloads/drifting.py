"""Questions about documents whose popularity passes.

Owns news: what many ask about now, nobody asks about later.
"""

from __future__ import annotations

import random
from itertools import islice

from stemkv.errors import ConfigError
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
from stemkv.sim.workloads.prompts import Prompt, PromptWriter

__all__ = ["drifting"]


def drifting(
    *,
    num_requests: int,
    rate: float,
    seed: int,
    num_tenants: int = 4,
    num_documents: int = 500,
    exponent: float = 1.0,
    requests_per_step: int = 250,
    documents_per_step: int = 20,
    document_length: Bounds = (500, 4_000),
    question_length: Bounds = (20, 80),
    output_length: Bounds = (50, 200),
) -> Trace:
    """Return questions about one of `num_documents` at a time, picked by Zipf.

    After every `requests_per_step` requests the `documents_per_step` most popular are
    never asked about again, all others move up, and as many new ones come in last.
    """
    for name, count in (
        ("num_documents", num_documents),
        ("requests_per_step", requests_per_step),
    ):
        check_count(name, count)
    if documents_per_step < 0:
        raise ConfigError(
            f"documents_per_step must be at least 0, got {documents_per_step}"
        )
    rng = random.Random(seed)
    writer = PromptWriter()
    popularity = Zipf(num_documents, exponent)
    shelf: dict[int, Prompt] = {}  # written when first asked about
    drafts = []
    for index, at_s in enumerate(islice(poisson(rng, rate), num_requests)):
        num_gone = index // requests_per_step * documents_per_step
        number = num_gone + popularity.pick(rng)
        if number not in shelf:
            shelf[number] = writer.new(draw_length(rng, document_length))
        drafts.append(
            Draft(
                prompt=writer.extend(shelf[number], draw_length(rng, question_length)),
                output_length=draw_length(rng, output_length),
                arrival_s=at_s,
                tenant=draw_tenant(rng, num_tenants),
            )
        )
    return trace_of(drafts, name="drifting")
