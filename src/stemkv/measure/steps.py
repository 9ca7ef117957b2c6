"""What a step cost and how its seconds are shared out.

Owns the step record and the definition of prefill seconds. A step computes prefill and
decode tokens in one forward pass, so its duration can only be attributed: here by
tokens, which is what a compute-bound step spends its time on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["StepRecord", "prefill_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One executed step."""

    step: int
    start_s: float
    end_s: float
    num_prefill_tokens: int
    num_decode_tokens: int

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.end_s - self.start_s


def prefill_seconds(steps: Iterable[StepRecord]) -> float:
    """Return the seconds spent on prompts: durations shared out by tokens."""
    total = 0.0
    for step in steps:
        num_tokens = step.num_prefill_tokens + step.num_decode_tokens
        if num_tokens:
            total += step.seconds * step.num_prefill_tokens / num_tokens
    return total
