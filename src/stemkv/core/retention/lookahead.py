"""What waiting requests will hit of the leaves that are about to go.

Owns the comparison of a snapshot of the queue with single leaves. Matches nothing in the
tree: few leaves are asked about, and the queue may be long. Knows no policy and no
order; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stemkv.core.prefix.identity import PUBLIC
from stemkv.core.prefix.keeper import Waiting
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.prefix.tree import Node, PrefixTree

__all__ = ["Awaited", "Lookahead", "Waiting"]


@dataclass(frozen=True, slots=True)
class Awaited:
    """What waiting requests will hit of a leaf, as seen from its tail."""

    num_tail_blocks: int  # of its tail, that the same request will hit first
    place: int | None  # of that request in the queue; None: nobody will hit them


class Lookahead:
    """A snapshot of the queue, in order.

    Requests are found by the block that they would need at a leaf's beginning, so a
    leaf costs O(nodes above it) for each request that may hit it, and the first leaf
    of a depth O(requests).
    """

    def __init__(self, waiting: Iterable[Waiting], tree: PrefixTree) -> None:
        self._waiting = [each for each in waiting if each.namespace is not None]
        self._tree = tree
        self._block_bytes = tree.block_bytes
        # Byte offset → block there → places in the queue
        self._places: dict[int, dict[bytes, list[int]]] = {}

    def __len__(self) -> int:
        """Return how many wait and may share."""
        return len(self._waiting)

    def awaited(self, leaf: int) -> Awaited | None:
        """Return what will be hit of a leaf, in whole blocks; `None`: nothing."""
        node = self._tree.node(leaf)
        above: list[Node] = node.path()[:-1]
        begin = sum(len(step.edge) for step in above)
        places = self._at(begin).get(node.edge[: self._block_bytes], ())
        most = 0
        for place in places:
            num_blocks = self._num_hit(self._waiting[place], node, above, begin)
            if num_blocks == node.num_blocks:
                return Awaited(num_blocks - most, place)
            most = max(most, num_blocks)
        return Awaited(node.num_blocks - most, None) if most else None

    def _at(self, begin: int) -> dict[bytes, list[int]]:
        places = self._places.get(begin)
        if places is None:
            places = self._places[begin] = {}
            end = begin + self._block_bytes
            for place, waiting in enumerate(self._waiting):
                places.setdefault(waiting.tokens[begin:end], []).append(place)
        return places

    def _num_hit(
        self, waiting: Waiting, node: Node, above: list[Node], begin: int
    ) -> int:
        tokens = waiting.tokens
        # The last token is computed in any case.
        end = (len(tokens) - TOKEN_BYTES) // self._block_bytes * self._block_bytes
        if (
            end <= begin
            or node.domain not in (PUBLIC, waiting.domain)
            or node.root().namespace != waiting.namespace
        ):
            return 0
        offset = 0
        for step in above:
            if not tokens.startswith(step.edge, offset):
                return 0
            offset += len(step.edge)
        return self._tree.common_blocks(node, tokens, begin, end)
