"""One engine that is not there: the core's scheduler on a virtual clock.

Owns what happens inside one replica: a plan is scheduled, takes as long as the cost
model says, and is committed. Requests whose output is known coast. Knows no trace and
no other replica. The loop is that of the engine, with arithmetic in place of tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from stemkv.core.books.cost import CostModel, StepShape
from stemkv.core.books.entry import LedgerEntry
from stemkv.core.core import Core, CoreConfig
from stemkv.core.prefix.events import BlocksEvicted, BlocksRefused
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.schedule.events import RequestFinished, RequestPreempted, TokenSampled
from stemkv.core.schedule.plan import Sample, StepPlan, StepResult
from stemkv.core.schedule.request import RequestId, RequestSpec
from stemkv.errors import InvariantError
from stemkv.measure.results import MemorySample, StepSpan
from stemkv.measure.scheduling import TenantGap
from stemkv.sim.thinning import Thinned

__all__ = ["Replica", "Times", "join_samples"]


@dataclass(slots=True)
class Times:
    """When one request's latencies are made."""

    first_token_s: float | None = None
    end_s: float | None = None
    lost_s: float | None = None  # preempted, and the last token before that


@dataclass(slots=True)
class _Script:
    """What a request will sample: one token, over and over."""

    token: int
    num_tokens: int
    bytes: bytes = field(repr=False)  # the token, encoded


