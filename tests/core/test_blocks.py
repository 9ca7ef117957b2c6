"""Block states: the allowed transitions, every forbidden one, and conservation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.core.check import check_pool
from stemkv.core.prefix.blocks import BlockPool, BlockState
from stemkv.errors import DoubleRelease, InvariantError
from tests.core.builders import count_calls

FREE, PRIVATE, PUBLISHED = BlockState.FREE, BlockState.PRIVATE, BlockState.PUBLISHED


def pool_with(state: BlockState) -> tuple[BlockPool, int]:
    """A pool of four whose returned block is in the given state."""
    pool = BlockPool(4)
    (block_id,) = pool.allocate(1)
    if state is FREE:
        pool.release([block_id])
    if state is PUBLISHED:
        pool.publish([block_id])
    assert pool.state(block_id) is state
    return pool, block_id


def picture(pool: BlockPool) -> tuple[object, ...]:
    return (
        pool.free_block_ids(),
        [pool.state(block_id) for block_id in range(pool.num_total)],
        [pool.ref_count(block_id) for block_id in range(pool.num_total)],
        pool.num_published,
    )


# Allowed


def test_a_new_pool_is_all_free() -> None:
    pool = BlockPool(3)

    assert (pool.num_total, pool.num_free) == (3, 3)
    assert (pool.num_private, pool.num_published) == (0, 0)
    assert {pool.state(block_id) for block_id in range(3)} == {FREE}
    check_pool(pool)


def test_low_ids_are_handed_out_first() -> None:
    assert list(BlockPool(5).allocate(3)) == [0, 1, 2]


def test_the_block_freed_last_is_handed_out_first() -> None:
    pool = BlockPool(5)
    pool.allocate(4)
    pool.release([2])
    pool.release([0])

    assert list(pool.allocate(3)) == [0, 2, 4]


def test_an_allocated_block_is_private_to_one_table() -> None:
    pool = BlockPool(4)
    taken = pool.allocate(3)

    assert [pool.state(block_id) for block_id in taken] == [PRIVATE] * 3
    assert [pool.ref_count(block_id) for block_id in taken] == [1] * 3
    assert (pool.num_private, pool.num_free) == (3, 1)


def test_a_block_is_free_after_as_many_releases_as_holders() -> None:
    pool, block_id = pool_with(PRIVATE)
    pool.retain([block_id])
    pool.retain([block_id])
    assert pool.ref_count(block_id) == 3

    pool.release([block_id])
    pool.release([block_id])
    assert pool.state(block_id) is PRIVATE
    pool.release([block_id])

    assert pool.state(block_id) is FREE
    check_pool(pool)


def test_a_published_block_has_no_table_of_its_own() -> None:
    pool, block_id = pool_with(PUBLISHED)

    assert pool.ref_count(block_id) == 0
    assert (pool.num_private, pool.num_published) == (0, 1)


def test_a_reclaimed_block_is_free_and_can_be_allocated() -> None:
    pool, block_id = pool_with(PUBLISHED)
    pool.reclaim([block_id])

    assert pool.state(block_id) is FREE
    assert block_id in pool.allocate(4)


def test_allocating_nothing_gives_nothing() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    assert list(pool.allocate(0)) == []


# Forbidden (I8)


@pytest.mark.parametrize(
    "state, act, error",
    [
        (FREE, BlockPool.retain, InvariantError),
        (FREE, BlockPool.release, DoubleRelease),
        (FREE, BlockPool.publish, InvariantError),
        (FREE, BlockPool.reclaim, InvariantError),
        (PRIVATE, BlockPool.reclaim, InvariantError),
        (PUBLISHED, BlockPool.retain, InvariantError),
        (PUBLISHED, BlockPool.release, DoubleRelease),
        (PUBLISHED, BlockPool.publish, InvariantError),
    ],
)
def test_every_other_transition_is_refused_and_changes_nothing(
    state: BlockState,
    act: Callable[[BlockPool, list[int]], None],
    error: type[InvariantError],
) -> None:
    pool, block_id = pool_with(state)
    before = picture(pool)

    with pytest.raises(error, match=f"block {block_id}"):
        act(pool, [block_id])

    assert picture(pool) == before
    check_pool(pool)


def test_a_block_that_two_tables_hold_cannot_be_published() -> None:
    pool, block_id = pool_with(PRIVATE)
    pool.retain([block_id])

    with pytest.raises(InvariantError, match="2 references; exactly one"):
        pool.publish([block_id])
    assert pool.state(block_id) is PRIVATE


@pytest.mark.parametrize("verb", ["release", "publish", "reclaim"])
def test_one_reference_is_not_spent_twice_in_one_call(verb: str) -> None:
    pool, block_id = pool_with(PUBLISHED if verb == "reclaim" else PRIVATE)
    with pytest.raises(InvariantError, match=f"block {block_id}"):
        getattr(pool, verb)([block_id, block_id])
    check_pool(pool)


def test_more_blocks_than_are_free_are_refused_and_none_is_taken() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(InvariantError, match="allocate(.*3.*) with 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


# Conservation (I4)

verbs = st.sampled_from(["allocate", "retain", "release", "publish", "reclaim"])


@given(st.lists(st.tuples(verbs, st.integers(0, 5), st.integers(0, 3)), max_size=40))
def test_states_are_those_of_a_dict_and_the_counts_add_up(
    acts: list[tuple[str, int, int]],
) -> None:
    pool = BlockPool(6)
    holders: dict[int, int | str] = {}  # of blocks that are not free

    for verb, block_id, amount in acts:
        held = holders.get(block_id)
        if verb == "allocate":
            if amount > pool.num_free:
                continue
            taken = list(pool.allocate(amount))
            assert len(set(taken)) == amount
            assert not set(taken) & set(holders), "a live block was handed out"
            holders.update(dict.fromkeys(taken, 1))
            continue
        act = getattr(pool, verb)
        if verb == "reclaim" and held == "published":
            del holders[block_id]
        elif verb == "publish" and held == 1:
            holders[block_id] = "published"
        elif verb == "retain" and isinstance(held, int):
            holders[block_id] = held + 1
        elif verb == "release" and isinstance(held, int):
            holders[block_id] = held - 1
            if held == 1:
                del holders[block_id]
        else:
            with pytest.raises(InvariantError):
                act([block_id])
            continue
        act([block_id])

        check_pool(pool)
        counts = Counter(type(held) for held in holders.values())
        assert pool.num_private == counts[int]
        assert pool.num_published == counts[str]
        assert pool.num_free + pool.num_private + pool.num_published == 6
        for each in range(6):
            held = holders.get(each, 0)
            assert pool.ref_count(each) == (held if isinstance(held, int) else 0)


def test_cost_does_not_depend_on_the_size_of_the_pool() -> None:
    def calls(num_blocks: int) -> int:
        pool = BlockPool(num_blocks)

        def churn() -> None:
            taken = pool.allocate(3)
            pool.retain(taken[:1])
            pool.release(taken[:1])
            pool.publish(taken)
            pool.reclaim(taken)

        return count_calls(churn)

    assert calls(100_000) == calls(4)
