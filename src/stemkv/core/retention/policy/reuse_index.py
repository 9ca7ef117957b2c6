"""Evict the leaf whose keeping pays least, by what was learnt of times until reuse.

Owns what is remembered of every node, resident or evicted, and the choice among
classes. The learning is `ReuseTimes`.

A node's class is how often it was used (1, 2, more), how long it was idle before the
last use, and what its callers declared. Within a class the oldest leaf and the newest compete; the winner must beat the
least recently used leaf by a margin, so that the policy is LRU where it knows nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from stemkv.core.retention.policy.ghosts import Ghosts
from stemkv.core.retention.policy.leaves import Place, TwoEndedLeaves
from stemkv.core.retention.policy.lru_shadow import Group, LruShadow
from stemkv.core.retention.policy.reuse_times import Cohort, ReuseTimes

__all__ = ["ReuseIndex"]

_MAX_USES = 3  # more uses than this are one class
_SHORT_S, _LONG_S = 15.0, 90.0  # idle before the last use
_GHOSTS_PER_BLOCK = 8
_MARGIN = 0.9  # of the rate of the least recently used leaf: not below it is not better
_NEWEST_HANDICAP = 2.5
_NUM_GAPS = 4  # none yet, short, middle, long
_NUM_PASTS = _MAX_USES * _NUM_GAPS


_Candidate = tuple[float, int, int]  # score, tick, node id


class _Past:
    """What is remembered of a run of blocks with one history."""

    __slots__ = (
        "cohort",
        "gap",
        "group",
        "hint",
        "keys",
        "kind",
        "last_used_s",
        "num_uses",
        "place",
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
        self.gap = 0  # 0: none yet; 1: short, 2: middle, 3: long
        self.kind = hint * _NUM_PASTS
        self.last_used_s = now
        self.tick = tick
        # Of its idle time; None: a lease holds it
        self.cohort: Cohort | None = None
        self.group: Group | None = None
        self.place: Place | None = None  # where it is a leaf that can go
        self.was_released = False

    def part(self, start: int, keys: array[int]) -> _Past:
        """Return the same past for other blocks."""
        part = _Past(start, keys, self.hint, self.tick, self.last_used_s)
        part.num_uses, part.gap, part.kind = self.num_uses, self.gap, self.kind
        part.cohort, part.group = self.cohort, self.group
        part.was_released = self.was_released
        return part

    def is_like(self, other: _Past) -> bool:
        """Whether the two are one run that was cut."""
        return (
            self.kind == other.kind
            and self.tick == other.tick
            and self.group is other.group
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
        self._worth = worth
        self._times = ReuseTimes()
        self._pasts: dict[int, _Past] = {}  # by node id
        self._ghosts = Ghosts(_GHOSTS_PER_BLOCK * num_blocks, _Past.is_like)
        self._leaves: dict[int, TwoEndedLeaves] = {}  # by class
        self._shadow = LruShadow()
        # The last victim; how much of it may go; whether LRU would take another.
        self._named: int | None = None
        self._most: int | None = None
        self._is_choice = False

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
        if past.group is not None:
            self._shadow.missed(past.group, start, num_blocks)
        self._use(past, hint, tick, now)

    def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
        """Learn from the idle time that ends, and classify anew."""
        past = self._pasts[node_id]
        group = past.group
        if group is None:
            self._shadow.shared(len(past.keys))
        else:
            self._shadow.hit(group, past.start, len(past.keys))
        self._use(past, hint, tick, now)

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        """Begin an idle time."""
        past = self._pasts[node_id]
        num_blocks = len(past.keys)
        past.was_released = True
        past.tick = tick
        past.last_used_s = now
        past.cohort = self._times.begin(past.kind, num_blocks, now)
        past.group = self._shadow.released(tick, past.start, num_blocks)

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
        past.place = leaves.add(node_id, past.tick)

    def became_pinned(self, node_id: int) -> None:
        """Drop the node as a candidate."""
        past = self._pasts[node_id]
        place = past.place
        if place is None:
            return
        past.place = None
        leaves = self._leaves[past.kind]
        leaves.discard(place)
        if not leaves.num_in:
            del self._leaves[past.kind]  # many classes, with hints; few have leaves

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        """Remember what left, if equal blocks can come back."""
        past = self._pasts[node_id]
        gone = past.keys[num_left:]
        start = past.start + num_left
        if past.group is not None:
            if node_id == self._named:
                self._shadow.evicted(
                    past.group, start, len(gone), is_choice=self._is_choice
                )
            else:
                self._shadow.withdrawn(past.group, start, len(gone))
        self._named = None
        if may_return:
            self._ghosts.remember(gone, past.part(start, array("Q")))
        if num_left:
            del past.keys[num_left:]
            return
        self.became_pinned(node_id)
        del self._pasts[node_id]

    def victim(self, now: float) -> int | None:
        """Return the leaf that pays least, if LRU can be left for it; O(classes)."""
        self._named = self._most = None
        eldest: Place | None = None
        oldest: _Candidate | None = None
        candidates: list[_Candidate] = []
        for leaves in self._leaves.values():
            first, last = leaves.first(), leaves.last()
            if first is None:
                continue
            candidate = self._candidate(first, now)
            candidates.append(candidate)
            # Of those released at once, the one that appeared last.
            if eldest is None or first < eldest:
                eldest, oldest = first, candidate
            if last is not None and last is not first:
                score, tick, node_id = self._candidate(last, now)
                candidates.append((score * _NEWEST_HANDICAP, tick, node_id))
        if oldest is None:
            return None
        choice = self._affordable(candidates, oldest) or oldest
        self._named = choice[2]
        self._is_choice = choice is not oldest
        return self._named

    def most_to_take(self) -> int | None:
        """What LRU no longer holds, or as much more as can be afforded."""
        return self._most

    # Private

    def _affordable(
        self, candidates: list[_Candidate], oldest: _Candidate
    ) -> _Candidate | None:
        """Return who scores least and may go before the oldest leaf does.

        LRU's own victim may always go. So may what LRU evicted long ago, and as many
        others as there is room for.
        """
        room = self._shadow.room
        candidates.sort()
        for candidate in candidates:
            if candidate[0] >= _MARGIN * oldest[0]:
                break
            past = self._pasts[candidate[2]]
            num_free, num_blocks = _num_free(past), len(past.keys)
            if num_free < num_blocks and past.group is not None:
                self._shadow.ranked(past.group, past.start)
            if num_free or room > 0:
                if num_free + room < num_blocks:
                    self._most = num_free + max(0, room)
                return candidate
        past = self._pasts[oldest[2]]
        if 0 < _num_free(past) < len(past.keys):
            self._most = _num_free(past)
        return None

    def _candidate(self, place: Place, now: float) -> _Candidate:
        tick, node_id = place[0], -place[1]
        past = self._pasts[node_id]
        score = self._times.rate(past.kind, now - past.last_used_s)
        if self._worth is not None:
            score *= self._worth(past.start + len(past.keys))
        return score, tick, node_id

    def _use(self, past: _Past, hint: int, tick: int, now: float) -> None:
        cohort = past.cohort
        if cohort is not None:
            self._times.end(cohort, past.kind, len(past.keys), now)
            past.cohort = past.group = None
        idle_s = now - past.last_used_s
        past.gap = gap = 1 if idle_s < _SHORT_S else 2 if idle_s < _LONG_S else 3
        num_uses = past.num_uses
        if num_uses < _MAX_USES:
            past.num_uses = num_uses = num_uses + 1
        past.hint = hint
        past.kind = hint * _NUM_PASTS + (num_uses - 1) * _NUM_GAPS + gap
        past.tick = tick
        past.last_used_s = now


def _num_free(past: _Past) -> int:
    """Return how many blocks of an idle run's tail LRU has no more."""
    group = past.group
    if group is None:
        return 0
    if group.end <= group.start:
        return len(past.keys)
    return min(len(past.keys), max(0, past.start + len(past.keys) - group.end))
