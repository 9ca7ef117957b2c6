"""What every waiting request would match now, without matching any of them again.

Owns, for each waiting request, where its match ends in the prefix tree, and the index
from places in the tree to requests: at which nodes matches end, and which block each
needs next. It watches what changes in the tree; then only the requests that the change
concerns move. Knows no order, no time and no reference counts.

A request's match ends in one node of the public path, and in one node of each private
branch that leaves that path and fits. A block that is published can only lengthen the
matches that want exactly it there, and blocks that are dropped only shorten those that
end in them; a split or merge renames places. So an event costs O(requests it moves),
and what did not move needs no look. Scheduling research calls the two halves `want` and
`at`; the sum of it replaces a match of the whole queue in every step.

Counted are whole blocks: what could be copied out of a block that agrees in part is
found at admission.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TypeVar

from stemkv.core.prefix.events import DropReason
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.tokens import TOKEN_BYTES, end_outside_span
from stemkv.core.prefix.tree import Node, PrefixTree
from stemkv.core.prefix.watcher import Publication, Watcher
from stemkv.core.schedule.request import RequestId
from stemkv.errors import InvariantError

__all__ = ["WaitingMatches"]

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")
_Place = tuple[int, Domain, bytes]  # parent's id, domain of a child, its first block


class WaitingMatches(Watcher):
    """The matches of all waiting requests, kept up to date by events of the tree."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._block_bytes = tree.block_bytes
        self._entries: dict[RequestId, _Entry] = {}
        # Dicts are sets that keep their order: equal runs move requests in equal order.
        self._at: dict[int, dict[_End, None]] = {}  # by node id
        self._want: dict[_Place, dict[_End, None]] = {}
        self._families: dict[tuple[bytes, Domain], dict[_Entry, None]] = {}
        self._rootless: dict[bytes, dict[_Entry, None]] = {}  # their namespace is empty
        self._moved: dict[RequestId, None] = {}
        self._num_matches = 0

    # Questions

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._entries)

    @property
    def num_matches(self) -> int:
        """How often a whole prompt was matched, since the start."""
        return self._num_matches

    def num_blocks(self, request_id: RequestId) -> int:
        """Return how many whole blocks the request would find cached now."""
        return self._entries[request_id].num_blocks

    def num_public_blocks(self, request_id: RequestId) -> int:
        """Return how many whole blocks it would find if it saw only what is public."""
        return self._entries[request_id].num_public_blocks

    def path(self, request_id: RequestId) -> list[Node]:
        """Return the nodes of its longest match, from below the root; the last in part."""
        entry = self._entries[request_id]
        deepest = max(entry.ends, key=lambda end: end.offset, default=None)
        return [] if deepest is None else deepest.node.path()

    def check(self) -> None:
        """Raise `InvariantError` unless all is as if every request were matched now."""
        for entry in self._entries.values():
            found = _Found.of(entry, self._tree)
            expected = sorted((n.id, num, at) for n, num, at in found.ends)
            if entry in self._rootless.get(entry.namespace or b"", ()):
                # A root with nothing below it is taken for none.
                expected = [end for end in expected if end[2]]
            ends = sorted((e.node.id, e.num_blocks, e.offset) for e in entry.ends)
            counts = (entry.num_blocks, entry.num_public_blocks)
            if expected != ends or counts != self._counted(entry):
                raise InvariantError(
                    f"waiting request {entry.request_id} is taken to match {ends} "
                    f"({counts} blocks), the tree has {expected}"
                )
            for end in entry.ends:
                if end not in self._at.get(end.node.id, ()):
                    raise InvariantError(
                        f"waiting request {entry.request_id} is not known at node "
                        f"{end.node.id}"
                    )
                missing = [p for p in self._places(end) if p not in end.places]
                if missing:
                    raise InvariantError(
                        f"waiting request {entry.request_id} does not want what is "
                        f"next below node {end.node.id}"
                    )
        num_ends = sum(len(entry.ends) for entry in self._entries.values())
        num_at = sum(len(ends) for ends in self._at.values())
        num_placed = sum(len(e.places) for at in self._at.values() for e in at)
        num_want = sum(len(ends) for ends in self._want.values())
        if num_ends != num_at or num_placed != num_want:
            raise InvariantError(
                f"{num_ends} ends of matches but {num_at} at nodes; {num_placed} "
                f"places wanted but {num_want} in the index"
            )

    # Requests

    def add(
        self,
        request_id: RequestId,
        namespace: bytes | None,
        domain: Domain,
        tokens: bytes,
    ) -> None:
        """Begin to follow a request; `None` as namespace: it will never match."""
        if request_id in self._entries:
            raise InvariantError(f"request {request_id} waits already")
        entry = _Entry(request_id, namespace, domain, tokens, self._block_bytes)
        self._entries[request_id] = entry
        if namespace is not None:
            self._families.setdefault((namespace, domain), {})[entry] = None
            self._match(entry)
            self._count(entry)
            self._moved.pop(request_id, None)  # its caller asks anyhow

    def remove(self, request_id: RequestId) -> None:
        """Stop to follow a request."""
        entry = self._entries.pop(request_id)
        self._moved.pop(request_id, None)
        self._clear(entry)
        if entry.namespace is None:
            return
        _discard(self._families, (entry.namespace, entry.domain), entry)
        _discard(self._rootless, entry.namespace, entry)

    def take_moved(self) -> tuple[RequestId, ...]:
        """Return and forget whose counts have changed since the last call."""
        if not self._moved:
            return ()
        moved = tuple(self._moved)
        self._moved.clear()
        return moved

    # What happens to nodes

    def added(self, node: Node, publication: Publication) -> None:
        """Follow a new node: those who want its first block match more."""
        if not self._entries:
            return
        parent = node.parent
        assert parent is not None, "roots are not added"
        block = node.edge[: self._block_bytes]
        for end in tuple(self._want.get((parent.id, node.domain, block), ())):
            if end.num_blocks == end.node.num_blocks:
                self._descend(end, node)
        if parent.parent is None and parent.namespace in self._rootless:
            self._match_again(self._rootless[parent.namespace])
        elif (
            node.domain != PUBLIC
            and parent.domain == PUBLIC
            and self._tree.child(parent, PUBLIC, block) is not None
        ):
            # The same block twice, published before and after it was declared public:
            # requests that pass it on the public path have a second branch now.
            family = (node.root().namespace, node.domain)
            self._match_again(self._families.get(family, ()))

    def extended(self, node: Node, publication: Publication) -> None:
        """Follow a lengthened leaf."""
        if not self._entries:
            return
        num_blocks_before = node.num_blocks - len(publication.block_ids)
        start = num_blocks_before * self._block_bytes
        block = node.edge[start : start + self._block_bytes]
        for end in tuple(self._want.get((node.id, node.domain, block), ())):
            if end.num_blocks == num_blocks_before:
                begin = end.offset - start
                limit = end.entry.limit
                num = self._tree.common_blocks(node, end.entry.tokens, begin, limit)
                self._move(end, node, num, begin + num * self._block_bytes)
                self._count(end.entry)

    def split(self, upper: Node, lower: Node, now: float) -> None:
        """Follow a cut edge; the lower part kept its id. Nobody matches more or less."""
        cut = upper.num_blocks
        for end in tuple(self._at.get(lower.id, ())):
            if end.num_blocks <= cut:
                self._move(end, upper, end.num_blocks, end.offset)
            else:
                end.num_blocks -= cut

    def merged(self, upper: Node, lower: Node, now: float) -> None:
        """Follow an undone cut; `upper` has left the tree, `lower` has its blocks."""
        for end in self._at.get(lower.id, ()):
            end.num_blocks += upper.num_blocks
        for end in tuple(self._at.get(upper.id, ())):
            self._move(end, lower, end.num_blocks, end.offset)

    def trimmed(
        self, node: Node, block_ids: array[int], reason: DropReason, now: float
    ) -> None:
        """Follow a leaf that lost tail blocks; with none left it has left the tree."""
        keep = node.num_blocks
        parent = node.parent
        for end in tuple(self._at.get(node.id, ())):
            if end.num_blocks < keep:
                continue
            offset = end.offset - (end.num_blocks - keep) * self._block_bytes
            if keep:
                self._move(end, node, keep, offset)
            elif node.domain != PUBLIC and (parent is None or parent.domain == PUBLIC):
                self._leave(end)  # the public path has an end of its own
                end.entry.ends.remove(end)
            else:
                assert parent is not None, "a node that goes had a parent"
                self._move(end, parent, parent.num_blocks, offset)
            self._count(end.entry)

    def retired(self, namespace: bytes, now: float) -> None:
        """Follow a fence: nothing in the namespace can be matched any more."""
        for (each, _), entries in tuple(self._families.items()):
            if each == namespace:
                self._match_again(entries)

    # Private

    def _match_again(self, entries: Iterable[_Entry]) -> None:
        for entry in tuple(entries):
            self._clear(entry)
            self._match(entry)
            self._count(entry)

    def _match(self, entry: _Entry) -> None:
        assert entry.namespace is not None, "only what may share is matched"
        self._num_matches += 1
        found = _Found.of(entry, self._tree)
        if found.has_root:
            _discard(self._rootless, entry.namespace, entry)
        else:
            self._rootless.setdefault(entry.namespace, {})[entry] = None
        for node, num_blocks, offset in found.ends:
            self._enter(_End(entry), node, num_blocks, offset)

    def _clear(self, entry: _Entry) -> None:
        for end in entry.ends:
            self._leave(end)
        entry.ends.clear()

    def _descend(self, end: _End, node: Node) -> None:
        """Let a match go on into a child of the node in which it has ended."""
        entry = end.entry
        num = self._tree.common_blocks(node, entry.tokens, end.offset, entry.limit)
        offset = end.offset + num * self._block_bytes
        if end.node.domain == PUBLIC and node.domain != PUBLIC:
            self._enter(_End(entry), node, num, offset)
        else:
            self._move(end, node, num, offset)
        self._count(entry)

    def _enter(self, end: _End, node: Node, num_blocks: int, offset: int) -> None:
        end.entry.ends.append(end)
        self._place(end, node, num_blocks, offset)

    def _move(self, end: _End, node: Node, num_blocks: int, offset: int) -> None:
        self._leave(end)
        self._place(end, node, num_blocks, offset)

    def _place(self, end: _End, node: Node, num_blocks: int, offset: int) -> None:
        end.node, end.num_blocks, end.offset = node, num_blocks, offset
        self._at.setdefault(node.id, {})[end] = None
        end.places = self._places(end)
        for place in end.places:
            self._want.setdefault(place, {})[end] = None

    def _leave(self, end: _End) -> None:
        _discard(self._at, end.node.id, end)
        for place in end.places:
            _discard(self._want, place, end)
        end.places = ()

    def _places(self, end: _End) -> tuple[_Place, ...]:
        """Return where the next block of the match would be published."""
        node, entry = end.node, end.entry
        stop = end.offset + self._block_bytes
        if end.num_blocks < node.num_blocks or stop > entry.limit:
            return ()
        block = entry.tokens[end.offset : stop]
        if node.domain == PUBLIC:
            return (node.id, PUBLIC, block), (node.id, entry.domain, block)
        return ((node.id, entry.domain, block),)

    def _count(self, entry: _Entry) -> None:
        counts = self._counted(entry)
        if counts != (entry.num_blocks, entry.num_public_blocks):
            entry.num_blocks, entry.num_public_blocks = counts
            self._moved[entry.request_id] = None

    def _counted(self, entry: _Entry) -> tuple[int, int]:
        longest = public = 0
        for end in entry.ends:
            longest = max(longest, end.offset)
            if end.node.domain == PUBLIC:
                public = end.offset
        return self._whole_blocks(entry, longest), self._whole_blocks(entry, public)

    def _whole_blocks(self, entry: _Entry, num_bytes: int) -> int:
        """Return how many blocks that is, without too little of a span to tell it."""
        if not num_bytes:
            return 0
        num_tokens = num_bytes // TOKEN_BYTES
        end = end_outside_span(entry.tokens, num_tokens)
        return end * TOKEN_BYTES // self._block_bytes


