"""Keys of blocks, for policies that remember what is gone.

Owns how tokens become a key. Knows neither nodes nor policies.
"""

from __future__ import annotations

from array import array
from zlib import crc32

from stemkv.core.prefix.identity import Domain

__all__ = ["BlockKeys", "KeyChain"]


class KeyChain:
    """How far one publisher's tokens have been summed up."""

    __slots__ = ("crc", "num_blocks")

    def __init__(self) -> None:
        self.num_blocks = 0
        self.crc = 0


class BlockKeys:
    """Gives each block a key: of all tokens up to its end, for its domain.

    CRC-32, as it is fast and equal everywhere; a policy may be wrong about a block
    once in four thousand million. What one domain publishes cannot collide with
    another's: each has its own upper half of the keys.

    `max_spaces` domains keep their half, those that published last; one that comes
    again after so many others begins anew, as if nothing were remembered of it.
    """

    def __init__(self, block_bytes: int, max_spaces: int) -> None:
        self._block_bytes = block_bytes
        self._max_spaces = max_spaces
        # Namespace and domain → number; the one that published last is last.
        self._spaces: dict[tuple[bytes, Domain], int] = {}
        self._num_spaces = 0

    def of(
        self,
        namespace: bytes,
        domain: Domain,
        tokens: bytes,
        start: int,
        stop: int,
        chain: KeyChain,
    ) -> array[int]:
        """Return the keys of blocks `start … stop - 1` of the tokens."""
        upper = self._space(namespace, domain) << 32
        block_bytes = self._block_bytes
        crc = chain.crc
        if chain.num_blocks != start:
            crc = crc32(tokens[: start * block_bytes])
        keys = array("Q")
        for begin in range(start * block_bytes, stop * block_bytes, block_bytes):
            crc = crc32(tokens[begin : begin + block_bytes], crc)
            keys.append(upper | crc)
        chain.num_blocks, chain.crc = stop, crc
        return keys

    def forget(self, namespace: bytes) -> None:
        """Forget a namespace: nothing will be published in it any more."""
        for space in [each for each in self._spaces if each[0] == namespace]:
            del self._spaces[space]

    def _space(self, namespace: bytes, domain: Domain) -> int:
        number = self._spaces.pop((namespace, domain), None)
        if number is None:
            self._num_spaces += 1
            number = self._num_spaces
        self._spaces[namespace, domain] = number
        if len(self._spaces) > self._max_spaces:
            del self._spaces[next(iter(self._spaces))]
        return number & 0xFFFFFFFF
