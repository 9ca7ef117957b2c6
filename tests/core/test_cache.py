"""The cache: one atomic acquire, publish once, shared is read-only, tail first."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stemkv.core.check import check_cache
from stemkv.core.prefix.blocks import BlockState
from stemkv.core.prefix.cache import Peek, PrefixCache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.events import BlocksEvicted, BlocksPublished, DropReason
from stemkv.core.prefix.identity import PUBLIC, Domain, DomainKind
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.table import BlockCopy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.prefix.tree import Node
from stemkv.core.prefix.watcher import LeaseWatcher
from stemkv.core.retention.policy import Lru
from stemkv.errors import (
    ConfigError,
    DoubleRelease,
    InvariantError,
    PromptTooLong,
    RequestError,
    TokenOutOfRange,
)
from tests.core.builders import (
    ALICE,
    BOB,
    CREW,
    NAMESPACE,
    OTHER_NAMESPACE,
    Sink,
    acquire,
    build_cache,
    cached,
    count_calls,
    hold,
    resident,
    serve,
    snapshot,
    tokens,
)


def word(text: str) -> TokenIds:
    return TokenIds(tokens(text))


# Acquire


def test_a_cold_acquire_gets_private_blocks_for_all_its_slots() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    lease = acquire(cache, "abcde", num_slots=7)

    assert lease is not None
    assert len(lease.table) == 4
    assert len(set(lease.table.ids())) == 4
    assert lease.num_matched_tokens == lease.num_published_blocks == 0
    assert lease.copy is None
    assert all(cache.pool.ref_count(block_id) == 1 for block_id in lease.table.ids())
    assert cache.num_active_blocks == 4
    check_cache(cache, [lease])


def test_a_warm_acquire_takes_the_very_blocks_that_were_published() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    first = hold(cache, "abcdef")
    second = acquire(cache, "abcdXY")

    assert second is not None
    assert list(second.table.ids(0, 2)) == list(first.table.ids(0, 2))
    assert second.table[2] != first.table[2]
    assert second.num_published_blocks == 2
    assert second.num_matched_tokens == 4
    check_cache(cache, [first, second])


def test_an_acquire_pins_what_it_matched() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    serve(cache, "abcdef")
    assert cache.num_active_blocks == 0
    lease = acquire(cache, "abcdX")
    assert lease is not None

    assert cache.num_active_blocks == 3
    assert cache.evict(99, 0.0) == 1
    assert cached(cache, "abcdX") == 4
    check_cache(cache, [lease])


def test_fewer_slots_than_tokens_are_a_defect_of_the_caller() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    with pytest.raises(InvariantError, match="2 slots for 3 tokens"):
        acquire(cache, "abc", num_slots=2)


def test_what_could_never_fit_is_refused_with_the_numbers() -> None:
    cache = build_cache(num_blocks=3, block_size=2)
    before = snapshot(cache)

    with pytest.raises(
        PromptTooLong, match="7 tokens need 4 blocks .* 3 of 3"
    ) as error:
        acquire(cache, "abcdefg")

    assert error.value.field == "prompt"
    assert snapshot(cache) == before
    assert acquire(cache, "abcdef") is not None, "exactly all of the pool does fit"


# The last-token rule (I25)


@pytest.mark.parametrize(
    "length, expected",
    [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (7, 6), (8, 7), (9, 8)],
)
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_at_least_one_token_is_left_to_compute(
    length: int, expected: int, block_size: int
) -> None:
    text = "abcdefghijkl"
    cache = build_cache(num_blocks=40, block_size=block_size)
    serve(cache, text)

    lease = acquire(cache, text[:length])

    assert lease is not None
    assert lease.num_matched_tokens == expected == cached(cache, text[:length])
    assert lease.num_published_blocks == expected // block_size
    copied = expected % block_size
    assert (lease.copy.num_tokens if lease.copy else 0) == copied
    check_cache(cache, [lease])


@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_a_prompt_met_again_and_again_is_found_by_all_but_its_last_token(
    length: int,
) -> None:
    """k blocks minus one, k blocks, k blocks plus one: later requests see it all."""
    text = "abcdefghi"[:length]
    cache = build_cache(num_blocks=40, block_size=4)
    num_whole = length // 4 * 4

    hits = [serve(cache, text) for _ in range(4)]
    longer = cached(cache, text + "!!!!")

    assert hits == [0] + 3 * [min(num_whole, length - 1)]
    assert longer == num_whole


def test_a_prompt_without_a_second_token_matches_nothing() -> None:
    cache = build_cache(num_blocks=4, block_size=1)
    serve(cache, "a")
    assert cached(cache, "a") == 0
    assert cached(cache, "ab") == 1
    assert cached(cache, "") == 0


# Atomicity (I34)


def test_a_prompt_that_is_the_whole_cache_reuses_all_but_its_last_block() -> None:
    """The last block is evicted to be computed again; pinning it would be no gain."""
    cache = build_cache(num_blocks=4, block_size=4)
    serve(cache, "abcdefghijklmnop")
    assert cache.usage().num_cached_blocks == 4

    lease = acquire(cache, "abcdefghijklmnop")

    assert lease is not None
    assert lease.num_matched_tokens == 12
    assert lease.copy is None
    assert len(set(lease.table.ids())) == 4
    assert cache.usage().num_evicted_blocks == 1
    check_cache(cache, [lease])


def test_a_partial_copy_is_made_if_one_block_is_to_spare() -> None:
    cache = build_cache(num_blocks=5, block_size=4)
    serve(cache, "abcdefghijklmnop")

    lease = acquire(cache, "abcdefghijklmnop")

    assert lease is not None
    assert lease.num_matched_tokens == 15
    assert cache.usage().num_evicted_blocks == 0
    check_cache(cache, [lease])


def test_the_match_is_pinned_before_others_are_evicted_for_it() -> None:
    """The matched prefix is the least recently used: eviction would take it first."""
    cache = build_cache(num_blocks=5, block_size=2)
    serve(cache, "abcdefgh", now=0.0)
    serve(cache, "xy", now=1.0)

    lease = acquire(cache, "abcdefghij", now=2.0)

    assert lease is not None
    assert lease.num_matched_tokens == 8
    assert cached(cache, "xy!") == 0
    check_cache(cache, [lease])


def test_matched_blocks_are_not_counted_as_room_for_the_rest() -> None:
    cache = build_cache(num_blocks=5, block_size=2)
    serve(cache, "abcdefgh")
    other = hold(cache, "xy")
    before = snapshot(cache)

    assert acquire(cache, "abcdefghij") is None

    assert snapshot(cache) == before
    cache.release(other, 1.0)
    assert acquire(cache, "abcdefghij") is not None


@pytest.mark.parametrize(
    "prompt",
    ["abcdefgh!", "abcde!!!!", "abcdXXXXX", "zzzzzzzzz"],
    ids=["whole", "within an edge", "with a partial block", "cold"],
)
@pytest.mark.parametrize("namespace", [NAMESPACE, OTHER_NAMESPACE, None])
def test_an_acquire_that_answers_none_leaves_every_bit_as_it_was(
    prompt: str, namespace: bytes | None
) -> None:
    cache = build_cache(num_blocks=6, block_size=3)
    cache.declare_public(NAMESPACE, word("abc"))
    serve(cache, "abcdefgh", now=0.0)
    blocker = hold(cache, "mnopqrstuvwx", now=1.0)
    before = snapshot(cache)

    assert acquire(cache, prompt, namespace=namespace, now=2.0) is None
    assert acquire(cache, prompt, namespace=namespace, now=2.0) is None

    assert snapshot(cache) == before
    check_cache(cache, [blocker])


def test_spare_blocks_are_left_over() -> None:
    cache = build_cache(num_blocks=6, block_size=2)
    serve(cache, "abcd")
    before = snapshot(cache)

    assert acquire(cache, "abcdef", num_spare=4) is None
    assert snapshot(cache) == before

    lease = acquire(cache, "abcdef", num_spare=3)
    assert lease is not None
    assert cache.num_available_blocks == 3


def test_spare_blocks_are_worth_more_than_a_partial_copy() -> None:
    """Pinning the source would take one of the blocks that must be left over."""
    cache = build_cache(num_blocks=4, block_size=2)
    serve(cache, "abcd")

    thrifty = acquire(cache, "abcX", num_spare=2)

    assert thrifty is not None
    assert (thrifty.num_matched_tokens, thrifty.copy) == (2, None)
    assert cache.num_available_blocks == 2


def test_blocks_are_evicted_only_as_far_as_needed() -> None:
    cache = build_cache(num_blocks=6, block_size=1)
    serve(cache, "abcdef")

    assert acquire(cache, "xy") is not None

    assert cache.usage().num_evicted_blocks == 2
    assert cached(cache, "abcdef") == 4


# Partial blocks (C5)


def test_a_match_within_a_block_names_the_exact_copy() -> None:
    cache = build_cache(num_blocks=8, block_size=4)
    first = hold(cache, "abcdefgh")
    second = acquire(cache, "abcdefgX")

    assert second is not None
    assert second.copy == BlockCopy(
        source=first.table[1], target=second.table[1], num_tokens=3
    )
    assert second.table[1] != first.table[1]
    assert cache.pool.state(second.table[1]) is BlockState.PRIVATE
    assert second.num_matched_tokens == 7
    assert second.num_published_blocks == 1


def test_the_source_of_a_copy_stays_until_it_is_copied() -> None:
    cache = build_cache(num_blocks=8, block_size=4)
    serve(cache, "abcdefgh")
    lease = acquire(cache, "abcdefgX")
    assert lease is not None
    assert lease.copy is not None
    source = lease.copy.source

    assert cache.evict(99, 0.0) == 0
    assert cache.pool.state(source) is BlockState.PUBLISHED
    check_cache(cache, [lease])

    cache.copied(lease, 1.0)
    assert (lease.copy, lease.copy_source) == (None, None)
    assert cache.evict(99, 2.0) == 1
    assert cache.pool.state(source) is BlockState.FREE
    check_cache(cache, [lease])


def test_telling_twice_that_a_copy_has_run_does_no_harm() -> None:
    cache = build_cache(num_blocks=8, block_size=4)
    serve(cache, "abcdefgh")
    lease = acquire(cache, "abcdefgX")
    other = acquire(cache, "abcdefgY")
    assert lease is not None
    assert other is not None

    cache.copied(lease, 1.0)
    before = snapshot(cache)
    cache.copied(lease, 2.0)

    assert snapshot(cache) == before
    check_cache(cache, [lease, other])


def test_the_source_stays_pinned_though_its_node_is_split_meanwhile() -> None:
    cache = build_cache(num_blocks=12, block_size=2)
    serve(cache, "abcdefgh")
    copying = acquire(cache, "abcX")  # copies from the block `cd`
    splitting = acquire(cache, "abcdeY")  # needs a border behind it
    assert copying is not None
    assert splitting is not None
    assert copying.copy is not None
    cache.release(splitting, 1.0)

    cache.evict(99, 2.0)

    assert cache.pool.state(copying.copy.source) is BlockState.PUBLISHED
    check_cache(cache, [copying])


def test_a_lease_that_ends_before_its_copy_gives_the_source_back_too() -> None:
    cache = build_cache(num_blocks=8, block_size=4)
    serve(cache, "abcdefgh")
    lease = acquire(cache, "abcdefgX")
    assert lease is not None

    cache.release(lease, 1.0)

    assert cache.num_active_blocks == 0
    check_cache(cache, [])


def test_the_copy_starts_in_the_first_private_block_whatever_the_slots() -> None:
    cache = build_cache(num_blocks=12, block_size=4)
    serve(cache, "abcdefgh")
    lease = acquire(cache, "abcdeX", num_slots=20)

    assert lease is not None
    assert lease.copy is not None
    assert lease.copy.target == lease.table[1]
    assert len(lease.table) == 5


# Looking


def test_a_peek_foretells_the_acquire_and_changes_nothing() -> None:
    cache = build_cache(num_blocks=12, block_size=2)
    serve(cache, "abcdef")
    before = snapshot(cache)

    peeks = [cache.peek(NAMESPACE, ALICE, tokens(text)) for text in ("abcdeX", "x", "")]
    unknown = cache.peek(OTHER_NAMESPACE, ALICE, tokens("abcdeX"))

    assert snapshot(cache) == before
    assert peeks == [Peek(5, 2), Peek(0, 0), Peek(0, 0)]
    assert unknown == Peek(0, 0)
    lease = acquire(cache, "abcdeX")
    assert lease is not None
    assert lease.num_matched_tokens == 5


def test_counting_blocks_rounds_up() -> None:
    cache = build_cache(num_blocks=1, block_size=4)
    counts = [cache.num_blocks_for(n) for n in (0, 1, 3, 4, 5, 8, 9)]
    assert counts == [0, 1, 1, 1, 2, 2, 3]


# Publish


def test_only_whole_computed_blocks_become_matchable() -> None:
    cache = build_cache(num_blocks=8, block_size=4)
    lease = acquire(cache, "abcdefghij")
    assert lease is not None

    found = []
    for num_computed in range(11):
        cache.publish(lease, tokens("abcdefghij"), num_computed, 0.0)
        found.append(cached(cache, "abcdefghij"))
    assert found == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8]
    check_cache(cache, [lease])


def test_nothing_is_matchable_before_it_is_published() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    lease = acquire(cache, "abcd")
    assert lease is not None
    assert cached(cache, "abcd!", domain=ALICE) == 0

    cache.release(lease, 0.0)

    assert cached(cache, "abcd!", domain=ALICE) == 0
    assert cache.usage().num_free_blocks == 8


def test_publishing_returns_what_it_added_and_tells_it_once() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    sink = Sink()
    cache.subscribe(sink)
    lease = acquire(cache, "abcdef")
    assert lease is not None

    added = [cache.publish(lease, tokens("abcdef"), n, 3.0) for n in (3, 4, 4, 6, 6)]

    assert added == [1, 1, 0, 1, 0]
    assert cache.usage().num_published_blocks == 3
    assert sink.events == [
        BlocksPublished(
            now=3.0,
            namespace=NAMESPACE,
            domain=ALICE,
            block_ids=(lease.table[start],),
            start=start,
            parent_block_id=lease.table[start - 1] if start else None,
        )
        for start in range(3)
    ]


def test_publishing_piece_by_piece_makes_one_node() -> None:
    cache = build_cache(num_blocks=8, block_size=1)
    lease = acquire(cache, "abcdef")
    assert lease is not None
    for num_computed in range(7):
        cache.publish(lease, tokens("abcdef"), num_computed, 0.0)
    assert cache.tree.num_nodes == 1


def test_an_equal_block_is_resident_once() -> None:
    """Two compute the same; who publishes second takes the first one's blocks."""
    cache = build_cache(num_blocks=8, block_size=2)
    first = acquire(cache, "abcdef")
    second = acquire(cache, "abcdXY")
    assert first is not None
    assert second is not None
    own = second.table.ids()
    cache.publish(first, tokens("abcdef"), 6, 0.0)

    added = cache.publish(second, tokens("abcdXY"), 6, 1.0)

    assert added == 1
    assert list(second.table.ids(0, 2)) == list(first.table.ids(0, 2))
    assert second.table[2] == own[2]
    assert [cache.pool.state(b) for b in own[:2]] == 2 * [BlockState.FREE]
    assert cache.usage().num_active_blocks == 4
    check_cache(cache, [first, second])


