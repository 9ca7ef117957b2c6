"""What one tenant's flood leaves of others' reuse: the words and the shares.

Owns the definitions. Runs nothing (see `sim.flood`) and words nothing. Counts are exact
for the order of a replay, which follows from the cost model; so they are estimated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["FloodResult", "FloodedTenant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodedTenant:
    """Prompt tokens that one of the others reused, in the same memory each time."""

    tenant: str
    # The smallest memory in which the tenant alone, one request after another, finds
    # under LRU all that it could ever find. Its floor is as large.
    working_set_gib: float
    alone_tokens: int  # with nobody else there
    flooded_tokens: int  # with everybody there, and no quotas
    kept_tokens: int | None  # the same with floors; None: they do not fit

    @property
    def flooded_share(self) -> float:
        """What the flood left of the hits; NaN if the tenant alone has none."""
        return _share(self.flooded_tokens, self.alone_tokens)

    @property
    def kept_share(self) -> float | None:
        """What is left of the hits with floors."""
        if self.kept_tokens is None:
            return None
        return _share(self.kept_tokens, self.alone_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodResult:
    """A tenant that sends much and reuses nothing, beside others that reuse."""

    eviction: str
    gib: float  # KV memory
    rate: float  # requests a second, of all others together
    flood_rate: float  # of the one that floods
    tenants: tuple[FloodedTenant, ...]  # the others, by name

    @property
    def floors_gib(self) -> float:
        """Working sets of all others together."""
        return math.fsum(tenant.working_set_gib for tenant in self.tenants)

    @property
    def is_conclusive(self) -> bool:
        """Whether there was anything to lose: every tenant alone reuses something."""
        return all(tenant.alone_tokens for tenant in self.tenants)

    @property
    def flooded_share(self) -> float:
        """What the flood left of all hits."""
        return _share(
            sum(tenant.flooded_tokens for tenant in self.tenants),
            sum(tenant.alone_tokens for tenant in self.tenants),
        )

    @property
    def least_kept_share(self) -> float | None:
        """What floors keep of the hits of the tenant that loses most."""
        shares = [tenant.kept_share for tenant in self.tenants]
        kept = [share for share in shares if share is not None]
        return min(kept) if kept and len(kept) == len(shares) else None


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
