"""Which block goes when memory is short: one policy per file, one set of hooks."""

from stemkv.core.eviction.base import EvictionPolicy
from stemkv.core.eviction.lru import Lru
from stemkv.core.eviction.reuse_index import ReuseIndex

__all__ = ["EvictionPolicy", "Lru", "ReuseIndex"]
