"""Who shares with whom in a replay: from a trace's names to namespaces and domains.

Owns the three rules that replays are compared under. Knows no cache and no driver; a
deployment's own rules are `core.sharing`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Final

from stemkv.core.prefix.identity import Domain
from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace, TraceRequest

__all__ = ["SHARING_RULES", "SharingRule"]

SHARING_RULES: Final = ("isolated", "shared", "public")

_EVERYBODY: Final = Domain.group("everybody")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingRule:
    """How far KV reaches within an identity; it never reaches into another one.

    `isolated`: each tenant alone. `shared`: everybody. `public`: each tenant alone, but
    what at least `public_min_tenants` tenants show in the trace is declared public.
    That is read off the whole trace beforehand, as an operator who knows the traffic
    would declare it; so it is a little better than what anybody can know in time.
    """

    name: str = "isolated"
    public_min_tenants: int = 2  # as in k-anonymity; at least 2

    def __post_init__(self) -> None:
        if self.name not in SHARING_RULES:
            raise ConfigError(
                f"sharing must be one of {', '.join(SHARING_RULES)}, "
                f"got {self.name!r:.80}"
            )
        minimum = self.public_min_tenants
        if not isinstance(minimum, int) or isinstance(minimum, bool) or minimum < 2:
            raise ConfigError(
                f"public_min_tenants must be an integer of at least 2, since what one "
                f"tenant shows is its own, got {minimum!r:.80}"
            )

    def of(self, request: TraceRequest) -> tuple[bytes, Domain]:
        """Return the namespace (SHA-256 of the identity) and the domain."""
        if self.name == "shared":
            return _namespace(request.identity), _EVERYBODY
        return _namespace(request.identity), Domain.private(request.tenant)

    def public_prefixes(self, trace: Trace) -> dict[bytes, list[array[int]]]:
        """Return what to declare public, by namespace: the longest runs of whole units.

        By tenant and request, first appearance first. Nothing unless the rule is
        `public`. O(units).
        """
        if self.name != "public":
            return {}
        by_identity: dict[str, dict[str, list[TraceRequest]]] = {}
        for request in trace.requests:
            tenants = by_identity.setdefault(request.identity, {})
            tenants.setdefault(request.tenant, []).append(request)
        return {
            _namespace(identity): prefixes
            for identity, tenants in by_identity.items()
            if (prefixes := self._common(tenants, trace.unit_size))
        }

    def _common(
        self, tenants: dict[str, list[TraceRequest]], unit_size: int
    ) -> list[array[int]]:
        """Return the longest prefixes that enough tenants show."""
        if len(tenants) < self.public_min_tenants:
            return []
        # Ids are chained, so an id stands for all units before it as well.
        num_tenants: Counter[int] = Counter()
        for requests in tenants.values():
            shown: set[int] = set()
            for request in requests:
                shown.update(_whole_units(request, unit_size))
            num_tenants.update(shown)
        found: dict[int, array[int]] = {}  # by the last unit
        inner: set[int] = set()  # units that a longer prefix has before its end
        for requests in tenants.values():
            for request in requests:
                units = _whole_units(request, unit_size)
                end = 0
                while (
                    end < len(units)
                    and num_tenants[units[end]] >= self.public_min_tenants
                ):
                    end += 1
                if end and units[end - 1] not in found:
                    found[units[end - 1]] = units[:end]
                    inner.update(units[: end - 1])
        return [prefix for last, prefix in found.items() if last not in inner]


def _whole_units(request: TraceRequest, unit_size: int) -> array[int]:
    return request.units[: request.input_length // unit_size]


def _namespace(identity: str) -> bytes:
    # A lone surrogate, which JSON can spell, is as good as any other difference.
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).digest()
