"""What LRU would hold and hit in the same memory, and how far one may differ from it.

Owns a shadow of LRU: counts of blocks, no second cache. It is exact where one request
is served at a time; where several run at once it learns what a request lacks only when
that is published, and LRU may then have a few hits more than it says.

Blocks that one lease released at once are a group, a stretch of one path: LRU evicts the
oldest group from its tail, and a later use takes over a group's head. So a group is two
numbers for what LRU holds of it, and a third one for where the resident part ends.

What LRU holds and we do not (`num_missing`) is all that LRU can ever gain on us: whoever
from now on evicts nothing that LRU holds, while there is something else, loses at most
that. So the policy differs from LRU only as far as it could pay for all of it: by what
it is ahead, and a share of LRU's hits (`room`).
"""

from __future__ import annotations

from collections import deque

__all__ = ["Group", "LruShadow"]

# Of LRU's hits: what the policy may fall behind, and one block to begin with.
_SHARE = 0.0099
_LEAST = 1.0
# A smaller share counts several times over where it was seen that LRU hardly ever uses
# what the ranking would have evicted before its time.
_TRUSTED_SHARE = 0.0055
_MAX_TRUST = 16.0
_PROBATION = 300  # runs that LRU must have evicted unused before anything is trusted
_RUNS_FOR_USED = 20  # and for each one that it used, so many more
_RUNS_PER_TRUST = 50.0  # beyond that, for each time more


