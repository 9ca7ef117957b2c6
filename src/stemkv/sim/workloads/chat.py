"""Conversations: every turn asks with all that was said before.

Owns chat between people and a model. Agents, which say more and think less, are in
`agents`.
"""

from __future__ import annotations

import random

from stemkv.sim.trace import Trace
from stemkv.sim.workloads.arrivals import poisson
from stemkv.sim.workloads.draft import Draft, trace_of
from stemkv.sim.workloads.draws import (
    Bounds,
    draw_length,
    draw_lognormal,
    draw_pause,
    draw_tenant,
)
from stemkv.sim.workloads.prompts import PromptWriter
from stemkv.sim.workloads.sessions import first_arrivals

__all__ = ["chat"]


def chat(
    *,
    num_requests: int,
    rate: float,
    seed: int,
    num_tenants: int = 4,
    common_length: int = 500,
    own_length: float = 1_000,
    max_own_length: int = 5_000,
    num_messages: Bounds = (12, 18),
    question_length: Bounds = (120, 160),
    answer_length: Bounds = (80, 120),
    think_s: float = 30.0,
) -> Trace:
    """Return conversations behind one system prompt, in which people think.

    Lengths are those of vLLM's `benchmarks/multi_turn/generate_multi_turn.json`: a
    prefix common to all, one per conversation (lognormal of mean `own_length`), then
    `num_messages` messages, made even, of which every other is an answer. Think times
    are exponential with mean `think_s`, which is ours. `rate` counts
    requests and is reached once conversations overlap.
    """
    rng = random.Random(seed)
    writer = PromptWriter()
    common = writer.new(common_length)

    def converse(start_s: float, session: str) -> list[Draft]:
        tenant = draw_tenant(rng, num_tenants)
        own = draw_lognormal(rng, mean=own_length, most=max_own_length)
        num_turns = (draw_length(rng, num_messages) + 1) // 2
        prompt = writer.extend(common, own + draw_length(rng, question_length))
        last = Draft(
            prompt=prompt,
            output_length=draw_length(rng, answer_length),
            arrival_s=start_s,
            tenant=tenant,
            session=session,
        )
        drafts = [last]
        for _ in range(num_turns - 1):
            pause_s = draw_pause(rng, think_s)
            said = last.output_length + draw_length(rng, question_length)
            last = Draft(
                prompt=writer.extend(last.prompt, said),
                output_length=draw_length(rng, answer_length),
                arrival_s=last.next_arrival_s(pause_s),
                tenant=tenant,
                session=session,
                parent=last,
                think_s=pause_s,
            )
            drafts.append(last)
        return drafts

    mean_turns = (sum(num_messages) / 2 + 0.5) / 2
    starts = poisson(rng, rate / mean_turns)
    drafts = first_arrivals(starts, converse, num_requests=num_requests)
    return trace_of(drafts, name="chat")
