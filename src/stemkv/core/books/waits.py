"""Why a request waits, and how long for each reason.

Owns the reasons and the record of one request. Knows nothing of how they come about.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Wait", "WaitReason", "Waits"]

_MOST_SPANS = 64  # of one request; one that is paused again and again has more


class WaitReason(Enum):
    """Why nothing of a request was computed."""

    QUEUE = "queue"  # others go first
    MEMORY = "memory"  # its blocks are not to be had now
    PLACES = "places"  # as many requests run as may
    PREFIX = "prefix"  # somebody is computing its prefix just now
    SESSION = "session"  # as many sessions are active as may
    ROLLOUT = "rollout"  # what it shall run on is not in place yet
    PAUSED = "paused"  # its prefill has begun and others go first
    PREEMPTED = "preempted"  # its blocks were taken away


@dataclass(frozen=True, slots=True)
class Wait:
    """One span of waiting, in seconds on the driver's clock."""

    reason: WaitReason
    start_s: float
    end_s: float


class Waits:
    """The waiting of one request up to now.

    A reason holds from when the scheduler last had it to when it finds another or the
    request goes on; who is not looked at keeps the reason it had.
    """

    __slots__ = ("_reason", "_since_s", "seconds", "spans")

    def __init__(self, arrival_s: float) -> None:
        self.seconds: dict[WaitReason, float] = {}
        self.spans: list[Wait] = []  # the first ones, in order
        self._reason: WaitReason | None = WaitReason.QUEUE
        self._since_s = arrival_s

    @property
    def reason(self) -> WaitReason | None:
        """Why it waits now; `None`: it does not."""
        return self._reason

    def now_for(self, reason: WaitReason | None, now: float) -> None:
        """Wait for a reason from now on, or for none."""
        if reason is self._reason:
            return
        if self._reason is not None and now > self._since_s:
            seconds = self.seconds.get(self._reason, 0.0)
            self.seconds[self._reason] = seconds + now - self._since_s
            if len(self.spans) < _MOST_SPANS:
                self.spans.append(Wait(self._reason, self._since_s, now))
        self._reason = reason
        self._since_s = now