def test_deduplication_can_end_within_a_node() -> None:
    cache = build_cache(num_blocks=12, block_size=1)
    second = acquire(cache, "abXY")
    assert second is not None
    serve(cache, "abcdef")

    cache.publish(second, tokens("abXY"), 4, 1.0)

    assert cached(cache, "abXY!") == 4
    assert cached(cache, "abcdef!") == 6
    assert cache.tree.num_nodes == 3
    check_cache(cache, [second])


def test_deduplicated_blocks_stay_while_either_holder_lives() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    first = acquire(cache, "abcd")
    second = acquire(cache, "abcd")
    assert first is not None
    assert second is not None
    for lease in (first, second):
        cache.publish(lease, tokens("abcd"), 4, 0.0)

    cache.release(first, 1.0)
    assert cache.evict(99, 2.0) == 0
    check_cache(cache, [second])
    cache.release(second, 3.0)
    assert cache.evict(99, 4.0) == 2


def test_snapshots_of_a_table_are_not_changed_by_deduplication() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    first = acquire(cache, "abcd")
    second = acquire(cache, "abcd")
    assert first is not None
    assert second is not None
    cache.publish(first, tokens("abcd"), 4, 0.0)
    planned = second.table.snapshot()
    before = list(planned)

    cache.publish(second, tokens("abcd"), 4, 0.0)

    assert list(planned) == before
    assert list(second.table.snapshot()) == list(first.table.snapshot()) != before
    with pytest.raises(TypeError, match="read-only"):
        planned[0] = 9


