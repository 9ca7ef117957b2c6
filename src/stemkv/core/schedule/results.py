"""What a step's result does to the requests of its plan.

Owns commit and abandon, request by request in the order of the chunks: computed tokens
are counted, whole blocks published, samples taken. Plans nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from stemkv.core.books.waits import WaitReason
from stemkv.core.schedule.events import TokenSampled
from stemkv.core.schedule.lives import Lives
from stemkv.core.schedule.plan import Chunk, Sample, StepPlan, StepResult
from stemkv.core.schedule.request import FinishReason, Request, RequestState
from stemkv.errors import InvariantError

__all__ = ["Results"]


class Results:
    """Applies results to requests."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives

    def check(self, plan: StepPlan, result: StepResult) -> None:
        """Raise `InvariantError` unless the whole of a result fits its plan."""
        if not isinstance(result, StepResult):
            raise InvariantError(f"not a StepResult: {type(result).__name__}")
        planned = {chunk.request_id for chunk in plan.chunks}
        strangers = sorted(map(str, (result.samples.keys() | result.failed) - planned))
        if strangers:
            raise InvariantError(
                f"step {plan.step} has no chunk of {', '.join(strangers):.80}"
            )
        for chunk in plan.chunks:
            request_id, samples = chunk.request_id, result.samples.get(chunk.request_id)
            num_given = 0 if samples is None else len(samples)
            is_needless = (
                request_id in result.failed or self._lives[request_id].is_cancelled
            )
            if num_given != chunk.num_samples and (num_given or not is_needless):
                raise InvariantError(
                    f"step {plan.step} needs {chunk.num_samples} samples of request "
                    f"{request_id}, got {num_given}"
                )
            for sample in samples or ():
                _check_sample(sample, f"step {plan.step}, request {request_id}")

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take what a plan's forward pass computed and sampled."""
        lives = self._lives
        lives.coasting.committed(1)
        for each in self._in_order(plan, lives.coasting.take_cancelled()):
            if isinstance(each, Chunk):
                self._take_chunk(each, result, now)
            else:
                lives.abort(each, FinishReason.CANCELLED, now)

    def give_up(self, plan: StepPlan, now: float) -> None:
        """Abort everybody for whom a plan's failed forward pass computed something."""
        lives = self._lives
        lives.coasting.take_cancelled()  # among all who coast
        for each in self._in_order(plan, lives.coasting.requests()):
            request = lives[each.request_id] if isinstance(each, Chunk) else each
            lives.abort(request, _reason_of_failed(request), now)

    # Private

    def _in_order(
        self, plan: StepPlan, coasting: list[Request]
    ) -> Sequence[Chunk | Request]:
        """Put coasting requests where their decodes would stand among the chunks."""
        if not coasting:
            return plan.chunks
        coasting.sort(key=lambda request: request.order_key, reverse=True)
        merged: list[Chunk | Request] = []
        for chunk in plan.chunks:
            request = self._lives[chunk.request_id]
            while coasting and (
                request.is_unfinished or coasting[-1].order_key < request.order_key
            ):
                merged.append(coasting.pop())
            merged.append(chunk)
        return [*merged, *reversed(coasting)]

    def _take_chunk(self, chunk: Chunk, result: StepResult, now: float) -> None:
        lives = self._lives
        request = lives[chunk.request_id]
        if chunk.request_id in result.failed:
            # What its table holds may be the cause, so nobody else is to go on from it.
            lives.abort(request, _reason_of_failed(request), now, is_sound=False)
            return
        lives.cache.copied(request.held, now)
        request.count_computed(chunk.start, chunk.end)
        request.num_computed = chunk.end
        if request.is_unfinished:
            lives.journal.prefilled(request, chunk.num_tokens)
        samples = result.samples.get(chunk.request_id, ())
        if not samples or any(s.stop is not FinishReason.FAILED for s in samples):
            # KV from which no sound logits followed must not be handed on.
            num_added = lives.cache.publish(
                request.held, request.growing_tokens, request.num_computed, now
            )
            lives.journal.published(request, num_added)
        if request.is_cancelled:
            lives.abort(request, FinishReason.CANCELLED, now)
            return
        if request.is_unfinished:
            if chunk.end == request.num_tokens:
                lives.end_prefill(request)
            else:
                lives.line.order.moved(request)
        if chunk.num_samples == 0:
            return
        heirs = [request, *lives.fork(request, chunk.num_samples, now)]
        for heir, sample in zip(heirs, samples, strict=True):
            self._take_sample(heir, sample, now)
        self._leave_places(heirs, now)

    def _leave_places(self, heirs: list[Request], now: float) -> None:
        """Let samples wait that found no place: only one was asked for them all.

        They have their first token, and what led to it stays cached if it may.
        """
        lives = self._lives
        for sample in reversed(heirs[1:]):
            if len(lives.running) <= lives.max_num_running:
                return
            if sample.state is RequestState.RUNNING:
                lives.preempt(sample, now, reason=WaitReason.PLACES)

    def _take_sample(self, request: Request, sample: Sample, now: float) -> None:
        lives = self._lives
        if sample.stop is FinishReason.FAILED:
            # There is no token: the driver could not sample one. What led to it must
            # not be handed on either.
            lives.abort(request, FinishReason.FAILED, now, is_sound=False)
            return
        request.append(sample.token)
        lives.journal.sampled(request)
        lives.outbox.put(
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
        if reason is not None:
            lives.finish(request, reason, now)


def _reason_of_failed(request: Request) -> FinishReason:
    return FinishReason.CANCELLED if request.is_cancelled else FinishReason.FAILED


def _check_sample(sample: object, where: str) -> None:
    if not isinstance(sample, Sample):
        raise InvariantError(f"{where}: not a Sample, got {sample!r:.80}")
    if sample.stop is not None and not isinstance(sample.stop, FinishReason):
        raise InvariantError(
            f"{where}: stop must be a FinishReason or None, got {sample.stop!r:.80}"
        )
    token = sample.token
    is_token = isinstance(token, int) and -(2**31) <= token < 2**31
    if not is_token and sample.stop is not FinishReason.FAILED:
        raise InvariantError(f"{where}: not an int32 token id, got {token!r:.80}")
