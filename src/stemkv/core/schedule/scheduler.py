"""Iteration-level scheduling: who computes what in the next step.

Owns the beat: a driver alternates `schedule` and `commit`, and events tell what
happened. Knows the cache only through `PrefixCache`, the order of admission only
through its protocol, and neither tensors nor text. What happens in a beat is said by
the nouns it is made of: `Planner` fills a step, `Admission` says who may start,
`Results` applies what came of it, `Lives` moves requests from state to state.

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

import math
from typing import Any

from stemkv.core.books.cost import CostModel
from stemkv.core.books.ledger import Ledger
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.door import (
    check_domain,
    check_now,
    token_buffer,
)
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.schedule.admission import Admission
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.events import Event
from stemkv.core.schedule.lives import Lives
from stemkv.core.schedule.order.base import Order
from stemkv.core.schedule.plan import StepPlan, StepResult
from stemkv.core.schedule.planner import Planner
from stemkv.core.schedule.request import (
    FinishReason,
    Request,
    RequestId,
    RequestSpec,
    RequestState,
)
from stemkv.core.schedule.results import Results
from stemkv.core.schedule.service import Service
from stemkv.core.schedule.sessions import SessionConfig
from stemkv.core.schedule.step import TimeLimit
from stemkv.errors import (
    ConfigError,
    DuplicateRequest,
    InvalidLimit,
    InvariantError,
    PromptTooLong,
    RequestError,
)

__all__ = ["Scheduler"]


class Scheduler:
    """Decides each step. Deterministic: equal calls give equal plans.

    Takes over the cache's event sink; events of cache and requests come out of
    `commit` and `take_events` in the order they happened. `costs` predict how long a
    step takes, which only `step_time_s` asks for. With `sessions` only so many sessions
    run at once. A `ledger` hears of each lookup, stall and end; the cache it watches
    itself.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: PrefixCache,
        order: Order,
        *,
        costs: CostModel | None = None,
        sessions: SessionConfig | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.config = config
        self.cache = cache
        limit = _time_limit(config, costs)
        lives = Lives(config, cache, order, ledger=ledger, sessions=sessions)
        self._lives = lives
        self._admission = Admission(config, lives)
        self._planner = Planner(
            lives, self._admission, token_budget=config.token_budget, limit=limit
        )
        self._results = Results(lives)
        self._pending: StepPlan | None = None
        self._planned: set[RequestId] = set()  # whom it computes something for
        self._now = -math.inf  # the latest time that anybody has told
        if config.lookahead:
            cache.watch_queue(
                lambda now: (
                    lives[each.request_id].as_waiting()
                    for each in order.first(config.lookahead, now)
                )
            )

    # Questions

    @property
    def service(self) -> Service:
        """Work served and ahead, by tenant."""
        return self._lives.journal.service

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._lives.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission, preempted ones included."""
        return len(self._lives.line)

    @property
    def has_work(self) -> bool:
        """Whether any request is in flight."""
        return len(self._lives) > 0

    @property
    def num_coasting(self) -> int:
        """Running requests that coast."""
        return len(self._lives.coasting)

    @property
    def num_coasting_context(self) -> int:
        """Sum of their contexts in the next step, the new tokens included."""
        return self._lives.coasting.context

    @property
    def num_quiet_steps(self) -> int:
        """For how many steps from now on nothing happens but coasting.

        0 if anybody runs without coasting, or waits and might be admitted.
        """
        lives = self._lives
        if lives.running.stepping or self._pending is not None:
            return 0
        if len(lives.line) and not self._admission.is_blocked:
            return 0
        return lives.coasting.num_quiet(lives.num_plans)

    @property
    def pending(self) -> StepPlan | None:
        """The plan that was scheduled and not yet committed."""
        return self._pending

    def request(self, request_id: RequestId) -> Request | None:
        """Return a request in flight; `None` once it has ended.

        While it coasts, its tokens lag behind.
        """
        return self._lives.get(request_id)

    def requests(self) -> tuple[Request, ...]:
        """Return all requests in flight, in the order they were added."""
        return self._lives.all()

    def samples_of(self, request_id: RequestId) -> tuple[Request, ...]:
        """Return the samples in flight of a request, by the id it was added under."""
        return self._lives.samples_of(request_id)

    def num_before(self, epoch: int) -> int:
        """Return how many samples in flight were added before this epoch began."""
        return self._lives.epochs.num_before(epoch)

    def check(self, spec: RequestSpec) -> None:
        """Raise what `add` would raise now; changes nothing."""
        _check_type(spec, RequestSpec, "spec")
        if spec.num_samples > self.config.max_num_running:
            raise InvalidLimit(
                f"num_samples is {spec.num_samples} but at most "
                f"{self.config.max_num_running} requests run at once; lower it or "
                f"raise max_num_running",
                field="num_samples",
            )
        if self._lives.samples_of(spec.request_id):
            raise DuplicateRequest(
                f"request id {spec.request_id!r} is in flight; choose another",
                field="request_id",
            )
        self._check_size(spec)

    # The three beats

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step; it may be empty when everybody waits or nobody is.

        The plan must be committed (or abandoned) before the next one.
        """
        if self._pending is not None:
            raise InvariantError(
                f"step {self._pending.step} is neither committed nor abandoned"
            )
        self._pass_time(now)
        self._pending = self._planner.plan(now)
        self._planned = {chunk.request_id for chunk in self._pending.chunks}
        return self._pending

    def commit(
        self, plan: StepPlan, result: StepResult, now: float
    ) -> tuple[Event, ...]:
        """Apply the result of the pending plan; return what happened since the last.

        Whole blocks computed by it become matchable now, not before. A result that
        does not fit the plan raises `InvariantError` and changes nothing: the plan is
        pending still.
        """
        self._check_pending(plan)
        self._results.check(plan, result)
        self._pass_time(now)
        self._pending = None
        self._results.apply(plan, result, now)
        return self.take_events()

    def abandon(self, plan: StepPlan, now: float) -> tuple[Event, ...]:
        """Give up the pending plan after a failed forward pass.

        Its requests are aborted and nothing it should have computed is published;
        blocks published by earlier steps stay. All other requests go on.
        """
        self._check_pending(plan)
        self._pass_time(now)
        self._pending = None
        self._results.give_up(plan, now)
        return self.take_events()

    def take_events(self) -> tuple[Event, ...]:
        """Return and forget what happened since the last call."""
        return self._lives.outbox.take()

    # Requests

    def add(self, spec: RequestSpec) -> Request:
        """Queue a request.

        One that can never run is refused at once: `PromptTooLong` if prompt and
        output exceed the cache or the context, `InvalidLimit` if its samples exceed
        the places, `DuplicateRequest` if its id is in flight.
        """
        self.check(spec)
        return self._lives.add(spec)

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
        _check_type(reason, FinishReason, "reason")
        self._pass_time(now)
        request = self._lives.get(request_id)
        if request is None or request.is_cancelled:
            return False
        if self._is_in_flight(request):
            request.is_cancelled = True
            if request.is_coasting:
                self._lives.coasting.cancel(request)
        else:
            self._lives.abort(request, reason, now)
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
        request = self._find(request_id)
        if domain is None:
            domain = request.spec.domain
        _check_type(namespace, bytes | None, "namespace")
        check_domain(domain)
        self._pass_time(now)
        self._admission.forget()  # it may find more, or less, under the other namespace
        self._lives.restart(request, namespace, adapter, domain, now)
        num_blocks = self.cache.num_blocks_for(request.max_tokens)
        if num_blocks > self.cache.most_blocks(domain):
            self.cancel(request_id, now, reason=FinishReason.REPLACED)

    def cut_off(self, request_id: RequestId) -> None:
        """Let a request go on by itself: it matches and publishes nothing any more."""
        self._check_no_pending("cut_off")
        request = self._find(request_id)
        request.namespace = None
        if request.lease is not None:
            self.cache.cut_off(request.lease)
        self._lives.line.match_again(request)

    # Rollouts

    def fence(self) -> int:
        """Begin a new epoch: requests added from now on wait for `lift_fence` of it."""
        return self._lives.epochs.fence()

    def lift_fence(self, epoch: int) -> None:
        """Let the requests of an epoch start; all earlier ones must have ended."""
        _check_count(epoch, "epoch")
        free = self._lives.epochs.lift(epoch)
        self._admission.forget()
        for request in free:
            self._lives.line.order.release(request)

    def retire(self, namespace: bytes, now: float) -> int:
        """Fence a namespace in the cache, for requests in flight as well.

        They go on with the blocks they hold, match and publish nothing any more, also
        after a preemption. Returns how many blocks remain until they end.
        """
        self._check_no_pending("retire")
        _check_type(namespace, bytes, "namespace")
        self._pass_time(now)
        for request in self._lives.all():
            if request.namespace == namespace:
                request.namespace = None
                self._lives.line.match_again(request)
        return self.cache.retire(namespace, now)

    # Coasting

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
        tokens = token_buffer(tokens)
        request = self._lives.get(request_id)
        if request is None or not _can_coast(request):
            return 0
        size, table = self.cache.config.block_size, request.held.table
        num_slots = len(table) * size
        num_steps = min(
            len(tokens) // TOKEN_BYTES,
            num_slots - request.num_computed - 1,
            request.spec.max_new_tokens - request.num_output_tokens - 1,
        )
        if num_steps <= 0:
            return 0
        if self.cache.pool.ref_count(table[request.num_computed // size]) > 1:
            return 0  # its block must be copied first, which only a plan can say
        told = tokens[: num_steps * TOKEN_BYTES]
        self._lives.coasting.begin(request, told, self._lives.num_plans)
        self._lives.running.sleep(request)
        return num_steps

    def skip(self, num_steps: int) -> None:
        """Schedule and commit so many of the quiet steps at once.

        The driver knows what they are: one token for each request that coasts.
        """
        _check_count(num_steps, "num_steps")
        if not 0 < num_steps <= self.num_quiet_steps:
            raise InvariantError(
                f"skip of {num_steps} steps, {self.num_quiet_steps} are quiet"
            )
        lives = self._lives
        lives.num_plans += num_steps
        lives.coasting.committed(num_steps)
        decodes = {name: n * num_steps for name, n in lives.coasting.tenants.items()}
        for tenant, num_tokens in decodes.items():
            lives.line.order.decoded(tenant, num_tokens)
        lives.journal.decoded(decodes)

    # Private

    def _is_in_flight(self, request: Request) -> bool:
        """Whether the pending plan computes something for a request."""
        if self._pending is None or request.state is not RequestState.RUNNING:
            return False
        return request.is_coasting or request.request_id in self._planned

    def _find(self, request_id: RequestId) -> Request:
        request = self._lives.get(request_id)
        if request is None:
            raise RequestError(
                f"no request {request_id!r:.80} is in flight", field="request_id"
            )
        return request

    def _pass_time(self, now: float) -> None:
        """Refuse a time that is none, or before one that was told."""
        check_now(now)
        if now < self._now:
            raise RequestError(
                f"now must not go back, got {now} after {self._now}", field="now"
            )
        self._now = now

    def _check_no_pending(self, verb: str) -> None:
        if self._pending is not None:
            raise InvariantError(f"{verb} while step {self._pending.step} is pending")

    def _check_pending(self, plan: StepPlan) -> None:
        if self._pending is None or plan is not self._pending:
            expected = "none" if self._pending is None else self._pending.step
            raise InvariantError(f"step {plan.step} is not the pending one: {expected}")

    def _check_size(self, spec: RequestSpec) -> None:
        """Refuse what could never run, with the numbers."""
        num_prompt, num_new = len(spec.prompt), spec.max_new_tokens
        start = spec.start_position
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
        num_blocks = self.cache.num_blocks_for(num_prompt + num_new - 1)
        total = self.cache.pool.num_total
        most = self.cache.most_blocks(spec.domain)
        if num_blocks > most:
            others = f" less {total - most} promised to others" if most < total else ""
            raise PromptTooLong(
                f"{num_prompt} prompt tokens + max_new_tokens {num_new} need "
                f"{num_blocks} blocks but the cache has {total}{others}; raise "
                f"num_blocks, shorten the prompt or lower max_new_tokens",
                field="prompt",
            )


def _time_limit(config: SchedulerConfig, costs: CostModel | None) -> TimeLimit | None:
    if config.step_time_s is None:
        return None
    if costs is None:
        raise ConfigError(
            "step_time_s needs a cost model, to predict how long a step takes; "
            "give costs (`stemkv calibrate` measures them), or limit steps by "
            "token_budget alone"
        )
    return TimeLimit(config.step_time_s, costs)


def _check_type(value: object, kind: Any, name: str) -> None:
    if not isinstance(value, kind):
        wanted = getattr(kind, "__name__", kind)
        raise RequestError(
            f"{name} must be {wanted}, got {type(value).__name__}", field=name
        )


def _check_count(value: object, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RequestError(
            f"{name} must be an integer of at least 0, got {value!r:.80}", field=name
        )


def _can_coast(request: Request) -> bool:
    """Whether nothing but decodes lies ahead of a request."""
    return (
        request.state is RequestState.RUNNING
        and not request.is_prefilling
        and not request.is_coasting
        and request.spec.num_samples == 1
    )
