"""Does the core decide again what an engine recorded, and when would it have?

Owns two ways to run a step log. `repeat` makes the same calls and compares every plan:
it uses no clock and no model of costs, so any difference is a defect. `predict` takes
only the arrivals and the outputs from the log and lets a cost model say how long steps
take: then plans may differ, and the times to first token are compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stemkv.core.books.cost import CostModel, StepShape
from stemkv.core.core import Core, Recorder
from stemkv.core.schedule.events import (
    Event,
    RequestAborted,
    RequestFinished,
    TokenSampled,
)
from stemkv.core.schedule.plan import Sample, StepPlan, StepResult
from stemkv.core.schedule.request import FinishReason, RequestId, child_id
from stemkv.errors import ConfigError, StemKVError, StepLogError
from stemkv.measure.steplog import (
    Abandoned,
    Added,
    Call,
    Cancelled,
    Committed,
    CoreState,
    CutOff,
    Declared,
    Kept,
    Planned,
    PlanRecord,
    Restarted,
    SessionEnded,
    StepLog,
    StepLogHeader,
    tell,
)
from stemkv.measure.timeline import percentile

__all__ = ["Agreement", "Difference", "Prediction", "make_core", "predict", "repeat"]

_Timed = Added | Cancelled | SessionEnded | Kept

_FILLER = Sample(0)  # where a request gets further than it did when it was cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a repetition parted from its log."""

    call: int  # which of the log's calls, from 0; it stands on line `call + 2`
    what: str  # "plan", "state", "hit tokens", "error"
    recorded: object
    repeated: object

    def __str__(self) -> str:
        return (
            f"call {self.call} (line {self.call + 2}), {self.what}:\n"
            f"  recorded {self.recorded}\n  repeated {self.repeated}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What a repetition found. After a difference nothing more is compared."""

    num_plans: int  # in the log
    num_equal_plans: int
    # Reused prompt tokens of every request or sample that ended, by its id.
    hit_tokens: Mapping[str, int]
    first_difference: Difference | None

    @property
    def is_equal(self) -> bool:
        """Whether every plan, count and hit was the same."""
        return self.first_difference is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Times to first token, seconds, by request: measured and by a cost model."""

    measured_s: Mapping[str, float]
    predicted_s: Mapping[str, float]

    def error(self, percent: float) -> float:
        """Return the relative error of a percentile; below 0: predicted too short."""
        measured = percentile(self.measured_s.values(), percent)
        return percentile(self.predicted_s.values(), percent) / measured - 1


def make_core(header: StepLogHeader, recorder: Recorder | None = None) -> Core:
    """Return a core like the recorded one, empty. Raises `StepLogError`."""
    try:
        return Core(replace(header.core, books=None), header.costs, recorder=recorder)
    except ConfigError as error:
        raise StepLogError(f"header: {error}") from None


def repeat(log: StepLog, *, recorder: Recorder | None = None) -> Agreement:
    """Make every call of a log again on a fresh core and compare what it decides.

    A `recorder` hears of it as of a run.
    """
    repetition = _Repetition(make_core(log.header, recorder))
    num_equal = 0
    difference = None
    for index, call in enumerate(log.calls):
        try:
            difference = repetition.make(index, call)
        except StemKVError as error:
            difference = Difference(
                call=index,
                what="error",
                recorded=type(call).__name__,
                repeated=f"{type(error).__name__}: {error}",
            )
        if difference is not None:
            break
        num_equal += isinstance(call, Planned)
    return Agreement(
        num_plans=sum(isinstance(call, Planned) for call in log.calls),
        num_equal_plans=num_equal,
        hit_tokens=repetition.hit_tokens,
        first_difference=difference,
    )


def predict(log: StepLog, cost: CostModel) -> Prediction:
    """Run the recorded arrivals on a clock of their own, steps as long as `cost` says.

    An open loop: requests arrive and are cancelled when they were, and get the tokens
    they got. Raises `StepLogError` for a log with rollouts, restarts or requests that
    failed, whose times are not the cost model's to predict.
    """
    run = _Run(log, cost)
    while run.has_work:
        run.step()
    measured = _measured_ttfts(log)
    both = [name for name in measured if name in run.ttfts]
    return Prediction(
        measured_s={name: measured[name] for name in both},
        predicted_s={name: run.ttfts[name] for name in both},
    )


class _Repetition:
    """A core that is told what the recorded one was told."""

    def __init__(self, core: Core) -> None:
        self.hit_tokens: dict[str, int] = {}
        self._core = core
        self._scheduler = core.scheduler
        self._recorded_hits: dict[str, int] = {}  # of requests in flight

    def make(self, index: int, call: Call) -> Difference | None:
        """Make one call; return the first thing in which the core differs."""
        compared: list[tuple[str, object, object]] = []
        events: tuple[Event, ...] = ()
        match call:
            case Planned():
                self._note_hits(call.plan)
                plan = self._core.schedule(call.plan.now)
                repeated = PlanRecord.of(plan, self._scheduler)
                compared.append(("plan", call.plan, repeated))
            case Committed():
                result = StepResult(call.samples, call.failed)
                events = self._core.commit(self._pending(), result, call.now)
                state = CoreState.of(self._scheduler)
                compared.append(("state", call.state, state))
            case Abandoned():
                events = self._core.abandon(self._pending(), call.now)
                state = CoreState.of(self._scheduler)
                compared.append(("state", call.state, state))
            case _:
                self._tell(call)
        for event in (*events, *self._scheduler.take_events()):
            if isinstance(event, RequestFinished | RequestAborted):
                recorded_hits = self._recorded_hits.pop(event.request_id, 0)
                self.hit_tokens[event.request_id] = event.counts.reused
                compared.append(
                    (
                        "hit tokens",
                        f"{event.request_id}: {recorded_hits}",
                        f"{event.request_id}: {event.counts.reused}",
                    )
                )
        for what, recorded, now_found in compared:
            if recorded != now_found:
                return Difference(
                    call=index, what=what, recorded=recorded, repeated=now_found
                )
        return None

    def _tell(self, call: Call) -> None:
        if isinstance(call, Restarted | CutOff):
            if self._scheduler.request(call.request_id) is None:
                raise StepLogError(f"request {call.request_id!r:.60} is not in flight")
        if isinstance(call, Restarted):
            self._recorded_hits.pop(call.request_id, None)
        tell(self._core, call)

    def _note_hits(self, plan: PlanRecord) -> None:
        for chunk in plan.chunks:
            self._recorded_hits[chunk.request_id] = chunk.num_reused

    def _pending(self) -> StepPlan:
        plan = self._scheduler.pending
        if plan is None:
            raise StepLogError("a step ends that was not scheduled")
        return plan


class _Run:
    """The recorded arrivals on a virtual clock."""

    def __init__(self, log: StepLog, cost: CostModel) -> None:
        self.ttfts: dict[str, float] = {}
        self._cost = cost
        self._core = make_core(log.header)
        self._scheduler = self._core.scheduler
        self._script = _script(log)
        self._arrival_s = {spec.request_id: spec.arrival_s for spec in log.specs}
        if len(self._arrival_s) != len(log.specs):
            raise StepLogError("request ids occur twice; predict tells requests by id")
        self._due = deque(sorted(_timed(log), key=_time_of))
        for call in log.calls:
            if isinstance(call, Declared):
                tell(self._core, call)
        self._now = _time_of(self._due[0]) if self._due else 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._due) or self._scheduler.has_work

    def step(self) -> None:
        """Take in what is due and run one step, or wait for the next arrival."""
        if not self._scheduler.has_work:
            self._now = max(self._now, _time_of(self._due[0]))
        while self._due and _time_of(self._due[0]) <= self._now:
            call = self._due.popleft()
            if not isinstance(call, Added):
                call = replace(call, now=self._now)
            tell(self._core, call)
        if not self._scheduler.has_work:
            return
        plan = self._core.schedule(self._now)
        self._now += self._cost.step_seconds(self._shape(plan))
        for event in self._core.commit(plan, self._result(plan), self._now):
            if isinstance(event, TokenSampled) and event.index == 0:
                arrival_s = self._arrival_s.get(event.request_id)  # none for samples
                if arrival_s is not None:
                    self.ttfts[event.request_id] = event.now - arrival_s

    def _shape(self, plan: StepPlan) -> StepShape:
        shape = StepShape(num_copied_tokens=sum(c.num_tokens for c in plan.copies))
        for chunk in plan.chunks:
            shape.add_chunk(chunk.start, chunk.end, is_decode=chunk.is_decode)
        return shape

    def _result(self, plan: StepPlan) -> StepResult:
        samples = {}
        for chunk in plan.chunks:
            ids = [child_id(chunk.request_id, k) for k in range(chunk.num_samples)]
            samples[chunk.request_id] = tuple(self._next_sample(each) for each in ids)
        return StepResult(samples)

    def _next_sample(self, sample_id: RequestId) -> Sample:
        left = self._script.get(sample_id)
        return left.popleft() if left else _FILLER


def _timed(log: StepLog) -> list[_Timed]:
    """Return what happens at a time of its own; refuse what has no place there."""
    timed: list[_Timed] = []
    for index, call in enumerate(log.calls):
        if isinstance(call, _Timed):
            timed.append(call)
        elif not isinstance(call, Declared | Planned | Committed):
            raise StepLogError(
                f"line {index + 2}: a log with {type(call).__name__} can be repeated, "
                f"but its times cannot be predicted; record a run without rollouts, "
                f"resets and failed steps"
            )
    return timed


def _time_of(call: _Timed) -> float:
    return call.spec.arrival_s if isinstance(call, Added) else call.now


def _script(log: StepLog) -> dict[RequestId, deque[Sample]]:
    """Return what each sample was given, in order."""
    script: dict[RequestId, deque[Sample]] = {}
    for _, committed in log.steps():
        for request_id, samples in committed.samples.items():
            for index, sample in enumerate(samples):
                each = child_id(request_id, index)
                script.setdefault(each, deque()).append(sample)
    return script


def _measured_ttfts(log: StepLog) -> dict[str, float]:
    """Return arrival to the commit of the first token, by request."""
    arrivals = {spec.request_id: spec.arrival_s for spec in log.specs}
    ttfts: dict[str, float] = {}
    cancelled: set[RequestId] = set()  # what their last step sampled, nobody got
    for call in log.calls:
        if isinstance(call, Cancelled):
            cancelled.add(call.request_id)
        if not isinstance(call, Committed):
            continue
        for request_id, samples in call.samples.items():
            if request_id not in arrivals or request_id in cancelled or not samples:
                continue
            if samples[0].stop is not FinishReason.FAILED:
                ttfts.setdefault(request_id, call.now - arrivals[request_id])
    return ttfts
