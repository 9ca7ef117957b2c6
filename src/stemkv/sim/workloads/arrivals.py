"""When requests arrive: a Poisson process, and the same one in bursts.

Owns arrival times of open loops. What arrives is of no interest here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from stemkv.errors import ConfigError

__all__ = ["Bursts", "poisson"]


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Yield arrivals in seconds, the first at 0 and no last, `rate` a second."""
    at = 0.0
    while True:
        yield at
        at += rng.expovariate(rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bursts:
    """Traffic that is on for a while, off for a while, and on again."""

    on_s: float
    off_s: float

    def __post_init__(self) -> None:
        if not self.on_s > 0:
            raise ConfigError(f"on_s must be above 0, got {self.on_s}")
        if not self.off_s >= 0:
            raise ConfigError(f"off_s must be at least 0, got {self.off_s}")

    def warp(self, at_s: float) -> float:
        """Return when an arrival at `at_s` of even traffic arrives in bursts.

        Each period's arrivals are squeezed, in order, into the part that is on. So the
        mean rate stays and order does, but no arrival is in a part that is off.
        """
        period = self.on_s + self.off_s
        whole, rest = divmod(at_s, period)
        return whole * period + rest * self.on_s / period
