"""The hooks through which the cache tells a policy what happened, and asks it.

Owns the protocol only. Policies see opaque node ids, times and sizes; never tokens,
reference counts or other policies.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """Chooses among unpinned leaves. Every hook is O(log n) or better.

    A node is a run of blocks; victims lose their tail blocks first. `now` is in
    seconds and never decreases. Decisions use no randomness and have a total order.
    """

    def published(self, node_id: int, *, num_blocks: int, now: float) -> None:
        """A node appeared, or grew to `num_blocks`; it is pinned."""

    def touched(self, node_id: int, *, now: float) -> None:
        """A lease on the node began or ended."""

    def split(self, upper_id: int, lower_id: int) -> None:
        """`lower_id` was cut; its leading blocks are now node `upper_id`."""

    def merged(self, upper_id: int, lower_id: int) -> None:
        """`lower_id` took over the blocks of `upper_id`, which is gone: a split undone.

        A use of either was a use of the whole.
        """

    def became_evictable(self, node_id: int, *, now: float) -> None:
        """The node is now an unpinned leaf. Says nothing about its last use."""

    def became_pinned(self, node_id: int) -> None:
        """The node is no longer an unpinned leaf."""

    def removed(self, node_id: int) -> None:
        """The node lost its last block; its id never comes back."""

    def victim(self) -> int | None:
        """Return the evictable node to take from, or `None` if there is none.

        Does not remove it: asking again before anything changes gives the same.
        """
