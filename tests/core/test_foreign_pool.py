"""Tree and retention under a block pool that is somebody else's (I4, I5, I8, I16, I34).

The machine of `test_cache_machine`, with all its oracles, drives a naive pool that counts
references to single blocks and knows neither nodes nor leases.
"""

from __future__ import annotations

from typing import Any

import pytest

from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.identity import PUBLIC
from stemkv.core.retention.retention import Retention
from tests.core.eviction.cases import LRU, Case, each_case
from tests.core.foreign_pool import ForeignCache
from tests.core.picture import picture
from tests.core.test_cache_machine import CacheMachine, run_machine, walk


class ForeignMachine(CacheMachine):
    """The same requests over a foreign pool."""

    def build(self, config: CacheConfig) -> Any:
        return ForeignCache(config, Retention(lambda: self.policy))

    def check(self, leases: list[Any]) -> None:
        self.cache.check(leases)

    def snapshot(self) -> Any:
        return picture(self.cache)

    def num_public_blocks(self, lease: Any) -> int:
        ids = lease.table.ids(0, lease.num_published_blocks)
        return sum(self.cache.holds._node_of[each].domain == PUBLIC for each in ids)


@each_case
def test_no_random_walk_breaks_a_foreign_pool(case: Case) -> None:
    for seed in range(6):
        walk(seed, num_steps=150, case=case, make_machine=ForeignMachine)


def test_no_sequence_of_events_breaks_a_foreign_pool() -> None:
    run_machine(max_examples=40, num_steps=40, make_machine=ForeignMachine)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_no_long_random_walk_breaks_a_foreign_pool(seed: int) -> None:
    for part in range(4):
        walk(seed * 10 + part, num_steps=1000, make_machine=ForeignMachine, case=LRU)
