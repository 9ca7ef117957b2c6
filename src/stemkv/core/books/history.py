"""What was in the cache before: who held which prefix, and when it left.

Owns a radix tree of token runs that outlives eviction. It answers *why* tokens were not
reused, never whether they may be: a hit is decided by `PrefixTree` alone. Knows nothing
of blocks, leases or policies.

One tree for all namespaces and domains, so that a miss can be traced to another domain
(what isolation costs) or to another identity (what a rollout or an adapter costs).
A holder is a namespace with a domain in it; for each holder a node notes per block
since when it is gone: `NEVER`, `REFUSED`, `RESIDENT`, or the time it left. Of all
others it notes only that some domain of a namespace had the block, so that a look costs
the same whoever else has the text. And it keeps the accounts of what left: its runs are
cut where prompts part, not where an eviction happened to stop, so they are what people
call a prefix.

A run has its own tokens only, and whoever has blocks resident keeps their `Place`: what
happens there costs the same at any depth. Digests of whole prefixes are made when
somebody asks for them.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from stemkv.core.books.account import PrefixAccount, RunTotals
from stemkv.core.books.past import (
    NEVER,
    REFUSED,
    RESIDENT,
    Holder,
    Past,
    PastRun,
    joined,
    pasts,
)
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.tokens import TOKEN_BYTES, common_prefix_bytes

__all__ = ["History", "Place"]

_MAX_NAMESPACES = 8  # noted for one run; the longest unchanged goes


class Place:
    """Where a resident run of a holder ends. Its run stays until `leave`."""

    __slots__ = ("holder", "node", "stop")

    def __init__(self, holder: Holder, node: _Node, stop: int) -> None:
        self.holder = holder
        self.node = node  # or it is above, after cuts
        self.stop = stop  # one past its last block
        node.num_places += 1


class _Node:
    """A run of blocks that no branch divides, and who held it."""

    __slots__ = (
        "accounts",
        "below",
        "children",
        "edge",
        "gone",
        "num_places",
        "parent",
        "seen",
        "start",
        "stop",
    )

    def __init__(
        self, parent: _Node | None, edge: bytes | bytearray, start: int, stop: int
    ) -> None:
        self.parent = parent
        self.edge = bytearray(edge)  # so that a long run grows at the price of the new
        self.start = start  # blocks above it
        self.stop = stop
        self.children: dict[bytes, _Node] = {}
        self.gone: dict[Holder, array[float]] = {}  # one number per block
        self.accounts: dict[Holder, PrefixAccount] = {}  # of what left, of these
        self.seen: dict[bytes, bytearray] = {}  # namespace → 1 where some domain had it
        self.num_places = 0
        # Of how many children somebody who needs the holder's blocks here is noted;
        # counted only if there is a bound.
        self.below: dict[Holder, int] = {}


class History:
    """Remembers published prefixes.

    Of blocks times their holders up to `max_blocks` (`None`: all). What is forgotten,
    the longest unused first and the end of a prefix before its beginning, is "never
    seen" again. Times are seconds and never decrease.
    """

    def __init__(self, block_size: int, *, max_blocks: int | None = None) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._max_blocks = max_blocks
        self._root = _Node(None, b"", 0, 0)
        self._num_blocks = 0
        self._num_marks = 0  # blocks times holders
        # Node and holder, the longest unused first, if there is a bound; those that
        # something below needs are left out when they are met.
        self._marks: OrderedDict[tuple[_Node, Holder], None] = OrderedDict()
        self._block_size = block_size
        self.forgotten = RunTotals()  # accounts without a place

    @property
    def num_blocks(self) -> int:
        """Blocks remembered."""
        return self._num_blocks

    @property
    def num_marks(self) -> int:
        """Blocks remembered, each as often as it has holders: what is bounded."""
        return self._num_marks

    def published(
        self,
        namespace: bytes,
        domain: Domain,
        tokens: bytes,
        start: int,
        stop: int,
        *,
        after: Place | None = None,
    ) -> Place:
        """Note that the holder has blocks `start … stop - 1` of `tokens` from now on.

        `after` is where the blocks before them end; without it they are looked up.
        O(new blocks).
        """
        holder = (namespace, domain)
        path = self._path(holder, tokens, start, stop, after)
        self._mark(path, holder, start, stop, RESIDENT)
        place = Place(holder, path[-1], stop)
        self._forget()  # what was forgotten while resident is remembered again
        return place

    def left(
        self, place: Place, start: int, now: float, *, is_refused: bool = False
    ) -> None:
        """Note that the blocks of a place from `start` on are not resident any more."""
        when = REFUSED if is_refused else now
        self._mark(self._above(place, start), place.holder, start, place.stop, when)
        self._forget()

    def cut(self, place: Place, stop: int) -> Place:
        """Return a place of its own for the blocks before `stop`."""
        return Place(place.holder, self._node_of(place, stop), stop)

    def leave(self, place: Place) -> None:
        """Let a place go."""
        node = place.node
        node.num_places -= 1
        self._prune(node)

    def past(
        self,
        namespace: bytes,
        domain: Domain,
        tokens: bytes,
        start: int,
        stop: int,
        *,
        after: Place | None = None,
    ) -> list[PastRun]:
        """Return what is known of blocks `start … stop - 1`, in order; pure.

        `after` is where some of the blocks before them end; what follows it is looked
        at. O(nodes) where a node's blocks share one past, else O(blocks); independent
        of how many holders there are.
        """
        runs: list[PastRun] = []
        index = start
        for node, low, high in self._walk(tokens, stop, after):
            low = max(start, low)
            if low < high:
                begin, end = low - node.start, high - node.start
                own = (namespace, domain)
                runs.extend(pasts(node.gone, node.seen, own, begin, end))
                index = high
        if index < stop:
            runs.append(PastRun(stop - index, Past()))
        return joined(runs)

    def book(self, place: Place, account: PrefixAccount) -> None:
        """Keep an account of blocks up to a place, in parts where their run is cut."""
        holder = place.holder
        for node, part in self._parts(place, account):
            if holder in node.gone:
                _put(node.accounts, holder, part)
            else:
                self.forgotten.add(part)

    def accounts(
        self, resident: Iterable[tuple[Place, PrefixAccount]]
    ) -> dict[bytes, PrefixAccount]:
        """Return the accounts of all runs by digest, with those of `resident` in them.

        Takes the resident ones over. O(tokens), each hashed once for each holder.
        """
        found: dict[_Node, dict[Holder, PrefixAccount]] = {}
        for place, account in resident:
            for node, part in self._parts(place, account):
                _put(found.setdefault(node, {}), place.holder, part)
        result: dict[bytes, PrefixAccount] = {}
        top = self._root.children.values()
        stack: list[tuple[_Node, _Digests | None]] = [(node, None) for node in top]
        while stack:
            node, above = stack.pop()
            digests = _Digests(above, node.edge)
            accounts = found.pop(node, {})
            for holder, account in node.accounts.items():
                _put(accounts, holder, account.copy())
            for holder, account in accounts.items():
                account.start = node.start * self._block_size
                account.end = node.stop * self._block_size
                result[digests.of(holder).digest()] = account
            stack.extend((child, digests) for child in node.children.values())
        return result

    # Private: where things are

    def _node_of(self, place: Place, stop: int) -> _Node:
        """Return the node in which the blocks of a place before `stop` end."""
        node = place.node
        while node.start >= place.stop:
            assert node.parent is not None, "a place has blocks"
            node = node.parent
        if node is not place.node:  # it was cut since
            node.num_places += 1
            self.leave(place)
            place.node = node
        while node.start >= stop:
            assert node.parent is not None, "the root has no blocks"
            node = node.parent
        return node

    def _above(self, place: Place, start: int) -> list[_Node]:
        """Return the nodes with blocks `start …` up to a place, in order."""
        node: _Node | None = self._node_of(place, place.stop)
        nodes = []
        while node is not None and node.stop > start:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def _parts(
        self, place: Place, account: PrefixAccount
    ) -> Iterator[tuple[_Node, PrefixAccount]]:
        """Divide an account among the runs that it lies on."""
        for node in self._above(place, account.start // self._block_size):
            end = node.stop * self._block_size
            if end >= account.end:
                yield node, account
                return
            yield node, account.split_off(end)

    def _walk(
        self, tokens: bytes, stop: int, after: Place | None
    ) -> Iterator[tuple[_Node, int, int]]:
        """Yield nodes and which blocks of theirs agree, along `tokens[:stop blocks]`."""
        size = self._block_bytes
        node, index = self._root, 0
        if after is not None:
            node, index = self._node_of(after, after.stop), after.stop
        while index < stop:
            begin = index * size
            if index == node.stop:
                child = node.children.get(tokens[begin : begin + size])
                if child is None:
                    return
                node = child
            low = (index - node.start) * size
            limit = min(len(node.edge) - low, stop * size - begin)
            if limit == len(node.edge) and tokens.startswith(node.edge, begin):
                num_same = limit
            else:
                num_same = common_prefix_bytes(node.edge, low, tokens, begin, limit)
            end = index + num_same // size
            yield node, index, end
            if end < node.stop:
                return
            index = end

    def _path(
        self,
        holder: Holder,
        tokens: bytes,
        start: int,
        stop: int,
        after: Place | None,
    ) -> list[_Node]:
        """Return the nodes with blocks up to `stop` of `tokens`, adding what is new."""
        nodes, index = [], 0
        if after is not None:
            nodes, index = [self._node_of(after, after.stop)], after.stop
        for node, _, end in tuple(self._walk(tokens, stop, after)):
            index = end
            if not nodes or node is not nodes[-1]:
                nodes.append(node)
        if index == stop:
            return nodes
        if nodes and index < nodes[-1].stop:
            nodes[-1] = self._split(nodes[-1], index)  # what is new branches off here
        last = nodes[-1] if nodes else self._root
        size = self._block_bytes
        grown = self._grow(last, holder, tokens[index * size : stop * size])
        if grown is not last:
            nodes.append(grown)
        return nodes

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # Private: what is remembered

    def _grow(self, last: _Node, holder: Holder, edge: bytes) -> _Node:
        """Add blocks behind a node and return where they are."""
        num_new = len(edge) // self._block_bytes
        self._num_blocks += num_new
        namespace = holder[0]
        if (
            last.children
            or last.gone.keys() != {holder}
            or last.seen.keys() != {namespace}
        ):
            node = _Node(last, edge, last.stop, last.stop + num_new)
            last.children[edge[: self._block_bytes]] = node
            return node
        # A prefix that grows block by block stays one run.
        last.edge += edge
        last.stop += num_new
        last.gone[holder].extend(array("d", [NEVER]) * num_new)
        last.seen[namespace].extend(bytes(num_new))
        self._num_marks += num_new
        return last

    def _mark(
        self, path: list[_Node], holder: Holder, start: int, stop: int, value: float
    ) -> None:
        """Set the holder's number of these blocks, which lie on the nodes of a path."""
        for node in path:
            low = max(0, start - node.start)
            self._set(node, holder, low, min(stop, node.stop) - node.start, value)
        if self._max_blocks is None:
            return
        # The end first, so that a prefix is remembered as long as what continues it.
        for node in reversed(path):
            for each in _needed(holder):
                if each in node.gone:
                    self._use(node, each)

    def _set(
        self, node: _Node, holder: Holder, low: int, high: int, value: float
    ) -> None:
        """Mark blocks `low … high - 1` of a node, if there are any."""
        if low >= high:
            return
        gone = node.gone.get(holder)
        if gone is None:
            num_blocks = node.stop - node.start
            gone = node.gone[holder] = array("d", [NEVER]) * num_blocks
            self._num_marks += num_blocks
            self._count_below(node.parent, holder, 1)
        gone[low:high] = array("d", [value]) * (high - low)
        namespace = holder[0]
        seen = node.seen.pop(namespace, None)
        if seen is None:
            seen = bytearray(len(gone))
        seen[low:high] = bytes([1]) * (high - low)
        node.seen[namespace] = seen  # the last in the order of change
        if len(node.seen) > _MAX_NAMESPACES:
            del node.seen[next(iter(node.seen))]

    def _split(self, node: _Node, cut: int) -> _Node:
        """Cut a node at a block and return the upper part, which is new."""
        parent = node.parent
        assert parent is not None, "the root has no edge to cut"
        size = self._block_bytes
        num_blocks = cut - node.start
        upper = _Node(parent, node.edge[: num_blocks * size], node.start, cut)
        for holder, gone in node.gone.items():
            upper.gone[holder] = gone[:num_blocks]
            node.gone[holder] = gone[num_blocks:]
            self._count_below(upper, holder, 1)
            self._use(upper, holder)
        for namespace, seen in node.seen.items():
            upper.seen[namespace] = seen[:num_blocks]
            node.seen[namespace] = seen[num_blocks:]
        for holder, account in tuple(node.accounts.items()):
            part = account.split_off(cut * self._block_size)
            if part.start < part.end:
                upper.accounts[holder] = part
            if account.start == account.end:
                del node.accounts[holder]
        parent.children[bytes(upper.edge[:size])] = upper
        node.parent = upper
        node.start = cut
        del node.edge[: num_blocks * size]
        upper.children[bytes(node.edge[:size])] = node
        return upper

    # Private: what is forgotten

    def _use(self, node: _Node, holder: Holder) -> None:
        if self._max_blocks is not None:
            self._marks[node, holder] = None
            self._marks.move_to_end((node, holder))

    def _count_below(self, node: _Node | None, holder: Holder, by: int) -> None:
        """Note that a child's mark needs the marks above it, or does no longer."""
        if self._max_blocks is None or node is None:
            return
        for each in reversed(_needed(holder)):
            count = node.below.pop(each, 0) + by
            if count:
                node.below[each] = count
            elif each in node.gone and (node, each) not in self._marks:
                # It was older than what needed it, which was just forgotten.
                self._marks[node, each] = None
                self._marks.move_to_end((node, each), last=False)

    def _forget(self) -> None:
        """Drop what was unused for longest, down to the bound; amortised O(1)."""
        while self._max_blocks is not None and self._num_marks > self._max_blocks:
            (node, holder), _ = self._marks.popitem(last=False)
            if holder in node.below:
                continue
            self._num_marks -= len(node.gone.pop(holder))
            account = node.accounts.pop(holder, None)
            if account is not None:
                self.forgotten.add(account)
            self._count_below(node.parent, holder, -1)
            self._prune(node)

    def _prune(self, node: _Node) -> None:
        """Drop a node of which nothing is remembered, and what it alone continued."""
        while node.parent is not None and not node.gone and not node.children:
            node.seen.clear()
            if node.num_places:
                return  # for those who have it still
            del node.parent.children[bytes(node.edge[: self._block_bytes])]
            self._num_blocks -= node.stop - node.start
            node = node.parent


