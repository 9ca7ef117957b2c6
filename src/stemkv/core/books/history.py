"""What was in the cache before: who held which prefix, and when it left.

Owns a radix tree of token runs that outlives eviction. It answers *why* tokens were not
reused, never whether they may be: a hit is decided by `PrefixTree` alone. Knows nothing
of blocks, leases or policies.

One tree for all namespaces and domains, so that a miss can be traced to another domain
(what isolation costs) or to another identity (what a rollout or an adapter costs).
A holder is a namespace with a domain in it; for each holder a node notes per block
since when it is gone: `_NEVER`, `_REFUSED`, `_RESIDENT`, or the time it left. Of all
others it notes only that some domain of a namespace had the block, so that a look costs
the same whoever else has the text. And it keeps the accounts of what left: its runs are
cut where prompts part, not where an eviction happened to stop, so they are what people
call a prefix.
"""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from stemkv.core.books.account import PrefixAccount
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.tokens import TOKEN_BYTES, common_prefix_bytes

__all__ = ["Booking", "History", "Past", "PastRun"]

_NEVER = -math.inf  # this holder never had the block
_REFUSED = -sys.float_info.max  # dropped after use: before any time, after never
_RESIDENT = math.inf
_MAX_NAMESPACES = 8  # noted for one run; the longest unchanged goes

Holder = tuple[bytes, Domain]


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of one run of blocks that a request did not find.

    The first of these that applies: the request itself might have found them earlier
    (`left_s`), another domain of its namespace has or had them, another namespace has
    or had them; else nobody did.
    """

    # When its own or the public copy was evicted; inf: it is resident, or was dropped
    # because it must not be used.
    left_s: float | None = None
    is_refused: bool = False  # it was dropped after use, as its caller had said
    is_other_domain: bool = False
    other_namespace: bytes | None = None


@dataclass(frozen=True, slots=True)
class PastRun:
    """Consecutive blocks with the same past."""

    num_blocks: int
    past: Past


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """An account of blocks `start … stop - 1` of some tokens; it is the history's now."""

    namespace: bytes
    tokens: bytes
    start: int
    stop: int
    account: PrefixAccount


class _Node:
    """A run of blocks that no branch divides, and who held it."""

    __slots__ = ("accounts", "children", "edge", "gone", "parent", "seen")

    def __init__(self, parent: _Node | None, edge: bytes) -> None:
        self.parent = parent
        self.edge = edge
        self.children: dict[bytes, _Node] = {}
        self.gone: dict[Holder, array[float]] = {}  # one number per block
        self.accounts: dict[Holder, PrefixAccount] = {}  # of what left
        self.seen: dict[bytes, bytearray] = {}  # namespace → 1 where some domain had it