def test_a_table_is_copied_for_a_plan_only_after_it_has_changed() -> None:
    cache = build_cache(num_blocks=8, block_size=1)
    lease = acquire(cache, "ab")
    assert lease is not None
    first = lease.table.snapshot()

    assert lease.table.snapshot() is first
    assert cache.grow(lease, 3, 0.0)
    assert lease.table.snapshot() is not first
    assert (len(first), len(lease.table.snapshot())) == (2, 3)


def test_a_released_lease_publishes_nothing_more() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    lease = hold(cache, "abcd")
    cache.release(lease, 0.0)
    with pytest.raises(InvariantError, match="released"):
        cache.publish(lease, tokens("abcd"), 4, 1.0)


def test_a_reply_is_found_by_the_next_turn_of_the_chat() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    lease = hold(cache, "abc")
    assert cache.grow(lease, 5, 1.0)
    cache.publish(lease, tokens("abcRS"), 5, 2.0)
    cache.release(lease, 3.0)

    assert cached(cache, "abcRST") == 4


# Growing


def test_growing_adds_blocks_only_when_the_slots_are_used_up() -> None:
    cache = build_cache(num_blocks=8, block_size=3)
    lease = acquire(cache, "ab")
    assert lease is not None

    sizes = []
    for num_slots in range(2, 9):
        assert cache.grow(lease, num_slots, 0.0)
        sizes.append(len(lease.table))
    assert sizes == [1, 1, 2, 2, 2, 3, 3]
    check_cache(cache, [lease])


def test_growing_evicts_cached_blocks_but_no_active_ones() -> None:
    cache = build_cache(num_blocks=4, block_size=1)
    serve(cache, "xy")
    lease = hold(cache, "ab")

    assert cache.grow(lease, 4, 1.0)
    assert cached(cache, "xy!") == 0
    check_cache(cache, [lease])

    before = snapshot(cache)
    assert not cache.grow(lease, 5, 2.0)
    assert snapshot(cache) == before


def test_growing_never_shrinks() -> None:
    cache = build_cache(num_blocks=8, block_size=1)
    lease = hold(cache, "abcd")
    assert cache.grow(lease, 1, 0.0)
    assert len(lease.table) == 4


# Forks and copy-on-write (I35)


def test_a_fork_shares_all_blocks_and_holds_them_by_itself() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    parent = hold(cache, "abcde")
    child = cache.fork(parent, 1.0)

    assert list(child.table.ids()) == list(parent.table.ids())
    assert cache.usage().num_active_blocks == 3
    assert cache.pool.ref_count(parent.table[2]) == 2
    check_cache(cache, [parent, child])

    cache.release(parent, 2.0)
    assert cache.usage().num_active_blocks == 3
    check_cache(cache, [child])
    cache.release(child, 3.0)
    assert cache.num_active_blocks == 0


def test_whoever_writes_first_copies_and_the_last_one_writes_in_place() -> None:
    cache = build_cache(num_blocks=8, block_size=4)
    parent = hold(cache, "abcdef")
    children = [cache.fork(parent, 1.0), cache.fork(parent, 1.0)]
    shared = parent.table[1]

    is_ready, copy = cache.prepare_write(parent, 6, 2.0)
    assert is_ready
    assert copy == BlockCopy(source=shared, target=parent.table[1], num_tokens=2)
    assert parent.table[1] != shared

    is_ready, copy = cache.prepare_write(children[0], 6, 2.0)
    assert is_ready
    assert copy == BlockCopy(source=shared, target=children[0].table[1], num_tokens=2)

    assert cache.prepare_write(children[1], 6, 2.0) == (True, None)
    assert children[1].table[1] == shared
    check_cache(cache, [parent, *children])


def test_a_private_block_is_written_without_a_copy() -> None:
    cache = build_cache(num_blocks=8, block_size=4)
    lease = hold(cache, "abcdef")
    before = snapshot(cache)

    assert cache.prepare_write(lease, 6, 1.0) == (True, None)
    assert snapshot(cache) == before


def test_a_shared_block_without_content_is_replaced_without_a_copy() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    parent = acquire(cache, "ab", num_slots=4)
    assert parent is not None
    child = cache.fork(parent, 0.0)

    assert cache.prepare_write(child, 2, 1.0) == (True, None)

    assert child.table[1] != parent.table[1]
    check_cache(cache, [parent, child])


def test_a_write_waits_when_there_is_no_block_to_copy_to() -> None:
    cache = build_cache(num_blocks=2, block_size=2)
    parent = hold(cache, "abc")
    child = cache.fork(parent, 0.0)
    before = snapshot(cache)

    assert cache.prepare_write(child, 3, 1.0) == (False, None)

    assert snapshot(cache) == before
    cache.release(parent, 2.0)
    assert cache.prepare_write(child, 3, 3.0) == (True, None)


def test_a_published_block_is_never_written() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    lease = hold(cache, "abcde")
    for position in range(4):
        with pytest.raises(InvariantError, match=f"write at {position} into a publ"):
            cache.prepare_write(lease, position, 1.0)
    assert cache.prepare_write(lease, 4, 1.0) == (True, None)


def test_samples_that_continue_alike_end_up_in_the_same_blocks() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    parent = hold(cache, "abc")
    child = cache.fork(parent, 0.0)
    for lease in (parent, child):
        assert cache.prepare_write(lease, 3, 1.0)[0]
        cache.publish(lease, tokens("abcd"), 4, 1.0)

    assert list(parent.table.ids()) == list(child.table.ids())
    assert cache.usage().num_active_blocks == 2
    check_cache(cache, [parent, child])


def test_samples_that_part_keep_their_own_blocks() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    parent = hold(cache, "abc")
    child = cache.fork(parent, 0.0)
    for lease, text in ((parent, "abcd"), (child, "abcX")):
        assert cache.prepare_write(lease, 3, 1.0)[0]
        cache.publish(lease, tokens(text), 4, 1.0)

    assert parent.table[0] == child.table[0]
    assert parent.table[1] != child.table[1]
    assert cached(cache, "abcd!") == cached(cache, "abcX!") == 4
    check_cache(cache, [parent, child])


def test_a_block_that_a_fork_shares_is_published_when_the_other_has_gone() -> None:
    """The tree would own what another table still holds."""
    cache = build_cache(num_blocks=8, block_size=2)
    parent = acquire(cache, "ab")
    assert parent is not None
    child = cache.fork(parent, 0.0)

    assert cache.publish(parent, tokens("ab"), 2, 1.0) == 0
    assert cached(cache, "ab!") == 0
    check_cache(cache, [parent, child])

    cache.release(child, 2.0)
    assert cache.publish(parent, tokens("ab"), 2, 2.0) == 1
    assert cached(cache, "ab!") == 2
    check_cache(cache, [parent])


def test_a_lease_with_its_copy_still_to_run_cannot_be_forked() -> None:
    cache = build_cache(num_blocks=8, block_size=4)
    serve(cache, "abcdefgh")
    lease = acquire(cache, "abcdefgX")
    assert lease is not None
    with pytest.raises(InvariantError, match="fork of a lease whose copy has not run"):
        cache.fork(lease, 0.0)
    cache.copied(lease, 0.0)
    cache.fork(lease, 0.0)


