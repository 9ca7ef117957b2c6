"""What prefix/ asks of whoever decides what stays.

Owns the questions. Retention answers them; another engine may bring its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stemkv.core.prefix.hints import Hints
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.tree import Node, PrefixTree
from stemkv.core.prefix.watcher import Publication, Watcher

__all__ = ["Keeper", "Waiting"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a waiting request will look up."""

    namespace: bytes | None  # None: nothing
    domain: Domain
    tokens: bytes


class Keeper(Watcher, ABC):
    """Hears of every node, and says which leaf goes next and what may be one node."""

    # Sizes, in blocks

    @abstractmethod
    def num_available(
        self,
        domain: Domain,
        num_unpinned: int,
        *,
        num_used: int = 0,
        spares_floor: bool = False,
    ) -> int:
        """Return how many of `num_unpinned` retained blocks could go for a domain.

        Less `num_used`, which it is about to use, and what its own floor covers if that
        is spared.
        """

    @abstractmethod
    def counts_as_available(self, node: Node, domain: Domain) -> bool:
        """Whether `num_available` counts an unpinned node that the domain may use."""

    @abstractmethod
    def num_lendable(self, num_unpinned: int) -> int:
        """Return how many of the retained blocks anybody's allocation could get."""

    @abstractmethod
    def most_blocks(self, domain: Domain, num_total: int) -> int:
        """Return how many blocks a domain can surely hold if it is alone."""

    @property
    @abstractmethod
    def public_budget(self) -> int | None:
        """How much may be declared public; `None`: as much as one likes."""

    # What may be one node

    @property
    @abstractmethod
    def needs_keys(self) -> bool:
        """Whether `num_alike` and publications are given the keys of blocks."""

    @abstractmethod
    def num_alike(self, domain: Domain, keys: Sequence[int]) -> int:
        """Return how many leading blocks may be one node; at least 1."""

    @abstractmethod
    def can_extend(self, node: Node, publication: Publication) -> bool:
        """Whether what is published may join the node: nothing tells them apart."""

    @abstractmethod
    def can_merge(self, upper: Node, lower: Node) -> bool:
        """Whether nothing tells the two apart."""

    # What stays

    @abstractmethod
    def digit(self, owner: str, hints: Hints) -> int:
        """Return what a caller said of its next use as a number to learn from."""

    @abstractmethod
    def refuses(self, node: Node, now: float) -> bool:
        """Whether a leaf that nobody holds shall not be retained at all."""

    @abstractmethod
    def is_evictable(self, node: Node) -> bool:
        """Whether it was told that the node became evictable, and nothing since."""

    @abstractmethod
    def became_evictable(self, node: Node, now: float) -> None:
        """The node is now an unpinned leaf."""

    @abstractmethod
    def keep(self, node: Node, until: float, now: float) -> None:
        """Keep a node until a time, as long as anything else can go."""

    @abstractmethod
    def end_session(self, domain: Domain, session: str, now: float) -> None:
        """Let blocks that only this session has used go before all others."""

    # What goes

    @abstractmethod
    def watch_queue(
        self, queue: Callable[[float], Iterable[Waiting]], tree: PrefixTree
    ) -> None:
        """Ask `queue(now)` who waits, in order, before anything is evicted."""

    @abstractmethod
    def look_ahead(self, now: float) -> None:
        """Find out who waits now: the caller is about to ask for victims."""

    @abstractmethod
    def victim(
        self, domain: Domain | None, now: float
    ) -> tuple[int, int | None] | None:
        """Return the leaf to take from and how many blocks at most (`None`: any).

        `domain` is whose request needs room; `None`: the operator's wish.
        """

    @abstractmethod
    def is_over_cap(self, domain: Domain) -> bool:
        """Whether a domain has retained more than it may."""

    @abstractmethod
    def victim_over_cap(self, domain: Domain, now: float) -> tuple[int, int] | None:
        """Return the leaf that a domain over its cap must give, and how many blocks."""
