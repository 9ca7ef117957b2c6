"""What computing tokens costs: seconds, operations, joules, and bytes to keep their KV.

Owns the questions that ledger, eviction and replay ask, and two ways to answer them:
from the arithmetic of a model on a device (`RooflineCost`), or from coefficients that
were fitted to an engine's own step log (`FittedCost`). Knows no catalogue of models or
devices (see `sim`) and measures nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from stemkv.errors import ConfigError

__all__ = ["CostModel", "FittedCost", "RooflineCost", "StepShape"]


@dataclass(slots=True, kw_only=True)
class StepShape:
    """How much work one step is: all that its duration may depend on.

    `num_prefill_pairs` counts (query, key) pairs: a chunk `[a, b)` has
    `(b - a) * a + (b - a) * (b - a + 1) / 2` of them.
    """

    num_prefill_tokens: int = 0
    num_prefill_pairs: int = 0
    num_prefills: int = 0  # requests with a prefill chunk
    num_prefill_context: int = 0  # sum of the ends of these chunks
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
        self.num_prefill_context += end
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """Prices that follow from a model's arithmetic and a device's data sheet.

    Computing takes its operations over `flops_per_s * mfu`, moving memory its bytes
    over `bytes_per_s * bandwidth_efficiency`; a step takes the larger of the two and
    `step_overhead_s`. That is the roofline of Williams, Waterman and Patterson
    (CACM 52(4), 2009) with both roofs lowered to what kernels reach. `num_devices`
    devices split weights, KV and work evenly; what they say to each other is not
    counted. Estimates all: fit a `FittedCost` where an engine is at hand.
    """

    source: str
    bytes_per_token: int  # of KV, in all layers
    flops_per_token: float  # 2 × parameters that one token is multiplied with
    # 4 × layers × query heads × head dimension: a (query, key) pair is multiplied and
    # added once for the score and once for the value.
    flops_per_pair: float
    # KV that attention reads per token of context. Less than `bytes_per_token` where
    # some layers see only a short window; `None`: all of it.
    read_bytes_per_token: int | None = None
    weight_bytes: float  # all weights; a step reads them once
    # Of these, the routed experts; a token reads `expert_share` of them.
    expert_bytes: float = 0.0
    expert_share: float = 1.0  # experts per token over experts, (0, 1]
    # Of one device:
    flops_per_s: float  # peak, dense, at the dtype of the weights
    bytes_per_s: float  # peak memory bandwidth
    watts: float  # draw under load
    num_devices: int = 1
    mfu: float = 0.5  # share of the peak that prefill reaches, (0, 1]
    bandwidth_efficiency: float = 0.8  # same for memory, (0, 1]
    step_overhead_s: float = 0.002  # launches, sampling, scheduling

    def __post_init__(self) -> None:
        _check_positive(
            self,
            "bytes_per_token",
            "flops_per_token",
            "weight_bytes",
            "flops_per_s",
            "bytes_per_s",
            "watts",
            "num_devices",
        )
        _check_not_negative(self, "flops_per_pair", "expert_bytes", "step_overhead_s")
        if self.read_bytes_per_token is not None:
            _check_positive(self, "read_bytes_per_token")
        for name in ("expert_share", "mfu", "bandwidth_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(
                    f"{name} must be above 0 and at most 1, got {getattr(self, name)}"
                )
        if self.expert_bytes > self.weight_bytes:
            raise ConfigError(
                f"expert_bytes is a part of weight_bytes, got {self.expert_bytes:g} of "
                f"{self.weight_bytes:g}"
            )

    def prefill_flops(self, start: int, end: int) -> float:
        """Operations of prompt tokens `[start, end)`, attention to all before them."""
        return self.flops_per_token * (end - start) + self.flops_per_pair * _num_pairs(
            start, end
        )

    def prefill_seconds(self, start: int, end: int) -> float:
        """Seconds at `mfu`, as if compute-bound: a prompt's tokens share the weights."""
        return self.prefill_flops(start, end) / self._flops_per_s

    def prefill_joules(self, start: int, end: int) -> float:
        """`watts` of every device for those seconds."""
        return self.watts * self.num_devices * self.prefill_seconds(start, end)

    def step_seconds(self, shape: StepShape) -> float:
        """Overhead, and computing or memory traffic, whichever takes longer."""
        num_tokens = shape.num_prefill_tokens + shape.num_decodes
        num_pairs = shape.num_prefill_pairs + shape.num_decode_context
        flops = self.flops_per_token * num_tokens + self.flops_per_pair * num_pairs
        read_bytes_per_token = self.read_bytes_per_token or self.bytes_per_token
        num_bytes = (
            self.step_weight_bytes(num_tokens)
            + read_bytes_per_token
            * (shape.num_decode_context + shape.num_prefill_context)
            # Written; and copies, read and written.
            + self.bytes_per_token * (num_tokens + 2 * shape.num_copied_tokens)
        )
        return self.step_overhead_s + max(
            flops / self._flops_per_s,
            num_bytes
            / (self.bytes_per_s * self.bandwidth_efficiency * self.num_devices),
        )

    def step_weight_bytes(self, num_tokens: int) -> float:
        """Bytes of weights that a step with so many tokens reads.

        Dense weights once. Of the routed experts, those that at least one token picks,
        in expectation if picks are independent and even.
        """
        if not num_tokens:
            return 0.0
        missed = (1 - self.expert_share) ** num_tokens
        return self.weight_bytes - self.expert_bytes * missed

    @property
    def _flops_per_s(self) -> float:
        return self.flops_per_s * self.mfu * self.num_devices


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCost:
    """Prices that an engine's own steps taught: a sum of coefficients times counts.

    Every coefficient is seconds per one of what `StepShape` counts. Reuse saves the
    terms of prompt tokens and pairs only, so these two are the prefill seconds.
    """

    source: str  # "smollm2-135m on 2 CPU cores, fitted to 400 steps"
    bytes_per_token: int  # of KV, in all layers
    step_s: float  # every step
    prefill_chunk_s: float  # every request with a prefill chunk
    prefill_token_s: float
    prefill_pair_s: float
    decode_s: float
    decode_context_s: float  # per token of the contexts of decodes
    copied_token_s: float = 0.0
    flops_per_token: float  # see `RooflineCost`
    flops_per_pair: float
    measured_watts: float | None = None  # None: no meter; then what was assumed holds
    assumed_watts: float

    def __post_init__(self) -> None:
        _check_positive(self, "bytes_per_token", "flops_per_token", "assumed_watts")
        _check_not_negative(
            self,
            "step_s",
            "prefill_chunk_s",
            "prefill_token_s",
            "prefill_pair_s",
            "decode_s",
            "decode_context_s",
            "copied_token_s",
            "flops_per_pair",
        )
        if self.measured_watts is not None:
            _check_positive(self, "measured_watts")
        if not self.prefill_token_s + self.prefill_pair_s:
            raise ConfigError(
                "prefill_token_s and prefill_pair_s are both 0, so a hit would save "
                "nothing; fit to steps with prompts of several lengths"
            )
        if not self.step_s + self.decode_s + self.decode_context_s:
            raise ConfigError(
                "step_s, decode_s and decode_context_s are all 0, so decoding would "
                "take no time; fit to steps that decode"
            )

    @property
    def watts(self) -> float:
        """Draw under load: measured if there was a meter, else assumed."""
        if self.measured_watts is not None:
            return self.measured_watts
        return self.assumed_watts

    def prefill_flops(self, start: int, end: int) -> float:
        """Operations of prompt tokens `[start, end)`: counted, not fitted."""
        return self.flops_per_token * (end - start) + self.flops_per_pair * _num_pairs(
            start, end
        )

    def prefill_seconds(self, start: int, end: int) -> float:
        """Only the terms of prompt tokens and pairs."""
        return self.prefill_token_s * (end - start) + self.prefill_pair_s * _num_pairs(
            start, end
        )

    def prefill_joules(self, start: int, end: int) -> float:
        """`watts` for those seconds."""
        return self.watts * self.prefill_seconds(start, end)

    def step_seconds(self, shape: StepShape) -> float:
        """All terms; linear in the counts."""
        return (
            self.step_s
            + self.prefill_chunk_s * shape.num_prefills
            + self.prefill_token_s * shape.num_prefill_tokens
            + self.prefill_pair_s * shape.num_prefill_pairs
            + self.decode_s * shape.num_decodes
            + self.decode_context_s * shape.num_decode_context
            + self.copied_token_s * shape.num_copied_tokens
        )


def _num_pairs(start: int, end: int) -> int:
    """Count the pairs of queries `[start, end)` with the keys up to each, itself too.

    An integer, so that chunks add up to the whole without rounding.
    """
    return (end * (end + 1) - start * (start + 1)) // 2


def _check_positive(cost: object, *names: str) -> None:
    for name in names:
        if not 0 < getattr(cost, name) < math.inf:
            raise ConfigError(
                f"{name} must be above 0 and finite, got {getattr(cost, name)}"
            )


def _check_not_negative(cost: object, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(cost, name) < math.inf:
            raise ConfigError(
                f"{name} must be at least 0 and finite, got {getattr(cost, name)}"
            )
