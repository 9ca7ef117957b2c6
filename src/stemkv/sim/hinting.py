"""Which hints requests come with in a replay.

Owns the words for it and the way from a trace's fields to the core's hints. What a
trace says was said when it was recorded. All else is hindsight: an oracle (see `oracle`)
reads what came later, and shows what a hint would be worth to whoever can give it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.errors import ConfigError
from stemkv.sim.oracle import declared_next_uses, session_ends
from stemkv.sim.reuse import Reuses, find_reuses
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace, TraceRequest

__all__ = ["HINTS", "HintRule"]

_ORACLES: Final = ("session_end", "next_use")
HINTS: Final = ("trace", "none", *_ORACLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class HintRule:
    """Where hints come from: a name of `HINTS`.

    trace: the trace's own fields. session_end: the last request of each session says
    so. next_use: every request says when its prompt is used again, at the recorded
    pace; of these a `wrong_share` answers at random, drawn with `seed`.
    """

    name: str = "trace"
    wrong_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in HINTS:
            raise ConfigError(
                f"hints must be one of {', '.join(HINTS)}, got {self.name!r:.80}"
            )
        if not 0 <= self.wrong_share <= 1:
            raise ConfigError(
                f"wrong_share must be from 0 to 1, got {self.wrong_share}"
            )
        if self.wrong_share and self.name != "next_use":
            raise ConfigError(
                f"wrong_share is of the answers of hints next_use; hints {self.name} "
                f"have none"
            )

    @property
    def is_hindsight(self) -> bool:
        """Whether they say what nobody could have known."""
        return self.name in _ORACLES

    def says_something(self, trace: Trace) -> bool:
        """Whether any request says more of the future than which session it is of."""
        if self.name != "trace":
            return self.is_hindsight
        return any(
            request.ends_session
            or request.next_use_s is not None
            or request.ephemeral_from is not None
            for request in trace.requests
        )

    def __str__(self) -> str:
        if not self.is_hindsight:
            return self.name
        wrong = ""
        if self.wrong_share:
            wrong = f", {self.wrong_share:.3g} of them at random, seed {self.seed}"
        return f"{self.name}, from hindsight{wrong}"

    def of(
        self, trace: Trace, rule: SharingRule, *, reuses: Reuses | None = None
    ) -> Sequence[Hints]:
        """Return the hints of each request; `reuses` for whoever has found them."""
        match self.name:
            case "none":
                return [NO_HINTS] * len(trace.requests)
            case "trace":
                return [_told(request) for request in trace.requests]
        if reuses is None:
            reuses = find_reuses(trace, rule)
        if self.name == "session_end":
            return session_ends(reuses)
        return declared_next_uses(reuses, wrong_share=self.wrong_share, seed=self.seed)


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
