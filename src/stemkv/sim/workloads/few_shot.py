"""Few-shot prompts: one block of examples per task, and a question.

Owns tasks that are asked again and again with the same examples.
"""

from __future__ import annotations

import random
from itertools import islice

from stemkv.sim.trace import Trace
from stemkv.sim.workloads.arrivals import poisson
from stemkv.sim.workloads.draft import Draft, trace_of
from stemkv.sim.workloads.draws import Bounds, check_count, draw_length
from stemkv.sim.workloads.prompts import PromptWriter

__all__ = ["few_shot"]


def few_shot(
    *,
    num_requests: int,
    rate: float,
    seed: int,
    num_tenants: int = 4,
    num_tasks: int = 64,
    examples_length: int = 2_048,
    question_length: Bounds = (128, 128),
    output_length: Bounds = (256, 256),
) -> Trace:
    """Return questions to tasks, as many to each, in random order.

    Each task is one tenant's. With 1,024 requests it is SGLang's
    `generated-shared-prefix` at its defaults: 64 groups of 16 prompts.
    """
    check_count("num_tasks", num_tasks)
    check_count("num_tenants", num_tenants)
    rng = random.Random(seed)
    writer = PromptWriter()
    examples = [writer.new(examples_length) for _ in range(num_tasks)]
    tasks = [index % num_tasks for index in range(num_requests)]
    rng.shuffle(tasks)
    drafts = [
        Draft(
            prompt=writer.extend(examples[task], draw_length(rng, question_length)),
            output_length=draw_length(rng, output_length),
            arrival_s=at_s,
            tenant=f"tenant-{task % num_tenants}",
        )
        for task, at_s in zip(
            tasks, islice(poisson(rng, rate), num_requests), strict=True
        )
    ]
    return trace_of(drafts, name="few-shot")
