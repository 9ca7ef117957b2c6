"""The samples in flight: what an engine keeps of them outside the core.

Owns sampling parameters, random generators, text and timelines of each sample, and
turns events of the core into deltas and completions. Decides nothing: which sample gets
a token when is the scheduler's plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
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
    Request,
    RequestId,
    RequestSpec,
    RequestState,
    TokenCounts,
    child_id,
)
from stemkv.engine.attempt import Computed
from stemkv.engine.delta import Delta, TextDelta, TextEnded, TextTakenBack
from stemkv.engine.embedding import EmbeddedPrompt
from stemkv.engine.load import LoadedModel
from stemkv.engine.sampling import (
    SamplingParams,
    choose_token,
    log_probabilities,
    make_generator,
)
from stemkv.engine.text import OutputText
from stemkv.errors import InvariantError
from stemkv.measure.timeline import RequestTimeline

__all__ = ["Completion", "LiveSample", "LiveSamples", "Progress"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where one sample of a request in flight stands."""

    sample: int
    state: RequestState
    num_prompt_tokens: int
    num_ready_tokens: int  # of prompt and output, that need not be computed any more
    token_ids: tuple[int, ...]  # sampled so far


@dataclass(slots=True)
class LiveSample:
    """What the engine keeps of one sample in flight."""

    request_id: RequestId
    tenant: str | None  # None: nobody's, see `EngineConfig.single_tenant`
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
    num_told: int = 0  # leading characters of the text that deltas have told
    generator: torch.Generator = field(init=False)
    text: OutputText | None = field(init=False)
    # Of the token that was sampled last, if it was asked for.
    logprobs: tuple[float, tuple[tuple[int, float], ...]] | None = None

    def __post_init__(self) -> None:
        self._begin()

    @property
    def sample_id(self) -> RequestId:
        """What the scheduler calls this sample."""
        return child_id(self.request_id, self.sample)

    @property
    def id_in_core(self) -> RequestId:
        """What the scheduler calls it now: by its request, until it splits off."""
        return self.sample_id if self.is_in_core else self.request_id

    def progress(self, request: Request | None) -> Progress:
        """Say where it stands; `request` is what the scheduler knows it as."""
        if request is None:
            raise InvariantError(f"{self.sample_id} is in flight and not in the core")
        return Progress(
            sample=self.sample,
            state=request.state,
            num_prompt_tokens=request.num_prompt_tokens,
            num_ready_tokens=request.num_ready,
            token_ids=tuple(self.token_ids),
        )

    def start_over(self) -> None:
        """Forget the output, so that it comes out as if nothing had happened."""
        self.num_restarts += 1
        self.token_ids.clear()
        self.timeline.token_times_s.clear()
        self.num_told = 0
        self._begin()

    def delta(self, event: TokenSampled) -> TextDelta:
        """Tell of a token, with the text that has become final."""
        logprob, top = (None, ()) if self.logprobs is None else self.logprobs
        end = 0 if self.text is None else self.text.num_final
        return TextDelta(
            request_id=self.request_id,
            sample=self.sample,
            index=event.index,
            token=event.token,
            text=self._tell(end),
            logprob=logprob,
            top_logprobs=top,
        )

    def end(self, reason: FinishReason) -> TextEnded:
        """Bring the text to its end, and tell what was held back."""
        if self.text is not None:
            if self.text.num_tokens > len(self.token_ids):
                # Its last token was sampled and not taken: it was cancelled meanwhile.
                self.text = OutputText(self.tokenizer, self.params.stop)
                for token in self.token_ids:
                    self.text.append(token)
            if reason is not FinishReason.STOP_STRING:
                self.text.finish()
        return TextEnded(
            request_id=self.request_id,
            sample=self.sample,
            text=self._tell(0 if self.text is None else len(self.text.text)),
            finish_reason=reason,
        )

    def _tell(self, end: int) -> str:
        start, self.num_told = self.num_told, max(self.num_told, end)
        return "" if self.text is None else self.text.text[start : self.num_told]

    def _begin(self) -> None:
        self.generator = make_generator(self.params.seed, self.sample)
        has_text = self.tokenizer is not None
        self.text = OutputText(self.tokenizer, self.params.stop) if has_text else None


