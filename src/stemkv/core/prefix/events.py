"""What happened to cached blocks, as values; nobody in the core logs.

Events carry counts, domains and times, never a token.
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
    """Blocks became matchable."""

    now: float
    namespace: bytes
    domain: Domain
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksEvicted:
    """Cached blocks were dropped to reuse their memory."""

    now: float
    domain: Domain
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRefused:
    """Blocks were not retained after their last use, as their caller had said."""

    now: float
    domain: Domain
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRetired:
    """Blocks were freed because they must not be used: fenced, or unsound KV."""

    now: float
    domain: Domain
    num_blocks: int


CacheEvent = BlocksPublished | BlocksEvicted | BlocksRefused | BlocksRetired
