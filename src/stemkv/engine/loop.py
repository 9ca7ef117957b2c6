"""The steps of an engine: schedule, compute, commit.

Owns the three beats, what becomes of a step that fails, and what must be done between
steps: changes whose turn has come, adapters that nobody needs any more, news. Decides
nothing: a plan is the scheduler's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from stemkv.core.core import Core
from stemkv.core.schedule.plan import StepPlan
from stemkv.engine.attempt import compute
from stemkv.engine.clock import Clock
from stemkv.engine.outbox import Listeners, Outbox
from stemkv.engine.recheck import Rechecks
from stemkv.engine.rollout import Rollouts
from stemkv.engine.samples import LiveSamples
from stemkv.engine.served import Served
from stemkv.errors import ConfigError, InvariantError, StemKVError
from stemkv.measure.steps import StepRecord

__all__ = ["StepLoop"]

_log = logging.getLogger(__name__)

_MAX_STEP_RECORDS = 100_000


class StepLoop:
    """Runs what is served, step by step.

    `broken_by` tells what makes it refuse to go on: a defect, or an interruption that
    left something half done.
    """

    def __init__(
        self,
        listeners: Listeners,
        core: Core,
        served: Served,
        samples: LiveSamples,
        outbox: Outbox,
        rechecks: Rechecks,
        clock: Clock,
    ) -> None:
        self.rollouts = Rollouts(core)
        self.steps: deque[StepRecord] = deque(maxlen=_MAX_STEP_RECORDS)  # newest last
        self.broken_by: str | None = None
        self._listeners = listeners
        self._core, self._scheduler = core, core.scheduler
        self._served = served
        self._samples = samples
        self._outbox = outbox
        self._rechecks = rechecks
        self._clock = clock

    @property
    def is_busy(self) -> bool:
        """Whether a request is in flight or a change waits."""
        return self._scheduler.has_work or self.rollouts.num_waiting > 0

    def check_between_steps(self, verb: str) -> None:
        """Raise unless such a verb may be called now."""
        if self.broken_by is not None:
            raise InvariantError(
                f"this engine stopped at a defect ({self.broken_by}); make a new one"
            )
        if self._scheduler.pending is not None or self._outbox.is_telling:
            raise ConfigError(
                f"{verb} was called inside on_logits or on_event; call it between steps"
            )

    @contextmanager
    def whole(self, what: str) -> Iterator[None]:
        """Refuse to go on if what is done inside was left half done."""
        try:
            yield
        except BaseException as error:
            is_defect = isinstance(error, InvariantError)
            self.broken_by = str(error) if is_defect else f"{what}: {error!r}"
            raise

    def advance(self) -> None:
        """Run one step; what ends with it is in the outbox."""
        self.check_between_steps("step")
        try:
            self._served.check_in_place()
            self.rollouts.make_due()
            if self._scheduler.has_work:
                self._run()
            self.catch_up()
        except InvariantError as error:
            self.broken_by = str(error)
            raise

    def catch_up(self) -> None:
        """Do what calls on the scheduler have brought about, and tell of it.

        While a step is running that waits until its end.
        """
        self._outbox.settle(self._scheduler.take_events())
        if self._scheduler.pending is None:
            self.rollouts.make_due()  # the last request of before may have ended
            self.drop_unused_adapters()
            self._outbox.tell()

    def drop_unused_adapters(self) -> None:
        """Free the versions that no name, request or waiting re-check refers to."""
        current = {loaded.version for loaded in self._served.identities.adapters()}
        if len(self._served.adapters.loras) == len(current):
            return
        requests = self._scheduler.requests()
        in_flight = {r.spec.adapter for r in requests if r.spec.adapter}
        self._served.adapters.drop_unused(
            current | in_flight | self._rechecks.adapters()
        )

    # Private

    def _run(self) -> None:
        now = self._clock.now()
        with self.whole("a step was interrupted while it was planned"):
            plan = self._core.schedule(now)
        result = None
        try:
            start = self._clock.now()
            computed = compute(self._served.runner, plan, self._samples.embedded)
            if computed is not None:
                self._consider_rechecks(plan)
                on_logits = self._listeners.on_logits
                result = self._samples.sample(plan, computed, on_logits)
            now = self._clock.now()
        except BaseException as error:
            # Whatever it was, the next step must find no plan pending.
            self._give_up(plan)
            if isinstance(error, StemKVError) or not isinstance(error, Exception):
                raise
            _log.exception("step %d failed; its requests end", plan.step)
            return
        if result is None:
            self._give_up(plan)
            return
        self._record(plan, start, now)
        with self.whole("a step was interrupted while its result was taken over"):
            self._outbox.settle(self._core.commit(plan, result, now))

    def _give_up(self, plan: StepPlan) -> None:
        """End the requests of a plan that was not carried out."""
        now = self._clock.last_s
        with suppress(ConfigError):  # if it is the clock that fails
            now = self._clock.now()
        with self.whole("a step was interrupted while it was given up"):
            self._outbox.settle(self._core.abandon(plan, now))

    def _consider_rechecks(self, plan: StepPlan) -> None:
        """Draw among the hits that this step is the first to build on."""
        if self._rechecks.share == 0:
            return
        for chunk in plan.chunks:
            request = self._scheduler.request(chunk.request_id)
            if request is None or request.lease is None or request.namespace is None:
                continue
            if chunk.start and chunk.start == request.lease.num_matched_tokens:
                self._rechecks.consider(
                    chunk,
                    request.tokens,
                    request.namespace,
                    self._samples.embedded.get(chunk.request_id),
                )

    def _record(self, plan: StepPlan, start: float, end: float) -> None:
        num_decode = sum(chunk.is_decode for chunk in plan.chunks)
        self.steps.append(
            StepRecord(
                step=plan.step,
                start_s=start,
                end_s=end,
                num_prefill_tokens=plan.num_tokens - num_decode,
                num_decode_tokens=num_decode,
            )
        )
