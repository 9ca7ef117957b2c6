"""What a policy must decide, as plainly as it can be said: block by block, no indices.

`Twin` is driven by the same hooks as a policy, but keeps every block's state apart and
looks at every leaf for every victim. What is special of a policy is its `Rule`. A twin
also holds that a node is a run of blocks with one history: it finds out for itself
whether blocks are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Block", "FrequencyRule", "LruRule", "Rule", "S3FifoRule", "Twin"]


@dataclass(eq=False)
class Block:
    """One block of a path. `state` is its rule's; no two blocks share one."""

    key: int | None  # None where the policy needs none
    depth: int  # blocks of its path, itself included
    state: Any


Nodes = Mapping[int, Sequence[Block]]  # all that are resident, by id


class Rule(Protocol):
    """What is special of one policy."""

    needs_keys: bool
    max_ghosts: int  # blocks

    def new(self, past: Any, *, hint: int, tick: int, now: float) -> Any:
        """Return the state of a block that appears; `past` is what was remembered."""

    def grown(self, state: Any, *, tick: int, now: float) -> None:
        """The block's node was lengthened by its own lease."""

    def used(self, state: Any, *, hint: int, tick: int, now: float) -> None: ...

    def settle(self, now: float) -> None:
        """All blocks of a node have heard what there is to hear."""

    def released(self, state: Any, *, tick: int, now: float) -> None: ...

    def evicted(self, block: Block) -> None:
        """The block was named as a victim, and goes."""

    def past(self, state: Any) -> Any:
        """Return what is remembered of an evicted block; `None` is nothing."""

    def are_pasts_alike(self, one: Any, other: Any) -> bool: ...

    def are_alike(self, one: Any, other: Any) -> bool:
        """Whether nothing tells two blocks apart from now on."""

    def can_follow(self, state: Any, past: Any) -> bool:
        """Whether a new block may join the node of the block that its lease ends at."""

    def victim(self, nodes: Nodes, leaves: set[int], now: float) -> int:
        """Return the leaf to take from. There is one."""


@dataclass
class _Ghost:
    """What is remembered of one evicted block."""

    key: int
    past: Any


