"""Edge-compressed radix tree over whole blocks of token ids.

Owns which published block holds which tokens, who may see it (the domain of its
node) and how many leases pin it. Knows nothing of reference counts of private blocks
(see `blocks`), of time, or of who should be evicted (see `eviction`).

One root per namespace. A node's edge is the token bytes of one or more whole blocks,
compared as whole runs: a hit is token equality, there is nothing to collide. Children
are keyed by domain first and by the tokens of their first block second, so a public
prefix continues into private suffixes and a private node cannot be reached from
another domain by construction.

Pins: a lease pins its deepest node, and every ancestor with it. Hence the ancestors
of a pinned or resident node are always resident (prefix-closed), and only unpinned
leaves can go, tail blocks first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from stemkv.core.prefix.identity import PUBLIC, Domain, DomainKind
from stemkv.core.prefix.tokens import TOKEN_BYTES, TokenBuffer, common_prefix_bytes
from stemkv.errors import InvariantError

__all__ = ["Match", "Node", "PartialBlock", "PrefixTree"]


class Node:
    """A run of published blocks that no branch divides.

    Only `PrefixTree` writes its attributes.
    """

    __slots__ = (
        "block_ids",
        "children",
        "domain",
        "edge",
        "id",
        "is_retired",
        "namespace",
        "owner",
        "parent",
        "ref_count",
    )

    def __init__(
        self,
        node_id: int,
        parent: Node | None,
        domain: Domain,
        edge: bytes,
        block_ids: array[int],
        owner: str,
    ) -> None:
        self.id = node_id  # never used again, also after eviction
        self.parent = parent  # None for a root
        self.domain = domain
        self.edge = edge
        self.block_ids = block_ids
        self.children: dict[Domain, _Children] = {}
        self.ref_count = 0  # leases whose path contains this node
        self.owner = owner  # tenant who brought the blocks in; opaque to the tree
        self.is_retired = False  # meaningful for roots only
        self.namespace = b""  # meaningful for roots only

    @property
    def num_blocks(self) -> int:
        """Blocks on this node's edge."""
        return len(self.block_ids)

    @property
    def is_leaf(self) -> bool:
        """Whether no child hangs below."""
        return not self.children

    def path(self) -> list[Node]:
        """Return the nodes from just below the root down to this one."""
        nodes = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def root(self) -> Node:
        """Return the root above (or at) this node."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """Where a match ends inside a block: whose leading tokens can be copied."""

    node: Node
    index: int  # which block of the node's edge
    num_tokens: int  # leading tokens of the block that agree, 1 … block_size - 1

    @property
    def block_id(self) -> int:
        """The published block to copy from."""
        return self.node.block_ids[self.index]


@dataclass(frozen=True, slots=True)
class Match:
    """The longest visible published prefix of some tokens."""

    node: Node | None  # deepest node with a matching block; None: no such namespace
    num_node_blocks: int  # leading blocks of that node's edge that agree
    num_blocks: int  # whole blocks that agree, over the whole path
    partial: PartialBlock | None  # the block after those, if it agrees in part


class PrefixTree:
    """Finds, extends, splits and trims published prefixes.

    `block_size` is in tokens. All matching is O(matched tokens + nodes on the path),
    independent of how many prefixes are resident.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._retired: list[Node] = []
        self._nodes: dict[int, Node] = {}
        self._next_id = 0
        self._num_blocks = 0
        self._num_pinned = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the tree, retired ones included."""
        return self._num_blocks

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks on the path of at least one lease."""
        return self._num_pinned

    @property
    def num_unpinned_blocks(self) -> int:
        """Blocks that could all be evicted, one leaf after another."""
        return self._num_blocks - self._num_pinned

    @property
    def num_nodes(self) -> int:
        """Nodes in the tree, roots not counted."""
        return len(self._nodes)

    def node(self, node_id: int) -> Node:
        """Return the resident node with this id."""
        return self._nodes[node_id]

    def nodes(self) -> Iterator[Node]:
        """Iterate over all resident nodes, for `check` and reports."""
        return iter(self._nodes.values())

    def roots(self) -> dict[bytes, Node]:
        """Return a copy of the live namespaces and their roots."""
        return dict(self._roots)

    def live_root(self, namespace: bytes) -> Node | None:
        """Return the root of a live namespace; `None` where nothing was published."""
        return self._roots.get(namespace)

    # Questions

    def match(
        self, namespace: bytes, domain: Domain, tokens: bytes, *, limit: int
    ) -> Match:
        """Return the longest prefix of `tokens[:limit]` that `domain` may see.

        Pure: splits nothing, touches nothing. `limit` is in tokens; the part of the
        last block below it can still be matched as `partial`.
        """
        root = self._roots.get(namespace)
        if root is None:
            return Match(None, 0, 0, None)
        limit_bytes = limit * TOKEN_BYTES
        end = limit_bytes - limit_bytes % self.block_bytes
        ends = self.ends(root, domain, tokens, end=end)
        longest = max(offset for _, _, offset in ends)
        best: Match | None = None
        best_tokens = -1
        for node, num_node_blocks, offset in ends:
            if offset < longest:
                continue
            partial = self._partial(
                node, num_node_blocks, domain, tokens, offset, limit_bytes
            )
            num_tokens = partial.num_tokens if partial is not None else 0
            if num_tokens > best_tokens:  # of equals the first, so the public one
                best_tokens = num_tokens
                best = Match(node, num_node_blocks, offset // self.block_bytes, partial)
        assert best is not None, "the root itself is an end"
        return best

    def ends(
        self, root: Node, domain: Domain, tokens: bytes, *, end: int
    ) -> list[tuple[Node, int, int]]:
        """Return where the public path and each private branch of it end.

        As (node, leading blocks of its edge that agree, bytes that agree up to there),
        the public one first. `end` is a byte offset at a block boundary; pure.
        """
        publics: list[tuple[Node, int]] = []
        ends = [self._descend(root, PUBLIC, tokens, 0, end, publics)]
        if domain.kind is not DomainKind.PUBLIC:
            # A private branch may leave the public path at any of its nodes, and may
            # go further than the public path itself.
            ends += [
                self._descend(start, domain, tokens, start_offset, end, None)
                for start, start_offset in reversed(publics)
                if domain in start.children
            ]
        return ends

    def child(self, node: Node, domain: Domain, block: bytes) -> Node | None:
        """Return the child of exactly this domain that starts with `block`."""
        children = node.children.get(domain)
        return None if children is None else children.get(block)

    def common_blocks(self, node: Node, tokens: bytes, start: int, end: int) -> int:
        """Return how many leading blocks of the edge equal `tokens[start:end]`.

        `start` and `end` are byte offsets at block boundaries.
        """
        limit = min(len(node.edge), end - start)
        if limit == len(node.edge) and tokens.startswith(node.edge, start):
            return node.num_blocks
        same = common_prefix_bytes(node.edge, 0, tokens, start, limit)
        return same // self.block_bytes

    # Verbs

    def root(self, namespace: bytes) -> Node:
        """Return the root of the namespace, planting it when it is new."""
        root = self._roots.get(namespace)
        if root is None:
            root = Node(self._new_id(), None, PUBLIC, b"", array("i"), "")
            root.namespace = namespace
            self._roots[namespace] = root
        return root

    def split(self, node: Node, num_blocks: int) -> Node:
        """Cut the edge after `num_blocks` and return the new upper node.

        The lower part keeps its object, so leases that end there stay valid; the
        upper part is on the path of the same leases, hence the same `ref_count`.
        """
        parent = node.parent
        if parent is None or not 0 < num_blocks < node.num_blocks:
            raise InvariantError(f"split of a {node.num_blocks}-block edge")
        cut = num_blocks * self.block_bytes
        upper = Node(
            self._new_id(),
            parent,
            node.domain,
            node.edge[:cut],
            node.block_ids[:num_blocks],
            node.owner,
        )
        upper.ref_count = node.ref_count
        self._nodes[upper.id] = upper
        parent.children[node.domain].replace(upper.edge[: self.block_bytes], upper)
        node.parent = upper
        node.edge = node.edge[cut:]
        node.block_ids = node.block_ids[num_blocks:]
        self._add_child(upper, node)
        return upper

    def mergeable(self, node: Node) -> Node | None:
        """Return the child that a split separated from this node for nothing.

        That is: the node has one child, of its own domain and owner, and every lease on
        its path goes on into that child. `None` where there is nothing to undo.
        """
        if node.parent is None or len(node.children) != 1:
            return None
        children = node.children.get(node.domain)
        if children is None or len(children) != 1:
            return None
        (child,) = children
        if child.ref_count != node.ref_count or child.owner != node.owner:
            return None
        return child

    def merge(self, node: Node, child: Node) -> None:
        """Undo a split; `child` is what `mergeable` returned for the node.

        The child keeps its object and takes the node's blocks in front; the node leaves
        the tree.
        """
        if node.parent is None or child.parent is not node:
            raise InvariantError("merge of nodes that are not parent and child")
        child.edge = node.edge + child.edge
        child.block_ids = node.block_ids + child.block_ids
        child.parent = node.parent
        node.parent.children[node.domain].replace(node.edge[: self.block_bytes], child)
        del self._nodes[node.id]

    def add(
        self,
        parent: Node,
        domain: Domain,
        edge: bytes,
        block_ids: array[int],
        *,
        owner: str = "",
    ) -> Node:
        """Hang a new unpinned node below `parent`; the tree now owns the blocks."""
        node = Node(self._new_id(), parent, domain, edge, block_ids, owner)
        self._add_child(parent, node)
        self._nodes[node.id] = node
        self._num_blocks += len(block_ids)
        return node

    def extend(self, node: Node, edge: bytes, block_ids: array[int]) -> None:
        """Lengthen a leaf that exactly one lease pins; the tree owns the blocks."""
        if node.ref_count != 1 or node.children:
            raise InvariantError("only a leaf with a single lease can be extended")
        if isinstance(node.edge, bytes):
            # Decodes lengthen it block by block: its length must not count each time.
            node.edge = cast(bytes, TokenBuffer(node.edge))
        node.edge += edge
        node.block_ids.extend(block_ids)
        self._num_blocks += len(block_ids)
        self._num_pinned += len(block_ids)

    def pin(self, node: Node) -> list[Node]:
        """Pin the node and its ancestors; return those that were unpinned before."""
        newly_pinned = []
        current: Node | None = node
        while current is not None and current.parent is not None:
            if current.ref_count == 0:
                self._num_pinned += len(current.block_ids)
                newly_pinned.append(current)
            current.ref_count += 1
            current = current.parent
        return newly_pinned

    def pin_child(self, node: Node) -> bool:
        """Pin a node whose parent is already pinned by the same lease.

        Returns whether it was unpinned before.
        """
        node.ref_count += 1
        if node.ref_count > 1:
            return False
        self._num_pinned += len(node.block_ids)
        return True

    def unpin(self, node: Node) -> list[Node]:
        """Undo `pin`; return the nodes that no lease pins any more, deepest first."""
        unpinned = []
        current: Node | None = node
        while current is not None and current.parent is not None:
            if current.ref_count == 0:
                raise InvariantError(f"node {current.id} is unpinned more than pinned")
            current.ref_count -= 1
            if current.ref_count == 0:
                self._num_pinned -= len(current.block_ids)
                unpinned.append(current)
            current = current.parent
        return unpinned

    def trim(self, node: Node, num_blocks: int) -> array[int]:
        """Drop up to `num_blocks` tail blocks of an unpinned leaf; return their ids.

        A node that loses its last block leaves the tree; its `edge` is then empty.
        """
        if node.ref_count or node.children or node.parent is None:
            raise InvariantError(f"node {node.id} is not an unpinned leaf")
        keep = max(0, node.num_blocks - num_blocks)
        dropped = node.block_ids[keep:]
        if keep == 0:
            siblings = node.parent.children[node.domain]
            siblings.discard(node.edge[: self.block_bytes])
            if not siblings:
                del node.parent.children[node.domain]
            del self._nodes[node.id]
            self._forget_empty_retired(node.parent)
        node.edge = node.edge[: keep * self.block_bytes]
        node.block_ids = node.block_ids[:keep]
        self._num_blocks -= len(dropped)
        return dropped

    def retire(self, namespace: bytes) -> Node | None:
        """Make everything in the namespace unmatchable at once; return its old root.

        Blocks stay until they are trimmed, since leases may still use them. `None`
        when the namespace holds nothing.
        """
        root = self._roots.pop(namespace, None)
        if root is None:
            return None
        root.is_retired = True  # leases may still hold the root itself
        if root.children:
            self._retired.append(root)
        return root

    def retired_roots(self) -> tuple[Node, ...]:
        """Return roots whose blocks wait for leases to end."""
        return tuple(self._retired)

    # Private

    def _descend(
        self,
        node: Node,
        domain: Domain,
        tokens: bytes,
        offset: int,
        end: int,
        passed: list[tuple[Node, int]] | None,
    ) -> tuple[Node, int, int]:
        """Follow children of one domain; return (node, blocks in it, byte offset)."""
        block_bytes = self.block_bytes
        while True:
            if passed is not None:
                passed.append((node, offset))
            children = node.children.get(domain)
            if children is None or offset + block_bytes > end:
                return node, node.num_blocks, offset
            child = children.get(tokens[offset : offset + block_bytes])
            if child is None:
                return node, node.num_blocks, offset
            edge = child.edge
            # `common_blocks` spelled out for the usual case: deep paths live here.
            stop = offset + len(edge)
            if stop <= end and tokens.startswith(edge, offset):
                node, offset = child, stop
                continue
            num_blocks = self.common_blocks(child, tokens, offset, end)
            offset += num_blocks * block_bytes
            node = child
            if num_blocks < child.num_blocks:
                return node, num_blocks, offset

    def _partial(
        self,
        node: Node,
        num_node_blocks: int,
        domain: Domain,
        tokens: bytes,
        offset: int,
        limit_bytes: int,
    ) -> PartialBlock | None:
        """Find the visible block that continues a match for the most tokens."""
        block_bytes = self.block_bytes
        wanted = tokens[offset : min(offset + block_bytes, limit_bytes)]
        first = wanted[:TOKEN_BYTES]
        best: PartialBlock | None = None
        best_bytes = TOKEN_BYTES - 1
        if num_node_blocks < node.num_blocks:
            start = num_node_blocks * block_bytes
            best_bytes = common_prefix_bytes(node.edge, start, wanted, 0, len(wanted))
            best = PartialBlock(node, num_node_blocks, best_bytes // TOKEN_BYTES)
        else:
            is_public = domain.kind is DomainKind.PUBLIC
            for visible in (PUBLIC,) if is_public else (PUBLIC, domain):
                children = node.children.get(visible)
                if children is None:
                    continue
                for block, child in children.nearest(wanted):
                    if block[:TOKEN_BYTES] != first:
                        continue  # most often: nothing to copy
                    same = common_prefix_bytes(block, 0, wanted, 0, len(wanted))
                    if same > best_bytes:
                        best_bytes = same
                        best = PartialBlock(child, 0, same // TOKEN_BYTES)
        return best if best is not None and best.num_tokens else None

    def _add_child(self, parent: Node, node: Node) -> None:
        children = parent.children.get(node.domain)
        if children is None:
            children = parent.children[node.domain] = _Children()
        children.add(node.edge[: self.block_bytes], node)

    def _forget_empty_retired(self, node: Node) -> None:
        if node.is_retired and not node.children and node in self._retired:
            self._retired.remove(node)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id


class _Children:
    """Children of one domain below one node, by the tokens of their first block.

    The keys are kept sorted beside the dict, because the child that agrees with a
    query for the most bytes is a neighbour of the query in byte order. The sorted
    keys lie in runs of bounded length, so adding and removing one of 100,000 children
    moves a few kilobytes and not a megabyte.
    """

    __slots__ = ("_by_key", "_firsts", "_runs")

    _MAX_RUN = 512

    def __init__(self) -> None:
        self._by_key: dict[bytes, Node] = {}
        self._runs: list[list[bytes]] = []
        self._firsts: list[bytes] = []  # first key of each run

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._by_key.values())

    def keys(self) -> list[bytes]:
        return list(self._by_key)

    def items(self) -> list[tuple[bytes, Node]]:
        return list(self._by_key.items())

    def sorted_keys(self) -> list[bytes]:
        return [key for run in self._runs for key in run]

    def get(self, key: bytes) -> Node | None:
        return self._by_key.get(key)

    def replace(self, key: bytes, node: Node) -> None:
        if key not in self._by_key:
            raise InvariantError("replace of a child that is not there")
        self._by_key[key] = node

    def add(self, key: bytes, node: Node) -> None:
        if key in self._by_key:
            raise InvariantError("two children start with the same block")
        self._by_key[key] = node
        if not self._runs:
            self._runs.append([key])
            self._firsts.append(key)
            return
        index = self._run_of(key)
        run = self._runs[index]
        run.insert(bisect_left(run, key), key)
        self._firsts[index] = run[0]
        if len(run) > self._MAX_RUN:
            half = len(run) // 2
            self._runs.insert(index + 1, run[half:])
            self._firsts.insert(index + 1, run[half])
            del run[half:]

    def discard(self, key: bytes) -> None:
        del self._by_key[key]
        index = self._run_of(key)
        run = self._runs[index]
        del run[bisect_left(run, key)]
        if run:
            self._firsts[index] = run[0]
        else:
            del self._runs[index], self._firsts[index]

    def nearest(self, wanted: bytes) -> list[tuple[bytes, Node]]:
        """Return the neighbours of `wanted` in byte order, at most two."""
        if not self._runs:
            return []
        index = self._run_of(wanted)
        run = self._runs[index]
        at = bisect_left(run, wanted)
        keys = run[max(0, at - 1) : at + 1]
        if at == len(run) and index + 1 < len(self._runs):
            keys = [*keys, self._firsts[index + 1]]
        return [(key, self._by_key[key]) for key in keys]

    def _run_of(self, key: bytes) -> int:
        """Return the run that holds or would hold the key."""
        at = bisect_left(self._firsts, key)
        if at < len(self._firsts) and self._firsts[at] == key:
            return at
        return max(0, at - 1)
