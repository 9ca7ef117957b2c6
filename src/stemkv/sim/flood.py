"""The worked example with one tenant more, who sends one-off prompts and nothing else.

Owns which replays are run: each tenant alone, all with the flood, and the same with
floors as large as what each of the others needs. Shares are defined in `measure.flood`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from stemkv.core.books.cost import CostModel
from stemkv.core.retention.memory import MemoryQuota
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.schedule.orders import OrderConfig
from stemkv.errors import ConfigError
from stemkv.measure.flood import FloodedTenant, FloodResult
from stemkv.measure.results import GIB
from stemkv.sim.config import LARGE, ReplayConfig
from stemkv.sim.distance import lru_curve
from stemkv.sim.pricing import num_blocks
from stemkv.sim.quotas import TenantQuotas
from stemkv.sim.replay import check_quotas, replay
from stemkv.sim.reuse import find_reuses
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace
from stemkv.sim.workloads.prompts import UNIT_SIZE
from stemkv.sim.workloads.worked_example import worked_example

__all__ = ["FloodConfig", "study_flood"]

_FLOOD = "flood"
_ISOLATED = SharingRule(name="isolated")


@dataclass(frozen=True, slots=True, kw_only=True)
class FloodConfig:
    """The others' mix, the flood and the memory."""

    rate: float  # requests a second, of all others together
    prefix_tokens: int = 12_000
    share: float = 0.4  # of the others' requests that begin with it
    memory_bytes: int = 24 * GIB
    num_tenants: int = 4  # the others
    num_requests: int = 150  # of all others together
    flood: int = 4  # one-off requests for each of theirs
    seed: int = 0
    eviction: str = "reuse_index"
    order: OrderConfig = field(default_factory=OrderConfig)

    def __post_init__(self) -> None:
        for name in ("num_tenants", "num_requests", "flood"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )


def study_flood(
    config: FloodConfig,
    costs: CostModel,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> FloodResult:
    """Run all replays and return what is left to whom; `progress` counts replays."""
    return _Study(config, costs, progress).result()


class _Study:
    """The replays of one study."""

    def __init__(
        self,
        config: FloodConfig,
        costs: CostModel,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._config = config
        self._costs = costs
        self._progress = progress
        self._others = worked_example(
            num_requests=config.num_requests,
            rate=config.rate,
            seed=config.seed,
            num_tenants=config.num_tenants,
            share=config.share,
            prefix_length=config.prefix_tokens,
        )
        self._names = self._others.tenants()
        self._num_done = 0
        self._num_replays = len(self._names) + 2
        self._replay = ReplayConfig(
            core=replace(
                LARGE.sized(
                    num_blocks(
                        config.memory_bytes,
                        bytes_per_token=costs.bytes_per_token,
                        block_size=UNIT_SIZE,
                    ),
                    block_size=UNIT_SIZE,
                ),
                eviction=EvictionConfig(name=config.eviction),
                order=config.order,
            ),
            sharing=_ISOLATED,
        )

    def result(self) -> FloodResult:
        config = self._config
        block_bytes = UNIT_SIZE * self._costs.bytes_per_token
        alone = {name: _only(self._others, name) for name in self._names}
        needs = {name: _working_set(trace) for name, trace in alone.items()}
        own = {name: self._hits(trace)[name] for name, trace in alone.items()}
        everybody = self._with_flood()
        flooded = self._hits(everybody)
        kept = self._kept(everybody, {n: needs[n] * block_bytes for n in self._names})
        return FloodResult(
            eviction=config.eviction,
            gib=self._replay.num_blocks * block_bytes / GIB,
            rate=config.rate,
            flood_rate=config.rate * config.flood,
            tenants=tuple(
                FloodedTenant(
                    tenant=name,
                    working_set_gib=needs[name] * block_bytes / GIB,
                    alone_tokens=own[name],
                    flooded_tokens=flooded[name],
                    kept_tokens=None if kept is None else kept[name],
                )
                for name in self._names
            ),
        )

    def _with_flood(self) -> Trace:
        config = self._config
        flood = worked_example(
            num_requests=config.num_requests * config.flood,
            rate=config.rate * config.flood,
            seed=config.seed + 1,
            num_tenants=1,
            share=0.0,
        )
        first = 1 + max(max(each.units) for each in self._others.requests)
        added = [
            replace(
                request,
                request_id=f"{_FLOOD}-{request.request_id}",
                tenant=_FLOOD,
                units=array("i", [unit + first for unit in request.units]),
            )
            for request in flood.requests
        ]
        requests = sorted(
            [*self._others.requests, *added], key=lambda request: request.arrival_s
        )
        return replace(self._others, requests=requests)

    def _kept(self, trace: Trace, floors: dict[str, int]) -> dict[str, int] | None:
        """Return the hits with floors; `None` where the memory cannot promise them."""
        quotas = TenantQuotas(
            tenants={
                name: MemoryQuota(floor_bytes=size) for name, size in floors.items()
            }
        )
        config = replace(self._replay, quotas=quotas)
        try:
            check_quotas(trace, config, self._costs)
        except ConfigError:
            self._count()
            return None
        return self._hits(trace, config)

    def _hits(self, trace: Trace, config: ReplayConfig | None = None) -> dict[str, int]:
        result = replay(trace, config or self._replay, self._costs)
        self._count()
        return {each.tenant: each.tokens.reused for each in result.tenants}

    def _count(self) -> None:
        self._num_done += 1
        if self._progress is not None:
            self._progress(self._num_done, self._num_replays)


def _only(trace: Trace, tenant: str) -> Trace:
    return replace(
        trace, requests=[each for each in trace.requests if each.tenant == tenant]
    )


def _working_set(trace: Trace) -> int:
    """Return blocks; a unit of the example is one."""
    return lru_curve(find_reuses(trace, _ISOLATED)).num_blocks_for_all
