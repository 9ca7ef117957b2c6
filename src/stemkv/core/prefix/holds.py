"""Tree and retention driven by block ids, for a block pool that is somebody else's.

Owns the map from blocks to nodes and which blocks somebody holds. The pool counts
references and owns the free list, as ever; it tells when a block begins to be held and
when nobody holds it any more, in any order, and asks which blocks to take when it has
none left. Knows neither `BlockPool` nor leases.

A node is pinned as long as one of its blocks is held, or one below it. Blocks behind the
last held one of a node are split off and can go, so what is unpinned is exactly what no
held block stands on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.events import DropReason
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.keeper import Keeper
from stemkv.core.prefix.keys import KeyChain
from stemkv.core.prefix.residency import Residency, descendants
from stemkv.core.prefix.tree import Node
from stemkv.core.prefix.watcher import Caller, Publication, Watcher
from stemkv.errors import InvariantError

__all__ = ["BlockHolds"]


class BlockHolds(Watcher):
    """What another engine's block pool tells and asks.

    `free` is given the ids of blocks that can be matched no more and that nobody holds:
    they belong on the pool's list of blank blocks.
    """

    def __init__(
        self, config: CacheConfig, keeper: Keeper, free: Callable[[array[int]], None]
    ) -> None:
        self.residency = Residency(config, keeper, self._forget)
        self.residency.watch(self)
        self.tree = self.residency.tree
        self._free = free
        self._node_of: dict[int, Node] = {}  # by block
        self._held: set[int] = set()  # published blocks that somebody holds
        self._num_held: dict[int, int] = {}  # held blocks by node
        # Nodes that are pinned for their own blocks: at or below each node that has
        # held blocks there is one of them.
        self._pinned: set[int] = set()
        self._changed: dict[int, Node] = {}  # whose pin may be wrong

    # Questions

    def is_held(self, block_id: int) -> bool:
        """Whether somebody holds a published block."""
        return block_id in self._held

    def is_published(self, block_id: int) -> bool:
        """Whether a block can be matched, or could before its namespace was retired."""
        return block_id in self._node_of

    @property
    def num_evictable(self) -> int:
        """Blocks that `evict` could give, quotas aside."""
        return self.tree.num_unpinned_blocks

    # Verbs

    def touch(self, block_ids: Sequence[int], caller: Caller, now: float) -> None:
        """A caller reuses and holds these, the leading blocks of a path in order."""
        if not block_ids:
            return
        node = self._end_at(block_ids[-1], now)
        self.residency.begin()
        self._hold(block_ids)
        self._settle(now)
        self.residency.use(node.path(), caller, now)

    def hold(self, block_ids: Iterable[int], now: float) -> None:
        """Somebody begins to hold these, without using them."""
        self._hold(block_ids)
        self._settle(now)

    def let_go(self, block_ids: Iterable[int], now: float) -> None:
        """Nobody holds these any more; what is not published is not ours to mind."""
        for block_id in block_ids:
            if block_id in self._held:
                self._held.discard(block_id)
                self._count(self._node_of[block_id], -1)
        self._settle(now)

    def publish(
        self,
        parent: int | None,
        block_ids: Sequence[int],
        *,
        namespace: bytes,
        domain: Domain,
        caller: Caller,
        tokens: bytes,
        start: int,
        num_public: int = 0,
        chain: KeyChain | None = None,
        now: float,
    ) -> list[int]:
        """Make blocks matchable that begin at block `start` of the tokens.

        `parent` is the published block before them, `None` at the beginning; if it has
        gone, nothing can be published behind it. Returns for
        each of the leading ones what holds its tokens: itself, or a block that somebody
        published first. All that is returned is held; let go of others' blocks unless
        you use them. What is not returned cannot be published yet.
        """
        if parent is None:
            node = self.tree.root(namespace)
        elif parent in self._node_of:
            node = self._end_at(parent, now)
        else:
            return []
        self.residency.begin()
        resident: list[int] = []
        while len(resident) < len(block_ids):
            index = start + len(resident)
            target = self.residency.domain_of_next(
                node, domain, index=index, num_public=num_public
            )
            if target is None:
                break
            stop = start + len(block_ids)
            if target == PUBLIC and index < num_public:
                stop = min(stop, num_public)
            child = self._child(node, target, tokens, index)
            if child is not None:
                below = self._join(child, domain, tokens, index, stop, caller, now)
                if below is None:
                    break
                node = below
                resident += node.block_ids
                continue
            run = Publication(
                namespace=namespace,
                domain=target,
                caller=caller,
                tokens=tokens,
                start=index,
                block_ids=array("i", block_ids[index - start : stop - start]),
                now=now,
            )
            node = self._add(node, run, chain or KeyChain())
            resident += run.block_ids
        self._settle(now)
        return resident

    def evict(self, num_blocks: int, domain: Domain | None, now: float) -> int:
        """Give up to `num_blocks` blocks to `free`; return how many.

        `domain` is whose request needs them, `None` that the operator wants it.
        """
        return self.residency.evict(num_blocks, domain, now)

    def drop(self, block_ids: Iterable[int], reason: DropReason, now: float) -> int:
        """Give these to `free`, and all that stands on them; return how many.

        Nobody may hold one of them.
        """
        num_dropped = 0
        for block_id in block_ids:
            node = self._node_of.get(block_id)
            if node is None:
                continue
            if node.ref_count:
                raise InvariantError(f"drop of block {block_id}, which is in use")
            for below in reversed(tuple(descendants(node))):
                num_dropped += self.residency.drop(below, below.num_blocks, reason, now)
            num_blocks = node.num_blocks - node.block_ids.index(block_id)
            num_dropped += self.residency.drop(node, num_blocks, reason, now)
        return num_dropped

    def retire(self, namespace: bytes, now: float) -> int:
        """Fence a namespace; return how many blocks remain as they are held.

        Behind those nothing is published any more. What begins a prompt would start the
        namespace again: new weights must bring a new identity.
        """
        return self.residency.retire(namespace, now)

    # What happens to nodes

    def added(self, node: Node, publication: Publication) -> None:
        """Note a publisher's blocks, which it holds."""
        self._num_held.setdefault(node.id, 0)
        for block_id in publication.block_ids:
            if block_id in self._node_of:
                raise InvariantError(f"block {block_id} is published twice")
            self._node_of[block_id] = node
        self._hold(publication.block_ids)

    extended = added

    def split(self, upper: Node, lower: Node, now: float) -> None:
        """Divide what is held."""
        for block_id in upper.block_ids:
            self._node_of[block_id] = upper
        num_held = sum(block_id in self._held for block_id in upper.block_ids)
        self._num_held[upper.id] = 0
        self._count(upper, num_held)
        self._count(lower, -num_held)

    def merged(self, upper: Node, lower: Node, now: float) -> None:
        """Join what is held."""
        for block_id in upper.block_ids:
            self._node_of[block_id] = lower
        self._count(lower, self._num_held.pop(upper.id))

    def trimmed(
        self, node: Node, block_ids: array[int], reason: DropReason, now: float
    ) -> None:
        """Forget what was dropped."""
        for block_id in block_ids:
            del self._node_of[block_id]
        if node.num_blocks == 0:
            del self._num_held[node.id]

    # Private

    def _forget(self, block_ids: array[int]) -> None:
        self._free(block_ids)

    def _hold(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if block_id not in self._held:
                self._held.add(block_id)
                self._count(self._node_of[block_id], 1)

    def _count(self, node: Node, num_held: int) -> None:
        self._num_held[node.id] += num_held
        self._changed[node.id] = node

    def _child(
        self, node: Node, domain: Domain, tokens: bytes, index: int
    ) -> Node | None:
        size = self.tree.block_bytes
        return self.tree.child(node, domain, tokens[index * size : (index + 1) * size])

    def _join(
        self,
        child: Node,
        domain: Domain,
        tokens: bytes,
        start: int,
        stop: int,
        caller: Caller,
        now: float,
    ) -> Node | None:
        """Hold and use what somebody published first; `None`: it is not surely equal."""
        num_same = self.residency.num_joinable(child, domain, tokens, start, stop)
        if num_same == 0:
            return None
        if num_same < child.num_blocks:
            child = self.residency.split(child, num_same, now)
        self._hold(child.block_ids)
        self._settle(now)
        self.residency.use((child,), caller, now)
        return child

    def _add(self, node: Node, run: Publication, chain: KeyChain) -> Node:
        """Publish below a node; its pin goes over to what is new."""
        if node.id not in self._pinned:
            self._pin(node, run.now)
        below = self.residency.publish(node, run, chain)
        if below is not node:
            self._pinned.discard(node.id)
            self._pinned.add(below.id)
        return below

    def _end_at(self, block_id: int, now: float) -> Node:
        """Return the node that ends with a block, cut if need be."""
        node = self._node_of[block_id]
        num_blocks = node.block_ids.index(block_id) + 1
        if num_blocks < node.num_blocks:
            node = self.residency.split(node, num_blocks, now)
        return node

    def _settle(self, now: float) -> None:
        """Pin what is held, let go of what is not."""
        while self._changed:
            node_id, node = self._changed.popitem()
            if node_id not in self._num_held:
                continue  # it has gone meanwhile
            if self._num_held[node_id] == 0:
                if node_id in self._pinned:
                    self._unpin(node, now)
                continue
            if node.ref_count == 0:
                self._pin(node, now)
            if node_id in self._pinned and node.ref_count == 1:
                self._cut_tail(node, now)

    def _cut_tail(self, node: Node, now: float) -> None:
        """Split off the blocks behind the last held one, and let go of them."""
        num_blocks = node.num_blocks
        while node.block_ids[num_blocks - 1] not in self._held:
            num_blocks -= 1
        if num_blocks < node.num_blocks:
            self.residency.split(node, num_blocks, now)

    def _pin(self, node: Node, now: float) -> None:
        self._pinned.add(node.id)
        self.residency.pin(node, now)

    def _unpin(self, node: Node, now: float) -> None:
        """Let go of a node; the next one above it that has held blocks takes over."""
        above = node.parent
        while above is not None and not self._num_held.get(above.id):
            above = above.parent
        if above is not None:
            if above.id not in self._pinned:
                self._pin(above, now)
            self._changed[above.id] = above  # its tail may be free now
        self._pinned.discard(node.id)
        self.residency.unpin(node, now)
