"""Orders that rank all requests by one key and know no tenants.

Owns what they have in common: whoever is first and does not fit keeps all behind it
waiting, so small requests do not starve a large one of memory, and the youngest yields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stemkv.core.schedule.order.base import C, Candidate, Pick
from stemkv.core.schedule.order.keys import KeyOf
from stemkv.core.schedule.order.queue import RequestQueue
from stemkv.core.schedule.waiting import WaitingMatches

__all__ = ["Ranked"]


class Ranked:
    """The smallest key first; ties by arrival."""

    is_timeless = True  # keys are of requests and what is cached of them alone

    def __init__(self, key: KeyOf, *, pauses: bool = False) -> None:
        self._queue = RequestQueue(key, pauses=pauses)

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._queue)

    def watch(self, matches: WaitingMatches) -> None:
        """Take what knows where requests match; the key needs to know how much only."""

    def add(self, request: Candidate) -> None:
        """Take a request that waits."""
        self._queue.add(request)

    def start(self, request: Candidate) -> None:
        """Let its prefill go on in later steps."""
        self._queue.start(request)

    def moved(self, request: Candidate) -> None:
        """Rank it anew."""
        self._queue.moved(request)

    def remove(self, request: Candidate) -> None:
        """Forget it."""
        self._queue.remove(request)

    def hold(self, request: Candidate, leader: Candidate | None) -> None:
        """Leave it out until `release`; others pass it meanwhile."""
        self._queue.hold(request)

    def release(self, request: Candidate) -> None:
        """Rank it again."""
        self._queue.release(request)

    def begin(self, now: float, *, admits: bool) -> None:
        """Begin a step."""
        self._queue.begin(admits=admits)

    def pick(self) -> Pick | None:
        """Return an unfinished prefill, the oldest first, or who is ranked first."""
        request = self._queue.to_go_on()
        if request is not None:
            return Pick(request)
        groups = self._queue.candidates()
        return Pick(self._queue.best(groups)) if groups else None

    def ran(self, pick: Pick, num_tokens: int, *, is_last: bool) -> None:
        """Leave it out for the rest of the step: its chunk was all that fits."""
        self._queue.pass_over(pick.request)

    def cannot_start(self, pick: Pick) -> bool:
        """Let nobody overtake it."""
        self._queue.stop_admitting()
        return True

    def yields_to(self, pick: Pick, running: Sequence[C]) -> C | None:
        """Let it wait until somebody ends."""
        return None

    def decoded(self, tenant: str, num_tokens: int) -> None:
        """Nobody pays."""

    def first(self, num: int, now: float) -> Iterator[Candidate]:
        """Yield the first ones."""
        return self._queue.first(num)

    def victim(self, running: Sequence[C]) -> C:
        """Return the youngest."""
        return running[-1]
