"""Which hints requests come with in a replay.

Owns the words for it and the way from a trace's fields to the core's hints. What a
trace says was said when it was recorded. All else is hindsight: an oracle reads what
came later, and shows what a hint would be worth to whoever can give it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stemkv.core.hints import NO_HINTS, Hints
from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace, TraceRequest

__all__ = ["HINTS", "HintRule"]

HINTS: Final = ("trace", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class HintRule:
    """Where hints come from: a name of `HINTS`."""

    name: str = "trace"

    def __post_init__(self) -> None:
        if self.name not in HINTS:
            raise ConfigError(
                f"hints must be one of {', '.join(HINTS)}, got {self.name!r:.80}"
            )

    def __str__(self) -> str:
        return self.name

    def of(self, trace: Trace) -> list[Hints]:
        """Return the hints of each request."""
        if self.name == "none":
            return [NO_HINTS] * len(trace.requests)
        return [_told(request) for request in trace.requests]


def _told(request: TraceRequest) -> Hints:
    """Return what a request says itself."""
    session = request.session
    if session is None and request.ends_session:
        session = request.request_id  # it was all of it
    if session is not None:
        # A session is its tenant's, also in a domain of many.
        session = f"{len(request.tenant)}:{request.tenant}{session}"
    elif request.next_use_s is None and request.ephemeral_from is None:
        return NO_HINTS
    return Hints(
        session=session,
        ends_session=request.ends_session,
        next_use_s=request.next_use_s,
        ephemeral_from=request.ephemeral_from,
    )
