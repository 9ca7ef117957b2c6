"""What is resident, driven by nodes and block ids: the tree and all who listen to it.

The tree changes here and nowhere else, so that whoever watches it hears of everything
once. Whose the blocks are is the caller's business: they come in as ids with a
publication and go out as ids through `free`, be they our pool's (`PrefixCache`) or
another engine's (`BlockHolds`). Knows neither pools nor leases.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.events import (
    BlocksEvicted,
    BlocksPublished,
    BlocksRefused,
    BlocksRetired,
    CacheEvent,
    DropReason,
)
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.keeper import Keeper
from stemkv.core.prefix.keys import BlockKeys, KeyChain
from stemkv.core.prefix.standing import Standing
from stemkv.core.prefix.tokens import (
    MIN_SPAN_TOKENS,
    TOKEN_BYTES,
    end_outside_span,
)
from stemkv.core.prefix.tree import Match, Node, PrefixTree
from stemkv.core.prefix.watcher import Audience, Caller, Publication, Watcher

__all__ = ["Residency"]

# Domains that keep their space of keys, for each block: as many can have one here, or
# eight that a policy remembers.
_SPACES_PER_BLOCK = 9

_DROPPED: dict[
    DropReason, type[BlocksEvicted] | type[BlocksRefused] | type[BlocksRetired]
] = {
    DropReason.EVICTED: BlocksEvicted,
    DropReason.REFUSED: BlocksRefused,
    DropReason.RETIRED: BlocksRetired,
}


class Residency:
    """Publishes, pins, splits, merges and drops nodes.

    `free` is given the ids of blocks that were dropped, tail first. `now` is in seconds
    on the caller's clock and must not decrease.
    """

    def __init__(
        self,
        config: CacheConfig,
        keeper: Keeper,
        free: Callable[[array[int]], None],
    ) -> None:
        self.tree = PrefixTree(config.block_size)
        self.keeper = keeper
        self.standing = Standing(config)
        self.audience = Audience()
        self.num_evicted = 0
        self.num_published = 0  # blocks that ever became matchable
        self._free = free
        self._keys = BlockKeys(
            self.tree.block_bytes, _SPACES_PER_BLOCK * config.num_blocks
        )
        self._emit: Callable[[CacheEvent], None] | None = None
        self._tick = 0  # number of the last event that the keeper was told of
        self.audience.add(keeper)

    # Questions

    def match(self, namespace: bytes | None, domain: Domain, tokens: bytes) -> Match:
        """Return the longest visible prefix, of all tokens but the last; pure."""
        if namespace is None:
            return Match(None, 0, 0, None)
        limit = len(tokens) // TOKEN_BYTES - 1  # at least one token is computed
        match = self.tree.match(namespace, domain, tokens, limit=limit)
        num_tokens = match.num_blocks * self.tree.block_size
        if match.partial is not None:
            num_tokens += match.partial.num_tokens
        end = end_outside_span(tokens, num_tokens)
        if end < num_tokens:
            # Too little of a span agrees to say that it is the same one.
            match = self.tree.match(namespace, domain, tokens, limit=end)
        return match

    def blocks_outside_span(self, tokens: bytes, num_blocks: int) -> int:
        """Return how many of the leading blocks may be published or declared."""
        size = self.tree.block_size
        # Rounding down to a block may end in the span before.
        while (end := end_outside_span(tokens, num_blocks * size)) < num_blocks * size:
            num_blocks = end // size
        return num_blocks

    def num_public_blocks(self, namespace: bytes | None, tokens: bytes) -> int:
        """Return how many leading whole blocks lie inside a declared public prefix."""
        if namespace is None:
            return 0
        num_bytes = self.standing.num_public_bytes(namespace, tokens)
        if num_bytes == 0:
            return 0
        return self.blocks_outside_span(tokens, num_bytes // self.tree.block_bytes)

    def domain_of_next(
        self, node: Node, domain: Domain, *, index: int, num_public: int
    ) -> Domain | None:
        """Return in which domain block `index` behind a node is to be published.

        `None` if in none: its namespace was retired.
        """
        if node.root().is_retired:
            return None
        # A public block below a private one could be reached by nobody else.
        return PUBLIC if index < num_public and node.domain == PUBLIC else domain

    def num_joinable(
        self, child: Node, domain: Domain, tokens: bytes, start: int, stop: int
    ) -> int:
        """Return how many leading blocks of the child surely are the caller's own.

        Equal tokens are, unless they end within the first positions of a span: then
        only if what follows agrees as well.
        """
        begin, end = start * self.tree.block_bytes, stop * self.tree.block_bytes
        num_same = self.tree.common_blocks(child, tokens, begin, end)
        safe = self.blocks_outside_span(tokens, start + num_same) - start
        if safe == num_same:
            return num_same
        match = self.match(child.root().namespace, domain, tokens)
        is_verified = (
            match.num_blocks >= start + num_same
            and match.node is not None
            and child in match.node.path()
        )
        return num_same if is_verified else max(0, safe)

    # Verbs

    def watch(self, watcher: Watcher) -> None:
        """Tell a watcher what happens from now on."""
        self.audience.add(watcher)

    def subscribe(self, emit: Callable[[CacheEvent], None]) -> None:
        """Send every publication and drop to `emit` from now on; one sink only."""
        self._emit = emit

    def begin(self) -> None:
        """Begin a new act: what it uses and publishes has one tick."""
        self._tick += 1

    def split(self, node: Node, num_blocks: int, now: float) -> Node:
        """Cut a node after so many blocks; return the new upper part."""
        upper = self.tree.split(node, num_blocks)
        for hear in self.audience.split:
            hear(upper, node, now)
        return upper

    def pin(self, node: Node, now: float) -> None:
        """Hold a node and all above it."""
        for pinned in self.tree.pin(node):
            for hear in self.audience.pinned:
                hear(pinned, now)

    def pin_child(self, node: Node, now: float) -> None:
        """Hold a child of a node that the same caller holds, instead of that."""
        if self.tree.pin_child(node):
            for hear in self.audience.pinned:
                hear(node, now)

    def use(self, nodes: Iterable[Node], caller: Caller, now: float) -> None:
        """Tell that a caller reuses pinned nodes."""
        for node in nodes:
            for hear in self.audience.used:
                hear(node, caller, self._tick, now)

    def unpin(self, node: Node, now: float) -> None:
        """Undo `pin`; drop what shall not be retained, undo splits of no more use."""
        unpinned = self.tree.unpin(node)
        path = node.path()
        is_retired = node.root().is_retired
        self._tick += 1
        for step in reversed(unpinned):
            for hear in self.audience.unpinned:
                hear(step, self._tick, now)
        for step in unpinned:  # deepest first, so a parent may become a leaf meanwhile
            if step.is_leaf:
                self._settle_leaf(step, now, is_retired=is_retired)
        for step in path:
            self._undo_split(step, now)
        if self.keeper.is_over_cap(node.domain):
            self._evict_over_cap(node.domain, now)

    def publish(self, node: Node, run: Publication, chain: KeyChain) -> Node:
        """Hang blocks below a node, or lengthen it; return where they are.

        The caller holds the node and afterwards the one returned. `run` is cut to as
        many leading blocks as may be one node: what is left is for another call. The
        tree holds no equal block there (see `PrefixTree.child`).
        """
        self._complete(run, chain)
        begin = run.start * self.tree.block_bytes
        edge = run.tokens[begin : run.stop * self.tree.block_bytes]
        block_ids = run.block_ids
        can_extend = (
            node.parent is not None
            and node.ref_count == 1
            and node.is_leaf
            and node.domain == run.domain
            and node.owner == run.caller.owner
            and self.keeper.can_extend(node, run)
        )
        if can_extend:
            self.tree.extend(node, edge, block_ids)
            heard_by = self.audience.extended
        else:
            owner = run.caller.owner
            # A copy: the node's grows with it, and what was told must not.
            node = self.tree.add(node, run.domain, edge, block_ids[:], owner=owner)
            self.tree.pin_child(node)
            heard_by = self.audience.added
        for hear in heard_by:
            hear(node, run)
        self.num_published += len(block_ids)
        if self._emit is not None:
            self._emit(_published(node, run))
        return node

    def evict(self, num_blocks: int, domain: Domain | None, now: float) -> int:
        """Drop up to `num_blocks` retained blocks; return how many were dropped.

        `domain` is whose request needs the room, `None` that the operator wants it.
        """
        self.keeper.look_ahead(now)
        num_dropped = 0
        while num_dropped < num_blocks:
            victim = self.keeper.victim(domain, now)
            if victim is None:
                break
            node_id, num_most = victim
            num_wanted = num_blocks - num_dropped
            if num_most is not None:
                num_wanted = min(num_wanted, num_most)
            num_dropped += self._evict_from(node_id, num_wanted, now)
        return num_dropped

    def forget(self, node: Node, now: float) -> int:
        """Drop what nobody else uses of the path to a node; return the blocks.

        Leaf by leaf, up to the first node that is pinned or that others continue.
        """
        num_dropped = 0
        step: Node | None = node
        while step is not None and step.parent is not None:
            if step.num_blocks:  # else it was not retained, or evicted, at the release
                if step.children or step.ref_count:
                    break
                num_dropped += self.drop(step, step.num_blocks, DropReason.RETIRED, now)
            step = step.parent
        return num_dropped

    def keep(
        self,
        namespace: bytes,
        domain: Domain,
        tokens: bytes,
        *,
        until: float,
        now: float,
    ) -> None:
        """Keep whole blocks until a time, resident now or published later.

        Raises `ConfigError` when what is kept would exceed `max_kept_share`.
        """
        self.standing.keep(namespace, domain, tokens, until, now)
        # One token more: a match never is the whole of what it is given.
        match = self.match(namespace, domain, tokens + bytes(TOKEN_BYTES))
        node = match.node
        if not tokens or node is None or node.parent is None:
            return
        if match.num_node_blocks < node.num_blocks:
            node = self.split(node, match.num_node_blocks, now)
        end = 0
        for step in node.path():
            end += step.num_blocks
            # Of all orders that cover the node; the one given may have ended another.
            latest = self.standing.latest(step, tokens, end)
            self.keeper.keep(step, now if latest is None else latest, now)

    def retire(self, namespace: bytes, now: float) -> int:
        """Fence a namespace: drop what nobody holds, return how many blocks remain."""
        self.standing.forget(namespace)
        self._keys.forget(namespace)
        root = self.tree.retire(namespace)
        if root is None:
            return 0
        for hear in self.audience.retired:
            hear(namespace, now)
        for node in reversed(tuple(descendants(root))):  # children before parents
            if node.is_leaf and node.ref_count == 0:
                self.drop(node, node.num_blocks, DropReason.RETIRED, now)
        return sum(node.num_blocks for node in descendants(root))

    def drop(self, node: Node, num_blocks: int, reason: DropReason, now: float) -> int:
        """Free tail blocks of an unpinned leaf and tell what follows; return how many.

        A few more than asked, where the rest would end in the first positions of a
        span: nobody could match those, and they would stand in the way of equal ones.
        """
        keep = max(0, node.num_blocks - num_blocks)
        while keep > 0 and self._ends_in_span(node, keep):
            keep -= 1
        for hear_first in self.audience.trimming:
            hear_first(node, keep, reason, now)
        dropped = self.tree.trim(node, node.num_blocks - keep)
        self._free(dropped[::-1])
        for hear in self.audience.trimmed:
            hear(node, dropped, reason, now)
        self._settle_parent(node, now)
        if reason is DropReason.EVICTED:
            self.num_evicted += len(dropped)
        if self._emit is not None:
            self._emit(
                _DROPPED[reason](
                    now=now,
                    namespace=node.root().namespace,
                    domain=node.domain,
                    block_ids=tuple(dropped),
                )
            )
        return len(dropped)

    # Private

    def _settle_leaf(self, node: Node, now: float, *, is_retired: bool) -> None:
        if is_retired:
            self.drop(node, node.num_blocks, DropReason.RETIRED, now)
        elif self.keeper.refuses(node, now):
            self.drop(node, node.num_blocks, DropReason.REFUSED, now)
        elif not self.keeper.is_evictable(node):  # as its child was refused
            self.keeper.became_evictable(node, now)

    def _settle_parent(self, node: Node, now: float) -> None:
        """Tell of a parent that became an unpinned leaf as its last child went."""
        parent = node.parent
        if (
            node.num_blocks == 0
            and parent is not None
            and parent.parent is not None
            and parent.is_leaf
            and parent.ref_count == 0
            and not parent.root().is_retired
        ):
            self.keeper.became_evictable(parent, now)

    def _undo_split(self, node: Node, now: float) -> None:
        """Join a node with its only child if nothing tells them apart any more.

        A match that was cut short split an edge. Unless something was published there,
        the cut is undone as soon as the keeper sees no difference between the parts, so
        that paths do not fragment: many short leases must not make everybody else's
        matches slow for good.
        """
        lower = self.tree.mergeable(node)
        if lower is not None and self.keeper.can_merge(node, lower):
            self.tree.merge(node, lower)
            for hear in self.audience.merged:
                hear(node, lower, now)

    def _complete(self, run: Publication, chain: KeyChain) -> None:
        """Cut a run to the leading blocks that may be one node, and say all of it."""
        start, stop = run.start, run.stop
        run.tick = self._tick
        run.kept_until, stop = self.standing.kept_until(
            run.namespace, run.domain, run.tokens, start=start, stop=stop, now=run.now
        )
        first_ephemeral = run.caller.first_ephemeral_block
        if first_ephemeral is not None and start < first_ephemeral < stop:
            stop = first_ephemeral
        if self.keeper.needs_keys:
            keys = self._keys.of(
                run.namespace, run.domain, run.tokens, start, stop, chain
            )
            num_alike = self.keeper.num_alike(run.domain, keys)
            if num_alike < len(keys):
                # Rounded down, so as not to part a span; then it loses its past.
                end = self.blocks_outside_span(run.tokens, start + num_alike)
                stop = end if end > start else stop
            run.keys = keys[: stop - start]
        if stop != run.stop:
            run.block_ids = run.block_ids[: stop - start]

    def _evict_over_cap(self, domain: Domain, now: float) -> None:
        self.keeper.look_ahead(now)
        while (victim := self.keeper.victim_over_cap(domain, now)) is not None:
            self._evict_from(*victim, now)

    def _evict_from(self, node_id: int, num_blocks: int, now: float) -> int:
        node = self.tree.node(node_id)
        return self.drop(node, num_blocks, DropReason.EVICTED, now)

    def _ends_in_span(self, node: Node, num_blocks: int) -> bool:
        """Whether a path cut after so many blocks of the node tells its span too late."""
        num_bytes = (MIN_SPAN_TOKENS - 1) * TOKEN_BYTES
        end = num_blocks * self.tree.block_bytes
        tail = node.edge[max(0, end - num_bytes) : end]
        above = node.parent
        while len(tail) < num_bytes and above is not None:
            tail = above.edge[-(num_bytes - len(tail)) :] + tail
            above = above.parent
        num_tokens = len(tail) // TOKEN_BYTES
        return end_outside_span(tail, num_tokens) < num_tokens


def descendants(root: Node) -> Iterator[Node]:
    """Yield the nodes below a node, parents before children."""
    stack = [root]
    while stack:
        node = stack.pop()
        for children in node.children.values():
            for child in children:
                yield child
                stack.append(child)


def _published(node: Node, run: Publication) -> BlocksPublished:
    index = node.num_blocks - len(run.block_ids)
    above = node if index else node.parent
    ids = above.block_ids if above is not None else array("i")
    parent = None
    if ids:
        parent = ids[index - 1] if index else ids[-1]
    return BlocksPublished(
        now=run.now,
        namespace=run.namespace,
        domain=run.domain,
        block_ids=tuple(run.block_ids),
        start=run.start,
        parent_block_id=parent,
    )
