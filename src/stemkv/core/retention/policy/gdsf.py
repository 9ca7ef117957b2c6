"""Evict the leaf that is used least often for what it costs, but age what is not used.

Owns how often each run of blocks was used, resident or evicted, and the age of the
cache. What a block is worth is told to it.

GreedyDual-Size with Frequency (Cherkasova, "Improving WWW proxies performance with
greedy-dual-size-frequency caching policy", HP Labs HPL-98-69R1, 1998): the priority of
an object is `L + uses * cost / bytes`, where the age `L` is the priority of what was
evicted last, as it was when the object was last used. So what is no longer used falls
behind all that is new, however often it was used once.

On a prefix tree a leaf stands for its last block, which goes first. All blocks have
the same bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from stemkv.core.retention.policy.ghosts import Ghosts
from stemkv.core.retention.policy.leaves import Key, Leaves

__all__ = ["Gdsf"]

_GHOSTS_PER_BLOCK = 8


class _Run:
    """What is known of a run of blocks with one history."""

    __slots__ = ("age", "keys", "num_uses", "start", "tick")

    def __init__(self, start: int, keys: array[int], num_uses: int) -> None:
        self.start = start  # blocks before it on its path
        self.keys = keys  # one for each of its blocks
        self.num_uses = num_uses
        self.age = 0.0  # of the cache, when the last use ended
        self.tick: int | None = None  # of the end of the last use; None while it lasts

    def is_like(self, other: _Run) -> bool:
        """Whether the two are one run that was cut; one tick means one age."""
        return self.num_uses == other.num_uses and self.tick == other.tick


class Gdsf:
    """Least priority first; of equal ones the least recently used.

    `num_blocks` is the size of the cache: uses of evicted blocks are remembered for
    eight times as many. `worth` gives a block's cost from how many blocks its path has;
    it must not fall with the depth, since the cache may take many blocks of a leaf at
    once. By default all blocks cost the same. A use lasts from the beginning of the
    first lease to the end of the last; each lease counts.
    """

    needs_keys = True

    def __init__(
        self, num_blocks: int, *, worth: Callable[[int], float] | None = None
    ) -> None:
        self._worth = worth
        self._age = 0.0
        self._runs: dict[int, _Run] = {}  # by node id
        self._ghosts: Ghosts[int] = Ghosts(_GHOSTS_PER_BLOCK * num_blocks)
        self._leaves = Leaves()
        self._named: int | None = None  # the victim that was named last

    def num_alike(self, keys: Sequence[int]) -> int:
        """Return how many blocks were used equally often, as far as is remembered."""
        return self._ghosts.num_alike(keys)

    def can_extend(self, node_id: int, keys: Sequence[int]) -> bool:
        """Only blocks without a past, behind those of the same lease."""
        run = self._runs[node_id]
        return run.num_uses == 1 and run.tick is None and keys[0] not in self._ghosts

    def can_merge(self, upper_id: int, lower_id: int) -> bool:
        """Only what was used equally often, and last at the same time."""
        return self._runs[upper_id].is_like(self._runs[lower_id])

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
        """Count a use more than before the blocks were evicted."""
        own = array("Q", keys)
        num_uses = self._ghosts.recall(own) or 0
        run = self._runs.get(node_id)
        if run is None:
            self._runs[node_id] = _Run(start, own, num_uses + 1)
        else:
            run.keys.extend(own)

    def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
        """Count the use."""
        run = self._runs[node_id]
        run.num_uses += 1
        run.tick = None

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        """Give the run the age of the cache."""
        run = self._runs[node_id]
        run.age, run.tick = self._age, tick

    def split(self, upper_id: int, lower_id: int, *, num_blocks: int) -> None:
        """Give both parts the history of the whole."""
        lower = self._runs[lower_id]
        upper = _Run(lower.start, lower.keys[:num_blocks], lower.num_uses)
        upper.age, upper.tick = lower.age, lower.tick
        self._runs[upper_id] = upper
        del lower.keys[:num_blocks]
        lower.start += num_blocks

    def merged(self, upper_id: int, lower_id: int) -> None:
        """Join two parts that have one history."""
        upper, lower = self._runs.pop(upper_id), self._runs[lower_id]
        lower.keys = upper.keys + lower.keys
        lower.start = upper.start

    def became_evictable(self, node_id: int, *, now: float) -> None:
        """Make the node a candidate, as its last block is rated."""
        self._leaves.add(node_id, self._key(node_id))

    def became_pinned(self, node_id: int) -> None:
        """Drop the node as a candidate."""
        self._leaves.discard(node_id)

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        """Age by what was named and went; remember what left; rate what is left."""
        run = self._runs[node_id]
        if may_return:
            if node_id == self._named:
                # A parent can be less than its child was; age does not go back.
                self._age = max(self._age, self._priority(run))
            self._ghosts.remember(run.keys[num_left:], run.num_uses)
        self._named = None
        is_candidate = node_id in self._leaves
        self._leaves.discard(node_id)
        if num_left == 0:
            del self._runs[node_id]
            return
        del run.keys[num_left:]
        if is_candidate:
            self._leaves.add(node_id, self._key(node_id))

    def most_to_take(self) -> int | None:
        """Any number: the next victim would be the same node."""
        return None

    def victim(self, now: float) -> int | None:
        """Return the leaf with the least priority; amortised O(log n)."""
        self._named = self._leaves.first()
        return self._named

    # Private

    def _key(self, node_id: int) -> Key:
        run = self._runs[node_id]
        assert run.tick is not None, "a candidate is not in use"
        return (self._priority(run), run.tick, -node_id)

    def _priority(self, run: _Run) -> float:
        if self._worth is None:
            return run.age + run.num_uses
        return run.age + run.num_uses * self._worth(run.start + len(run.keys))
