"""The hooks through which the cache tells a policy what happened, and asks it.

Owns the protocol only. Policies see opaque ids and keys, times, sizes and hints; never
tokens, reference counts or other policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """Chooses among unpinned leaves.

    Every hook is O(log n) or better, amortised; `victim` may also look at every class
    of leaves that a policy has. A node is a run of blocks with one history; victims lose their tail blocks first.
    `now` is in seconds and never decreases. `tick` numbers the events of the cache: it
    is the same for all nodes that one lease uses or releases at once, and higher for
    every later lease. Decisions use no randomness and have a total order.
    """

    @property
    def needs_keys(self) -> bool:
        """Whether `num_alike` and `published` are given the keys of blocks.

        A key is an opaque integer, equal for equal blocks behind equal prefixes of one
        domain, and different for others but for rare accidents.
        """

    def num_alike(self, keys: Sequence[int]) -> int:
        """Return how many leading blocks of a run to be published may be one node.

        At least 1. Blocks that were evicted and come back have a past of their own.
        """

    def can_extend(self, node_id: int, keys: Sequence[int]) -> bool:
        """Whether blocks that a lease adds may join the node it ends at."""

    def can_merge(self, upper_id: int, lower_id: int) -> bool:
        """Whether nothing would be lost if a split between two nodes was undone."""

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
        """A pinned node appeared, or grew by `num_blocks` at its end.

        `start` is how many blocks its path has before the new ones. `hint` is what the
        caller said of the prompt, as an opaque digit: equal digits, equal words.
        """

    def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
        """A lease on the node began."""

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        """The last lease on the node ended. It may have children."""

    def split(self, upper_id: int, lower_id: int, *, num_blocks: int) -> None:
        """`lower_id` was cut; its leading `num_blocks` blocks are now `upper_id`."""

    def merged(self, upper_id: int, lower_id: int) -> None:
        """`lower_id` took over the blocks of `upper_id`, which is gone.

        Both are held by the same leases, or by none; `can_merge` was asked.
        """

    def became_evictable(self, node_id: int, *, now: float) -> None:
        """The node is now an unpinned leaf. Says nothing about its last use."""

    def became_pinned(self, node_id: int) -> None:
        """The node is no longer an unpinned leaf, or must not be taken for now."""

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        """The node lost its tail and has `num_left` blocks now.

        With none left it is gone; its id never comes back. `may_return` is false where
        equal blocks will never be published again.
        """

    def victim(self, now: float) -> int | None:
        """Return the evictable node to take from, or `None` if there is none.

        Does not remove it: asking again before anything changes gives the same.
        """

    def most_to_take(self) -> int | None:
        """Return how many blocks of the last victim may go before it is asked again.

        `None`: as many as are wanted. Whoever evicts may take more, but should not.
        """
