"""What a caller may say about the future of a prompt. Safe when wrong.

Owns the hints. One never changes what may be shared or what a request computes: a wrong
one costs hits, and first of all those of whoever gave it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stemkv.errors import RequestError

__all__ = ["NO_HINTS", "Hints"]

_MAX_SESSION = 256  # characters; names are compared at every use


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What the caller of one request knows; all of it optional."""

    # Requests that continue one another. Names are the domain's own: two domains with
    # one name have two sessions.
    session: str | None = None
    ends_session: bool = False  # nothing will continue it: its blocks go first
    # Seconds from the end of the request until its prompt is used again; inf: never.
    next_use_s: float | None = None
    # Tokens from this position on are used once: not retained after their last lease.
    ephemeral_from: int | None = None

    def __post_init__(self) -> None:
        if self.session is not None and (
            not isinstance(self.session, str)
            or not 0 < len(self.session) <= _MAX_SESSION
        ):
            raise RequestError(
                f"hints.session must be a non-empty text of at most {_MAX_SESSION} "
                f"characters, got {self.session!r:.80}",
                field="hints.session",
            )
        if not isinstance(self.ends_session, bool):
            raise RequestError(
                f"hints.ends_session must be true or false, "
                f"got {self.ends_session!r:.80}",
                field="hints.ends_session",
            )
        if self.ends_session and self.session is None:
            raise RequestError(
                "hints.ends_session needs hints.session, to know which one ends",
                field="hints.ends_session",
            )
        seconds = self.next_use_s
        if seconds is not None and (
            not isinstance(seconds, int | float)
            or isinstance(seconds, bool)
            or not seconds >= 0  # nor a number that is none
        ):
            raise RequestError(
                f"hints.next_use_s must be seconds of at least 0, or inf for never, "
                f"got {seconds!r:.80}",
                field="hints.next_use_s",
            )
        start = self.ephemeral_from
        if start is not None and (
            not isinstance(start, int) or isinstance(start, bool) or start < 0
        ):
            raise RequestError(
                f"hints.ephemeral_from must be a token position of at least 0, "
                f"got {start!r:.80}",
                field="hints.ephemeral_from",
            )


NO_HINTS: Final = Hints()
