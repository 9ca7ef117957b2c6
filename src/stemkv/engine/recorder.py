"""Writing a step log while an engine runs.

Owns a cache and a scheduler that decide exactly as theirs do and write down what they
are asked. An engine without a recorder has the plain ones, so recording costs nothing
where it is off. Knows nothing of tensors; the form on disk is `measure.steplog`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from stemkv.core.books.cost import CostModel, FittedCost, RooflineCost
from stemkv.core.books.ledger import Ledger
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.events import Event
from stemkv.core.schedule.plan import StepPlan, StepResult
from stemkv.core.schedule.request import FinishReason, Request, RequestId, RequestSpec
from stemkv.core.schedule.scheduler import Scheduler
from stemkv.engine.core_settings import CoreSettings
from stemkv.errors import ConfigError
from stemkv.measure.steplog import (
    Abandoned,
    Added,
    Call,
    Cancelled,
    Committed,
    CoreState,
    CutOff,
    Declared,
    Fenced,
    FenceLifted,
    Kept,
    NamespaceReset,
    NamespaceRetired,
    Planned,
    PlanRecord,
    Restarted,
    SessionEnded,
    StepLogHeader,
    StepLogWriter,
)

__all__ = ["StepRecorder"]

_log = logging.getLogger(__name__)


class StepRecorder:
    """Records one engine into a text file, which stays the caller's to close.

    The file will hold the token ids of all prompts and outputs. Hand it to `Engine`
    and to one engine only. If writing fails, the log ends there, `error` says why, and
    the engine goes on.
    """

    def __init__(self, file: TextIO, *, model: str) -> None:
        self.error: OSError | ValueError | None = None
        self._file = file
        self._model = model
        self._writer: StepLogWriter | None = None
        self._is_used = False
        self._is_nested = False  # inside a call that is written as a whole

    def make_core(
        self,
        settings: CoreSettings,
        *,
        ledger: Ledger | None = None,
    ) -> tuple[PrefixCache, Scheduler]:
        """Return a recorded cache and scheduler; writes the header."""
        if self._is_used:
            raise ConfigError("a recorder records one engine; make another")
        self._is_used = True
        header = StepLogHeader(
            model=self._model,
            cache=settings.cache,
            scheduler=settings.scheduler,
            eviction=settings.eviction,
            order=settings.order,
            quotas=settings.quotas,
            costs=self._recorded(settings.costs),
        )
        try:
            self._writer = StepLogWriter(self._file, header)
        except (OSError, ValueError) as error:
            self._give_up(error)
        cache = _RecordedCache(settings, self, ledger=ledger)
        return cache, _RecordedScheduler(settings, cache, self, ledger=ledger)

    def write(self, call: Call) -> None:
        """Append a call, unless it is part of one that is written as a whole."""
        if self._writer is None or self._is_nested:
            return
        try:
            self._writer.write(call)
        except (OSError, ValueError) as error:
            self._give_up(error)

    @contextmanager
    def nested(self) -> Iterator[None]:
        """Write nothing inside: what happens there follows from one call."""
        self._is_nested = True
        try:
            yield
        finally:
            self._is_nested = False

    @staticmethod
    def _recorded(costs: CostModel | None) -> FittedCost | RooflineCost | None:
        if costs is None or isinstance(costs, FittedCost | RooflineCost):
            return costs
        raise ConfigError(
            f"costs of type {type(costs).__name__} cannot be written to a step log, "
            f"which could not be repeated without them; give FittedCost or "
            f"RooflineCost, or record without costs"
        )

    def _give_up(self, error: OSError | ValueError) -> None:
        if isinstance(error, ValueError) and not self._file.closed:
            raise error  # not what writing to a closed file raises
        # Who only records must not stop the engine.
        _log.exception("the step log ends here: it cannot be written")
        self.error = error
        self._writer = None


class _RecordedCache(PrefixCache):
    """Records what is asked of the cache itself, not through a scheduler."""

    def __init__(
        self,
        settings: CoreSettings,
        recorder: StepRecorder,
        *,
        ledger: Ledger | None,
    ) -> None:
        super().__init__(
            settings.cache,
            Retention.of(settings.make_policy, settings.cache, settings.quotas),
            watchers=() if ledger is None else (ledger,),
        )
        self._recorder = recorder

    def declare_public(self, namespace: bytes, prefix: TokenIds) -> int:
        num_blocks = super().declare_public(namespace, prefix)
        self._recorder.write(Declared(namespace=namespace, prefix=prefix))
        return num_blocks

    def retire(self, namespace: bytes, now: float) -> int:
        num_remaining = super().retire(namespace, now)
        self._recorder.write(NamespaceReset(now=now, namespace=namespace))
        return num_remaining

    def end_session(self, domain: Domain, session: str, now: float) -> None:
        super().end_session(domain, session, now)
        self._recorder.write(SessionEnded(now=now, domain=domain, session=session))

    def keep(
        self,
        namespace: bytes,
        domain: Domain,
        prefix: TokenIds,
        *,
        until: float,
        now: float,
    ) -> int:
        num_blocks = super().keep(namespace, domain, prefix, until=until, now=now)
        self._recorder.write(
            Kept(
                now=now,
                namespace=namespace,
                domain=domain,
                prefix=prefix,
                until=until,
            )
        )
        return num_blocks


class _RecordedScheduler(Scheduler):
    """Records every call that changes something, once it has succeeded."""

    def __init__(
        self,
        settings: CoreSettings,
        cache: PrefixCache,
        recorder: StepRecorder,
        *,
        ledger: Ledger | None,
    ) -> None:
        super().__init__(
            settings.scheduler,
            cache,
            settings.make_order(),
            costs=settings.costs,
            ledger=ledger,
        )
        self._recorder = recorder

    def add(self, spec: RequestSpec) -> Request:
        request = super().add(spec)
        self._recorder.write(Added(spec=spec))
        return request

    def cancel(
        self,
        request_id: RequestId,
        now: float,
        *,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> bool:
        with self._recorder.nested():  # it may end a session
            is_ended = super().cancel(request_id, now, reason=reason)
        if is_ended:
            self._recorder.write(
                Cancelled(now=now, request_id=request_id, reason=reason)
            )
        return is_ended

    def restart(
        self,
        request_id: RequestId,
        namespace: bytes | None,
        adapter: str | None,
        now: float,
        *,
        domain: Domain | None = None,
    ) -> None:
        super().restart(request_id, namespace, adapter, now, domain=domain)
        self._recorder.write(
            Restarted(
                now=now,
                request_id=request_id,
                namespace=namespace,
                adapter=adapter,
                domain=domain,
            )
        )

    def cut_off(self, request_id: RequestId) -> None:
        super().cut_off(request_id)
        self._recorder.write(CutOff(request_id=request_id))

    def fence(self) -> int:
        epoch = super().fence()
        self._recorder.write(Fenced())
        return epoch

    def lift_fence(self, epoch: int) -> None:
        super().lift_fence(epoch)
        self._recorder.write(FenceLifted(epoch=epoch))

    def retire(self, namespace: bytes, now: float) -> int:
        with self._recorder.nested():
            num_remaining = super().retire(namespace, now)
        self._recorder.write(NamespaceRetired(now=now, namespace=namespace))
        return num_remaining

    def schedule(self, now: float) -> StepPlan:
        plan = super().schedule(now)
        self._recorder.write(Planned(plan=PlanRecord.of(plan, self)))
        return plan

    def commit(
        self, plan: StepPlan, result: StepResult, now: float
    ) -> tuple[Event, ...]:
        with self._recorder.nested():  # as above
            events = super().commit(plan, result, now)
        self._recorder.write(
            Committed(
                now=now,
                samples=result.samples,
                state=CoreState.of(self),
                failed=result.failed,
            )
        )
        return events

    def abandon(self, plan: StepPlan, now: float) -> tuple[Event, ...]:
        with self._recorder.nested():
            events = super().abandon(plan, now)
        self._recorder.write(Abandoned(now=now, state=CoreState.of(self)))
        return events
