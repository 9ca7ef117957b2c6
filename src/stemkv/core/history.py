"""What was in the cache before: who held which prefix, and when it left.

Owns a radix tree of token runs that outlives eviction. It answers *why* tokens were not
reused, never whether they may be: a hit is decided by `PrefixTree` alone. Knows nothing
of blocks, leases or policies.

One tree for all namespaces and domains, so that a miss can be traced to another domain
(what isolation costs) or to another identity (what a rollout or an adapter costs).
A holder is a namespace with a domain in it; for each holder a node notes per block
since when it is gone: `_NEVER`, `_RESIDENT`, or the time it left. And it keeps the
accounts of what left: its runs are cut where prompts part, not where an eviction
happened to stop, so they are what people call a prefix.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from stemkv.core.account import PrefixAccount
from stemkv.core.identity import PUBLIC, Domain
from stemkv.core.tokens import TOKEN_BYTES, common_prefix_bytes

__all__ = ["Booking", "History", "Past", "PastRun"]

_NEVER = -math.inf  # this holder never had the block
_RESIDENT = math.inf

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

    __slots__ = ("accounts", "children", "edge", "gone", "last_s", "parent")

    def __init__(self, parent: _Node | None, edge: bytes) -> None:
        self.parent = parent
        self.edge = edge
        self.children: dict[bytes, _Node] = {}
        self.gone: dict[Holder, array[float]] = {}  # one number per block
        self.accounts: dict[Holder, PrefixAccount] = {}  # of what left
        self.last_s = 0.0  # last change, for forgetting


class History:
    """Remembers published prefixes, up to `max_blocks` of them (`None`: all).

    What is forgotten, the longest unchanged first, is "never seen" again. Times are
    seconds and never decrease.
    """

    def __init__(self, block_size: int, *, max_blocks: int | None = None) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._max_blocks = max_blocks
        self._root = _Node(None, b"")
        self._num_blocks = 0
        self._block_size = block_size
        self._forgotten: dict[Holder, PrefixAccount] = {}  # accounts without a place

    @property
    def num_blocks(self) -> int:
        """Blocks remembered."""
        return self._num_blocks

    def published(
        self,
        namespace: bytes,
        domain: Domain,
        tokens: bytes,
        start: int,
        stop: int,
        now: float,
    ) -> None:
        """Note that the holder has blocks `start … stop - 1` of `tokens` from now on."""
        self._mark(namespace, domain, tokens, start, stop, _RESIDENT, now)
        self._keep_bounds()

    def left(
        self,
        namespace: bytes,
        domain: Domain,
        tokens: bytes,
        start: int,
        stop: int,
        now: float,
    ) -> None:
        """Note that blocks `start … stop - 1` of `tokens` are not resident any more."""
        self._mark(namespace, domain, tokens, start, stop, now, now)
        self._keep_bounds()  # what was forgotten while resident is remembered again

    def past(
        self, namespace: bytes, domain: Domain, tokens: bytes, start: int, stop: int
    ) -> list[PastRun]:
        """Return what is known of blocks `start … stop - 1`, in order; pure.

        O(nodes on the path) where a node's blocks share one past, else O(blocks).
        """
        runs: list[PastRun] = []
        index = 0
        for node, num_same in self._walk(tokens, stop):
            low, high = max(start, index), index + num_same
            if low < high:
                own = (namespace, domain), (namespace, PUBLIC)
                runs.extend(_pasts(node, own, low - index, high - index))
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
        now: float,
    ) -> None:
        """Set the holder's number of these blocks, adding nodes as needed."""
        holder = (namespace, domain)
        size = self._block_bytes
        index, last = 0, self._root
        for node, num_same in tuple(self._walk(tokens, stop)):
            if num_same * size < len(node.edge) and index + num_same < stop:
                node = self._split(node, num_same)  # what is new branches off here
            self._set(node, holder, start - index, num_same, value, now)
            index, last = index + num_same, node
        if index >= stop:
            return
        if last is not self._root and not last.children and list(last.gone) == [holder]:
            # A prefix that grows block by block stays one run.
            last.edge += tokens[index * size : stop * size]
            gone = last.gone[holder]
            gone.extend(array("d", [_NEVER]) * max(0, start - index))
            gone.extend(array("d", [value]) * (stop - max(start, index)))
            last.last_s = now
            self._num_blocks += stop - index
        else:
            new = _Node(last, tokens[index * size : stop * size])
            last.children[new.edge[:size]] = new
            self._num_blocks += stop - index
            self._set(new, holder, start - index, stop - index, value, now)

    def _set(
        self,
        node: _Node,
        holder: Holder,
        low: int,
        high: int,
        value: float,
        now: float,
    ) -> None:
        low = max(0, low)
        if low >= high:
            return
        gone = node.gone.get(holder)
        if gone is None:
            num_blocks = len(node.edge) // self._block_bytes
            gone = node.gone[holder] = array("d", [_NEVER]) * num_blocks
        gone[low:high] = array("d", [value]) * (high - low)
        node.last_s = now

    def _split(self, node: _Node, num_blocks: int) -> _Node:
        """Cut a node and return the upper part, which is new."""
        parent = node.parent
        assert parent is not None, "the root has no edge to cut"
        size = self._block_bytes
        upper = _Node(parent, node.edge[: num_blocks * size])
        upper.last_s = node.last_s
        for holder, gone in node.gone.items():
            upper.gone[holder] = gone[:num_blocks]
            node.gone[holder] = gone[num_blocks:]
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

    def _keep_bounds(self) -> None:
        if self._max_blocks is not None and self._num_blocks > self._max_blocks:
            self._forget(self._max_blocks * 7 // 8)

    def _start_of(self, node: _Node) -> int:
        """Return how many blocks are above a node."""
        num_bytes = 0
        above = node.parent
        while above is not None:
            num_bytes += len(above.edge)
            above = above.parent
        return num_bytes // self._block_bytes

    def _forget(self, target: int) -> None:
        """Drop whole leaves, the longest unchanged first, down to `target` blocks."""
        size = self._block_bytes
        while self._num_blocks > target:
            leaves = [node for node in self._nodes() if not node.children]
            leaves.sort(key=lambda node: (node.last_s, node.edge))
            for node in leaves:
                if self._num_blocks <= target:
                    return
                assert node.parent is not None, "the root is no leaf of blocks"
                del node.parent.children[node.edge[:size]]
                for holder, account in node.accounts.items():
                    self._keep(None, holder, account)
                self._num_blocks -= len(node.edge) // size

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


def _pasts(
    node: _Node, own: tuple[Holder, Holder], low: int, high: int
) -> Iterator[PastRun]:
    """Yield runs of equal past among blocks `low … high - 1` of a node."""
    parts = [
        (holder, gone[low:high])
        for holder, gone in node.gone.items()
        if max(gone[low:high]) != _NEVER
    ]
    if all(min(part) == max(part) for _, part in parts):
        yield PastRun(high - low, _past_at(parts, own, 0))
        return
    start = 0
    for _, group in groupby(zip(*(part for _, part in parts), strict=True)):
        num_blocks = sum(1 for _ in group)
        yield PastRun(num_blocks, _past_at(parts, own, start))
        start += num_blocks


def _past_at(
    parts: list[tuple[Holder, array[float]]], own: tuple[Holder, Holder], index: int
) -> Past:
    left_s: float | None = None
    is_other_domain = False
    other_namespace: bytes | None = None
    namespace = own[0][0]
    for holder, part in parts:
        if part[index] == _NEVER:
            continue
        if holder in own:
            stayed = part[index]
            left_s = stayed if left_s is None else max(left_s, stayed)
        elif holder[0] == namespace:
            is_other_domain = True
        elif other_namespace is None or holder[0] < other_namespace:
            other_namespace = holder[0]  # of several, always the same one
    if left_s is not None:
        return Past(left_s=left_s)
    if is_other_domain:
        return Past(is_other_domain=True)
    return Past(other_namespace=other_namespace)


def _joined(runs: list[PastRun]) -> list[PastRun]:
    """Merge neighbours with an equal past."""
    joined: list[PastRun] = []
    for run in runs:
        if joined and joined[-1].past == run.past:
            run = PastRun(joined.pop().num_blocks + run.num_blocks, run.past)
        joined.append(run)
    return joined
