"""Who computes what in the next step.

Owns the filling of a step: decodes first, then whom the order picks, and the
preemptions that make room for them. Knows neither results nor rollouts.
"""

from __future__ import annotations

from stemkv.core.books.waits import WaitReason
from stemkv.core.schedule.admission import Admission
from stemkv.core.schedule.lives import Lives
from stemkv.core.schedule.order.base import Pick
from stemkv.core.schedule.plan import StepPlan
from stemkv.core.schedule.request import Request, RequestState
from stemkv.core.schedule.step import Step, TimeLimit

__all__ = ["Planner"]


class Planner:
    """Plans one step after another."""

    def __init__(
        self,
        lives: Lives,
        admission: Admission,
        *,
        token_budget: int,
        limit: TimeLimit | None,
    ) -> None:
        self._lives = lives
        self._order = lives.line.order
        self._admission = admission
        self._token_budget = token_budget
        self._limit = limit

    def plan(self, now: float) -> StepPlan:
        """Decide a step."""
        lives = self._lives
        for request in lives.coasting.due(lives.num_plans):
            lives.wake(request)
        self._release_due(now)
        budget = self._token_budget - len(lives.coasting)
        step = Step(lives.num_plans, budget, self._limit)
        for request in tuple(lives.running.stepping):
            # An older one may have taken its blocks.
            if request.state is RequestState.RUNNING and not request.is_unfinished:
                self._plan_decode(request, step, now)
        decodes = self._decodes(step)
        step.begin_prefills(lives.coasting)
        self._order.begin(now, admits=not step.has_preempted)
        self._fill(step, now)
        self._note_pauses(step, now)
        for tenant, num_tokens in decodes.items():
            self._order.decoded(tenant, num_tokens)
        lives.journal.decoded(decodes)
        lives.num_plans += 1
        return step.plan(lives.coasting, now)

    # Private

    def _release_due(self, now: float) -> None:
        """Let those be picked again who have waited for a leader or a session."""
        lives = self._lives
        for request in lives.followers.take_overdue(lives.num_plans):
            self._order.release(request)
        for request in lives.sessions.due(now, is_alone=not len(lives.running)):
            lives.sessions.forget(request)
            self._order.release(request)
            lives.journal.waits(request, WaitReason.QUEUE, now)

    def _plan_decode(self, request: Request, step: Step, now: float) -> None:
        if self._make_writable(request, step, now):  # else it preempted itself
            step.add(request, request.num_tokens)

    def _decodes(self, step: Step) -> dict[str, int]:
        """Return how many tokens each tenant decodes in a step with decodes only."""
        decodes = dict(self._lives.coasting.tenants)
        for request_id in step.chunks:
            owner = self._lives[request_id].spec.owner
            decodes[owner] = decodes.get(owner, 0) + 1
        return decodes

    def _fill(self, step: Step, now: float) -> None:
        """Give what is left of a step to whom the order picks, one after another."""
        self._admission.forget()
        self._lives.follow_moves()
        while step.has_room:
            pick = self._order.pick()
            if pick is None:
                return
            request = self._lives[pick.request.request_id]
            if request.state is RequestState.RUNNING:
                self._plan_prefill(request, pick, step, now)
            elif self._admission.try_to_start(request, pick, step, now):
                self._plan_prefill(request, pick, step, now)
                self._lives.follow_moves()  # what it evicted others may have matched

    def _plan_prefill(
        self, request: Request, pick: Pick, step: Step, now: float
    ) -> None:
        """Plan as much of an unfinished prefill as pick and step allow."""
        if not self._make_writable(request, step, now):
            return
        start = step.end_of(request)
        num_left = request.num_tokens - start
        num_wanted = min(num_left, step.budget)
        if pick.most_tokens is not None:
            num_wanted = min(num_wanted, pick.most_tokens)
        num_tokens = step.num_in_time(start, num_wanted)
        if num_tokens < num_wanted:
            step.is_full = True
        if num_tokens == 0:
            return
        step.add(request, start + num_tokens)
        self._order.ran(pick, num_tokens, is_last=num_tokens == num_left)

    def _note_pauses(self, step: Step, now: float) -> None:
        lives = self._lives
        for request_id, request in lives.running.prefills.items():
            is_paused = request_id not in step.chunks
            reason = WaitReason.PAUSED if is_paused else None
            lives.journal.waits(request, reason, now)

    def _make_writable(self, request: Request, step: Step, now: float) -> bool:
        """Give the request private slots for all its tokens, preempting if need be.

        Returns `False` if the request itself had to yield.
        """
        lives, cache = self._lives, self._lives.cache
        lease = request.held
        while True:
            if cache.grow(lease, request.num_tokens, now):
                is_ready, copy = cache.prepare_write(lease, request.num_computed, now)
                if is_ready:
                    if copy is not None:
                        step.copies.append(copy)
                    return True
            victim = self._order.victim(lives.running.all)
            lives.take_back(victim, step, now)
            step.has_preempted = True
            if victim is request:
                return False
