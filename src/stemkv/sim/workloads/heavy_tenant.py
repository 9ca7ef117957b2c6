"""One tenant sends most and reuses nothing; the others would reuse if they could.

Owns the mix that shows whether one tenant's traffic costs the others their cache.
"""

from __future__ import annotations

import random
from itertools import islice

from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace
from stemkv.sim.workloads.arrivals import poisson
from stemkv.sim.workloads.draft import Draft, trace_of
from stemkv.sim.workloads.draws import Bounds, check_count, draw_length
from stemkv.sim.workloads.prompts import PromptWriter

__all__ = ["heavy_tenant"]


def heavy_tenant(
    *,
    num_requests: int,
    rate: float,
    seed: int,
    num_light: int = 4,
    share: float = 0.8,
    heavy_length: Bounds = (4_000, 8_000),
    prefix_length: int = 4_000,
    question_length: Bounds = (100, 400),
    output_length: Bounds = (50, 200),
) -> Trace:
    """Return traffic of which exactly `round(share * num_requests)` is one tenant's.

    The heavy tenant's prompts have nothing in common. Each of the `num_light` others
    has a prefix of its own and asks questions behind it.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"share must be from 0 to 1, got {share}")
    check_count("num_light", num_light)
    rng = random.Random(seed)
    writer = PromptWriter()
    prefixes = [writer.new(prefix_length) for _ in range(num_light)]
    heavy = set(rng.sample(range(num_requests), round(share * num_requests)))
    drafts = []
    for index, at_s in enumerate(islice(poisson(rng, rate), num_requests)):
        if index in heavy:
            tenant = "heavy"
            prompt = writer.new(draw_length(rng, heavy_length))
        else:
            light = rng.randrange(num_light)
            tenant = f"light-{light}"
            question = draw_length(rng, question_length)
            prompt = writer.extend(prefixes[light], question)
        drafts.append(
            Draft(
                prompt=prompt,
                output_length=draw_length(rng, output_length),
                arrival_s=at_s,
                tenant=tenant,
            )
        )
    return trace_of(drafts, name="heavy-tenant")
