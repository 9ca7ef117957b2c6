"""Random walks with books: nothing a scheduler does can make the ledger wrong.

After every act its accounts equal those of a keeper who looked at every block, its sums
agree, and every reason for a miss is what the cache ever held.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stemkv.core import Domain, FinishReason
from stemkv.core.books.entry import LedgerEntry, MissReason
from stemkv.core.prefix.hints import Hints
from stemkv.core.prefix.identity import PUBLIC
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.schedule.events import RequestPreempted, RequestRestarted
from stemkv.errors import PromptTooLong
from tests.core.bookkeeping import BookedDriver, spans
from tests.core.scheduling import of_type
from tests.core.test_scheduler_machine import (
    ADAPTERS,
    MAX_STEM,
    PUBLIC_TEXT,
    STEMS,
    STOPS,
    TENANTS,
    SchedulerMachine,
    abandon,
    add,
    cancel,
    change_what_is_served,
    prompts,
)

CREW = Domain.group("crew")


def add_to_crew(
    driver: BookedDriver,
    prompt: str,
    tenant: str,
    num_new: int,
    ephemeral_from: int | None = None,
) -> None:
    request_id = f"c{len(driver.requests)}-{len(driver.plans)}"
    try:
        driver.add_in(
            request_id,
            prompt,
            CREW,
            tenant=tenant,
            max_new_tokens=num_new,
            hints=Hints(ephemeral_from=ephemeral_from),
        )
    except PromptTooLong:
        assert request_id not in driver.requests


def check_reasons(driver: BookedDriver, entry: LedgerEntry) -> None:
    """Each reason is one that applies, by what was ever in the tree."""
    size = driver.cache.config.block_size
    prompt = driver.requests[entry.request_id].spec.prompt.buffer
    for start, end, reason in spans(entry.misses):
        if reason in (MissReason.NOT_YET_COMPUTED, MissReason.UNSHARABLE):
            continue
        for index in range(start // size, -(-end // size)):
            block = prompt[: (index + 1) * size * TOKEN_BYTES]
            if (index + 1) * size >= entry.num_prompt_tokens:
                # Its last token is computed in any case.
                assert reason is MissReason.BELOW_BLOCK
                continue
            assert reason in reasons_of(driver, entry, block)


def reasons_of(
    driver: BookedDriver, entry: LedgerEntry, block: bytes
) -> set[MissReason]:
    """One, or two where the last of the request's own copies may have been refused."""
    ever = driver.keeper.ever
    holders = {(name, domain) for name, domain, each in ever if each == block}
    own = {(entry.namespace, entry.domain), (entry.namespace, PUBLIC)} & holders
    if own and {domain for _, domain in own} <= refusing(driver, block):
        return {MissReason.EVICTED, MissReason.NOT_RETAINED}
    if own:
        return {MissReason.EVICTED}
    reason = reason_of_others(entry, holders)
    if entry.domain in refusing(driver, block):
        # Who ends in the step that computes it publishes and refuses it at once, so
        # the keeper, which looks between steps, has never seen it.
        return {reason, MissReason.NOT_RETAINED}
    return {reason}


def refusing(driver: BookedDriver, block: bytes) -> set[Domain]:
    """In which domains anybody ever said of the block that it is used once."""
    num_tokens = len(block) // TOKEN_BYTES
    size = driver.cache.config.block_size
    return {
        request.spec.domain
        for request in driver.requests.values()
        if request.spec.hints.ephemeral_from is not None
        and request.spec.hints.ephemeral_from // size * size < num_tokens
        and request.tokens.startswith(block)
    }


def reason_of_others(
    entry: LedgerEntry, holders: set[tuple[bytes, Domain]]
) -> MissReason:
    if any(name == entry.namespace for name, _ in holders):
        return MissReason.OTHER_DOMAIN
    return MissReason.IDENTITY_DIFFERS if holders else MissReason.NEVER_SEEN


