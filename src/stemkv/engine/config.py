"""Settings of the engine, checked where they are made.

Owns limits and defaults. What is served is the loaded model's matter; files and
environment variables are somebody else's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from stemkv.core.prefix.sharing import SharingPolicy
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.schedule.orders import OrderConfig
from stemkv.engine.numerics import numerics_named
from stemkv.engine.quotas import MemoryQuotas
from stemkv.errors import ConfigError

__all__ = ["EngineConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine serves."""

    numerics: str = "exact"
    kv_memory_bytes: int = 1 << 30
    block_size: int = 16  # tokens
    token_budget: int = 512  # most tokens in one step
    max_num_running: int = 64
    reuses_prefixes: bool = True
    sharing: SharingPolicy = field(default_factory=SharingPolicy)
    # Whether requests that name no tenant are all one tenant's, "default"; else each of
    # them shares with nobody.
    single_tenant: bool = False
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    quotas: MemoryQuotas | None = None  # None: nobody has a floor or a cap
    order: OrderConfig = field(default_factory=OrderConfig)
    # Predicted seconds of a step with prefills; needs costs. None: `token_budget` alone.
    step_time_s: float | None = None
    retained_floor_bytes: int = 0  # of retained prefixes, that admission leaves
    # Waiting requests whose cached prefixes go late; 0: eviction looks at none.
    lookahead: int = 32
    max_kept_share: float = 0.5  # of the blocks, for `Engine.keep`
    num_threads: int | None = None  # None: usable cores less one
    runs_self_test: bool = True
    recheck_share: float = 0.0  # share of hits that `Engine.recheck` computes again
    recheck_seed: int = 0  # which hits those are

    def __post_init__(self) -> None:
        numerics_named(self.numerics)
        for name in ("kv_memory_bytes", "block_size", "num_threads"):
            value = getattr(self, name)
            if name == "num_threads" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{name} must be at least 1 and an integer, got {value!r:.80}"
                )
        floor = self.retained_floor_bytes
        if not isinstance(floor, int) or isinstance(floor, bool) or floor < 0:
            raise ConfigError(
                f"retained_floor_bytes must be an integer of at least 0, "
                f"got {floor!r:.80}"
            )
        _check_kind("order", self.order, OrderConfig)
        _check_kind("sharing", self.sharing, SharingPolicy)
        _check_kind("eviction", self.eviction, EvictionConfig)
        if self.quotas is not None:
            _check_kind("quotas", self.quotas, MemoryQuotas)
        if not isinstance(self.single_tenant, bool):
            raise ConfigError(
                f"single_tenant must be True or False, got {self.single_tenant!r:.80}"
            )
        share = self.recheck_share
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not is_number or not math.isfinite(share) or not 0 <= share <= 1:
            raise ConfigError(f"recheck_share must be in [0, 1], got {share!r}")


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ConfigError(
            f"{name} must be {article} {kind.__name__}, got {type(value).__name__}"
        )
