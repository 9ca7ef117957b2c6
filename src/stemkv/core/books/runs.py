"""The accounts of resident runs: one for each node of the tree.

Owns what each node cost and was worth since it came, where it lies in the history, and
digests of paths. What leaves is booked where the history remembers its tokens, so that
a prefix that comes and goes has one line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from stemkv.core.books.account import PrefixAccount
from stemkv.core.books.history import History, Place
from stemkv.core.prefix.events import DropReason
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.prefix.tree import Node
from stemkv.core.prefix.watcher import Publication

__all__ = ["Runs"]


class _Run:
    """What is kept for one node."""

    __slots__ = ("account", "num_hashed", "place", "state")

    def __init__(self, account: PrefixAccount, place: Place) -> None:
        self.account = account
        self.place = place
        # Of its namespace and all tokens up to its block `num_hashed`, once asked for.
        self.state: hashlib._Hash | None = None
        self.num_hashed = 0


class Runs:
    """Follows what happens to nodes; every call costs the same at any depth."""

    def __init__(self, block_size: int, history: History) -> None:
        self._block_size = block_size
        self._history = history
        self._runs: dict[int, _Run] = {}  # by node id

    # Questions

    def accounts(
        self, nodes: Iterable[Node], now: float
    ) -> Iterator[tuple[Place, PrefixAccount]]:
        """Yield copies of the nodes' accounts, with integrals up to `now`."""
        for node in nodes:
            run = self._runs[node.id]
            account = run.account.copy()
            account.settle(now)
            yield run.place, account

    def place(self, node: Node) -> Place:
        """Return where a node ends in the history."""
        return self._runs[node.id].place

    def digest(self, namespace: bytes, path: Sequence[Node], tail: bytes) -> bytes:
        """Return SHA-256 of a namespace, all tokens of a path and a tail.

        What was asked for before is not hashed again.
        """
        state = hashlib.sha256(namespace)
        steps = []
        for node in reversed(path):
            run = self._runs[node.id]
            steps.append((node, run))
            if run.state is not None:
                break
        for node, run in reversed(steps):
            if run.state is None:
                run.state, run.num_hashed = state.copy(), 0
            if run.num_hashed < node.num_blocks:
                begin = run.num_hashed * self._block_size * TOKEN_BYTES
                run.state.update(memoryview(node.edge)[begin:])
                run.num_hashed = node.num_blocks
            state = run.state
        state = state.copy()
        state.update(tail)
        return state.digest()

    # What nodes do

    def added(self, node: Node, publication: Publication) -> None:
        """A new node holds a run; it is pinned."""
        above = None if node.parent is None else self._runs.get(node.parent.id)
        start, stop = publication.start, publication.stop
        account = PrefixAccount(
            domain=node.domain,
            start=start * self._block_size,
            end=stop * self._block_size,
            num_blocks=stop - start,
            is_pinned=True,
            since_s=publication.now,
        )
        self._runs[node.id] = _Run(account, self._publish(node, publication, above))

    def extended(self, node: Node, publication: Publication) -> None:
        """A node was lengthened by a run."""
        run = self._runs[node.id]
        place = self._publish(node, publication, run)
        self._history.leave(run.place)
        run.place = place
        run.account.settle(publication.now)
        run.account.num_blocks += publication.stop - publication.start
        run.account.end = publication.stop * self._block_size

    def change(self, node: Node, now: float, *, is_pinned: bool) -> None:
        """A lease begins to hold a node, or none does any more."""
        account = self._runs[node.id].account
        account.settle(now)
        account.is_pinned = is_pinned

    def hit(self, node: Node, low: int, high: int) -> None:
        """Tokens `[low, high)` of a node were reused."""
        self._runs[node.id].account.hit(low, high)

    def split(self, upper: Node, lower: Node, now: float) -> None:
        """A node was divided."""
        run = self._runs[lower.id]
        run.account.settle(now)
        num_blocks = upper.num_blocks
        part = run.account.split_off(run.account.start + num_blocks * self._block_size)
        place = self._history.cut(run.place, part.end // self._block_size)
        other = self._runs[upper.id] = _Run(part, place)
        if run.num_hashed < num_blocks:
            other.state, other.num_hashed = run.state, run.num_hashed
            run.state, run.num_hashed = None, 0
        else:
            run.num_hashed -= num_blocks

    def merged(self, upper: Node, lower: Node, now: float) -> None:
        """A node took over the blocks of the one above it."""
        other, run = self._runs.pop(upper.id), self._runs[lower.id]
        other.account.settle(now)
        run.account.settle(now)
        if run.state is None:
            run.state, run.num_hashed = other.state, other.num_hashed
        else:
            run.num_hashed += other.account.num_blocks
        run.account.num_blocks += other.account.num_blocks
        run.account.join(other.account)
        self._history.leave(other.place)

    def trimming(
        self, node: Node, num_kept: int, reason: DropReason, now: float
    ) -> None:
        """A node is about to lose all but its first `num_kept` blocks."""
        run = self._runs[node.id]
        account, place = run.account, run.place
        account.settle(now)
        if num_kept:
            cut = account.start + num_kept * self._block_size
            run.account = account.split_off(cut)
        if reason is DropReason.EVICTED:
            account.num_evicted_blocks += account.num_blocks
        start = account.start // self._block_size
        if reason is not DropReason.RETIRED:
            # What must not be used any more has no time at which it left: to ask for it
            # again is no regret.
            is_refused = reason is DropReason.REFUSED
            self._history.left(place, start, now, is_refused=is_refused)
        self._history.book(place, account)
        if not num_kept:
            del self._runs[node.id]
            self._history.leave(place)
            return
        place.stop = start
        if run.num_hashed > num_kept:
            run.state, run.num_hashed = None, 0

    # Private

    def _publish(
        self, node: Node, publication: Publication, above: _Run | None
    ) -> Place:
        return self._history.published(
            publication.namespace,
            node.domain,
            publication.tokens,
            publication.start,
            publication.stop,
            after=None if above is None else above.place,
        )
