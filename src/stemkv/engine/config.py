"""Settings of the engine, checked where they are made.

Owns limits and defaults. What is served is the loaded model's matter; files and
environment variables are somebody else's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from stemkv.core.core import CoreConfig
from stemkv.core.prefix.sharing import SharingPolicy
from stemkv.engine.load import LoadedModel
from stemkv.engine.numerics import numerics_named
from stemkv.engine.quotas import MemoryQuotas
from stemkv.errors import ConfigError

__all__ = ["EngineConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine serves: a core, and what a core knows nothing of.

    Amounts of memory are bytes here; what they are in blocks `core_of` says, once the
    model is known.
    """

    # Its blocks, quotas and retained floor follow from the next three.
    core: CoreConfig = field(default_factory=CoreConfig)
    kv_memory_bytes: int = 1 << 30
    quotas: MemoryQuotas | None = None  # None: nobody has a floor or a cap
    retained_floor_bytes: int = 0  # of retained prefixes, that admission leaves
    numerics: str = "exact"
    reuses_prefixes: bool = True
    sharing: SharingPolicy = field(default_factory=SharingPolicy)
    # Whether requests that name no tenant are all one tenant's, "default"; else each of
    # them shares with nobody.
    single_tenant: bool = False
    num_threads: int | None = None  # None: usable cores less one
    runs_self_test: bool = True
    recheck_share: float = 0.0  # share of hits that `Engine.recheck` computes again
    recheck_seed: int = 0  # which hits those are

    def __post_init__(self) -> None:
        numerics_named(self.numerics)
        _check_kind("core", self.core, CoreConfig)
        _check_kind("sharing", self.sharing, SharingPolicy)
        if self.quotas is not None:
            _check_kind("quotas", self.quotas, MemoryQuotas)
        for name, smallest in (
            ("kv_memory_bytes", 1),
            ("retained_floor_bytes", 0),
            ("num_threads", 1),
        ):
            value = getattr(self, name)
            if name == "num_threads" and value is None:
                continue
            if (
                not isinstance(value, int)
                or isinstance(value, bool)
                or value < smallest
            ):
                raise ConfigError(
                    f"{name} must be at least {smallest} and an integer, got {value!r:.80}"
                )
        for name, value in (
            ("quotas", self.core.quotas),
            ("retained_floor_bytes", self.core.scheduler.retained_floor_blocks or None),
        ):
            if value is not None:
                raise ConfigError(f"an engine takes amounts in bytes; give it {name}")
        if not isinstance(self.single_tenant, bool):
            raise ConfigError(
                f"single_tenant must be True or False, got {self.single_tenant!r:.80}"
            )
        share = self.recheck_share
        is_number = isinstance(share, int | float) and not isinstance(share, bool)
        if not is_number or not math.isfinite(share) or not 0 <= share <= 1:
            raise ConfigError(f"recheck_share must be in [0, 1], got {share!r}")

    def core_of(self, loaded: LoadedModel) -> CoreConfig:
        """Return the settings of the core that serves a model.

        Raises `ConfigError` for what its memory cannot hold or promise.
        """
        block_size = self.core.cache.block_size
        bytes_per_block = loaded.kv_bytes_per_token * block_size
        num_blocks = self.kv_memory_bytes // bytes_per_block
        if num_blocks < 1:
            raise ConfigError(
                f"kv_memory_bytes {self.kv_memory_bytes} holds no block; one "
                f"block of {block_size} tokens takes {bytes_per_block} bytes"
            )
        quotas = None
        if self.quotas is not None:
            self.quotas.check(self.sharing)
            quotas = self.quotas.in_blocks(bytes_per_block)
            try:
                quotas.check(num_blocks)
            except ConfigError as error:
                raise ConfigError(
                    f"quotas: {error} (that is kv_memory_bytes; a block takes "
                    f"{bytes_per_block:,} bytes)"
                ) from None
        floor = self.retained_floor_bytes // bytes_per_block
        if floor >= num_blocks:
            raise ConfigError(
                f"retained_floor_bytes {self.retained_floor_bytes} leaves nothing of "
                f"kv_memory_bytes {self.kv_memory_bytes} to admit requests into; "
                f"lower it"
            )
        scheduler = self.core.scheduler
        most = scheduler.max_request_tokens or loaded.context_length
        limits = replace(
            scheduler,
            retained_floor_blocks=floor,
            max_request_tokens=min(most, loaded.context_length),
        )
        return replace(self.core.sized(num_blocks), scheduler=limits, quotas=quotas)


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ConfigError(
            f"{name} must be {article} {kind.__name__}, got {type(value).__name__}"
        )
