"""A cache alone, in which tenants come and go: blocks are blocks, no tensors needed.

Owns a clock, the requests' way through the cache, and what a tenant can find out of it.
Knows nothing of any particular attack.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from stemkv.audit.isolation.worlds import BLOCK_SIZE, PRIVATE
from stemkv.core.core import CoreConfig, make_cache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.table import Lease
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.retention.quota import Quota, QuotaConfig

__all__ = ["Scene", "made_up_prompt"]

_NAMESPACE = bytes(32)
_VOCABULARY = 50_000


class Scene:
    """A cache, a clock, and tenants that share with themselves only.

    `floors` are blocks by tenant; without them there are no quotas.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        eviction: EvictionConfig | None = None,
        floors: Mapping[str, int] | None = None,
    ) -> None:
        quotas = None
        if floors is not None:
            quotas = QuotaConfig(
                quotas={
                    _domain_of(tenant): Quota(floor_blocks=floor)
                    for tenant, floor in floors.items()
                }
            )
        config = CoreConfig(
            cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
            eviction=eviction or EvictionConfig(),
            quotas=quotas,
        )
        self._cache = make_cache(config)
        self._now = 0.0

    # Questions

    @property
    def num_taken(self) -> int:
        """Blocks published so far."""
        return self._cache.usage().num_published_blocks

    def num_held_by(self, tenant: str) -> int:
        """Blocks of a tenant that are still cached."""
        return self._cache.usage_of(_domain_of(tenant)).num_cached_blocks

    def found_by(self, tenant: str, prompt: TokenIds) -> int:
        """Cached tokens that a request of the tenant would be told of now."""
        domain = _domain_of(tenant)
        return self._cache.peek(_NAMESPACE, domain, prompt.buffer).num_tokens

    # Verbs

    def wait_until(self, now: float) -> None:
        """Let time pass, in seconds."""
        assert now >= self._now, "clocks do not go back"
        self._now = now

    def use(self, tenant: str, prompt: TokenIds) -> None:
        """Let a request come and go."""
        lease = self.begin(tenant, prompt)
        assert lease is not None, "one request at a time fits"
        self.end(lease, prompt)

    def begin(self, tenant: str, prompt: TokenIds) -> Lease | None:
        """Let a request start; `None`: there is no room for it now."""
        return self._cache.acquire(
            _NAMESPACE,
            _domain_of(tenant),
            prompt.buffer,
            Demand(num_slots=len(prompt)),
            now=self._now,
        )

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Let a request get longer; `False`: there is no room for that now."""
        return self._cache.grow(lease, num_tokens, self._now)

    def end(self, lease: Lease, prompt: TokenIds) -> None:
        """Let a request publish what it computed, and go."""
        self._cache.copied(lease, self._now)
        self._cache.publish(lease, prompt.buffer, len(prompt), self._now)
        self._cache.release(lease, self._now)


def made_up_prompt(name: str, num_blocks: int, num_more: int = 1) -> TokenIds:
    """Return some blocks and tokens that are like no others, the same for one name."""
    rng = random.Random(name)
    num_tokens = num_blocks * BLOCK_SIZE + num_more
    return TokenIds.from_ids([rng.randrange(_VOCABULARY) for _ in range(num_tokens)])


def _domain_of(tenant: str) -> Domain:
    domain = PRIVATE.sharing.domain(tenant)
    assert domain is not None, "tenants share with themselves by default"
    return domain