class _Entry:
    """A waiting request."""

    __slots__ = (
        "domain",
        "ends",
        "limit",
        "namespace",
        "num_blocks",
        "num_public_blocks",
        "request_id",
        "tokens",
    )

    def __init__(
        self,
        request_id: RequestId,
        namespace: bytes | None,
        domain: Domain,
        tokens: bytes,
        block_bytes: int,
    ) -> None:
        self.request_id = request_id
        self.namespace = namespace
        self.domain = domain
        self.tokens = tokens
        # The last token is computed in any case; in bytes, whole blocks.
        num_bytes = len(tokens) - TOKEN_BYTES
        self.limit = num_bytes - num_bytes % block_bytes
        self.ends: list[_End] = []
        self.num_blocks = 0
        self.num_public_blocks = 0


class _End:
    """Where one branch of a request's match ends."""

    __slots__ = ("entry", "node", "num_blocks", "offset", "places")

    node: Node
    num_blocks: int  # of the node that agree
    offset: int  # bytes of the request's tokens that agree

    def __init__(self, entry: _Entry) -> None:
        self.entry = entry
        self.places: tuple[_Place, ...] = ()


class _Found:
    """Where a match ends now, found by matching."""

    __slots__ = ("ends", "has_root")

    def __init__(self, ends: list[tuple[Node, int, int]], *, has_root: bool) -> None:
        self.ends = ends
        self.has_root = has_root

    @classmethod
    def of(cls, entry: _Entry, tree: PrefixTree) -> _Found:
        namespace = entry.namespace
        root = None if namespace is None else tree.live_root(namespace)
        if root is None:
            return cls([], has_root=False)
        ends = tree.ends(root, entry.domain, entry.tokens, end=entry.limit)
        # Branches that go no further than the public node they leave are not ends: a
        # new child there is found by the block that it begins with.
        kept = [ends[0], *(each for each in ends[1:] if each[0].domain != PUBLIC)]
        return cls(kept, has_root=True)


def _discard(sets: dict[_Key, dict[_Item, None]], key: _Key, item: _Item) -> None:
    members = sets.get(key)
    if members is not None:
        members.pop(item, None)
        if not members:
            del sets[key]
