"""The workloads by name, and any of them in bursts.

Owns names, one-line descriptions and the checks that all generators need.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace
from stemkv.sim.workloads.agents import agents
from stemkv.sim.workloads.arrivals import Bursts
from stemkv.sim.workloads.chat import chat
from stemkv.sim.workloads.cyclic import cyclic
from stemkv.sim.workloads.documents import documents
from stemkv.sim.workloads.drifting import drifting
from stemkv.sim.workloads.few_shot import few_shot
from stemkv.sim.workloads.heavy_tenant import heavy_tenant
from stemkv.sim.workloads.interlude import interlude
from stemkv.sim.workloads.tree_search import tree_search
from stemkv.sim.workloads.worked_example import worked_example

__all__ = ["WORKLOADS", "Workload", "bursts", "workload_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A generator, and what to say of it in a list."""

    name: str
    summary: str
    generate: Callable[..., Trace]  # keyword arguments only


def workload_named(
    name: str,
    *,
    num_requests: int = 1_000,
    rate: float = 1.0,
    seed: int = 0,
    **parameters: Any,  # each generator's own, checked against its signature
) -> Trace:
    """Return a trace made by the generator of that name; the same for the same seed.

    `rate` is requests a second on average. Raises `ConfigError` for a name, or a
    parameter, that does not exist, with those that do.
    """
    by_name = {workload.name: workload for workload in WORKLOADS}
    if name not in by_name:
        raise ConfigError(
            f"workload {name!r:.80} does not exist; there are {', '.join(by_name)}"
        )
    if num_requests < 1:
        raise ConfigError(f"num_requests must be at least 1, got {num_requests}")
    if not 0 < rate < math.inf:
        raise ConfigError(f"rate must be above 0 and finite, got {rate}")
    generate = by_name[name].generate
    if name != "bursts":  # which passes on what it doesn't take itself
        _check_parameters(name, generate, parameters)
    return generate(num_requests=num_requests, rate=rate, seed=seed, **parameters)


def bursts(
    *,
    num_requests: int,
    rate: float,
    seed: int,
    mix: str = "worked-example",
    on_s: float = 10.0,
    off_s: float = 30.0,
    **parameters: Any,
) -> Trace:
    """Return the workload `mix` with its arrivals squeezed into bursts.

    `rate` stays the mean over on and off; within a burst it is higher by the ratio of
    the whole period to `on_s`. `parameters` are those of `mix`.
    """
    if mix == "bursts":
        raise ConfigError("mix must be another workload than bursts")
    shape = Bursts(on_s=on_s, off_s=off_s)
    even = workload_named(
        mix, num_requests=num_requests, rate=rate, seed=seed, **parameters
    )
    return dataclasses.replace(
        even,
        name="bursts",
        requests=[
            dataclasses.replace(request, arrival_s=shape.warp(request.arrival_s))
            for request in even.requests
        ],
        notes=[
            *even.notes,
            f"{mix} in bursts: {on_s:g} s on, {off_s:g} s off",
        ],
    )


WORKLOADS: Final = (
    Workload(
        name="worked-example",
        summary="40 % of requests begin with the same 12,000 tokens, the rest one-off",
        generate=worked_example,
    ),
    Workload(
        name="chat",
        summary="conversations of 6 to 9 turns behind one system prompt",
        generate=chat,
    ),
    Workload(
        name="agents",
        summary="coding agents: 32,000 tokens of tools, a repository, growing history",
        generate=agents,
    ),
    Workload(
        name="few-shot",
        summary="64 tasks with 2,048 tokens of examples each, and questions",
        generate=few_shot,
    ),
    Workload(
        name="tree-search",
        summary="several thoughts from one state, the best go on",
        generate=tree_search,
    ),
    Workload(
        name="documents",
        summary="questions about 1,000 documents, 3 % of which get 60 % of them",
        generate=documents,
    ),
    Workload(
        name="bursts",
        summary="another workload, on for 10 s and off for 30 s",
        generate=bursts,
    ),
    Workload(
        name="heavy-tenant",
        summary="one tenant sends 80 % and reuses nothing, four others would",
        generate=heavy_tenant,
    ),
    Workload(
        name="cyclic",
        summary="100 documents asked about in turn, round after round",
        generate=cyclic,
    ),
    Workload(
        name="drifting",
        summary="500 documents at a time, the most popular of which are soon forgotten",
        generate=drifting,
    ),
    Workload(
        name="interlude",
        summary="chat, then a batch of questions about documents, then the same chat",
        generate=interlude,
    ),
)


def _check_parameters(
    name: str, generate: Callable[..., Trace], parameters: dict[str, Any]
) -> None:
    known = set(inspect.signature(generate).parameters)
    unknown = sorted(set(parameters) - known)
    if unknown:
        own = sorted(known - {"num_requests", "rate", "seed"})
        raise ConfigError(
            f"{', '.join(unknown)}: {name} has no such parameter; it has "
            f"{', '.join(own)}"
        )
