"""Tree and retention under a block pool that is somebody else's (I4, I5, I8, I16, I34).

The machine of `test_cache_machine`, with all its oracles, drives a naive pool that counts
references to single blocks and knows neither nodes nor leases.
"""

from __future__ import annotations

from typing import Any

import pytest

from stemkv.core.check import check_holds
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.events import DropReason
from stemkv.core.prefix.holds import BlockHolds
from stemkv.core.prefix.identity import PUBLIC
from stemkv.core.prefix.watcher import Caller
from stemkv.core.retention.policy import Lru
from stemkv.core.retention.retention import Retention
from stemkv.errors import InvariantError
from tests.core.builders import ALICE, NAMESPACE, tokens
from tests.core.eviction.cases import CASES, LRU, Case, each_case
from tests.core.foreign_pool import ForeignCache
from tests.core.picture import picture
from tests.core.test_cache_machine import CacheMachine, run_machine, walk

# A leaf that two hold grows where ours would begin a node: policies that count uses see
# another history there. See decision 0023.
SAME_VICTIMS = {"lru", "reuse_index", "reuse_index-seconds"}


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


@pytest.mark.parametrize("case", [each for each in CASES if each.name in SAME_VICTIMS])
def test_the_same_blocks_go_whoever_owns_the_pool(case: Case) -> None:
    def history(seed: int, make_machine: type[CacheMachine]) -> list[set[object]]:
        seen = []

        class Seen(make_machine):  # type: ignore[misc, valid-type]
            def everything_holds(self) -> None:
                seen.append(set(self.blocks))

        walk(seed, num_steps=150, case=case, make_machine=Seen)
        return seen

    for seed in range(5):
        ours = history(seed, CacheMachine)
        assert len({len(each) for each in ours}) > 3, "hardly anything came and went"
        assert history(seed, ForeignMachine) == ours


def build(num_blocks: int = 8, block_size: int = 1) -> tuple[BlockHolds, list[int]]:
    freed: list[int] = []
    config = CacheConfig(num_blocks=num_blocks, block_size=block_size)
    return BlockHolds(config, Retention(Lru), freed.extend), freed


def publish(
    holds: BlockHolds, text: str, block_ids: list[int], parent: int | None = None
) -> list[int]:
    """Publish the last of a text's blocks, behind a parent that ends the others."""
    return holds.publish(
        parent,
        block_ids,
        namespace=NAMESPACE,
        domain=ALICE,
        caller=Caller(domain=ALICE, owner="alice"),
        tokens=tokens(text),
        start=len(text) - len(block_ids),
        now=0.0,
    )


def test_blocks_are_let_go_in_any_order_and_a_tail_can_go_before_its_head() -> None:
    holds, freed = build()
    publish(holds, "abcd", [4, 5, 6, 7])
    assert holds.num_evictable == 0

    holds.let_go([5], 1.0)  # held blocks stand on it
    assert (holds.num_evictable, holds.evict(9, None, 1.0)) == (0, 0)
    holds.let_go([7], 1.0)
    assert (holds.num_evictable, holds.evict(9, None, 1.0), freed) == (1, 1, [7])
    check_holds(holds, {4, 6})

    holds.let_go([6], 2.0)
    assert holds.num_evictable == 2  # the hole as well
    holds.hold([5], 3.0)
    assert holds.num_evictable == 1
    check_holds(holds, {4, 5})
    holds.let_go([4, 5], 4.0)
    assert holds.evict(9, None, 5.0) == 3
    assert freed == [7, 6, 5, 4]


def test_a_duplicate_stays_with_its_pool_and_what_stands_on_it_is_published() -> None:
    holds, freed = build()
    publish(holds, "ab", [0, 1])
    holds.let_go([0, 1], 1.0)

    assert publish(holds, "abc", [2, 3, 4]) == [0, 1, 4]
    holds.let_go([0, 1], 2.0)  # not used by a pool that cannot replace them

    assert holds.num_evictable == 0  # but 4 stands on them
    assert not holds.is_published(2)
    assert not holds.is_published(3)
    check_holds(holds, {2, 3, 4})
    holds.let_go([2, 3, 4], 3.0)
    assert holds.evict(9, None, 4.0) == 3
    assert freed == [4, 1, 0]
    assert publish(holds, "abcd", [5], parent=4) == [], "its parent has gone"


def test_blocks_are_dropped_by_id_with_all_that_stands_on_them() -> None:
    holds, freed = build()
    publish(holds, "abc", [0, 1, 2])
    publish(holds, "abX", [3], parent=1)
    with pytest.raises(InvariantError, match="block 1, which is in use"):
        holds.drop([1], DropReason.EVICTED, 1.0)
    holds.let_go([0, 1, 2, 3], 1.0)

    assert holds.drop([1, 2], DropReason.EVICTED, 2.0) == 3

    assert sorted(freed) == [1, 2, 3]
    check_holds(holds, set())
    assert holds.residency.num_evicted == 3


def test_fenced_blocks_go_back_when_nobody_holds_them() -> None:
    holds, freed = build()
    publish(holds, "abc", [0, 1, 2])
    holds.let_go([2], 1.0)

    assert holds.retire(NAMESPACE, 2.0) == 2
    assert freed == [2]
    assert publish(holds, "abcd", [5, 6], parent=1) == []
    holds.let_go([1, 0], 3.0)

    assert freed == [2, 1, 0]


def test_a_block_is_not_published_twice() -> None:
    holds, _ = build()
    publish(holds, "ab", [0, 1])

    with pytest.raises(InvariantError, match="block 1 is published twice"):
        publish(holds, "X", [1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_no_long_random_walk_breaks_a_foreign_pool(seed: int) -> None:
    for part in range(4):
        walk(seed * 10 + part, num_steps=1000, make_machine=ForeignMachine, case=LRU)