def test_a_released_lease_cannot_be_forked() -> None:
    cache = build_cache(num_blocks=8, block_size=4)
    lease = hold(cache, "abc")
    cache.release(lease, 0.0)
    with pytest.raises(InvariantError, match="released"):
        cache.fork(lease, 0.0)


# Release (I4, I5, I8)


def test_released_blocks_are_cached_if_published_and_free_if_not() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    cache.release(hold(cache, "abcde"), 0.0)

    usage = cache.usage()
    assert usage.num_active_blocks == 0
    assert usage.num_cached_blocks == 2
    assert usage.num_free_blocks == 6
    check_cache(cache, [])


def test_a_second_release_raises_and_takes_nothing_from_others() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    lease = hold(cache, "abcd")
    other = hold(cache, "abcdef")
    cache.release(lease, 0.0)
    before = snapshot(cache)

    with pytest.raises(DoubleRelease, match="exactly once"):
        cache.release(lease, 1.0)

    assert snapshot(cache) == before
    check_cache(cache, [other])


def test_a_released_lease_neither_grows_nor_writes() -> None:
    """Its blocks may be somebody else's by now, and what it took would be lost."""
    cache = build_cache(num_blocks=8, block_size=2)
    lease = hold(cache, "abc")
    cache.release(lease, 0.0)
    heir = acquire(cache, "xy")
    assert heir is not None
    assert heir.table[0] == lease.table[1], "the heir got the block it had"

    with pytest.raises(InvariantError, match="released"):
        cache.prepare_write(lease, 3, 1.0)
    with pytest.raises(InvariantError, match="released"):
        cache.grow(lease, 8, 1.0)
    check_cache(cache, [heir])


def test_a_lost_lease_is_reported_and_frees_nobodys_blocks() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    kept = hold(cache, "abcd")
    hold(cache, "xyz")

    with pytest.raises(InvariantError, match="a lost lease|leases on node"):
        check_cache(cache, [kept])
    assert cache.usage().num_active_blocks == 4


def test_a_lost_unsharable_lease_is_reported_too() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    acquire(cache, "abcd", namespace=None)
    with pytest.raises(InvariantError, match="a lost lease shows here"):
        check_cache(cache, [])


def test_private_blocks_are_given_back_tail_first() -> None:
    cache = build_cache(num_blocks=8, block_size=1)
    lease = acquire(cache, "abcd")
    assert lease is not None
    held = list(lease.table.ids())

    cache.release(lease, 0.0)

    assert list(cache.pool.free_block_ids())[-4:] == held[::-1]


# Eviction (C9, I36)


def test_eviction_takes_tail_blocks_first() -> None:
    cache = build_cache(num_blocks=8, block_size=1)
    serve(cache, "abcd")

    found = []
    for _ in range(4):
        assert cache.evict(1, 0.0) == 1
        found.append(cached(cache, "abcd!"))
        check_cache(cache, [])
    assert found == [3, 2, 1, 0]


def test_eviction_takes_leaves_before_what_they_stand_on() -> None:
    """The stem is as old as its branches, yet it goes last."""
    cache = build_cache(num_blocks=8, block_size=1)
    for text in ("abcd", "abXY", "abcZ"):
        serve(cache, text)

    while cache.evict(1, 0.0):
        check_cache(cache, [])
        blocks = resident(cache)
        prefixes = {block.prefix for block in blocks}
        assert all(len(p) == 4 or p[:-4] in prefixes for p in prefixes)
    assert cache.usage().num_free_blocks == 8


def test_a_parent_can_go_once_its_last_child_is_gone() -> None:
    cache = build_cache(num_blocks=8, block_size=1)
    serve(cache, "abcd")
    serve(cache, "abXY")

    assert cache.evict(4, 0.0) == 4
    assert cached(cache, "ab!") == 2
    assert cache.evict(99, 0.0) == 2


def test_eviction_stops_at_what_leases_hold() -> None:
    cache = build_cache(num_blocks=8, block_size=1)
    lease = hold(cache, "ab")
    serve(cache, "abcd")

    assert cache.evict(99, 0.0) == 2
    assert cached(cache, "abcd") == 2
    check_cache(cache, [lease])


def test_evictions_are_told_with_the_owner_and_the_count() -> None:
    cache = build_cache(num_blocks=8, block_size=1)
    serve(cache, "abc", domain=BOB)
    sink = Sink()
    cache.subscribe(sink)

    assert cache.evict(2, 7.0) == 2
    assert cache.evict(0, 8.0) == 0

    assert sink.events == [
        BlocksEvicted(now=7.0, namespace=NAMESPACE, domain=BOB, block_ids=(1, 2))
    ]
    assert cache.usage().num_evicted_blocks == 2


def test_a_policy_that_hides_its_victims_is_a_defect_and_not_a_full_cache() -> None:
    class Miser(Lru):
        def victim(self, now: float) -> int | None:
            return None

    cache = build_cache(num_blocks=2, block_size=1, make_policy=Miser)
    serve(cache, "ab")
    with pytest.raises(InvariantError, match="1 available blocks could not be freed"):
        acquire(cache, "x")


def test_evicted_blocks_are_freed_tail_first() -> None:
    cache = build_cache(num_blocks=8, block_size=1)
    lease = hold(cache, "abcd")
    held = list(lease.table.ids())
    cache.release(lease, 0.0)

    cache.evict(3, 0.0)

    assert list(cache.pool.free_block_ids())[-3:] == held[:0:-1]


# What a policy is told (C9)


Heard = tuple[object, ...]


class Recorder(Lru):
    """An `Lru` that writes down what it hears, and may want keys."""

    def __init__(self, *, needs_keys: bool = False) -> None:
        super().__init__()
        self.needs_keys = needs_keys
        self.keys: list[int] = []
        self.ticks: list[int] = []
        self.heard: list[Heard] = []

    def num_alike(self, keys: Sequence[int]) -> int:
        self.heard.append(("num_alike", len(keys)))
        return super().num_alike(keys)

    def can_extend(self, node_id: int, keys: Sequence[int]) -> bool:
        self.heard.append(("can_extend", node_id, len(keys)))
        return super().can_extend(node_id, keys)

    def can_merge(self, upper_id: int, lower_id: int) -> bool:
        self.heard.append(("can_merge", upper_id, lower_id))
        return super().can_merge(upper_id, lower_id)

    def published(
        self,
        node_id: int,
        *,
        start: int,
        num_blocks: int,
        keys: Sequence[int],
        hint: int,
        tick: int,
        now: float,
    ) -> None:
        self.heard.append(("published", node_id, (start, num_blocks), hint, now))
        self.keys.extend(keys)
        self.ticks.append(tick)
        super().published(
            node_id,
            start=start,
            num_blocks=num_blocks,
            keys=keys,
            hint=hint,
            tick=tick,
            now=now,
        )

    def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
        self.heard.append(("used", node_id, hint, now))
        self.ticks.append(tick)
        super().used(node_id, hint=hint, tick=tick, now=now)

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        self.heard.append(("released", node_id, now))
        self.ticks.append(tick)
        super().released(node_id, tick=tick, now=now)

    def split(self, upper_id: int, lower_id: int, *, num_blocks: int) -> None:
        self.heard.append(("split", upper_id, lower_id, num_blocks))
        super().split(upper_id, lower_id, num_blocks=num_blocks)

    def merged(self, upper_id: int, lower_id: int) -> None:
        self.heard.append(("merged", upper_id, lower_id))
        super().merged(upper_id, lower_id)

    def became_evictable(self, node_id: int, *, now: float) -> None:
        self.heard.append(("became_evictable", node_id, now))
        super().became_evictable(node_id, now=now)

    def became_pinned(self, node_id: int) -> None:
        self.heard.append(("became_pinned", node_id))
        super().became_pinned(node_id)

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        self.heard.append(("dropped", node_id, num_left, may_return))
        super().dropped(node_id, num_left, may_return=may_return)

    def take(self) -> list[Heard]:
        heard, self.heard = self.heard, []
        return heard


