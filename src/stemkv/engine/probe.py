"""Drives a runner by hand, to compare bits.

Owns sequences whose chunks, batch mates and blocks are chosen by the caller instead of
a scheduler. Used by the start-up self-test, the exactness bench and tests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stemkv.core.prefix.table import BlockCopy, BlockTable
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.plan import Chunk, StepPlan
from stemkv.core.schedule.request import RequestId
from stemkv.engine.runner import ModelRunner

__all__ = ["Probe", "ProbeSequence"]


class ProbeSequence:
    """Tokens with a block table, computed up to `num_computed`."""

    def __init__(
        self,
        name: str,
        tokens: TokenIds,
        table: BlockTable,
        *,
        start_position: int = 0,
    ) -> None:
        self.name = RequestId(name)
        self.start_position = start_position
        self.tokens = tokens
        self.table = table
        self.num_computed = 0
        self.logits: dict[int, torch.Tensor] = {}  # by position, as sampled

    @property
    def num_remaining(self) -> int:
        """Tokens without KV."""
        return len(self.tokens) - self.num_computed


class Probe:
    """Runs chosen chunks of chosen sequences through a runner's KV memory.

    The caller hands out block ids and must not let sequences share what they write.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._num_steps = 0

    def run(
        self,
        work: Sequence[tuple[ProbeSequence, int]],
        copies: Sequence[BlockCopy] = (),
    ) -> None:
        """Compute the next `n` tokens of each `(sequence, n)` in one forward pass.

        The logits after each sequence's last computed position are kept.
        """
        chunks = tuple(self._chunk(sequence, n) for sequence, n in work)
        plan = StepPlan(
            step=self._num_steps, now=0.0, copies=tuple(copies), chunks=chunks
        )
        self._num_steps += 1
        logits = self._runner.execute(plan)
        for sequence, n in work:
            sequence.num_computed += n
            row = logits[sequence.name].clone()
            sequence.logits[sequence.num_computed - 1] = row

    def kv(self, sequence: ProbeSequence) -> torch.Tensor:
        """Return the sequence's KV, `[layers, 2, tokens, kv_heads, head_dim]`."""
        return self._runner.kv.read(
            list(sequence.table.snapshot()), sequence.num_computed
        )

    def _chunk(self, sequence: ProbeSequence, num_tokens: int) -> Chunk:
        start = sequence.num_computed
        end = start + num_tokens
        return Chunk(
            request_id=sequence.name,
            start=start,
            end=end,
            tokens=sequence.tokens.buffer[4 * start : 4 * end],
            block_ids=sequence.table.snapshot(),
            num_samples=1,
            start_position=sequence.start_position,
        )
