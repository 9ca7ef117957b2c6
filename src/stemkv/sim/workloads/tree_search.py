"""Tree search: several thoughts from one state, the best go on.

Owns searches in which a model proposes and something else judges, as in tree of
thoughts (arXiv 2305.10601) with a beam.
"""

from __future__ import annotations

import random

from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace
from stemkv.sim.workloads.arrivals import poisson
from stemkv.sim.workloads.draft import Draft, trace_of
from stemkv.sim.workloads.draws import Bounds, draw_length, draw_tenant
from stemkv.sim.workloads.prompts import Prompt, PromptWriter
from stemkv.sim.workloads.sessions import first_arrivals

__all__ = ["tree_search"]


def tree_search(
    *,
    num_requests: int,
    rate: float,
    seed: int,
    num_tenants: int = 2,
    instructions_length: int = 1_000,
    problem_length: Bounds = (200, 800),
    thought_length: Bounds = (50, 150),
    depth: int = 4,
    num_branches: int = 5,
    num_kept: int = 2,
    judge_s: float = 0.5,
) -> Trace:
    """Return searches: `num_branches` thoughts per state, the best `num_kept` go on.

    A state's thoughts are separate requests with one and the same prompt. A level
    begins `judge_s` after the slowest thought of the one above; in a closed loop, after
    the thought that it continues. `rate` counts requests.
    """
    if min(depth, num_branches, num_kept) < 1 or num_kept > num_branches:
        raise ConfigError(
            f"depth, num_branches and num_kept must be at least 1 and num_kept at most "
            f"num_branches, got {depth}, {num_branches} and {num_kept}"
        )
    rng = random.Random(seed)
    writer = PromptWriter()
    instructions = writer.new(instructions_length)

    def search(start_s: float, session: str) -> list[Draft]:
        tenant = draw_tenant(rng, num_tenants)

        def think(prompt: Prompt, at_s: float, parent: Draft | None) -> list[Draft]:
            return [
                Draft(
                    prompt=prompt,
                    output_length=draw_length(rng, thought_length),
                    arrival_s=at_s,
                    tenant=tenant,
                    session=session,
                    parent=parent,
                    think_s=judge_s if parent else 0.0,
                )
                for _ in range(num_branches)
            ]

        problem = draw_length(rng, problem_length)
        level = think(writer.extend(instructions, problem), start_s, None)
        drafts = list(level)
        for _ in range(depth - 1):
            at_s = max(draft.next_arrival_s(judge_s) for draft in level)
            kept = [
                level[index]
                for index in sorted(rng.sample(range(len(level)), num_kept))
            ]
            level = [
                child
                for best in kept
                for child in think(
                    writer.extend(best.prompt, best.output_length), at_s, best
                )
            ]
            drafts += level
        return drafts

    num_per_search = num_branches * (1 + (depth - 1) * num_kept)
    starts = poisson(rng, rate / num_per_search)
    drafts = first_arrivals(starts, search, num_requests=num_requests)
    return trace_of(drafts, name="tree-search")
