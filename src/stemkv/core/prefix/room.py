"""Is there room for a demand, and whose is it.

Owns the sums over free, retained and promised blocks. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.keeper import Keeper
from stemkv.core.prefix.tree import Match, PrefixTree

__all__ = ["Demand", "FreeBlocks", "Room"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How much memory an acquire asks for, and what it must leave."""

    num_slots: int  # tokens that the table shall hold
    num_spare: int = 0  # available blocks that must be left over
    num_retained: int = 0  # evicting must not leave fewer cached blocks than this
    # Leave what the domain has retained up to its own floor: others give theirs later.
    spares_floor: bool = False


class FreeBlocks(Protocol):
    """What is asked of a pool, whoever owns it."""

    @property
    def num_free(self) -> int:
        """Blocks nobody owns."""


class Room:
    """Counts what could be had, in blocks."""

    def __init__(self, tree: PrefixTree, keeper: Keeper, pool: FreeBlocks) -> None:
        self._tree = tree
        self._keeper = keeper
        self._pool = pool

    def available_to(
        self, domain: Domain, *, num_used: int = 0, spares_floor: bool = False
    ) -> int:
        """Return how many blocks a domain could get beside those it is about to use."""
        return self._pool.num_free + self._keeper.num_available(
            domain,
            self._tree.num_unpinned_blocks,
            num_used=num_used,
            spares_floor=spares_floor,
        )

    def num_missing(self, match: Match, domain: Domain, demand: Demand) -> int:
        """Return how many more blocks had to be available, beside what matches."""
        num_fresh = self.num_fresh(match, demand)
        num_used = self._num_available_on(match, domain)
        room = self.available_to(
            domain, num_used=num_used, spares_floor=demand.spares_floor
        )
        num_short = num_fresh + demand.num_spare - room
        num_below = self._num_below(demand.num_retained, num_fresh, num_used)
        return max(0, num_short, num_below)

    def has_room_for_source(self, match: Match, domain: Domain, demand: Demand) -> bool:
        """Whether the source of a copy can be pinned besides.

        Else pinning it would take away the very blocks that the demand needs.
        """
        num_used = self._num_available_on(match, domain)
        num_used += self._num_beyond(match, domain)
        room = self.available_to(
            domain, num_used=num_used, spares_floor=demand.spares_floor
        )
        return self.num_fresh(match, demand) <= room - demand.num_spare

    def num_fresh(self, match: Match, demand: Demand) -> int:
        """Return how many blocks have to be allocated."""
        return -(-demand.num_slots // self._tree.block_size) - match.num_blocks

    # Private

    def _num_below(self, num_retained: int, num_fresh: int, num_used: int) -> int:
        """Return how far evicting for fresh blocks would go below what is retained."""
        if num_retained == 0:
            return 0
        num_evicted = num_fresh - self._pool.num_free
        if num_evicted <= 0:
            return 0
        return num_retained - (self._tree.num_unpinned_blocks - num_used - num_evicted)

    def _num_available_on(self, match: Match, domain: Domain) -> int:
        """Return how many of the matched blocks are available to a domain as room."""
        if match.node is None:
            return 0
        total = 0
        for node in match.node.path():
            if node.ref_count == 0 and self._keeper.counts_as_available(node, domain):
                is_last = node is match.node
                total += match.num_node_blocks if is_last else node.num_blocks
        return total

    def _num_beyond(self, match: Match, domain: Domain) -> int:
        """Return how many more available blocks pinning the copy's source takes."""
        if match.partial is None:
            return 0
        source = match.partial.node
        if source.ref_count or not self._keeper.counts_as_available(source, domain):
            return 0
        if source is match.node:
            return source.num_blocks - match.num_node_blocks
        return source.num_blocks
