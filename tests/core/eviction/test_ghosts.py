"""What is remembered of evicted blocks: by run, from the head, and not for ever."""

from __future__ import annotations

from array import array
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.core.check import check_cache
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.retention.policy.ghosts import Ghosts
from tests.core.builders import ALICE, NAMESPACE, build_cache
from tests.core.eviction.cases import CASES, Case


def run(*keys: int) -> array[int]:
    return array("Q", keys)


def test_a_block_comes_back_with_its_past_and_is_no_ghost_then() -> None:
    ghosts: Ghosts[str] = Ghosts(8)
    ghosts.remember(run(1, 2), "old")
    assert (1 in ghosts, len(ghosts)) == (True, 2)

    assert ghosts.recall([1, 2]) == "old"
    assert (1 in ghosts, len(ghosts)) == (False, 0)
    assert ghosts.recall([1, 2]) is None


def test_what_is_left_of_a_run_is_found_where_it_begins() -> None:
    ghosts: Ghosts[str] = Ghosts(8)
    ghosts.remember(run(1, 2, 3), "old")

    assert ghosts.recall([1]) == "old"
    assert len(ghosts) == 2
    assert ghosts.recall([2, 3]) == "old"


def test_blocks_of_one_past_are_alike_across_runs() -> None:
    ghosts: Ghosts[str] = Ghosts(9)
    ghosts.remember(run(3, 4), "old")
    ghosts.remember(run(2), "old")
    ghosts.remember(run(1), "new")

    assert ghosts.num_alike([1, 2, 3, 4]) == 1
    assert ghosts.num_alike([2, 3, 4, 5]) == 3
    assert ghosts.num_alike([3, 9, 4]) == 1
    assert ghosts.num_alike([8, 9, 3]) == 2
    assert ghosts.num_alike([8, 9]) == 2


def test_whether_pasts_are_alike_is_for_the_owner_to_say() -> None:
    ghosts: Ghosts[int] = Ghosts(9, lambda one, other: one // 10 == other // 10)
    for key, past in ((1, 11), (2, 12), (3, 23)):
        ghosts.remember(run(key), past)

    assert ghosts.num_alike([1, 2, 3]) == 2


def test_the_run_that_was_evicted_first_is_forgotten_first() -> None:
    ghosts: Ghosts[str] = Ghosts(4)
    ghosts.remember(run(1, 2), "a")
    ghosts.remember(run(3, 4), "b")
    ghosts.remember(run(5), "c")

    assert len(ghosts) == 3
    assert [ghosts.recall([key]) for key in (1, 3, 5)] == [None, "b", "c"]


def test_what_could_never_be_held_is_not_remembered() -> None:
    ghosts: Ghosts[str] = Ghosts(2)
    ghosts.remember(run(1, 2, 3), "long")

    assert len(ghosts) == 0
    assert 1 not in ghosts


pasts = st.sampled_from("xy")
keys = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.sampled_from(["remember", "recall"]), keys, pasts)),
)
def test_no_keys_whatsoever_break_it(
    max_blocks: int, acts: list[tuple[str, list[int], str]]
) -> None:
    """Keys can collide, and whoever writes prompts can make them."""
    ghosts: Ghosts[str] = Ghosts(max_blocks)
    for name, keys, past in acts:
        if name == "remember":
            ghosts.remember(array("Q", keys), past)
            assert ghosts.recall(keys[:1]) in (past, None)
        else:
            assert 1 <= ghosts.num_alike(keys) <= len(keys)
            ghosts.recall(keys)
        assert 0 <= len(ghosts) <= max_blocks
        assert len(ghosts) == sum(len(each.keys) for each in ghosts._runs.values())


def colliding_tokens() -> list[int]:
    """Three tokens: the prefix of all three has the CRC-32 of the first one."""
    for second in range(1000):
        start = TokenIds.from_ids([7]).buffer
        middle = crc32(TokenIds.from_ids([second]).buffer, crc32(start))
        third = _word_between(middle, crc32(start))
        if third < 2**31:
            return [7, second, third]
    raise AssertionError("half of all words are tokens")


def _word_between(before: int, after: int) -> int:
    """The four bytes that take a checksum from one value to another: CRC is linear."""
    at_zero = crc32(bytes(4), before)
    basis = [
        crc32((1 << bit).to_bytes(4, "little"), before) ^ at_zero for bit in range(32)
    ]
    rows = [(vector, 1 << bit) for bit, vector in enumerate(basis)]
    wanted, word = at_zero ^ after, 0
    for bit in reversed(range(32)):
        pivot = next(row for row in rows if row[0] >> bit & 1)
        rows = [
            (row[0] ^ pivot[0], row[1] ^ pivot[1]) if row[0] >> bit & 1 else row
            for row in rows
            if row is not pivot
        ]
        if wanted >> bit & 1:
            wanted, word = wanted ^ pivot[0], word ^ pivot[1]
    return word


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("num_first", [1, 2, 3])
def test_a_prompt_made_to_have_equal_keys_does_no_harm(
    case: Case, num_first: int
) -> None:
    """Anybody who may send a prompt can do this; it must not stop the others."""
    ids = colliding_tokens()
    prompt = TokenIds.from_ids(ids).buffer
    assert crc32(prompt) == crc32(prompt[:4])
    cache = build_cache(num_blocks=8, block_size=1, make_policy=lambda: case.make(8))

    def serve(num_tokens: int, now: float) -> None:
        text = prompt[: 4 * num_tokens]
        lease = cache.acquire(
            NAMESPACE, ALICE, text, Demand(num_slots=num_tokens), now=now
        )
        assert lease is not None
        cache.publish(lease, text, num_tokens, now)
        cache.release(lease, now)

    for time, num_tokens in enumerate([num_first, 3, 2, 3, 1, 3]):
        serve(num_tokens, 2.0 * time)
        cache.evict(8, 2.0 * time + 1.0)
        check_cache(cache, [])
