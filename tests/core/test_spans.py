"""Spans: ids that carry a whole digest, and matches that never end where they don't.

What goes wrong where ids of two contents agree is in `test_collisions`.
"""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.core import PrefixCache, TokenIds
from stemkv.core.check import check_cache
from stemkv.core.prefix.cache import Peek
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.table import Lease
from stemkv.core.prefix.tokens import (
    MIN_SPAN_TOKENS,
    TOKEN_BYTES,
    Span,
    end_outside_span,
)
from stemkv.errors import RequestError, TokenOutOfRange
from tests.core.builders import (
    ALICE,
    BOB,
    NAMESPACE,
    Prompt,
    build_cache,
    count_calls,
    span,
)
from tests.core.scheduling import SPAN_TOKENS, Driver
from tests.core.scheduling import tokens as letters_and_spans

DIGEST = bytes(range(32))
# Ids of a span of 12 positions with this digest. If this changes, what other processes
# and older files call the same content is lost.
GOLDEN = (
    "c76ff9960a0f82fd500f7ed7f1787ac9e4ddfbd3e223cdf7"
    "16f5bbf5850dcef0d1cad6d2655e68e6cc720dc41aedc9e1"
)


def ids_of(span_or_tokens: Span | TokenIds) -> list[int]:
    buffer = (
        span_or_tokens.ids()
        if isinstance(span_or_tokens, Span)
        else span_or_tokens.buffer
    )
    return list(struct.unpack(f"<{len(buffer) // TOKEN_BYTES}i", buffer))


def documented_ids(digest: bytes, num_tokens: int) -> list[int]:
    """What the module says, word by word."""
    source = b"stemkv-span\0" + num_tokens.to_bytes(8, "big") + digest
    stream = hashlib.shake_256(source).digest(4 * num_tokens)
    ids = []
    for position in range(num_tokens):
        word = int.from_bytes(stream[4 * position : 4 * position + 4], "little")
        start = 1 if position == 0 else 0
        ids.append(~(start << 30 | word % 2**30))
    return ids


# Virtual ids


def test_the_golden_span_has_not_moved() -> None:
    assert Span(digest=DIGEST, num_tokens=12).ids().hex() == GOLDEN


