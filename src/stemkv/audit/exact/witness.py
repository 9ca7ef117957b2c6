"""Engines whose every answer is kept, and the cold runs they are held against.

Owns what is asked of an engine, what is seen of each answer (KV as it lay in memory,
logits, where the blocks came from), and the comparison. Knows nothing of which states
an audit wants to reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from stemkv.audit.exact.bits import Tally
from stemkv.core.prefix.table import BlockCopy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.events import Event, RequestAdmitted
from stemkv.core.schedule.request import RequestId, TokenCounts, child_id
from stemkv.engine import (
    Completion,
    EmbeddedPrompt,
    Engine,
    EngineConfig,
    LoadedModel,
    SamplingParams,
)
from stemkv.errors import InvariantError

__all__ = ["Ask", "Cold", "EngineMaker", "Seen", "Witness", "compare"]

EngineMaker = Callable[..., Engine]  # as `Engine` is called

_COLD_BUDGET = 4096  # tokens: a cold run is one chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A prompt under one identity. Tensors are supplied embeddings."""

    parts: tuple[tuple[int, ...] | torch.Tensor, ...]
    adapter: str | None = None
    start_position: int = 0

    def followed_by(self, ids: tuple[int, ...]) -> Ask:
        """Return the prompt with more tokens at its end."""
        return replace(self, parts=(*self.parts, ids)) if ids else self

    def prompt(self, engine: Engine) -> TokenIds | EmbeddedPrompt:
        """Return what `engine` takes as the prompt."""
        ids: list[int] = []
        for part in self.parts:
            if isinstance(part, torch.Tensor):
                return engine.embed(
                    [
                        each
                        if isinstance(each, torch.Tensor)
                        else TokenIds.from_ids(each)
                        for each in self.parts
                    ]
                )
            ids.extend(part)
        return TokenIds.from_ids(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One sample, from its first logits to its last."""

    ask: Ask
    sample: int
    outputs: tuple[int, ...]
    first_logits: torch.Tensor
    last_logits: torch.Tensor
    first_kv: torch.Tensor  # of the prompt, when the first logits were there
    kv: torch.Tensor  # of the prompt and all outputs but the last, at the end
    block_ids: tuple[int, ...]  # at the end
    copies: tuple[BlockCopy, ...]  # into blocks of `block_ids`
    counts: TokenCounts
    num_cached: int  # tokens that needed no computing when it was first admitted
    num_found_again: int  # the same, at admissions after a preemption
    num_preemptions: int
    num_mates: int  # most others in a step that sampled for it
    num_prefill_steps: int  # steps from `ask` to its first logits

    @property
    def known(self) -> Ask:
        """Everything whose KV was computed, as one prompt."""
        return self.ask.followed_by(self.outputs[:-1])


@dataclass(slots=True)
class _Notes:
    """What is known of a sample in flight."""

    num_new: int
    first_logits: torch.Tensor | None = None
    last_logits: torch.Tensor | None = None
    first_kv: torch.Tensor | None = None
    kv: torch.Tensor | None = None
    block_ids: tuple[int, ...] = ()
    num_mates: int = 0
    num_prefill_steps: int = 0


@dataclass(slots=True)
class _Asked:
    ask: Ask
    num_new: int
    num_steps_before: int
    admitted: list[RequestAdmitted] = field(default_factory=list)


class Witness:
    """An engine, and everything seen of it.

    `make_engine` is called like `Engine`, so that a broken one can be put in its place.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        make_engine: EngineMaker = Engine,
    ) -> None:
        self.events: list[Event] = []
        self._asked: dict[RequestId, _Asked] = {}
        self._notes: dict[RequestId, _Notes] = {}
        self._copies: dict[int, BlockCopy] = {}  # newest, by target
        self.num_copies = 0  # in steps that sampled
        self._last_step = -1
        self.engine = make_engine(
            loaded, config, on_logits=self._see_logits, on_event=self._see_event
        )

    # Verbs

    def add(
        self,
        ask: Ask,
        *,
        num_new: int = 2,
        num_samples: int = 1,
        temperature: float = 0.0,
    ) -> RequestId:
        """Queue a request that gives exactly `num_new` tokens per sample."""
        request_id = self.engine.add(
            ask.prompt(self.engine),
            SamplingParams(
                max_new_tokens=num_new,
                num_samples=num_samples,
                temperature=temperature,
                ignore_eos=True,
            ),
            adapter=ask.adapter,
            start_position=ask.start_position,
        )
        self._asked[request_id] = _Asked(ask, num_new, len(self.engine.steps))
        return request_id

    def drain(self) -> list[Seen]:
        """Run until nothing is in flight; return what was seen, by request, sample."""
        ended = self.engine.drain()
        rank = {request_id: index for index, request_id in enumerate(self._asked)}
        ended.sort(key=lambda c: (rank[c.request_id], c.sample))
        return [self._seen(completion) for completion in ended]

    def serve(self, ask: Ask, *, num_new: int = 2) -> Seen:
        """Serve one request by itself."""
        self.add(ask, num_new=num_new)
        return self.drain()[0]

    # What the engine calls

    def _see_event(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, RequestAdmitted):
            self._asked[_root(event.request_id)].admitted.append(event)

    def _see_logits(self, sample_id: RequestId, index: int, row: torch.Tensor) -> None:
        plan = self.engine.scheduler.pending
        assert plan is not None, "logits come from a step that is not committed yet"
        if plan.step != self._last_step:
            self._last_step = plan.step
            self._copies.update((copy.target, copy) for copy in plan.copies)
            self.num_copies += len(plan.copies)
        root = _root(sample_id)
        asked = self._asked[root]
        notes = self._notes.setdefault(sample_id, _Notes(asked.num_new))
        notes.num_mates = max(notes.num_mates, len(plan.chunks) - 1)
        # Before the fork, samples live in the request they will split from.
        scheduler = self.engine.scheduler
        request = scheduler.request(sample_id) or scheduler.request(root)
        assert request is not None, "a sample or its root is in flight"
        assert request.lease is not None, "what samples is running"
        block_ids = list(request.lease.table.ids())
        if index == 0:
            notes.first_logits = row.clone()
            notes.first_kv = self.engine.kv.read(block_ids, request.num_tokens)
            notes.num_prefill_steps = (
                len(self.engine.steps) + 1 - asked.num_steps_before
            )
        if index == notes.num_new - 1:
            notes.last_logits = row.clone()
            notes.kv = self.engine.kv.read(block_ids, request.num_tokens)
            notes.block_ids = tuple(block_ids)

    # Private

    def _seen(self, completion: Completion) -> Seen:
        asked = self._asked[completion.request_id]
        notes = self._notes.get(child_id(completion.request_id, completion.sample))
        if notes is None or notes.kv is None:
            raise InvariantError(
                f"a request ended as {completion.finish_reason.value} after "
                f"{len(completion.token_ids)} of {asked.num_new} tokens"
            )
        assert notes.first_logits is not None, "the first row comes before the last"
        assert notes.last_logits is not None, "kept together with the KV"
        assert notes.first_kv is not None, "kept together with the first row"
        admitted = [event.num_cached_tokens for event in asked.admitted]
        return Seen(
            ask=asked.ask,
            sample=completion.sample,
            outputs=completion.token_ids,
            first_logits=notes.first_logits,
            last_logits=notes.last_logits,
            first_kv=notes.first_kv,
            kv=notes.kv,
            block_ids=notes.block_ids,
            copies=tuple(self._copies[i] for i in notes.block_ids if i in self._copies),
            counts=completion.counts,
            num_cached=admitted[0],
            num_found_again=sum(admitted[1:]),
            num_preemptions=completion.num_preemptions,
            num_mates=notes.num_mates,
            num_prefill_steps=notes.num_prefill_steps,
        )