def recorded(*, needs_keys: bool = False) -> tuple[PrefixCache, Recorder]:
    policy = Recorder(needs_keys=needs_keys)
    cache = build_cache(num_blocks=12, block_size=1, make_policy=lambda: policy)
    return cache, policy


def test_a_policy_hears_of_the_whole_life_of_a_prefix() -> None:
    cache, policy = recorded()

    lease = acquire(cache, "abc", now=1.0)
    assert lease is not None
    assert policy.take() == []
    cache.publish(lease, tokens("abc"), 2, 2.0)
    cache.publish(lease, tokens("abc"), 3, 3.0)
    assert lease.node is not None
    a = lease.node.id
    assert policy.take() == [
        ("published", a, (0, 2), 0, 2.0),
        ("can_extend", a, 0),
        ("published", a, (2, 1), 0, 3.0),
    ]
    cache.release(lease, 4.0)
    assert policy.take() == [("released", a, 4.0), ("became_evictable", a, 4.0)]
    lease = acquire(cache, "abc!", now=5.0)
    assert lease is not None
    assert policy.take() == [("became_pinned", a), ("used", a, 0, 5.0)]
    cache.release(lease, 6.0)
    policy.take()
    cache.evict(1, 7.0)
    assert policy.take() == [("dropped", a, 2, True)]
    cache.evict(2, 7.0)
    assert [each for each in policy.take() if each[0] == "dropped"] == [
        ("dropped", a, 0, True)
    ]


def test_a_policy_hears_of_splits_and_of_every_node_on_the_path() -> None:
    cache, policy = recorded()
    serve(cache, "abcd", now=1.0)
    policy.take()

    lease = acquire(cache, "abX!", now=2.0)
    assert lease is not None
    assert lease.node is not None
    (cd,) = [node.id for node in cache.tree.nodes() if node is not lease.node]
    ab = lease.node.id
    assert policy.take() == [("split", ab, cd, 2), ("used", ab, 0, 2.0)]
    cache.publish(lease, tokens("abX"), 3, 3.0)
    x = lease.node.id
    assert policy.take() == [("published", x, (2, 1), 0, 3.0)]
    cache.release(lease, 4.0)
    assert policy.take() == [
        ("released", ab, 4.0),
        ("released", x, 4.0),
        ("became_evictable", x, 4.0),
    ]


def test_a_policy_is_asked_before_a_split_is_undone() -> None:
    cache, policy = recorded()
    serve(cache, "abcd", now=1.0)
    (cd,) = [node.id for node in cache.tree.nodes()]
    short = acquire(cache, "ab!", now=2.0)
    assert short is not None
    assert short.node is not None
    ab = short.node.id
    policy.take()

    cache.release(short, 3.0)  # of other age than the rest now
    assert policy.take() == [("released", ab, 3.0), ("can_merge", ab, cd)]
    whole = acquire(cache, "abcd!", now=4.0)
    assert whole is not None
    cache.release(whole, 4.0)

    assert policy.take()[-3:] == [
        ("became_evictable", cd, 4.0),
        ("can_merge", ab, cd),
        ("merged", ab, cd),
    ]


def test_short_leases_do_not_leave_a_long_one_in_pieces_while_it_lasts() -> None:
    cache, _ = recorded()
    long = hold(cache, "abcdefgh")
    for length in (2, 3, 5, 6):
        short = acquire(cache, "abcdefgh"[:length] + "!")
        assert short is not None
        assert cache.tree.num_nodes == 2
        cache.release(short, 1.0)
        assert cache.tree.num_nodes == 1

    assert long.node is not None
    assert long.node.num_blocks == 8


def test_nodes_that_one_lease_uses_or_releases_have_one_tick_and_later_ones_more() -> (
    None
):
    cache, policy = recorded()
    serve(cache, "ab", now=1.0)
    assert policy.ticks == [2, 3]  # the first was the acquire, which found nothing
    serve(cache, "abcd", now=1.0)
    policy.ticks.clear()
    serve(cache, "abcd!", now=1.0)

    used, published, released = [5 + 2, 5 + 3, 5 + 4]
    assert policy.ticks[0] == used
    assert sorted(policy.ticks) == policy.ticks
    assert set(policy.ticks) == {used, published, released}


def test_the_tail_that_must_not_return_is_told_from_the_one_that_may() -> None:
    cache, policy = recorded()
    serve(cache, "ab", now=1.0)
    policy.take()

    cache.retire(NAMESPACE, 2.0)

    assert [each for each in policy.take() if each[0] == "dropped"] == [
        ("dropped", 2, 0, False)
    ]


def test_keys_say_which_blocks_are_the_same_ones_again() -> None:
    cache, policy = recorded(needs_keys=True)
    serve(cache, "abc", now=1.0)
    assert ("num_alike", 3) in policy.take()
    cache.evict(12, 2.0)
    serve(cache, "abd", now=3.0)
    first, second = policy.keys[:3], policy.keys[3:]
    assert first[:2] == second[:2]
    assert len(set(policy.keys)) == 4

    serve(cache, "abc", domain=BOB, now=4.0)
    serve(cache, "abc", namespace=OTHER_NAMESPACE, now=5.0)
    cache.retire(NAMESPACE, 6.0)
    serve(cache, "abc", now=7.0)
    assert len(set(policy.keys)) == 4 + 3 * 3


def test_a_key_is_the_same_however_the_blocks_before_it_were_published() -> None:
    cache, policy = recorded(needs_keys=True)
    lease = acquire(cache, "abcdef")
    assert lease is not None
    for num_computed in (1, 2, 4, 5, 6):
        cache.publish(lease, tokens("abcdef"), num_computed, 1.0)
    cache.release(lease, 2.0)
    piecemeal = policy.keys[:]
    cache.evict(12, 3.0)
    policy.keys.clear()

    serve(cache, "abcdef", now=4.0)

    assert policy.keys == piecemeal


def test_taking_over_a_published_block_is_a_use_of_it() -> None:
    cache, policy = recorded()
    late = acquire(cache, "abX", now=0.0)
    assert late is not None
    serve(cache, "ab", now=1.0)
    (ab,) = [node.id for node in cache.tree.nodes()]
    policy.take()

    cache.publish(late, tokens("abX"), 2, 2.0)

    assert policy.take() == [("became_pinned", ab), ("used", ab, 0, 2.0)]


# Isolation (I3): nobody sees another tenant's blocks


@pytest.mark.parametrize("stranger", [BOB, CREW, PUBLIC])
def test_another_domain_finds_nothing_and_the_same_domain_does(
    stranger: Domain,
) -> None:
    cache = build_cache(num_blocks=20, block_size=4)
    serve(cache, "abcdefghij", domain=ALICE)

    assert cached(cache, "abcdefghij", domain=ALICE) == 8
    assert cached(cache, "abcdefghij", domain=stranger) == 0
    assert cached(cache, "abcX", domain=ALICE) == 3
    assert cached(cache, "abcX", domain=stranger) == 0
    assert serve(cache, "abcdefghij", domain=stranger) == 0
    check_cache(cache, [])


def test_another_namespace_finds_nothing_and_the_same_one_does() -> None:
    cache = build_cache(num_blocks=20, block_size=4)
    serve(cache, "abcdefghij")

    assert cached(cache, "abcdefghij") == 8
    assert cached(cache, "abcdefghij", namespace=OTHER_NAMESPACE) == 0


def test_equal_prompts_of_two_tenants_are_not_merged_on_publish() -> None:
    cache = build_cache(num_blocks=20, block_size=2)
    alices = hold(cache, "abcd", domain=ALICE)
    bobs = hold(cache, "abcd", domain=BOB)

    assert set(alices.table.ids()).isdisjoint(bobs.table.ids())
    check_cache(cache, [alices, bobs])


