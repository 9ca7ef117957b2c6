"""Token ids of a request as one contiguous int32 buffer, converted once.

Owns the representation (little-endian int32, four bytes per token) and the virtual ids
that stand for media and embeddings. Knows nothing of vocabularies, tokenizers or
blocks. Buffers are what the prefix tree compares: whole runs at memory speed, where a
list of Python integers costs a hundred times as much.

Virtual ids: positions whose input is not a vocabulary token (an image's patches, a
supplied embedding) carry negative ids, made from a digest of the content. An id is
`~(start << 30 | bits)`: `start` is 1 at the first position of a span and 0 at the
others, `bits` are 30 bits of SHAKE-256 over the number of positions and the digest. So
any 9 leading positions of a span carry 270 bits, more than the digest has, and spans
delimit themselves. Fewer positions identify nothing: a match, and a publication, may
not end inside the first 9 positions of a span (`end_outside_span`), and a shorter span
is refused.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from stemkv.errors import RequestError, TokenOutOfRange

__all__ = [
    "MIN_SPAN_TOKENS",
    "TOKEN_BYTES",
    "Span",
    "TokenBuffer",
    "TokenIds",
    "common_prefix_bytes",
    "end_outside_span",
]

TOKEN_BYTES = 4
MIN_SPAN_TOKENS = 9  # 9 x 30 bits hold a digest of 256
_START = 1 << 30
_SPAN_MAGIC = b"stemkv-span\0"
_MAX_TOKEN_ID = 2**31 - 1
_INTEGER_FORMATS = "hHiIlLqQnN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive positions whose input is not a vocabulary token.

    `digest` is SHA-256 over everything that determines the input vectors: the content,
    its shape and dtype, how it was decoded. Raises `RequestError` for a digest of
    another length, so none is ever narrowed, and for a span too short to carry it.
    """

    digest: bytes
    num_tokens: int

    def __post_init__(self) -> None:
        if not isinstance(self.digest, bytes) or len(self.digest) != 32:
            raise RequestError(
                f"the digest of a span must be 32 bytes of SHA-256, got "
                f"{self.digest!r:.40}",
                field="spans",
            )
        is_integer = isinstance(self.num_tokens, int)
        if not is_integer or self.num_tokens < MIN_SPAN_TOKENS:
            raise RequestError(
                f"a span must cover at least {MIN_SPAN_TOKENS} positions, so that its "
                f"ids carry a whole digest, got {self.num_tokens!r}; extend it with "
                f"its neighbours' embeddings",
                field="spans",
            )

    def ids(self) -> bytes:
        """Return the virtual ids, int32 little-endian."""
        source = _SPAN_MAGIC + struct.pack(">Q", self.num_tokens) + self.digest
        stream = hashlib.shake_256(source).digest(TOKEN_BYTES * self.num_tokens)
        words = struct.unpack(f"<{self.num_tokens}I", stream)
        bits = [word & (_START - 1) for word in words]
        bits[0] |= _START
        return struct.pack(f"<{self.num_tokens}i", *[~each for each in bits])


