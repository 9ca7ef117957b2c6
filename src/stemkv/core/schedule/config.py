"""Limits of a step and of a request, checked where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stemkv.core.prefix.config import at_least, is_number, knob
from stemkv.errors import ConfigError

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of one request."""

    token_budget: int = knob(512, "Most tokens in one step.")
    max_num_running: int = knob(64, "Most requests in one step.")  # holding blocks
    max_request_tokens: int | None = None  # prompt + output; None: as the cache allows
    max_steps_awaiting: int = 256  # steps a request waits for another's prefill
    watermark: float = 0.01  # share of blocks that admission leaves for growth
    # Waiting requests, from the front, whose cached prefixes go late when memory is
    # short; 0: eviction does not look at the queue.
    lookahead: int = 32
    # Seconds, besides the token budget, so that decodes beside long prompts get their
    # next token in time.
    step_time_s: float | None = knob(
        None,
        "that a step with prefills may take, as predicted; 0.8 of the promised time per "
        "token is a good choice [default: the budget alone].",
    )
    # Blocks of retained prefixes that admission leaves, however many wait. 0 is best
    # for open traffic; fleets of agents that outgrow memory may gain from more.
    retained_floor_blocks: int = 0

    def __post_init__(self) -> None:
        for field in ("token_budget", "max_num_running"):
            at_least(field, getattr(self, field), 1)
        at_least("max_steps_awaiting", self.max_steps_awaiting, 0)
        at_least("lookahead", self.lookahead, 0)
        at_least("retained_floor_blocks", self.retained_floor_blocks, 0)
        step_time_s = self.step_time_s
        if step_time_s is not None and (
            not is_number(step_time_s) or not 0 < step_time_s < math.inf
        ):
            raise ConfigError(
                f"step_time_s must be a number of seconds above 0, or None, "
                f"got {step_time_s!r:.80}"
            )
        if self.max_request_tokens is not None:
            at_least("max_request_tokens", self.max_request_tokens, 2)
        if self.max_num_running > self.token_budget:
            raise ConfigError(
                f"max_num_running must not exceed token_budget "
                f"({self.token_budget}), so that every running request gets its next "
                f"token in every step; got {self.max_num_running}"
            )
        if not is_number(self.watermark) or not 0.0 <= self.watermark < 1.0:
            raise ConfigError(
                f"watermark must be a number in [0, 1), got {self.watermark!r}"
            )