def test_a_request_without_a_namespace_shares_with_nobody() -> None:
    cache = build_cache(num_blocks=20, block_size=2)
    serve(cache, "abcdef")
    lease = acquire(cache, "abcdef", namespace=None)
    assert lease is not None

    assert lease.num_matched_tokens == 0
    assert lease.node is None
    assert cache.publish(lease, tokens("abcdef"), 6, 0.0) == 0
    check_cache(cache, [lease])
    cache.release(lease, 0.0)
    assert cached(cache, "abcdef", namespace=None) == 0
    assert serve(cache, "abcdef", namespace=None) == 0
    assert cache.usage().num_cached_blocks == 3, "the sharable ones only"


# Public prefixes


def test_a_declared_prefix_is_shared_by_everybody_in_the_namespace() -> None:
    cache = build_cache(num_blocks=20, block_size=2)
    assert cache.declare_public(NAMESPACE, word("abcd")) == 2

    assert serve(cache, "abcdXY", domain=ALICE) == 0
    assert cached(cache, "abcdZ", domain=BOB) == 4
    assert cached(cache, "abcdZ", domain=CREW) == 4
    assert cached(cache, "abcdZ", domain=BOB, namespace=OTHER_NAMESPACE) == 0


def test_what_follows_a_public_prefix_stays_private() -> None:
    cache = build_cache(num_blocks=20, block_size=2)
    cache.declare_public(NAMESPACE, word("abcd"))
    serve(cache, "abcdXYZW", domain=ALICE)

    assert cached(cache, "abcdXYZW!", domain=ALICE) == 8
    assert cached(cache, "abcdXYZW!", domain=BOB) == 4
    check_cache(cache, [])


@pytest.mark.parametrize(
    "text, num_blocks", [("", 0), ("a", 0), ("abc", 0), ("abcd", 1), ("abcdefg", 1)]
)
def test_the_partly_covered_last_block_of_a_declaration_stays_private(
    text: str, num_blocks: int
) -> None:
    cache = build_cache(num_blocks=20, block_size=4)
    assert cache.declare_public(NAMESPACE, word(text)) == num_blocks
    serve(cache, "abcdefgh", domain=ALICE)

    assert cached(cache, "abcdefgh!", domain=ALICE) == 8
    assert cached(cache, "abcdefgh!", domain=BOB) == 4 * num_blocks


def test_a_prompt_that_leaves_the_declared_prefix_early_shares_up_to_there() -> None:
    cache = build_cache(num_blocks=20, block_size=2)
    cache.declare_public(NAMESPACE, word("abcdef"))
    serve(cache, "abcX12", domain=ALICE)

    assert cached(cache, "abcX12!", domain=ALICE) == 6
    assert cached(cache, "abcX12!", domain=BOB) == 2


def test_the_longest_of_several_declarations_counts() -> None:
    cache = build_cache(num_blocks=20, block_size=1)
    for text in ("ab", "abcd", "abXY", "z"):
        cache.declare_public(NAMESPACE, word(text))
        cache.declare_public(NAMESPACE, word(text))

    for text, expected in {"abcdef": 4, "abX!": 3, "b": 0, "zz": 1, "": 0}.items():
        assert cache.num_public_blocks(NAMESPACE, tokens(text)) == expected
        assert cache.num_public_blocks(OTHER_NAMESPACE, tokens(text)) == 0
        assert cache.num_public_blocks(None, tokens(text)) == 0


def test_declaring_a_prefix_again_changes_nothing() -> None:
    cache = build_cache(num_blocks=20, block_size=2)
    cache.declare_public(NAMESPACE, word("abcd"))
    before = snapshot(cache)

    assert cache.declare_public(NAMESPACE, word("abcd")) == 2
    assert cache.declare_public(NAMESPACE, word("abcde")) == 2
    assert snapshot(cache) == before


def test_blocks_published_before_the_declaration_keep_their_owner() -> None:
    cache = build_cache(num_blocks=20, block_size=1)
    serve(cache, "abcd", domain=ALICE)
    cache.declare_public(NAMESPACE, word("ab"))

    assert cached(cache, "ab!", domain=BOB) == 0
    assert serve(cache, "abX", domain=ALICE) == 2
    assert cached(cache, "ab!", domain=BOB) == 0, "below a private block"
    serve(cache, "abY", domain=BOB)
    assert cached(cache, "ab!", domain=CREW) == 2
    check_cache(cache, [])


def test_what_a_request_generates_is_private_although_it_spells_a_declaration() -> None:
    """Only the prompt is compared: an answer is the tenant's, whatever it says."""
    cache = build_cache(num_blocks=20, block_size=1)
    cache.declare_public(NAMESPACE, word("abcd"))
    lease = hold(cache, "ab", domain=ALICE)
    assert cache.grow(lease, 4, 0.0)
    cache.publish(lease, tokens("abcd"), 4, 0.0)

    assert cached(cache, "abcd!", domain=ALICE) == 4
    assert cached(cache, "abcd!", domain=BOB) == 2


def test_a_lease_knows_in_which_domain_its_next_block_will_be() -> None:
    cache = build_cache(num_blocks=40, block_size=1)
    serve(cache, "xy", domain=ALICE)
    for text in ("ab", "xyz"):
        cache.declare_public(NAMESPACE, word(text))
    public = acquire(cache, "abcd", domain=ALICE)
    below_private = acquire(cache, "xyz!", domain=ALICE)
    others = acquire(cache, "xyz!", domain=BOB)
    alone = acquire(cache, "abcd", namespace=None)
    leases = [public, below_private, others, alone]
    assert None not in leases

    def domains(index: int) -> list[Domain | None]:
        return [cache.domain_of_next(lease, index) for lease in leases if lease]

    assert domains(1) == [PUBLIC, ALICE, PUBLIC, None]
    assert domains(2) == [ALICE, ALICE, PUBLIC, None]
    assert domains(3) == [ALICE, ALICE, BOB, None]
    cache.retire(NAMESPACE, 1.0)
    assert domains(1) == [None, None, None, None]


# Retiring a namespace (I9, I32)


def test_nothing_of_a_retired_namespace_can_be_matched_at_once() -> None:
    cache = build_cache(num_blocks=20, block_size=2)
    cache.declare_public(NAMESPACE, word("ab"))
    lease = hold(cache, "abcdef")
    serve(cache, "abcdXY")
    serve(cache, "abcdef", namespace=OTHER_NAMESPACE)

    cache.retire(NAMESPACE, 1.0)

    for text in ("abcdef!", "abcdXY!", "abc", "ab!"):
        assert cached(cache, text) == 0
    assert cached(cache, "abcdef!", namespace=OTHER_NAMESPACE) == 6
    check_cache(cache, [lease])


def test_cached_blocks_are_freed_by_retiring_and_active_ones_by_their_leases() -> None:
    cache = build_cache(num_blocks=20, block_size=2)
    serve(cache, "abcdXY")
    leases = [hold(cache, "abcdef"), hold(cache, "abcd")]

    assert cache.retire(NAMESPACE, 1.0) == 3
    assert cache.usage().num_cached_blocks == 0
    assert cache.usage().num_active_blocks == 3
    check_cache(cache, leases)

    cache.release(leases[0], 2.0)
    assert cache.usage().num_free_blocks == 18
    check_cache(cache, leases[1:])
    cache.release(leases[1], 3.0)
    assert cache.usage().num_free_blocks == 20
    assert cache.tree.retired_roots() == ()
    check_cache(cache, [])


def test_nothing_is_published_across_the_fence() -> None:
    cache = build_cache(num_blocks=20, block_size=2)
    in_flight = hold(cache, "abcd")
    cold = acquire(cache, "xyzw")
    assert cold is not None
    fork = cache.fork(in_flight, 0.0)
    cache.retire(NAMESPACE, 1.0)

    for lease, text in ((in_flight, "abcdef"), (cold, "xyzw"), (fork, "abcdgh")):
        assert cache.grow(lease, 6, 2.0)
        assert cache.publish(lease, tokens(text), len(text), 2.0) == 0
        assert cached(cache, text + "!") == 0
    check_cache(cache, [in_flight, cold, fork])


