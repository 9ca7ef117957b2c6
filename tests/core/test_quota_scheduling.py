"""Quotas, hints and look-ahead under a scheduler: everybody gets what is his, in the end.

The transparency oracle of the scheduler's own walks applies here as well: whatever a
caller hints and whatever quotas there are, tokens are those of a request alone.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

from stemkv.core import (
    CacheConfig,
    Domain,
    PrefixCache,
)
from stemkv.core.hints import NO_HINTS, Hints
from stemkv.core.policies import EVICTIONS, EvictionConfig
from stemkv.core.quota import Quota, QuotaConfig
from stemkv.errors import ConfigError, PromptTooLong
from tests.core.bookkeeping import BookedDriver
from tests.core.scheduling import Model, namespace_of, tokens
from tests.core.test_scheduler_machine import (
    ADAPTERS,
    MAX_STEM,
    PUBLIC_TEXT,
    STEMS,
    STOPS,
    TENANTS,
    abandon,
    cancel,
    retire_for_all,
    roll_out,
)
from tests.core.watching import WatchedCache

CREW = Domain.group("crew")
DOMAINS = [*map(Domain.private, TENANTS), CREW]
HINTS = [
    NO_HINTS,
    Hints(session="s"),
    Hints(session="s", ends_session=True),
    Hints(session="t", ends_session=True),
    Hints(ephemeral_from=4),
    Hints(session="t", ephemeral_from=0),
    Hints(next_use_s=3.0),
    Hints(next_use_s=float("inf")),
]


class QuotaDriver(BookedDriver):
    """A driver whose cache has quotas, and objects when a block goes out of turn."""

    cache: WatchedCache

    def __init__(
        self,
        quotas: QuotaConfig | None,
        policy: str = "lru",
        *,
        has_spans: bool = False,
        **kw: Any,
    ) -> None:
        def make_cache(config: CacheConfig) -> PrefixCache:
            make_policy = EvictionConfig(name=policy).make(config)
            return WatchedCache(config, make_policy, quotas=quotas, has_spans=has_spans)

        super().__init__(make_cache=make_cache, **kw)
        self.quotas = quotas

    def most_blocks(self, domain: Domain) -> int:
        """What a request may hold, by the words of the quota."""
        total = self.cache.config.num_blocks
        if self.quotas is None:
            return total
        promised = self.quotas.num_promised_blocks
        return total - promised + self.quotas.of(domain).floor_blocks

    def add_or_refuse(
        self, prompt: str, domain: Domain, *, max_new_tokens: int, **spec: Any
    ) -> None:
        """Add a request; it is refused exactly if it could never run."""
        num_slots = len(tokens(prompt)) + max_new_tokens - 1
        num_blocks = self.cache.num_blocks_for(num_slots)
        request_id = f"q{len(self.requests)}-{len(self.plans)}"
        spec |= {"max_new_tokens": max_new_tokens}
        if num_blocks > self.most_blocks(domain):
            with pytest.raises(PromptTooLong, match=f"need {num_blocks} blocks"):
                self.add_in(request_id, prompt, domain, **spec)
            assert request_id not in self.requests
        else:
            self.add_in(request_id, prompt, domain, **spec)

    def check_baseline(self) -> None:
        """What is retained at the end can all be had again, by whoever may."""
        promised = self.cache.available_to(CREW) - self.cache.pool.num_free
        assert self.cache.evict(promised, self._tick(), domain=CREW) >= promised
        for namespace in self.cache.tree.roots():
            self.cache.retire(namespace, self._tick())
        super().check_baseline()
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """No mark outlives its node."""
        retention = self.cache._retention
        assert not retention._session_of
        assert not retention._nodes_of
        assert not retention._ephemeral
        assert not retention._ended
        assert not retention._kept_until
        assert not retention._awaited
        assert not retention._stock_of
        assert not self.cache._keeps


def quotas_of(rng: random.Random, num_blocks: int) -> QuotaConfig:
    floors = [rng.randrange(num_blocks // 5 + 1) for _ in range(4)]
    return QuotaConfig(
        quotas={
            domain: Quota(
                floor_blocks=floor,
                cap_blocks=rng.choice([None, None, floor + rng.randrange(4)]),
                weight=rng.choice([0.5, 1.0, 2.0]),
            )
            for domain, floor in zip(DOMAINS, floors[:3], strict=False)
        },
        public_blocks=floors[3],
    )


def lives(seed: int, *, is_hinted: bool = True, num_acts: int = 200) -> QuotaDriver:
    """Everything that can happen, with an operator who orders and interferes."""
    rng = random.Random(seed)
    block_size = rng.randint(1, 4)
    num_blocks = rng.randint(24, 48) // block_size
    driver = QuotaDriver(
        quotas_of(rng, num_blocks) if rng.random() < 0.8 else None,
        rng.choice(["lru", "reuse_index", *EVICTIONS]),
        has_spans=True,
        num_blocks=num_blocks,
        block_size=block_size,
        token_budget=rng.choice([4, 9, 24]),
        max_num_running=rng.randint(1, 8),
        max_steps_awaiting=rng.choice([0, 2, 256]),
        watermark=rng.choice([0.0, 0.2]),
        lookahead=rng.choice([0, 2, 32]),
        stops=rng.choice(STOPS),
        max_history_blocks=rng.choice([None, 8]),
    )
    with suppress(ConfigError):
        driver.declare_public(PUBLIC_TEXT)
    for _ in range(num_acts):
        if rng.random() < 0.3 and len(driver.scheduler.requests()) < 20:
            prompt = rng.choice(STEMS)[: rng.randint(1, MAX_STEM)]
            prompt += "".join(rng.choices("abc", k=rng.choice([0, 0, 1, 3])))
            hints = rng.choice(HINTS)
            driver.add_or_refuse(
                prompt,
                rng.choice(DOMAINS),
                max_new_tokens=rng.randint(1, 14),
                num_samples=rng.choice(
                    [1, 1, 1, min(3, driver.config.max_num_running)]
                ),
                tenant=rng.choice([None, *TENANTS]),
                hints=hints if is_hinted else NO_HINTS,
            )
        operate(driver, rng)
        plan = driver.schedule()
        if rng.random() < 0.05 and driver.scheduler.requests():
            cancel(driver, rng.choice(driver.scheduler.requests()).request_id)
        if rng.random() < 0.03:
            abandon(driver, rng.randint(0, len(plan.chunks)))
        else:
            driver.execute_and_commit(plan)
        driver.check()
    return driver


def operate(driver: QuotaDriver, rng: random.Random) -> None:
    """What an operator does between steps."""
    driver.lift_due()
    scheduler, cache = driver.scheduler, driver.cache
    namespace = namespace_of(Model(weights=driver.num_fences))
    requests = scheduler.requests()
    match rng.randrange(60):
        case 0 if requests:
            adapter = rng.choice(ADAPTERS)
            driver.restart(rng.choice(requests).request_id, adapter)
        case 1:
            retire_for_all(driver, namespace)
        case 2:
            roll_out(driver, rng.choice(["finish", "finish", "restart", "abort"]))
        case 3:
            with suppress(ConfigError):
                driver.declare_public(PUBLIC_TEXT[: rng.randint(0, 10)], namespace)
        case 4 | 5 | 6:
            prefix = tokens(rng.choice(STEMS)[: rng.randint(1, MAX_STEM)])
            until = driver.now + rng.choice([-1.0, 5.0, 60.0])
            with suppress(ConfigError):
                cache.keep(
                    namespace, rng.choice(DOMAINS), prefix, until=until, now=driver.now
                )
        case 7:
            cache.evict(rng.randint(1, 3), driver._tick())
        case 8:
            cache.end_session(rng.choice(DOMAINS), rng.choice("st"), driver._tick())
        case 9 if requests:
            driver.cut_off(rng.choice(requests).request_id)


@pytest.mark.parametrize("seed", range(30))
def test_everybody_gets_to_the_end_whatever_quotas_and_hints_there_are(
    seed: int,
) -> None:
    driver = lives(seed)

    driver.finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_everybody_gets_to_the_end_in_many_longer_lives(seed: int) -> None:
    lives(seed, num_acts=600).finish()
