"""A policy under watch: what it is told must be legal, and what it answers right.

Stands between a cache (or a driver of hooks) and the policy, passes everything on, and
keeps no more than which nodes there are. A twin, if there is one, hears the same and
must answer the same, question by question and victim by victim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stemkv.core.retention.policy import EvictionPolicy

__all__ = ["Watched"]


class Watched:
    """Raises `AssertionError` as soon as either side of the hooks breaks a rule."""

    def __init__(
        self, policy: EvictionPolicy, twin: EvictionPolicy | None = None
    ) -> None:
        self.policy = policy
        # Behind a function, so that a `picture` of the cache leaves the twin out.
        self._twin: Callable[[], EvictionPolicy | None] = lambda: twin
        self.num_blocks: dict[int, int] = {}  # by node id
        self.evictable: set[int] = set()
        self.victims: list[int] = []  # every one that was named and then dropped
        self._held: set[int] = set()
        self._gone: set[int] = set()
        self._named: int | None = None
        self._can_merge: tuple[int, int] | None = None
        self._tick = 0
        self._now = 0.0

    @property
    def twin(self) -> EvictionPolicy | None:
        return self._twin()

    @property
    def needs_keys(self) -> bool:
        return self.policy.needs_keys

    def num_alike(self, keys: Sequence[int]) -> int:
        assert self.needs_keys, "it was said that keys are of no use"
        assert len(keys) > 0
        answer = self.policy.num_alike(keys)
        assert 1 <= answer <= len(keys)
        if self.twin is not None:
            assert self.twin.num_alike(keys) == answer
        return answer

    def can_extend(self, node_id: int, keys: Sequence[int]) -> bool:
        assert node_id in self._held
        assert bool(len(keys)) == self.needs_keys
        answer = self.policy.can_extend(node_id, keys)
        if self.twin is not None:
            assert self.twin.can_extend(node_id, keys) == answer
        return answer

    def can_merge(self, upper_id: int, lower_id: int) -> bool:
        assert upper_id not in self.evictable
        assert (upper_id in self._held) == (lower_id in self._held)
        answer = self.policy.can_merge(upper_id, lower_id)
        if self.twin is not None:
            assert self.twin.can_merge(upper_id, lower_id) == answer
        self._can_merge = (upper_id, lower_id) if answer else None
        return answer

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
        assert node_id not in self._gone, "ids never come back"
        assert num_blocks > 0
        assert len(keys) == (num_blocks if self.needs_keys else 0)
        assert node_id in self._held or node_id not in self.num_blocks
        self._pass_time(tick, now)
        self._held.add(node_id)
        self.num_blocks[node_id] = self.num_blocks.get(node_id, 0) + num_blocks
        for each in self._both():
            each.published(
                node_id,
                start=start,
                num_blocks=num_blocks,
                keys=keys,
                hint=hint,
                tick=tick,
                now=now,
            )

    def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
        assert node_id in self.num_blocks
        assert node_id not in self.evictable
        self._pass_time(tick, now)
        self._held.add(node_id)
        for each in self._both():
            each.used(node_id, hint=hint, tick=tick, now=now)

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        self._pass_time(tick, now)
        self._held.remove(node_id)
        for each in self._both():
            each.released(node_id, tick=tick, now=now)

    def split(self, upper_id: int, lower_id: int, *, num_blocks: int) -> None:
        assert upper_id not in self.num_blocks
        assert upper_id not in self._gone, "ids never come back"
        assert 0 < num_blocks < self.num_blocks[lower_id]
        self.num_blocks[upper_id] = num_blocks
        self.num_blocks[lower_id] -= num_blocks
        if lower_id in self._held:
            self._held.add(upper_id)
        for each in self._both():
            each.split(upper_id, lower_id, num_blocks=num_blocks)

    def merged(self, upper_id: int, lower_id: int) -> None:
        assert self._can_merge == (upper_id, lower_id), "nobody asked whether they may"
        self.num_blocks[lower_id] += self.num_blocks.pop(upper_id)
        self._held.discard(upper_id)
        self._gone.add(upper_id)
        for each in self._both():
            each.merged(upper_id, lower_id)

    def became_evictable(self, node_id: int, *, now: float) -> None:
        assert node_id in self.num_blocks
        assert node_id not in self._held
        assert node_id not in self.evictable
        self._pass_time(self._tick, now)
        self.evictable.add(node_id)
        for each in self._both():
            each.became_evictable(node_id, now=now)

    def became_pinned(self, node_id: int) -> None:
        self.evictable.remove(node_id)
        for each in self._both():
            each.became_pinned(node_id)

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        assert node_id not in self._held
        assert 0 <= num_left < self.num_blocks[node_id]
        if node_id == self._named and may_return:
            self.victims.append(node_id)
        self._named = None
        self.num_blocks[node_id] = num_left
        if num_left == 0:
            del self.num_blocks[node_id]
            self.evictable.discard(node_id)
            self._gone.add(node_id)
        for each in self._both():
            each.dropped(node_id, num_left, may_return=may_return)

    def victim(self, now: float) -> int | None:
        self._pass_time(self._tick, now)
        answer = self.policy.victim(now)
        assert self.policy.victim(now) == answer, "asked again, it says another"
        assert (answer is None) == (not self.evictable)
        assert answer is None or answer in self.evictable
        if self.twin is not None:
            assert self.twin.victim(now) == answer
        self._named = answer
        return answer

    def most_to_take(self) -> int | None:
        answer = self.policy.most_to_take()
        assert answer is None or answer > 0
        if self.twin is not None:
            assert self.twin.most_to_take() == answer
        return answer

    def _both(self) -> list[EvictionPolicy]:
        return [self.policy] if self.twin is None else [self.policy, self.twin]

    def _pass_time(self, tick: int, now: float) -> None:
        assert tick >= self._tick
        assert now >= self._now
        self._tick, self._now = tick, now
