"""The engine's time, checked where it comes in.

Owns what counts as seconds. Which clock it is, and when it began, is the caller's
matter; the core is told a number with every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeGuard

from stemkv.errors import ConfigError

__all__ = ["Clock", "is_seconds"]


class Clock:
    """Reads a caller's clock, which must not go back."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self.last_s = -math.inf  # what it said last

    def now(self) -> float:
        """Return seconds; raises `ConfigError` if the clock gives none, or goes back."""
        now = self._read()
        if not is_seconds(now):
            raise ConfigError(f"clock must give finite seconds, gave {now!r:.80}")
        if now < self.last_s:
            raise ConfigError(f"clock must not go back, gave {now} after {self.last_s}")
        self.last_s = now
        return now


def is_seconds(value: object) -> TypeGuard[float]:
    """Whether this is a number of seconds that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
