"""From the words of a command line to a trace: a file, a pipe, or made-up requests.

Owns which options go together and what they mean. Formats and generators are `sim`'s.
"""

from __future__ import annotations

import sys

from stemkv.cli.options import remedy_as_typed
from stemkv.cli.outputs import counted, say
from stemkv.cli.trace_options import TraceOptions, parse_map
from stemkv.errors import ConfigError
from stemkv.sim.formats import read_trace
from stemkv.sim.trace import Trace
from stemkv.sim.workloads.registry import workload_named

__all__ = ["load_trace", "say_if_open"]

_NUM_REQUESTS = 1_000


def say_if_open(trace: Trace, loop: str) -> None:
    """Tell people that a closed loop is none, as no request waits for another."""
    if loop == "closed" and all(each.parent is None for each in trace.requests):
        say(
            "note: no request of the trace names the turn before it, so in the closed "
            "loop, too, all arrive as recorded"
        )


def load_trace(
    options: TraceOptions,
    *,
    rate: float = 1.0,
    num_tenants: int | None = None,
) -> Trace:
    """Read the trace or make the workload, showing progress.

    `rate` is a workload's requests per second; a trace has its own times.
    `num_tenants`: of a workload that can be told.
    """
    if options.workload is not None:
        tenants = {} if num_tenants is None else {"num_tenants": num_tenants}
        num_requests = options.requests
        return workload_named(
            options.workload,
            num_requests=_NUM_REQUESTS if num_requests is None else num_requests,
            rate=rate,
            seed=options.seed,
            **tenants,
        )
    assert options.trace is not None, "one of the two is there"
    if options.trace == "-" and sys.stdin is None:
        raise ConfigError("standard input is closed; name a file, or pipe one in")
    with counted("reading", "bytes") as progress:
        trace = read_trace(
            options.trace,
            format=options.format,
            fields=parse_map(options.map),
            tokens=options.tokens,
            is_strict=options.strict,
            limit=options.limit,
            seed=options.seed,
            progress=progress,
        )
    trace.notes[:] = map(remedy_as_typed, trace.notes)
    return trace
