"""What generators draw at random: lengths, popularity, owners.

Owns the distributions. Chance is a `random.Random` that the caller seeds.
"""

from __future__ import annotations

import math
import random
from itertools import accumulate

from stemkv.errors import ConfigError

__all__ = [
    "Bounds",
    "Zipf",
    "check_count",
    "draw_length",
    "draw_lognormal",
    "draw_pause",
    "draw_tenant",
]

Bounds = tuple[int, int]  # least and most tokens, both possible

# Of a lognormal's median to its mean; vLLM's multi-turn benchmark takes it when none
# is given (benchmarks/multi_turn/bench_dataset.py).
_MEDIAN_SHARE = 0.85


def draw_length(rng: random.Random, bounds: Bounds) -> int:
    """Return a length, all between the bounds equally likely."""
    least, most = bounds
    if not 1 <= least <= most:
        raise ConfigError(
            f"lengths must be at least 1 and in order, got {least} to {most}"
        )
    return rng.randint(least, most)


def draw_lognormal(rng: random.Random, *, mean: float, most: int) -> int:
    """Return a lognormal length, at least 1 and cut off at `most`.

    `mean` is the mean before cutting off, the median is 85 % of it.
    """
    if not 1 <= mean < math.inf or most < 1:
        raise ConfigError(f"mean and most must be at least 1, got {mean} and {most}")
    sigma = math.sqrt(-2 * math.log(_MEDIAN_SHARE))
    length = round(rng.lognormvariate(math.log(mean * _MEDIAN_SHARE), sigma))
    return max(1, min(most, length))


def draw_pause(rng: random.Random, mean_s: float) -> float:
    """Return an exponential pause in seconds; none if the mean is 0."""
    if not 0 <= mean_s < math.inf:
        raise ConfigError(f"a mean pause must be at least 0 s and finite, got {mean_s}")
    return rng.expovariate(1 / mean_s) if mean_s else 0.0


def draw_tenant(rng: random.Random, num_tenants: int) -> str:
    """Return one of so many tenants, all equally likely."""
    check_count("num_tenants", num_tenants)
    return f"tenant-{rng.randrange(num_tenants)}"


def check_count(name: str, count: int) -> None:
    """Raise unless there is at least one of what `name` counts."""
    if count < 1:
        raise ConfigError(f"{name} must be at least 1, got {count}")


class Zipf:
    """A few that many ask for: rank `k` is drawn in proportion to `k ** -exponent`."""

    def __init__(self, count: int, exponent: float) -> None:
        self._ranks = range(count)
        weights = (math.pow(k + 1, -exponent) for k in self._ranks)
        self._cumulative = list(accumulate(weights))

    def pick(self, rng: random.Random) -> int:
        """Return a rank, from 0."""
        return rng.choices(self._ranks, cum_weights=self._cumulative)[0]

    def share(self, num_first: int) -> float:
        """Return the share of picks that go to the first so many ranks."""
        return self._cumulative[num_first - 1] / self._cumulative[-1]
