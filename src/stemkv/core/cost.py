"""What computing tokens costs: seconds, operations, joules, and bytes to keep their KV.

Owns the questions that ledger, eviction and replay ask, and two ways to answer them:
from the arithmetic of a model on a device (`RooflineCost`), or from coefficients that
were fitted to an engine's own step log (`FittedCost`). Knows no catalogue of models or
devices (see `sim`) and measures nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["CostModel", "StepShape"]


@dataclass(slots=True, kw_only=True)
class StepShape:
    """How much work one step is: all that its duration may depend on.

    `num_prefill_pairs` counts (query, key) pairs: a chunk `[a, b)` has
    `(b - a) * a + (b - a) * (b - a + 1) / 2` of them.
    """

    num_prefill_tokens: int = 0
    num_prefill_pairs: int = 0
    num_prefills: int = 0  # requests with a prefill chunk
    num_decodes: int = 0  # requests with a decode chunk, one token each
    num_decode_context: int = 0  # sum of their contexts, the new token included
    num_copied_tokens: int = 0  # block copies that run first

    def add_chunk(self, start: int, end: int, *, is_decode: bool) -> None:
        """Count tokens `[start, end)` of one request."""
        if is_decode:
            self.num_decodes += 1
            self.num_decode_context += end
            return
        length = end - start
        self.num_prefills += 1
        self.num_prefill_tokens += length
        self.num_prefill_pairs += length * start + length * (length + 1) // 2


class CostModel(Protocol):
    """Prices of tokens. Pure and deterministic; never zero for a step with work."""

    @property
    def source(self) -> str:
        """Where the numbers come from, for people: "llama-3.1-8b on h100, estimated"."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token, in all layers."""

    def prefill_seconds(self, start: int, end: int) -> float:
        """Seconds to compute prompt tokens `[start, end)` behind `start` cached ones.

        Additive: `[a, b)` and `[b, c)` cost what `[a, c)` costs. So it leaves out what
        a step costs anyway, and is what a hit on these tokens saves.
        """

    def prefill_flops(self, start: int, end: int) -> float:
        """Floating-point operations of the same tokens; additive as well."""

    def prefill_joules(self, start: int, end: int) -> float:
        """Energy of the same tokens; additive as well."""

    def step_seconds(self, shape: StepShape) -> float:
        """Duration of a whole step."""
