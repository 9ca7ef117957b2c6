"""Changes of what is served, while requests are in flight.

Owns the order in which a change does its things: the identity first, then the fence and
what was cached, then the requests in flight, the tensors last. Nobody is told before it
is done, so that a listener that fails or is interrupted leaves no change half made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from stemkv.core.core import Core
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.identities import LoadedAdapter
from stemkv.core.prefix.sharing import SharingPolicy
from stemkv.engine.clock import Clock
from stemkv.engine.door import Door
from stemkv.engine.loop import StepLoop
from stemkv.engine.namespaces import Namespaces
from stemkv.engine.recheck import Rechecks
from stemkv.engine.rollout import InFlight, RequestsInFlight
from stemkv.engine.served import Change, Served
from stemkv.errors import ConfigError, InvariantError, StemKVError

__all__ = ["Changes"]


class Changes:
    """Every way to change what an engine serves; `Engine` says what each one means."""

    def __init__(
        self,
        loop: StepLoop,
        core: Core,
        served: Served,
        namespaces: Namespaces,
        door: Door,
        requests: RequestsInFlight,
        rechecks: Rechecks,
        clock: Clock,
    ) -> None:
        self._loop = loop
        self._core = core
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
        read, now = self._served.read_adapter(path, scale), self._clock.now()
        with self._change():
            loaded, retired = self._served.load_adapter(name, read)
            self.retire(retired, now)
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
        read = self._served.read_adapter(
            self._served.adapters.source(name) if path is None else path,
            current.scale if scale is None else scale,
        )
        now = self._clock.now()
        with self._change():
            loaded, retired = self._served.load_adapter(name, read)
            self.retire(retired, now)
            self._requests.meet(in_flight, now, version=current.version)
        return loaded

    def unload_adapter(self, name: str, *, in_flight: InFlight) -> None:
        """Refuse an adapter from now on."""
        self._check("unload_adapter", in_flight)
        if in_flight is InFlight.RESTART:
            raise ConfigError(
                "in_flight cannot be RESTART when an adapter is unloaded: there is "
                "nothing to begin again on; use FINISH or ABORT"
            )
        version, now = self._identities.adapter(name).version, self._clock.now()
        with self._change():
            self.retire(self._served.unload_adapter(name), now)
            self._requests.meet(in_flight, now, version=version)

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
        with self._change():
            self._door.sharing = sharing
            self._identities.note_change()
            self._requests.change_domains(before, in_flight, now)
        return self._identities.generation

    def reset(self, cache: PrefixCache) -> int:
        """Make everything cached unmatchable; return how many blocks that freed."""
        self._check("reset")
        now = self._clock.now()
        num_free = cache.usage().num_free_blocks
        with self._change():
            self._namespaces.reset(now)
        return cache.usage().num_free_blocks - num_free

    def close(self, namespace: bytes) -> None:
        """Let nobody match what is in a namespace, nor share in it."""
        now = self._clock.now()
        with self._change():
            self.retire((namespace,), now)
            self._namespaces.close(namespace)

    def retire(self, namespaces: tuple[bytes, ...], now: float) -> None:
        """Make namespaces unmatchable, also for the requests in flight."""
        self._namespaces.leave(namespaces)
        for namespace in namespaces:
            self._core.retire(namespace, now)

    # Private

    def _roll_out(self, change: Change, in_flight: InFlight) -> int:
        """Advance the generation, fence, deal with requests, then change the state."""
        now = self._clock.now()

        def put_in_place() -> None:
            self._rechecks.clear()
            self._loop.drop_unused_adapters()
            with self._loop.whole("a rollout was left half made"):
                change.put_in_place()
                self._rechecks.runner = self._served.runner

        with self._change():
            self.retire(self._identities.replace_base(change.plan()), now)
            epoch = self._core.fence()
            self._requests.meet(in_flight, now)
            self._loop.rollouts.add(epoch, put_in_place)
        return self._identities.generation

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Make what is inside whole or nothing; tell of it when it is done.

        A refusal comes before the first step of a change. Whatever else interrupts it
        leaves no state that could be gone on from.
        """
        try:
            yield
        except BaseException as error:
            is_defect = isinstance(error, InvariantError)
            if is_defect or not isinstance(error, StemKVError):
                self._loop.broken_by = f"a change was interrupted: {error!r}"
            raise
        self._loop.catch_up()

    def _check(self, verb: str, in_flight: InFlight = InFlight.FINISH) -> None:
        if not isinstance(in_flight, InFlight):
            raise ConfigError(
                f"in_flight must be InFlight.FINISH, RESTART or ABORT, "
                f"got {in_flight!r}"
            )
        self._loop.check_between_steps(verb)
