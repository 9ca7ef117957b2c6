"""From the words of a command line to a trace: a file, a pipe, or made-up requests.

Owns which options go together and what they mean. Formats and generators are `sim`'s.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stemkv.cli.options import remedy_as_typed
from stemkv.cli.outputs import counted, say
from stemkv.errors import ConfigError
from stemkv.sim.formats import read_trace
from stemkv.sim.trace import Trace
from stemkv.sim.workloads.registry import workload_named

__all__ = ["TraceOptions", "load_trace", "parse_map", "say_if_open"]

_NUM_REQUESTS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What is replayed, as it was typed."""

    trace: str | None = None
    format: str | None = None
    map: Sequence[str] = ()
    tokens: str | None = None
    is_strict: bool = False
    limit: int | None = None
    workload: str | None = None
    num_requests: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trace is None and self.workload is None:
            raise ConfigError("nothing to replay; name a TRACE or a --workload")
        if self.trace is not None and self.workload is not None:
            raise ConfigError(
                f"replay either the trace {self.trace} or the workload "
                f"{self.workload}, not both"
            )
        if self.trace is not None:
            wrong = {"--requests": self.num_requests is not None}
            remedy = "is for a workload; a trace takes --limit"
        else:
            wrong = {
                "--format": self.format is not None,
                "--map": bool(self.map),
                "--tokens": self.tokens is not None,
                "--strict": self.is_strict,
                "--limit": self.limit is not None,
            }
            remedy = "is for a trace; a workload takes --requests"
        for name, is_given in wrong.items():
            if is_given:
                raise ConfigError(f"{name} {remedy}")
        parse_map(self.map)

    def inputs(self) -> dict[str, str | Path | None]:
        """Return the files that are read, by the words that name each."""
        return {"the trace": self.trace, "--tokens": self.tokens}


def parse_map(entries: Sequence[str]) -> dict[str, str]:
    """Return role → path of the entries `role=path`; each role once."""
    fields: dict[str, str] = {}
    for entry in entries:
        role, is_separated, path = (part.strip() for part in entry.partition("="))
        if not (role and is_separated and path):
            raise ConfigError(
                f"--map takes ROLE=PATH, as in tenant=metadata.team, got {entry!r:.80}"
            )
        if role in fields:
            raise ConfigError(f"--map gives {role} twice: {fields[role]} and {path}")
        fields[role] = path
    return fields


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
        num_requests = options.num_requests
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
            is_strict=options.is_strict,
            limit=options.limit,
            seed=options.seed,
            progress=progress,
        )
    trace.notes[:] = map(remedy_as_typed, trace.notes)
    return trace
