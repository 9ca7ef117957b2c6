"""What reuse under a wrong key does: KV and next tokens, computed with the model.

Owns compute states (everything but who asks), their KV side by side in one memory, and
readers that go on from KV that somebody else wrote. Knows nothing of keys or caches:
here the wrong hit has already happened.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from stemkv.audit.identity.contexts import Context, Prompt
from stemkv.core.prefix.table import BlockCopy
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.schedule.plan import Chunk, StepPlan
from stemkv.core.schedule.request import RequestId
from stemkv.engine.embedding import EmbeddedPrompt
from stemkv.engine.kv import KvMemory
from stemkv.engine.load import LoadedModel
from stemkv.engine.lora import Lora
from stemkv.engine.numerics import Numerics
from stemkv.engine.recheck import relative_difference
from stemkv.engine.runner import ModelRunner

__all__ = ["Damage", "StateKey", "States", "scaled_positions", "state_of"]

_BLOCK_SIZE = 16
_NUM_SCRATCH = 32  # blocks for what readers write: so many read in one step
_NUM_TOP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKey:
    """Everything that shapes KV. `variant` names a setting other than the model's."""

    prompt: str
    revision: int = 1
    adapter: str | None = None  # as the runner knows it
    start_position: int = 0
    variant: str = ""


def state_of(context: Context, prompt: Prompt) -> StateKey:
    """Return the state of a context: all but its tenant."""
    return StateKey(
        prompt=prompt.name,
        revision=context.revision,
        adapter=context.adapter,
        start_position=context.start_position,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """What a reader gets that decodes its last prompt token over a writer's KV.

    Distributions are of the next token; the true one is what the reader computes alone.
    """

    kv_error: float  # relative, see `relative_difference`
    kv_max_abs: float
    total_variation: float  # distance of the distributions, in [0, 1]
    kl: float  # nats, of the reused from the true distribution
    is_top_changed: bool
    top_true: tuple[int, ...]
    top_reused: tuple[int, ...]
    is_bit_equal: bool  # the logits


@dataclass(frozen=True, slots=True)
class _State:
    tokens: bytes
    num_tokens: int
    adapter: str | None
    start_position: int
    block_ids: tuple[int, ...]
    kv: torch.Tensor  # [layers, 2, tokens, kv_heads, head_dim]
    logits: torch.Tensor  # [vocabulary], after the last token


class States:
    """States of one model that were computed so far.

    The model's weights may be replaced between calls: KV that was computed stays. The
    caller says which revision is in place by the keys it computes and reads with.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        numerics: Numerics,
        loras: Mapping[str, Lora],
        *,
        num_tokens: int,
    ) -> None:
        """Make room for states of `num_tokens` tokens in all."""
        self._kv = KvMemory(
            num_layers=loaded.num_layers,
            num_blocks=_NUM_SCRATCH + -(-num_tokens // _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            num_kv_heads=loaded.num_kv_heads,
            head_dim=loaded.head_dim,
            dtype=loaded.dtype,
        )
        self._loaded = loaded
        self._loras = dict(loras)
        self._runner = self._make_runner(numerics)
        self._states: dict[StateKey, _State] = {}
        self._num_used = _NUM_SCRATCH  # blocks; the first ones are scratch
        self._steps = itertools.count()

    def compute(
        self,
        key: StateKey,
        prompt: Prompt,
        *,
        embedded: EmbeddedPrompt | None = None,
        numerics: Numerics | None = None,
    ) -> None:
        """Prefill a prompt in one pass, in another numerics class if one is given."""
        num_tokens = len(prompt.tokens)
        start = self._num_used
        self._num_used += -(-num_tokens // _BLOCK_SIZE)
        blocks = tuple(range(start, self._num_used))
        runner = self._runner if numerics is None else self._make_runner(numerics)
        chunk = _chunk(
            "state",
            prompt.tokens.buffer,
            blocks,
            start=0,
            adapter=key.adapter,
            start_position=key.start_position,
        )
        given = {} if embedded is None else {chunk.request_id: embedded}
        plan = StepPlan(step=next(self._steps), now=0.0, copies=(), chunks=(chunk,))
        logits = runner.execute(plan, given)[chunk.request_id]
        self._states[key] = _State(
            tokens=prompt.tokens.buffer,
            num_tokens=num_tokens,
            adapter=key.adapter,
            start_position=key.start_position,
            block_ids=blocks,
            kv=self._kv.read(list(blocks), num_tokens),
            logits=logits.clone(),
        )

    def damage(
        self, pairs: Sequence[tuple[StateKey, StateKey]]
    ) -> dict[tuple[StateKey, StateKey], Damage]:
        """Return what each (writer, reader) pair comes to, by pair.

        Readers compute: their revision must be in place. Prompts of a pair have equal
        lengths.
        """
        found = {}
        for start in range(0, len(pairs), _NUM_SCRATCH):
            some = pairs[start : start + _NUM_SCRATCH]
            states = [(self._states[w], self._states[r]) for w, r in some]
            logits = self._read(states)
            for pair, (writer, reader), row in zip(some, states, logits, strict=True):
                found[pair] = _compare(writer, reader, row)
        return found

    # Private

    def _make_runner(self, numerics: Numerics) -> ModelRunner:
        return ModelRunner(
            self._loaded.model,
            self._kv,
            numerics,
            num_query_heads=self._loaded.num_query_heads,
            loras=self._loras,
        )

    def _read(self, states: Sequence[tuple[_State, _State]]) -> list[torch.Tensor]:
        """Compute readers' last tokens, each over its writer's KV, in one step."""
        copies, chunks = [], []
        for scratch, (writer, reader) in enumerate(states):
            assert writer.num_tokens == reader.num_tokens, "prompts of one length"
            last = reader.num_tokens - 1
            num_whole, num_tail = divmod(last, _BLOCK_SIZE)
            if num_tail:
                copies.append(BlockCopy(writer.block_ids[num_whole], scratch, num_tail))
            chunks.append(
                _chunk(
                    f"reader-{scratch}",
                    reader.tokens,
                    (*writer.block_ids[:num_whole], scratch),
                    start=last,
                    adapter=reader.adapter,
                    start_position=reader.start_position,
                )
            )
        plan = StepPlan(
            step=next(self._steps),
            now=0.0,
            copies=tuple(copies),
            chunks=tuple(chunks),
        )
        logits = self._runner.execute(plan)
        return [logits[chunk.request_id] for chunk in chunks]


@contextmanager
def scaled_positions(model: torch.nn.Module) -> Iterator[bool]:
    """Halve the rotary frequencies of a model meanwhile; say whether it has any.

    That is what linear rope scaling by two does. The buffer's name is the library's.
    """
    buffers = [b for name, b in model.named_buffers() if name.endswith("inv_freq")]
    for buffer in buffers:
        buffer.mul_(0.5)
    try:
        yield bool(buffers)
    finally:
        for buffer in buffers:
            buffer.mul_(2.0)  # a power of two: exactly what it was


def _chunk(
    name: str,
    tokens: bytes,
    blocks: Iterable[int],
    *,
    start: int,
    adapter: str | None,
    start_position: int,
) -> Chunk:
    return Chunk(
        request_id=RequestId(name),
        start=start,
        end=len(tokens) // TOKEN_BYTES,
        tokens=tokens[start * TOKEN_BYTES :],
        block_ids=memoryview(array("i", blocks).tobytes()).cast("i"),
        num_samples=1,
        adapter=adapter,
        start_position=start_position,
    )


def _compare(writer: _State, reader: _State, logits: torch.Tensor) -> Damage:
    # The last token's KV is the reader's own; what it reads of the writer is before.
    truth_kv = reader.kv[:, :, :-1]
    reused_kv = writer.kv[:, :, :-1]
    log_p = torch.log_softmax(reader.logits.double(), dim=-1)
    log_q = torch.log_softmax(logits.double(), dim=-1)
    p, q = log_p.exp(), log_q.exp()
    top_true, top_reused = _top(reader.logits), _top(logits)
    return Damage(
        kv_error=relative_difference(truth_kv, reused_kv),
        kv_max_abs=float((truth_kv.double() - reused_kv.double()).abs().max()),
        total_variation=float((p - q).abs().sum()) / 2,
        kl=max(0.0, float((p * (log_p - log_q)).sum())),
        is_top_changed=top_true[0] != top_reused[0],
        top_true=top_true,
        top_reused=top_reused,
        is_bit_equal=torch.equal(reader.logits, logits),
    )


def _top(logits: torch.Tensor) -> tuple[int, ...]:
    # Ties go to the lower id, as a stable sort keeps their order.
    order = torch.sort(logits, descending=True, stable=True).indices[:_NUM_TOP]
    return tuple(int(token) for token in order)
