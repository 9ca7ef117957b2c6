"""Small engines in which a victim and an attacker meet, and what the attacker sees.

Owns the line between what a tenant may see and what only the operator may. Knows
nothing of any particular attack.

Two worlds are *twins* if they differ in nothing but what the victim's prompts say.
Clocks are counters of steps, so that twins can be compared byte by byte.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from stemkv.core.core import CoreConfig
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.sharing import Sharing, SharingPolicy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.events import Event
from stemkv.core.schedule.request import RequestId
from stemkv.engine import (
    Completion,
    Engine,
    EngineConfig,
    LoadedModel,
    MemoryQuota,
    MemoryQuotas,
    SamplingParams,
)

__all__ = [
    "ATTACKER",
    "BLOCK_SIZE",
    "SETTINGS",
    "SHARED",
    "VICTIM",
    "PRIVATE",
    "PUBLIC_HEAD",
    "Setting",
    "World",
    "random_ids",
    "visible_to",
]

BLOCK_SIZE = 16  # tokens; the engine's default
VICTIM = "victim"
ATTACKER = "attacker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Who shares with whom in a world."""

    name: str
    sharing: SharingPolicy
    is_control: bool = False  # the attacker may see what the victim does
    has_public_head: bool = False  # prompts begin with a block declared public


# The default of the engine, and not a policy that spells it out: that is the claim.
PRIVATE = Setting(name="private (default)", sharing=EngineConfig().sharing)
SHARED = Setting(
    name="one group",
    sharing=SharingPolicy(groups={"everybody": {VICTIM, ATTACKER}}),
    is_control=True,
)
PUBLIC_HEAD = Setting(
    name="public head", sharing=EngineConfig().sharing, has_public_head=True
)
SETTINGS = (
    SHARED,
    Setting(
        name="outside the group",
        sharing=SharingPolicy(groups={"crew": {VICTIM, "friend"}}),
    ),
    PRIVATE,
    PUBLIC_HEAD,
    Setting(name="none", sharing=SharingPolicy(default=Sharing.NONE)),
)


class World:
    """An engine whose every event is kept.

    `clock` is in seconds; without one, time is counted in steps. `floors` are blocks
    by tenant; without them there are no quotas, as by default.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        setting: Setting,
        *,
        num_blocks: int,
        token_budget: int = 512,
        floors: Mapping[str, int] | None = None,
        numerics: str = "exact",
        num_threads: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.setting = setting
        self._now = 0.0
        self._events: list[Event] = []
        self._own: dict[str, set[RequestId]] = {}
        bytes_per_block = BLOCK_SIZE * loaded.kv_bytes_per_token
        quotas = None
        if floors is not None:
            quotas = MemoryQuotas(
                tenants={
                    tenant: MemoryQuota(floor_bytes=floor * bytes_per_block)
                    for tenant, floor in floors.items()
                }
            )
        self.engine = Engine(
            loaded,
            EngineConfig(
                numerics=numerics,
                kv_memory_bytes=num_blocks * bytes_per_block,
                core=CoreConfig(
                    cache=CacheConfig(block_size=BLOCK_SIZE),
                    scheduler=SchedulerConfig(
                        token_budget=token_budget,
                        max_num_running=min(64, token_budget),
                    ),
                ),
                sharing=setting.sharing,
                quotas=quotas,
                num_threads=num_threads,
                # What is audited here is who sees what, not the build's arithmetic.
                runs_self_test=False,
            ),
            clock=(lambda: self._now) if clock is None else clock,
            on_event=self._events.append,
        )

    # Verbs

    def add(
        self,
        tenant: str,
        prompt: TokenIds,
        *,
        max_new_tokens: int = 1,
        request_class: str | None = None,
    ) -> RequestId:
        """Queue a request; return its id."""
        request_id = self.engine.add(
            prompt,
            SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
            tenant=tenant,
            request_class=request_class,
        )
        self._own.setdefault(tenant, set()).add(request_id)
        return request_id

    def step(self) -> tuple[Completion, ...]:
        """Run one step."""
        self._now += 1
        return self.engine.step()

    def drain(self) -> dict[RequestId, Completion]:
        """Step until nothing is in flight; return what ended, by request id."""
        ended: dict[RequestId, Completion] = {}
        while self.engine.has_work:
            ended |= {completion.request_id: completion for completion in self.step()}
        return ended

    def ask(
        self, tenant: str, prompt: TokenIds, *, max_new_tokens: int = 1
    ) -> Completion:
        """Serve one request alone."""
        request_id = self.add(tenant, prompt, max_new_tokens=max_new_tokens)
        return self.drain()[request_id]

    def wait_until(self, now: float) -> None:
        """Let time pass without a step."""
        assert now >= self._now, "clocks do not go back"
        self._now = now

    # Questions

    def found_by(self, tenant: str, prompt: TokenIds) -> int:
        """Return how many cached tokens a request of the tenant would match now."""
        domain = self.setting.sharing.domain(tenant)
        if domain is None:
            return 0
        namespace = self.engine.namespace_of()
        return self.engine.cache.peek(namespace, domain, prompt.buffer).num_tokens

    def seen_by(self, tenant: str) -> tuple[str, ...]:
        """Return the events that concern the tenant, complete, one a line."""
        own: Set[RequestId] = self._own.get(tenant, frozenset())
        domain = self.setting.sharing.domain(tenant)
        return tuple(
            repr(event) for event in self._events if visible_to(event, own, domain)
        )


def visible_to(event: Event, own: Set[RequestId], domain: Domain | None) -> bool:
    """Decide whether a tenant may see an event: of its requests, or of its domain."""
    request_id = getattr(event, "request_id", None)
    if request_id is not None:
        return request_id.partition("#")[0] in own
    theirs: Domain | None = getattr(event, "domain", None)
    if theirs is None or domain is None:
        return False
    # Not by `==`: whether the engine compares domains rightly is what is in question.
    return (theirs.kind, theirs.name) == (domain.kind, domain.name)


def random_ids(rng: random.Random, loaded: LoadedModel, num_tokens: int) -> list[int]:
    """Return token ids that are like no others except by chance."""
    return [rng.randrange(loaded.vocab_size) for _ in range(num_tokens)]
