"""Changes of what is served, and what becomes of the requests in flight.

Owns the policies, the queue of changes that wait for earlier requests to end, and what
a change does to each request that it finds in flight. Knows nothing of what a change
is: it is something to call at the right moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum

from stemkv.core.core import Core
from stemkv.core.prefix.identity import Domain
from stemkv.core.schedule.request import FinishReason, Request
from stemkv.engine.namespaces import Namespaces
from stemkv.engine.samples import LiveSample, LiveSamples

__all__ = ["InFlight", "RequestsInFlight", "Rollouts"]


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


class RequestsInFlight:
    """The requests that a change finds in flight, on their way through it.

    `domain_of` says which domain a request has by the rules of now.
    """

    def __init__(
        self,
        core: Core,
        samples: LiveSamples,
        namespaces: Namespaces,
        domain_of: Callable[[LiveSample], Domain | None],
    ) -> None:
        self._core = core
        self._samples = samples
        self._namespaces = namespaces
        self._domain_of = domain_of

    def meet(
        self, in_flight: InFlight, now: float, *, version: str | None = None
    ) -> None:
        """Deal with all requests in flight, or with those of one adapter version."""
        if in_flight is InFlight.FINISH:
            return
        for live, request in self._known():
            if version is None or request.spec.adapter == version:
                self._meet(in_flight, live, request, now)

    def change_domains(
        self,
        before: Callable[[LiveSample], Domain | None],
        in_flight: InFlight,
        now: float,
    ) -> None:
        """Deal with those whose domain is no more what it was by the rules before."""
        for live, request in self._known():
            if before(live) == self._domain_of(live):
                continue
            if in_flight is InFlight.FINISH:
                self._core.cut_off(live.sample_id)
            else:
                self._meet(in_flight, live, request, now)

    def _known(self) -> Iterator[tuple[LiveSample, Request]]:
        """Return those that the scheduler knows by their own id."""
        for live in self._samples:
            request = self._core.scheduler.request(live.sample_id)
            if request is not None and live.is_in_core:
                yield live, request

    def _meet(
        self, in_flight: InFlight, live: LiveSample, request: Request, now: float
    ) -> None:
        if in_flight is InFlight.ABORT:
            self._core.cancel(live.sample_id, now, reason=FinishReason.REPLACED)
        else:
            self._restart(live, request, now)

    def _restart(self, live: LiveSample, request: Request, now: float) -> None:
        """Let a sample begin again on what its adapter and tenant mean now."""
        version = request.spec.adapter
        domain = self._domain_of(live)
        namespace = None
        known = self._namespaces.adapter_versions()
        if live.adapter is None or live.adapter in known:
            version = known.get(live.adapter) if live.adapter else None
            if domain is not None:
                namespace = self._namespaces.enter(
                    live.adapter, start_position=live.start_position
                )
        # Else the adapter was unloaded meanwhile: this request stays on it, alone.
        self._core.restart(live.sample_id, namespace, version, now, domain=domain)