class Replica:
    """Runs requests whose output is known; `on_end` is told of each that finished.

    Its clock is the caller's: `start_step(now)` returns when the step will be done, and
    `finish_step` has to be called then.
    """

    def __init__(
        self,
        index: int,
        *,
        config: CoreConfig,
        costs: CostModel,
        on_end: Callable[[RequestId, float], None],
        gap: TenantGap | None = None,
        cpu_clock: Callable[[], float] | None = None,
    ) -> None:
        self.index = index
        self.costs = costs
        self.entries: list[LedgerEntry] = []
        self.core = Core(config, costs)
        self.cache, self.scheduler = self.core.cache, self.core.scheduler
        ledger = self.core.ledger
        assert ledger is not None, "there are costs, and a replay keeps books"
        self.ledger = ledger
        self.times: dict[RequestId, Times] = {}
        self.itl_s: Counter[float] = Counter()  # gap → how many tokens came after it
        self.memory = Thinned[MemorySample](1000, join_samples)
        self.steps = Thinned[StepSpan](4000, None)
        self.num_steps = 0
        self.busy_s = 0.0
        self.num_preemptions = 0
        self.peak_active_tokens = 0  # after a step
        self._peak_active = 0  # the same in blocks
        self.num_refused_blocks = 0  # not retained after their last lease
        self.gap = gap  # between tenants; None: nobody looks
        # Seconds in the scheduler, its cache and its order; None: nobody looks.
        self.scheduler_cpu_s = None if cpu_clock is None else 0.0
        self._cpu_clock = cpu_clock
        self._on_end = on_end
        self._scripts: dict[RequestId, _Script] = {}
        self._plan: StepPlan | None = None
        self._is_in_stretch = False
        self._ends_s = 0.0
        self._last_end_s = 0.0  # when the previous step ended

    @property
    def is_busy(self) -> bool:
        """Whether a step is running."""
        return self._plan is not None or self._is_in_stretch

    @property
    def has_work(self) -> bool:
        """Whether any request is in flight."""
        return self.scheduler.has_work

    def add(self, spec: RequestSpec, token: int) -> None:
        """Queue a request that will sample `token` `spec.max_new_tokens` times.

        Raises what `Scheduler.add` raises for one that can never run.
        """
        self.core.add(spec)
        encoded = token.to_bytes(TOKEN_BYTES, "little", signed=True)
        self._scripts[spec.request_id] = _Script(token, spec.max_new_tokens, encoded)
        self.times[spec.request_id] = Times()

    def start_step(self, now: float, until: float) -> float:
        """Schedule the next step and return when it ends.

        Where nothing but decodes of known tokens lies ahead, several steps are taken
        at once: those that begin before `until`, when something may arrive.
        """
        num_quiet = self.scheduler.num_quiet_steps
        if num_quiet > 1:
            return self._start_stretch(num_quiet, now, until)
        started = self._read_clock()
        plan = self.core.schedule(now)
        self._stop_clock(started)
        shape = StepShape(
            num_decodes=plan.num_coasting, num_decode_context=plan.num_coasting_context
        )
        for chunk in plan.chunks:
            shape.add_chunk(chunk.start, chunk.end, is_decode=chunk.is_decode)
        shape.num_copied_tokens = sum(copy.num_tokens for copy in plan.copies)
        if plan.num_tokens == 0:
            raise InvariantError(
                f"replica {self.index} has {self.scheduler.num_waiting} waiting "
                f"requests, none running, and an empty plan"
            )
        seconds = self.costs.step_seconds(shape)
        self._plan = plan
        self._ends_s = now + seconds
        self.busy_s += seconds
        self.num_steps += 1
        saved = self.ledger.take_step()
        self.steps.add(
            StepSpan(
                replica=self.index,
                start_s=now,
                end_s=self._ends_s,
                num_prefill_tokens=shape.num_prefill_tokens,
                num_decodes=shape.num_decodes,
                saved_tokens=saved.num_tokens,
                saved_s=saved.seconds,
                saved_joules=saved.joules,
            )
        )
        return self._ends_s

    def finish_step(self) -> None:
        """Commit the running step, at the time it ends."""
        now = self._ends_s
        if self._is_in_stretch:
            self._is_in_stretch = False
            self._note_memory(now, 0)
            self._note_gap()
            return
        plan = self._plan
        if plan is None:
            raise InvariantError(f"replica {self.index} runs no step")
        self._plan = None
        samples = {}
        for chunk in plan.chunks:
            if chunk.num_samples:
                token = self._scripts[chunk.request_id].token
                samples[chunk.request_id] = (Sample(token),)
        num_evicted = 0
        gap = now - self._last_end_s
        num_gaps = plan.num_coasting
        started = self._read_clock()
        events = self.core.commit(plan, StepResult(samples), now)
        self._stop_clock(started)
        for event in events:
            match event:
                case TokenSampled():
                    num_gaps += self._took_token(event, now)
                case RequestFinished():
                    del self._scripts[event.request_id]
                    self.times[event.request_id].end_s = now
                    self._on_end(event.request_id, now)
                case RequestPreempted():
                    # The plan that preempted it was scheduled when the step before
                    # ended, which is when it got its last token.
                    self.num_preemptions += 1
                    times = self.times[event.request_id]
                    if times.first_token_s is not None and times.lost_s is None:
                        times.lost_s = event.now
                case BlocksEvicted():
                    num_evicted += event.num_blocks
                case BlocksRefused():
                    self.num_refused_blocks += event.num_blocks
        self.entries.extend(self.ledger.take_entries())
        if num_gaps:
            self.itl_s[gap] += num_gaps
        self._last_end_s = now
        self._note_memory(now, num_evicted)
        self._note_gap()

    # Private

    def _start_stretch(self, num_quiet: int, now: float, until: float) -> float:
        scheduler = self.scheduler
        num_decodes = scheduler.num_coasting
        shape = StepShape(
            num_decodes=num_decodes, num_decode_context=scheduler.num_coasting_context
        )
        start = now
        num_steps = 0
        while num_steps < num_quiet and (start < until or num_steps == 0):
            end = start + self.costs.step_seconds(shape)
            self.itl_s[end - self._last_end_s] += num_decodes
            self.busy_s += end - start
            shape.num_decode_context += num_decodes
            start = self._last_end_s = end
            num_steps += 1
        scheduler.skip(num_steps)
        self._is_in_stretch = True
        self._ends_s = start
        self.num_steps += num_steps
        self.steps.add(
            StepSpan(
                replica=self.index,
                start_s=now,
                end_s=start,
                num_prefill_tokens=0,
                num_decodes=num_decodes,
                num_steps=num_steps,
            )
        )
        return start

    def _took_token(self, event: TokenSampled, now: float) -> int:
        """Note a token; return how many ordinary gaps it closes, 0 or 1."""
        times = self.times[event.request_id]
        script = self._scripts[event.request_id]
        num_left = script.num_tokens - event.index - 2  # the last one is sampled
        if num_left > 0:
            self.scheduler.coast(event.request_id, script.bytes * num_left)
        if event.index == 0:
            times.first_token_s = now
            return 0
        if times.lost_s is not None:
            self.itl_s[now - times.lost_s] += 1
            times.lost_s = None
            return 0
        return 1

    def _read_clock(self) -> float:
        return 0.0 if self._cpu_clock is None else self._cpu_clock()

    def _stop_clock(self, started: float) -> None:
        if self._cpu_clock is not None and self.scheduler_cpu_s is not None:
            self.scheduler_cpu_s += self._cpu_clock() - started

    def _note_gap(self) -> None:
        if self.gap is not None:
            self.gap.note(self.scheduler.service.tenants)

    def _note_memory(self, now: float, num_evicted: int) -> None:
        cache = self.cache
        num_active = cache.num_active_blocks
        num_cached = cache.tree.num_unpinned_blocks
        if num_active > self._peak_active:
            self._peak_active = num_active
            self.peak_active_tokens = cache.usage().num_active_tokens
        self.memory.add(
            MemorySample(
                at_s=now,
                active=num_active,
                cached=num_cached,
                free=cache.pool.num_total - num_active - num_cached,
                evicted=num_evicted,
                stalled=self.ledger.num_stalled,
            )
        )


def join_samples(earlier: MemorySample, later: MemorySample) -> MemorySample:
    """Keep the later state and the evictions of both."""
    return MemorySample(
        at_s=later.at_s,
        active=later.active,
        cached=later.cached,
        free=later.free,
        evicted=earlier.evicted + later.evicted,
        stalled=max(earlier.stalled, later.stalled),
    )
