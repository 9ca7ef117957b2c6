"""A cost model for tests: the token at position `p` takes `1 + p / 64` seconds."""

from __future__ import annotations

from stemkv.core.books.cost import StepShape

__all__ = ["DepthCost"]


class DepthCost:
    """Deeper tokens cost more, as with attention; sums are exact in binary."""

    source = "test"
    bytes_per_token = 1

    def prefill_seconds(self, start: int, end: int) -> float:
        return (end - start) + (end * (end - 1) - start * (start - 1)) / 128

    def prefill_flops(self, start: int, end: int) -> float:
        return self.prefill_seconds(start, end)

    def prefill_joules(self, start: int, end: int) -> float:
        return self.prefill_seconds(start, end)

    def step_seconds(self, shape: StepShape) -> float:
        return 1.0