class LedgerMachine(SchedulerMachine):
    """Callers, operators and failures as for any scheduler, with books."""

    driver: BookedDriver

    @initialize(
        block_size=st.integers(1, 4),
        num_slots=st.integers(14, 60),
        token_budget=st.integers(1, 16),
        max_num_running=st.integers(1, 5),
        max_steps_awaiting=st.sampled_from([0, 1, 256]),
        watermark=st.sampled_from([0.0, 0.3]),
        num_public=st.integers(0, MAX_STEM),
        stops=st.sampled_from(STOPS),
    )
    def build(
        self, block_size: int, num_slots: int, num_public: int, **spec: Any
    ) -> None:
        self.driver = BookedDriver(
            num_blocks=num_slots // block_size, block_size=block_size, **spec
        )
        self.driver.declare_public(PUBLIC_TEXT[:num_public])

    @rule(
        prompt=prompts(),
        tenant=st.sampled_from(TENANTS),
        max_new_tokens=st.integers(1, 12),
        ephemeral_from=st.sampled_from([None, None, 0, 3]),
    )
    def add_to_crew(
        self,
        prompt: str,
        tenant: str,
        max_new_tokens: int,
        ephemeral_from: int | None,
    ) -> None:
        add_to_crew(self.driver, prompt, tenant, max_new_tokens, ephemeral_from)

    @precondition(lambda self: not self.is_pending and self.driver.scheduler.has_work)
    @rule(data=st.data())
    def cut_off(self, data: st.DataObject) -> None:
        requests = self.driver.scheduler.requests()
        self.driver.cut_off(data.draw(st.sampled_from(requests)).request_id)

    @precondition(lambda self: not self.is_pending)
    @rule()
    def schedule(self) -> None:
        before = dict(self.driver.ledger._open)

        self.driver.schedule()

        if FinishReason.FAILED in self.driver.stops.values():
            return  # what was unsound may come and go within one commit
        for request_id, entry in self.driver.ledger._open.items():
            if before.get(request_id) is not entry:
                check_reasons(self.driver, entry)

    @precondition(lambda self: not self.is_pending)
    @rule(num_steps=st.integers(1, 5))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.schedule()
            self.commit()

    @invariant()
    def books_are_right(self) -> None:
        self.driver.check_books()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None
)


@pytest.mark.slow
def test_many_more_walks_with_books() -> None:
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(max_examples=400, stateful_step_count=60, deadline=None),
    )


def live(driver: BookedDriver, rng: random.Random, num_acts: int) -> None:
    """Everything that can happen, drawn from what the driver shows."""
    driver.declare_public(PUBLIC_TEXT)
    for _ in range(num_acts):
        if rng.random() < 0.3 and len(driver.scheduler.requests()) < 20:
            prompt = rng.choice(STEMS)[: rng.randint(1, MAX_STEM)]
            prompt += "".join(rng.choices("abc", k=rng.choice([0, 0, 1, 3])))
            if rng.random() < 0.3:
                add_to_crew(
                    driver,
                    prompt,
                    rng.choice(TENANTS),
                    rng.randint(1, 9),
                    rng.choice([None, None, 0, 3]),
                )
            else:
                add(
                    driver,
                    prompt,
                    shares=rng.random() < 0.8,
                    adapter=rng.choice(ADAPTERS),
                    tenant=rng.choice(TENANTS),
                    max_new_tokens=rng.randint(1, 14),
                    num_samples=rng.choice([1, 1, 1, 3]),
                )
        change_what_is_served(driver, rng)
        if rng.random() < 0.02 and driver.scheduler.requests():
            driver.cut_off(rng.choice(driver.scheduler.requests()).request_id)
        plan = driver.schedule()
        if rng.random() < 0.05 and driver.scheduler.requests():
            cancel(driver, rng.choice(driver.scheduler.requests()).request_id)
        if rng.random() < 0.03:
            abandon(driver, rng.randint(0, len(plan.chunks)))
        else:
            driver.execute_and_commit(plan)
        driver.check()


@cache  # by a seed the same, and two tests look at them
def lives(seed: int, *, is_booked: bool) -> BookedDriver:
    rng = random.Random(seed)
    block_size = rng.randint(1, 4)
    driver = BookedDriver(
        is_booked=is_booked,
        num_blocks=rng.randint(24, 48) // block_size,
        block_size=block_size,
        token_budget=rng.choice([4, 9, 24]),
        max_num_running=rng.randint(1, 8),
        max_steps_awaiting=rng.choice([0, 2, 256]),
        watermark=rng.choice([0.0, 0.2]),
        stops=rng.choice(STOPS),
        max_history_blocks=rng.choice([None, 8]),
    )
    live(driver, rng, 200)
    driver.run()
    driver._note(driver.scheduler.take_events())
    return driver


@pytest.mark.parametrize("seed", range(12))
def test_a_ledger_never_changes_a_decision(seed: int) -> None:
    plain, booked = (lives(seed, is_booked=is_booked) for is_booked in (False, True))

    assert booked.plans == plain.plans
    assert booked.events == plain.events
    assert booked.outputs == plain.outputs
    assert booked.cache.usage() == plain.cache.usage()
    booked.check_books()
    booked.check_entries()
    assert not plain.entries
    assert booked.entries


def test_the_lives_meet_everything_they_are_meant_to_meet() -> None:
    drivers = [lives(seed, is_booked=True) for seed in range(12)]

    entries = [entry for driver in drivers for entry in driver.entries]
    reasons = {miss.reason for entry in entries for miss in entry.misses}
    assert reasons == set(MissReason)
    assert any(len(entry.writers) > 1 for entry in entries)
    assert any(entry.regrets for entry in entries)
    assert any(entry.stall_s for entry in entries)
    assert any(entry.num_preemptions and entry.num_reused_tokens for entry in entries)
    assert any(entry.num_copied_tokens for entry in entries)
    assert any(entry.finish_reason == "failed" for entry in entries)
    for kind in (RequestPreempted, RequestRestarted):
        assert any(of_type(driver.events, kind) for driver in drivers)
    domains = {entry.domain.kind for entry in entries}
    assert len(domains) == 2
