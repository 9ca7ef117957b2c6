"""The requests in flight, and every change of their state.

Owns who is in flight and the picture of states in `request.py`: each arrow is a verb
here, and tells everybody whom it concerns. Decides nothing.
"""

from __future__ import annotations

from dataclasses import replace

from stemkv.core.books.ledger import Ledger
from stemkv.core.books.waits import WaitReason
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.table import Lease
from stemkv.core.schedule.coasting import Coasting
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.epochs import Epochs
from stemkv.core.schedule.events import (
    Event,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    RequestRestarted,
)
from stemkv.core.schedule.followers import Followers
from stemkv.core.schedule.journal import Journal
from stemkv.core.schedule.line import Line
from stemkv.core.schedule.order.base import Order
from stemkv.core.schedule.outbox import Outbox
from stemkv.core.schedule.request import (
    FinishReason,
    Request,
    RequestId,
    RequestSpec,
    RequestState,
)
from stemkv.core.schedule.running import Running
from stemkv.core.schedule.sessions import SessionConfig, SessionGate
from stemkv.core.schedule.step import Step

__all__ = ["Lives"]


class Lives:
    """Moves requests from state to state; holds all that has to hear of it."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        order: Order,
        *,
        ledger: Ledger | None,
        sessions: SessionConfig | None,
    ) -> None:
        self.cache = cache
        self.max_num_running = config.max_num_running
        self.outbox: Outbox[Event] = Outbox()
        self.journal = Journal(ledger)
        self.running = Running()
        self.coasting = Coasting()
        self.line = Line(order, cache, self.journal)
        self.followers = Followers(cache, max_steps=config.max_steps_awaiting)
        self.epochs = Epochs()
        self.sessions = SessionGate(sessions, cache.config)
        self.num_added = 0
        self.num_plans = 0
        self._requests: dict[RequestId, Request] = {}
        # Samples in flight by the id that was asked for, which they all keep taken.
        self._by_root: dict[RequestId, dict[RequestId, Request]] = {}
        cache.subscribe(self.outbox.put)

    # Questions

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: RequestId) -> Request | None:
        """Return a request in flight; `None` once it has ended."""
        return self._requests.get(request_id)

    def __getitem__(self, request_id: RequestId) -> Request:
        return self._requests[request_id]

    def all(self) -> tuple[Request, ...]:
        """Return all requests in flight, in the order they were added."""
        return tuple(self._requests.values())

    def samples_of(self, root: RequestId) -> tuple[Request, ...]:
        """Return the samples in flight of a request that was added under this id."""
        return tuple(self._by_root.get(root, {}).values())

    # Waiting

    def add(self, spec: RequestSpec) -> Request:
        """Queue a new request."""
        request = Request(spec, self.num_added)
        request.epoch = self.epochs.num_fences
        self.num_added += 1
        self._take_in(request)
        self.line.add(request)
        self.journal.came(request)
        return request

    def restart(
        self,
        request: Request,
        namespace: bytes | None,
        adapter: str | None,
        domain: Domain,
        now: float,
    ) -> None:
        """Let a request begin again as if just added, at its place in the order."""
        num_samples = request.num_samples
        self.wake(request)
        num_output = request.num_output_tokens
        if request.state is RequestState.RUNNING:
            self.stop(request, now)
        else:
            self.leave_line(request)
        request.start_over(namespace, adapter, num_samples, domain=domain)
        self.epochs.leave(request)
        request.epoch = self.epochs.num_fences
        self.epochs.enter(request)
        self.line.add(request)
        self.journal.restarted(request, now)
        self.outbox.put(
            RequestRestarted(
                now=now,
                request_id=request.request_id,
                num_discarded_tokens=num_output,
            )
        )

    def leave_line(self, request: Request) -> None:
        """Take a request out that waits, for whatever it waits."""
        self.followers.forget(request)
        self.epochs.forget(request)
        self.sessions.forget(request)
        self.line.remove(request)

    def hold(
        self,
        request: Request,
        reason: WaitReason,
        now: float,
        *,
        leader: Request | None = None,
    ) -> None:
        """Let a waiting request not be picked until it is released."""
        self.line.order.hold(request, leader)
        self.journal.waits(request, reason, now)

    def follow_moves(self) -> None:
        """Rank anew whose cached part has changed."""
        for request_id in self.line.take_moved():
            request = self._requests[request_id]
            self.line.read_match(request)
            self.journal.wants(request)
            if self.followers.is_served(request):
                self.followers.end(request, self.num_plans)
                self.line.order.release(request)
            else:
                self.line.order.moved(request)

    # Running

    def start(self, request: Request, lease: Lease, now: float) -> None:
        """Admit a waiting request, whose prefill begins behind what was found."""
        copied = 0 if lease.copy is None else lease.copy.num_tokens
        num_matched = lease.num_matched_tokens
        is_resumed = request.state is RequestState.PREEMPTED
        request.state = RequestState.RUNNING
        request.lease = lease
        request.num_cached = request.num_computed = num_matched
        request.is_unfinished = True
        self.line.start(request)
        self.journal.waits(request, None, now)
        self.journal.started(request, self._num_awaitable, now)
        self.running.prefills[request.request_id] = request
        self._run(request)
        request.count_matched(num_matched, copied)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now
        self.outbox.put(
            RequestAdmitted(
                now=now,
                request_id=request.request_id,
                num_cached_tokens=num_matched,
                num_copied_tokens=copied,
                is_resumed=is_resumed,
            )
        )

    def fork(self, request: Request, num_samples: int, now: float) -> list[Request]:
        """Split a prefilled request; return its other samples, on the same blocks."""
        if num_samples == 1:
            return []
        children = []
        for index in range(1, num_samples):
            # Children are made here, not by a caller: '#' in their id is reserved.
            child = Request(
                replace(request.spec, num_samples=1), request.sequence_number
            )
            child.become_sample(request, index)
            child.namespace = request.namespace
            child.epoch = request.epoch
            child.lease = self.cache.fork(request.held, now)
            self._take_in(child)
            self._run(child)
            children.append(child)
        self.outbox.put(
            RequestForked(
                now=now,
                request_id=request.request_id,
                child_ids=tuple(child.request_id for child in children),
            )
        )
        return children

    def end_prefill(self, request: Request) -> None:
        """Let a prefill end: it is done, or its request stops."""
        self.line.end(request)
        request.is_unfinished = False
        del self.running.prefills[request.request_id]
        for follower in self.followers.take_of(request, self.num_plans):
            self.line.order.release(follower)

    def wake(self, request: Request) -> None:
        """End a request's coasting; nothing if it does not coast."""
        if request.is_coasting:
            self.coasting.end(request)
            self.running.wake(request)

    def stop(self, request: Request, now: float, *, is_sound: bool = True) -> None:
        """Give a request's blocks back; the published ones stay cached if sound."""
        self.wake(request)
        self.sessions.stopped(request, now)
        if request.is_unfinished:
            self.end_prefill(request)
        lease = request.held
        self.cache.release(lease, now)
        if not is_sound:
            self.cache.forget(lease, now)
        request.lease = None
        request.num_computed = 0
        self.running.remove(request)

    def preempt(
        self,
        request: Request,
        now: float,
        *,
        reason: WaitReason = WaitReason.PREEMPTED,
    ) -> None:
        """Take a running request's blocks; keep what it computed, if it may share."""
        self.outbox.put(
            RequestPreempted(
                now=now,
                request_id=request.request_id,
                num_computed_tokens=request.num_computed,
            )
        )
        self.stop(request, now)
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        request.num_steps_awaiting = 0
        self.journal.waits(request, reason, now)
        self.line.add(request)

    def take_back(self, request: Request, step: Step, now: float) -> None:
        """Preempt a request while a step is planned, with what that has for it."""
        if request.is_coasting:
            self.wake(request)
            step.budget += 1  # what was kept for it
        step.drop(request)
        self.preempt(request, now)

    # Ends

    def finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """End a running request well."""
        self.stop(request, now)
        self._end(request, RequestState.FINISHED, reason, now)

    def abort(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        *,
        is_sound: bool = True,
    ) -> None:
        """End a request, whether it waits or runs."""
        if request.state is RequestState.RUNNING:
            self.stop(request, now, is_sound=is_sound)
        else:
            self.leave_line(request)
        self._end(request, RequestState.ABORTED, reason, now)

    # Private

    def _take_in(self, request: Request) -> None:
        root = request.spec.request_id
        self._requests[request.request_id] = request
        self.journal.took_in(request)
        self._by_root.setdefault(root, {})[request.request_id] = request
        self.epochs.enter(request)

    def _run(self, request: Request) -> None:
        self.sessions.started(request)
        self.running.add(request)

    def _num_awaitable(self, request: Request) -> int:
        return self.followers.num_awaitable(request, self.running.prefills.values())

    def _end(
        self, request: Request, state: RequestState, reason: FinishReason, now: float
    ) -> None:
        request.state = state
        request.finish_reason = reason
        self.journal.ended(request, now)
        self._let_go(request, now)
        kind = RequestFinished if state is RequestState.FINISHED else RequestAborted
        self.outbox.put(
            kind(
                now=now,
                request_id=request.request_id,
                reason=reason,
                counts=request.counts,
                num_preemptions=request.num_preemptions,
            )
        )

    def _let_go(self, request: Request, now: float) -> None:
        root, hints = request.spec.request_id, request.spec.hints
        del self._requests[request.request_id]
        self.epochs.leave(request)
        samples = self._by_root[root]
        del samples[request.request_id]
        if samples:
            return
        del self._by_root[root]
        if hints.ends_session and hints.session is not None:
            self.cache.end_session(request.spec.domain, hints.session, now)
            self.sessions.ended(request.spec.domain, hints.session)
