"""How long a policy thinks: a policy that times another one's hooks.

Owns the reading of clocks and the correction for it. What the policy decides is
unchanged. The numbers are measured, so they differ from run to run: they belong beside
a replay's result, never in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter_ns

from stemkv.core.retention.policy.base import EvictionPolicy

__all__ = ["Stopwatch"]

_NUM_READINGS = 1_001


class Stopwatch:
    """Times every hook of `policy`, questions included.

    `clock` gives nanoseconds and never goes back. `perf_counter_ns` runs on while the
    process waits for a core; `time.process_time_ns` does not, but takes longer to read.

    A reading takes time itself. What passes between two readings with nothing between
    them is measured on construction (`overhead_s`, median of 1,001) and left out of
    `seconds`. The run gets longer by more than that: by both readings and one more call
    for each hook. So the duration of a run is to be taken without a stopwatch.

    Not in `seconds`: what the cache does for a policy outside of hooks, which is the
    keys of blocks where `needs_keys`.
    """

    def __init__(
        self, policy: EvictionPolicy, *, clock: Callable[[], int] = perf_counter_ns
    ) -> None:
        self.policy = policy
        self.num_calls = 0
        self._clock = clock
        self._total_ns = 0
        self._overhead_ns = self._calibrate()

    # The reading

    @property
    def seconds(self) -> float:
        """Seconds in hooks so far, without those that the clock took; at least 0."""
        return max(0, self._total_ns - self.num_calls * self._overhead_ns) / 1e9

    @property
    def overhead_s(self) -> float:
        """What one call would have been charged for the clock's own time."""
        return self._overhead_ns / 1e9

    # The hooks

    @property
    def needs_keys(self) -> bool:
        """As the policy says."""
        return self.policy.needs_keys

    def num_alike(self, keys: Sequence[int]) -> int:
        """As the policy says."""
        start = self._clock()
        answer = self.policy.num_alike(keys)
        self._stop(start)
        return answer

    def can_extend(self, node_id: int, keys: Sequence[int]) -> bool:
        """As the policy says."""
        start = self._clock()
        answer = self.policy.can_extend(node_id, keys)
        self._stop(start)
        return answer

    def can_merge(self, upper_id: int, lower_id: int) -> bool:
        """As the policy says."""
        start = self._clock()
        answer = self.policy.can_merge(upper_id, lower_id)
        self._stop(start)
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
        """Pass it on."""
        began = self._clock()
        self.policy.published(
            node_id,
            start=start,
            num_blocks=num_blocks,
            keys=keys,
            hint=hint,
            tick=tick,
            now=now,
        )
        self._stop(began)

    def used(self, node_id: int, *, hint: int, tick: int, now: float) -> None:
        """Pass it on."""
        start = self._clock()
        self.policy.used(node_id, hint=hint, tick=tick, now=now)
        self._stop(start)

    def released(self, node_id: int, *, tick: int, now: float) -> None:
        """Pass it on."""
        start = self._clock()
        self.policy.released(node_id, tick=tick, now=now)
        self._stop(start)

    def split(self, upper_id: int, lower_id: int, *, num_blocks: int) -> None:
        """Pass it on."""
        start = self._clock()
        self.policy.split(upper_id, lower_id, num_blocks=num_blocks)
        self._stop(start)

    def merged(self, upper_id: int, lower_id: int) -> None:
        """Pass it on."""
        start = self._clock()
        self.policy.merged(upper_id, lower_id)
        self._stop(start)

    def became_evictable(self, node_id: int, *, now: float) -> None:
        """Pass it on."""
        start = self._clock()
        self.policy.became_evictable(node_id, now=now)
        self._stop(start)

    def became_pinned(self, node_id: int) -> None:
        """Pass it on."""
        start = self._clock()
        self.policy.became_pinned(node_id)
        self._stop(start)

    def dropped(self, node_id: int, num_left: int, *, may_return: bool) -> None:
        """Pass it on."""
        start = self._clock()
        self.policy.dropped(node_id, num_left, may_return=may_return)
        self._stop(start)

    def victim(self, now: float) -> int | None:
        """As the policy says."""
        start = self._clock()
        answer = self.policy.victim(now)
        self._stop(start)
        return answer

    def most_to_take(self) -> int | None:
        """As the policy says."""
        return self.policy.most_to_take()

    # Private

    def _stop(self, start: int) -> None:
        self._total_ns += self._clock() - start
        self.num_calls += 1

    def _calibrate(self) -> int:
        """Return what passes between two readings with nothing between them."""
        readings = []
        for _ in range(_NUM_READINGS):
            self._stop(self._clock())
            readings.append(self._total_ns)
            self._total_ns = 0
        self.num_calls = 0
        return int(median(readings))
