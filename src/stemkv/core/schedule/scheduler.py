"""Iteration-level scheduling: who computes what in the next step.

Owns the requests in flight and their states. Knows the cache only through
`PrefixCache`, the order of admission only through its protocol, and neither tensors
nor text. A driver alternates `schedule` and `commit`.

One step, one budget of tokens and, if costs predict it, of time:

1. every decoding request gets its next token (oldest first);
2. the order picks who gets the next chunk of what is left, unfinished prefills and
   waiting requests alike, while budget, places and blocks last. A request whose next
   block somebody is computing right now is held until that is done.

When a decode needs a block and none is available, a running request that the order
names is preempted: what it computed is published and stays cached, and it comes back to
its place in the order. The oldest request is never preempted for another, so it always
ends, and then the next oldest: nobody waits for ever.

A driver that knows what a request will sample, a replay, may let it coast: its decodes
are planned and counted as ever, but one by one they are not spelled out, so a step costs
only what changes in it.

A rollout in place divides requests in two: `fence` makes those added from now on wait
until the driver, once the earlier ones have ended, calls `lift_fence`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush, nlargest

from stemkv.core.books.cost import CostModel, StepShape
from stemkv.core.books.ledger import Ledger
from stemkv.core.books.waits import WaitReason
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.table import BlockCopy, Lease
from stemkv.core.prefix.tokens import TOKEN_BYTES, common_prefix_bytes
from stemkv.core.retention.lookahead import Waiting
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.events import (
    Event,
    PrefixAwaited,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    RequestRestarted,
    TokenSampled,
)
from stemkv.core.schedule.order.base import Order, Pick
from stemkv.core.schedule.plan import Chunk, Sample, StepPlan, StepResult
from stemkv.core.schedule.request import (
    FinishReason,
    Request,
    RequestId,
    RequestSpec,
    RequestState,
)
from stemkv.core.schedule.service import Service
from stemkv.core.schedule.sessions import SessionConfig, SessionGate
from stemkv.errors import (
    ConfigError,
    DuplicateRequest,
    InvalidLimit,
    InvariantError,
    PromptTooLong,
)

__all__ = ["Scheduler"]

# Prefill tokens that a step takes however long it is predicted to be, so that prefills
# get on beside any number of decodes.
_LEAST_PREFILL = 64
_MOST_HOLDERS = 5  # that are named where an admission waits for memory


class Scheduler:
    """Decides each step. Deterministic: equal calls give equal plans.

    Takes over the cache's event sink; events of cache and requests come out of
    `commit` and `take_events` in the order they happened. `costs` predict how long a
    step takes, which only `step_time_s` asks for. With `sessions` only so many sessions
    run at once.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        order: Order,
        *,
        costs: CostModel | None = None,
        sessions: SessionConfig | None = None,
    ) -> None:
        if config.step_time_s is not None and costs is None:
            raise ConfigError(
                "step_time_s needs a cost model, to predict how long a step takes; "
                "give costs (`stemkv calibrate` measures them), or limit steps by "
                "token_budget alone"
            )
        self.config = config
        self.cache = cache
        self.service = Service()
        self._costs = costs
        self._order = order
        self._matches = cache.keep_matches()
        order.watch(self._matches)
        self._requests: dict[RequestId, Request] = {}
        self._running: list[Request] = []  # sorted by arrival
        self._stepping: list[Request] = []  # of those, the ones that do not coast
        self._unfinished: dict[RequestId, Request] = {}  # of those, prefills
        self._holds: dict[RequestId, _Hold] = {}
        self._followers: dict[RequestId, dict[RequestId, None]] = {}  # by leader
        self._hold_ends: list[tuple[int, int, _Hold]] = []  # heap, by plan number
        self._num_holds = 0
        self._fenced: dict[RequestId, Request] = {}
        self._sessions: SessionGate | None = None
        if sessions is not None:
            self._sessions = SessionGate(
                sessions,
                num_blocks=cache.config.num_blocks,
                block_size=cache.config.block_size,
            )
        self._coasts: dict[RequestId, _Coast] = {}
        # (first step in which it does not coast, order, since when it does, its coast):
        # one that began again may wake in the same step as it did before.
        self._wakes: list[tuple[int, tuple[float, int, int], int, _Coast]] = []
        self._coasting_context = 0  # sum of contexts in the next step
        self._coasting_tenants: dict[str, int] = {}
        self._num_committed = 0
        # The state in which admission last found that the next one has no place or no
        # memory: while it lasts, asking again gives the same.
        self._blocked_at: tuple[int, ...] | None = None
        # Samples in flight by the id that was asked for, which they all keep taken.
        self._num_in_flight: dict[RequestId, int] = {}
        self._num_added = 0
        self._num_moves = 0  # requests that started or stopped running
        self._num_fences = 0
        self._open_epoch = 0  # requests of later epochs wait for `lift_fence`
        self._num_by_epoch: dict[int, int] = {}  # samples in flight
        self._num_plans = 0
        self._pending: StepPlan | None = None
        self._events: list[Event] = []
        cache.subscribe(self._events.append)
        if config.lookahead:
            cache.watch_queue(self._first_waiting)

    # Questions

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission, preempted ones included."""
        return len(self._order)

    @property
    def has_work(self) -> bool:
        """Whether any request is in flight."""
        return bool(self._requests)

    @property
    def num_coasting(self) -> int:
        """Running requests that coast."""
        return len(self._coasts)

    @property
    def num_coasting_context(self) -> int:
        """Sum of their contexts in the next step, the new tokens included."""
        return self._coasting_context

    @property
    def pending(self) -> StepPlan | None:
        """The plan that was scheduled and not yet committed."""
        return self._pending

    def request(self, request_id: RequestId) -> Request | None:
        """Return a request in flight; `None` once it has ended.

        While it coasts, its tokens lag behind.
        """
        return self._requests.get(request_id)

    def requests(self) -> tuple[Request, ...]:
        """Return all requests in flight, in the order they were added."""
        return tuple(self._requests.values())

    def num_before(self, epoch: int) -> int:
        """Return how many samples in flight were added before this epoch began."""
        return sum(n for each, n in self._num_by_epoch.items() if each < epoch)

    def check(self, spec: RequestSpec) -> None:
        """Raise what `add` would raise now; changes nothing."""
        if spec.num_samples > self.config.max_num_running:
            raise InvalidLimit(
                f"num_samples is {spec.num_samples} but at most "
                f"{self.config.max_num_running} requests run at once; lower it or "
                f"raise max_num_running",
                field="num_samples",
            )
        if spec.request_id in self._num_in_flight:
            raise DuplicateRequest(
                f"request id {spec.request_id!r} is in flight; choose another",
                field="request_id",
            )
        self._check_size(Request(spec, self._num_added))

    # Verbs

    def add(self, spec: RequestSpec) -> Request:
        """Queue a request.

        One that can never run is refused at once: `PromptTooLong` if prompt and
        output exceed the cache or the context, `InvalidLimit` if its samples exceed
        the places, `DuplicateRequest` if its id is in flight.
        """
        self.check(spec)
        request = Request(spec, self._num_added)
        request.epoch = self._num_fences
        self._num_added += 1
        self._take_in(request)
        self._enqueue(request)
        self.service.came(request.share, spec.owner)
        return request

    def cancel(
        self,
        request_id: RequestId,
        now: float,
        *,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> bool:
        """End a request in whatever state it is; `False` if it has ended already.

        While its step is in flight, the request ends when that step is committed, as
        cancelled.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_cancelled:
            return False
        if request.state is not RequestState.RUNNING:
            self._dequeue(request)
            self._abort(request, reason, now)
        elif self._pending is not None and (
            request.is_coasting
            or any(chunk.request_id == request_id for chunk in self._pending.chunks)
        ):
            request.is_cancelled = True
        else:
            self._stop_running(request, now)
            self._abort(request, reason, now)
        return True

    def restart(
        self,
        request_id: RequestId,
        namespace: bytes | None,
        adapter: str | None,
        now: float,
        *,
        domain: Domain | None = None,
    ) -> None:
        """Let a request begin again under another namespace, as if just added.

        In its own domain, unless another is given.

        It keeps its place in the order and its id; output so far is taken back, and a
        sample that has split off stays one of its own. If it is too large for what the
        other domain may hold, it ends, as replaced. Not while a step is pending.
        """
        self._check_no_pending("restart")
        self._blocked_at = None  # it may find more, or less, under the other namespace
        request = self._requests[request_id]
        num_samples = _num_samples(request)
        self._wake(request)
        num_output = request.num_output_tokens
        if request.state is RequestState.RUNNING:
            self._stop_running(request, now)
        else:
            self._dequeue(request)
        request.start_over(
            namespace,
            adapter,
            num_samples,
            domain=request.spec.domain if domain is None else domain,
        )
        self._leave_epoch(request)
        request.epoch = self._num_fences
        self._enter_epoch(request)
        self._enqueue(request)
        request.waits.now_for(WaitReason.QUEUE, now)
        if self.cache.ledger is not None:
            self.cache.ledger.restarted(request_id)
        self._events.append(
            RequestRestarted(
                now=now, request_id=request_id, num_discarded_tokens=num_output
            )
        )
        if self._num_blocks_of(request) > self.cache.most_blocks(request.spec.domain):
            self.cancel(request_id, now, reason=FinishReason.REPLACED)

    def cut_off(self, request_id: RequestId) -> None:
        """Let a request go on by itself: it matches and publishes nothing any more."""
        self._check_no_pending("cut_off")
        request = self._requests[request_id]
        request.namespace = None
        if request.lease is not None:
            self.cache.cut_off(request.lease)
        self._match_again(request)

    def fence(self) -> int:
        """Begin a new epoch: requests added from now on wait for `lift_fence` of it."""
        self._num_fences += 1
        return self._num_fences

    def lift_fence(self, epoch: int) -> None:
        """Let the requests of an epoch start; all earlier ones must have ended."""
        if self.num_before(epoch) or epoch > self._num_fences:
            raise InvariantError(
                f"fence {epoch} lifted with {self.num_before(epoch)} samples of before "
                f"it in flight, of {self._num_fences} fences"
            )
        self._open_epoch = max(self._open_epoch, epoch)
        self._blocked_at = None
        for request in tuple(self._fenced.values()):
            if request.epoch <= self._open_epoch:
                del self._fenced[request.request_id]
                self._order.release(request)

    def retire(self, namespace: bytes, now: float) -> int:
        """Fence a namespace in the cache, for requests in flight as well.

        They go on with the blocks they hold, match and publish nothing any more, also
        after a preemption. Returns how many blocks remain until they end.
        """
        self._check_no_pending("retire")
        for request in self._requests.values():
            if request.namespace == namespace:
                request.namespace = None
                self._match_again(request)
        return self.cache.retire(namespace, now)

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step; it may be empty when everybody waits or nobody is.

        The plan must be committed (or abandoned) before the next one.
        """
        if self._pending is not None:
            raise InvariantError(
                f"step {self._pending.step} is neither committed nor abandoned"
            )
        while self._wakes and self._wakes[0][0] <= self._num_plans:
            coast = heappop(self._wakes)[-1]
            if self._is_live(coast):
                self._wake(coast.request)
        self._end_holds()
        self._open_gate(now)
        step = _Step(self.config.token_budget - len(self._coasts))
        for request in tuple(self._stepping):
            # An older one may have taken its blocks.
            if request.state is RequestState.RUNNING and not request.is_unfinished:
                self._schedule_decode(request, step, now)
        decodes = self._decodes(step)
        if self.config.step_time_s is not None:
            self._predict(step)
        self._order.begin(now, admits=not step.has_preempted)
        self._fill(step, now)
        self._note_pauses(step, now)
        for tenant, num_tokens in decodes.items():
            self._order.decoded(tenant, num_tokens)
            self.service.decoded(tenant, num_tokens)
        self._pending = StepPlan(
            step=self._num_plans,
            now=now,
            copies=tuple(step.copies),
            chunks=tuple(step.chunks),
            num_coasting=len(self._coasts),
            num_coasting_context=self._coasting_context,
        )
        self._num_plans += 1
        return self._pending

    def commit(
        self, plan: StepPlan, result: StepResult, now: float
    ) -> tuple[Event, ...]:
        """Apply the result of the pending plan; return what happened since the last.

        Whole blocks computed by it become matchable now, not before.
        """
        self._take_pending(plan)
        self._num_committed += 1
        self._coasting_context += plan.num_coasting
        cancelled = [
            coast.request
            for coast in self._coasts.values()
            if coast.request.is_cancelled
        ]
        for each in self._in_order(plan, cancelled):
            if isinstance(each, Chunk):
                self._commit_chunk(each, result, now)
            else:
                self._stop_running(each, now)
                self._abort(each, FinishReason.CANCELLED, now)
        return self.take_events()

    def coast(self, request_id: RequestId, tokens: bytes) -> int:
        """Tell ahead what a decoding request will sample; return how many tokens.

        `tokens` are int32 little-endian. From the next step on the request decodes
        them, one a step, without being spelled out in plans and without events, up to
        the step before anything else happens to it: it fills its block, or samples the
        last of `max_new_tokens`. Then it is in plans again and the driver samples.
        What is scheduled is the same as without; only the driver's and the scheduler's
        own work is less. 0: it cannot coast now. Not while a step is pending.
        """
        self._check_no_pending("coast")
        request = self._requests.get(request_id)
        if (
            request is None
            or request.state is not RequestState.RUNNING
            or request.is_prefilling
            or request.is_coasting
            or request.spec.num_samples > 1
        ):
            return 0
        num_slots = len(_lease_of(request).table) * self.cache.config.block_size
        num_steps = min(
            len(tokens) // TOKEN_BYTES,
            num_slots - request.num_computed - 1,
            request.spec.max_new_tokens - request.num_output_tokens - 1,
        )
        if num_steps <= 0:
            return 0
        coast = _Coast(request, tokens[: num_steps * TOKEN_BYTES], self._num_committed)
        request.is_coasting = True
        self._coasts[request_id] = coast
        self._coasting_context += request.num_tokens
        owner = request.spec.owner
        self._coasting_tenants[owner] = self._coasting_tenants.get(owner, 0) + 1
        self._stepping.remove(request)
        wakes_at = self._num_plans + num_steps
        heappush(self._wakes, (wakes_at, request.order_key, coast.since, coast))
        return num_steps

    def abandon(self, plan: StepPlan, now: float) -> tuple[Event, ...]:
        """Give up the pending plan after a failed forward pass.

        Its requests are aborted and nothing it should have computed is published;
        blocks published by earlier steps stay. All other requests go on.
        """
        self._take_pending(plan)
        coasting = [coast.request for coast in self._coasts.values()]
        for each in self._in_order(plan, coasting):
            request = (
                self._requests[each.request_id] if isinstance(each, Chunk) else each
            )
            self._stop_running(request, now)
            is_cancelled = request.is_cancelled
            reason = FinishReason.CANCELLED if is_cancelled else FinishReason.FAILED
            self._abort(request, reason, now)
        return self.take_events()

    @property
    def num_quiet_steps(self) -> int:
        """For how many steps from now on nothing happens but coasting.

        0 if anybody runs without coasting, or waits and might be admitted.
        """
        if self._stepping or self._pending is not None:
            return 0
        if len(self._order) and (
            self._blocked_at is None or self._blocked_at != self._admission_state()
        ):
            return 0
        while self._wakes and not self._is_live(self._wakes[0][-1]):
            heappop(self._wakes)
        return self._wakes[0][0] - self._num_plans if self._wakes else 0

    def _admission_state(self) -> tuple[int, ...] | None:
        """What admission depends on besides time; `None` if it depends on that too."""
        if not self._order.is_timeless:
            return None
        cache = self.cache
        return (
            self._num_added,
            len(self._order),
            self._num_moves,
            cache.num_available_blocks,
            cache.num_lendable_blocks,
            cache.tree.num_nodes,
            cache.tree.num_blocks,  # a match can be longer where a node has grown
        )

    def skip(self, num_steps: int) -> None:
        """Schedule and commit so many of the quiet steps at once.

        The driver knows what they are: one token for each request that coasts.
        """
        if not 0 < num_steps <= self.num_quiet_steps:
            raise InvariantError(
                f"skip of {num_steps} steps, {self.num_quiet_steps} are quiet"
            )
        self._num_plans += num_steps
        self._num_committed += num_steps
        self._coasting_context += num_steps * len(self._coasts)
        for tenant, num in self._coasting_tenants.items():
            self._order.decoded(tenant, num * num_steps)
            self.service.decoded(tenant, num * num_steps)

    def take_events(self) -> tuple[Event, ...]:
        """Return and forget what happened since the last call."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def _in_order(
        self, plan: StepPlan, coasting: list[Request]
    ) -> Sequence[Chunk | Request]:
        """Put coasting requests where their decodes would stand among the chunks."""
        if not coasting:
            return plan.chunks
        coasting.sort(key=_order_key, reverse=True)
        merged: list[Chunk | Request] = []
        for chunk in plan.chunks:
            request = self._requests[chunk.request_id]
            while coasting and (
                request.is_unfinished or coasting[-1].order_key < request.order_key
            ):
                merged.append(coasting.pop())
            merged.append(chunk)
        return [*merged, *reversed(coasting)]

    # One step

    def _schedule_decode(self, request: Request, step: _Step, now: float) -> None:
        if not self._make_writable(request, step, now):
            return  # it preempted itself
        self._plan_chunk(request, request.num_tokens, step)

    def _fill(self, step: _Step, now: float) -> None:
        """Give what is left of a step to whom the order picks, one after another."""
        self._blocked_at = None
        self._follow_moves()
        while step.budget > 0 and not step.is_full:
            pick = self._order.pick()
            if pick is None:
                return
            if pick.request.state is RequestState.RUNNING:
                self._schedule_chunk(pick, step, now)
            elif self._try_to_start(pick, step, now):
                self._schedule_chunk(pick, step, now)
                self._follow_moves()  # what it evicted others may have matched

    def _schedule_chunk(self, pick: Pick, step: _Step, now: float) -> None:
        """Plan as much of an unfinished prefill as pick and step allow."""
        request = pick.request
        if not self._make_writable(request, step, now):
            return
        start = step.end_of(request)
        num_left = request.num_tokens - start
        num_wanted = min(num_left, step.budget)
        if pick.most_tokens is not None:
            num_wanted = min(num_wanted, pick.most_tokens)
        num_tokens = self._num_in_time(start, num_wanted, step)
        if num_tokens < num_wanted:
            step.is_full = True
        if num_tokens == 0:
            return
        self._plan_chunk(request, start + num_tokens, step)
        self._order.ran(pick, num_tokens, is_last=num_tokens == num_left)

    def _num_in_time(self, start: int, num_wanted: int, step: _Step) -> int:
        """Return how many tokens from `start` on the step has time for."""
        limit, shape = self.config.step_time_s, step.shape
        if limit is None or shape is None:
            return num_wanted
        # Predicted times grow with every token, so halving finds the most that fit.
        low, high = 0, num_wanted + 1
        tried = num_wanted
        while high - low > 1:
            if self._seconds_with(shape, start, start + tried) <= limit:
                low = tried
            else:
                high = tried
            tried = (low + high) // 2
        return min(num_wanted, max(low, _LEAST_PREFILL - step.num_prefill_tokens))

    def _seconds_with(self, shape: StepShape, start: int, end: int) -> float:
        assert self._costs is not None, "checked when the scheduler was made"
        longer = replace(shape)
        longer.add_chunk(start, end, is_decode=False)
        return self._costs.step_seconds(longer)

    def _predict(self, step: _Step) -> None:
        """Begin to count what the step takes, with the decodes that it has."""
        shape = StepShape(
            num_decodes=len(self._coasts),
            num_decode_context=self._coasting_context,
            num_copied_tokens=sum(copy.num_tokens for copy in step.copies),
        )
        for chunk in step.chunks:
            shape.add_chunk(chunk.start, chunk.end, is_decode=True)
        step.shape = shape

    def _decodes(self, step: _Step) -> dict[str, int]:
        """Return how many tokens each tenant decodes in a step with decodes only."""
        decodes = dict(self._coasting_tenants)
        for chunk in step.chunks:
            owner = self._requests[chunk.request_id].spec.owner
            decodes[owner] = decodes.get(owner, 0) + 1
        return decodes

    def _note_pauses(self, step: _Step, now: float) -> None:
        for request_id, request in self._unfinished.items():
            is_paused = request_id not in step.places
            request.waits.now_for(WaitReason.PAUSED if is_paused else None, now)

    def _plan_chunk(self, request: Request, end: int, step: _Step) -> None:
        lease = _lease_of(request)
        start = request.num_computed
        planned = step.end_of(request)
        if end <= planned:
            raise InvariantError(f"request {request.request_id} has nothing to compute")
        num_samples = _num_samples(request) if end == request.num_tokens else 0
        step.add(
            Chunk(
                request_id=request.request_id,
                start=start,
                end=end,
                tokens=request.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES],
                block_ids=lease.table.snapshot(),
                num_samples=num_samples,
                adapter=request.spec.adapter,
                start_position=request.spec.start_position,
            ),
            is_prefill=request.is_unfinished,
        )

    def _make_writable(self, request: Request, step: _Step, now: float) -> bool:
        """Give the request private slots for all its tokens, preempting if need be.

        Returns `False` if the request itself had to yield.
        """
        lease = _lease_of(request)
        while True:
            if self.cache.grow(lease, request.num_tokens, now):
                is_ready, copy = self.cache.prepare_write(
                    lease, request.num_computed, now
                )
                if is_ready:
                    if copy is not None:
                        step.copies.append(copy)
                    return True
            victim = self._order.victim(self._running)
            self._yield(victim, step, now)
            step.has_preempted = True
            if victim is request:
                return False

    def _yield(self, victim: Request, step: _Step, now: float) -> None:
        """Preempt a request, and take back what the step has planned for it."""
        if victim.is_coasting:
            self._wake(victim)
            step.budget += 1  # what was kept for it
        step.drop(victim)
        self._preempt(victim, now)

    def _preempt(self, request: Request, now: float) -> None:
        """Take a running request's blocks; keep what it computed, if it may share."""
        self._events.append(
            RequestPreempted(
                now=now,
                request_id=request.request_id,
                num_computed_tokens=request.num_computed,
            )
        )
        self._stop_running(request, now)
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        request.num_steps_awaiting = 0
        request.waits.now_for(WaitReason.PREEMPTED, now)
        self._enqueue(request)

    # Admission

    def _first_waiting(self, now: float) -> Iterator[Waiting]:
        """Yield what the first waiting requests will look up, for eviction to know."""
        for request in self._order.first(self.config.lookahead, now):
            yield Waiting(request.namespace, request.spec.domain, request.tokens)

    def _try_to_start(self, pick: Pick, step: _Step, now: float) -> bool:
        """Start a waiting request if nothing is against it; hear from the order if so."""
        request = pick.request
        if request.epoch > self._open_epoch:
            # What it shall run on is not in place yet.
            self._fenced[request.request_id] = request
            self._order.hold(request, None)
            request.waits.now_for(WaitReason.ROLLOUT, now)
            return False
        if self._sessions is not None and not self._sessions.admits(
            request, now, is_alone=not self._running and not step.chunks
        ):
            self._sessions.hold(request)
            self._order.hold(request, None)
            request.waits.now_for(WaitReason.SESSION, now)
            return False
        if len(self._running) >= self.config.max_num_running:
            self._cannot_start(pick, WaitReason.PLACES, step, now)
            return False
        if self._hold_for_leader(request, now):
            return False
        if self._num_in_time(request.num_ready, 1, step) == 0:
            step.is_full = True
            return False
        lease = self.cache.acquire(
            request.namespace,
            request.spec.domain,
            request.tokens,
            num_slots=request.num_tokens,
            num_spare=self._num_spare_blocks(),
            num_retained=self._num_retained_least(),
            spares_floor=self._spares_floor(request.spec.domain),
            owner=request.spec.owner,
            hints=request.spec.hints,
            now=now,
        )
        if lease is None:
            self._book_stall(request, now)
            self._cannot_start(pick, WaitReason.MEMORY, step, now)
            return False
        self._start(request, lease, step, now)
        return True

    def _cannot_start(
        self, pick: Pick, reason: WaitReason, step: _Step, now: float
    ) -> None:
        pick.request.waits.now_for(reason, now)
        if not self._order.cannot_start(pick):
            return
        victim = self._order.yields_to(pick, self._running)
        if victim is not None:
            self._yield(victim, step, now)
        elif not self._holds and self._sessions is None:
            # Who is held may go on for reasons that are no part of this state.
            self._blocked_at = self._admission_state()

    def _start(self, request: Request, lease: Lease, step: _Step, now: float) -> None:
        copied = 0
        if lease.copy is not None:
            copied = lease.copy.num_tokens
            step.copies.append(lease.copy)
        is_resumed = request.state is RequestState.PREEMPTED
        self._matches.remove(request.request_id)
        request.state = RequestState.RUNNING
        request.lease = lease
        request.num_cached = request.num_computed = lease.num_matched_tokens
        request.is_unfinished = True
        self._unfinished[request.request_id] = request
        self._order.start(request)
        self._count_backlog(request)
        request.waits.now_for(None, now)
        if self.cache.ledger is not None:
            self._book_lookup(self.cache.ledger, request, lease, now)
        self._run(request)
        _count_matched(request, lease.num_matched_tokens, copied)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now
        self._events.append(
            RequestAdmitted(
                now=now,
                request_id=request.request_id,
                num_cached_tokens=lease.num_matched_tokens,
                num_copied_tokens=copied,
                is_resumed=is_resumed,
            )
        )

    def _book_lookup(
        self, ledger: Ledger, request: Request, lease: Lease, now: float
    ) -> None:
        path = [] if lease.node is None else lease.node.path()
        copied = None
        if lease.copy is not None and lease.copy_source is not None:
            copied = (lease.copy_source, lease.copy.num_tokens)
        # It was preempted; a sample that begins again has no books of its own either.
        if ledger.entry(request.request_id) is not None or request.sample:
            ledger.resumed(
                request.request_id,
                path=path,
                copied=copied,
                num_known=request.num_counted,
                now=now,
            )
            return
        ledger.admitted(
            request.request_id,
            tenant=request.spec.owner,
            domain=request.spec.domain,
            namespace=request.namespace,
            prompt=request.spec.prompt.buffer,
            path=path,
            copied=copied,
            num_awaitable=self._num_awaitable(request),
            arrival_s=request.spec.arrival_s,
            now=now,
        )

    def _num_awaitable(self, request: Request) -> int:
        """Return up to where a running prefill computes the request's own tokens."""
        if request.namespace is None:
            return 0
        longest = 0
        for leader in self._stepping:
            if leader.namespace != request.namespace or not leader.is_prefilling:
                continue
            lease = _lease_of(leader)
            domain = self.cache.domain_of_next(lease, lease.num_published_blocks)
            limit = min(len(leader.tokens), len(request.tokens))
            if domain is None:
                continue
            if leader.spec.domain != request.spec.domain:
                if domain != PUBLIC:
                    continue
                size = self.cache.config.block_size * TOKEN_BYTES
                limit = min(limit, lease.num_public_blocks * size)
            if limit > longest:
                same = common_prefix_bytes(leader.tokens, 0, request.tokens, 0, limit)
                longest = max(longest, same)
        return longest // TOKEN_BYTES

    def _book_stall(self, request: Request, now: float) -> None:
        ledger = self.cache.ledger
        if ledger is None or ledger.is_stalled(request.request_id):
            return
        cache = self.cache
        ledger.stalled(
            request.request_id,
            tenant=request.spec.owner,
            num_missing=cache.num_missing_blocks(
                request.namespace,
                request.spec.domain,
                request.tokens,
                num_slots=request.num_tokens,
                num_spare=self._num_spare_blocks(),
                num_retained=self._num_retained_least(),
                spares_floor=self._spares_floor(request.spec.domain),
            ),
            num_active=cache.num_active_blocks,
            num_shared=cache.tree.num_pinned_blocks,
            num_cached=cache.tree.num_unpinned_blocks,
            holders=self._largest_holders(),
            now=now,
        )

    def _largest_holders(self) -> tuple[tuple[str, int], ...]:
        """Return the running requests that hold most, and their blocks."""
        largest = nlargest(
            _MOST_HOLDERS,
            self._running,
            key=lambda request: len(_lease_of(request).table),
        )
        return tuple((each.request_id, len(_lease_of(each).table)) for each in largest)

    # Holding those whose prefix is being computed

    def _hold_for_leader(self, request: Request, now: float) -> bool:
        """Hold a request for a block that an unfinished prefill will publish.

        Until all that the two share is published, the prefill ends, or
        `max_steps_awaiting` steps are over.
        """
        num_steps_left = self.config.max_steps_awaiting - request.num_steps_awaiting
        if request.namespace is None or num_steps_left <= 0:
            return False
        # The first block that is missing, if a whole block of it may be matched.
        size = self.cache.config.block_size
        index = request.num_cached // size
        end = (index + 1) * size
        if end > request.num_tokens - 1:
            return False
        begin = index * size * TOKEN_BYTES
        block = request.tokens[begin : end * TOKEN_BYTES]
        for leader in self._unfinished.values():
            # Most differ in that one block already.
            if leader.tokens.startswith(block, begin) and self._will_publish(
                leader, request, index, end
            ):
                break
        else:
            return False
        hold = _Hold(
            request,
            leader,
            num_tokens=self._num_to_share(leader, request) // size * size,
            since=self._num_plans,
        )
        self._holds[request.request_id] = hold
        followers = self._followers.setdefault(leader.request_id, {})
        followers[request.request_id] = None
        self._num_holds += 1
        heappush(
            self._hold_ends, (self._num_plans + num_steps_left, self._num_holds, hold)
        )
        self._order.hold(request, leader)
        request.waits.now_for(WaitReason.PREFIX, now)
        if request.num_steps_awaiting == 0:
            self._events.append(PrefixAwaited(now=now, request_id=request.request_id))
        return True

    def _will_publish(
        self, leader: Request, follower: Request, index: int, end: int
    ) -> bool:
        """Whether a prefill will publish the block before `end` where we can see it."""
        return (
            leader.namespace == follower.namespace
            and leader.num_tokens >= end
            and _lease_of(leader).num_published_blocks <= index
            and self.cache.domain_of_next(_lease_of(leader), index)
            in (PUBLIC, follower.spec.domain)
            and leader.tokens.startswith(follower.tokens[: end * TOKEN_BYTES])
        )

    def _num_to_share(self, leader: Request, follower: Request) -> int:
        """Return how many leading tokens a prefill computes for another to see."""
        limit = min(len(leader.tokens), len(follower.tokens))
        if leader.spec.domain != follower.spec.domain:
            lease = _lease_of(leader)
            size = self.cache.config.block_size * TOKEN_BYTES
            limit = min(limit, lease.num_public_blocks * size)
        same = common_prefix_bytes(leader.tokens, 0, follower.tokens, 0, limit)
        return same // TOKEN_BYTES

    def _end_hold(self, request_id: RequestId) -> None:
        """Let a held request be picked again."""
        hold = self._forget_hold(request_id)
        hold.request.num_steps_awaiting += max(1, self._num_plans - hold.since)
        self._order.release(hold.request)

    def _forget_hold(self, request_id: RequestId) -> _Hold:
        hold = self._holds.pop(request_id)
        followers = self._followers[hold.leader.request_id]
        del followers[request_id]
        if not followers:
            del self._followers[hold.leader.request_id]
        return hold

    def _end_holds(self) -> None:
        """End the holds that have lasted as long as they may."""
        while self._hold_ends and self._hold_ends[0][0] <= self._num_plans:
            hold = heappop(self._hold_ends)[-1]
            if self._holds.get(hold.request.request_id) is hold:
                self._end_hold(hold.request.request_id)

    def _open_gate(self, now: float) -> None:
        """Let go on whose session has become active."""
        if self._sessions is None or not len(self._sessions):
            return
        for request in self._sessions.due(now, is_alone=not self._running):
            self._sessions.forget(request)
            self._order.release(request)
            request.waits.now_for(WaitReason.QUEUE, now)

    # The queue

    def _enqueue(self, request: Request) -> None:
        """Let a request wait, new, preempted or begun again."""
        self._matches.add(
            request.request_id, request.namespace, request.spec.domain, request.tokens
        )
        self._read_match(request)
        self._order.add(request)
        self._count_backlog(request)

    def _dequeue(self, request: Request) -> None:
        """Take a request out that waits."""
        if request.request_id in self._holds:
            self._forget_hold(request.request_id)
        self._fenced.pop(request.request_id, None)
        if self._sessions is not None:
            self._sessions.forget(request)
        self._order.remove(request)
        self._matches.remove(request.request_id)
        self.service.wants_no_more(request.request_id)

    def _match_again(self, request: Request) -> None:
        """Follow a request that may share less than before."""
        if request.state is RequestState.RUNNING:
            return
        self._matches.remove(request.request_id)
        self._matches.add(
            request.request_id, request.namespace, request.spec.domain, request.tokens
        )
        self._read_match(request)
        self._order.moved(request)
        self._count_backlog(request)

    def _follow_moves(self) -> None:
        """Rank anew whose cached part has changed."""
        for request_id in self._matches.take_moved():
            request = self._requests[request_id]
            self._read_match(request)
            self._count_backlog(request)
            hold = self._holds.get(request_id)
            if hold is not None and request.num_cached >= hold.num_tokens:
                self._end_hold(request_id)
            else:
                self._order.moved(request)

    def _read_match(self, request: Request) -> None:
        size, matches = self.cache.config.block_size, self._matches
        request.num_cached = matches.num_blocks(request.request_id) * size
        request.num_public = matches.num_public_blocks(request.request_id) * size

    def _count_backlog(self, request: Request) -> None:
        num_left = request.num_tokens - request.num_ready
        self.service.wants(request.request_id, request.spec.owner, num_left)

    def _end_prefill(self, request: Request) -> None:
        """Take a prefill off the order's hands: it is done, or its request stops."""
        self._order.remove(request)
        self.service.wants_no_more(request.request_id)
        request.is_unfinished = False
        del self._unfinished[request.request_id]
        for follower in tuple(self._followers.get(request.request_id, ())):
            self._end_hold(follower)

    # Memory

    def _num_retained_least(self) -> int:
        """Retained blocks that admission leaves; none if nobody else runs."""
        return self.config.retained_floor_blocks if self._running else 0

    def _spares_floor(self, domain: Domain) -> bool:
        """Whether admission leaves what a domain has retained up to its floor.

        Else the running requests of others, whose blocks cannot be evicted, would
        squeeze it out of its floor. They end, and then there is room; beside requests
        of its own it may use everything.
        """
        return any(each.spec.domain != domain for each in self._running)

    def _num_spare_blocks(self) -> int:
        """Blocks that admission leaves, so that running requests can grow a while."""
        if not self._running:
            return 0  # alone, a request may use everything
        return max(1, int(self.config.watermark * self.cache.pool.num_total))

    # Results

    def _commit_chunk(self, chunk: Chunk, result: StepResult, now: float) -> None:
        request = self._requests[chunk.request_id]
        lease = _lease_of(request)
        self.cache.copied(lease, now)
        _count_computed(request, chunk.start, chunk.end)
        request.num_computed = chunk.end
        if request.is_unfinished:
            self.service.prefilled(request.spec.owner, chunk.num_tokens)
            self._count_backlog(request)
        samples = result.samples.get(chunk.request_id, ())
        if not samples or any(s.stop is not FinishReason.FAILED for s in samples):
            # KV from which no sound logits followed must not be handed on.
            num_added = self.cache.publish(
                lease, request.tokens, request.num_computed, now
            )
            if num_added and self.cache.ledger is not None:
                self.cache.ledger.left_blocks(request.request_id, num_added)
        if request.is_cancelled:
            self._stop_running(request, now)
            self._abort(request, FinishReason.CANCELLED, now)
            return
        if request.is_unfinished:
            if chunk.end == request.num_tokens:
                self._end_prefill(request)
            else:
                self._order.moved(request)
        if chunk.num_samples == 0:
            return
        if len(samples) != chunk.num_samples:
            raise InvariantError(
                f"step {self._num_plans - 1} needs {chunk.num_samples} samples of "
                f"request {chunk.request_id}, got {len(samples)}"
            )
        heirs = [request, *self._fork(request, chunk.num_samples, now)]
        for heir, sample in zip(heirs, samples, strict=True):
            self._take_sample(heir, sample, now)
        self._leave_places(heirs, now)

    def _leave_places(self, heirs: list[Request], now: float) -> None:
        """Let samples wait that found no place: only one was asked for them all.

        They have their first token, and what led to it stays cached if it may.
        """
        for sample in reversed(heirs[1:]):
            if len(self._running) <= self.config.max_num_running:
                return
            if sample.state is RequestState.RUNNING:
                self._preempt(sample, now)
                sample.waits.now_for(WaitReason.PLACES, now)

    def _fork(self, request: Request, num_samples: int, now: float) -> list[Request]:
        """Split a prefilled request into its samples, which share all its blocks."""
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
            child.lease = self.cache.fork(_lease_of(request), now)
            self._take_in(child)
            self._run(child)
            children.append(child)
        self._events.append(
            RequestForked(
                now=now,
                request_id=request.request_id,
                child_ids=tuple(child.request_id for child in children),
            )
        )
        return children

    def _take_sample(self, request: Request, sample: Sample, now: float) -> None:
        if sample.stop is FinishReason.FAILED:
            # There is no token: the driver could not sample one. What led to it must
            # not be handed on either.
            self._stop_running(request, now, is_sound=False)
            self._abort(request, FinishReason.FAILED, now)
            return
        request.append(sample.token)
        if request.share.run is None and request.sample == 0:
            self.service.began(request.share, request.spec.owner)
        self._events.append(
            TokenSampled(
                now=now,
                request_id=request.request_id,
                token=sample.token,
                index=request.num_output_tokens - 1,
            )
        )
        reason = sample.stop
        if reason is None and request.num_output_tokens >= request.spec.max_new_tokens:
            reason = FinishReason.LENGTH
        if reason is None:
            return
        self._stop_running(request, now)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        self._let_go(request, now)
        self._events.append(
            RequestFinished(
                now=now,
                request_id=request.request_id,
                reason=reason,
                counts=request.counts,
                num_preemptions=request.num_preemptions,
            )
        )

    # Ends

    def _stop_running(
        self, request: Request, now: float, *, is_sound: bool = True
    ) -> None:
        """Give the request's blocks back; the published ones stay cached if sound."""
        self._wake(request)
        self._num_moves += 1
        if self._sessions is not None:
            self._sessions.stopped(request, now)
        if request.is_unfinished:
            self._end_prefill(request)
        lease = _lease_of(request)
        self.cache.release(lease, now)
        if not is_sound:
            self.cache.forget(lease, now)
        request.lease = None
        request.num_computed = 0
        for requests in (self._running, self._stepping):
            index = bisect_left(requests, request.order_key, key=_order_key)
            if requests[index] is not request:
                raise InvariantError(f"request {request.request_id} is not running")
            del requests[index]

    def _run(self, request: Request) -> None:
        if self._sessions is not None:
            self._sessions.started(request)
        self._num_moves += 1
        insort(self._running, request, key=_order_key)
        insort(self._stepping, request, key=_order_key)

    def _is_live(self, coast: _Coast) -> bool:
        """Whether its request still coasts on it; it may have been woken early."""
        return self._coasts.get(coast.request.request_id) is coast

    def _wake(self, request: Request) -> None:
        """End a request's coasting and bring it up to date; nothing if it does not."""
        coast = self._coasts.pop(request.request_id, None)
        if coast is None:
            return
        num_steps = self._num_committed - coast.since
        self._coasting_context -= request.num_tokens + num_steps
        owner = request.spec.owner
        self._coasting_tenants[owner] -= 1
        if not self._coasting_tenants[owner]:
            del self._coasting_tenants[owner]
        _count_computed(request, request.num_computed, request.num_computed + num_steps)
        request.num_computed += num_steps
        request.extend(coast.tokens[: num_steps * TOKEN_BYTES])
        request.is_coasting = False
        insort(self._stepping, request, key=_order_key)

    def _abort(self, request: Request, reason: FinishReason, now: float) -> None:
        request.state = RequestState.ABORTED
        request.finish_reason = reason
        self._let_go(request, now)
        self._events.append(
            RequestAborted(
                now=now,
                request_id=request.request_id,
                reason=reason,
                counts=request.counts,
                num_preemptions=request.num_preemptions,
            )
        )

    def _take_in(self, request: Request) -> None:
        root = request.spec.request_id
        self._requests[request.request_id] = request
        self._num_in_flight[root] = self._num_in_flight.get(root, 0) + 1
        self._enter_epoch(request)

    def _let_go(self, request: Request, now: float) -> None:
        root = request.spec.request_id
        request.waits.now_for(None, now)
        if self.cache.ledger is not None:
            self._book_end(self.cache.ledger, request, now)
        del self._requests[request.request_id]
        self._leave_epoch(request)
        self._num_in_flight[root] -= 1
        if self._num_in_flight[root] == 0:
            del self._num_in_flight[root]
            hints = request.spec.hints
            if hints.ends_session and hints.session is not None:
                self.cache.end_session(request.spec.domain, hints.session, now)
                if self._sessions is not None:
                    self._sessions.ended(request.spec.domain, hints.session)

    def _book_end(self, ledger: Ledger, request: Request, now: float) -> None:
        counts = request.counts
        assert request.finish_reason is not None, "it has just ended"
        ledger.ended(
            request.request_id,
            reason=request.finish_reason.value,
            num_reused=counts.reused,
            num_computed=counts.computed,
            num_recomputed=counts.recomputed,
            num_output=request.num_output_tokens,
            num_preemptions=request.num_preemptions,
            share=request.share,
            waits=request.waits,
            now=now,
        )

    def _enter_epoch(self, request: Request) -> None:
        self._num_by_epoch[request.epoch] = self._num_by_epoch.get(request.epoch, 0) + 1

    def _leave_epoch(self, request: Request) -> None:
        self._num_by_epoch[request.epoch] -= 1
        if self._num_by_epoch[request.epoch] == 0:
            del self._num_by_epoch[request.epoch]

    def _check_no_pending(self, verb: str) -> None:
        if self._pending is not None:
            raise InvariantError(f"{verb} while step {self._pending.step} is pending")

    def _take_pending(self, plan: StepPlan) -> None:
        if self._pending is None or plan.step != self._pending.step:
            expected = "none" if self._pending is None else self._pending.step
            raise InvariantError(f"step {plan.step} is not the pending one: {expected}")
        self._pending = None

    def _num_blocks_of(self, request: Request) -> int:
        """Return how many blocks the request holds in the end."""
        return self.cache.num_blocks_for(request.max_tokens)

    def _check_size(self, request: Request) -> None:
        """Refuse what could never run, with the numbers."""
        num_prompt, num_new = request.num_prompt_tokens, request.spec.max_new_tokens
        start = request.spec.start_position
        limit = self.config.max_request_tokens
        if limit is not None and start + num_prompt + num_new > limit:
            offset = f"start_position {start} + " if start else ""
            raise PromptTooLong(
                f"{offset}{num_prompt} prompt tokens + max_new_tokens {num_new} exceed "
                f"the context of {limit} tokens; shorten the prompt by "
                f"{start + num_prompt + num_new - limit} tokens or lower "
                f"max_new_tokens",
                field="prompt",
            )
        num_blocks = self._num_blocks_of(request)
        total = self.cache.pool.num_total
        most = self.cache.most_blocks(request.spec.domain)
        if num_blocks > most:
            others = f" less {total - most} promised to others" if most < total else ""
            raise PromptTooLong(
                f"{num_prompt} prompt tokens + max_new_tokens {num_new} need "
                f"{num_blocks} blocks but the cache has {total}{others}; raise "
                f"num_blocks, shorten the prompt or lower max_new_tokens",
                field="prompt",
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Coast:
    """What a coasting request will sample, and since which step it does."""

    request: Request
    tokens: bytes  # int32 little-endian, one a step
    since: int  # steps committed when it began


@dataclass(frozen=True, slots=True, eq=False)
class _Hold:
    """A request that waits for another's prefill."""

    request: Request
    leader: Request
    num_tokens: int  # whole blocks of them are computed for both
    since: int  # number of the plan


class _Step:
    """A plan in the making."""

    __slots__ = (
        "budget",
        "chunks",
        "copies",
        "has_preempted",
        "is_full",
        "num_prefill_tokens",
        "places",
        "shape",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: list[Chunk] = []
        self.places: dict[RequestId, int] = {}  # which chunk is whose
        self.copies: list[BlockCopy] = []
        self.has_preempted = False  # then nobody is admitted: blocks are short
        self.is_full = False  # of time
        self.num_prefill_tokens = 0
        self.shape: StepShape | None = None  # of all that is planned; None: untimed

    def end_of(self, request: Request) -> int:
        """Return up to where a request is computed once this step is done."""
        place = self.places.get(request.request_id)
        return request.num_computed if place is None else self.chunks[place].end

    def add(self, chunk: Chunk, *, is_prefill: bool) -> None:
        """Plan a chunk, or more of one that is planned."""
        place = self.places.get(chunk.request_id)
        start = chunk.start
        if place is None:
            self.places[chunk.request_id] = len(self.chunks)
            self.chunks.append(chunk)
        else:
            start = self.chunks[place].end
            self.chunks[place] = chunk
        self.budget -= chunk.end - start
        if is_prefill:
            self.num_prefill_tokens += chunk.end - start
        if self.shape is not None:
            self.shape.add_chunk(start, chunk.end, is_decode=not is_prefill)
            if place is not None:  # it is one chunk all the same
                self.shape.num_prefills -= 1
                self.shape.num_prefill_context -= start

    def drop(self, request: Request) -> None:
        """Take back what is planned for a request that loses its blocks."""
        place = self.places.pop(request.request_id, None)
        if place is None:
            return
        self.budget += self.chunks.pop(place).num_tokens
        for other, at in self.places.items():
            if at > place:
                self.places[other] = at - 1
        own = set(_lease_of(request).table.ids())
        self.copies = [copy for copy in self.copies if copy.target not in own]


def _lease_of(request: Request) -> Lease:
    if request.lease is None:
        raise InvariantError(f"request {request.request_id} holds no lease")
    return request.lease


def _num_samples(request: Request) -> int:
    """How many requests this one is, or will be once it forks."""
    if request.num_output_tokens or request.sample:
        return 1
    return request.spec.num_samples


def _order_key(request: Request) -> tuple[float, int, int]:
    return request.order_key


def _count_matched(request: Request, num_matched: int, num_copied: int) -> None:
    """Count prompt tokens that need no first computation, each at most once."""
    num_prompt = request.num_prompt_tokens
    gained = min(num_matched, num_prompt) - min(request.num_counted, num_prompt)
    if gained > 0:
        request.counts.reused += gained
        request.counts.copied += min(gained, num_copied)
    request.num_counted = max(request.num_counted, num_matched)


def _count_computed(request: Request, start: int, end: int) -> None:
    """Count computed tokens; those counted before were lost to a preemption."""
    fresh = max(start, request.num_counted)
    request.counts.computed += max(0, min(end, request.num_prompt_tokens) - fresh)
    request.counts.recomputed += min(end, fresh) - start
    request.num_counted = max(request.num_counted, end)