def test_a_retired_name_starts_empty_when_it_is_used_again() -> None:
    cache = build_cache(num_blocks=20, block_size=2)
    old = hold(cache, "abcd")
    cache.retire(NAMESPACE, 1.0)
    new = hold(cache, "abcdef")

    assert new.num_matched_tokens == 0
    assert cached(cache, "abcdef!") == 6
    assert cache.publish(old, tokens("abcd"), 4, 2.0) == 0
    check_cache(cache, [old, new])
    cache.release(old, 3.0)
    assert cached(cache, "abcdef!") == 6
    check_cache(cache, [new])


def test_the_source_of_a_copy_outlives_the_fence_until_it_is_copied() -> None:
    cache = build_cache(num_blocks=20, block_size=4)
    serve(cache, "abcdefgh")
    lease = acquire(cache, "abcdefgX")
    assert lease is not None
    assert lease.copy is not None
    source = lease.copy.source

    assert cache.retire(NAMESPACE, 1.0) == 2
    assert cache.pool.state(source) is BlockState.PUBLISHED
    check_cache(cache, [lease])
    cache.copied(lease, 2.0)
    assert cache.pool.state(source) is BlockState.FREE
    check_cache(cache, [lease])


def test_retiring_twice_or_in_vain_is_harmless() -> None:
    cache = build_cache(num_blocks=20, block_size=2)
    serve(cache, "abcd")

    assert cache.retire(OTHER_NAMESPACE, 0.0) == 0
    assert cached(cache, "abcd!") == 4
    assert [cache.retire(NAMESPACE, 1.0), cache.retire(NAMESPACE, 2.0)] == [0, 0]
    assert cache.usage().num_free_blocks == 20


def test_declarations_end_with_their_namespace() -> None:
    cache = build_cache(num_blocks=20, block_size=2)
    cache.declare_public(NAMESPACE, word("abcd"))
    cache.retire(NAMESPACE, 0.0)
    assert cache.num_public_blocks(NAMESPACE, tokens("abcd")) == 0


# Numbers


def test_the_peak_is_the_most_blocks_ever_held() -> None:
    cache = build_cache(num_blocks=20, block_size=1)
    first = hold(cache, "abcd")
    second = hold(cache, "abXY")
    cache.release(first, 1.0)
    cache.release(second, 2.0)
    hold(cache, "z")

    usage = cache.usage()
    assert usage.peak_active_blocks == 6
    assert usage.num_active_blocks == 1


def test_the_peak_counts_blocks_that_a_publish_pins() -> None:
    """The fork keeps our own `d` alive while we move over to the published one."""
    cache = build_cache(num_blocks=20, block_size=1)
    serve(cache, "abcd")
    parent = acquire(cache, "abcd")  # may match `abc` only, and computes `d` again
    assert parent is not None
    cache.copied(parent, 0.0)
    child = cache.fork(parent, 0.0)

    cache.publish(parent, tokens("abcd"), 4, 1.0)

    usage = cache.usage()
    assert usage.num_active_blocks == 5
    assert usage.peak_active_blocks == 5
    check_cache(cache, [parent, child])


def test_equal_calls_give_equal_states() -> None:
    def history() -> dict[str, object]:
        cache = build_cache(num_blocks=10, block_size=2)
        cache.declare_public(NAMESPACE, word("ab"))
        leases = [hold(cache, text) for text in ("abcdef", "abcdXY", "abZ")]
        for lease in leases[::2]:
            cache.release(lease, 1.0)
        cache.evict(1, 2.0)
        serve(cache, "qwertyuiop", domain=BOB, now=3.0)
        return snapshot(cache)

    assert history() == history()