class Twin:
    """An `EvictionPolicy` without any cleverness."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.nodes: dict[int, list[Block]] = {}
        self.evictable: set[int] = set()
        # Blocks that went at once, and are forgotten at once; the oldest are first.
        self.ghosts: list[list[_Ghost]] = []
        self._named: int | None = None

    @property
    def needs_keys(self) -> bool:
        return self.rule.needs_keys

    # Questions

    def num_alike(self, keys: Sequence[int]) -> int:
        pasts = self._pasts(keys)
        num_alike = 1
        while num_alike < len(pasts) and self._are_pasts_alike(
            pasts[0], pasts[num_alike]
        ):
            num_alike += 1
        return num_alike

    def can_extend(self, node_id: int, keys: Sequence[int]) -> bool:
        past = self._pasts(keys)[0] if keys else None
        last = self.nodes[node_id][-1]
        return self.rule.can_follow(last.state, past)

    def can_merge(self, upper_id: int, lower_id: int) -> bool:
        joined = [*self.nodes[upper_id], *self.nodes[lower_id]]
        return all(
            self.rule.are_alike(joined[0].state, block.state) for block in joined
        )

    def victim(self, now: float) -> int | None:
        self._named = None
        if self.evictable:
            self._named = self.rule.victim(self.nodes, self.evictable, now)
        return self._named

    def most_to_take(self) -> int | None:
        return None

    # What happens

    def published(
        self,
        node_id: int,
        *,
        start: int,
        num_blocks: int,
        keys: Sequence[int],
        hint: int,
        tick: int,
        now: float,
    ) -> None:
        blocks = self.nodes.setdefault(node_id, [])
        for block in blocks:
            self.rule.grown(block.state, tick=tick, now=now)
        pasts = self._pasts(keys) if keys else [None] * num_blocks
        for depth, past in enumerate(pasts, start + 1):
            state = self.rule.new(past, hint=hint, tick=tick, now=now)
            key = keys[depth - start - 1] if keys else None
            blocks.append(Block(key, depth, state))
        self._recall(keys)
        self.rule.settle(now)
        self._check(node_id)

    def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
        for block in self.nodes[node_id]:
            self.rule.used(block.state, hint=hint, tick=tick, now=now)
        self.rule.settle(now)
        self._check(node_id)

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        for block in self.nodes[node_id]:
            self.rule.released(block.state, tick=tick, now=now)
        self._check(node_id)

    def split(self, upper_id: int, lower_id: int, *, num_blocks: int) -> None:
        blocks = self.nodes[lower_id]
        self.nodes[upper_id] = blocks[:num_blocks]
        self.nodes[lower_id] = blocks[num_blocks:]

    def merged(self, upper_id: int, lower_id: int) -> None:
        self.nodes[lower_id] = self.nodes.pop(upper_id) + self.nodes[lower_id]
        self._check(lower_id)

    def became_evictable(self, node_id: int, *, now: float) -> None:
        self.evictable.add(node_id)

    def became_pinned(self, node_id: int) -> None:
        self.evictable.remove(node_id)

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        blocks = self.nodes[node_id]
        if may_return:
            if node_id == self._named:
                for block in reversed(blocks[num_left:]):
                    self.rule.evicted(block)
            self._remember(blocks[num_left:])
        self._named = None
        self.nodes[node_id] = blocks[:num_left]
        if num_left == 0:
            del self.nodes[node_id]
            self.evictable.discard(node_id)

    # Private

    def _check(self, node_id: int) -> None:
        first, *others = self.nodes[node_id]
        for block in others:
            assert self.rule.are_alike(first.state, block.state), "two histories"

    def _are_pasts_alike(self, one: Any, other: Any) -> bool:
        if one is None or other is None:
            return one is other
        return self.rule.are_pasts_alike(one, other)

    def _remember(self, blocks: Sequence[Block]) -> None:
        run = []
        for block in blocks:
            past = self.rule.past(block.state)
            if past is not None:
                assert block.key is not None
                run.append(_Ghost(block.key, past))
        if run:
            self._put_last(run)
        while sum(map(len, self.ghosts)) > self.rule.max_ghosts:
            del self.ghosts[0]

    def _put_last(self, run: list[_Ghost]) -> None:
        others = [each for each in self.ghosts if each[0].key != run[0].key]
        self.ghosts = [*others, run]

    def _head(self, key: int) -> list[_Ghost]:
        """What is remembered from this block on: blocks come back from the head."""
        return next((run for run in self.ghosts if run[0].key == key), [])

    def _pasts(self, keys: Sequence[int]) -> list[Any]:
        """What is remembered of each of some blocks that follow one another."""
        pasts: list[Any] = []
        while len(pasts) < len(keys):
            found = self._head(keys[len(pasts)])
            for ghost in found:
                if len(pasts) == len(keys) or ghost.key != keys[len(pasts)]:
                    break
                pasts.append(ghost.past)
            if not found:
                pasts.append(None)
        return pasts

    def _recall(self, keys: Sequence[int]) -> None:
        """Forget what is back; what went with it counts as gone now."""
        at = 0
        while at < len(keys):
            run = self._head(keys[at])
            if not run:
                at += 1
                continue
            self.ghosts.remove(run)
            while run and at < len(keys) and run[0].key == keys[at]:
                run = run[1:]
                at += 1
            if run:
                self._put_last(run)


# LRU


@dataclass
class _LastUse:
    ended: float  # tick; inf while it lasts


class LruRule:
    """The end of the last use decides, of equal ones the younger node goes."""

    needs_keys = False
    max_ghosts = 0

    def new(self, past: Any, *, hint: int, tick: int, now: float) -> _LastUse:
        return _LastUse(math.inf)

    def grown(self, state: _LastUse, *, tick: int, now: float) -> None:
        pass

    def settle(self, now: float) -> None:
        pass

    def used(self, state: _LastUse, *, hint: int, tick: int, now: float) -> None:
        state.ended = math.inf

    def released(self, state: _LastUse, *, tick: int, now: float) -> None:
        state.ended = tick

    def evicted(self, block: Block) -> None:
        pass

    def past(self, state: _LastUse) -> None:
        return None

    def are_pasts_alike(self, one: Any, other: Any) -> bool:
        return True

    def are_alike(self, one: _LastUse, other: _LastUse) -> bool:
        return one == other

    def can_follow(self, state: _LastUse, past: Any) -> bool:
        return True

    def victim(self, nodes: Nodes, leaves: set[int], now: float) -> int:
        return min(leaves, key=lambda leaf: (nodes[leaf][-1].state.ended, -leaf))


# LFU-DA and GDSF


@dataclass
class _Uses:
    num_uses: int
    age: float
    ended: float  # tick of the last use's end; inf while it lasts


class FrequencyRule:
    """Age at the last use, plus uses times worth; then as LRU."""

    needs_keys = True

    def __init__(
        self, num_blocks: int, worth: Callable[[int], float] | None = None
    ) -> None:
        self.max_ghosts = 8 * num_blocks
        self._worth = worth
        self._age = 0.0

    def new(self, past: int | None, *, hint: int, tick: int, now: float) -> _Uses:
        return _Uses(1 if past is None else past + 1, self._age, math.inf)

    def grown(self, state: _Uses, *, tick: int, now: float) -> None:
        pass

    def settle(self, now: float) -> None:
        pass

    def used(self, state: _Uses, *, hint: int, tick: int, now: float) -> None:
        state.num_uses += 1
        state.ended = math.inf

    def released(self, state: _Uses, *, tick: int, now: float) -> None:
        state.age, state.ended = self._age, tick

    def evicted(self, block: Block) -> None:
        self._age = max(self._age, self._priority(block))

    def past(self, state: _Uses) -> int:
        return state.num_uses

    def are_pasts_alike(self, one: int, other: int) -> bool:
        return one == other

    def are_alike(self, one: _Uses, other: _Uses) -> bool:
        if one.ended == other.ended == math.inf:
            return one.num_uses == other.num_uses  # their age is still to come
        return one == other

    def can_follow(self, state: _Uses, past: int | None) -> bool:
        return state.num_uses == 1 and state.ended == math.inf and past is None

    def victim(self, nodes: Nodes, leaves: set[int], now: float) -> int:
        def rank(leaf: int) -> tuple[float, float, int]:
            tail = nodes[leaf][-1]
            return self._priority(tail), tail.state.ended, -leaf

        return min(leaves, key=rank)

    def _priority(self, block: Block) -> float:
        worth = 1.0 if self._worth is None else self._worth(block.depth)
        state: _Uses = block.state
        return state.age + state.num_uses * worth


# S3-FIFO


@dataclass
class _Queued:
    is_main: bool
    num_uses: int
    place: tuple[int, int] | None  # (tick, how many moved since), None: not yet in


class S3FifoRule:
    """Walks the queues from their heads. A node's blocks move together."""

    needs_keys = True

    def __init__(self, num_blocks: int) -> None:
        self.max_ghosts = num_blocks
        self._tick = 0
        self._num_moved = 0

    def new(self, past: Any, *, hint: int, tick: int, now: float) -> _Queued:
        return _Queued(past is not None, 0, None)

    def grown(self, state: _Queued, *, tick: int, now: float) -> None:
        pass

    def settle(self, now: float) -> None:
        pass

    def used(self, state: _Queued, *, hint: int, tick: int, now: float) -> None:
        state.num_uses = min(3, state.num_uses + 1)

    def released(self, state: _Queued, *, tick: int, now: float) -> None:
        self._tick = tick
        if state.place is None:
            state.place = (tick, 0)

    def evicted(self, block: Block) -> None:
        pass

    def past(self, state: _Queued) -> bool | None:
        return None if state.is_main else True

    def are_pasts_alike(self, one: Any, other: Any) -> bool:
        return True

    def are_alike(self, one: _Queued, other: _Queued) -> bool:
        return one == other

    def can_follow(self, state: _Queued, past: Any) -> bool:
        return state == _Queued(past is not None, 0, None)

    def victim(self, nodes: Nodes, leaves: set[int], now: float) -> int:
        while True:
            leaf, is_small_full = self._head(nodes, leaves)
            states: list[_Queued] = [block.state for block in nodes[leaf]]
            head = states[0]
            if not head.is_main and is_small_full:
                if head.num_uses < 2:
                    return leaf
                self._move(states, is_main=True, num_uses=0)
            elif head.num_uses == 0:
                return leaf
            else:
                self._move(states, is_main=head.is_main, num_uses=head.num_uses - 1)

    def _head(self, nodes: Nodes, leaves: set[int]) -> tuple[int, bool]:
        """The first leaf of the queue that has to give; whether the small one is full.

        It is full with a tenth of all blocks, whether they can go or not.
        """
        resident = [block.state for blocks in nodes.values() for block in blocks]
        num_small = sum(not state.is_main for state in resident)
        is_small_full = num_small >= len(resident) / 10
        in_order = sorted(leaves, key=lambda leaf: (nodes[leaf][0].state.place, -leaf))
        small = [leaf for leaf in in_order if not nodes[leaf][0].state.is_main]
        main = [leaf for leaf in in_order if nodes[leaf][0].state.is_main]
        if small and (is_small_full or not main):
            return small[0], is_small_full
        return main[0], is_small_full

    def _move(self, states: list[_Queued], *, is_main: bool, num_uses: int) -> None:
        self._num_moved += 1
        for state in states:
            state.is_main, state.num_uses = is_main, num_uses
            state.place = (self._tick, self._num_moved)
