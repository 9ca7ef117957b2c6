"""Blocks of KV memory: ids and states only.

Owns which block is free, which is private to block tables (with a reference count)
and which is published, that is, owned by the prefix tree. Knows nothing of tokens
(see `tree`), of who should be evicted (see `eviction`), or of tensors (the engine).

The three words of the glossary map onto pool and tree together:
`free` is FREE here; `active` is PRIVATE here or published and pinned in the tree;
`cached` is published and not pinned. So `free + active + cached == total`, always.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import Enum

from stemkv.errors import DoubleRelease, InvariantError

__all__ = ["BlockPool", "BlockState"]


class BlockState(Enum):
    """Who owns a block."""

    FREE = "free"
    PRIVATE = "private"  # referenced by one or more block tables
    PUBLISHED = "published"  # owned by the prefix tree


class BlockPool:
    """Hands out block ids `0 … num_blocks - 1` and tracks their state.

    Transitions: FREE → allocate → PRIVATE → release → FREE;
    PRIVATE with one reference → publish → PUBLISHED → reclaim → FREE. Nothing else.
    Every other request for a transition raises `InvariantError`.
    """

    __slots__ = (
        "_free",
        "_num_published",
        "_num_shares",
        "_published",
        "_ref_counts",
    )

    def __init__(self, num_blocks: int) -> None:
        # Popped from the end: low ids first, and a freed block is reused soonest,
        # while its memory is still warm.
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._published = bytearray(num_blocks)
        self._num_published = 0
        self._num_shares = 0  # references beyond the first, of all blocks

    @property
    def num_total(self) -> int:
        """Blocks in the pool."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    @property
    def num_published(self) -> int:
        """Blocks the prefix tree owns."""
        return self._num_published

    @property
    def num_private(self) -> int:
        """Blocks owned by block tables only."""
        return self.num_total - self.num_free - self._num_published

    def state(self, block_id: int) -> BlockState:
        """Return who owns the block."""
        if self._published[block_id]:
            return BlockState.PUBLISHED
        return BlockState.PRIVATE if self._ref_counts[block_id] else BlockState.FREE

    def ref_count(self, block_id: int) -> int:
        """Return how many block tables hold the block privately."""
        return self._ref_counts[block_id]

    @property
    def num_shares(self) -> int:
        """References to private blocks beyond the first of each."""
        return self._num_shares

    def num_leading_unshared(self, block_ids: Iterable[int]) -> int:
        """Return how many of the leading blocks have exactly one private reference."""
        ref_counts = self._ref_counts
        num_blocks = 0
        for block_id in block_ids:
            if ref_counts[block_id] != 1:
                break
            num_blocks += 1
        return num_blocks

    def allocate(self, num_blocks: int) -> array[int]:
        """Take free blocks; each gets one reference. The caller made sure they exist."""
        if num_blocks > len(self._free):
            raise InvariantError(
                f"allocate({num_blocks}) with {len(self._free)} free blocks"
            )
        if num_blocks == 0:
            return array("i")
        taken = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        taken.reverse()
        ref_counts = self._ref_counts
        for block_id in taken:
            ref_counts[block_id] = 1
        return taken

    def retain(self, block_ids: Iterable[int]) -> None:
        """Add a reference to private blocks, for a fork."""
        for block_id in block_ids:
            if self.state(block_id) is not BlockState.PRIVATE:
                raise InvariantError(
                    f"retain of block {block_id}, which is {self.state(block_id).value}"
                )
            self._ref_counts[block_id] += 1
            self._num_shares += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to private blocks; the last one frees the block."""
        ref_counts = self._ref_counts
        free = self._free
        for block_id in block_ids:
            count = ref_counts[block_id]
            if count == 0:
                raise DoubleRelease(
                    f"release of block {block_id}, which is "
                    f"{self.state(block_id).value}"
                )
            ref_counts[block_id] = count - 1
            if count == 1:
                free.append(block_id)
            else:
                self._num_shares -= 1

    def publish(self, block_ids: Iterable[int]) -> None:
        """Move private blocks with one reference into the prefix tree's ownership."""
        ref_counts = self._ref_counts
        published = self._published
        num_done = 0
        try:
            for block_id in block_ids:
                if ref_counts[block_id] != 1:
                    raise InvariantError(
                        f"publish of block {block_id} with {ref_counts[block_id]} "
                        f"references; exactly one is needed"
                    )
                ref_counts[block_id] = 0
                published[block_id] = 1
                num_done += 1
        finally:
            self._num_published += num_done

    def reclaim(self, block_ids: Iterable[int]) -> None:
        """Free published blocks that the prefix tree dropped."""
        published, free = self._published, self._free
        append, num_free = free.append, len(free)
        try:
            for block_id in block_ids:
                if not published[block_id]:
                    raise InvariantError(
                        f"reclaim of block {block_id}, which is "
                        f"{self.state(block_id).value}"
                    )
                published[block_id] = 0
                append(block_id)
        finally:
            self._num_published -= len(free) - num_free

    def free_block_ids(self) -> tuple[int, ...]:
        """Return a copy of the free list, for `check` and tests."""
        return tuple(self._free)