class TokenIds:
    """An immutable run of token ids.

    `buffer` is the little-endian int32 encoding; equality and hashing are those of
    the buffer. Text tokens are never negative: negative int32 values are virtual ids,
    which only `from_parts` makes, so a caller's numbers can never pose as media.
    """

    __slots__ = ("_buffer", "has_spans")

    def __init__(self, buffer: bytes) -> None:
        if not isinstance(buffer, bytes):  # anything else could change later
            buffer = _copy_of_bytes(buffer)
        if len(buffer) % TOKEN_BYTES:
            raise TokenOutOfRange(
                f"a token buffer holds 4 bytes per token, got {len(buffer)} bytes",
                field="tokens",
            )
        # The sign bit of each token is the top bit of its fourth byte; `isascii` tests
        # that bit for all of them in one pass at memory speed.
        if not buffer[3::TOKEN_BYTES].isascii():
            ids = memoryview(_to_native(buffer)).cast("i")
            position = next(i for i, token in enumerate(ids) if token < 0)
            raise TokenOutOfRange(
                f"token id {ids[position]} at position {position} is negative; "
                f"token ids start at 0",
                field="tokens",
            )
        self._buffer = buffer
        self.has_spans = False

    @classmethod
    def from_parts(cls, parts: Iterable[TokenIds | Span]) -> TokenIds:
        """Join text tokens and spans in the order given."""
        result = cls(b"")
        buffers = []
        for part in parts:
            if isinstance(part, Span):
                buffers.append(part.ids())
                result.has_spans = True
            else:
                buffers.append(part.buffer)
                result.has_spans |= part.has_spans
        result._buffer = b"".join(buffers)
        return result

    @classmethod
    def from_ids(cls, ids: Iterable[int]) -> TokenIds:
        """Encode token ids given as Python integers; O(n), done once per request.

        Raises `TokenOutOfRange` naming the first bad position.
        """
        values = ids if isinstance(ids, list | tuple) else list(ids)
        try:
            return cls(struct.pack(f"<{len(values)}i", *values))
        except struct.error:
            raise _first_bad_id(values) from None

    @classmethod
    def from_buffer(cls, data: bytes | bytearray | memoryview | array[int]) -> TokenIds:
        """Take token ids from an integer buffer (`array`, numpy, `memoryview`).

        Elements of one byte are read as the encoding itself. Integer buffers of
        another width are converted; other element types raise `TokenOutOfRange`.
        """
        if isinstance(data, bytes):
            return cls(data)
        view = memoryview(data)
        if view.itemsize == 1:
            return cls(view.tobytes())
        if view.format in ("i", "l") and view.itemsize == TOKEN_BYTES:
            return cls(_to_native(view.tobytes()))
        if view.format not in _INTEGER_FORMATS:
            raise TokenOutOfRange(
                f"token ids must be integers, got a buffer of format {view.format!r}",
                field="tokens",
            )
        return cls.from_ids(view.tolist())

    @property
    def buffer(self) -> bytes:
        """The little-endian int32 encoding, 4 bytes per token."""
        return self._buffer

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `TokenOutOfRange` unless every id is below `vocab_size`; O(n)."""
        if self._buffer and max(self) >= vocab_size:
            position, token = next(
                (i, token) for i, token in enumerate(self) if token >= vocab_size
            )
            raise TokenOutOfRange(
                f"token id {token} at position {position} is outside the vocabulary "
                f"of {vocab_size} tokens; was it made by this model's tokenizer?",
                field="tokens",
            )

    def __len__(self) -> int:
        return len(self._buffer) // TOKEN_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(memoryview(_to_native(self._buffer)).cast("i"))

    def __getitem__(self, position: int) -> int:
        return memoryview(_to_native(self._buffer)).cast("i")[position]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and self._buffer == other._buffer

    def __hash__(self) -> int:
        return hash(self._buffer)

    def __repr__(self) -> str:
        # The count only: prompts must not reach logs through a representation.
        return f"TokenIds(<{len(self)} tokens>)"


class TokenBuffer(bytearray):
    """Token ids that grow at their end, where `bytes` would be copied for each token.

    Read as `bytes` are: a slice is immutable and only as long as what was asked for.
    Whoever is handed one takes slices and never keeps it.
    """

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        return bytes(part) if isinstance(part, bytearray) else part

    def __add__(self, other: Any) -> Any:
        return b"".join((self, other))


def end_outside_span(tokens: bytes, num_tokens: int) -> int:
    """Return the last position up to `num_tokens` at which a match may end.

    That is `num_tokens` itself, unless it lies inside the first positions of a span,
    too few to tell its content: then it is where the span starts. O(1).
    """
    first = max(0, num_tokens - MIN_SPAN_TOKENS + 1)
    window = tokens[first * TOKEN_BYTES : num_tokens * TOKEN_BYTES]
    if window[3::TOKEN_BYTES].isascii():  # no sign bit: text only
        return num_tokens
    ids = memoryview(_to_native(window)).cast("i")
    for index in range(len(ids) - 1, -1, -1):
        if ids[index] < 0 and ~ids[index] & _START:
            return first + index
    return num_tokens


def common_prefix_bytes(
    left: bytes | bytearray,
    left_start: int,
    right: bytes | bytearray,
    right_start: int,
    limit: int,
) -> int:
    """Return how many leading bytes agree, at most `limit`; O(answer) bytes read.

    Compares doubling runs, then halves the run that differs, so the cost follows
    the common prefix and not the length of either buffer.
    """
    same = 0
    step = 64
    while same < limit:
        step = min(step, limit - same)
        a, b = left_start + same, right_start + same
        if left[a : a + step] != right[b : b + step]:
            break
        same += step
        step *= 2
    else:
        return limit
    # Invariant: `same` bytes agree and the next `step` bytes hold a difference.
    while step > 1:
        half = step // 2
        a, b = left_start + same, right_start + same
        if left[a : a + half] == right[b : b + half]:
            same += half
            step -= half
        else:
            step = half
    return same


def _copy_of_bytes(buffer: object) -> bytes:
    """Copy a buffer of single bytes; a wider one says nothing of its byte order."""
    if isinstance(buffer, bytearray | memoryview) and memoryview(buffer).itemsize == 1:
        return bytes(buffer)
    raise TokenOutOfRange(
        f"TokenIds takes bytes, got {type(buffer).__name__}; TokenIds.from_ids takes "
        f"integers and TokenIds.from_buffer arrays of any integer type",
        field="tokens",
    )


def _to_native(buffer: bytes) -> bytes:
    """Swap little-endian int32 to (or from) the machine's order; free on most."""
    if sys.byteorder == "little":
        return buffer
    swapped = array("i", buffer)
    swapped.byteswap()
    return swapped.tobytes()


def _first_bad_id(values: list[int] | tuple[int, ...]) -> TokenOutOfRange:
    for position, value in enumerate(values):
        if not isinstance(value, int):
            try:
                value = value.__index__()
            except (AttributeError, TypeError):
                return TokenOutOfRange(
                    f"token id at position {position} must be an integer, "
                    f"got {type(value).__name__}",
                    field="tokens",
                )
        if not 0 <= value <= _MAX_TOKEN_ID:
            return TokenOutOfRange(
                f"token id {value} at position {position} is outside "
                f"[0, {_MAX_TOKEN_ID}]",
                field="tokens",
            )
    return TokenOutOfRange("token ids cannot be encoded as int32", field="tokens")
