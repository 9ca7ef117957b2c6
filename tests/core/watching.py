"""A cache that objects when a block is evicted out of turn.

`WatchedCache` decides nothing. Before anything is evicted it looks at the whole tree and
at the whole queue, and asks for every single block whether another one had to go first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.events import DropReason
from stemkv.core.prefix.identity import PUBLIC
from stemkv.core.prefix.keeper import Waiting
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.prefix.tree import Node
from stemkv.core.prefix.watcher import Watcher
from stemkv.core.retention.policy.base import EvictionPolicy
from stemkv.core.retention.quota import QuotaConfig
from stemkv.core.retention.retention import Retention

__all__ = ["WatchedCache"]

_ENDED, _ORDINARY, _AWAITED, _KEPT = range(4)
Rank = tuple[int, float]


class WatchedCache(PrefixCache):
    """Checks the order in which tail blocks of leaves go: tiers first, then places."""

    def __init__(
        self,
        config: CacheConfig,
        make_policy: Callable[[], EvictionPolicy],
        *,
        quotas: QuotaConfig | None = None,
        has_spans: bool = False,
    ) -> None:
        super().__init__(config, Retention.of(make_policy, config, quotas))
        # A cut never parts a span's first positions, so it may take blocks too early.
        self._is_exact = not has_spans
        self.went: Counter[int] = Counter()  # blocks evicted, by rank
        self.watch(_Objector(self))

    def num_gone(self, tier: str) -> int:
        """How many blocks were evicted from a tier."""
        return self.went[("ended", "ordinary", "awaited", "kept").index(tier)]

    def check_turn(self, node: Node, num_kept: int, now: float) -> None:
        waiting = self.keeper._queue
        queue = [] if waiting is None else list(waiting(now))
        has_quotas = self.keeper.quotas is not None
        others = [
            self._rank(leaf, leaf.num_blocks - 1, queue, now)
            for leaf in self.tree.nodes()
            if leaf.is_leaf and leaf.ref_count == 0 and leaf is not node
            if leaf.domain == node.domain or not has_quotas
        ]
        first = min(others, default=None)
        for index in reversed(range(num_kept, node.num_blocks)):
            rank = self._rank(node, index, queue, now)
            self.went[rank[0]] += 1
            if self._is_exact and first is not None:
                assert rank <= first, f"{rank} went before {first}"

    def _rank(self, node: Node, index: int, queue: list[Waiting], now: float) -> Rank:
        """Where a block stands; smaller goes first, equal ones as the policy says."""
        retention = self.keeper
        until = retention._kept_until.get(node.id)
        if until is not None and until > now:
            return _KEPT, until
        for place, waiting in enumerate(queue):
            if self._hits(waiting, node, index):
                return _AWAITED, -place
        if node.id in retention._ended:
            return _ENDED, 0.0
        return _ORDINARY, 0.0

    def _hits(self, waiting: Waiting, node: Node, index: int) -> bool:
        """Whether the request would find the block, if it was admitted now."""
        if waiting.namespace != node.root().namespace:
            return False
        if node.domain not in (PUBLIC, waiting.domain):
            return False
        spelled = b"".join(step.edge for step in node.path()[:-1])
        spelled += node.edge[: (index + 1) * self.config.block_size * TOKEN_BYTES]
        return waiting.tokens[:-TOKEN_BYTES].startswith(spelled)


class _Objector(Watcher):
    def __init__(self, cache: WatchedCache) -> None:
        self._cache = cache

    def trimming(
        self, node: Node, num_kept: int, reason: DropReason, now: float
    ) -> None:
        if reason is DropReason.EVICTED:
            self._cache.check_turn(node, num_kept, now)
