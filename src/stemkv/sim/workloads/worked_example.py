"""The worked example: some requests begin with one long prefix, the others with nothing.

Owns the mix that decides whether keeping one prefix pays.
"""

from __future__ import annotations

import random
from itertools import islice

from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace
from stemkv.sim.workloads.arrivals import poisson
from stemkv.sim.workloads.draft import Draft, trace_of
from stemkv.sim.workloads.draws import Bounds, draw_length, draw_tenant
from stemkv.sim.workloads.prompts import PromptWriter

__all__ = ["worked_example"]


def worked_example(
    *,
    num_requests: int,
    rate: float,
    seed: int,
    num_tenants: int = 2,
    share: float = 0.4,
    prefix_length: int = 12_000,
    tail_length: Bounds = (150, 500),
    one_off_length: Bounds = (1_500, 6_000),
    output_length: Bounds = (50, 200),
) -> Trace:
    """Return Poisson traffic of which exactly `round(share * num_requests)` share.

    Those begin with the same `prefix_length` tokens, whichever tenant asks, and go on
    with a tail of their own; the others have nothing in common with anybody.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"share must be from 0 to 1, got {share}")
    rng = random.Random(seed)
    writer = PromptWriter()
    prefix = writer.new(prefix_length)
    sharing = set(rng.sample(range(num_requests), round(share * num_requests)))
    drafts = []
    for index, at_s in enumerate(islice(poisson(rng, rate), num_requests)):
        if index in sharing:
            prompt = writer.extend(prefix, draw_length(rng, tail_length))
        else:
            prompt = writer.new(draw_length(rng, one_off_length))
        drafts.append(
            Draft(
                prompt=prompt,
                output_length=draw_length(rng, output_length),
                arrival_s=at_s,
                tenant=draw_tenant(rng, num_tenants),
            )
        )
    return trace_of(drafts, name="worked-example")