class _Digests:
    """SHA-256 of holders and all tokens up to a node's end, where asked for."""

    __slots__ = ("_above", "_edge", "_states")

    def __init__(self, above: _Digests | None, edge: bytearray) -> None:
        self._above = above
        self._edge = edge
        self._states: dict[Holder, hashlib._Hash] = {}

    def of(self, holder: Holder) -> hashlib._Hash:
        """Return the hash for one holder; not to be updated."""
        missing: list[_Digests] = []
        each: _Digests | None = self
        while each is not None and holder not in each._states:
            missing.append(each)
            each = each._above
        if each is None:
            namespace, domain = holder
            place = (namespace, domain.kind.value, domain.name)
            state = hashlib.sha256(repr(place).encode())
        else:
            state = each._states[holder]
        for each in reversed(missing):
            state = state.copy()
            state.update(each._edge)
            each._states[holder] = state
        return state


def _needed(holder: Holder) -> tuple[Holder, ...]:
    """Return whose marks above a holder's blocks are of use to it, its own first."""
    public = (holder[0], PUBLIC)
    return (holder,) if holder == public else (holder, public)


def _put(
    accounts: dict[Holder, PrefixAccount], holder: Holder, account: PrefixAccount
) -> None:
    """Add an account to what is there of the same holder."""
    present = accounts.get(holder)
    if present is None:
        accounts[holder] = account
    else:
        present.join(account)
