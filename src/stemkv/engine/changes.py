"""Changes of what is served, while requests are in flight.

Owns the order in which a change does its things: the identity first, then the fence and
what was cached, then the requests in flight, the tensors last. Nobody is told before it
is done, so that a listener that fails or is interrupted leaves no change half made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.identities import LoadedAdapter
from stemkv.core.prefix.sharing import SharingPolicy
from stemkv.core.schedule.scheduler import Scheduler
from stemkv.engine.clock import Clock
from stemkv.engine.door import Door
from stemkv.engine.loop import StepLoop
from stemkv.engine.namespaces import Namespaces
from stemkv.engine.recheck import Rechecks
from stemkv.engine.rollout import InFlight, RequestsInFlight
from stemkv.engine.served import Change, Served
from stemkv.errors import ConfigError

__all__ = ["Changes"]


class Changes:
    """Every way to change what an engine serves; `Engine` says what each one means."""

    def __init__(
        self,
        loop: StepLoop,
        scheduler: Scheduler,
        served: Served,
        namespaces: Namespaces,
        door: Door,
        requests: RequestsInFlight,
        rechecks: Rechecks,
        clock: Clock,
    ) -> None:
        self._loop = loop
        self._scheduler = scheduler
        self._served = served
        self._identities = served.identities
        self._namespaces = namespaces
        self._door = door
        self._requests = requests
        self._rechecks = rechecks
        self._clock = clock

    def load_adapter(
        self, name: str, path: Path | str, *, scale: float
    ) -> LoadedAdapter:
        """Serve an adapter under a name that is free."""
        self._check("load_adapter")
        if any(loaded.name == name for loaded in self._identities.adapters()):
            raise ConfigError(
                f"adapter {name!r} is loaded; use reload_adapter to replace it"
            )
        loaded, retired = self._served.load_adapter(name, path, scale)
        self.retire(retired)
        self._loop.catch_up()
        return loaded

    def reload_adapter(
        self,
        name: str,
        path: Path | str | None,
        *,
        scale: float | None,
        in_flight: InFlight,
    ) -> LoadedAdapter:
        """Serve other matrices under a name that is taken."""
        self._check("reload_adapter", in_flight)
        current = self._identities.adapter(name)
        loaded, retired = self._served.load_adapter(
            name,
            self._served.adapters.source(name) if path is None else path,
            current.scale if scale is None else scale,
        )
        self.retire(retired)
        self._requests.meet(in_flight, self._clock.now(), version=current.version)
        self._loop.catch_up()
        return loaded

    def unload_adapter(self, name: str, *, in_flight: InFlight) -> None:
        """Refuse an adapter from now on."""
        self._check("unload_adapter", in_flight)
        if in_flight is InFlight.RESTART:
            raise ConfigError(
                "in_flight cannot be RESTART when an adapter is unloaded: there is "
                "nothing to begin again on; use FINISH or ABORT"
            )
        version = self._identities.adapter(name).version
        self.retire(self._served.unload_adapter(name))
        self._requests.meet(in_flight, self._clock.now(), version=version)
        self._loop.catch_up()

    def update_weights(
        self, tensors: Mapping[str, torch.Tensor], *, in_flight: InFlight
    ) -> int:
        """Replace tensors of the model."""
        self._check("update_weights", in_flight)
        return self._roll_out(self._served.with_weights(tensors), in_flight)

    def update_numerics(self, numerics: str, *, in_flight: InFlight) -> int:
        """Replace the numerics class."""
        self._check("update_numerics", in_flight)
        return self._roll_out(self._served.with_numerics(numerics), in_flight)

    def update_sharing(self, sharing: SharingPolicy, *, in_flight: InFlight) -> int:
        """Replace the policy that says who shares."""
        self._check("update_sharing", in_flight)
        if not isinstance(sharing, SharingPolicy):
            raise ConfigError(
                f"sharing must be a SharingPolicy, got {type(sharing).__name__}"
            )
        now = self._clock.now()
        before = self._door.under(self._door.sharing)
        self._door.sharing = sharing
        self._identities.note_change()
        self._requests.change_domains(before, in_flight, now)
        self._loop.catch_up()
        return self._identities.generation

    def reset(self, cache: PrefixCache) -> int:
        """Make everything cached unmatchable; return how many blocks that freed."""
        self._check("reset")
        now = self._clock.now()
        num_free = cache.usage().num_free_blocks
        self._namespaces.reset(now)
        self._loop.catch_up()
        return cache.usage().num_free_blocks - num_free

    def retire(self, namespaces: tuple[bytes, ...]) -> None:
        """Make namespaces unmatchable, also for the requests in flight."""
        now = self._clock.now()
        self._namespaces.leave(namespaces)
        for namespace in namespaces:
            self._scheduler.retire(namespace, now)

    # Private

    def _roll_out(self, change: Change, in_flight: InFlight) -> int:
        """Advance the generation, fence, deal with requests, then change the state."""
        now = self._clock.now()
        self.retire(self._identities.replace_base(change.base))
        epoch = self._scheduler.fence()
        self._requests.meet(in_flight, now)

        def put_in_place() -> None:
            self._rechecks.clear()
            self._loop.drop_unused_adapters()
            with self._loop.whole("a rollout was left half made"):
                change.put_in_place()
                self._rechecks.runner = self._served.runner

        self._loop.rollouts.add(epoch, put_in_place)
        self._loop.catch_up()
        return self._identities.generation

    def _check(self, verb: str, in_flight: InFlight = InFlight.FINISH) -> None:
        if not isinstance(in_flight, InFlight):
            raise ConfigError(
                f"in_flight must be InFlight.FINISH, RESTART or ABORT, "
                f"got {in_flight!r}"
            )
        self._loop.check_between_steps(verb)