class LiveSamples:
    """All samples in flight, by the id under which the scheduler will know them.

    Everything that is asked about one request takes as long as it has samples.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._live: dict[RequestId, LiveSample] = {}
        self._of_request: dict[RequestId, dict[int, LiveSample]] = {}
        self._embedded: dict[RequestId, EmbeddedPrompt] = {}

    # Questions

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._live

    def __iter__(self) -> Iterator[LiveSample]:
        return iter(tuple(self._live.values()))

    @property
    def embedded(self) -> Mapping[RequestId, EmbeddedPrompt]:
        """The prompts with spans, by sample."""
        return self._embedded

    def get(self, sample_id: RequestId) -> LiveSample | None:
        """Return the sample with this id."""
        return self._live.get(sample_id)

    def has_request(self, request_id: RequestId) -> bool:
        """Whether any sample of a request is in flight."""
        return request_id in self._of_request

    def of_request(self, request_id: RequestId) -> list[LiveSample]:
        """Return the samples of a request that are in flight, by their numbers."""
        return list(self._of_request.get(request_id, {}).values())

    # Verbs

    def take_in(
        self,
        spec: RequestSpec,
        params: SamplingParams,
        *,
        tenant: str | None,
        adapter: str | None,
        embedded: EmbeddedPrompt | None,
        num_samples: int,
    ) -> list[LiveSample]:
        """Keep the samples of a request, and return them."""
        samples = [
            LiveSample(
                request_id=spec.request_id,
                tenant=tenant,
                request_class=spec.request_class,
                sample=sample,
                params=params,
                tokenizer=self._loaded.tokenizer,
                timeline=RequestTimeline(arrival_s=spec.arrival_s),
                adapter=adapter,
                start_position=spec.start_position,
                embedded=embedded,
                is_in_core=sample == 0,
            )
            for sample in range(num_samples)
        ]
        self._of_request[spec.request_id] = {live.sample: live for live in samples}
        for live in samples:
            self._live[live.sample_id] = live
            if embedded is not None:
                self._embedded[live.sample_id] = embedded
        return samples

    def drop(self, samples: list[LiveSample]) -> None:
        """Forget samples, whatever becomes of them."""
        for live in samples:
            self._live.pop(live.sample_id, None)
            self._embedded.pop(live.sample_id, None)
            siblings = self._of_request.get(live.request_id, {})
            siblings.pop(live.sample, None)
            if not siblings:
                self._of_request.pop(live.request_id, None)

    def sample(
        self, plan: StepPlan, computed: Computed, on_logits: OnLogits | None
    ) -> StepResult:
        """Choose the tokens that a plan asks for."""
        samples: dict[RequestId, tuple[Sample, ...]] = {}
        for chunk in plan.chunks:
            if chunk.num_samples and chunk.request_id not in computed.failed:
                row = computed.logits[chunk.request_id]
                is_finite = bool(row.isfinite().all())
                samples[chunk.request_id] = tuple(
                    self._sample_safely(
                        child_id(chunk.request_id, k), row, is_finite, on_logits
                    )
                    for k in range(chunk.num_samples)
                )
        return StepResult(samples, computed.failed)

    def settle(self, event: Event) -> tuple[list[Delta], list[Completion]]:
        """Carry an event over into what is kept; return what came of it."""
        deltas: list[Delta] = []
        completions: list[Completion] = []
        match event:
            case TokenSampled():
                live = self._live[event.request_id]
                live.token_ids.append(event.token)
                live.timeline.token_times_s.append(event.now)
                deltas.append(live.delta(event))
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
                    deltas.append(
                        TextTakenBack(request_id=live.request_id, sample=live.sample)
                    )
            case RequestAborted() | RequestFinished():
                # Samples that had not split off yet end with their request.
                for live in self._with(event.request_id):
                    deltas.append(live.end(event.reason))
                    completions.append(_completion(live, event))
                    self.drop([live])
            case _:
                pass
        return deltas, completions

    # Private

    def _with(self, request_id: RequestId) -> list[LiveSample]:
        """Return the sample with this id and those that have not split off it yet."""
        own = self._live.get(request_id)
        unsplit = [live for live in self.of_request(request_id) if not live.is_in_core]
        return unsplit if own is None else [own, *unsplit]

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
        if live.params.num_logprobs is not None:
            live.logprobs = log_probabilities(row, token, live.params.num_logprobs)
        if token in self._loaded.eos_token_ids and not live.params.ignore_eos:
            return Sample(token, FinishReason.STOP_TOKEN)
        if live.text is not None and live.text.append(token):
            return Sample(token, FinishReason.STOP_STRING)
        return Sample(token)


def _completion(
    live: LiveSample, event: RequestFinished | RequestAborted
) -> Completion:
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
