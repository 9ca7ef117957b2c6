"""One form for all traces: what a request shares is a list of chained unit ids.

Owns the record that every reader fills and every replay consumes. Knows no file
format (see `formats`), no policy and no clock.

A unit is `unit_size` consecutive prompt tokens. Ids are chained: two requests with the
same id at some index have the same tokens there *and before*. So equal leading ids mean
an equal prefix, whether the ids came with the trace (Mooncake, Bailian) or were given
out by us for token ids or text (`units.UnitTable`), which keeps nothing of the text.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

__all__ = ["NO_TENANT", "Trace", "TraceProblem", "TraceRequest"]

# Who sent what names no tenant, in a trace where others have one.
NO_TENANT = "(none)"


@dataclass(slots=True, kw_only=True)
class TraceRequest:
    """One generation that somebody asked for."""

    request_id: str  # unique in the trace
    input_length: int  # prompt tokens, at least 1
    output_length: int  # tokens generated; 0 is possible in logs (a failed request)
    # Chained unit ids, each in [0, 2**30). Either every whole unit of the prompt
    # (`input_length // unit_size`) or one more for its partly filled end.
    units: array[int]
    arrival_s: float  # seconds from the first arrival; what an open loop replays
    tenant: str = "default"  # a name or a pseudonym
    # What else must be equal to share KV, as far as the trace tells: model, adapter,
    # cache salt. Requests with different identities are in different namespaces.
    identity: str = ""
    session: str | None = None
    # Closed loop: this request arrives `think_s` after `trace.requests[parent]` ended.
    # `None`: it arrives at `arrival_s` in either loop.
    parent: int | None = None
    think_s: float = 0.0
    line: int = 0  # where it stood in its file; 0: generated
    # Nothing but the length of the prompt is known; its units are nobody else's.
    is_opaque: bool = False
    # What its sender said of the future when it was sent (see `core.hints`).
    ends_session: bool = False  # nothing will continue `session`, which is then told
    # Seconds from the end of the request until its prompt is used again; inf: never.
    next_use_s: float | None = None
    ephemeral_from: int | None = None  # tokens from this one on are used once


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceProblem:
    """A line that was left out, or a fact about it that readers should know."""

    file: str
    line: int
    field: str  # "" when the line as a whole is meant
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return (
            f"{where}: {self.field}: {self.message}"
            if self.field
            else (f"{where}: {self.message}")
        )


@dataclass(slots=True, kw_only=True)
class Trace:
    """Requests sorted by `arrival_s`, and where they came from.

    `is_exact` tells whether units stand for exact token ids; text that was cut into
    units by an estimate (characters per token) is not, and every number that follows
    from it is labelled so.
    """

    name: str
    format: str  # "mooncake", "bailian", "generated", …
    unit_size: int  # tokens per unit
    requests: list[TraceRequest]
    is_exact: bool = True
    has_arrivals: bool = True  # False: `arrival_s` was made up (order only)
    num_lines: int = 0
    problems: list[TraceProblem] = field(default_factory=list)  # lines left out
    notes: list[str] = field(default_factory=list)  # "arrivals were sorted", …

    @property
    def num_input_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.input_length for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(request.output_length for request in self.requests)

    @property
    def duration_s(self) -> float:
        """First to last arrival."""
        return self.requests[-1].arrival_s if self.requests else 0.0

    def tenants(self) -> list[str]:
        """Return the tenants' names, sorted."""
        return sorted({request.tenant for request in self.requests})
