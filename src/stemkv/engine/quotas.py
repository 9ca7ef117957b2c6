"""Quotas as an operator thinks of them: tenants and groups, in bytes.

Owns the settings and how they become the core's, which counts blocks of domains. Whose
block makes room, and whether the floors add up, is `core.quota`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.sharing import Sharing, SharingPolicy
from stemkv.core.retention.memory import MemoryQuota, check_bytes
from stemkv.core.retention.quota import Quota, QuotaConfig
from stemkv.errors import ConfigError

__all__ = ["MemoryQuota", "MemoryQuotas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuotas:
    """Quotas of an engine.

    A group has one quota for all its members. `default` is for everybody who is not
    named, each for itself, and has no floor: how many there will be is unknown.
    `public_bytes` are for prefixes declared public, which are kept for good; where
    there are quotas, no more can be declared. Mappings are copied.
    """

    tenants: Mapping[str, MemoryQuota] = field(default_factory=dict)
    groups: Mapping[str, MemoryQuota] = field(default_factory=dict)
    default: MemoryQuota = field(default_factory=MemoryQuota)
    public_bytes: int = 0

    def __post_init__(self) -> None:
        check_bytes("public_bytes", self.public_bytes)
        # Frozen: the only way to set a field.
        object.__setattr__(self, "tenants", _checked("tenants", self.tenants))
        object.__setattr__(self, "groups", _checked("groups", self.groups))
        _check_quota("default", self.default)
        if self.default.floor_bytes:
            raise ConfigError(
                f"default must have no floor_bytes, got {self.default.floor_bytes:,}; "
                f"name the tenants that have one"
            )

    def check(self, sharing: SharingPolicy) -> None:
        """Refuse names that no request of such a policy has: they may be misspelt."""
        for name in self.groups:
            if name not in sharing.groups:
                known = ", ".join(map(repr, sorted(sharing.groups))) or "none"
                raise ConfigError(
                    f"quotas: no group is called {name!r:.80}; known: {known}"
                )
        if Sharing.PRIVATE in sharing.classes.values():
            return  # then members of groups have private requests, too
        for name in self.tenants:
            if sharing.tenants.get(name) is Sharing.NONE:
                raise ConfigError(
                    f"quotas: tenant {name!r:.80} shares with nobody and retains "
                    f"nothing; leave its quota out"
                )
            for group, members in sharing.groups.items():
                if name in members:
                    raise ConfigError(
                        f"quotas: tenant {name!r:.80} is in group {group!r:.80} and "
                        f"retains nothing of its own; give the group a quota"
                    )

    def in_blocks(self, bytes_per_block: int) -> QuotaConfig:
        """Return the core's quotas; raises `ConfigError` for a floor without a block."""
        quotas: dict[Domain, Quota] = {}
        for name, quota in self.tenants.items():
            whose = f"tenant {name!r:.80}"
            quotas[Domain.private(name)] = _in_blocks(quota, bytes_per_block, whose)
        for name, quota in self.groups.items():
            whose = f"group {name!r:.80}"
            quotas[Domain.group(name)] = _in_blocks(quota, bytes_per_block, whose)
        return QuotaConfig(
            quotas=quotas,
            default=self.default.in_blocks(bytes_per_block),
            public_blocks=self.public_bytes // bytes_per_block,
        )


def _in_blocks(quota: MemoryQuota, bytes_per_block: int, whose: str) -> Quota:
    """Return a quota; a floor that holds no block would promise nothing."""
    found = quota.in_blocks(bytes_per_block)
    if quota.floor_bytes and not found.floor_blocks:
        raise ConfigError(
            f"quotas: floor_bytes {quota.floor_bytes:,} of {whose} holds no block; "
            f"one block takes {bytes_per_block:,} bytes"
        )
    return found


def _checked(where: str, quotas: object) -> dict[str, MemoryQuota]:
    if not isinstance(quotas, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {type(quotas).__name__}")
    for name, quota in quotas.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{where}: a name must be text, got {name!r:.80}")
        _check_quota(f"{where}: {name!r:.80}", quota)
    return dict(quotas)


def _check_quota(where: str, quota: object) -> None:
    if not isinstance(quota, MemoryQuota):
        raise ConfigError(f"{where} must be a MemoryQuota, got {type(quota).__name__}")
