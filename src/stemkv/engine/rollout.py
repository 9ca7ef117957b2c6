"""Changes of what is served, and what becomes of the requests in flight.

Owns the policies and the queue of changes that wait for earlier requests to end. Knows
nothing of what a change is: it is something to call at the right moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from stemkv.core.core import Core

__all__ = ["InFlight", "Rollouts"]


class InFlight(Enum):
    """What a rollout does with requests that were added before it.

    Under each of them, requests added later run on the new state and match only what
    was computed on it, and nothing of the old state is published any more.
    """

    FINISH = "finish"  # they end on the old state; later ones wait if both cannot be
    RESTART = "restart"  # their output is taken back and they begin again on the new
    ABORT = "abort"  # they end at once, with what they have, as `REPLACED`


class Rollouts:
    """Changes in place, each made once all requests of before it have ended."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    @property
    def num_waiting(self) -> int:
        """Changes that were asked for and are not made yet."""
        return len(self._waiting)

    def add(self, epoch: int, change: Callable[[], None]) -> None:
        """Queue a change for the fence that `Scheduler.fence` has set up."""
        self._waiting.append((epoch, change))

    def make_due(self) -> None:
        """Make all changes whose turn has come, in order, and lift their fences."""
        while self._waiting:
            epoch, change = self._waiting[0]
            if self._core.scheduler.num_before(epoch):
                return
            self._waiting.popleft()
            change()
            self._core.lift_fence(epoch)
