"""A configuration replayed without a clock: hits and evictions of one order.

Owns what of a configuration such a replay follows, and the reuses that replays of one
trace share. The walk is `sequence`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from stemkv.core.books.cost import CostModel
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.retention.policy.base import EvictionPolicy
from stemkv.errors import ConfigError
from stemkv.sim.clairvoyant import Clairvoyant
from stemkv.sim.config import CLAIRVOYANT, ReplayConfig
from stemkv.sim.curves import units_in
from stemkv.sim.hinting import HintRule
from stemkv.sim.reuse import Reuses, find_reuses
from stemkv.sim.sequence import SequenceResult, replay_sequence
from stemkv.sim.sharing import SharingRule
from stemkv.sim.stopwatch import Stopwatch
from stemkv.sim.trace import Trace

__all__ = ["Untimed", "UntimedRun"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UntimedRun:
    """What a replay found, and how long its eviction policy thought."""

    found: SequenceResult
    # Measured CPU seconds in the policy's hooks. `None`: not measured.
    policy_cpu_s: float | None = None


class Untimed:
    """Replays configurations of a trace; what they have in common is found once.

    With `measures` the policies are timed, which takes somewhat longer.
    """

    def __init__(self, *, measures: bool = False) -> None:
        self._measures = measures
        self._reuses: dict[SharingRule, Reuses] = {}

    def replay(
        self,
        trace: Trace,
        config: ReplayConfig,
        costs: CostModel,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> UntimedRun:
        """Replay one request after another.

        Only memory, sharing, eviction, hints and lookahead of the configuration mean
        something here. Raises `ConfigError` for quotas, which need the clock.
        """
        if config.quotas is not None:
            raise ConfigError("quotas need the clock; replay with one")
        if config.eviction == CLAIRVOYANT:
            # It knows better than any hint, and must not be told otherwise.
            config = replace(config, hints=HintRule(name="none"), untimed_lookahead=0)
        num_units = units_in(trace, config.num_blocks, config.block_size)
        reuses = self._found(trace, config.sharing)
        policy = _policy(config, costs, reuses, num_units)
        watch = (
            Stopwatch(policy, clock=time.process_time_ns) if self._measures else None
        )
        found = replay_sequence(
            trace,
            num_blocks=num_units,
            rule=config.sharing,
            policy=policy if watch is None else watch,
            cost=costs,
            reuses=reuses,
            lookahead=config.untimed_lookahead,
            hints=config.hints.of(trace, config.sharing, reuses=reuses),
            progress=progress,
        )
        # What the clairvoyant policy looks up, nobody could.
        is_online = config.eviction != CLAIRVOYANT
        return UntimedRun(
            found=found,
            policy_cpu_s=watch.seconds if watch is not None and is_online else None,
        )

    def _found(self, trace: Trace, rule: SharingRule) -> Reuses:
        known = self._reuses.get(rule)
        if known is None or known.trace is not trace:
            known = self._reuses[rule] = find_reuses(trace, rule)
        return known


def _policy(
    config: ReplayConfig, costs: CostModel, reuses: Reuses, num_units: int
) -> EvictionPolicy:
    if config.eviction == CLAIRVOYANT:
        return Clairvoyant(reuses)
    # To the policy a unit is a block, as deep in a prompt as it is long.
    cache = CacheConfig(num_blocks=num_units, block_size=reuses.trace.unit_size)
    return config.core.eviction.make(cache, costs)()
