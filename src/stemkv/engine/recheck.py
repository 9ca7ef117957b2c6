"""Computes a share of the hits again, and compares.

Owns the draw, copies of what was reused, and their comparison with a fresh prefill in
memory of its own. What was reused is copied before the request goes on, so it may be
evicted meanwhile; the prefill runs when the driver has time for it (`Engine.recheck`).
Knows nothing of namespaces' meaning: it hands back the one that failed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import torch

from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.schedule.plan import Chunk, StepPlan
from stemkv.core.schedule.request import RequestId
from stemkv.engine.embedding import EmbeddedPrompt
from stemkv.engine.runner import ModelRunner

__all__ = [
    "RecheckCounts",
    "Rechecks",
    "Verdict",
    "relative_difference",
    "tolerance",
]

# Copies wait in memory; a driver that never has time must not fill it.
_MAX_WAITING = 8

# Largest relative difference between two ways to compute the same prefix in class
# `tolerant`; more is called a mismatch. Measured (docs/lab/LOG.md): sound KV differs by
# at most 0.033 in bfloat16, and a wrong token, slot or block by at least 0.33.
_TOLERANCES = {torch.bfloat16: 0.1, torch.float32: 1e-4}

# The norm is taken over so many tokens: over a whole prefix, one wrong token would be
# diluted by all that is right around it.
_NORM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RecheckCounts:
    """What became of the hits that were drawn. All exact counts."""

    num_drawn: int = 0
    num_matching: int = 0
    num_mismatching: int = 0
    num_skipped: int = 0  # too many were waiting, or the state they ran on is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One hit, compared."""

    namespace: bytes
    num_tokens: int
    difference: float  # relative, see `relative_difference`; 0.0: equal bits
    is_match: bool


@dataclass(slots=True)
class _Job:
    namespace: bytes
    tokens: bytes
    reused: torch.Tensor  # [layers, 2, tokens, kv_heads, head_dim]
    adapter: str | None
    start_position: int
    embedded: EmbeddedPrompt | None
    runner: ModelRunner | None = None  # over memory of its own, once begun
    num_computed: int = 0


class Rechecks:
    """Hits that wait to be computed again. `share` in [0, 1] of them are drawn."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        share: float,
        rng: random.Random,
        token_budget: int,
    ) -> None:
        self.runner = runner
        self.share = share
        self._rng = rng
        self._token_budget = token_budget
        self._jobs: deque[_Job] = deque()
        self._counts = dict.fromkeys(("drawn", "matching", "mismatching", "skipped"), 0)

    @property
    def num_waiting(self) -> int:
        """Hits drawn and not compared yet."""
        return len(self._jobs)

    @property
    def counts(self) -> RecheckCounts:
        """What became of the hits that were drawn so far."""
        return RecheckCounts(**{f"num_{k}": n for k, n in self._counts.items()})

    def adapters(self) -> set[str]:
        """Return the adapter versions that waiting hits need."""
        return {job.adapter for job in self._jobs if job.adapter is not None}

    def consider(
        self,
        chunk: Chunk,
        tokens: bytes,
        namespace: bytes,
        embedded: EmbeddedPrompt | None,
    ) -> None:
        """Draw whether to compare what `chunk` builds on: all before its start."""
        if self._rng.random() >= self.share:
            return
        self._counts["drawn"] += 1
        if len(self._jobs) >= _MAX_WAITING:
            self._counts["skipped"] += 1
            return
        size = self.runner.kv.block_size
        blocks = list(chunk.block_ids[: -(-chunk.start // size)])
        self._jobs.append(
            _Job(
                namespace=namespace,
                tokens=tokens[: chunk.start * TOKEN_BYTES],
                reused=self.runner.kv.read(blocks, chunk.start),
                adapter=chunk.adapter,
                start_position=chunk.start_position,
                embedded=embedded,
            )
        )

    def clear(self) -> None:
        """Forget the waiting hits: what they were computed with is about to change."""
        self._counts["skipped"] += len(self._jobs)
        self._jobs.clear()

    def run(self) -> Verdict | None:
        """Compute one chunk of the oldest waiting hit; return its verdict when done."""
        if not self._jobs:
            return None
        job = self._jobs[0]
        num_tokens = len(job.tokens) // TOKEN_BYTES
        size = self.runner.kv.block_size
        num_blocks = -(-num_tokens // size)
        if job.runner is None:
            job.runner = self.runner.over(self.runner.kv.like(num_blocks))
        start, end = job.num_computed, num_tokens
        end = min(end, start + self._token_budget)
        request_id = RequestId("recheck")
        chunk = Chunk(
            request_id=request_id,
            start=start,
            end=end,
            tokens=job.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES],
            block_ids=memoryview(_block_ids(num_blocks)).cast("i"),
            num_samples=0,
            adapter=job.adapter,
            start_position=job.start_position,
        )
        embedded = {} if job.embedded is None else {request_id: job.embedded}
        plan = StepPlan(step=0, now=0.0, copies=(), chunks=(chunk,))
        job.runner.execute(plan, embedded)
        job.num_computed = end
        if end < num_tokens:
            return None
        self._jobs.popleft()
        fresh = job.runner.kv.read(list(range(num_blocks)), num_tokens)
        return self._judge(job, fresh, num_tokens)

    def _judge(self, job: _Job, fresh: torch.Tensor, num_tokens: int) -> Verdict:
        is_equal = torch.equal(_bits(job.reused), _bits(fresh))
        difference = 0.0 if is_equal else relative_difference(fresh, job.reused)
        is_exact = self.runner.numerics.pads_context
        # `not >` would let NaN pass.
        bound = tolerance(fresh.dtype)
        is_match = is_equal or (not is_exact and difference <= bound)
        self._counts["matching" if is_match else "mismatching"] += 1
        return Verdict(
            namespace=job.namespace,
            num_tokens=num_tokens,
            difference=difference,
            is_match=is_match,
        )


def relative_difference(truth: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest `|other - truth| / |truth|` of any 16 consecutive tokens.

    Both `[layers, 2, tokens, kv_heads, head_dim]`; keys and values of each layer are
    compared apart, norms are Euclidean. The last run may have fewer tokens. NaN if
    there is one.
    """
    worst = torch.zeros((), dtype=torch.double)
    for start in range(0, truth.shape[2], _NORM_TOKENS):
        run = slice(start, start + _NORM_TOKENS)
        wanted = truth[:, :, run].double().flatten(2)
        error = (other[:, :, run].double().flatten(2) - wanted).norm(dim=2)
        # `maximum` keeps a NaN.
        worst = worst.maximum((error / wanted.norm(dim=2).clamp_min(1e-30)).max())
    return float(worst)


def tolerance(dtype: torch.dtype) -> float:
    """Return the bound on `relative_difference` in class `tolerant`."""
    return _TOLERANCES[dtype]


def _bits(kv: torch.Tensor) -> torch.Tensor:
    return kv.contiguous().view(torch.uint8)


def _block_ids(num_blocks: int) -> bytes:
    return torch.arange(num_blocks, dtype=torch.int32).numpy().tobytes()
