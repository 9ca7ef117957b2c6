"""The plan in the making: what a step computes, and what it still has room for.

Owns one step's chunks, copies and budgets of tokens and predicted time. Decides nothing
about who gets them.
"""

from __future__ import annotations

from dataclasses import replace

from stemkv.core.books.cost import CostModel, StepShape
from stemkv.core.prefix.table import BlockCopy
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.schedule.coasting import Coasting
from stemkv.core.schedule.plan import Chunk, StepPlan
from stemkv.core.schedule.request import Request, RequestId
from stemkv.errors import InvariantError

__all__ = ["Step", "TimeLimit"]

# Prefill tokens that a step takes however long it is predicted to be, so that prefills
# get on beside any number of decodes.
_LEAST_PREFILL = 64


class TimeLimit:
    """How long a step may take, and what predicts it."""

    def __init__(self, seconds: float, costs: CostModel) -> None:
        self._seconds = seconds
        self._costs = costs

    def fits(self, shape: StepShape, start: int, end: int) -> bool:
        """Whether a step has time for a prefill of `start … end - 1` as well."""
        longer = replace(shape)
        longer.add_chunk(start, end, is_decode=False)
        return self._costs.step_seconds(longer) <= self._seconds


class Step:
    """A step that is being planned: decodes first, then prefills while it has room."""

    def __init__(self, number: int, budget: int, limit: TimeLimit | None) -> None:
        self.number = number
        self.budget = budget  # tokens that are left
        self.chunks: dict[RequestId, Chunk] = {}  # in the order they were planned
        self.copies: list[BlockCopy] = []
        self.has_preempted = False  # then nobody is admitted: blocks are short
        self.is_full = False  # of time
        self._limit = limit
        self._num_prefill_tokens = 0
        self._shape: StepShape | None = None  # of all that is planned; None: untimed

    @property
    def has_room(self) -> bool:
        """Whether a prefill may get tokens."""
        return self.budget > 0 and not self.is_full

    def end_of(self, request: Request) -> int:
        """Return up to where a request is computed once this step is done."""
        chunk = self.chunks.get(request.request_id)
        return request.num_computed if chunk is None else chunk.end

    def num_in_time(self, start: int, num_wanted: int) -> int:
        """Return how many tokens from `start` on the step has time for."""
        limit, shape = self._limit, self._shape
        if limit is None or shape is None:
            return num_wanted
        # Predicted times grow with every token, so halving finds the most that fit.
        low, high = 0, num_wanted + 1
        tried = num_wanted
        while high - low > 1:
            if limit.fits(shape, start, start + tried):
                low = tried
            else:
                high = tried
            tried = (low + high) // 2
        least = _LEAST_PREFILL - self._num_prefill_tokens
        return min(num_wanted, max(low, least))

    def begin_prefills(self, coasting: Coasting) -> None:
        """Begin to count what the step takes, with the decodes that it has."""
        if self._limit is None:
            return
        self._shape = StepShape(
            num_decodes=len(coasting),
            num_decode_context=coasting.context,
            num_copied_tokens=sum(copy.num_tokens for copy in self.copies),
        )
        for chunk in self.chunks.values():
            self._shape.add_chunk(chunk.start, chunk.end, is_decode=chunk.is_decode)

    def add(self, request: Request, end: int) -> None:
        """Plan a request up to a position; its table has the slots."""
        start, planned = request.num_computed, self.end_of(request)
        if end <= planned:
            raise InvariantError(f"request {request.request_id} has nothing to compute")
        is_last = end == request.num_tokens
        known = self.chunks.get(request.request_id)
        if known is None and request.held.copy is not None:
            # With the chunk that needs it, and not before: if the pass fails, whoever
            # depends on the copy is aborted with the plan.
            self.copies.append(request.held.copy)
        self.chunks[request.request_id] = Chunk(
            request_id=request.request_id,
            start=start,
            end=end,
            tokens=request.growing_tokens[start * TOKEN_BYTES : end * TOKEN_BYTES],
            block_ids=request.held.table.snapshot(),
            num_samples=request.num_samples if is_last else 0,
            adapter=request.spec.adapter,
            is_decode=not request.is_unfinished,
            start_position=request.spec.start_position,
        )
        self.budget -= end - planned
        if request.is_unfinished:
            self._num_prefill_tokens += end - planned
        if self._shape is None:
            return
        self._shape.add_chunk(planned, end, is_decode=not request.is_unfinished)
        if known is not None:  # it is one chunk all the same
            self._shape.num_prefills -= 1
            self._shape.num_prefill_context -= planned

    def drop(self, request: Request) -> None:
        """Take back what is planned for a request that loses its blocks."""
        chunk = self.chunks.pop(request.request_id, None)
        if chunk is None:
            return
        self.budget += chunk.num_tokens
        own = set(request.held.table.ids())
        self.copies = [copy for copy in self.copies if copy.target not in own]

    def plan(self, coasting: Coasting, now: float) -> StepPlan:
        """Return what was planned."""
        return StepPlan(
            step=self.number,
            now=now,
            copies=tuple(self.copies),
            chunks=tuple(self.chunks.values()),
            num_coasting=len(coasting),
            num_coasting_context=coasting.context,
        )
