"""Namespaces in use, and the public prefixes that each of them must know.

Owns which prefixes are declared public, where that has been told to the cache, and
which namespaces are closed because reused KV was found to be wrong. Asking changes
nothing; a namespace comes into use with the first request in it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import fields

from stemkv.core.books.ledger import Ledger
from stemkv.core.core import Core
from stemkv.core.prefix.identities import Identities
from stemkv.core.prefix.tokens import TokenIds
from stemkv.errors import ConfigError

__all__ = ["Namespaces"]

_log = logging.getLogger(__name__)


class Namespaces:
    """Where requests share; `reuses_prefixes` says whether they do at all."""

    def __init__(
        self,
        identities: Identities,
        core: Core,
        *,
        ledger: Ledger | None,
        reuses_prefixes: bool,
    ) -> None:
        self._identities = identities
        self._core = core
        self._ledger = ledger
        self._reuses_prefixes = reuses_prefixes
        self._public: list[TokenIds] = []
        self._entered: set[bytes] = set()  # these know `_public`, and have a name
        self._closed: set[bytes] = set()

    # Questions

    def peek(
        self, adapter: str | None = None, *, start_position: int = 0
    ) -> bytes | None:
        """Return the namespace in which such a request shares; `None`: in none."""
        if not self._reuses_prefixes:
            return None
        namespace = self._identities.peek_namespace(
            adapter, start_position=start_position
        )
        return None if namespace in self._closed else namespace

    def adapter_versions(self) -> dict[str, str]:
        """Return the version that each adapter's name means now."""
        return {each.name: each.version for each in self._identities.adapters()}

    def is_public(self, prefix: TokenIds) -> bool:
        """Whether a declared prefix begins with this one."""
        return any(
            declared.buffer.startswith(prefix.buffer) for declared in self._public
        )

    # Verbs

    def enter(
        self, adapter: str | None = None, *, start_position: int = 0
    ) -> bytes | None:
        """Return what `peek` does, ready for a request to share in it."""
        if self.peek(adapter, start_position=start_position) is None:
            return None
        namespace = self._identities.namespace(adapter, start_position=start_position)
        if namespace is not None and namespace not in self._entered:
            self._tell_public(namespace)
            if self._ledger is not None:
                identity = self._identities.identity(
                    adapter, start_position=start_position
                )
                facts = {f.name: getattr(identity, f.name) for f in fields(identity)}
                self._ledger.name(namespace, facts)
        return namespace

    def declare_public(self, prefix: TokenIds) -> int:
        """Let all share a prefix, now and in every namespace to come; return blocks.

        Raises `ConfigError` if the budget for what is public does not hold it in the
        model's own namespace.
        """
        current, num_blocks = self.enter(), 0
        if current is not None:
            num_blocks = self._core.declare(current, prefix)
        if prefix not in self._public:
            self._public.append(prefix)
        for namespace in sorted(self._entered):
            if namespace != current:
                self._declare(namespace, prefix)
        return num_blocks

    def leave(self, namespaces: Iterable[bytes]) -> None:
        """Forget namespaces that are retired."""
        self._entered.difference_update(namespaces)
        self._closed.difference_update(namespaces)

    def close(self, namespace: bytes) -> None:
        """Let nobody share in a namespace any more, until `leave` or `reset`."""
        self._closed.add(namespace)

    def reset(self, now: float) -> None:
        """Empty all namespaces and open those that are closed."""
        self._closed.clear()
        for namespace in self._identities.namespaces():
            self._core.reset(namespace, now)
            self._tell_public(namespace)

    # Private

    def _tell_public(self, namespace: bytes) -> None:
        self._entered.add(namespace)
        for prefix in self._public:
            self._declare(namespace, prefix)

    def _declare(self, namespace: bytes, prefix: TokenIds) -> None:
        """Declare a prefix, or leave it private there if the budget is spent.

        The caller asked for an adapter or a reset: that the public budget is too small
        for one more namespace must not fail it.
        """
        try:
            self._core.declare(namespace, prefix)
        except ConfigError as error:
            _log.warning("a public prefix stays private for one adapter: %s", error)