class Group:
    """A stretch of one path that was released at once and not used since."""

    __slots__ = ("end", "ranked_from", "resident_end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start  # depth of the first block that LRU holds
        self.end = end  # depth behind the last one
        self.resident_end = end  # depth behind the last block that the policy holds
        # From this depth on the ranking would have evicted it although LRU holds it.
        self.ranked_from: int | None = None

    @property
    def num_missing(self) -> int:
        """Blocks that LRU holds and the policy does not."""
        begin = self.start if self.start > self.resident_end else self.resident_end
        return self.end - begin if self.end > begin else 0


class LruShadow:
    """Follows what a policy does and what LRU would have done. O(1) each, amortised."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()  # the oldest first
        self._last: Group | None = None
        self._most_groups = 128  # more are looked through for empty ones
        self._tick = -1  # of the last release
        self.num_lru_hits = 0  # blocks, as all numbers here
        self.balance = 0  # hits of the policy less LRU's
        self.num_held = 0  # by LRU, of blocks that no lease holds
        self.num_idle = 0  # resident and held by no lease
        self.num_missing = 0  # held by LRU and not resident
        # Of these, evicted as LRU would have, and evicted by LRU when the lease ends.
        self._num_followed = 0
        # Runs that the ranking would have evicted although LRU held them, and which
        # LRU then used, or evicted itself.
        self._num_used = 0
        self._num_unused = 0

    # What happens

    def shared(self, num_blocks: int) -> None:
        """Count a use of blocks that another lease holds, so LRU has them too."""
        self.num_lru_hits += num_blocks

    def hit(self, group: Group, start: int, num_blocks: int) -> None:
        """Count a use of resident idle blocks, from depth `start` of a group on."""
        self.num_idle -= num_blocks
        stop = start + num_blocks
        if start == group.start and stop <= group.end and group.ranked_from is None:
            # The usual case: both have all of it. (`resident_end` is not before `stop`.)
            group.start = stop
            self.num_held -= num_blocks
            self.num_lru_hits += num_blocks
            return
        held = self._take(group, start, stop)
        self.num_lru_hits += held
        self.balance += num_blocks - held

    def missed(self, group: Group, start: int, num_blocks: int) -> None:
        """Count that evicted blocks of a group come back."""
        held = self._take(group, start, start + num_blocks)
        self.num_lru_hits += held
        self.balance -= held

    def released(self, tick: int, start: int, num_blocks: int) -> Group:
        """Put blocks into the group of this moment, and return it."""
        self.num_held += num_blocks
        self.num_idle += num_blocks
        group = self._last
        if tick == self._tick and group is not None and group.end == start:
            group.end = group.resident_end = start + num_blocks
            return group
        if tick != self._tick:
            self._tick = tick
            # LRU made room when the lease began. These blocks are in both sums.
            self._num_followed = 0
            if self.num_held > self.num_idle:
                self._trim()
        if len(self._groups) >= self._most_groups:
            # Paid for by what was used since the last time, and left its group empty.
            self._groups = deque(each for each in self._groups if each.end > each.start)
            self._most_groups = 2 * len(self._groups) + 64
        group = self._last = Group(start, start + num_blocks)
        self._groups.append(group)
        return group

    def evicted(
        self, group: Group, start: int, num_blocks: int, *, is_choice: bool
    ) -> None:
        """Count blocks that the policy evicted, from depth `start` of a group on.

        `is_choice`: the policy's own, and not LRU's.
        """
        more = self._drop(group, start, num_blocks)
        if not is_choice:
            self._num_followed += more

    def withdrawn(self, group: Group, start: int, num_blocks: int) -> None:
        """Count blocks that nobody chose to evict: under LRU they would go as well."""
        self._drop(group, start, num_blocks)
        gone = min(num_blocks, group.end - group.start)
        if gone > 0:
            missing = group.num_missing
            group.end -= gone
            self.num_held -= gone
            self.num_missing += group.num_missing - missing

    def ranked(self, group: Group, start: int) -> None:
        """The ranking would evict a run that LRU holds: see what becomes of it."""
        if group.ranked_from is None or group.ranked_from > start:
            group.ranked_from = start

    # Questions

    @property
    def room(self) -> int:
        """How many more blocks that LRU holds may be evicted; negative: too many were.

        All that LRU holds and we do not must be covered by what the policy is ahead and
        a share of LRU's hits. With evidence, by a multiple of that with a smaller share.
        """
        strict = self.balance + max(_LEAST, _SHARE * self.num_lru_hits)
        trusted = self.balance + _TRUSTED_SHARE * self.num_lru_hits
        return int(max(strict, self.trust * trusted)) - (
            self.num_missing - self._num_followed
        )

    @property
    def trust(self) -> float:
        """How many times a smaller share counts; 1: as long as too little is known."""
        beyond = self._num_unused - _RUNS_FOR_USED * self._num_used - _PROBATION
        return max(1.0, min(_MAX_TRUST, 1.0 + beyond / _RUNS_PER_TRUST))

    # Private

    def _take(self, group: Group, start: int, stop: int) -> int:
        """Take blocks out of their group; return how many of them LRU holds."""
        first = group.start
        if stop > group.end:
            stop = group.end
        if stop <= first:
            return 0
        if group.ranked_from is not None and stop > group.ranked_from:
            self._num_used += 1
            group.ranked_from = None
        self.num_held -= stop - first
        if stop <= group.resident_end:
            group.start = stop  # of what is missing nothing was taken
        else:
            missing = group.num_missing
            group.start = stop
            self.num_missing += group.num_missing - missing
        if start > first:
            first = start
        return stop - first if stop > first else 0

    def _drop(self, group: Group, start: int, num_blocks: int) -> int:
        """Let the resident part end; return how many blocks more are missing."""
        self.num_idle -= num_blocks
        missing = group.num_missing
        group.resident_end = min(group.resident_end, start)
        more = group.num_missing - missing
        self.num_missing += more
        return more

    def _trim(self) -> None:
        """Let LRU evict until it holds no more than there is."""
        excess = self.num_held - self.num_idle
        while excess > 0:
            group = self._groups[0]
            gone = min(group.end - group.start, excess)
            if gone <= 0:
                self._groups.popleft()
                continue
            missing = group.num_missing
            group.end -= gone
            self.num_missing += group.num_missing - missing
            self.num_held -= gone
            excess -= gone
            ranked_from = group.ranked_from
            if ranked_from is not None and group.end <= max(ranked_from, group.start):
                self._num_unused += 1
                group.ranked_from = None
