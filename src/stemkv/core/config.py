"""Settings of cache and scheduler, checked where they are made.

Owns limits and defaults. Environment variables and files are somebody else's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stemkv.errors import ConfigError

__all__ = ["CacheConfig", "SchedulerConfig", "is_number"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much KV memory there is and how it is cut."""

    num_blocks: int
    block_size: int = 16  # tokens; small: finer sharing, large: cheaper bookkeeping
    max_kept_share: float = 0.5  # of the blocks, that an operator may keep

    def __post_init__(self) -> None:
        for field in ("num_blocks", "block_size"):
            _at_least(field, getattr(self, field), 1)
        if not is_number(self.max_kept_share) or not 0.0 <= self.max_kept_share <= 1.0:
            raise ConfigError(
                f"max_kept_share must be a number in [0, 1], "
                f"got {self.max_kept_share!r:.80}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one step and of one request."""

    token_budget: int = 512  # most tokens computed in one step
    max_num_running: int = 64  # most requests holding blocks at once
    max_request_tokens: int | None = None  # prompt + output; None: as the cache allows
    max_steps_awaiting: int = 256  # steps a request waits for another's prefill
    watermark: float = 0.01  # share of blocks that admission leaves for growth
    # Waiting requests, from the front, whose cached prefixes go late when memory is
    # short; 0: eviction does not look at the queue.
    lookahead: int = 32
    # Predicted seconds that a step may take, besides its token budget, so that decodes
    # beside long prompts get their next token in time: 0.8 of the time per output token
    # that is promised is a good choice. `None`: as long as its tokens take.
    step_time_s: float | None = None
    # Blocks of retained prefixes that admission leaves, however many wait. 0 is best
    # for open traffic; fleets of agents that outgrow memory may gain from more.
    retained_floor_blocks: int = 0

    def __post_init__(self) -> None:
        for field in ("token_budget", "max_num_running"):
            _at_least(field, getattr(self, field), 1)
        _at_least("max_steps_awaiting", self.max_steps_awaiting, 0)
        _at_least("lookahead", self.lookahead, 0)
        _at_least("retained_floor_blocks", self.retained_floor_blocks, 0)
        step_time_s = self.step_time_s
        if step_time_s is not None and (
            not is_number(step_time_s) or not 0 < step_time_s < math.inf
        ):
            raise ConfigError(
                f"step_time_s must be a number of seconds above 0, or None, "
                f"got {step_time_s!r:.80}"
            )
        if self.max_request_tokens is not None:
            _at_least("max_request_tokens", self.max_request_tokens, 2)
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


def is_number(value: object) -> bool:
    """Whether a setting is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at_least(field: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{field} must be an integer, got {value!r}")
    if value < minimum:
        raise ConfigError(f"{field} must be at least {minimum}, got {value}")
