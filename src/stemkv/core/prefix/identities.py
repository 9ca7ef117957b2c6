"""Under which identity a request computes, while models and adapters come and go.

Owns the identity of the model as it is now, the adapters that are loaded, and the
generation: a counter that every mutation advances before the new state can serve.
Knows nothing of tensors, files, requests or blocks: whoever swaps tensors says so here
first, and retires the namespaces that this hands back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from stemkv.core.prefix.identity import UNKNOWN, ComputeIdentity, Unknown
from stemkv.errors import ConfigError, InvariantError, UnknownAdapter

__all__ = ["Identities", "LoadedAdapter"]

# Distinct pairs of adapter and start position other than 0 that can share at one time.
# What comes beyond shares nothing: who varies positions must not fill the memory.
_MAX_SHIFTED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """One version of an adapter, under the name that requests ask for."""

    name: str
    version: str  # unique in this table's life, also when a name comes again
    digest: bytes | Unknown  # content
    scale: float
    generation: int  # how many times the name was loaded before


class Identities:
    """The current identities of one engine, by adapter and start position.

    `base` is the identity without adapter at start position 0.
    """

    def __init__(self, base: ComputeIdentity) -> None:
        _check_base(base)
        self._base = base
        self._generation = 0
        self._adapters: dict[str, LoadedAdapter] = {}
        self._num_loads: dict[str, int] = {}
        self._namespaces: dict[tuple[str | None, int], bytes | None] = {}
        self._num_shifted = 0  # of those, at start positions other than 0

    # Questions

    @property
    def generation(self) -> int:
        """How many mutations there were: of weights, adapters or configuration."""
        return self._generation

    @property
    def base(self) -> ComputeIdentity:
        """The identity of the model as it is now, without adapter."""
        return self._base

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the loaded adapters in order of loading."""
        return tuple(self._adapters.values())

    def adapter(self, name: str) -> LoadedAdapter:
        """Return the current version of an adapter; raises `UnknownAdapter`."""
        found = self._adapters.get(name) if isinstance(name, str) else None
        if found is None:
            # Without the names of those that are: they may tell of other tenants.
            raise UnknownAdapter(
                f"adapter {name!r:.80} is not loaded; the operator can load it",
                field="adapter",
            )
        return found

    def identity(
        self, adapter: str | None = None, *, start_position: int = 0
    ) -> ComputeIdentity:
        """Return everything that shapes the KV of such a request now."""
        identity = self._base
        if adapter is not None:
            loaded = self.adapter(adapter)
            identity = replace(
                identity,
                adapter_digest=loaded.digest,
                adapter_scale=loaded.scale,
                adapter_generation=loaded.generation,
            )
        if start_position:
            identity = replace(identity, start_position=start_position)
        return identity

    def peek_namespace(
        self, adapter: str | None = None, *, start_position: int = 0
    ) -> bytes | None:
        """Return what `namespace` would, and remember nothing."""
        try:
            return self._namespaces[adapter, start_position]
        except (KeyError, TypeError):  # what has no hash is refused below
            pass
        identity = self.identity(adapter, start_position=start_position)
        if start_position and self._num_shifted >= _MAX_SHIFTED:
            return None
        return identity.namespace()

    # Verbs

    def namespace(
        self, adapter: str | None = None, *, start_position: int = 0
    ) -> bytes | None:
        """Return the namespace of such a request now; `None`: it shares with nobody.

        Remembered, so a repeated question is one lookup. Raises `UnknownAdapter`.
        """
        key = (adapter, start_position)
        try:
            return self._namespaces[key]
        except (KeyError, TypeError):  # what has no hash is refused below
            namespace = self.peek_namespace(adapter, start_position=start_position)
        if start_position:
            if self._num_shifted >= _MAX_SHIFTED:
                return None
            self._num_shifted += 1
        self._namespaces[key] = namespace
        return namespace

    def namespaces(self) -> tuple[bytes, ...]:
        """Return the namespaces that were asked for and are still current."""
        return tuple(sorted({n for n in self._namespaces.values() if n is not None}))

    def note_change(self) -> None:
        """Advance the generation for a change that no identity tells of."""
        self._generation += 1

    def replace_base(self, base: ComputeIdentity) -> tuple[bytes, ...]:
        """Take another model identity; return the namespaces to retire.

        The weights generation is advanced here, not by the caller, so it cannot be
        forgotten. All adapters stay loaded, under new namespaces.
        """
        _check_base(base)
        generation = self._base.weights_generation
        assert isinstance(generation, int), "checked when it was taken"
        old = self.namespaces()
        self._base = replace(base, weights_generation=generation + 1)
        self._namespaces.clear()
        self._num_shifted = 0
        self._generation += 1
        return old

    def load(
        self, name: str, digest: bytes | Unknown, scale: float
    ) -> tuple[LoadedAdapter, tuple[bytes, ...]]:
        """Load an adapter, or another version of one that is loaded.

        Returns it and the namespaces to retire: those of the version it replaces,
        unless a twin with equal content, scale and generation still uses them.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"adapter name must be non-empty text, got {name!r}")
        if not isinstance(scale, float) or not math.isfinite(scale):
            raise ConfigError(f"adapter scale must be a finite float, got {scale!r}")
        is_digest = isinstance(digest, bytes) and len(digest) == 32
        if not is_digest and digest is not UNKNOWN:
            raise ConfigError(
                f"adapter digest must be 32 bytes or UNKNOWN, got {digest!r:.80}"
            )
        generation = self._num_loads.get(name, 0)
        old = self._forget(name)
        self._num_loads[name] = generation + 1
        loaded = LoadedAdapter(
            name=name,
            version=f"{name}@{self._generation}",
            digest=digest,
            scale=scale,
            generation=generation,
        )
        self._adapters[name] = loaded
        self._generation += 1
        return loaded, old

    def unload(self, name: str) -> tuple[bytes, ...]:
        """Forget an adapter; return the namespaces to retire."""
        self.adapter(name)
        self._generation += 1
        return self._forget(name)

    # Private

    def _forget(self, name: str) -> tuple[bytes, ...]:
        self._adapters.pop(name, None)
        gone = [key for key in self._namespaces if key[0] == name]
        self._num_shifted -= sum(1 for _, start in gone if start)
        old = {self._namespaces.pop(key) for key in gone}
        return tuple(sorted(n for n in old - set(self._namespaces.values()) if n))


def _check_base(base: ComputeIdentity) -> None:
    if base.adapter_digest is not None or base.start_position != 0:
        raise InvariantError("a base identity has no adapter and starts at position 0")
    if not isinstance(base.weights_generation, int):
        raise InvariantError("a base identity has a known weights generation")