@pytest.mark.parametrize("field", ["num_blocks", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8", None])
def test_sizes_that_make_no_sense_are_refused_by_name(
    field: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be .* got "):
        CacheConfig(**({"num_blocks": 1} | {field: value}))  # type: ignore[arg-type]


# Costs, as counts of calls


def round_trip_calls(num_cached: int) -> int:
    """One warm request with its eviction, among many other cached prefixes."""
    cache = build_cache(num_blocks=2 * num_cached + 4, block_size=2)
    for i in range(num_cached):
        serve(cache, chr(1000 + i) + "abc", now=float(i))
    serve(cache, "wxyz", now=1e6)

    def serve_warm() -> None:
        serve(cache, "wxyz1234", now=2e6)
        serve(cache, "5678wxyz", now=3e6)

    return count_calls(serve_warm)


def test_serving_costs_the_same_among_ten_and_four_thousand_cached_prefixes() -> None:
    assert round_trip_calls(4000) <= round_trip_calls(10) + 8


def test_serving_a_long_prompt_takes_no_call_per_block() -> None:
    def calls(num_blocks: int) -> int:
        cache = build_cache(num_blocks=num_blocks + 8, block_size=2)
        text = "ab" * num_blocks
        serve(cache, text)
        prompt = tokens(text + "!")
        acquired = []

        def act() -> None:
            acquired.append(
                cache.acquire(
                    NAMESPACE, ALICE, prompt, Demand(num_slots=len(text) + 1), now=1.0
                )
            )

        counted = count_calls(act)
        assert acquired[0] is not None
        assert acquired[0].num_matched_tokens == len(text)
        return counted

    assert calls(4000) == calls(4)


def test_leases_that_cut_an_edge_and_publish_nothing_leave_no_cut_behind() -> None:
    """Else short requests could make everybody else's matches slow for good."""
    text = "".join(chr(1000 + i) for i in range(100))
    cache = build_cache(num_blocks=400, block_size=1)
    serve(cache, text)
    prompt = tokens(text)

    def calls() -> int:
        return count_calls(lambda: cache.peek(NAMESPACE, ALICE, prompt))

    before = calls()
    cutters = []
    for length in range(1, 99):
        lease = acquire(cache, text[:length] + "!")
        assert lease is not None
        cutters.append(lease)
    assert calls() > before, "as long as they last, they have to"
    for lease in cutters[::2] + cutters[1::2]:
        cache.release(lease, 1.0)
        check_cache(cache, [each for each in cutters if not each.is_released])

    # What the longest one used is of one age, and the rest of another.
    assert sorted(node.num_blocks for node in cache.tree.nodes()) == [2, 98]
    serve(cache, text + "!", now=2.0)
    cache.evict(1, 2.0)  # the `!`
    assert cache.tree.num_nodes == 1
    assert calls() == before


@pytest.mark.parametrize("ending", ["reader", "copier"])
def test_a_cut_stays_as_long_as_a_lease_ends_there(ending: str) -> None:
    cache = build_cache(num_blocks=40, block_size=2)
    serve(cache, "abcdefgh")
    reader = acquire(cache, "abcd!")  # ends behind `cd`
    copier = acquire(cache, "abcdeX")  # as well, and copies from `ef` below it
    assert reader is not None
    assert copier is not None
    first, last = (reader, copier) if ending == "reader" else (copier, reader)

    cache.release(first, 1.0)
    assert cache.tree.num_nodes == 2
    check_cache(cache, [last])
    cache.copied(last, 2.0)
    assert cache.tree.num_nodes == 2
    check_cache(cache, [last])
    cache.release(last, 3.0)
    assert cache.tree.num_nodes == 2, "the source was not used as long as the rest"
    check_cache(cache, [])
    serve(cache, "abcdefgh", now=4.0)
    assert cache.tree.num_nodes == 1
    check_cache(cache, [])


def test_asking_how_much_is_in_use_costs_the_same_whatever_is_resident() -> None:
    def calls(num_cached: int) -> int:
        cache = build_cache(num_blocks=num_cached, block_size=1)
        for i in range(num_cached):
            serve(cache, chr(1000 + i))
        return count_calls(cache.usage)

    assert calls(2000) == calls(2)


@pytest.mark.parametrize("seed", range(20))
def test_of_many_declared_prefixes_the_longest_common_one_counts(seed: int) -> None:
    rng = random.Random(seed)
    cache = build_cache(num_blocks=8, block_size=2)
    declared = []
    for _ in range(40):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(2, 12)))
        cache.declare_public(NAMESPACE, word(text))
        declared.append(text[: len(text) // 2 * 2])

    for _ in range(100):
        asked = "".join(rng.choice("ab") for _ in range(rng.randint(1, 14)))
        longest = max(
            max(n for n in range(len(asked) + 1) if each.startswith(asked[:n]))
            for each in declared
        )
        assert cache.num_public_blocks(NAMESPACE, tokens(asked)) == longest // 2


# What may come in


WRONG_TOKENS = [
    b"12345",
    "text",
    [1, 2],
    array("q", [1, 2]),
    bytearray(8),
    None,
]
WRONG_NAMESPACES = ["n" * 32, b"abc", b"", bytearray(32), 7]
WRONG_DOMAINS = ["alice", b"alice", None, DomainKind.PRIVATE]
WRONG_TIMES = [math.nan, math.inf, -math.inf, "1", None, True]


def asked(
    cache: PrefixCache,
    *,
    namespace: object = NAMESPACE,
    domain: object = ALICE,
    prompt: object = b"",
    now: object = 0.0,
) -> list[Callable[[], object]]:
    """Every verb and question that takes these from outside."""
    ids: Any = prompt or tokens("abcd")
    where: Any = namespace
    who: Any = domain
    when: Any = now
    prefix: Any = prompt or TokenIds(tokens("abcd"))
    demand = Demand(num_slots=8)
    return [
        lambda: cache.acquire(where, who, ids, demand, now=when),
        lambda: cache.keep(where, who, prefix, until=1.0, now=when),
        lambda: cache.peek(where, who, ids),
        lambda: cache.num_missing_blocks(where, who, ids, demand),
        lambda: cache.num_public_blocks(where, ids),
        lambda: cache.declare_public(where, prefix),
        lambda: cache.retire(where, when),
        lambda: cache.end_session(who, "s", when),
        lambda: cache.evict(1, when),
    ]


@pytest.mark.parametrize(
    ("field", "wrong", "error", "verbs"),
    [("prompt", each, TokenOutOfRange, (0, 1, 2, 3, 4, 5)) for each in WRONG_TOKENS]
    + [
        ("namespace", each, RequestError, (0, 1, 2, 3, 4, 5, 6))
        for each in WRONG_NAMESPACES
    ]
    + [("domain", each, RequestError, (0, 1, 2, 3, 7)) for each in WRONG_DOMAINS]
    + [("now", each, RequestError, (0, 1, 6, 7, 8)) for each in WRONG_TIMES],
    ids=repr,
)
def test_what_has_a_wrong_type_is_refused_at_the_door_and_changes_nothing(
    field: str, wrong: Any, error: type[RequestError], verbs: tuple[int, ...]
) -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    serve(cache, "abcd")
    before = snapshot(cache)

    for number in verbs:
        if field == "prompt" and wrong is None:
            continue
        with pytest.raises(error):
            asked(cache, **{field: wrong})[number]()
        assert snapshot(cache) == before, number

    for act in asked(cache):  # the same with what is right
        act()


@pytest.mark.parametrize("wrong", WRONG_TIMES, ids=repr)
def test_a_lease_takes_no_time_that_is_none(wrong: Any) -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    serve(cache, "abcdef")
    lease = acquire(cache, "abcdeX", num_slots=8)
    assert lease is not None
    before = snapshot(cache)

    for act in (
        lambda: cache.copied(lease, wrong),
        lambda: cache.grow(lease, 9, wrong),
        lambda: cache.prepare_write(lease, 5, wrong),
        lambda: cache.publish(lease, tokens("abcdeX"), 6, wrong),
        lambda: cache.fork(lease, wrong),
        lambda: cache.release(lease, wrong),
    ):
        with pytest.raises(RequestError, match="now"):
            act()
        assert snapshot(cache) == before
    cache.release(lease, 0.0)
    with pytest.raises(RequestError, match="now"):
        cache.forget(lease, wrong)


def test_no_more_is_published_than_was_given_and_has_slots() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    lease = acquire(cache, "abcd")
    assert lease is not None

    for text, num_computed in (("abcd", 5), ("abcdef", 6)):
        with pytest.raises(InvariantError, match=f"publish of {num_computed} computed"):
            cache.publish(lease, tokens(text), num_computed, 0.0)
    with pytest.raises(InvariantError, match="behind a table of 2 blocks"):
        cache.prepare_write(lease, 4, 0.0)

    assert cache.publish(lease, tokens("abcdef"), 4, 0.0) == 2


def test_token_ids_are_taken_where_tokens_are_meant() -> None:
    cache = build_cache(num_blocks=8, block_size=2)
    text = TokenIds(tokens("abcdef"))
    lease = cache.acquire(NAMESPACE, ALICE, text, Demand(num_slots=6), now=0.0)
    assert lease is not None

    assert cache.publish(lease, text, 6, 0.0) == 3
    assert cache.peek(NAMESPACE, ALICE, text).num_tokens == 5
    assert cache.num_missing_blocks(NAMESPACE, ALICE, text, Demand(num_slots=6)) == 0
    assert cache.num_public_blocks(NAMESPACE, text) == 0


# Occupancy in tokens


def test_a_prompt_of_a_block_and_a_token_fills_little_more_than_half_its_slots() -> (
    None
):
    cache = build_cache(num_blocks=16, block_size=16)
    for number in range(8):
        assert acquire(cache, chr(65 + number) * 17) is not None

    usage = cache.usage()

    assert (usage.num_active_tokens, usage.num_total_tokens) == (136, 256)
    assert (usage.num_active_blocks, usage.num_cached_tokens) == (16, 0)


def test_tokens_are_counted_by_slots_asked_for_and_once_where_they_are_shared() -> None:
    cache = build_cache(num_blocks=8, block_size=4)
    lease = acquire(cache, "abcdef")
    assert lease is not None

    def active() -> int:
        return cache.usage().num_active_tokens

    assert active() == 6
    assert cache.grow(lease, 7, 0.0)
    assert active() == 7
    assert cache.grow(lease, 6, 0.0)  # a table never shrinks
    assert active() == 7
    cache.publish(lease, tokens("abcdef"), 6, 0.0)
    twin = cache.fork(lease, 0.0)
    assert active() == 7
    assert cache.grow(twin, 8, 0.0)
    assert active() == 8
    cache.prepare_write(twin, 7, 0.0)
    assert active() == 4 + 3 + 4
    cache.release(twin, 0.0)
    assert active() == 7
    cache.release(lease, 0.0)
    usage = cache.usage()
    assert (usage.num_active_tokens, usage.num_cached_tokens) == (0, 4)


# Watchers


def test_a_watcher_hears_each_thing_once_and_pays_for_nothing_else() -> None:
    heard: list[tuple[object, ...]] = []

    class Curious(LeaseWatcher):
        def split(self, upper: Node, lower: Node, now: float) -> None:
            heard.append(("split", upper.num_blocks, lower.num_blocks, now))

        def merged(self, upper: Node, lower: Node, now: float) -> None:
            heard.append(("merged", lower.num_blocks, now))

        def freed(self, owner: str, num_blocks: int, now: float) -> None:
            heard.append(("freed", owner, num_blocks, now))

        def trimmed(
            self, node: Node, block_ids: array[int], reason: DropReason, now: float
        ) -> None:
            heard.append(("trimmed", list(block_ids), reason, now))

    cache = build_cache(num_blocks=8, block_size=1)
    unheard = {
        event: getattr(cache.residency.audience, event)
        for event in ("added", "extended", "pinned", "unpinned", "used", "allocated")
    }
    cache.watch(Curious())
    serve(cache, "abcd", now=1.0)
    serve(cache, "abX", now=2.0)
    cache.evict(1, 3.0)

    assert heard == [
        ("freed", "alice", 0, 1.0),
        ("split", 2, 2, 2.0),
        ("freed", "alice", 0, 2.0),
        ("trimmed", [3], DropReason.EVICTED, 3.0),
    ]
    assert unheard == {
        event: getattr(cache.residency.audience, event) for event in unheard
    }
