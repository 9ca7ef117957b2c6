"""The engine: prompts in, tokens out, prefixes computed once.

Owns the wiring of core and tensors and what belongs to a request outside the core:
sampling parameters, text, timeline. Knows nothing of HTTP, and decides nothing: every
step is the scheduler's plan.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch

from stemkv.core.cache import CacheUsage, PrefixCache
from stemkv.core.config import CacheConfig, SchedulerConfig
from stemkv.core.events import (
    Event,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    TokenSampled,
)
from stemkv.core.eviction import Lru
from stemkv.core.identity import ComputeIdentity, Domain
from stemkv.core.order import Fcfs
from stemkv.core.plan import Sample, StepPlan, StepResult
from stemkv.core.request import (
    FinishReason,
    RequestId,
    RequestSpec,
    TokenCounts,
    child_id,
)
from stemkv.core.scheduler import Scheduler
from stemkv.core.tokens import TokenIds
from stemkv.engine.identity import identify
from stemkv.engine.kv import KvMemory
from stemkv.engine.linear import LinearFacts
from stemkv.engine.load import LoadedModel
from stemkv.engine.numerics import numerics_named
from stemkv.engine.runner import ModelRunner, prepare_model
from stemkv.engine.sampling import SamplingParams, choose_token, make_generator
from stemkv.engine.selftest import check_exact, check_layers
from stemkv.engine.text import OutputText
from stemkv.engine.threads import default_num_threads
from stemkv.errors import (
    ConfigError,
    EmptyPrompt,
    InvariantError,
    NumericsError,
    RequestError,
    StemKVError,
    StopInPrompt,
)
from stemkv.measure.steps import StepRecord
from stemkv.measure.timeline import RequestTimeline

__all__ = ["Completion", "Engine", "EngineConfig"]

_log = logging.getLogger(__name__)

_MAX_STEP_RECORDS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine serves; what it serves is the loaded model's matter."""

    numerics: str = "exact"
    kv_memory_bytes: int = 1 << 30
    block_size: int = 16  # tokens
    token_budget: int = 512  # most tokens in one step
    max_num_running: int = 64
    reuses_prefixes: bool = True
    num_threads: int | None = None  # None: usable cores less one
    runs_self_test: bool = True

    def __post_init__(self) -> None:
        numerics_named(self.numerics)
        for name in ("kv_memory_bytes", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {self.num_threads}")


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
    timeline: RequestTimeline


@dataclass(slots=True)
class _Live:
    """What the engine keeps of one sample in flight."""

    request_id: RequestId
    sample: int
    params: SamplingParams
    generator: torch.Generator
    text: OutputText | None
    timeline: RequestTimeline
    is_in_core: bool  # whether the scheduler knows this sample by its own id yet
    token_ids: list[int] = field(default_factory=list)


class Engine:
    """Serves one model.

    Takes ownership of `loaded.model`: its linears are packed in place. `clock` gives
    seconds and must not go back; `on_logits(request id of the sample, output index,
    logits row)` sees every row that is sampled from, before it is.

    Not safe for use by several threads at once.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = monotonic,
        on_logits: Callable[[RequestId, int, torch.Tensor], None] | None = None,
    ) -> None:
        self.config = EngineConfig() if config is None else config
        self.loaded = loaded
        self.on_logits = on_logits
        self.steps: deque[StepRecord] = deque(maxlen=_MAX_STEP_RECORDS)  # newest last
        self._clock = clock
        self._live: dict[RequestId, _Live] = {}
        self._ended: list[Completion] = []  # not yet returned by `step`
        self._num_added = 0
        self._broken_by: str | None = None  # what is impossible happened; see `step`
        torch.set_num_threads(self.config.num_threads or default_num_threads())
        numerics = numerics_named(self.config.numerics)
        linears = prepare_model(loaded.model, numerics)
        self.kv = self._make_kv()
        self._runner = ModelRunner(
            loaded.model,
            self.kv,
            numerics,
            num_query_heads=loaded.num_query_heads,
        )
        if self.config.runs_self_test:
            check_layers(self._runner, loaded.vocab_size)
        if numerics.pads_context:
            self._check_exact(linears)
        self.identity: ComputeIdentity = identify(
            loaded,
            numerics,
            block_size=self.config.block_size,
            is_packed=linears.is_packed,
        )
        self.namespace = (
            self.identity.namespace() if self.config.reuses_prefixes else None
        )
        self.cache = PrefixCache(
            CacheConfig(
                num_blocks=self.kv.num_blocks, block_size=self.config.block_size
            ),
            Lru(),
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                token_budget=self.config.token_budget,
                max_num_running=self.config.max_num_running,
                max_request_tokens=loaded.context_length,
            ),
            self.cache,
            Fcfs(),
        )

    # Questions

    @property
    def has_work(self) -> bool:
        """Whether any request is in flight or has ended unreported."""
        return self.scheduler.has_work or bool(self._ended)

    def usage(self) -> CacheUsage:
        """Return blocks by state and totals."""
        return self.cache.usage()

    def encode(
        self,
        prompt: str | Sequence[dict[str, str]],
        *,
        is_answer_next: bool = True,
    ) -> TokenIds:
        """Return the token ids of a text, or of chat messages by the chat template.

        With `is_answer_next` the template opens the assistant's turn. Raises
        `EmptyPrompt` for nothing, `ConfigError` if the engine lacks what it takes.
        """
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            raise ConfigError("this engine has no tokenizer; pass TokenIds")
        if not isinstance(prompt, str | Sequence):
            raise RequestError(
                f"prompt must be text or messages, got {type(prompt).__name__}",
                field="prompt",
            )
        if not prompt:
            raise EmptyPrompt("prompt is empty; give some text", field="prompt")
        if isinstance(prompt, str):
            return TokenIds.from_ids(tokenizer(prompt)["input_ids"])
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"model {self.loaded.name} has no chat template; pass text instead"
            )
        ids = tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=is_answer_next, return_dict=False
        )
        return TokenIds.from_ids(ids)

    # Verbs

    def declare_public(self, prefix: TokenIds) -> int:
        """Let all tenants share the whole blocks of a prefix; return how many."""
        if self.namespace is None:
            return 0
        prefix.check_vocabulary(self.loaded.vocab_size)
        return self.cache.declare_public(self.namespace, prefix)

    def add(
        self,
        prompt: TokenIds,
        params: SamplingParams | None = None,
        *,
        tenant: str = "default",
        request_id: str | None = None,
        arrival_s: float | None = None,
    ) -> RequestId:
        """Queue a request; return its id.

        `tenant` is the authenticated principal. Raises a `RequestError` for a request
        that can never be served; nothing else in flight is affected.
        """
        params = SamplingParams() if params is None else params
        if request_id is None:
            request_id = self._new_id()
        prompt.check_vocabulary(self.loaded.vocab_size)
        self._check_stop(prompt, params)
        spec = RequestSpec(
            request_id=RequestId(request_id),
            prompt=prompt,
            max_new_tokens=params.max_new_tokens,
            arrival_s=self._clock() if arrival_s is None else arrival_s,
            domain=Domain.private(tenant),
            namespace=self.namespace,
            num_samples=params.num_samples,
        )
        # Last, so that nothing can fail once the scheduler knows the request.
        live = {
            child_id(spec.request_id, sample): self._make_live(spec, sample, params)
            for sample in range(min(params.num_samples, self.config.max_num_running))
        }
        self.scheduler.add(spec)
        self._live.update(live)
        return spec.request_id

    def cancel(self, request_id: RequestId) -> bool:
        """End a request with all its samples; `False` if all have ended."""
        now = self._clock()
        ids = [
            sample_id
            for sample_id, live in self._live.items()
            if live.request_id == request_id and live.is_in_core
        ]
        num_cancelled = sum(self.scheduler.cancel(each, now) for each in ids)
        self._ended.extend(self._settle(self.scheduler.take_events()))
        return num_cancelled > 0

    def step(self) -> tuple[Completion, ...]:
        """Run one step; return the samples that ended with it."""
        if self._broken_by is not None:
            raise InvariantError(
                f"this engine stopped at a defect ({self._broken_by}); make a new one"
            )
        if self.scheduler.has_work:
            try:
                self._ended.extend(self._settle(self._run_step()))
            except InvariantError as error:
                self._broken_by = str(error)
                raise
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    def drain(self) -> list[Completion]:
        """Step until nothing is in flight; return what ended, in that order."""
        completions: list[Completion] = []
        while self.has_work:
            completions.extend(self.step())
        return completions

    def generate(
        self,
        prompts: Sequence[str | TokenIds],
        params: SamplingParams | None = None,
        *,
        tenant: str = "default",
    ) -> list[Completion]:
        """Continue all prompts; return the completions in order of prompt, sample."""
        ids: list[RequestId] = []
        try:
            for prompt in prompts:
                tokens = prompt if isinstance(prompt, TokenIds) else self.encode(prompt)
                ids.append(self.add(tokens, params, tenant=tenant))
        except BaseException:  # whatever it was, none of ours may stay behind
            for request_id in ids:
                self.cancel(request_id)
            self._ended = [c for c in self._ended if c.request_id not in ids]
            raise
        rank = {request_id: index for index, request_id in enumerate(ids)}
        completions = self.drain()
        self._ended.extend(c for c in completions if c.request_id not in rank)
        own = [c for c in completions if c.request_id in rank]
        return sorted(own, key=lambda c: (rank[c.request_id], c.sample))

    # Private

    def _new_id(self) -> str:
        """Return an id that no request in flight has."""
        while True:
            request_id = f"request-{self._num_added}"
            self._num_added += 1
            if request_id not in self._live:
                return request_id

    def _run_step(self) -> tuple[Event, ...]:
        plan = self.scheduler.schedule(self._clock())
        start = self._clock()
        try:
            logits = self._runner.execute(plan)
            result = self._sample(plan, logits)
        except BaseException as error:
            # Whatever it was, the next step must find no plan pending.
            events = self.scheduler.abandon(plan, self._clock())
            if isinstance(error, Exception) and not isinstance(error, StemKVError):
                # Kernels and model code fail in all ways. One failing pass must not
                # stop the engine: its requests end, others go on.
                _log.exception("step %d failed; its requests are aborted", plan.step)
                return events
            self._ended.extend(self._settle(events))
            raise
        now = self._clock()
        self._record(plan, start, now)
        return self.scheduler.commit(plan, result, now)

    def _check_exact(self, linears: LinearFacts) -> None:
        """Raise `NumericsError` unless this build and model keep every bit."""
        loaded = self.loaded
        if not linears.is_stable:
            raise NumericsError(
                f"this build does not keep numerics class 'exact': in {loaded.dtype} a "
                f"row of a linear depends on how many others there are; use another "
                f"dtype, or numerics 'tolerant'"
            )
        if linears.other_matrices:
            raise NumericsError(
                f"numerics class 'exact' does not hold for {loaded.name}: "
                f"{linears.other_matrices[0]} multiplies by a matrix outside a linear "
                f"layer, where rows may depend on each other; use 'tolerant'"
            )
        if self.config.runs_self_test:
            check_exact(self._runner, loaded.vocab_size, loaded.context_length)

    def _make_kv(self) -> KvMemory:
        loaded = self.loaded
        per_block = loaded.kv_bytes_per_token * self.config.block_size
        num_blocks = self.config.kv_memory_bytes // per_block
        if num_blocks < 1:
            raise ConfigError(
                f"kv_memory_bytes {self.config.kv_memory_bytes} holds no block; one "
                f"block of {self.config.block_size} tokens takes {per_block} bytes"
            )
        return KvMemory(
            num_layers=loaded.num_layers,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            num_kv_heads=loaded.num_kv_heads,
            head_dim=loaded.head_dim,
            dtype=loaded.dtype,
        )

    def _make_live(
        self, spec: RequestSpec, sample: int, params: SamplingParams
    ) -> _Live:
        tokenizer: Any = self.loaded.tokenizer
        return _Live(
            request_id=spec.request_id,
            sample=sample,
            params=params,
            generator=make_generator(params.seed, sample),
            text=None if tokenizer is None else OutputText(tokenizer, params.stop),
            timeline=RequestTimeline(arrival_s=spec.arrival_s),
            is_in_core=sample == 0,
        )

    def _check_stop(self, prompt: TokenIds, params: SamplingParams) -> None:
        if not params.stop:
            return
        if self.loaded.tokenizer is None:
            raise StopInPrompt("stop strings need a tokenizer", field="stop")
        if params.allows_stop_in_prompt:
            return
        text = self.loaded.tokenizer.decode(list(prompt))
        for stop in params.stop:
            if stop in text:
                raise StopInPrompt(
                    f"stop string {stop!r} occurs in the prompt, so it probably is not "
                    f"what should end the output; choose another, or set "
                    f"allows_stop_in_prompt to look for it in the output only",
                    field="stop",
                )

    def _sample(
        self, plan: StepPlan, logits: dict[RequestId, torch.Tensor]
    ) -> StepResult:
        samples: dict[RequestId, tuple[Sample, ...]] = {}
        for chunk in plan.chunks:
            if chunk.num_samples:
                row = logits[chunk.request_id]
                is_finite = bool(row.isfinite().all())
                samples[chunk.request_id] = tuple(
                    self._sample_safely(child_id(chunk.request_id, k), row, is_finite)
                    for k in range(chunk.num_samples)
                )
        return StepResult(samples)

    def _sample_safely(
        self, sample_id: RequestId, row: torch.Tensor, is_finite: bool
    ) -> Sample:
        """Sample, or fail this sample alone: it must not end its batch mates."""
        try:
            return self._sample_one(sample_id, row, is_finite)
        except StemKVError:
            raise
        except Exception:
            _log.exception("request %s cannot be sampled; it is aborted", sample_id)
            return Sample(0, FinishReason.FAILED)

    def _sample_one(
        self, sample_id: RequestId, row: torch.Tensor, is_finite: bool
    ) -> Sample:
        if not is_finite:
            _log.error("request %s: logits are not finite; it is aborted", sample_id)
            return Sample(0, FinishReason.FAILED)
        live = self._live[sample_id]
        if self.on_logits is not None:
            self.on_logits(sample_id, len(live.token_ids), row)
        token = choose_token(row, live.params, live.generator)
        if token in self.loaded.eos_token_ids and not live.params.ignore_eos:
            return Sample(token, FinishReason.STOP_TOKEN)
        if live.text is not None and live.text.append(token):
            return Sample(token, FinishReason.STOP_STRING)
        return Sample(token)

    def _settle(self, events: tuple[Event, ...]) -> tuple[Completion, ...]:
        """Carry events over into what the engine keeps; return what ended."""
        completions: list[Completion] = []
        for event in events:
            match event:
                case TokenSampled():
                    live = self._live[event.request_id]
                    live.token_ids.append(event.token)
                    live.timeline.token_times_s.append(event.now)
                case RequestAdmitted():
                    for live in self._samples_of(event.request_id):
                        if live.timeline.first_scheduled_s is None:
                            live.timeline.first_scheduled_s = event.now
                case RequestForked():
                    for sample_id in event.child_ids:
                        self._live[sample_id].is_in_core = True
                case RequestAborted():
                    # Samples that had not split off yet end with their request.
                    for live in self._samples_of(event.request_id):
                        completions.append(self._complete(live, event))
                case RequestFinished():
                    live = self._live[event.request_id]
                    completions.append(self._complete(live, event))
                case _:
                    pass
        return tuple(completions)

    def _samples_of(self, request_id: RequestId) -> list[_Live]:
        """Return the sample with this id and those that have not split off it yet."""
        return [
            live
            for sample_id, live in self._live.items()
            if sample_id == request_id
            or (live.request_id == request_id and not live.is_in_core)
        ]

    def _complete(
        self, live: _Live, event: RequestFinished | RequestAborted
    ) -> Completion:
        del self._live[child_id(live.request_id, live.sample)]
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
            timeline=live.timeline,
        )

    def _record(self, plan: StepPlan, start: float, end: float) -> None:
        num_decode = sum(1 for c in plan.chunks if self._is_decode(c.request_id))
        self.steps.append(
            StepRecord(
                step=plan.step,
                start_s=start,
                end_s=end,
                num_prefill_tokens=plan.num_tokens - num_decode,
                num_decode_tokens=num_decode,
            )
        )

    def _is_decode(self, request_id: RequestId) -> bool:
        request = self.scheduler.request(request_id)
        return request is not None and not request.is_prefilling
