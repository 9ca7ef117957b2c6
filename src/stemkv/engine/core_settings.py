"""What an engine's core is made of, found out before anything expensive is done.

Owns the way from the engine's words (bytes, tenants) to the core's (blocks, domains),
and the checks that need both the settings and the model. Makes no core itself: the
engine or its recorder does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from stemkv.core.books.cost import CostModel
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.retention.policy import EvictionPolicy
from stemkv.core.retention.quota import QuotaConfig
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.order import Order
from stemkv.core.schedule.orders import OrderConfig
from stemkv.engine.config import EngineConfig
from stemkv.engine.load import LoadedModel
from stemkv.errors import ConfigError

__all__ = ["CoreSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Settings of cache, scheduler and eviction that go together.

    `costs` are what an objective of seconds weighs blocks with, what orders predict
    prefill seconds with, and steps their time. Raises `ConfigError` where seconds are
    wanted without costs.
    """

    cache: CacheConfig
    scheduler: SchedulerConfig
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    order: OrderConfig = field(default_factory=OrderConfig)
    quotas: QuotaConfig | None = None
    costs: CostModel | None = None

    def __post_init__(self) -> None:
        if self.eviction.objective == "seconds" and self.costs is None:
            raise ConfigError(
                "eviction.objective seconds needs costs, to know what a token deep in "
                "a prompt costs more; give the engine `costs` (`stemkv calibrate` "
                "measures them), or choose objective tokens"
            )
        if self.scheduler.step_time_s is not None and self.costs is None:
            raise ConfigError(
                "step_time_s needs costs, to predict how long a step takes; give the "
                "engine `costs` (`stemkv calibrate` measures them), or leave it out"
            )
        self.make_order()

    @classmethod
    def of(
        cls, config: EngineConfig, loaded: LoadedModel, costs: CostModel | None
    ) -> CoreSettings:
        """Return the settings of the core that serves a model.

        Raises `ConfigError` for quotas that its memory cannot promise.
        """
        bytes_per_block = loaded.kv_bytes_per_token * config.block_size
        num_blocks = config.kv_memory_bytes // bytes_per_block
        if num_blocks < 1:
            raise ConfigError(
                f"kv_memory_bytes {config.kv_memory_bytes} holds no block; one "
                f"block of {config.block_size} tokens takes {bytes_per_block} bytes"
            )
        quotas = None
        if config.quotas is not None:
            config.quotas.check(config.sharing)
            quotas = config.quotas.in_blocks(bytes_per_block)
            try:
                quotas.check(num_blocks)
            except ConfigError as error:
                raise ConfigError(
                    f"quotas: {error} (that is kv_memory_bytes; a block takes "
                    f"{bytes_per_block:,} bytes)"
                ) from None
        retained_floor_blocks = config.retained_floor_bytes // bytes_per_block
        if retained_floor_blocks >= num_blocks:
            raise ConfigError(
                f"retained_floor_bytes {config.retained_floor_bytes} leaves nothing of "
                f"kv_memory_bytes {config.kv_memory_bytes} to admit requests into; "
                f"lower it"
            )
        return cls(
            cache=CacheConfig(
                num_blocks=num_blocks,
                block_size=config.block_size,
                max_kept_share=config.max_kept_share,
            ),
            scheduler=SchedulerConfig(
                token_budget=config.token_budget,
                max_num_running=config.max_num_running,
                max_request_tokens=loaded.context_length,
                lookahead=config.lookahead,
                step_time_s=config.step_time_s,
                retained_floor_blocks=retained_floor_blocks,
            ),
            eviction=config.eviction,
            order=config.order,
            quotas=quotas,
            costs=costs,
        )

    @property
    def make_policy(self) -> Callable[[], EvictionPolicy]:
        """What makes the eviction policy, as often as the cache calls it."""
        return self.eviction.make(self.cache, self.costs)

    def make_order(self) -> Order:
        """Return a new order."""
        return self.order.make(self.costs)
