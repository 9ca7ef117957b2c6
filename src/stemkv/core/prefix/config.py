"""How much memory a cache has, checked where it is said.

Owns limits and defaults. Environment variables and files are somebody else's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from stemkv.errors import ConfigError

__all__ = ["CacheConfig", "at_least", "is_number", "knob", "knob_of"]

T = TypeVar("T")


def knob(default: T, says: str) -> T:
    """Return a field of a setting, with what is said to people who may change it."""
    return field(default=default, metadata={"help": says})


def knob_of(make: Callable[[], T], says: str) -> T:
    """Return the same for a setting whose default has to be made each time."""
    return field(default_factory=make, metadata={"help": says})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much KV memory there is and how it is cut."""

    num_blocks: int = 1  # whose driver has bytes says how many (`CoreConfig.sized`)
    # Small: finer sharing, large: cheaper bookkeeping.
    block_size: int = knob(16, "Tokens per block.")
    max_kept_share: float = 0.5  # of the blocks, that an operator may keep

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size"):
            at_least(name, getattr(self, name), 1)
        if not is_number(self.max_kept_share) or not 0.0 <= self.max_kept_share <= 1.0:
            raise ConfigError(
                f"max_kept_share must be a number in [0, 1], "
                f"got {self.max_kept_share!r:.80}"
            )

    def can_hit(self, max_prompt_tokens: int, max_output_tokens: int = 0) -> bool:
        """Whether requests of such sizes could ever reuse anything.

        Only whole blocks are published, and what is last sampled is not computed any
        more; of a prompt at least one token is computed.
        """
        num_computed = max_prompt_tokens + max(0, max_output_tokens - 1)
        return max_prompt_tokens > 1 and num_computed >= self.block_size


def is_number(value: object) -> bool:
    """Whether a setting is a number, and not true or false."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def at_least(field: str, value: int, minimum: int) -> None:
    """Raise `ConfigError` unless a setting is an integer that is large enough."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{field} must be an integer, got {value!r}")
    if value < minimum:
        raise ConfigError(f"{field} must be at least {minimum}, got {value}")
