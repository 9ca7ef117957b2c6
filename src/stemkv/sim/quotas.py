"""Quotas by tenant, in bytes, and what they come to under a sharing rule.

Owns the settings and their translation to the core's, which counts blocks of domains.
Whose block makes room is `core.quota`'s. Quotas are of one replica, as memory is.

A quota is a tenant's where KV is: under `isolated` and `public` each tenant has a domain
of its own. Under `shared` all have one, nobody's blocks can be told from another's, and
quotas by tenant are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stemkv.core.prefix.identity import Domain
from stemkv.core.retention.memory import MemoryQuota, check_bytes
from stemkv.core.retention.quota import QuotaConfig
from stemkv.errors import ConfigError
from stemkv.measure.results import GIB
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace

__all__ = ["MemoryQuota", "TenantQuotas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuotas:
    """Quotas of all tenants.

    `default` is for every tenant that is not named, each for itself, and has no floor:
    how many there will be is unknown. `public_bytes` is the budget of what a rule
    declares public.
    """

    tenants: Mapping[str, MemoryQuota] = field(default_factory=dict)
    default: MemoryQuota = field(default_factory=MemoryQuota)
    public_bytes: int = 0

    def __post_init__(self) -> None:
        check_bytes("public_bytes", self.public_bytes)
        if self.default.floor_bytes:
            raise ConfigError(
                f"default must have no floor, got {self.default.floor_bytes:,} bytes; "
                f"name the tenants that have one"
            )

    def check_rule(self, rule: SharingRule) -> None:
        """Refuse a rule under which a tenant has no blocks of its own."""
        if rule.name == "shared":
            raise ConfigError(
                "quotas are by tenant, but under the sharing rule shared all tenants "
                "have one domain; take isolated or public"
            )

    def in_blocks(self, rule: SharingRule, block_bytes: int) -> QuotaConfig:
        """Return the core's quotas, by domain."""
        self.check_rule(rule)
        return QuotaConfig(
            quotas={
                Domain.private(tenant): quota.in_blocks(block_bytes)
                for tenant, quota in sorted(self.tenants.items())
            },
            default=self.default.in_blocks(block_bytes),
            public_blocks=self.public_bytes // block_bytes,
        )

    def check(
        self,
        trace: Trace,
        rule: SharingRule,
        *,
        num_blocks: int,
        block_size: int,
        block_bytes: int,
    ) -> None:
        """Refuse promises that a memory of `num_blocks` cannot keep for this trace."""
        blocks = self.in_blocks(rule, block_bytes)
        floors = blocks.num_promised_blocks - blocks.public_blocks
        if blocks.num_promised_blocks >= num_blocks:
            raise ConfigError(
                f"floors of {floors * block_bytes / GIB:.3g} GiB and public of "
                f"{blocks.public_blocks * block_bytes / GIB:.3g} GiB leave nothing of "
                f"{num_blocks * block_bytes / GIB:.3g} GiB to run requests in; lower "
                f"them or give more memory"
            )
        num_public = sum(
            len(prefix) * trace.unit_size // block_size
            for prefixes in rule.public_prefixes(trace).values()
            for prefix in prefixes
        )
        if num_public > blocks.public_blocks:
            raise ConfigError(
                f"public is {self.public_bytes / GIB:.3g} GiB, but what the rule "
                f"declares public takes {num_public * block_bytes / GIB:.3g} GiB; give "
                f"it as much, or take the rule isolated"
            )

    def absent(self, trace: Trace) -> list[str]:
        """Return tenants with a quota who send nothing here; their floors are kept."""
        return sorted({*self.tenants} - {*trace.tenants()})

    def __str__(self) -> str:
        parts = [f"{tenant}: {quota}" for tenant, quota in sorted(self.tenants.items())]
        if self.default != MemoryQuota():
            parts.append(f"others: {self.default}")
        if self.public_bytes:
            parts.append(f"public: {self.public_bytes / GIB:.3g} GiB")
        return "; ".join(parts) or "none named"
