"""What happens to resident blocks, told to whoever wants to know.

Owns the events and who hears which. `Residency` tells them; retention, books and waiting
matches listen, and prefix/ knows none of them. Nothing a watcher does may change the
tree.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stemkv.core.prefix.events import DropReason
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.tree import Node

__all__ = ["Audience", "Caller", "LeaseWatcher", "Publication", "Watcher"]


class Caller(NamedTuple):
    """On whose behalf blocks are used or published, and what it said of them.

    A tuple, as one is made for every lease: a frozen dataclass takes 1.6 µs more.
    """

    domain: Domain
    owner: str  # tenant on whose account they are
    session: str | None = None
    hint: int = 0  # what it said of the next use, as the keeper's digit
    first_ephemeral_block: int | None = None  # from this one on used once; None: none

    def is_ephemeral(self, index: int) -> bool:
        """Whether it said that block `index` will be used once."""
        start = self.first_ephemeral_block
        return start is not None and index >= start


@dataclass(slots=True, kw_only=True)
class Publication:
    """A run of blocks that becomes matchable, all of one domain.

    Offered to `Residency.publish`, which completes it and cuts it to what may be one
    node; from then on nobody changes it.
    """

    namespace: bytes
    domain: Domain
    caller: Caller
    tokens: bytes  # of the whole path, and maybe beyond
    start: int  # blocks of the path before the run
    block_ids: array[int]
    keys: Sequence[int] = ()  # one for each block, where the keeper wants them
    kept_until: float | None = None  # by the operator
    tick: int = 0
    now: float

    @property
    def stop(self) -> int:
        """Blocks of the path, the run included."""
        return self.start + len(self.block_ids)


class Watcher:
    """Hears what happens to nodes; overrides what it cares for.

    What is not overridden is never called, so it costs nothing. All is told after it
    happened, `trimming` aside. `now` is in seconds and never decreases; `tick` is the
    same for all nodes that one caller uses or lets go of at once, and higher for every
    later one.
    """

    def added(self, node: Node, publication: Publication) -> None:
        """A new node holds the run; its publisher pins it."""

    def extended(self, node: Node, publication: Publication) -> None:
        """A leaf was lengthened by the run; only its publisher pins it."""

    def split(self, upper: Node, lower: Node, now: float) -> None:
        """`lower` was cut; `upper` is its leading part, held by the same."""

    def merged(self, upper: Node, lower: Node, now: float) -> None:
        """`lower` took over the blocks of `upper`, which has left the tree."""

    def pinned(self, node: Node, now: float) -> None:
        """Somebody begins to hold a node that nobody held."""

    def used(self, node: Node, caller: Caller, tick: int, now: float) -> None:
        """A caller reuses the node; it is pinned."""

    def unpinned(self, node: Node, tick: int, now: float) -> None:
        """Nobody holds the node any more; what is above it is told before it."""

    def trimming(
        self, node: Node, num_kept: int, reason: DropReason, now: float
    ) -> None:
        """An unpinned leaf is about to lose all but its first `num_kept` blocks."""

    def trimmed(
        self, node: Node, block_ids: array[int], reason: DropReason, now: float
    ) -> None:
        """It lost these; with none left it has left the tree."""

    def retired(self, namespace: bytes, now: float) -> None:
        """Nothing in the namespace can be matched any more."""


class LeaseWatcher(Watcher):
    """Hears of private blocks as well, which no node holds yet."""

    def allocated(self, owner: str, num_blocks: int, now: float) -> None:
        """Blocks became private to a lease of the owner."""

    def freed(self, owner: str, num_blocks: int, now: float) -> None:
        """Private blocks of the owner that nobody holds any more."""


class Audience:
    """Who hears which event: bound methods, collected once."""

    __slots__ = (
        "added",
        "allocated",
        "extended",
        "freed",
        "merged",
        "pinned",
        "retired",
        "split",
        "trimmed",
        "trimming",
        "unpinned",
        "used",
    )

    def __init__(self) -> None:
        self.added: tuple[Callable[[Node, Publication], None], ...] = ()
        self.extended: tuple[Callable[[Node, Publication], None], ...] = ()
        self.split: tuple[Callable[[Node, Node, float], None], ...] = ()
        self.merged: tuple[Callable[[Node, Node, float], None], ...] = ()
        self.pinned: tuple[Callable[[Node, float], None], ...] = ()
        self.used: tuple[Callable[[Node, Caller, int, float], None], ...] = ()
        self.unpinned: tuple[Callable[[Node, int, float], None], ...] = ()
        self.trimming: tuple[Callable[[Node, int, DropReason, float], None], ...] = ()
        self.trimmed: tuple[
            Callable[[Node, array[int], DropReason, float], None], ...
        ] = ()
        self.retired: tuple[Callable[[bytes, float], None], ...] = ()
        self.allocated: tuple[Callable[[str, int, float], None], ...] = ()
        self.freed: tuple[Callable[[str, int, float], None], ...] = ()

    def add(self, watcher: Watcher) -> None:
        """Let a watcher hear, from now on, what it has overridden."""
        for event in self.__slots__:
            heard = getattr(type(watcher), event, None)
            if heard is not None and heard is not getattr(LeaseWatcher, event):
                setattr(self, event, (*getattr(self, event), getattr(watcher, event)))
