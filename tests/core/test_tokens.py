"""Token buffers: one encoding, errors that name the position, fast common prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stemkv.core.prefix.tokens as token_module
from stemkv.core.prefix.tokens import TOKEN_BYTES, TokenIds, common_prefix_bytes
from stemkv.errors import TokenOutOfRange
from tests.core.builders import count_calls

LARGEST = 2**31 - 1
ids = st.lists(st.integers(0, LARGEST), max_size=40)


def naive_encoding(values: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def naive_common_prefix(left: bytes, right: bytes) -> int:
    same = 0
    while same < min(len(left), len(right)) and left[same] == right[same]:
        same += 1
    return same


# One encoding, whatever the ids come in


@given(ids)
def test_the_buffer_is_little_endian_int32(values: list[int]) -> None:
    assert TokenIds.from_ids(values).buffer == naive_encoding(values)


@given(ids)
def test_ids_survive_the_round_trip(values: list[int]) -> None:
    tokens = TokenIds.from_ids(values)

    assert list(tokens) == values
    assert len(tokens) == len(values)
    assert [tokens[i] for i in range(len(values))] == values


@pytest.mark.parametrize(
    "wrap",
    [list, tuple, iter, lambda v: (x for x in v), lambda v: dict.fromkeys(v).keys()],
    ids=["list", "tuple", "iterator", "generator", "view"],
)
def test_any_iterable_of_ids_gives_the_same_tokens(
    wrap: Callable[[list[int]], object],
) -> None:
    values = [0, 1, 255, 256, 65536, LARGEST]
    assert TokenIds.from_ids(wrap(values)).buffer == naive_encoding(values)


@pytest.mark.parametrize("code", list("hHiIlLqQ"))
def test_arrays_of_every_integer_width_give_the_same_tokens(code: str) -> None:
    values = [0, 1, 5, 100]
    assert list(TokenIds.from_buffer(array(code, values))) == values


@given(ids)
def test_buffers_of_bytes_are_read_as_the_encoding(values: list[int]) -> None:
    encoded = naive_encoding(values)

    assert TokenIds.from_buffer(encoded).buffer == encoded
    assert TokenIds.from_buffer(bytearray(encoded)).buffer == encoded


def test_whatever_has_elements_of_one_byte_is_read_as_the_encoding() -> None:
    """No vocabulary has 256 tokens, so bytes are never ids."""
    encoded = naive_encoding([1, 2, 300])
    view = memoryview(encoded)

    for data in (view, view.cast("b"), view.cast("c"), array("B", encoded)):
        assert list(TokenIds.from_buffer(data)) == [1, 2, 300]


@given(ids)
def test_views_of_integers_give_the_same_tokens(values: list[int]) -> None:
    encoded = naive_encoding(values)

    assert TokenIds.from_buffer(memoryview(array("i", values))).buffer == encoded
    assert TokenIds.from_buffer(memoryview(array("q", values))).buffer == encoded
    # A cast view has no array behind it, and that is how other libraries hand ids out.
    if values:
        assert TokenIds.from_buffer(memoryview(encoded).cast("i")).buffer == encoded


def test_a_view_with_gaps_gives_the_tokens_it_shows() -> None:
    view = memoryview(array("i", [1, 2, 3, 4, 5]))[::2]
    assert list(TokenIds.from_buffer(view)) == [1, 3, 5]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint16"])
def test_numpy_arrays_give_the_same_tokens(dtype: str) -> None:
    values = [0, 1, 5, 200]

    assert list(TokenIds.from_buffer(np.array(values, dtype))) == values
    assert list(TokenIds.from_ids(np.array(values, dtype))) == values
    assert list(TokenIds.from_buffer(np.array(values, dtype)[::2])) == [0, 5]


def test_later_changes_of_the_source_do_not_reach_the_tokens() -> None:
    source = array("i", [1, 2, 3])
    as_bytes = bytearray(naive_encoding([1, 2, 3]))
    from_array = TokenIds.from_buffer(source)
    from_bytes = TokenIds.from_buffer(as_bytes)

    source[0] = 9
    as_bytes[0] = 9

    assert list(from_array) == list(from_bytes) == [1, 2, 3]


def test_no_tokens_are_tokens_too() -> None:
    for empty in (TokenIds(b""), TokenIds.from_ids([]), TokenIds.from_buffer(b"")):
        assert len(empty) == 0
        assert list(empty) == []


@given(ids, ids)
def test_equal_tokens_are_equal_and_hash_alike(a: list[int], b: list[int]) -> None:
    left, right = TokenIds.from_ids(a), TokenIds.from_buffer(array("q", b))

    assert (left == right) == (a == b)
    assert TokenIds.from_ids(a) == left
    assert hash(TokenIds.from_ids(a)) == hash(left)


def test_tokens_equal_nothing_but_tokens() -> None:
    tokens = TokenIds.from_ids([1])
    assert tokens != tokens.buffer
    assert tokens != [1]


def test_bytes_are_swapped_on_machines_of_the_other_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The encoding is little-endian everywhere; only its reading depends."""
    monkeypatch.setattr(token_module.sys, "byteorder", "big")
    assert token_module._to_native(b"\1\2\3\4\5\6\7\10") == (b"\4\3\2\1\10\7\6\5")


