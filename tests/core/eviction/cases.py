"""The policies that every claim of the conformance suite is made of, with their twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from stemkv.core.retention.policy import (
    EvictionPolicy,
    Gdsf,
    LfuDa,
    Lru,
    ReuseIndex,
    S3Fifo,
)
from tests.core.eviction.twin import FrequencyRule, LruRule, S3FifoRule, Twin
from tests.core.eviction.twin_reuse_index import ReuseIndexRule, ReuseIndexTwin
from tests.core.eviction.watched import Watched

__all__ = ["CASES", "LRU", "Case", "each_case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """How to make a policy for a cache of so many blocks, and what it must do."""

    name: str
    make: Callable[[int], EvictionPolicy]
    twin: Callable[[int], Twin]

    def watched(self, num_blocks: int) -> Watched:
        """The policy, checked at every step, with its twin."""
        return Watched(self.make(num_blocks), self.twin(num_blocks))


def deeper_is_worth_more(depth: int) -> float:
    return 1.0 + depth / 4


LRU = Case(name="lru", make=lambda num: Lru(), twin=lambda num: Twin(LruRule()))
CASES = [
    LRU,
    Case(name="lfu_da", make=LfuDa, twin=lambda num: Twin(FrequencyRule(num))),
    Case(
        name="gdsf",
        make=lambda num: Gdsf(num, worth=deeper_is_worth_more),
        twin=lambda num: Twin(FrequencyRule(num, worth=deeper_is_worth_more)),
    ),
    Case(name="s3fifo", make=S3Fifo, twin=lambda num: Twin(S3FifoRule(num))),
    Case(
        name="reuse_index",
        make=ReuseIndex,
        twin=lambda num: ReuseIndexTwin(ReuseIndexRule(num)),
    ),
    Case(
        name="reuse_index-seconds",
        make=lambda num: ReuseIndex(num, worth=deeper_is_worth_more),
        twin=lambda num: ReuseIndexTwin(
            ReuseIndexRule(num, worth=deeper_is_worth_more)
        ),
    ),
]

each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
