"""The operator's standing orders: what everybody may share, and what stays.

Owns declared public prefixes and keeps, both as token buffers of whole blocks. Knows
nothing of what is resident: an order holds for what is published later as well.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.tokens import TOKEN_BYTES, common_prefix_bytes
from stemkv.core.prefix.tree import Node
from stemkv.errors import ConfigError

__all__ = ["Standing"]


@dataclass(frozen=True, slots=True)
class _Keep:
    """An order to keep whole blocks until a time."""

    namespace: bytes
    domain: Domain
    tokens: bytes
    until: float


class Standing:
    """Declared prefixes and keeps of one cache."""

    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._block_bytes = config.block_size * TOKEN_BYTES
        self._public: dict[bytes, list[bytes]] = {}  # by namespace, sorted
        self._keeps: list[_Keep] = []

    # Public prefixes

    def declare(self, namespace: bytes, tokens: bytes, budget: int | None) -> None:
        """Let everybody in the namespace share these whole blocks.

        Raises `ConfigError` when all that is declared would exceed the budget, in
        blocks.
        """
        declared = self._public.get(namespace, [])
        at = bisect_left(declared, tokens)
        is_new = bool(tokens) and declared[at : at + 1] != [tokens]
        if budget is not None:
            self._check_budget(len(tokens) if is_new else 0, budget)
        if is_new:
            self._public.setdefault(namespace, declared).insert(at, tokens)

    def num_public_bytes(self, namespace: bytes, tokens: bytes) -> int:
        """Return how many leading bytes agree with a declared prefix."""
        declared = self._public.get(namespace)
        if declared is None:
            return 0
        # Of sorted prefixes one of the two neighbours agrees with the tokens longest.
        at = bisect_left(declared, tokens)
        return max(
            common_prefix_bytes(prefix, 0, tokens, 0, min(len(prefix), len(tokens)))
            for prefix in declared[max(0, at - 1) : at + 1]
        )

    # Keeps

    def keep(
        self, namespace: bytes, domain: Domain, tokens: bytes, until: float, now: float
    ) -> None:
        """Note, change or, if `until` is over, take back an order.

        Raises `ConfigError` when what is kept would exceed `max_kept_share`.
        """
        order = (namespace, domain, tokens)
        keeps = [
            each
            for each in self._keeps
            if each.until > now and (each.namespace, each.domain, each.tokens) != order
        ]
        if not tokens:
            return
        if until > now:
            self._check_share(len(tokens), sum(len(each.tokens) for each in keeps))
            keeps.append(_Keep(namespace, domain, tokens, until))
        self._keeps = keeps

    def kept_until(
        self,
        namespace: bytes,
        domain: Domain,
        tokens: bytes,
        *,
        start: int,
        stop: int,
        now: float,
    ) -> tuple[float | None, int]:
        """Return until when blocks `start …` are kept, and where that changes."""
        until = None
        for keep in self._keeps:
            if (
                keep.until <= now
                or len(keep.tokens) <= start * self._block_bytes
                or keep.namespace != namespace
                or domain not in (PUBLIC, keep.domain)
            ):
                continue
            limit = min(len(keep.tokens), len(tokens))
            same = common_prefix_bytes(keep.tokens, 0, tokens, 0, limit)
            end = same // self._block_bytes
            if end > start:
                stop = min(stop, end)
                until = max(until or keep.until, keep.until)
        return until, stop

    def latest(self, node: Node, tokens: bytes, end: int) -> float | None:
        """Return until when all of a node is kept, which ends `tokens` at block `end`."""
        num_bytes = end * self._block_bytes
        return max(
            (
                keep.until
                for keep in self._keeps
                if node.root().namespace == keep.namespace
                and node.domain in (PUBLIC, keep.domain)
                and len(keep.tokens) >= num_bytes
                and keep.tokens.startswith(tokens[:num_bytes])
            ),
            default=None,
        )

    # Both

    def forget(self, namespace: bytes) -> None:
        """Forget all orders for a namespace that was retired."""
        self._public.pop(namespace, None)
        self._keeps = [each for each in self._keeps if each.namespace != namespace]

    # Private

    def _check_budget(self, num_new_bytes: int, budget: int) -> None:
        # Upper bound: prefixes of one namespace may share blocks.
        num_bytes = num_new_bytes + sum(
            len(each) for prefixes in self._public.values() for each in prefixes
        )
        if num_bytes > budget * self._block_bytes:
            raise ConfigError(
                f"declared public prefixes of {num_bytes // self._block_bytes} blocks "
                f"exceed public_blocks of {budget}; raise it or declare less"
            )

    def _check_share(self, num_new_bytes: int, num_kept_bytes: int) -> None:
        num_blocks = num_new_bytes // self._block_bytes
        num_kept = num_kept_bytes // self._block_bytes
        most = int(self._config.max_kept_share * self._config.num_blocks)
        if num_kept + num_blocks > most:
            raise ConfigError(
                f"keeping {num_blocks} blocks beside {num_kept} exceeds the "
                f"{most} that max_kept_share allows; keep less or for a shorter "
                f"time, or raise max_kept_share"
            )
