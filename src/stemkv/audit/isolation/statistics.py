"""Is a difference there, and how small a one would have been noticed?

Owns the tests that decide about measured seconds and about lucky guesses. Knows
nothing of engines or attacks.

Times on a shared machine have outliers on one side, so no mean is taken of them: the
fifth of the differences at either end is left out (`trimmed_mean`), and spread is that
of the Winsorised differences, which is what a trimmed mean's error follows from (Tukey
and McLaughlin). Significance comes from flipping signs: if a coin decided which of two
equal things was measured first, every difference was as likely to have the other sign.
That needs no assumption about how times are distributed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "TRIM",
    "PairedTest",
    "binomial_tail",
    "compare_pairs",
    "detectable",
    "sign_flip_p",
    "student_quantile",
    "trimmed_mean",
]

TRIM = 0.2  # share of the values left out at either end
Floats = NDArray[np.float64]
_CHUNK = 2048  # permutations at a time, so that memory stays small


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """What paired differences say. In the unit of the differences."""

    num_pairs: int
    mean: float  # trimmed
    low: float  # ends of the confidence interval of `mean`, at level 1 - alpha
    high: float
    p: float  # two-sided, by flipping signs
    detectable: float  # see `detectable`


def compare_pairs(
    differences: Sequence[float],
    *,
    alpha: float,
    power: float,
    seed: int,
    num_draws: int = 10_000,
) -> PairedTest:
    """Test whether paired differences are centred at zero."""
    mean = trimmed_mean(differences)
    half = _half_width(differences, alpha)
    return PairedTest(
        num_pairs=len(differences),
        mean=mean,
        low=mean - half,
        high=mean + half,
        p=sign_flip_p(differences, seed=seed, num_draws=num_draws),
        detectable=detectable(differences, alpha=alpha, power=power),
    )


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the smallest and the largest fifth of the values."""
    ordered = sorted(values)
    cut = int(TRIM * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    return math.fsum(kept) / len(kept)


def sign_flip_p(
    differences: Sequence[float], *, seed: int, num_draws: int = 10_000
) -> float:
    """Return how often random signs give a trimmed mean as far from zero as this.

    Of all sign patterns where there are at most `num_draws`, which is exact; else of
    so many random ones, the observed one included, so that it is never zero.
    """
    values = np.asarray(differences, dtype=np.float64)
    observed = abs(trimmed_mean(differences))
    # Sums of the same numbers in another order differ in their last bits.
    threshold = observed - 1e-9 * float(np.abs(values).max(initial=0.0))
    if 2 ** len(values) <= num_draws:
        patterns = np.arange(2 ** len(values))
        signs = 1.0 - 2.0 * ((patterns[:, None] >> np.arange(len(values))) & 1)
        return float((_trimmed_means(signs * values) >= threshold).mean())
    rng = np.random.default_rng(seed)
    num_extreme = 1
    for start in range(0, num_draws, _CHUNK):
        shape = (min(_CHUNK, num_draws - start), len(values))
        signs = 1.0 - 2.0 * rng.integers(0, 2, size=shape)
        num_extreme += int((_trimmed_means(signs * values) >= threshold).sum())
    return num_extreme / (num_draws + 1)


def detectable(differences: Sequence[float], *, alpha: float, power: float) -> float:
    """Return the smallest true difference that would have been found.

    Found: significant at `alpha`, with probability `power`, for so many pairs of this
    spread. Spread is taken about zero and not about the mean, so it depends on the
    sizes of the differences only: whoever goes on measuring until this is small
    enough does not thereby make a significant result any likelier.
    """
    sizes = np.sort(np.abs(np.asarray(differences, dtype=np.float64)))
    # Both ends of a sample that is symmetric about zero are the top of its sizes.
    cut = int(2 * TRIM * len(sizes))
    capped = np.minimum(sizes, sizes[len(sizes) - cut - 1])
    spread = math.sqrt(float((capped**2).sum()) / (len(sizes) - 1))
    error = spread / ((1 - 2 * TRIM) * math.sqrt(len(sizes)))
    degrees = len(sizes) - 1
    quantiles = [student_quantile(p, degrees) for p in (1 - alpha / 2, power)]
    return sum(quantiles) * error


def binomial_tail(num_hits: int, num_tries: int, chance: float) -> float:
    """Return the probability of at least so many hits by guessing."""
    return math.fsum(
        math.comb(num_tries, k) * chance**k * (1 - chance) ** (num_tries - k)
        for k in range(num_hits, num_tries + 1)
    )


def student_quantile(probability: float, degrees: int) -> float:
    """Return a quantile of Student's t, to 1 % from four degrees of freedom on.

    By the expansion around the normal distribution (Abramowitz and Stegun 26.7.5).
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))


def _half_width(values: Sequence[float], alpha: float) -> float:
    """Return half the confidence interval of a trimmed mean."""
    ordered = sorted(values)
    cut = int(TRIM * len(ordered))
    low, high = ordered[cut], ordered[len(ordered) - cut - 1]
    capped = [min(max(value, low), high) for value in ordered]
    mean = math.fsum(capped) / len(capped)
    variance = math.fsum((v - mean) ** 2 for v in capped) / (len(capped) - 1)
    error = math.sqrt(variance / len(capped)) / (1 - 2 * TRIM)
    # What is left out tells of no spread, so only the rest counts.
    return student_quantile(1 - alpha / 2, len(ordered) - 2 * cut - 1) * error


def _trimmed_means(rows: Floats) -> Floats:
    """Return the size of the trimmed mean of each row."""
    cut = int(TRIM * rows.shape[1])
    kept = np.sort(rows, axis=1)[:, cut : rows.shape[1] - cut]
    means: Floats = np.abs(kept.mean(axis=1))
    return means
