"""Coding agents: a long prefix of tools, a growing history, hardly a pause.

Owns sessions of agents. Conversations with people are in `chat`.
"""

from __future__ import annotations

import math
import random

from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace
from stemkv.sim.workloads.arrivals import poisson
from stemkv.sim.workloads.draft import Draft, trace_of
from stemkv.sim.workloads.draws import (
    Zipf,
    check_count,
    draw_lognormal,
    draw_pause,
    draw_tenant,
)
from stemkv.sim.workloads.prompts import Prompt, PromptWriter
from stemkv.sim.workloads.sessions import first_arrivals

__all__ = ["agents"]


def agents(
    *,
    num_requests: int,
    rate: float,
    seed: int,
    num_tenants: int = 2,
    tools_length: int = 32_000,
    group_length: int = 20_000,
    num_groups: int = 50,
    group_exponent: float = 1.2,
    own_length: float = 15_000,
    new_length: float = 6_000,
    max_new_length: int = 10_000,
    output_length: float = 1_000,
    max_output_length: int = 1_500,
    context_length: int = 167_000,
    end_probability: float = 0.02,
    think_s: float = 3.0,
) -> Trace:
    """Return agents' sessions, whose prompts have four layers.

    Tools and system prompt are everybody's, a group's repository that of one of
    `num_groups` (picked by Zipf), opened files the session's; then its history, by a
    tool's result and an answer each turn. A session ends by chance after any turn, or
    when the next prompt and its answer would not fit `context_length`. `rate` counts
    requests and is nearly reached once sessions overlap.

    Layers and lengths are those of AIPerf's agentic code generator: of its default
    configuration, with the groups of its `inference-day-2026`; `group_length=0` is the
    default without groups. Lengths are lognormal around the means. The pauses
    (exponential, mean `think_s`) and `end_probability` are ours.
    """
    if not 0 <= end_probability <= 1:
        raise ConfigError(f"end_probability must be from 0 to 1, got {end_probability}")
    if tools_length + group_length + max_new_length > context_length:
        raise ConfigError(
            f"context_length is {context_length}, less than tools_length, group_length "
            f"and max_new_length together"
        )
    check_count("num_groups", num_groups)
    rng = random.Random(seed)
    writer = PromptWriter()
    tools = writer.new(tools_length)
    repositories = [writer.extend(tools, group_length) for _ in range(num_groups)]
    popularity = Zipf(num_groups, group_exponent)
    room = context_length - max_output_length

    def new_turn(behind: Prompt, answer: int) -> Prompt:
        new = draw_lognormal(rng, mean=new_length, most=max_new_length)
        return writer.extend(behind, answer + new)

    def work(start_s: float, session: str) -> list[Draft]:
        tenant = draw_tenant(rng, num_tenants)
        repository = repositories[popularity.pick(rng)]
        own = draw_lognormal(rng, mean=own_length, most=room - repository.length)
        last = Draft(
            prompt=writer.extend(repository, own),
            output_length=draw_lognormal(
                rng, mean=output_length, most=max_output_length
            ),
            arrival_s=start_s,
            tenant=tenant,
            session=session,
        )
        drafts = [last]
        while rng.random() >= end_probability:
            prompt = new_turn(last.prompt, last.output_length)
            if prompt.length > room:
                break
            pause_s = draw_pause(rng, think_s)
            last = Draft(
                prompt=prompt,
                output_length=draw_lognormal(
                    rng, mean=output_length, most=max_output_length
                ),
                arrival_s=last.next_arrival_s(pause_s),
                tenant=tenant,
                session=session,
                parent=last,
                think_s=pause_s,
            )
            drafts.append(last)
        return drafts

    growth = room - tools_length - group_length - own_length
    most_turns = 1 + max(0.0, growth) / (new_length + output_length)
    mean_turns = _mean_turns(most_turns, end_probability)
    starts = poisson(rng, rate / mean_turns)
    drafts = first_arrivals(starts, work, num_requests=num_requests)
    return trace_of(drafts, name="agents")


def _mean_turns(most: float, end_probability: float) -> float:
    """Return the mean of a geometric number of turns, cut off at `most`."""
    if not end_probability:
        return most
    return (1 - math.pow(1 - end_probability, most)) / end_probability
