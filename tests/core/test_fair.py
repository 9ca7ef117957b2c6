"""`fair` picks whom a plain reading of its rules picks.

`PlainFair` is that reading: lists, sorted anew for every question, and accounts in exact
tokens. `PicksTwice` asks both, act by act, for all that a scheduler may do to an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import floor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from stemkv.core import Domain, Request, RequestId, TokenIds
from stemkv.core.schedule.order import Fair
from stemkv.core.schedule.order.base import Pick
from stemkv.core.schedule.order.keys import work_left
from stemkv.core.schedule.request import RequestState
from tests.core.scheduling import build_spec

TENANTS = ("a", "b", "c")
DOMAINS = ("x", "y")
BLOCK = 16
LEAST_LANE_CHUNK = 128
MOST_AHEAD = 3
MOST_CREDIT = 200_000
SHORT = (1, 17, 40, 130, 150, 400)  # around what a lane gives at least
LONG = (*SHORT, 3_000, 150_000, 250_000)  # around what a lane saves at most
PROMPTS = {num: TokenIds.from_ids([1] * num) for num in LONG}


@dataclass
class PlainFair:
    """Least work first within lanes and rounds, asked afresh each time."""

    lane: int
    quantum: int
    decode_weight: float
    pauses: bool
    weights: dict[str, float]
    waiting: list[Request] = field(default_factory=list)  # those on hold included
    unfinished: list[Request] = field(default_factory=list)
    leaders: dict[RequestId, Request | None] = field(default_factory=dict)
    lanes: dict[RequestId, str] = field(default_factory=dict)  # begun in whose lane
    deficits: dict[str, Fraction] = field(default_factory=dict)
    credits: dict[str, Fraction] = field(default_factory=dict)
    passed: set[RequestId] = field(default_factory=set)
    admits: bool = True
    # In a step: whose lane waits, of whom nobody may start, whether somebody is due.
    lanes_off: set[str] = field(default_factory=set)
    barred: set[str] = field(default_factory=set)
    someone_is_due: bool = False

    def deficit(self, tenant: str) -> Fraction:
        return self.deficits.get(tenant, Fraction(0))

    def credit(self, tenant: str) -> Fraction:
        return self.credits.get(tenant, Fraction(0))

    def by_arrival(self, tenant: str) -> list[Request]:
        owned = [r for r in self.waiting + self.unfinished if r.spec.owner == tenant]
        return sorted(owned, key=lambda r: r.order_key)

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.deficits.setdefault(request.spec.owner, Fraction(0))

    def start(self, request: Request) -> None:
        self.waiting.remove(request)
        self.unfinished.append(request)

    def remove(self, request: Request) -> None:
        (self.waiting if request in self.waiting else self.unfinished).remove(request)
        self.leaders.pop(request.request_id, None)
        self.lanes.pop(request.request_id, None)
        tenant = request.spec.owner
        if not self.by_arrival(tenant):
            self.deficits[tenant] = min(self.deficit(tenant), Fraction(0))
            self.credits[tenant] = Fraction(0)

    def hold(self, request: Request, leader: Request | None) -> None:
        self.leaders[request.request_id] = leader

    def release(self, request: Request) -> None:
        del self.leaders[request.request_id]

    def begin(self, *, admits: bool) -> None:
        self.admits, self.passed = admits, set()
        self.lanes_off, self.barred, self.someone_is_due = set(), set(), False

    def candidates(self) -> list[Request]:
        ranked = self.waiting + (self.unfinished if self.pauses else [])
        return [request for request in ranked if self.may_go(request)]

    def may_go(self, request: Request) -> bool:
        if request.request_id in self.passed or request.request_id in self.leaders:
            return False
        may_start = self.admits and request.spec.owner not in self.barred
        return request in self.unfinished or may_start

    def pick(self) -> Pick | None:
        if not self.pauses:
            for request in sorted(self.unfinished, key=lambda r: r.order_key):
                if request.request_id not in self.passed:
                    return Pick(request, lane=self.lanes.get(request.request_id))
        candidates = self.candidates()
        if not candidates:
            return None
        richest = max(self.deficit(r.spec.owner) for r in candidates)
        if richest <= 0 and self.someone_is_due:
            # No round begins; who has the least debt goes on.
            eligible = [r for r in candidates if self.deficit(r.spec.owner) == richest]
        else:
            while not any(self.deficit(r.spec.owner) > 0 for r in candidates):
                self.grant()
            eligible = [r for r in candidates if self.deficit(r.spec.owner) > 0]
        # What is public decides between domains, what is cached within one.
        domain = min(eligible, key=public_key).spec.domain
        best = min((r for r in eligible if r.spec.domain == domain), key=own_key)
        return self.lane_pick(best.spec.owner) or Pick(best)

    def grant(self) -> None:
        everybody = self.waiting + self.unfinished
        wanting = {r.spec.owner for r in everybody}
        ranked = self.waiting + (self.unfinished if self.pauses else [])
        saving = {r.spec.owner for r in ranked if r.request_id not in self.leaders}
        for tenant in self.deficits:
            share = self.share(tenant)
            most = max(share, MOST_CREDIT) if tenant in saving else share
            most = most if tenant in wanting else Fraction(0)
            self.deficits[tenant] = min(most, self.deficit(tenant) + share)

    def share(self, tenant: str) -> Fraction:
        return Fraction(self.quantum) * Fraction(self.weights.get(tenant, 1.0))

    def lane_pick(self, tenant: str) -> Pick | None:
        if tenant in self.lanes_off or self.credit(tenant) <= 0:
            return None
        served = [self.leaders.get(r.request_id, r) for r in self.by_arrival(tenant)]
        # Whoever waits for a driver, and so for nobody, is nobody's turn.
        request = next((each for each in served if each is not None), None)
        if request is None or not self.may_go(request):
            return None
        if not self.pauses and request in self.waiting:
            return Pick(request, lane=tenant)
        return Pick(request, max(floor(self.credit(tenant)), LEAST_LANE_CHUNK), tenant)

    def ran(self, pick: Pick, num_tokens: int, *, is_last: bool) -> None:
        tenant = pick.request.spec.owner
        self.deficits[tenant] = self.deficit(tenant) - num_tokens
        most = max(MOST_CREDIT, self.by_arrival(tenant)[0].num_tokens)
        self.credits[tenant] = min(
            Fraction(most), self.credit(tenant) + Fraction(num_tokens, self.lane)
        )
        if pick.lane is not None:
            self.lanes[pick.request.request_id] = pick.lane
            if self.by_arrival(pick.lane):
                self.credits[pick.lane] = self.credit(pick.lane) - num_tokens
        if is_last or pick.most_tokens is None or num_tokens < pick.most_tokens:
            self.passed.add(pick.request.request_id)

    def cannot_start(self, pick: Pick) -> bool:
        owner, work = pick.request.spec.owner, self.work(pick)
        is_owed = self.deficit(owner) >= min(work, MOST_CREDIT)
        if is_owed or (pick.lane is not None and self.credit(pick.lane) >= work):
            self.admits, self.someone_is_due = False, True
            return True
        if pick.lane is not None:
            self.lanes_off.add(pick.lane)
        else:
            self.barred.add(owner)
        return False

    def work(self, pick: Pick) -> int:
        return pick.request.num_tokens - pick.request.num_ready

    def yields_to(self, pick: Pick, running: Sequence[Request]) -> Request | None:
        if len(running) == 1:
            return None
        victim, owner = self.victim(running), pick.request.spec.owner
        ahead = victim.spec.owner
        rounds = self.deficit(owner) / self.share(owner)
        rounds -= self.deficit(ahead) / self.share(ahead)
        most = MOST_AHEAD + self.work(pick) / self.share(owner)
        return victim if rounds > most else None

    def decoded(self, tenant: str, num_tokens: int) -> None:
        cost = num_tokens * Fraction(self.decode_weight)
        self.deficits[tenant] = self.deficit(tenant) - cost

    def first(self, num: int) -> list[Request]:
        ranked = [r for r in self.waiting if r.request_id not in self.leaders]
        return sorted(ranked, key=own_key)[:num]

    def victim(self, running: Sequence[Request]) -> Request:
        others = running[1:] or running
        served = min(self.deficit(r.spec.owner) for r in others)
        return [r for r in others if self.deficit(r.spec.owner) == served][-1]


def own_key(request: Request) -> tuple[object, ...]:
    return (request.num_tokens - request.num_ready, request.order_key)


def public_key(request: Request) -> tuple[object, ...]:
    return (request.num_tokens - request.num_ready_in_public, request.order_key)


class PicksTwice(RuleBasedStateMachine):
    """A scheduler that plays dice, and tells two orders what it did."""

    @initialize(
        lane=st.sampled_from([1, 2, 4]),
        quantum=st.sampled_from([1, 64, 8192]),
        decode_weight=st.sampled_from([2.0, 0.5, 0.0]),
        pauses=st.booleans(),
        weights=st.dictionaries(
            st.sampled_from(TENANTS), st.sampled_from([0.25, 1.0, 3.0])
        ),
        num_domains=st.integers(1, len(DOMAINS)),
        data=st.data(),
    )
    def make(
        self,
        lane: int,
        quantum: int,
        decode_weight: float,
        pauses: bool,
        weights: dict[str, float],
        num_domains: int,
        data: st.DataObject,
    ) -> None:
        self.lengths = LONG if quantum > 64 else SHORT
        self.domains = DOMAINS[:num_domains]
        self.num_added = 0
        self.plain = PlainFair(lane, quantum, decode_weight, pauses, weights)
        self.fair = Fair(
            work_left(None),
            lane=lane,
            quantum=quantum,
            decode_weight=decode_weight,
            pauses_prefills=pauses,
            weights=weights,
        )
        for tenant in TENANTS:
            self.add(data, tenant, 2)

    # Between steps

    @rule(data=st.data(), tenant=st.sampled_from(TENANTS), num=st.integers(1, 4))
    def add(self, data: st.DataObject, tenant: str, num: int) -> None:
        for _ in range(num):
            self._add(data, tenant)

    def _add(self, data: st.DataObject, tenant: str) -> None:
        num = self.num_added
        self.num_added += 1
        spec = replace(
            build_spec(f"r{num}", arrival_s=float(data.draw(st.integers(0, 3)))),
            prompt=PROMPTS[data.draw(st.sampled_from(self.lengths))],
            domain=Domain.group(data.draw(st.sampled_from(self.domains))),
            tenant=tenant,
        )
        self._enqueue(Request(spec, num), data)

    @precondition(lambda self: self.plain.waiting)
    @rule(data=st.data())
    def finds(self, data: st.DataObject) -> None:
        """Blocks of what a waiting request matches came or went."""
        request = data.draw(st.sampled_from(self.plain.waiting))
        self._find(request, data)
        self.fair.moved(request)

    @precondition(lambda self: self.plain.unfinished)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """The oldest of a tenant finds that somebody computes its prefix."""
        tenant = data.draw(st.sampled_from(TENANTS))
        oldest = self.plain.by_arrival(tenant)[:1]
        if oldest and oldest[0] in self.plain.waiting:
            leader = data.draw(st.sampled_from(self.plain.unfinished))
            if oldest[0].request_id not in self.plain.leaders:
                self._hold(oldest[0], leader)

    @precondition(lambda self: self.plain.leaders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [r for r in self.plain.waiting if r.request_id in self.plain.leaders]
        self._release(data.draw(st.sampled_from(held)))

    @precondition(lambda self: self.plain.waiting + self.plain.unfinished)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        flying = self.plain.waiting + self.plain.unfinished
        self._remove(data.draw(st.sampled_from(flying)))

    @precondition(lambda self: self.plain.unfinished)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self._preempt(data)

    @rule(tenant=st.sampled_from(TENANTS), num_tokens=st.integers(1, 300))
    def decoded(self, tenant: str, num_tokens: int) -> None:
        """Also by those who have no prefill left."""
        self.fair.decoded(tenant, num_tokens)
        self.plain.decoded(tenant, num_tokens)

    # A step

    @rule(data=st.data(), admits=st.booleans() | st.just(True))
    def step(self, data: st.DataObject, admits: bool) -> None:
        self.fair.begin(0.0, admits=admits)
        self.plain.begin(admits=admits)
        budget = data.draw(st.sampled_from([1, 256, 8192, 10**6]))
        ends: dict[RequestId, int] = {}
        for _ in range(data.draw(st.integers(1, 12))):
            pick = self.fair.pick()
            assert pick == self.plain.pick()
            if pick is None or budget == 0:
                break
            request = pick.request
            if request.state is not RequestState.RUNNING:
                if not self._try_to_start(pick, ends, data):
                    continue
            elif data.draw(st.integers(0, 9)) == 9:
                ends.pop(self._preempt(data).request_id, None)
                continue
            start = ends.get(request.request_id, request.num_computed)
            num_left = request.num_tokens - start
            num = min(num_left, budget, pick.most_tokens or budget)
            self.fair.ran(pick, num, is_last=num == num_left)
            self.plain.ran(pick, num, is_last=num == num_left)
            self.agree()
            ends[request.request_id] = start + num
            budget -= num
        self._commit(ends)

    def _try_to_start(
        self, pick: Pick, ends: dict[RequestId, int], data: st.DataObject
    ) -> bool:
        request = pick.request
        match data.draw(st.sampled_from([*["start"] * 6, "no memory", "hold"])):
            case "no memory":
                is_due = self.fair.cannot_start(pick)
                assert is_due == self.plain.cannot_start(pick)
                running = self._running()
                if is_due and running:
                    victim = self.fair.yields_to(pick, running)
                    assert victim is self.plain.yields_to(pick, running)
                    if victim is not None:
                        self._take_back(victim, data)
                        ends.pop(victim.request_id, None)
                return False
            case "hold":
                leader = data.draw(st.sampled_from([None, *self.plain.unfinished]))
                self._hold(request, leader)
                return False
        request.state = RequestState.RUNNING
        # A copied part of a block may come on top of what was known.
        most = min(request.num_cached + BLOCK - 1, request.num_tokens - 1)
        request.num_cached = data.draw(st.integers(request.num_cached, most))
        request.num_computed = request.num_cached
        self.fair.start(request)
        self.plain.start(request)
        return True

    def _commit(self, ends: dict[RequestId, int]) -> None:
        for request in tuple(self.plain.unfinished):
            request.num_computed = ends.get(request.request_id, request.num_computed)
            if request.num_computed == request.num_tokens:
                self._remove(request)
            else:
                self.fair.moved(request)

    # What a scheduler does to one request

    def _find(self, request: Request, data: st.DataObject) -> None:
        most = (request.num_tokens - 1) // BLOCK
        num_blocks = data.draw(st.integers(0, most))
        request.num_cached = num_blocks * BLOCK
        request.num_public = data.draw(st.integers(0, num_blocks)) * BLOCK

    def _enqueue(self, request: Request, data: st.DataObject) -> None:
        self._find(request, data)
        self.fair.add(request)
        self.plain.add(request)

    def _preempt(self, data: st.DataObject) -> Request:
        running = self._running()
        victim = self.fair.victim(running)
        assert victim is self.plain.victim(running)
        self._take_back(victim, data)
        return victim

    def _running(self) -> list[Request]:
        return sorted(self.plain.unfinished, key=lambda r: r.order_key)

    def _take_back(self, victim: Request, data: st.DataObject) -> None:
        self._remove(victim)
        victim.num_computed = 0
        victim.state = RequestState.PREEMPTED
        self._enqueue(victim, data)

    def _remove(self, request: Request) -> None:
        self.fair.remove(request)
        self.plain.remove(request)
        for each in self.plain.waiting:
            if self.plain.leaders.get(each.request_id) is request:
                self._release(each)

    def _hold(self, request: Request, leader: Request | None) -> None:
        self.fair.hold(request, leader)
        self.plain.hold(request, leader)

    def _release(self, request: Request) -> None:
        self.fair.release(request)
        self.plain.release(request)

    @invariant()
    def agree(self) -> None:
        assert len(self.fair) == len(self.plain.waiting)
        for tenant in TENANTS:
            assert self.fair.deficit(tenant) == float(self.plain.deficit(tenant))
            assert self.fair.lane_credit(tenant) == float(self.plain.credit(tenant))
        assert list(self.fair.first(5, 0.0)) == self.plain.first(5)


TestPicksTwice = PicksTwice.TestCase
TestPicksTwice.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


@pytest.mark.parametrize("num_oldest", [3_000, 250_000])
def test_a_lane_saves_no_more_than_a_long_prompt(num_oldest: int) -> None:
    """Its oldest waits for a driver, so that all others go before it."""
    plain = PlainFair(1, 8192, 2.0, pauses=True, weights={})
    fair = Fair(
        work_left(None),
        lane=1,
        quantum=8192,
        decode_weight=2.0,
        pauses_prefills=True,
        weights={},
    )
    for num, num_tokens in enumerate([num_oldest, 150_000, 250_000]):
        spec = replace(build_spec(f"r{num}"), prompt=PROMPTS[num_tokens])
        request = Request(spec, num)
        for order in (fair, plain):
            order.add(request)
            if num == 0:
                order.hold(request, None)
    fair.begin(0.0, admits=True)
    plain.begin(admits=True)
    for num_tokens in (150_000, 250_000):
        pick = fair.pick()
        assert pick is not None
        assert pick == plain.pick()
        for order in (fair, plain):
            order.ran(pick, num_tokens, is_last=True)
    assert fair.lane_credit("a") == plain.credit("a") == max(200_000, num_oldest)
