"""What happened to cached blocks, as values; nobody in the core logs.

Events carry block ids, counts, domains and times, never a token. With them an exporter
can tell others which blocks hold what: it knows the tokens of its own requests, and a
block by its id until that block is dropped. Ids tell of everybody's traffic: they are for the
operator, and no tenant may see them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stemkv.core.prefix.identity import Domain

__all__ = [
    "BlocksEvicted",
    "BlocksPublished",
    "BlocksRefused",
    "BlocksRetired",
    "CacheEvent",
    "DropReason",
]


class DropReason(Enum):
    """Why published blocks left the cache."""

    EVICTED = "evicted"  # to make room, or because their domain was over its cap
    REFUSED = "refused"  # not retained: their caller said they are used once
    RETIRED = "retired"  # must not be used any more


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksPublished:
    """Blocks became matchable, in this order behind their parent."""

    now: float
    namespace: bytes
    domain: Domain
    block_ids: tuple[int, ...]
    start: int  # blocks of the path before them
    parent_block_id: int | None  # the last one of those; None: they begin a prompt

    @property
    def num_blocks(self) -> int:
        """How many."""
        return len(self.block_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlocksDropped:
    now: float
    namespace: bytes
    domain: Domain
    block_ids: tuple[int, ...]  # in the order of their tokens; the last went first

    @property
    def num_blocks(self) -> int:
        """How many."""
        return len(self.block_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksEvicted(_BlocksDropped):
    """Cached blocks were dropped to reuse their memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRefused(_BlocksDropped):
    """Blocks were not retained after their last use, as their caller had said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRetired(_BlocksDropped):
    """Blocks were freed because they must not be used: fenced, or unsound KV."""


CacheEvent = BlocksPublished | BlocksEvicted | BlocksRefused | BlocksRetired
