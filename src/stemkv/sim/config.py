"""What a replay is told: a deployment, its policies and a load.

Owns the settings and their checks. Defaults are those of a large GPU with a mid-sized
model; a sweep makes many of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from stemkv.core.prefix.config import CacheConfig
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.orders import OrderConfig
from stemkv.core.schedule.sessions import SessionConfig
from stemkv.errors import ConfigError
from stemkv.sim.arrivals import LoadConfig
from stemkv.sim.hinting import HintRule
from stemkv.sim.policies import check_eviction, check_online
from stemkv.sim.quotas import TenantQuotas
from stemkv.sim.sharing import SharingRule

__all__ = ["ROUTINGS", "ReplayConfig"]

ROUTINGS = ("round_robin", "session", "prefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """A deployment and a load."""

    num_blocks: int  # of one replica
    block_size: int = 16  # tokens
    token_budget: int = 8192
    max_num_running: int = 256
    max_request_tokens: int | None = None
    max_steps_awaiting: int = 256
    watermark: float = 0.01
    num_replicas: int = 1
    # round_robin by arrival; session: a session (else a tenant) stays on one replica;
    # prefix: where most of the prompt is cached, of equals where fewest are in flight.
    routing: str = "round_robin"
    eviction: str = "reuse_index"
    objective: str = "tokens"  # or seconds: what the eviction policy shall save
    order: OrderConfig = field(default_factory=OrderConfig)
    step_time_s: float | None = None  # predicted, of a step with prefills
    retained_floor_blocks: int = 0  # retained blocks that admission leaves
    sessions: SessionConfig | None = None  # None: as many at once as come
    sharing: SharingRule = field(default_factory=SharingRule)
    quotas: TenantQuotas | None = None  # of one replica
    hints: HintRule = field(default_factory=HintRule)
    # Waiting requests, from the front, whose cached prefixes go late. `None`: the
    # core's number with a clock; without one 0, as nobody waits there and to look at
    # those who come next would be hindsight.
    lookahead: int | None = None
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
        for name in ("slo_ttft_s", "slo_tpot_s"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < math.inf:
                raise ConfigError(f"{name} must be a time above 0, got {limit}")
        # Mistakes show here and not when the replay starts.
        check_eviction(self.eviction)
        EvictionConfig(objective=self.objective)
        if self.quotas is not None:
            self.quotas.check_rule(self.sharing)
        self.cache()
        self.limits()

    def cache(self) -> CacheConfig:
        """Return the core's cache settings of one replica."""
        return CacheConfig(num_blocks=self.num_blocks, block_size=self.block_size)

    def policy(self) -> EvictionConfig:
        """Return the core's eviction settings; raises for one that knows the future."""
        check_online(self.eviction)
        return EvictionConfig(name=self.eviction, objective=self.objective)

    def limits(self) -> SchedulerConfig:
        """Return the core's scheduler settings of one replica."""
        limits = SchedulerConfig(
            token_budget=self.token_budget,
            max_num_running=self.max_num_running,
            max_request_tokens=self.max_request_tokens,
            max_steps_awaiting=self.max_steps_awaiting,
            watermark=self.watermark,
            step_time_s=self.step_time_s,
            retained_floor_blocks=self.retained_floor_blocks,
        )
        if self.lookahead is None:
            return limits
        return replace(limits, lookahead=self.lookahead)