# Errors say where


@pytest.mark.parametrize("bad", [-1, -(2**31), -(2**31) - 1, 2**31, 2**63, 2**100])
@pytest.mark.parametrize("position", [0, 3, 9])
def test_an_id_that_is_no_int32_is_refused_at_its_position(
    bad: int, position: int
) -> None:
    values = list(range(10))
    values[position] = bad

    with pytest.raises(TokenOutOfRange, match=f"{bad} at position {position} ") as e:
        TokenIds.from_ids(values)
    assert e.value.field == "tokens"


@pytest.mark.parametrize("bad", [-1, 2**31, 2**40])
def test_a_wide_buffer_names_the_position_as_well(bad: int) -> None:
    with pytest.raises(TokenOutOfRange, match=f"{bad} at position 2 "):
        TokenIds.from_buffer(array("q", [1, 2, bad, 4]))


def test_a_negative_id_in_a_buffer_is_refused_at_its_position() -> None:
    view = array("i", [5, 6, -7])
    for data in (view, memoryview(view), view.tobytes(), bytearray(view.tobytes())):
        with pytest.raises(TokenOutOfRange, match="-7 at position 2 "):
            TokenIds.from_buffer(data)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=20))
def test_the_first_bad_position_is_the_one_that_is_named(values: list[int]) -> None:
    first = next((i for i, value in enumerate(values) if value < 0), None)
    if first is None:
        assert len(TokenIds.from_ids(values)) == len(values)
        return
    with pytest.raises(TokenOutOfRange, match=f"at position {first} "):
        TokenIds.from_ids(values)


def test_the_first_bad_position_is_named_whatever_is_wrong_with_it() -> None:
    with pytest.raises(TokenOutOfRange, match="-1 at position 1 "):
        TokenIds.from_ids([0, -1, 2**31])
    with pytest.raises(TokenOutOfRange, match=f"{2**31} at position 1 "):
        TokenIds.from_ids([0, 2**31, -1])


@pytest.mark.parametrize("bad", [1.0, "1", None, b"\0", [1]])
def test_what_is_no_integer_is_refused_with_position_and_type(bad: object) -> None:
    named = f"position 1 must be an integer, got {type(bad).__name__}"
    with pytest.raises(TokenOutOfRange, match=named):
        TokenIds.from_ids([0, bad])  # type: ignore[list-item]


@pytest.mark.parametrize("code", ["f", "d"])
def test_buffers_of_floats_are_refused(code: str) -> None:
    with pytest.raises(TokenOutOfRange, match=f"integers, got .*'{code}'"):
        TokenIds.from_buffer(array(code, [1.0]))


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 5, 7])
def test_a_torn_buffer_is_refused(num_bytes: int) -> None:
    for data in (bytes(num_bytes), bytearray(num_bytes)):
        with pytest.raises(TokenOutOfRange, match=f"got {num_bytes} bytes"):
            TokenIds.from_buffer(data)


