"""The samples in flight: what an engine keeps of them outside the core.

Owns sampling parameters, random generators, text and timelines of each sample, and
turns events of the core into completions. Decides nothing: which sample gets a token
when is the scheduler's plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from stemkv.core.schedule.events import (
    Event,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestRestarted,
    TokenSampled,
)
from stemkv.core.schedule.plan import Sample, StepPlan, StepResult
from stemkv.core.schedule.request import (
    FinishReason,
    RequestId,
    RequestSpec,
    TokenCounts,
    child_id,
)
from stemkv.engine.embedding import EmbeddedPrompt
from stemkv.engine.load import LoadedModel
from stemkv.engine.sampling import SamplingParams, choose_token, make_generator
from stemkv.engine.text import OutputText
from stemkv.errors import InvariantError
from stemkv.measure.timeline import RequestTimeline

__all__ = ["Completion", "LiveSample", "LiveSamples"]

_log = logging.getLogger(__name__)

OnLogits = Callable[[RequestId, int, torch.Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished continuation of one request."""

    request_id: RequestId  # of the request, not of the sample
    sample: int  # 0 … num_samples - 1
    text: str  # "" if the engine has no tokenizer
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    counts: TokenCounts
    num_preemptions: int
    num_restarts: int  # times a rollout made it begin again
    timeline: RequestTimeline


@dataclass(slots=True)
class LiveSample:
    """What the engine keeps of one sample in flight."""

    request_id: RequestId
    tenant: str
    request_class: str | None
    sample: int
    params: SamplingParams
    tokenizer: Any
    timeline: RequestTimeline
    adapter: str | None  # its name; which version runs is the scheduler's to know
    start_position: int
    embedded: EmbeddedPrompt | None
    is_in_core: bool  # whether the scheduler knows this sample by its own id yet
    num_restarts: int = 0
    token_ids: list[int] = field(default_factory=list)
    generator: torch.Generator = field(init=False)
    text: OutputText | None = field(init=False)

    def __post_init__(self) -> None:
        self._begin()

    @property
    def sample_id(self) -> RequestId:
        """What the scheduler calls this sample."""
        return child_id(self.request_id, self.sample)

    def start_over(self) -> None:
        """Forget the output, so that it comes out as if nothing had happened."""
        self.num_restarts += 1
        self.token_ids.clear()
        self.timeline.token_times_s.clear()
        self._begin()

    def _begin(self) -> None:
        self.generator = make_generator(self.params.seed, self.sample)
        has_text = self.tokenizer is not None
        self.text = OutputText(self.tokenizer, self.params.stop) if has_text else None


