"""The blocks of one request, in order, and the receipt that gives them back.

Owns the block table and which part of it is shared. Knows nothing of how blocks are
found or freed: `PrefixCache` makes leases and is the only one that changes them.

Ranges of a table with `n` blocks, of which `p` are published:

```
[0, p)   published: owned by the prefix tree, pinned by this lease, read-only
[p, n)   private: referenced in the pool, written by this request; after a fork the
         one that is partly full is shared, and whoever writes first copies it
```
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.keys import KeyChain
from stemkv.core.prefix.tree import Node
from stemkv.core.prefix.watcher import Caller

__all__ = ["BlockCopy", "BlockTable", "Lease"]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the KV of leading slots between blocks, in all layers, before the step.

    Copies of one plan run in the order given. The source stays untouched.
    """

    source: int  # block id
    target: int  # block id, private to the request that writes next
    num_tokens: int  # leading slots to copy, 1 … block_size


class BlockTable:
    """Ordered block ids of one request.

    `snapshot` is an immutable int32 view; it is made anew only after a change, so a
    decode step costs nothing here.
    """

    __slots__ = ("_ids", "_snapshot")

    def __init__(self, block_ids: array[int]) -> None:
        self._ids = block_ids
        self._snapshot: memoryview | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> int:
        return self._ids[index]

    def ids(self, start: int = 0, end: int | None = None) -> array[int]:
        """Return a copy of the ids of blocks `start … end - 1`."""
        return self._ids[start:end]

    def snapshot(self) -> memoryview:
        """Return the ids as a read-only int32 view that later changes don't reach."""
        if self._snapshot is None:
            self._snapshot = memoryview(self._ids.tobytes()).cast("i")
        return self._snapshot

    def append(self, block_ids: array[int]) -> None:
        """Lengthen the table."""
        self._ids.extend(block_ids)
        self._snapshot = None

    def replace(self, start: int, block_ids: array[int]) -> None:
        """Put other blocks at `start …`, for copy-on-write and deduplication."""
        self._ids[start : start + len(block_ids)] = block_ids
        self._snapshot = None


class Lease:
    """Receipt of an acquire: the only thing that can release what was acquired.

    Only `PrefixCache` writes its attributes. Must be released exactly once; a lost
    lease leaks its blocks, which `check` reports, and never frees anybody else's.
    """

    __slots__ = (
        "caller",
        "copy",
        "copy_source",
        "domain",
        "is_cut_off",
        "is_released",
        "keys",
        "namespace",
        "node",
        "num_matched_tokens",
        "num_public_blocks",
        "num_published_blocks",
        "num_slots",
        "table",
    )

    def __init__(
        self,
        *,
        namespace: bytes | None,
        domain: Domain,
        caller: Caller,
        num_public_blocks: int,
    ) -> None:
        self.namespace = namespace  # None: shares with nobody
        self.domain = domain
        self.caller = caller  # on whose account, and what it said
        self.num_public_blocks = num_public_blocks  # leading blocks to publish for all
        self.node: Node | None = None  # deepest pinned node, the root if none matched
        self.table = BlockTable(array("i"))
        self.num_slots = 0  # tokens that its holder asked room for
        self.num_published_blocks = 0
        self.num_matched_tokens = 0  # cached, partial block included
        self.keys = KeyChain()  # how far its tokens have been summed up
        self.copy: BlockCopy | None = None  # must run before the lease's first step
        # Node of its source, pinned until it has run.
        self.copy_source: Node | None = None
        self.is_cut_off = False  # publishes nothing any more
        self.is_released = False

    def twin(self) -> Lease:
        """Return a lease of the same blocks, for a fork."""
        twin = Lease(
            namespace=self.namespace,
            domain=self.domain,
            caller=self.caller,
            num_public_blocks=self.num_public_blocks,
        )
        twin.node = self.node
        twin.table = BlockTable(self.table.ids())
        twin.num_slots = self.num_slots
        twin.num_published_blocks = self.num_published_blocks
        twin.num_matched_tokens = self.num_matched_tokens
        twin.is_cut_off = self.is_cut_off
        return twin
