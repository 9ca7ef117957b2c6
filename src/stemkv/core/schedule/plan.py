"""One step: what to compute, what to copy first, and what came of it.

Owns the values that pass between the scheduler and a driver. A `StepPlan` is
immutable and complete: a driver needs nothing else to execute it, be it tensors or a
cost model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stemkv.core.prefix.table import BlockCopy
from stemkv.core.schedule.request import FinishReason, RequestId

__all__ = ["Chunk", "Sample", "StepPlan", "StepResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens of one request to compute in one step."""

    request_id: RequestId
    start: int  # first position to compute; everything before it has KV
    end: int  # one past the last; a decode step is a chunk of length 1
    # Ids of positions start … end - 1, int32 little-endian; not shown, so that prompts
    # don't reach logs with a plan.
    tokens: bytes = field(repr=False)
    block_ids: memoryview  # read-only int32 snapshot, long enough for `end`
    num_samples: int  # output tokens to sample after position end - 1, usually 0 or 1
    adapter: str | None = None  # which adapter's weights to add, as the request said
    # Whether it is the next token of a request whose prefill is done: the one answer to
    # that question. A last prompt token, or what a preemption has lost, is none.
    is_decode: bool = False
    start_position: int = 0  # what the model takes for the position of token 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this chunk."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One scheduled forward pass."""

    step: int  # 0, 1, 2 …; plans are committed exactly once, in this order
    now: float  # seconds, when it was scheduled
    copies: tuple[BlockCopy, ...]  # run first, in this order
    chunks: tuple[Chunk, ...]
    # Decodes of requests that coast (`Scheduler.coast`), one token each: planned and
    # counted, but not spelled out. Only a driver that let requests coast sees any.
    num_coasting: int = 0
    num_coasting_context: int = 0  # sum of their contexts, the new token included

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return sum(chunk.num_tokens for chunk in self.chunks) + self.num_coasting


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled token and whether it ends the request.

    With `FinishReason.FAILED` the token is ignored and the request aborted.
    """

    token: int
    stop: FinishReason | None = None  # None: go on


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a driver hands back for a plan.

    For every chunk with `num_samples > 0`: that many samples, sample `k` continuing
    the request `child_id(request_id, k)`. Those in `failed` are requests of the plan
    whose chunk could not be computed: they need no samples and are aborted, and nothing
    of that chunk is published.
    """

    samples: Mapping[RequestId, tuple[Sample, ...]]
    failed: frozenset[RequestId] = frozenset()