class LiveSamples:
    """All samples in flight, by the id under which the scheduler will know them."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._live: dict[RequestId, LiveSample] = {}

    # Questions

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._live

    def __iter__(self) -> Iterator[LiveSample]:
        return iter(tuple(self._live.values()))

    def get(self, sample_id: RequestId) -> LiveSample | None:
        """Return the sample with this id."""
        return self._live.get(sample_id)

    def of_request(self, request_id: RequestId) -> list[LiveSample]:
        """Return the samples of a request that the scheduler knows by their own id."""
        return [
            live
            for live in self._live.values()
            if live.request_id == request_id and live.is_in_core
        ]

    def embedded(self) -> dict[RequestId, EmbeddedPrompt]:
        """Return the prompts with spans, by sample."""
        return {
            sample_id: live.embedded
            for sample_id, live in self._live.items()
            if live.embedded is not None
        }

    # Verbs

    def make(
        self,
        spec: RequestSpec,
        params: SamplingParams,
        *,
        tenant: str,
        request_class: str | None,
        adapter: str | None,
        embedded: EmbeddedPrompt | None,
        max_num_samples: int,
    ) -> list[LiveSample]:
        """Return the samples of a request, not yet in flight; see `take_in`."""
        return [
            LiveSample(
                request_id=spec.request_id,
                tenant=tenant,
                request_class=request_class,
                sample=sample,
                params=params,
                tokenizer=self._loaded.tokenizer,
                timeline=RequestTimeline(arrival_s=spec.arrival_s),
                adapter=adapter,
                start_position=spec.start_position,
                embedded=embedded,
                is_in_core=sample == 0,
            )
            for sample in range(min(params.num_samples, max_num_samples))
        ]

    def take_in(self, samples: list[LiveSample]) -> None:
        """Keep samples whose request the scheduler has accepted."""
        self._live.update((live.sample_id, live) for live in samples)

    def sample(
        self,
        plan: StepPlan,
        logits: dict[RequestId, torch.Tensor],
        on_logits: OnLogits | None,
    ) -> StepResult:
        """Choose the tokens that a plan asks for."""
        samples: dict[RequestId, tuple[Sample, ...]] = {}
        for chunk in plan.chunks:
            if chunk.num_samples:
                row = logits[chunk.request_id]
                is_finite = bool(row.isfinite().all())
                samples[chunk.request_id] = tuple(
                    self._sample_safely(
                        child_id(chunk.request_id, k), row, is_finite, on_logits
                    )
                    for k in range(chunk.num_samples)
                )
        return StepResult(samples)

    def settle(self, events: tuple[Event, ...]) -> tuple[Completion, ...]:
        """Carry events over into what is kept; return what ended."""
        completions: list[Completion] = []
        for event in events:
            match event:
                case TokenSampled():
                    live = self._live[event.request_id]
                    live.token_ids.append(event.token)
                    live.timeline.token_times_s.append(event.now)
                case RequestAdmitted():
                    for live in self._with(event.request_id):
                        if live.timeline.first_scheduled_s is None:
                            live.timeline.first_scheduled_s = event.now
                case RequestForked():
                    for sample_id in event.child_ids:
                        self._live[sample_id].is_in_core = True
                case RequestRestarted():
                    for live in self._with(event.request_id):
                        live.start_over()
                case RequestAborted():
                    # Samples that had not split off yet end with their request.
                    for live in self._with(event.request_id):
                        completions.append(self._complete(live, event))
                case RequestFinished():
                    live = self._live[event.request_id]
                    completions.append(self._complete(live, event))
                case _:
                    pass
        return tuple(completions)

    # Private

    def _with(self, request_id: RequestId) -> list[LiveSample]:
        """Return the sample with this id and those that have not split off it yet."""
        return [
            live
            for sample_id, live in self._live.items()
            if sample_id == request_id
            or (live.request_id == request_id and not live.is_in_core)
        ]

    def _sample_safely(
        self,
        sample_id: RequestId,
        row: torch.Tensor,
        is_finite: bool,
        on_logits: OnLogits | None,
    ) -> Sample:
        """Sample, or fail this sample alone: it must not end its batch mates."""
        try:
            return self._sample_one(sample_id, row, is_finite, on_logits)
        except InvariantError:
            raise
        except Exception:
            _log.exception("request %s cannot be sampled; it is aborted", sample_id)
            return Sample(0, FinishReason.FAILED)

    def _sample_one(
        self,
        sample_id: RequestId,
        row: torch.Tensor,
        is_finite: bool,
        on_logits: OnLogits | None,
    ) -> Sample:
        if not is_finite:
            _log.error("request %s: logits are not finite; it is aborted", sample_id)
            return Sample(0, FinishReason.FAILED)
        live = self._live[sample_id]
        if on_logits is not None:
            on_logits(sample_id, len(live.token_ids), row)
        token = choose_token(row, live.params, live.generator)
        if token in self._loaded.eos_token_ids and not live.params.ignore_eos:
            return Sample(token, FinishReason.STOP_TOKEN)
        if live.text is not None and live.text.append(token):
            return Sample(token, FinishReason.STOP_STRING)
        return Sample(token)

    def _complete(
        self, live: LiveSample, event: RequestFinished | RequestAborted
    ) -> Completion:
        del self._live[live.sample_id]
        if live.text is not None and event.reason is not FinishReason.STOP_STRING:
            live.text.finish()
        return Completion(
            request_id=live.request_id,
            sample=live.sample,
            text="" if live.text is None else live.text.text,
            token_ids=tuple(live.token_ids),
            finish_reason=event.reason,
            counts=event.counts,
            num_preemptions=event.num_preemptions,
            num_restarts=live.num_restarts,
            timeline=live.timeline,
        )
