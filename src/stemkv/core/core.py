"""One core: a cache, a scheduler and books that go together, made from one value.

Owns what there is to set, how the parts are made of it, and the door through which a
driver asks them to do something, so that whoever records a run hears of each verb.
Questions go to `cache`, `scheduler` and `ledger` themselves. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from stemkv.core.books.cost import CostModel
from stemkv.core.books.ledger import Ledger
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.config import CacheConfig, at_least
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.retention.policy import EvictionPolicy
from stemkv.core.retention.quota import QuotaConfig
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.events import Event
from stemkv.core.schedule.order import Order
from stemkv.core.schedule.orders import OrderConfig
from stemkv.core.schedule.plan import StepPlan, StepResult
from stemkv.core.schedule.request import FinishReason, Request, RequestId, RequestSpec
from stemkv.core.schedule.scheduler import Scheduler
from stemkv.core.schedule.sessions import SessionConfig
from stemkv.errors import ConfigError

__all__ = ["BooksConfig", "Core", "CoreConfig", "Recorder", "make_cache"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BooksConfig:
    """What the books remember of what is gone. `None`: all there ever was."""

    history: int | None = 8  # blocks for each block there is, to explain misses
    # Tenants that hold nothing; what others held is one sum.
    idle_accounts: int | None = 1024

    def __post_init__(self) -> None:
        for name in ("history", "idle_accounts"):
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """All there is to set of a core. Drivers contain one and add what is theirs."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    eviction: EvictionConfig = field(default_factory=EvictionConfig)
    order: OrderConfig = field(default_factory=OrderConfig)
    quotas: QuotaConfig | None = None  # None: nobody has a floor or a cap
    sessions: SessionConfig | None = None  # None: as many at once as come
    # Kept in the prices of the costs that the core is made with; None: no books.
    books: BooksConfig | None = field(default_factory=BooksConfig)

    def __post_init__(self) -> None:
        for name, kind, may_be_none in _PARTS:
            value = getattr(self, name)
            if not (isinstance(value, kind) or (may_be_none and value is None)):
                article = "an" if kind.__name__[0] in "AEIOU" else "a"
                raise ConfigError(
                    f"{name} must be {article} {kind.__name__}, "
                    f"got {type(value).__name__}"
                )

    def sized(self, num_blocks: int, *, block_size: int | None = None) -> CoreConfig:
        """Return these settings for a cache of so many blocks."""
        size = self.cache.block_size if block_size is None else block_size
        cache = replace(self.cache, num_blocks=num_blocks, block_size=size)
        return replace(self, cache=cache)

    def check(self, costs: CostModel | None) -> None:
        """Raise `ConfigError` where seconds are wanted and there are no costs."""
        if self.eviction.objective == "seconds" and costs is None:
            raise ConfigError(
                "eviction.objective seconds needs costs, to know what a token deep in "
                "a prompt costs more; give `costs` (`stemkv calibrate` measures them), "
                "or choose objective tokens"
            )
        if self.scheduler.step_time_s is not None and costs is None:
            raise ConfigError(
                "step_time_s needs costs, to predict how long a step takes; give "
                "`costs` (`stemkv calibrate` measures them), or leave it out"
            )
        self.order.make(costs)


_PARTS: tuple[tuple[str, type, bool], ...] = (
    ("cache", CacheConfig, False),
    ("scheduler", SchedulerConfig, False),
    ("eviction", EvictionConfig, False),
    ("order", OrderConfig, False),
    ("quotas", QuotaConfig, True),
    ("sessions", SessionConfig, True),
    ("books", BooksConfig, True),
)


class Recorder(Protocol):
    """Who hears what a core was asked, in order, once it has been done."""

    def begin(self, core: Core) -> None:
        """Hear that a core was made, before it is asked anything."""

    def hear(self, core: Core, verb: str, answer: object, /, **asked: Any) -> None:
        """Hear of one verb of a `Core`: its name, its answer, and its arguments."""


