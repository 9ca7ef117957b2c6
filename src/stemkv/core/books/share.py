"""What a request found ahead of itself, and what ran before its first token.

Owns the record of one request. Who counts is the schedule's matter.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ShareOfWork"]


@dataclass(slots=True)
class ShareOfWork:
    """What a request found ahead of itself, and what ran until its first token.

    Prefill tokens. `backlog` are those of all that waited or were unfinished when it
    came, itself included; `own_backlog` of its tenant's alone. Of that, `own_lost` had to
    be computed besides: it was cached then, or computed, and was evicted since.
    """

    backlog: int = 0
    own_backlog: int = 0
    run_before: int = 0  # run by all, and by its tenant, when it came
    own_run_before: int = 0
    run: int | None = None  # by all, from then to its first token; None: not yet
    own_run: int | None = None
    own_lost: int = 0  # known with the first token
    wanted: int = 0  # of itself, when it was last looked at
    number: int | None = None  # among its tenant's that came; None: it has not come
    own_lost_before: int = 0  # lost by its tenant when it came

    @property
    def ratio(self) -> float | None:
        """What its tenant ran over what was ahead of it; 1 if nobody overtook it."""
        if self.own_run is None:
            return None
        return self.own_run / max(1, self.own_backlog)

    @property
    def ratio_with_lost(self) -> float | None:
        """The same, with what was evicted of the work ahead counted as ahead."""
        if self.own_run is None:
            return None
        return self.own_run / max(1, self.own_backlog + self.own_lost)
