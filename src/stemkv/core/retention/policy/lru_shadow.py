"""What LRU would hold in the same memory, and what it costs to differ from it.

Owns a shadow of LRU: block counts only, no second cache. A policy that must not fall
behind LRU asks it how many blocks that LRU still holds may be evicted.

Blocks that one lease released at once are a group, a path from its head on: LRU evicts
the oldest group from its tail, and a later use takes over a group's head. So two numbers
for each group say which of its blocks LRU holds, and a third one which are resident.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["LruShadow"]

_PRIOR_SHARE = 0.1  # of the cache: blocks that the prior of the loss is worth
_LEAST_LOSS = 1e-3
_HOPELESS_RATE = 0.0005  # of hits: LRU that has no more has nothing to lose
_MEMORY = 4  # times the cache: blocks asked for until losses count half
_LEAST_HIT_RATE = 0.01  # below that, LRU is not worth keeping up with


class _Group:
    """Blocks of one path that were released at once and not used since."""

    __slots__ = ("end", "num_held", "num_resident")

    def __init__(self) -> None:
        self.end = 0  # depth of the last block that LRU holds, plus 1
        self.num_held = 0  # by LRU
        self.num_resident = 0

    @property
    def num_both(self) -> int:
        """Both are parts of the path that begin at the same depth."""
        return min(self.num_held, self.num_resident)


class LruShadow:
    """Follows what a policy does and what LRU would have done. O(1) each, amortised.

    `num_blocks` is the size of the cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._groups: OrderedDict[int, _Group] = OrderedDict()  # by tick
        self._num_held = 0  # by LRU, of blocks that no lease holds
        self._num_both = 0  # of those, resident
        self._num_idle = 0  # resident and held by no lease
        self._num_asked = 0  # blocks used or published
        self._num_lru_hits = 0
        self._balance = 0  # hits of the policy less LRU's
        self._num_recent = 0  # of those asked for, since the next two were halved
        self._num_lost = 0.0  # hits of LRU that the policy missed
        # Blocks evicted before LRU would have, and not asked for till then.
        self._num_spared = 0.0
        self._num_trimmed = 0  # blocks that LRU evicted
        self._num_followed = 0  # blocks evicted as LRU would, which it will evict next

    def asked(self, num_blocks: int) -> None:
        """Count blocks that a lease uses or publishes, wherever they come from."""
        self._num_asked += num_blocks
        self._num_recent += num_blocks
        if self._num_recent > _MEMORY * self._num_blocks:
            # What was lost long ago says less of what will be.
            self._num_recent = 0
            self._num_lost /= 2
            self._num_spared /= 2

    def hit(self, tick: int, start: int, num_blocks: int) -> None:
        """Count a use of resident idle blocks, at depth `start` of the group `tick`."""
        held = self._take(tick, start, num_blocks, is_resident=True)
        self._num_idle -= num_blocks
        self._num_lru_hits += held
        self._balance += num_blocks - held

    def missed(self, tick: int, start: int, num_blocks: int) -> None:
        """Count that evicted blocks of a group come back."""
        held = self._take(tick, start, num_blocks, is_resident=False)
        self._num_lru_hits += held
        self._balance -= held
        self._num_lost += held

    def released(self, tick: int, start: int, num_blocks: int) -> None:
        """Put blocks into the group of this moment."""
        group = self._groups.get(tick)
        if group is None:
            group = self._groups[tick] = _Group()
        group.end = max(group.end, start + num_blocks)
        self._num_both -= group.num_both
        group.num_held += num_blocks
        group.num_resident += num_blocks
        self._num_both += group.num_both
        self._num_held += num_blocks
        self._num_idle += num_blocks

    def dropped(self, tick: int, num_blocks: int, *, is_choice: bool) -> None:
        """Count evicted idle blocks; LRU has to evict as many.

        `is_choice`: the policy's own, and not LRU's.
        """
        self._num_idle -= num_blocks
        group = self._groups.get(tick)
        if group is not None:
            both = group.num_both
            group.num_resident = max(0, group.num_resident - num_blocks)
            self._num_both += group.num_both - both
            if not is_choice:
                self._num_followed += both - group.num_both
        self._trim()

    def can_lose(self, num_blocks: float, *, share: float, seed: float = 0.0) -> bool:
        """Whether a run of blocks that LRU holds may be evicted.

        What can be afforded is what the policy is ahead of LRU, and beyond that `share`
        of LRU's hits (or of 1 % of what was asked for), but `seed` blocks at least. All
        that LRU holds and we do not must not be expected to cost more, by the share of
        such blocks that were asked for while LRU would have held them; and the run alone
        must not cost more at worst, as its blocks are asked for together. Where LRU has
        next to no hits, as in loops that are larger than the cache, anything can be.
        """
        if (
            self._num_asked > _MEMORY * self._num_blocks
            and self._num_lru_hits < _HOPELESS_RATE * self._num_asked
        ):
            return True
        prior = _PRIOR_SHARE * self._num_blocks
        usual = self._num_lru_hits / (self._num_lru_hits + self._num_trimmed + 1)
        loss = (self._num_lost + prior * max(_LEAST_LOSS, usual)) / (
            self._num_lost + self._num_spared + prior
        )
        wealth = min(self._balance, self._num_blocks) + max(
            share * max(self._num_lru_hits, _LEAST_HIT_RATE * self._num_asked), seed
        )
        num_missing = self._num_held - self._num_both
        return num_blocks <= wealth and loss * num_missing < wealth

    def holds(self, tick: int, start: int) -> bool:
        """Whether LRU holds the block at depth `start` of a group."""
        group = self._groups.get(tick)
        return group is not None and group.num_held > 0 and start < group.end

    def _take(
        self, tick: int, start: int, num_blocks: int, *, is_resident: bool
    ) -> int:
        """Take blocks out of their group; return how many of them LRU holds."""
        group = self._groups.get(tick)
        if group is None:
            return 0
        held = min(max(0, group.end - start), num_blocks, group.num_held)
        self._num_both -= group.num_both
        group.num_held -= held
        if is_resident:
            group.num_resident = max(0, group.num_resident - num_blocks)
        self._num_both += group.num_both
        self._num_held -= held
        if not group.num_held and not group.num_resident:
            del self._groups[tick]
        return held

    def _trim(self) -> None:
        """Let LRU evict until it holds no more than there is."""
        excess = self._num_held - self._num_idle
        if excess <= 0:
            return
        num_gone = 0
        while excess > 0:
            tick = next(iter(self._groups))
            group = self._groups[tick]
            num_blocks = min(group.num_held, excess)
            both = group.num_both
            group.num_held -= num_blocks
            group.end -= num_blocks
            gained = both - group.num_both
            self._num_both -= gained
            num_gone += num_blocks - gained
            self._num_held -= num_blocks
            self._num_trimmed += num_blocks
            excess -= num_blocks
            if not group.num_held:
                # What is still resident of it is nothing to LRU any more.
                del self._groups[tick]
        num_followed = min(num_gone, self._num_followed)
        self._num_followed -= num_followed
        self._num_spared += num_gone - num_followed
