"""Evict the leaf that is used least often, but age what is no longer used.

Owns nothing: it is GDSF where every block costs the same (see `gdsf`).

Least frequently used with dynamic ageing (Arlitt, Cherkasova, Dilley, Friedrich and Jin,
"Evaluating content management techniques for web proxy caches", ACM SIGMETRICS
Performance Evaluation Review 27(4), 2000): the key of an object is how often it was
used, plus the key of what was evicted last before its last use.
"""

from __future__ import annotations

from stemkv.core.retention.policy.gdsf import Gdsf

__all__ = ["LfuDa"]


class LfuDa(Gdsf):
    """Least key first; of equal ones the least recently used.

    `num_blocks` is the size of the cache: uses of evicted blocks are remembered for
    eight times as many.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
