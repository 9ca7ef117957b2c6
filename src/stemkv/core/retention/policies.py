"""Eviction policies by name, made for one cache and one price list.

Owns the names people type and what a policy needs to know of the cache it serves. The
policies are in `eviction`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stemkv.core.books.cost import CostModel
from stemkv.core.prefix.config import CacheConfig, knob
from stemkv.core.retention.policy import (
    EvictionPolicy,
    Gdsf,
    LfuDa,
    Lru,
    ReuseIndex,
    S3Fifo,
)
from stemkv.errors import ConfigError

__all__ = ["EVICTIONS", "OBJECTIVES", "EvictionConfig"]

EVICTIONS = ("reuse_index", "lru", "lfu_da", "gdsf", "s3fifo")
OBJECTIVES = ("tokens", "seconds")

# Of the cost: what a token deep in a prompt counts more than a first one. Half of it is
# a compromise (docs/policies.md): all of it would cost tokens, none of it seconds.
_COST_EXPONENT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionConfig:
    """Which policy, and what it shall save.

    `objective` "tokens": as many reused tokens as possible. "seconds": prefill seconds,
    in which a token deep in a prompt costs more, as it attends to all before it; needs a
    cost model, and only `reuse_index` and `gdsf` know the difference.
    """

    name: str = "reuse_index"
    objective: str = knob("tokens", "What eviction shall save: tokens or seconds.")

    def __post_init__(self) -> None:
        if self.name not in EVICTIONS:
            raise ConfigError(
                f"eviction must be one of {', '.join(EVICTIONS)}, got {self.name!r:.80}"
            )
        if self.objective not in OBJECTIVES:
            raise ConfigError(
                f"objective must be one of {', '.join(OBJECTIVES)}, "
                f"got {self.objective!r:.80}"
            )

    def make(
        self, cache: CacheConfig, costs: CostModel | None = None
    ) -> Callable[[], EvictionPolicy]:
        """Return what makes the policy for a cache, as often as it is called.

        Raises `ConfigError` where seconds are wanted and `costs` is `None`.
        """
        num_blocks = cache.num_blocks
        match self.name:
            case "lru":
                return Lru
            case "lfu_da":
                return lambda: LfuDa(num_blocks)
            case "s3fifo":
                return lambda: S3Fifo(num_blocks)
        worth = None
        if self.objective == "seconds":
            if costs is None:
                raise ConfigError(
                    "objective seconds needs a cost model; give the cache one, or "
                    "choose objective tokens"
                )
            worth = _Worth(costs, cache.block_size)
        if self.name == "gdsf":
            return lambda: Gdsf(num_blocks, worth=worth)
        return lambda: ReuseIndex(num_blocks, worth=worth)


class _Worth:
    """The weight of a block by its depth, 1 for a first one. Grows as it is asked."""

    def __init__(self, costs: CostModel, block_size: int) -> None:
        self._costs = costs
        self._block_size = block_size
        self._weights = [1.0]  # by how many blocks the path has; there is none with 0

    def __call__(self, num_blocks: int) -> float:
        weights = self._weights
        size = self._block_size
        while len(weights) <= num_blocks:
            end = len(weights) * size
            first = self._costs.prefill_seconds(0, size)
            cost = self._costs.prefill_seconds(end - size, end)
            weights.append((cost / first) ** _COST_EXPONENT)
        return weights[num_blocks]
