"""A tree that is nothing but its hooks: legal, and less tame than the real cache.

Leases begin, publish and end anywhere; leaves are evicted, or dropped although the
policy did not name them; some are set aside for a time, as blocks are that must not be
taken. Which act comes next is said from outside, so equal acts give equal hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from stemkv.core.retention.policy import EvictionPolicy

__all__ = ["ACTS", "Act", "HookTree"]

Thing = TypeVar("Thing")
Act = tuple[str, int, int, float]  # what, two picks, seconds that pass before it

ACTS = ["lease"] * 4 + ["publish"] * 4 + ["release"] * 5 + ["evict"] * 4
ACTS += ["drop", "set_aside", "put_back", "fork"]


@dataclass(eq=False)
class Node:
    id: int
    parent: Node | None  # None: the root
    path: str  # letters from the root to the end of the node
    num_blocks: int
    children: dict[str, Node] = field(default_factory=dict)  # by first letter
    num_leases: int = 0

    @property
    def start(self) -> int:
        return len(self.path) - self.num_blocks

    def steps(self) -> list[Node]:
        """From just below the root to this one."""
        if self.parent is None:
            return []
        return [*self.parent.steps(), self]


@dataclass(eq=False)
class Lease:
    node: Node
    hint: int


class HookTree:
    """Blocks are letters: where the same letters lie below the same, keys are equal."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.leases: list[Lease] = []
        self.now = 0.0
        self._tick = 0
        self._root = Node(0, None, "", 0)
        self._num_nodes = 0
        self._keys: dict[str, int] = {}  # by path
        self._evictable: set[int] = set()
        self._aside: set[int] = set()

    def nodes(self) -> Iterator[Node]:
        """Parents before children, elder children first."""
        stack = [*self._root.children.values()][::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend([*node.children.values()][::-1])

    def act(self, act: Act) -> None:
        """Do it, unless there is nothing to do it to."""
        name, pick, other, pause = act
        self.now += pause
        match name:
            case "lease":
                self._lease(pick, other)
            case "publish" if self.leases:
                self._publish(_chosen(self.leases, pick), other)
            case "fork" if self.leases:
                self._fork(_chosen(self.leases, pick))
            case "release" if self.leases:
                self.release(_chosen(self.leases, pick))
            case "evict":
                self.evict(1 + other % 3)
            case "drop":
                self._drop_any(pick, other)
            case "set_aside" if self._evictable:
                self._set_aside(_chosen(sorted(self._evictable), pick))
            case "put_back" if self._aside:
                self._put_back(_chosen(sorted(self._aside), pick))

    # Leases

    def _lease(self, pick: int, other: int) -> None:
        """Begin at some node, or inside it, or at the root."""
        node = _chosen([self._root, *self.nodes()], pick)
        if other % 3 == 0 and node.num_blocks > 1:
            node = self._split(node, 1 + other % (node.num_blocks - 1))
        self._tick += 1
        lease = Lease(node, hint=other % 2)
        self.leases.append(lease)
        for step in reversed(node.steps()):
            self._pin(step)
        for step in node.steps():
            self._use(step, lease)

    def _publish(self, lease: Lease, pick: int) -> None:
        """Add one to four blocks, or take over those that are there."""
        letters = "".join("ab"[pick >> at & 1] for at in range(1 + pick % 4))
        self._tick += 1
        while letters:
            child = lease.node.children.get(letters[0])
            if child is None:
                letters = letters[self._publish_run(lease, letters) :]
                continue
            own = child.path[child.start :]
            same = 0
            while same < min(len(own), len(letters)) and own[same] == letters[same]:
                same += 1
            if same < child.num_blocks:
                child = self._split(child, same)
            self._pin(child)
            self._use(child, lease)
            lease.node = child
            letters = letters[same:]

    def _publish_run(self, lease: Lease, letters: str) -> int:
        node, start = lease.node, len(lease.node.path)
        paths = [node.path + letters[: at + 1] for at in range(len(letters))]
        keys: list[int] = []
        if self.policy.needs_keys:
            keys = [self._keys.setdefault(path, len(self._keys)) for path in paths]
            keys = keys[: self.policy.num_alike(keys)]
            paths = paths[: len(keys)]
        can_extend = (
            node.parent is not None
            and node.num_leases == 1
            and not node.children
            and self.policy.can_extend(node.id, keys)
        )
        if can_extend:
            node.path, node.num_blocks = paths[-1], node.num_blocks + len(paths)
        else:
            child = Node(self._new_id(), node, paths[-1], len(paths), num_leases=1)
            node.children[letters[0]] = child
            lease.node = node = child
        self.policy.published(
            node.id,
            start=start,
            num_blocks=len(paths),
            keys=keys,
            hint=lease.hint,
            tick=self._tick,
            now=self.now,
        )
        return len(paths)

    def _fork(self, lease: Lease) -> None:
        """Let a second lease hold the same, of which no policy hears."""
        self.leases.append(Lease(lease.node, lease.hint))
        for step in lease.node.steps():
            step.num_leases += 1

    def release(self, lease: Lease) -> None:
        self.leases.remove(lease)
        path = lease.node.steps()
        for step in path:
            step.num_leases -= 1
        free = [step for step in path if step.num_leases == 0]
        self._tick += 1
        for step in free:
            self.policy.released(step.id, tick=self._tick, now=self.now)
        for step in free:
            if not step.children:
                self._offer(step)
        for step in path:
            self._merge(step)

    # Leaves

    def evict(self, num_blocks: int) -> int | None:
        """Take blocks from the tail of the policy's victim, which is returned."""
        victim = self.policy.victim(self.now)
        if victim is not None:
            (node,) = [node for node in self.nodes() if node.id == victim]
            most = self.policy.most_to_take()
            num_blocks = num_blocks if most is None else min(num_blocks, most)
            self._drop(node, num_blocks, may_return=True)
        return victim

    def drop_all(self, *, may_return: bool) -> None:
        """Let all leases end and drop whatever is left, deepest first."""
        for lease in [*self.leases]:
            self.release(lease)
        for node in reversed([*self.nodes()]):
            self._drop(node, node.num_blocks, may_return=may_return)

    def _drop_any(self, pick: int, other: int) -> None:
        """Drop of a leaf that nobody holds, whatever the policy thinks."""
        leaves = sorted(self._evictable | self._aside)
        if leaves:
            leaf = _chosen(leaves, pick)
            (node,) = [node for node in self.nodes() if node.id == leaf]
            self._drop(node, 1 + other % 3, may_return=other % 2 == 0)

    def _drop(self, node: Node, num_blocks: int, *, may_return: bool) -> None:
        assert node.num_leases == 0
        assert not node.children
        assert node.parent is not None
        first = node.path[node.start]
        keep = max(0, node.num_blocks - num_blocks)
        if keep == 0 and node.id in self._evictable and num_blocks % 2:
            self._withdraw(node)  # the cache may say so first
        node.path = node.path[: node.start + keep]
        node.num_blocks = keep
        self.policy.dropped(node.id, keep, may_return=may_return)
        if keep:
            return
        self._evictable.discard(node.id)
        self._aside.discard(node.id)
        parent = node.parent
        del parent.children[first]
        if parent.parent is not None and not parent.children and not parent.num_leases:
            self._offer(parent)

    def _set_aside(self, leaf: int) -> None:
        self.policy.became_pinned(leaf)
        self._evictable.remove(leaf)
        self._aside.add(leaf)

    def _put_back(self, leaf: int) -> None:
        self._aside.remove(leaf)
        self._evictable.add(leaf)
        self.policy.became_evictable(leaf, now=self.now)

    # Parts

    def _offer(self, node: Node) -> None:
        self._evictable.add(node.id)
        self.policy.became_evictable(node.id, now=self.now)

    def _withdraw(self, node: Node) -> None:
        if node.id in self._evictable:
            self._evictable.remove(node.id)
            self.policy.became_pinned(node.id)
        self._aside.discard(node.id)

    def _pin(self, node: Node) -> None:
        if node.num_leases == 0:
            self._withdraw(node)
        node.num_leases += 1

    def _use(self, node: Node, lease: Lease) -> None:
        self.policy.used(node.id, hint=lease.hint, tick=self._tick, now=self.now)

    def _split(self, node: Node, num_blocks: int) -> Node:
        parent, start = node.parent, node.start
        assert parent is not None
        upper = Node(
            self._new_id(), parent, node.path[: start + num_blocks], num_blocks
        )
        upper.num_leases = node.num_leases
        parent.children[upper.path[start]] = upper
        node.parent, node.num_blocks = upper, node.num_blocks - num_blocks
        upper.children[node.path[node.start]] = node
        self.policy.split(upper.id, node.id, num_blocks=num_blocks)
        return upper

    def _merge(self, node: Node) -> None:
        """Undo a split, where nothing ends and the policy sees no difference."""
        if len(node.children) != 1 or node.parent is None:
            return
        (child,) = node.children.values()
        if child.num_leases != node.num_leases:
            return
        if self.policy.can_merge(node.id, child.id):
            node.parent.children[node.path[node.start]] = child
            child.parent = node.parent
            child.num_blocks += node.num_blocks
            self.policy.merged(node.id, child.id)

    def _new_id(self) -> int:
        self._num_nodes += 1
        return self._num_nodes


def _chosen(among: list[Thing], pick: int) -> Thing:
    return among[pick % len(among)]