@pytest.mark.parametrize("hash_seed", ["0", "1", "424242", "random"])
def test_every_process_gives_the_same_ids(hash_seed: str) -> None:
    program = (
        "from stemkv.core.prefix.tokens import Span, TokenIds\n"
        "span = Span(digest=bytes(range(32)), num_tokens=12)\n"
        "print(TokenIds.from_parts([span]).buffer.hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.strip() == GOLDEN


digests = st.binary(min_size=32, max_size=32)
lengths = st.integers(MIN_SPAN_TOKENS, 40)


@given(digests, lengths)
def test_ids_are_what_the_module_says(digest: bytes, num_tokens: int) -> None:
    span = Span(digest=digest, num_tokens=num_tokens)
    assert ids_of(span) == documented_ids(digest, num_tokens)


@given(digests, lengths)
def test_ids_are_negative_and_only_the_first_is_a_start(
    digest: bytes, num_tokens: int
) -> None:
    ids = ids_of(Span(digest=digest, num_tokens=num_tokens))

    assert len(ids) == num_tokens
    assert all(-(2**31) <= each < 0 for each in ids)
    assert [bool(~each & 1 << 30) for each in ids] == [True] + [False] * (len(ids) - 1)


def first_nine(span: Span) -> bytes:
    return span.ids()[: MIN_SPAN_TOKENS * TOKEN_BYTES]


@given(digests, lengths, st.integers(0, 255))
def test_one_bit_of_the_digest_changes_the_ids_everywhere(
    digest: bytes, num_tokens: int, bit: int
) -> None:
    flipped = int.from_bytes(digest, "big") ^ 1 << bit
    one = Span(digest=digest, num_tokens=num_tokens)
    other = Span(digest=flipped.to_bytes(32, "big"), num_tokens=num_tokens)

    # Each position has 30 bits of its own; that even two of nine agree is a chance of
    # one in 10 ** 16, that all agree is no chance at all.
    same = [a == b for a, b in zip(ids_of(one), ids_of(other), strict=True)]
    assert sum(same[:MIN_SPAN_TOKENS]) <= 1


@given(digests, lengths, lengths)
def test_another_length_of_the_same_content_is_another_span(
    digest: bytes, first: int, second: int
) -> None:
    one = Span(digest=digest, num_tokens=first)
    other = Span(digest=digest, num_tokens=second)
    assert (first_nine(one) == first_nine(other)) == (first == second)


def test_nine_positions_carry_more_bits_than_the_digest_has() -> None:
    """30 bits each, so no content is narrowed on its way into the ids."""
    assert MIN_SPAN_TOKENS * 30 >= 256 > (MIN_SPAN_TOKENS - 1) * 30
    for position in range(MIN_SPAN_TOKENS):
        seen_ones = seen_zeros = 0
        for number in range(64):
            bits = ~ids_of(span(str(number)))[position] & 2**30 - 1
            seen_ones |= bits
            seen_zeros |= ~bits
        assert seen_ones & 2**30 - 1 == seen_zeros & 2**30 - 1 == 2**30 - 1


@pytest.mark.parametrize(
    "digest",
    [b"", DIGEST[:31], DIGEST + b"\0", DIGEST[:16], DIGEST[:8], bytes(64)]
    + [DIGEST.hex(), bytearray(DIGEST), memoryview(DIGEST), 7, None],
    ids=lambda digest: f"{type(digest).__name__}-{getattr(digest, '__len__', int)()}",
)
def test_a_digest_of_another_length_or_type_is_refused_and_never_narrowed(
    digest: bytes,
) -> None:
    with pytest.raises(RequestError, match="32 bytes of SHA-256") as error:
        Span(digest=digest, num_tokens=16)
    assert error.value.field == "spans"


@pytest.mark.parametrize("num_tokens", [8, 1, 0, -9, 9.0, "9", None, True])
def test_a_span_too_short_for_its_digest_is_refused(num_tokens: int) -> None:
    with pytest.raises(RequestError, match="at least 9 positions") as error:
        Span(digest=DIGEST, num_tokens=num_tokens)
    assert error.value.field == "spans"


# Nobody but `from_parts` makes them


def refused_ways(ids: list[int]) -> list[Callable[[], object]]:
    packed = struct.pack(f"<{len(ids)}i", *ids)
    return [
        lambda: TokenIds(packed),
        lambda: TokenIds(bytearray(packed)),  # type: ignore[arg-type]
        lambda: TokenIds.from_ids(ids),
        lambda: TokenIds.from_ids(iter(ids)),
        lambda: TokenIds.from_buffer(packed),
        lambda: TokenIds.from_buffer(bytearray(packed)),
        lambda: TokenIds.from_buffer(memoryview(packed)),
        lambda: TokenIds.from_buffer(array("i", ids)),
        lambda: TokenIds.from_buffer(array("q", ids)),
        lambda: TokenIds.from_ids([each % 2**32 for each in ids]),
        lambda: TokenIds.from_buffer(array("Q", [each % 2**64 for each in ids])),
        lambda: TokenIds.from_buffer(array("I", [each % 2**32 for each in ids])),
    ]


@pytest.mark.parametrize("way", range(12))
@pytest.mark.parametrize("num_before", [0, 1, 5])
def test_a_callers_numbers_cannot_pose_as_media(way: int, num_before: int) -> None:
    ids = [7] * num_before + ids_of(Span(digest=DIGEST, num_tokens=12))
    with pytest.raises(TokenOutOfRange):
        refused_ways(ids)[way]()


def test_parts_are_joined_in_the_order_given() -> None:
    cat, dog = span("cat", 9), span("dog", 20)
    text = TokenIds.from_ids([1, 2, 3])

    joined = TokenIds.from_parts([text, cat, dog, text])

    assert ids_of(joined) == [1, 2, 3, *ids_of(cat), *ids_of(dog), 1, 2, 3]
    assert joined.buffer == text.buffer + cat.ids() + dog.ids() + text.buffer
    assert len(joined) == 3 + 9 + 20 + 3
    assert list(joined) == ids_of(joined)
    assert joined.has_spans


def test_parts_may_themselves_have_parts() -> None:
    cat, text = span("cat"), TokenIds.from_ids([1, 2])
    inner = TokenIds.from_parts([text, cat])

    assert TokenIds.from_parts([inner, text]).has_spans
    assert TokenIds.from_parts([inner, text]) == TokenIds.from_parts([text, cat, text])


def test_text_alone_has_no_spans_however_it_is_made() -> None:
    text = TokenIds.from_ids([1, 2])
    joined = TokenIds.from_parts([text, text])

    assert not joined.has_spans
    assert joined == TokenIds.from_ids([1, 2, 1, 2])
    assert not TokenIds.from_parts([]).has_spans
    assert len(TokenIds.from_parts([])) == 0


def test_joining_does_not_change_the_parts() -> None:
    text = TokenIds.from_ids([1, 2])
    TokenIds.from_parts([text, span("cat")])
    assert (list(text), text.has_spans) == ([1, 2], False)


def test_equal_content_at_equal_places_makes_equal_tokens() -> None:
    one = TokenIds.from_parts([TokenIds.from_ids([1]), span("cat")])
    same = TokenIds.from_parts([TokenIds.from_ids([1]), span("cat")])
    other = TokenIds.from_parts([TokenIds.from_ids([1]), span("dog")])

    assert one == same
    assert hash(one) == hash(same)
    assert one != other


def test_a_split_in_two_is_not_the_whole() -> None:
    """Where one span ends and the next begins is part of the ids."""
    whole = TokenIds.from_parts([span("cat", 18)])
    halves = TokenIds.from_parts([span("cat", 9), span("cat", 9)])
    assert whole != halves


def test_virtual_ids_are_no_part_of_any_vocabulary() -> None:
    prompt = TokenIds.from_parts([TokenIds.from_ids([1]), span("cat")])

    prompt.check_vocabulary(2)
    with pytest.raises(TokenOutOfRange, match="token id 1 at position 0"):
        prompt.check_vocabulary(1)


def test_no_representation_shows_a_digest_or_an_id() -> None:
    prompt = TokenIds.from_parts([span("cat", 12)])
    assert repr(prompt) == "TokenIds(<12 tokens>)"


# Where a match may end


def naive_end(pieces: list[int | None], num_tokens: int) -> int:
    """The definition, by where spans are and not by how they look."""
    lengths = [1 if piece is None else piece for piece in pieces]
    starts = accumulate(lengths[:-1], initial=0)
    for piece, start in zip(pieces, starts, strict=bool(pieces)):
        if piece is not None and start < num_tokens < start + MIN_SPAN_TOKENS:
            return start
    return num_tokens


def build_tokens(pieces: list[int | None]) -> TokenIds:
    """A letter for every `None` and a span for every length."""
    return TokenIds.from_parts(
        TokenIds.from_ids([i]) if piece is None else span(str(i), piece)
        for i, piece in enumerate(pieces)
    )


# Letters and spans, spans often side by side and often as short as can be.
pieces = st.lists(st.none() | st.sampled_from([9, 9, 10, 11, 17, 30]), max_size=8)


@given(pieces)
def test_ends_are_those_of_the_definition_at_every_position(
    pieces: list[int | None],
) -> None:
    tokens = build_tokens(pieces)
    for num_tokens in range(len(tokens) + 1):
        expected = naive_end(pieces, num_tokens)
        assert end_outside_span(tokens.buffer, num_tokens) == expected


@given(pieces, st.integers(0, 60))
def test_what_follows_an_end_does_not_move_it(
    pieces: list[int | None], num_after: int
) -> None:
    tokens = build_tokens(pieces)
    num_tokens = max(0, len(tokens) - num_after)
    cut = tokens.buffer[: num_tokens * TOKEN_BYTES]

    end = end_outside_span(tokens.buffer, num_tokens)

    assert end_outside_span(cut, num_tokens) == end
    assert end <= num_tokens
    assert end_outside_span(tokens.buffer, end) == end, "an end is an end"


def test_the_cost_of_an_end_does_not_grow_with_the_prompt() -> None:
    short, long = (
        TokenIds.from_parts([TokenIds.from_ids(range(n)), span("cat", 5 * n)]).buffer
        for n in (10, 10_000)
    )
    num_short = count_calls(lambda: end_outside_span(short, 45))
    num_long = count_calls(lambda: end_outside_span(long, 45_000))
    assert num_long == num_short


# The cache: matches


def take(
    cache: PrefixCache,
    prompt: Prompt,
    *,
    num_computed: int | None = None,
    domain: object = ALICE,
    now: float = 0.0,
) -> Lease:
    """Acquire, compute (so many tokens) and publish."""
    lease = cache.acquire(
        NAMESPACE,
        domain,  # type: ignore[arg-type]
        prompt.ids,
        Demand(num_slots=len(prompt)),
        now=now,
    )
    assert lease is not None, "the test's cache is too small"
    cache.copied(lease, now)
    if num_computed is None:
        num_computed = len(prompt)
    cache.publish(lease, prompt.ids, num_computed, now)
    return lease


def serve(cache: PrefixCache, prompt: Prompt, **how: object) -> int:
    lease = take(cache, prompt, **how)  # type: ignore[arg-type]
    cache.release(lease, 0.0)
    check_cache(cache, [])
    return lease.num_matched_tokens


@pytest.mark.parametrize("block_size", range(1, 17))
@pytest.mark.parametrize("num_before", [0, 1, 3, 4, 7, 8, 9, 16])
def test_an_equal_span_is_reused_as_far_as_it_can_be(
    block_size: int, num_before: int
) -> None:
    cache = build_cache(num_blocks=200, block_size=block_size)
    prompt = Prompt("t" * num_before, span("cat", 20), "ab")

    assert serve(cache, prompt) == 0

    num_published = len(prompt) // block_size * block_size
    if num_before < num_published < num_before + MIN_SPAN_TOKENS:
        num_published = num_before // block_size * block_size
    assert serve(cache, prompt) == min(len(prompt) - 1, num_published)


@pytest.mark.parametrize("block_size", range(1, 17))
@pytest.mark.parametrize("num_common", range(21))
def test_a_match_ends_nine_positions_into_a_span_or_before_it(
    block_size: int, num_common: int
) -> None:
    """What was published ends inside the span, where a tail of it was evicted."""
    cache = build_cache(num_blocks=200, block_size=block_size)
    prompt = Prompt("tttt", span("cat", 20), "a")
    serve(cache, prompt)
    num_blocks = cache.usage().num_cached_blocks
    kept = min(num_blocks, (4 + num_common) // block_size)
    cache.evict(num_blocks - kept, 0.0)

    found = cache.peek(NAMESPACE, ALICE, prompt.ids)

    end = min(len(prompt) - 1, kept * block_size)
    if end <= 4 or end >= 13:
        assert found == Peek(end, end // block_size)
    else:  # of the letters as many as are left, in a block of their own or not
        assert 4 // block_size * block_size <= found.num_tokens <= 4
        assert found.num_whole_blocks == 4 // block_size


@pytest.mark.parametrize("num_tokens", range(5, 26))
def test_a_prompt_that_ends_inside_a_span_still_computes_a_token(
    num_tokens: int,
) -> None:
    """At most all but one token match, and that end too is outside (I25)."""
    cache = build_cache(num_blocks=40, block_size=1)
    prompt = Prompt("tttt", span("cat", 21))
    serve(cache, prompt)

    asked = prompt.prefix(num_tokens)
    found = cache.peek(NAMESPACE, ALICE, asked).num_tokens

    limit = num_tokens - 1
    assert found == (limit if limit <= 4 or limit >= 13 else 4)


def test_another_span_ends_the_match_where_it_starts() -> None:
    cache = build_cache(num_blocks=40, block_size=4)
    serve(cache, Prompt("abcdef", span("cat"), "gh"))

    assert serve(cache, Prompt("abcdef", span("dog"), "gh")) == 6


def test_a_span_where_text_was_is_a_miss_and_the_other_way_round() -> None:
    cache = build_cache(num_blocks=80, block_size=4)
    serve(cache, Prompt("abcd", span("cat", 12), "ef"))

    assert serve(cache, Prompt("abcdqqqqqqqqqqqqef")) == 4
    assert serve(cache, Prompt("abcdqqqqqqqqqqqqeg")) == 16


def test_the_same_span_at_another_place_is_a_miss() -> None:
    cache = build_cache(num_blocks=80, block_size=4)
    serve(cache, Prompt(span("cat"), "abcd"))

    assert serve(cache, Prompt("x", span("cat"), "abcd")) == 0
    assert serve(cache, Prompt(span("dog"), span("cat"), "abcd")) == 0


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
def test_adjacent_spans_are_told_apart(block_size: int) -> None:
    cache = build_cache(num_blocks=400, block_size=block_size)
    cat, dog, owl = span("cat", 12), span("dog", 12), span("owl", 12)
    serve(cache, Prompt("ab", cat, dog, owl, "cd"))

    assert cache.peek(NAMESPACE, ALICE, Prompt("ab", cat, owl, "cd").ids) == Peek(
        14, 14 // block_size
    )
    assert serve(cache, Prompt("ab", dog, cat, owl, "cd")) == 2
    num_published = 40 // block_size * block_size
    assert serve(cache, Prompt("ab", cat, dog, owl, "cd")) == min(39, num_published)


@pytest.mark.parametrize("block_size", range(1, 17))
def test_cat_cat_pizza_pizza_cat(block_size: int) -> None:
    """Repeats are reused, and nothing between contents (one question, two images)."""
    cache = build_cache(num_blocks=400, block_size=block_size)
    hits = [
        serve(cache, Prompt("abc", span(name, 20), "what"))
        for name in ["cat", "cat", "pizza", "pizza", "cat"]
    ]

    whole = min(26, 27 // block_size * block_size)
    assert hits == [0, whole, min(3, whole), whole, whole]


def test_six_hundred_contents_are_six_hundred_prompts() -> None:
    cache = build_cache(num_blocks=4000, block_size=4)
    prompts = [Prompt("abcd", span(str(n), 16), "ask") for n in range(600)]

    hits: list[set[int]] = []
    for _ in range(2):
        leases = [take(cache, prompt) for prompt in prompts]
        hits.append({lease.num_matched_tokens for lease in leases})
        for lease in leases:
            cache.release(lease, 0.0)
    assert hits == [{0, 4}, {20}]
    check_cache(cache, [])


# The cache: publishing


@pytest.mark.parametrize("block_size", range(1, 17))
def test_what_ends_in_the_first_positions_of_a_span_waits_for_more(
    block_size: int,
) -> None:
    cache = build_cache(num_blocks=60, block_size=block_size)
    prompt = Prompt("ttttt", span("cat", 30), "a")
    lease = cache.acquire(
        NAMESPACE, ALICE, prompt.ids, Demand(num_slots=len(prompt)), now=0.0
    )
    assert lease is not None

    for num_computed in range(len(prompt) + 1):
        cache.publish(lease, prompt.ids, num_computed, 0.0)
        end = num_computed // block_size * block_size
        if 5 < end < 14:
            end = 5
        assert lease.num_published_blocks == end // block_size

    check_cache(cache, [lease])


@pytest.mark.parametrize("num_computed", range(40))
def test_nobody_takes_over_a_block_before_enough_of_a_span_agrees(
    num_computed: int,
) -> None:
    """Two compute the same content side by side; both publish as they go."""
    cache = build_cache(num_blocks=60, block_size=4)
    prompt = Prompt("tt", span("cat", 18), span("dog", 18), "ab")
    first, second = (
        cache.acquire(
            NAMESPACE, ALICE, prompt.ids, Demand(num_slots=len(prompt)), now=0.0
        )
        for _ in range(2)
    )
    assert first is not None
    assert second is not None
    cache.publish(first, prompt.ids, num_computed, 0.0)
    cache.publish(second, prompt.ids, num_computed, 0.0)
    assert second.num_published_blocks == first.num_published_blocks
    check_cache(cache, [first, second])

    cache.publish(second, prompt.ids, len(prompt), 0.0)
    cache.publish(first, prompt.ids, len(prompt), 0.0)

    assert list(first.table.ids()) == list(second.table.ids())
    assert cache.usage().num_active_blocks == 10
    check_cache(cache, [first, second])


def is_safe_end(prompt: Prompt, num_tokens: int) -> bool:
    return end_outside_span(prompt.ids, num_tokens) == num_tokens


def test_no_published_run_ends_inside_the_first_positions_of_any_span() -> None:
    for block_size in range(2, 9):
        for num_before in range(9):
            prompt = Prompt("t" * num_before, span("cat", 9), span("dog", 9), "ab")
            cache = build_cache(num_blocks=60, block_size=block_size)
            for num_computed in range(len(prompt) + 1):
                lease = take(cache, prompt, num_computed=num_computed)
                published = lease.num_published_blocks * block_size
                if published < len(prompt) // block_size * block_size:
                    assert is_safe_end(prompt, published)
                cache.release(lease, 0.0)


# The cache: public prefixes


@pytest.mark.parametrize("block_size", range(1, 17))
@pytest.mark.parametrize("num_declared", range(36))
def test_a_declaration_ends_where_a_span_can_be_told(
    block_size: int, num_declared: int
) -> None:
    cache = build_cache(num_blocks=60, block_size=block_size)
    prompt = Prompt("tttt", span("cat", 30), "ab")
    declared = Prompt()
    declared.ids = prompt.prefix(num_declared)
    end = num_declared // block_size * block_size
    expected = (end if end <= 4 or end >= 13 else 4) // block_size

    assert cache.declare_public(NAMESPACE, declared.tokens) == expected
    assert cache.num_public_blocks(NAMESPACE, prompt.ids) == expected
    serve(cache, prompt)
    found = cache.peek(NAMESPACE, BOB, prompt.ids).num_tokens
    if is_safe_end(prompt, expected * block_size):
        assert found == expected * block_size


def test_as_many_blocks_are_shared_as_a_declaration_says() -> None:
    cache = build_cache(num_blocks=60, block_size=4)
    prompt = Prompt("t", span("cat", 9), span("dog", 9), "ab")
    declared = Prompt()
    declared.ids = prompt.prefix(12)  # two positions into the second span

    num_blocks = cache.declare_public(NAMESPACE, declared.tokens)
    serve(cache, prompt)

    assert cache.num_public_blocks(NAMESPACE, prompt.ids) == num_blocks
    assert cache.peek(NAMESPACE, BOB, prompt.ids).num_whole_blocks == num_blocks


def test_a_span_in_a_declared_prefix_is_shared_and_another_is_not() -> None:
    cache = build_cache(num_blocks=80, block_size=4)
    cat, dog = span("cat"), span("dog")
    cache.declare_public(NAMESPACE, Prompt("abcd", cat).tokens)
    serve(cache, Prompt("abcd", cat, "xyzw", "q"), domain=BOB)
    serve(cache, Prompt("abcd", dog, "xyzw", "q"), domain=BOB)

    assert serve(cache, Prompt("abcd", cat, "xyzw", "r"), domain=ALICE) == 20
    assert serve(cache, Prompt("abcd", dog, "xyzw", "r"), domain=ALICE) == 4


# The cache: what eviction leaves


def test_a_span_is_cached_again_after_its_tail_was_evicted() -> None:
    cache = build_cache(num_blocks=60, block_size=4)
    prompt = Prompt("tttt", span("cat", 16), "a")
    assert [serve(cache, prompt), serve(cache, prompt)] == [0, 20]

    cache.evict(3, 0.0)  # leaves one block of the span: too little to tell it

    assert [serve(cache, prompt), serve(cache, prompt)] == [4, 20]


def test_a_stump_of_a_span_is_evicted_like_anything_else() -> None:
    cache = build_cache(num_blocks=6, block_size=4)
    prompt = Prompt("tttt", span("cat", 16), "a")
    serve(cache, prompt)
    cache.evict(3, 0.0)

    assert serve(cache, Prompt("z" * 24)) == 0, "it takes all six blocks"
    assert [serve(cache, prompt), serve(cache, prompt)] == [0, 20]


# The scheduler


@pytest.mark.parametrize("block_size", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("token_budget", [1, 3, 5, 16, 512])
def test_spans_are_served_like_text(block_size: int, token_budget: int) -> None:
    driver = Driver(
        num_blocks=160 // block_size, block_size=block_size, token_budget=token_budget
    )
    for number, prompt in enumerate(
        ["abX", "abXc", "abY", "XX", "XY", "abXYcd", "abXYce", "X"]
    ):
        num_samples = min(2, token_budget)
        driver.add(f"r{number}", prompt, max_new_tokens=3)
        driver.add(f"s{number}", prompt, max_new_tokens=5, num_samples=num_samples)
        driver.step()
    driver.finish()


@pytest.mark.parametrize("num_samples", [2, 3])
def test_a_request_that_ends_in_a_span_can_fork(num_samples: int) -> None:
    """Its last blocks can be published only after the fork, with some of the output."""
    driver = Driver(block_size=4)
    driver.add("r", "aX", num_samples=num_samples, max_new_tokens=6)
    driver.finish()


def test_a_request_that_ends_in_a_span_need_not_fork() -> None:
    driver = Driver(block_size=4)
    driver.serve("r", "aX", max_new_tokens=6)
    assert driver.num_findable("aX") == 1 + SPAN_TOKENS
    driver.finish()


def followed(prompt: str, *, token_budget: int) -> Driver:
    """A leader, whose prefill takes two steps, and a follower that comes between."""
    driver = Driver(num_blocks=40, block_size=16, token_budget=token_budget)
    driver.add("leader", prompt, max_new_tokens=1)
    driver.step()
    assert driver.requests["leader"].is_prefilling
    driver.add("follower", prompt, max_new_tokens=1)
    driver.finish()
    return driver


def test_a_follower_waits_for_a_span_that_is_being_computed() -> None:
    driver = followed("abcdXbcabcabcabcabca", token_budget=15)

    assert driver.num_cached("follower") == 16


def test_a_follower_waits_through_the_first_positions_of_a_span() -> None:
    """The leader has computed a block, and publishes it once more of a span is."""
    driver = followed("abcabcabcabcXabcabcabcabc", token_budget=20)

    assert driver.num_cached("follower") == 32


def test_a_request_may_be_a_span_and_nothing_else() -> None:
    driver = Driver(num_blocks=40, block_size=4)
    driver.serve("first", "X", max_new_tokens=3)
    driver.serve("second", "X", max_new_tokens=3)

    assert driver.num_cached("second") == SPAN_TOKENS - 1
    driver.finish()


def test_the_chunk_of_a_span_carries_its_ids() -> None:
    driver = Driver(num_blocks=40, block_size=4, token_budget=6)
    driver.add("r", "abXc")
    plans = [driver.step(), driver.step(), driver.step()]

    sent = b"".join(chunk.tokens for plan in plans for chunk in plan.chunks)
    assert sent.startswith(letters_and_spans("abXc").buffer)
    assert driver.requests["r"].spec.prompt.has_spans
    driver.finish()
