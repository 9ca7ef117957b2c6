"""Which block goes when memory is short: one policy per file, one set of hooks."""

from stemkv.core.eviction.base import EvictionPolicy
from stemkv.core.eviction.gdsf import Gdsf
from stemkv.core.eviction.lfu_da import LfuDa
from stemkv.core.eviction.lru import Lru
from stemkv.core.eviction.reuse_index import ReuseIndex
from stemkv.core.eviction.s3fifo import S3Fifo

__all__ = ["EvictionPolicy", "Gdsf", "LfuDa", "Lru", "ReuseIndex", "S3Fifo"]
