"""The policies that every claim of the conformance suite is made of, with their twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from stemkv.core.eviction import (
    EvictionPolicy,
    Gdsf,
    LfuDa,
    Lru,
    ReuseIndex,
    S3Fifo,
)
from tests.core.eviction.twin import FrequencyRule, LruRule, Rule, S3FifoRule, Twin
from tests.core.eviction.twin_reuse_index import ReuseIndexRule
from tests.core.eviction.watched import Watched

__all__ = ["CASES", "LRU", "Case", "each_case"]

# Few events must do for the reuse index to learn something; a power of two, so that
# sums of counts are exact.
_BLOCKS_PER_COUNT = 1 / 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """How to make a policy for a cache of so many blocks, and what it must do."""

    name: str
    make: Callable[[int], EvictionPolicy]
    rule: Callable[[int], Rule]

    def watched(self, num_blocks: int) -> Watched:
        """The policy, checked at every step, with its twin."""
        return Watched(self.make(num_blocks), Twin(self.rule(num_blocks)))


def deeper_is_worth_more(depth: int) -> float:
    return 1.0 + depth / 4


LRU = Case(name="lru", make=lambda num: Lru(), rule=lambda num: LruRule())
CASES = [
    LRU,
    Case(name="lfu_da", make=LfuDa, rule=FrequencyRule),
    Case(
        name="gdsf",
        make=lambda num: Gdsf(num, worth=deeper_is_worth_more),
        rule=lambda num: FrequencyRule(num, worth=deeper_is_worth_more),
    ),
    Case(name="s3fifo", make=S3Fifo, rule=S3FifoRule),
    Case(
        name="reuse_index",
        make=lambda num: ReuseIndex(num, blocks_per_count=_BLOCKS_PER_COUNT),
        rule=lambda num: ReuseIndexRule(num, blocks_per_count=_BLOCKS_PER_COUNT),
    ),
    Case(
        name="reuse_index-seconds",
        make=lambda num: ReuseIndex(
            num, worth=deeper_is_worth_more, blocks_per_count=_BLOCKS_PER_COUNT
        ),
        rule=lambda num: ReuseIndexRule(
            num, worth=deeper_is_worth_more, blocks_per_count=_BLOCKS_PER_COUNT
        ),
    ),
]

each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
