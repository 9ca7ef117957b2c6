"""Hooks by hand: a story about a policy, told in leases and evictions.

Fills in ticks, keys and the order of hooks; everything else is said by the test. Nodes
have names. Nothing in here decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from stemkv.core.retention.policy import EvictionPolicy

__all__ = ["Script"]


class Script:
    """One policy, and which nodes it was told of."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.now = 0.0
        self._tick = 0
        self._ids: dict[str, int] = {}
        self._num_ids = 0
        self._num_blocks: dict[str, int] = {}
        self._evictable: set[str] = set()

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def publish(self, *names: str, num_blocks: int = 1, start: int = 0) -> None:
        """A lease brings nodes in, and holds them."""
        self._tick += 1
        for name in names:
            if name not in self._ids:
                self._num_ids += 1
                self._ids[name] = self._num_ids
                self._num_blocks[name] = 0
            self._num_blocks[name] += num_blocks
            self.policy.published(
                self._ids[name],
                start=start,
                num_blocks=num_blocks,
                keys=self.keys(name, num_blocks) if self.policy.needs_keys else (),
                hint=0,
                tick=self._tick,
                now=self.now,
            )

    def use(self, *names: str) -> None:
        """A lease begins."""
        self._tick += 1
        for name in names:
            if name in self._evictable:
                self._evictable.remove(name)
                self.policy.became_pinned(self._ids[name])
            self.policy.used(self._ids[name], hint=0, tick=self._tick, now=self.now)

    def release(self, *names: str, inner: Sequence[str] = ()) -> None:
        """The last lease ends; `inner` nodes have children, the others become leaves."""
        self._tick += 1
        for name in (*inner, *names):
            self.policy.released(self._ids[name], tick=self._tick, now=self.now)
        for name in names:
            self.become_leaf(name)

    def become_leaf(self, name: str) -> None:
        self._evictable.add(name)
        self.policy.became_evictable(self._ids[name], now=self.now)

    def serve(self, *names: str, num_blocks: int = 1, start: int = 0) -> None:
        """One lease after another: each brings a node in or uses it, and ends."""
        for name in names:
            if name in self._ids:
                self.use(name)
            else:
                self.publish(name, num_blocks=num_blocks, start=start)
            self.release(name)

    def drop(self, name: str, num_blocks: int = 1, *, may_return: bool = True) -> None:
        """Take blocks from the tail of a leaf, whether the policy named it or not."""
        num_left = self._num_blocks[name] - num_blocks
        self._num_blocks[name] = num_left
        node_id = self._ids[name]
        if num_left == 0:
            del self._ids[name], self._num_blocks[name]
            self._evictable.discard(name)
        self.policy.dropped(node_id, num_left, may_return=may_return)

    def evict(self, num_victims: int = 1, *, num_blocks: int = 1) -> list[str]:
        """Let the policy name victims, one after another, and take their tails."""
        victims = []
        for _ in range(num_victims):
            name = self.victim()
            if name is None:
                break
            victims.append(name)
            self.drop(name, min(num_blocks, self._num_blocks[name]))
        return victims

    def victim(self) -> str | None:
        node_id = self.policy.victim(self.now)
        names = [name for name, each in self._ids.items() if each == node_id]
        return names[0] if names else None

    def id_of(self, name: str) -> int:
        return self._ids[name]

    @staticmethod
    def keys(name: str, num_blocks: int = 1) -> list[int]:
        """The same for the same name, whenever it comes."""
        return [crc32(f"{name}/{index}".encode()) for index in range(num_blocks)]
