"""Which block goes when memory is short: one policy per file, one set of hooks."""

from stemkv.core.retention.policy.base import EvictionPolicy
from stemkv.core.retention.policy.gdsf import Gdsf
from stemkv.core.retention.policy.lfu_da import LfuDa
from stemkv.core.retention.policy.lru import Lru
from stemkv.core.retention.policy.reuse_index import ReuseIndex
from stemkv.core.retention.policy.s3fifo import S3Fifo

__all__ = ["EvictionPolicy", "Gdsf", "LfuDa", "Lru", "ReuseIndex", "S3Fifo"]