class History:
    """Remembers published prefixes.

    Of blocks times their holders up to `max_blocks` (`None`: all). What is forgotten,
    the longest unused first, is "never seen" again. Times are seconds and never
    decrease.
    """

    def __init__(self, block_size: int, *, max_blocks: int | None = None) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._max_blocks = max_blocks
        self._root = _Node(None, b"")
        self._num_blocks = 0
        self._num_marks = 0  # blocks times holders
        # Node and holder, the longest unused first; kept only if there is a bound.
        self._marks: dict[tuple[_Node, Holder], None] = {}
        self._block_size = block_size
        self._forgotten: dict[Holder, PrefixAccount] = {}  # accounts without a place

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
    ) -> None:
        """Note that the holder has blocks `start … stop - 1` of `tokens` from now on."""
        self._mark(namespace, domain, tokens, start, stop, _RESIDENT)
        self._forget()

    def left(
        self,
        namespace: bytes,
        domain: Domain,
        tokens: bytes,
        start: int,
        stop: int,
        now: float,
        *,
        is_refused: bool = False,
    ) -> None:
        """Note that blocks `start … stop - 1` of `tokens` are not resident any more."""
        when = _REFUSED if is_refused else now
        self._mark(namespace, domain, tokens, start, stop, when)
        self._forget()  # what was forgotten while resident is remembered again

    def past(
        self, namespace: bytes, domain: Domain, tokens: bytes, start: int, stop: int
    ) -> list[PastRun]:
        """Return what is known of blocks `start … stop - 1`, in order; pure.

        O(nodes on the path) where a node's blocks share one past, else O(blocks);
        independent of how many holders there are.
        """
        runs: list[PastRun] = []
        index = 0
        for node, num_same in self._walk(tokens, stop):
            low, high = max(start, index), index + num_same
            if low < high:
                runs.extend(
                    _pasts(node, (namespace, domain), low - index, high - index)
                )
            index += num_same
        if max(index, start) < stop:
            runs.append(PastRun(stop - max(index, start), Past()))
        return _joined(runs)

    def book(self, booking: Booking) -> None:
        """Keep an account, in parts where its run is cut."""
        for node, part in self._parts(booking):
            self._keep(node, (booking.namespace, part.domain), part)

    def accounts(self, resident: Iterable[Booking]) -> dict[bytes, PrefixAccount]:
        """Return the accounts of all runs by digest, with those of `resident` in them.

        What was forgotten is in one account for each holder, of no tokens. O(tokens).
        """
        found: dict[_Node | None, dict[Holder, PrefixAccount]] = {}
        for booking in resident:
            for node, part in self._parts(booking):
                _put(found.setdefault(node, {}), (booking.namespace, part.domain), part)
        result: dict[bytes, PrefixAccount] = {}
        stack: list[tuple[_Node | None, int, bytes]] = [
            (node, 0, b"") for node in self._root.children.values()
        ]
        for holder, account in _with(self._forgotten, found.get(None, {})).items():
            account.start = account.end = 0
            result[_digest(holder, b"")] = account
        while stack:
            node, start, above = stack.pop()
            assert node is not None, "only the root has none"
            tokens = above + node.edge
            for holder, account in _with(node.accounts, found.get(node, {})).items():
                account.start = start
                account.end = len(tokens) // TOKEN_BYTES
                result[_digest(holder, tokens)] = account
            end = len(tokens) // TOKEN_BYTES
            stack.extend((child, end, tokens) for child in node.children.values())
        return result

    # Private

    def _parts(self, booking: Booking) -> Iterator[tuple[_Node | None, PrefixAccount]]:
        """Divide an account among the runs it lies on; the last may have no place."""
        account, start, index = booking.account, booking.start, 0
        for node, num_same in tuple(self._walk(booking.tokens, booking.stop)):
            end = index + num_same
            if start < end:
                part = account
                if end < booking.stop:
                    part = account.split_off(end * self._block_size)
                yield node, part
                start = end
            index = end
        if start < booking.stop:
            yield None, account

    def _keep(self, node: _Node | None, holder: Holder, account: PrefixAccount) -> None:
        _put(self._forgotten if node is None else node.accounts, holder, account)

    def _walk(self, tokens: bytes, stop: int) -> Iterator[tuple[_Node, int]]:
        """Yield (node, leading blocks of it that agree) along `tokens[:stop blocks]`."""
        size = self._block_bytes
        end = stop * size
        node, offset = self._root, 0
        while offset < end:
            child = node.children.get(tokens[offset : offset + size])
            if child is None:
                return
            limit = min(len(child.edge), end - offset)
            if limit == len(child.edge) and tokens.startswith(child.edge, offset):
                same = limit
            else:
                same = common_prefix_bytes(child.edge, 0, tokens, offset, limit)
                same -= same % size
            yield child, same // size
            offset += same
            if same < len(child.edge):
                return
            node = child

    def _mark(
        self,
        namespace: bytes,
        domain: Domain,
        tokens: bytes,
        start: int,
        stop: int,
        value: float,
    ) -> None:
        """Set the holder's number of these blocks, adding nodes as needed."""
        holder = (namespace, domain)
        size = self._block_bytes
        index, last = 0, self._root
        path = []
        for node, num_same in tuple(self._walk(tokens, stop)):
            if num_same * size < len(node.edge) and index + num_same < stop:
                node = self._split(node, num_same)  # what is new branches off here
            self._set(node, holder, start - index, num_same, value)
            index, last = index + num_same, node
            path.append(node)
        if index < stop:
            edge = tokens[index * size : stop * size]
            path.append(self._grow(last, holder, edge, max(0, start - index), value))
        if self._max_blocks is None:
            return
        # The end first, so that a prefix is remembered as long as what continues it.
        for node in reversed(path):
            for each in (holder, (namespace, PUBLIC)):
                if each in node.gone:
                    self._use(node, each)

    def _grow(
        self, last: _Node, holder: Holder, edge: bytes, low: int, value: float
    ) -> _Node:
        """Add blocks behind a node, marked from block `low` of them on."""
        size = self._block_bytes
        num_new = len(edge) // size
        self._num_blocks += num_new
        if (
            last is not self._root
            and not last.children
            and list(last.gone) == [holder]
            and list(last.seen) == [holder[0]]
        ):
            # A prefix that grows block by block stays one run.
            num_old = len(last.edge) // size
            last.edge += edge
            last.gone[holder].extend(array("d", [_NEVER]) * num_new)
            last.seen[holder[0]].extend(bytes(num_new))
            self._num_marks += num_new
            self._set(last, holder, num_old + low, num_old + num_new, value)
            return last
        node = _Node(last, edge)
        last.children[edge[:size]] = node
        self._set(node, holder, low, num_new, value)
        return node

    def _set(
        self, node: _Node, holder: Holder, low: int, high: int, value: float
    ) -> None:
        """Mark blocks `low … high - 1` of a node, if there are any."""
        low = max(0, low)
        if low >= high:
            return
        gone = node.gone.get(holder)
        if gone is None:
            num_blocks = len(node.edge) // self._block_bytes
            gone = node.gone[holder] = array("d", [_NEVER]) * num_blocks
            self._num_marks += num_blocks
        gone[low:high] = array("d", [value]) * (high - low)
        namespace = holder[0]
        seen = node.seen.pop(namespace, None)
        if seen is None:
            seen = bytearray(len(gone))
        seen[low:high] = bytes([1]) * (high - low)
        node.seen[namespace] = seen  # the last in the order of change
        if len(node.seen) > _MAX_NAMESPACES:
            del node.seen[next(iter(node.seen))]

    def _use(self, node: _Node, holder: Holder) -> None:
        if self._max_blocks is not None:
            self._marks.pop((node, holder), None)
            self._marks[node, holder] = None

    def _split(self, node: _Node, num_blocks: int) -> _Node:
        """Cut a node and return the upper part, which is new."""
        parent = node.parent
        assert parent is not None, "the root has no edge to cut"
        size = self._block_bytes
        upper = _Node(parent, node.edge[: num_blocks * size])
        for holder, gone in node.gone.items():
            upper.gone[holder] = gone[:num_blocks]
            node.gone[holder] = gone[num_blocks:]
            self._use(upper, holder)
        for namespace, seen in node.seen.items():
            upper.seen[namespace] = seen[:num_blocks]
            node.seen[namespace] = seen[num_blocks:]
        cut = (self._start_of(node) + num_blocks) * self._block_size
        for holder, account in tuple(node.accounts.items()):
            part = account.split_off(cut)
            if part.start < part.end:
                upper.accounts[holder] = part
            if account.start == account.end:
                del node.accounts[holder]
        parent.children[upper.edge[:size]] = upper
        node.parent = upper
        node.edge = node.edge[num_blocks * size :]
        upper.children[node.edge[:size]] = node
        return upper

    def _start_of(self, node: _Node) -> int:
        """Return how many blocks are above a node."""
        num_bytes = 0
        above = node.parent
        while above is not None:
            num_bytes += len(above.edge)
            above = above.parent
        return num_bytes // self._block_bytes

    def _forget(self) -> None:
        """Drop what was unused for longest, down to the bound; amortised O(1)."""
        while self._max_blocks is not None and self._num_marks > self._max_blocks:
            node, holder = next(iter(self._marks))
            del self._marks[node, holder]
            self._num_marks -= len(node.gone.pop(holder))
            self._give_up(node, (holder,))
            while node.parent is not None and not node.gone and not node.children:
                self._give_up(node, tuple(node.accounts))
                num_bytes = len(node.edge)
                del node.parent.children[node.edge[: self._block_bytes]]
                self._num_blocks -= num_bytes // self._block_bytes
                node = node.parent

    def _give_up(self, node: _Node, holders: tuple[Holder, ...]) -> None:
        for holder in holders:
            account = node.accounts.pop(holder, None)
            if account is not None:
                self._keep(None, holder, account)

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _put(
    accounts: dict[Holder, PrefixAccount], holder: Holder, account: PrefixAccount
) -> None:
    """Add an account to what is there of the same holder."""
    present = accounts.get(holder)
    if present is None:
        accounts[holder] = account
        return
    present.add(account)


