"""Evict the leaf whose keeping pays least, by what was learnt of times until reuse.

Owns what is remembered of every node, resident or evicted, and the choice among
classes. The learning is `ReuseTimes`.

A node's class is how often it was used (1, 2, more), how long it was idle before the
last use, and what its callers declared. Within a class the oldest leaf and the newest compete; the winner must beat the
least recently used leaf by a margin, so that the policy is LRU where it knows nothing.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence

from stemkv.core.retention.policy.ghosts import Ghosts
from stemkv.core.retention.policy.leaves import TwoEndedLeaves
from stemkv.core.retention.policy.lru_shadow import LruShadow
from stemkv.core.retention.policy.reuse_times import Cohort, ReuseTimes

__all__ = ["ReuseIndex"]

_MAX_USES = 3  # more uses than this are one class
_GAP_EDGES = (15.0, 90.0)  # seconds idle before the last use
_GHOSTS_PER_BLOCK = 8
_MARGIN = 0.9  # of the rate of the least recently used leaf: not below it is not better
_NEWEST_HANDICAP = 2.5
# How far it may fall behind LRU: by a share of LRU's hits; and where the evidence is
# strong by a larger one, by a part of the cache or by one run, whichever is more.
_SHARE = 0.004
_STRONG_SHARE = 0.007
_STRONG_SEED = 0.05
_STRONG_STAKE = 0.25  # of a run, which is then unlikely to be asked for
_STRONG_MARGIN = 0.5
_NUM_ERRORS = 1.0  # standard errors on both sides
_NUM_PASTS = _MAX_USES * (len(_GAP_EDGES) + 2)


class _Past:
    """What is remembered of a run of blocks with one history."""

    __slots__ = (
        "cohort",
        "gap",
        "hint",
        "keys",
        "kind",
        "last_used_s",
        "num_uses",
        "start",
        "tick",
        "was_released",
    )

    def __init__(
        self, start: int, keys: array[int], hint: int, tick: int, now: float
    ) -> None:
        self.start = start  # blocks before it on its path
        self.keys = keys  # one for each of its blocks
        self.hint = hint
        self.num_uses = 1
        self.gap = 0  # 0: none yet; else 1 + the place among the edges
        self.kind = _kind(1, 0, hint)
        self.last_used_s = now
        self.tick = tick
        self.cohort: Cohort | None = None  # of its idle time; None: a lease holds it
        self.was_released = False

    def part(self, start: int, keys: array[int]) -> _Past:
        """Return the same past for other blocks."""
        part = _Past(start, keys, self.hint, self.tick, self.last_used_s)
        part.num_uses, part.gap, part.kind = self.num_uses, self.gap, self.kind
        part.cohort, part.was_released = self.cohort, self.was_released
        return part

    def is_like(self, other: _Past) -> bool:
        """Whether the two are one run that was cut."""
        return (
            self.kind == other.kind
            and self.tick == other.tick
            and self.cohort is other.cohort
            and self.was_released == other.was_released
        )


class ReuseIndex:
    """The reuse index.

    `num_blocks` is the size of the cache: what was evicted is remembered for eight times
    as many blocks. `worth` gives a leaf's weight from how many blocks its path has; by
    default all blocks weigh the same, so the policy saves tokens.
    """

    needs_keys = True

    def __init__(
        self,
        num_blocks: int,
        *,
        worth: Callable[[int], float] | None = None,
    ) -> None:
        self._num_blocks = num_blocks
        self._worth = worth
        self._times = ReuseTimes()
        self._pasts: dict[int, _Past] = {}  # by node id
        self._ghosts = Ghosts(_GHOSTS_PER_BLOCK * num_blocks, _Past.is_like)
        self._leaves: dict[int, TwoEndedLeaves] = {}  # by class
        self._shadow = LruShadow(num_blocks)
        self._choice: int | None = None  # the last victim, if LRU would take another

    # What happens

    def num_alike(self, keys: Sequence[int]) -> int:
        """Return how far the past of the first block reaches, or what has none."""
        return self._ghosts.num_alike(keys)

    def can_extend(self, node_id: int, keys: Sequence[int]) -> bool:
        """Only blocks without a past, behind those of the same lease."""
        past = self._pasts[node_id]
        return (
            past.num_uses == 1 and not past.was_released and keys[0] not in self._ghosts
        )

    def can_merge(self, upper_id: int, lower_id: int) -> bool:
        """Only what has one past."""
        return self._pasts[upper_id].is_like(self._pasts[lower_id])

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
        """Take up the past of the blocks, if they were evicted and are remembered."""
        past = self._pasts.get(node_id)
        self._shadow.asked(num_blocks)
        if past is not None:
            past.keys.extend(keys)
            past.tick, past.last_used_s = tick, now
            return
        own = array("Q", keys)
        # A run that must not be parted (it is of one span) has no past if it has two.
        has_one_past = own[0] in self._ghosts and self._ghosts.num_alike(own) == len(
            own
        )
        ghost = self._ghosts.recall(own)
        if ghost is None or not has_one_past:
            self._pasts[node_id] = _Past(start, own, hint, tick, now)
            return
        past = self._pasts[node_id] = ghost.part(start, own)
        self._shadow.missed(past.tick, start, num_blocks)
        self._use(past, hint, tick, now)

    def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
        """Learn from the idle time that ends, and classify anew."""
        past = self._pasts[node_id]
        num_blocks = len(past.keys)
        self._shadow.asked(num_blocks)
        if past.cohort is not None:
            self._shadow.hit(past.tick, past.start, num_blocks)
        self._use(past, hint, tick, now)

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        """Begin an idle time."""
        past = self._pasts[node_id]
        past.was_released = True
        past.tick = tick
        past.last_used_s = now
        num_blocks = len(past.keys)
        past.cohort = self._times.begin(past.kind, num_blocks, now)
        self._shadow.released(tick, past.start, num_blocks)

    def split(self, upper_id: int, lower_id: int, *, num_blocks: int) -> None:
        """Give both parts the past of the whole."""
        lower = self._pasts[lower_id]
        self._pasts[upper_id] = lower.part(lower.start, lower.keys[:num_blocks])
        del lower.keys[:num_blocks]
        lower.start += num_blocks

    def merged(self, upper_id: int, lower_id: int) -> None:
        """Join two parts that have one past."""
        upper, lower = self._pasts.pop(upper_id), self._pasts[lower_id]
        lower.keys = upper.keys + lower.keys
        lower.start = upper.start

    def became_evictable(self, node_id: int, *, now: float) -> None:
        """Make the node a candidate in its class, at the time of its last use."""
        past = self._pasts[node_id]
        leaves = self._leaves.get(past.kind)
        if leaves is None:
            leaves = self._leaves[past.kind] = TwoEndedLeaves()
        leaves.add(node_id, past.tick)

    def became_pinned(self, node_id: int) -> None:
        """Drop the node as a candidate."""
        kind = self._pasts[node_id].kind
        leaves = self._leaves.get(kind)
        if leaves is not None:
            leaves.discard(node_id)
            if not leaves:
                del self._leaves[kind]  # many classes, with hints; few have leaves

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        """Remember what left, if equal blocks can come back."""
        past = self._pasts[node_id]
        gone = past.keys[num_left:]
        if past.cohort is not None:
            self._shadow.dropped(
                past.tick, len(gone), is_choice=node_id == self._choice
            )
        self._choice = None
        if may_return:
            self._ghosts.remember(gone, past.part(past.start + num_left, array("Q")))
        if num_left:
            del past.keys[num_left:]
            return
        self.became_pinned(node_id)
        del self._pasts[node_id]

    def victim(self, now: float) -> int | None:
        """Return the leaf that pays least, if LRU can be left for it; O(classes)."""
        best_id = oldest_id = None
        best_score = oldest_score = 0.0
        best_tick = oldest_tick = best_kind = oldest_kind = 0
        for kind, leaves in self._leaves.items():
            first = leaves.first()
            if first is None:
                continue
            score, tick = self._score(kind, first, now)
            if (
                oldest_id is None
                or tick < oldest_tick
                # Of those released at once, the one that appeared last.
                or (tick == oldest_tick and first > oldest_id)
            ):
                oldest_id, oldest_tick, oldest_score = first, tick, score
                oldest_kind = kind
            if best_id is None or (score, tick, first) < (
                best_score,
                best_tick,
                best_id,
            ):
                best_id, best_score, best_tick, best_kind = first, score, tick, kind
            last = leaves.last()
            if last == first or last is None:
                continue
            score, tick = self._score(kind, last, now)
            score *= _NEWEST_HANDICAP
            if (score, tick, last) < (best_score, best_tick, best_id):
                best_id, best_score, best_tick, best_kind = last, score, tick, kind
        self._choice = None
        if best_id is None or best_id == oldest_id:
            return oldest_id
        if best_score >= _MARGIN * oldest_score:
            return oldest_id
        past = self._pasts[best_id]
        shadow, num_blocks = self._shadow, len(past.keys)
        if shadow.holds(best_tick, past.start) and not shadow.can_lose(
            num_blocks, share=_SHARE
        ):
            # Losing it cannot be afforded, unless the evidence is strong.
            times = self._times
            worst = best_score * (1 + _NUM_ERRORS * times.error(best_kind))
            least = oldest_score * (1 - _NUM_ERRORS * times.error(oldest_kind))
            if worst >= _STRONG_MARGIN * least or not shadow.can_lose(
                _STRONG_STAKE * num_blocks,
                share=_STRONG_SHARE,
                seed=max(_STRONG_SEED * self._num_blocks, times.run),
            ):
                return oldest_id
        self._choice = best_id
        return best_id

    # Private

    def _score(self, kind: int, node_id: int, now: float) -> tuple[float, int]:
        past = self._pasts[node_id]
        score = self._times.rate(kind, now - past.last_used_s)
        if self._worth is not None:
            score *= self._worth(past.start + len(past.keys))
        return score, past.tick

    def _use(self, past: _Past, hint: int, tick: int, now: float) -> None:
        cohort = past.cohort
        if cohort is not None:
            self._times.end(cohort, past.kind, len(past.keys), now)
            past.cohort = None
        idle_s = now - past.last_used_s
        past.gap = gap = 1 + bisect_right(_GAP_EDGES, idle_s)
        num_uses = past.num_uses
        if num_uses < _MAX_USES:
            past.num_uses = num_uses = num_uses + 1
        past.hint = hint
        past.kind = _kind(num_uses, gap, hint)
        past.tick = tick
        past.last_used_s = now


def _kind(num_uses: int, gap: int, hint: int) -> int:
    return hint * _NUM_PASTS + (num_uses - 1) * (len(_GAP_EDGES) + 2) + gap