class Core:
    """A cache, its scheduler and its books. Verbs go through here, questions past it.

    `costs` are what an objective of seconds weighs blocks with, what orders predict
    prefill seconds with and steps their time, and the prices of the books; without
    them there are none. `order` is one that has no name. Raises `ConfigError` where
    the settings need costs.
    """

    def __init__(
        self,
        config: CoreConfig,
        costs: CostModel | None = None,
        *,
        recorder: Recorder | None = None,
        order: Order | None = None,
    ) -> None:
        config.check(costs)
        self.config = config
        self.costs = costs
        self.ledger = _ledger(config, costs)
        self.cache = make_cache(config, costs, ledger=self.ledger)
        self.scheduler = Scheduler(
            config.scheduler,
            self.cache,
            config.order.make(costs) if order is None else order,
            costs=costs,
            sessions=config.sessions,
            ledger=self.ledger,
        )
        self._recorder = recorder
        if recorder is not None:
            recorder.begin(self)

    # Of the operator

    def declare(self, namespace: bytes, prefix: TokenIds) -> int:
        """See `PrefixCache.declare_public`."""
        num_blocks = self.cache.declare_public(namespace, prefix)
        self._tell("declare", num_blocks, namespace=namespace, prefix=prefix)
        return num_blocks

    def keep(
        self,
        namespace: bytes,
        domain: Domain,
        prefix: TokenIds,
        *,
        until: float,
        now: float,
    ) -> int:
        """See `PrefixCache.keep`."""
        asked = {"namespace": namespace, "domain": domain, "prefix": prefix}
        num_blocks = self.cache.keep(**asked, until=until, now=now)  # type: ignore[arg-type]
        self._tell("keep", num_blocks, **asked, until=until, now=now)
        return num_blocks

    def end_session(self, domain: Domain, session: str, now: float) -> None:
        """See `PrefixCache.end_session`."""
        self.cache.end_session(domain, session, now)
        self._tell("end_session", None, domain=domain, session=session, now=now)

    def reset(self, namespace: bytes, now: float) -> int:
        """Give up what a namespace has cached; see `PrefixCache.retire`."""
        num_remaining = self.cache.retire(namespace, now)
        self._tell("reset", num_remaining, namespace=namespace, now=now)
        return num_remaining

    # Of requests

    def add(self, spec: RequestSpec) -> Request:
        """See `Scheduler.add`."""
        request = self.scheduler.add(spec)
        self._tell("add", request, spec=spec)
        return request

    def cancel(
        self,
        request_id: RequestId,
        now: float,
        *,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> bool:
        """See `Scheduler.cancel`."""
        is_ended = self.scheduler.cancel(request_id, now, reason=reason)
        self._tell("cancel", is_ended, request_id=request_id, now=now, reason=reason)
        return is_ended

    def restart(
        self,
        request_id: RequestId,
        namespace: bytes | None,
        adapter: str | None,
        now: float,
        *,
        domain: Domain | None = None,
    ) -> None:
        """See `Scheduler.restart`."""
        self.scheduler.restart(request_id, namespace, adapter, now, domain=domain)
        self._tell(
            "restart",
            None,
            request_id=request_id,
            namespace=namespace,
            adapter=adapter,
            now=now,
            domain=domain,
        )

    def cut_off(self, request_id: RequestId) -> None:
        """See `Scheduler.cut_off`."""
        self.scheduler.cut_off(request_id)
        self._tell("cut_off", None, request_id=request_id)

    # Of rollouts

    def fence(self) -> int:
        """See `Scheduler.fence`."""
        epoch = self.scheduler.fence()
        self._tell("fence", epoch)
        return epoch

    def lift_fence(self, epoch: int) -> None:
        """See `Scheduler.lift_fence`."""
        self.scheduler.lift_fence(epoch)
        self._tell("lift_fence", None, epoch=epoch)

    def retire(self, namespace: bytes, now: float) -> int:
        """See `Scheduler.retire`."""
        num_remaining = self.scheduler.retire(namespace, now)
        self._tell("retire", num_remaining, namespace=namespace, now=now)
        return num_remaining

    # Of steps

    def schedule(self, now: float) -> StepPlan:
        """See `Scheduler.schedule`."""
        plan = self.scheduler.schedule(now)
        self._tell("schedule", plan, now=now)
        return plan

    def commit(
        self, plan: StepPlan, result: StepResult, now: float
    ) -> tuple[Event, ...]:
        """See `Scheduler.commit`."""
        events = self.scheduler.commit(plan, result, now)
        self._tell("commit", events, result=result, now=now)
        return events

    def abandon(self, plan: StepPlan, now: float) -> tuple[Event, ...]:
        """See `Scheduler.abandon`."""
        events = self.scheduler.abandon(plan, now)
        self._tell("abandon", events, now=now)
        return events

    def _tell(self, verb: str, answer: object, **asked: Any) -> None:
        if self._recorder is not None:
            self._recorder.hear(self, verb, answer, **asked)


def make_cache(
    config: CoreConfig,
    costs: CostModel | None = None,
    *,
    make_policy: Callable[[], EvictionPolicy] | None = None,
    ledger: Ledger | None = None,
) -> PrefixCache:
    """Return the cache of a core alone. `make_policy` makes one that has no name."""
    make_policy = make_policy or config.eviction.make(config.cache, costs)
    return PrefixCache(
        config.cache,
        Retention.of(make_policy, config.cache, config.quotas),
        watchers=() if ledger is None else (ledger,),
    )


def _ledger(config: CoreConfig, costs: CostModel | None) -> Ledger | None:
    if config.books is None or costs is None:
        return None
    history, num_blocks = config.books.history, config.cache.num_blocks
    return Ledger(
        config.cache.block_size,
        costs,
        max_history_blocks=None if history is None else history * num_blocks,
        max_idle_accounts=config.books.idle_accounts,
    )
