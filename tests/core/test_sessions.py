"""As many sessions at once as fit: who is active, who gives way, and that all end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core import (
    CacheConfig,
    Domain,
    Hints,
    Lru,
    OrderConfig,
    PrefixCache,
    RequestId,
    RequestSpec,
    Sample,
    Scheduler,
    SchedulerConfig,
    StepResult,
    TokenIds,
)
from stemkv.core.books.waits import WaitReason
from stemkv.core.check import check_scheduler
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.sessions import SessionConfig
from stemkv.errors import ConfigError
from tests.core.scheduling import NAMESPACE

BLOCK = 4


class Service:
    """A scheduler and a clock; a step takes a second."""

    def __init__(
        self, sessions: SessionConfig, *, num_blocks: int = 40, order: str = "fair"
    ) -> None:
        cache = PrefixCache(
            CacheConfig(num_blocks=num_blocks, block_size=BLOCK), Retention(Lru)
        )
        self.scheduler = Scheduler(
            SchedulerConfig(token_budget=64, max_num_running=8),
            cache,
            OrderConfig(name=order).make(),
            sessions=sessions,
        )
        self.now = 0.0
        self.ended: list[str] = []
        self.num_added = 0

    def add(
        self,
        session: str | None,
        num_tokens: int,
        *,
        ends: bool = False,
        max_new_tokens: int = 3,
    ) -> str:
        self.num_added += 1
        first = hash(session) % 1000 if session is None else ord(session[-1]) * 1000
        self.scheduler.add(
            RequestSpec(
                request_id=RequestId(f"{session}-{self.num_added}"),
                prompt=TokenIds.from_ids(
                    [first + place for place in range(num_tokens)]
                ),
                max_new_tokens=max_new_tokens,
                arrival_s=self.now,
                domain=Domain.private("a"),
                namespace=NAMESPACE,
                hints=Hints(session=session, ends_session=ends),
            )
        )
        return f"{session}-{self.num_added}"

    def step(self) -> None:
        plan = self.scheduler.schedule(self.now)
        assert plan.chunks, "somebody is in flight and nothing is planned"
        samples = {
            chunk.request_id: (Sample(1),) * chunk.num_samples
            for chunk in plan.chunks
            if chunk.num_samples
        }
        self.now += 1.0
        before = {request.request_id for request in self.scheduler.requests()}
        self.scheduler.commit(plan, StepResult(samples), self.now)
        check_scheduler(self.scheduler)
        left = {request.request_id for request in self.scheduler.requests()}
        self.ended += sorted(before - left)

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def reason(self, request_id: str) -> WaitReason | None:
        request = self.scheduler.request(RequestId(request_id))
        assert request is not None
        return request.waits.reason


def test_sessions_that_do_not_fit_beside_others_wait_as_a_whole() -> None:
    service = Service(SessionConfig(share=0.5, patience_s=1e6, idle_s=1e6))
    first = service.add("s1", 40)  # 10 of 20 blocks; the least work goes first
    second = service.add("s2", 60)  # 15 more
    service.step()

    assert service.reason(first) is None
    assert service.reason(second) is WaitReason.SESSION


def test_a_session_that_is_over_gives_its_place_to_the_next() -> None:
    service = Service(SessionConfig(share=0.5, patience_s=1e6, idle_s=1e6))
    service.add("s1", 40, ends=True)
    second = service.add("s2", 60)
    service.run()

    assert service.ended[-1] == second


def test_a_paused_session_gives_way_when_others_lose_patience() -> None:
    service = Service(SessionConfig(share=0.5, patience_s=20.0, idle_s=1e6))
    service.add("s1", 60)
    service.add(None, 4, max_new_tokens=60)  # something runs all the time
    for _ in range(5):
        service.step()  # the session is served, and pauses
    second = service.add("s2", 40)
    waited = 0
    while service.reason(second) is not None:
        service.step()
        waited += 1

    assert 20 <= waited <= 23


def test_requests_without_a_session_are_not_limited() -> None:
    service = Service(SessionConfig(share=0.1, patience_s=1e6, idle_s=1e6))
    service.add("s1", 60)
    free = service.add(None, 4)
    service.step()

    assert service.reason(free) is None


@given(seed=st.integers(0, 10_000), order=st.sampled_from(["fair", "fcfs", "lpm"]))
@settings(deadline=None, max_examples=25)
def test_everybody_ends_whatever_sessions_there_are(seed: int, order: str) -> None:
    chance = random.Random(seed)
    config = SessionConfig(
        share=chance.choice([0.1, 0.5, 1.0]),
        idle_s=chance.choice([0.0, 5.0, 1e6]),
        patience_s=chance.choice([0.0, 30.0, 1e6]),
    )
    service = Service(config, num_blocks=30, order=order)
    live = []
    for _ in range(40):
        if chance.random() < 0.5:
            session = chance.choice(["s1", "s2", "s3", "s4", None])
            live.append(
                service.add(
                    session,
                    chance.randint(1, 80),
                    ends=session is not None and chance.random() < 0.3,
                    max_new_tokens=chance.randint(1, 30),
                )
            )
        if live and chance.random() < 0.1:
            service.scheduler.cancel(RequestId(chance.choice(live)), service.now)
        if service.scheduler.has_work:
            service.step()
    service.run()
    assert service.scheduler.num_waiting == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("share", 0.0), ("share", 1.5), ("idle_s", -1.0), ("patience_s", float("nan"))],
)
def test_a_bad_setting_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"sessions.{name}"):
        SessionConfig(**{name: value})
