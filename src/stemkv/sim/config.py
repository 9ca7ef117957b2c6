"""What a replay is told: a deployment, its policies and a load.

Owns the settings and their checks. Defaults are those of a large GPU with a mid-sized
model; a sweep makes many of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from stemkv.core.core import CoreConfig
from stemkv.core.retention.policies import EVICTIONS as ONLINE_EVICTIONS
from stemkv.errors import ConfigError
from stemkv.sim.arrivals import LoadConfig
from stemkv.sim.hinting import HintRule
from stemkv.sim.presets import LARGE
from stemkv.sim.quotas import TenantQuotas
from stemkv.sim.sharing import SharingRule

__all__ = [
    "CLAIRVOYANT",
    "EVICTIONS",
    "LARGE",
    "ROUTINGS",
    "ReplayConfig",
    "check_online",
]

ROUTINGS = ("round_robin", "session", "prefix")
CLAIRVOYANT = "clairvoyant"  # the policy that knows the trace: without a clock only
EVICTIONS = (*ONLINE_EVICTIONS, CLAIRVOYANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """A deployment and a load."""

    core: CoreConfig = LARGE  # of one replica; its quotas follow from those below
    num_replicas: int = 1
    # round_robin by arrival; session: a session (else a tenant) stays on one replica;
    # prefix: where most of the prompt is cached, of equals where fewest are in flight.
    routing: str = "round_robin"
    is_clairvoyant: bool = False  # without a clock, whatever policy the core has
    sharing: SharingRule = field(default_factory=SharingRule)
    quotas: TenantQuotas | None = None  # of one replica
    hints: HintRule = field(default_factory=HintRule)
    # Requests behind the one that runs whose cached prefixes go late, without a clock:
    # nobody waits there, and to look at those who come next is hindsight.
    untimed_lookahead: int = 0
    load: LoadConfig = field(default_factory=LoadConfig)
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise ConfigError(
                f"routing must be one of {', '.join(ROUTINGS)}, got "
                f"{self.routing!r:.80}"
            )
        if self.num_replicas < 1:
            raise ConfigError(
                f"num_replicas must be at least 1, got {self.num_replicas}"
            )
        if self.core.books is None:
            raise ConfigError("a replay needs core.books: its numbers come from them")
        for name in ("slo_ttft_s", "slo_tpot_s"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < math.inf:
                raise ConfigError(f"{name} must be a time above 0, got {limit}")
        if self.quotas is not None:
            self.quotas.check_rule(self.sharing)

    @property
    def num_blocks(self) -> int:
        """Blocks of one replica."""
        return self.core.cache.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.core.cache.block_size

    @property
    def eviction(self) -> str:
        """The word for the policy."""
        return CLAIRVOYANT if self.is_clairvoyant else self.core.eviction.name

    def sized(self, num_blocks: int) -> ReplayConfig:
        """Return these settings for replicas of so many blocks."""
        return replace(self, core=self.core.sized(num_blocks))

    def evicting(self, name: str) -> ReplayConfig:
        """Return these settings with the policy of this name; raises `ConfigError`."""
        check_eviction(name)
        if name == CLAIRVOYANT:
            return replace(self, is_clairvoyant=True)
        eviction = replace(self.core.eviction, name=name)
        core = replace(self.core, eviction=eviction)
        return replace(self, core=core, is_clairvoyant=False)

    def ordering(self, name: str) -> ReplayConfig:
        """Return these settings with the order of this name; raises `ConfigError`."""
        order = replace(self.core.order, name=name)
        return replace(self, core=replace(self.core, order=order))

    def of_replica(self, block_bytes: int) -> CoreConfig:
        """Return the settings of one replica, quotas in blocks of so many bytes."""
        if self.quotas is None:
            return self.core
        quotas = self.quotas.in_blocks(self.sharing, block_bytes)
        return replace(self.core, quotas=quotas)


def check_eviction(name: str) -> None:
    """Raise `ConfigError` for a name that no policy has."""
    if name not in EVICTIONS:
        raise ConfigError(
            f"eviction must be one of {', '.join(EVICTIONS)}, got {name!r:.80}"
        )


def check_online(name: str) -> None:
    """Raise `ConfigError` for a policy that needs to know the future."""
    check_eviction(name)
    if name == CLAIRVOYANT:
        raise ConfigError(
            f"eviction {CLAIRVOYANT} has to know which request comes next, which with a "
            f"clock depends on what it evicts; replay without a clock, or take one of "
            f"{', '.join(ONLINE_EVICTIONS)}"
        )
