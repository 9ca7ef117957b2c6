"""Which block goes when memory is short: one policy per file, one set of hooks."""

from stemkv.core.eviction.base import EvictionPolicy
from stemkv.core.eviction.lru import Lru

__all__ = ["EvictionPolicy", "Lru"]