class Cold:
    """Cold runs: one prefill in one chunk, alone, by an engine that reuses nothing."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, *, max_tokens: int
    ) -> None:
        block_size = config.core.cache.block_size
        num_blocks = -(-max_tokens // block_size)
        limits = replace(config.core.scheduler, token_budget=_COLD_BUDGET)
        self._witness = Witness(
            loaded,
            replace(
                config,
                core=replace(config.core, scheduler=limits),
                kv_memory_bytes=num_blocks * block_size * loaded.kv_bytes_per_token,
                reuses_prefixes=False,
            ),
        )
        self._known: dict[
            tuple[bytes, str | None, int], tuple[torch.Tensor, torch.Tensor]
        ] = {}

    @property
    def engine(self) -> Engine:
        """The engine, to load adapters into."""
        return self._witness.engine

    def run(self, ask: Ask) -> tuple[torch.Tensor, torch.Tensor]:
        """Return KV and the last row of logits. Equal prompts are computed once."""
        prompt = ask.prompt(self.engine)
        tokens = prompt.tokens if isinstance(prompt, EmbeddedPrompt) else prompt
        key = (tokens.buffer, ask.adapter, ask.start_position)
        if key not in self._known:
            seen = self._witness.serve(ask, num_new=1)
            if seen.num_cached or seen.num_prefill_steps != 1:
                raise InvariantError(
                    f"a cold run took {seen.num_prefill_steps} steps and reused "
                    f"{seen.num_cached} tokens"
                )
            self._known[key] = (seen.kv, seen.last_logits)
        return self._known[key]


def compare(seen: Seen, cold: Cold) -> Tally:
    """Compare all KV of a sample, and its first and last row of logits, with cold ones.

    The cold run prefills what the sample has generated, so KV written while decoding
    is held against KV of a prefill.
    """
    tally = Tally()
    kv, last = cold.run(seen.known)
    tally.add_kv(kv, seen.kv)
    tally.add_logits(last, seen.last_logits)
    if len(seen.outputs) > 1:
        tally.add_logits(cold.run(seen.ask)[1], seen.first_logits)
    return tally


def _root(sample_id: RequestId) -> RequestId:
    """Return the id of the request that a sample belongs to."""
    return RequestId(sample_id.partition("#")[0])