# The vocabulary


@given(ids.filter(bool), st.integers(1, LARGEST))
def test_the_vocabulary_is_checked_at_the_first_position(
    values: list[int], vocab_size: int
) -> None:
    first = next((i for i, v in enumerate(values) if v >= vocab_size), None)
    if first is None:
        TokenIds.from_ids(values).check_vocabulary(vocab_size)
        return
    named = f"token id {values[first]} at position {first} is outside .* {vocab_size} "
    with pytest.raises(TokenOutOfRange, match=named):
        TokenIds.from_ids(values).check_vocabulary(vocab_size)


def test_the_largest_id_of_a_vocabulary_is_inside_and_the_next_is_not() -> None:
    TokenIds.from_ids([0, 9]).check_vocabulary(10)
    TokenIds.from_ids([]).check_vocabulary(1)
    with pytest.raises(TokenOutOfRange, match="10 at position 1 "):
        TokenIds.from_ids([0, 10]).check_vocabulary(10)


# Logs


def test_a_representation_tells_the_count_and_no_token() -> None:
    tokens = TokenIds.from_ids([48151, 62342])

    assert repr(tokens) == str(tokens) == f"{tokens}" == "TokenIds(<2 tokens>)"


# Common prefixes


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[bytes, int, bytes, int, int]:
    """Two buffers that agree for a while, somewhere inside each."""
    shared = draw(st.binary(max_size=300))
    before = draw(st.binary(max_size=5)), draw(st.binary(max_size=5))
    after = draw(st.binary(max_size=5)), draw(st.binary(max_size=5))
    left = before[0] + shared + after[0]
    right = before[1] + shared + after[1]
    a, b = len(before[0]), len(before[1])
    limit = draw(st.integers(0, min(len(left) - a, len(right) - b)))
    return left, a, right, b, limit


@given(overlapping())
def test_common_prefixes_are_those_of_the_naive_loop(
    case: tuple[bytes, int, bytes, int, int],
) -> None:
    left, a, right, b, limit = case
    expected = naive_common_prefix(left[a : a + limit], right[b : b + limit])

    assert common_prefix_bytes(left, a, right, b, limit) == expected


@pytest.mark.parametrize("length", [1, 4, 63, 64, 65, 127, 128, 191, 192, 193, 1000])
def test_a_difference_is_found_at_every_position(length: int) -> None:
    left = bytes(length)
    for position in range(length):
        right = left[:position] + b"\1" + left[position + 1 :]
        assert common_prefix_bytes(left, 0, right, 0, length) == position
    assert common_prefix_bytes(left, 0, left, 0, length) == length


def test_the_limit_is_kept_although_more_agrees() -> None:
    left = bytes(400)
    for limit in (0, 1, 63, 64, 65, 399):
        assert common_prefix_bytes(left, 0, left, 0, limit) == limit


def test_the_cost_follows_the_answer_and_not_the_buffers() -> None:
    """Slices are what costs: they are counted, with the bytes they copy."""
    num_bytes_read: list[int] = []

    class Counted(bytes):
        def __getitem__(self, key: slice) -> bytes:  # type: ignore[override]
            part = super().__getitem__(key)
            num_bytes_read.append(len(part))
            return part

    def read(answer: int, length: int) -> int:
        num_bytes_read.clear()
        left = Counted(bytes(length))
        right = bytes(answer) + b"\1" + bytes(length - answer - 1)
        assert common_prefix_bytes(left, 0, right, 0, length) == answer
        return sum(num_bytes_read)

    assert read(100, 1_000) == read(100, 1_000_000)
    for answer in (0, 10, 1_000, 100_000):
        assert read(answer, 1_000_000) <= 4 * answer + 128
        assert len(num_bytes_read) <= 2 * answer.bit_length() + 8


def test_encoding_costs_no_call_per_token() -> None:
    short, long = list(range(10)), list(range(10_000))

    def calls(values: list[int]) -> int:
        return count_calls(lambda: TokenIds.from_ids(values))

    assert calls(long) == calls(short)
    assert TOKEN_BYTES == 4