def _with(
    kept: dict[Holder, PrefixAccount], found: dict[Holder, PrefixAccount]
) -> dict[Holder, PrefixAccount]:
    """Return copies of the sums of both."""
    result = {holder: account.copy() for holder, account in kept.items()}
    for holder, account in found.items():
        _put(result, holder, account)
    return result


def _digest(holder: Holder, tokens: bytes) -> bytes:
    namespace, domain = holder
    place = (namespace, domain.kind.value, domain.name)
    digest = hashlib.sha256(repr(place).encode())
    digest.update(tokens)
    return digest.digest()


def _pasts(node: _Node, own: Holder, low: int, high: int) -> Iterator[PastRun]:
    """Yield runs of equal past among blocks `low … high - 1` of a node.

    Looks at the asker's own marks and at one byte per block and namespace, however
    many others have the text.
    """
    namespace = own[0]
    never = array("d", [_NEVER]) * (high - low)
    mine = node.gone.get(own)
    public = node.gone.get((namespace, PUBLIC))
    others = sorted(name for name in node.seen if name != namespace)
    nobody = bytes(high - low)
    columns: list[Sequence[float]] = [
        never if mine is None else mine[low:high],
        never if public is None else public[low:high],
        node.seen[namespace][low:high] if namespace in node.seen else nobody,
        *(node.seen[name][low:high] for name in others),
    ]
    if all(min(column) == max(column) for column in columns):
        yield PastRun(high - low, _past([column[0] for column in columns], others))
        return
    for values, group in groupby(zip(*columns, strict=True)):
        yield PastRun(sum(1 for _ in group), _past(values, others))


def _past(values: Sequence[float], others: list[bytes]) -> Past:
    mine, public, is_seen, *is_elsewhere = values
    left_s = max(mine, public)  # of two copies the one that stayed longer
    if left_s == _REFUSED:
        return Past(is_refused=True)
    if left_s != _NEVER:
        return Past(left_s=left_s)
    if is_seen:
        return Past(is_other_domain=True)
    for name, is_there in zip(others, is_elsewhere, strict=True):
        if is_there:
            return Past(other_namespace=name)  # of several, always the same one
    return Past()


def _joined(runs: list[PastRun]) -> list[PastRun]:
    """Merge neighbours with an equal past."""
    joined: list[PastRun] = []
    for run in runs:
        if joined and joined[-1].past == run.past:
            run = PastRun(joined.pop().num_blocks + run.num_blocks, run.past)
        joined.append(run)
    return joined
