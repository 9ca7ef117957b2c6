from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from stemkv.audit.isolation.statistics import (
    binomial_tail,
    compare_pairs,
    detectable,
    sign_flip_p,
    student_quantile,
    trimmed_mean,
)


def test_a_fifth_is_left_out_at_either_end() -> None:
    assert trimmed_mean([1000.0, 2.0, 3.0, 4.0, -1000.0]) == 3.0
    assert trimmed_mean([1.0, 2.0, 6.0]) == 3.0  # a fifth of three is nobody


def test_of_three_equal_signs_two_patterns_in_eight_are_as_extreme() -> None:
    assert sign_flip_p([1.0, 2.0, 3.0], seed=0) == 2 / 8


def test_differences_that_cancel_are_as_good_as_any() -> None:
    assert sign_flip_p([1.0, -1.0, 2.0, -2.0], seed=0) == 1.0


@pytest.mark.parametrize("seed", range(5))
def test_for_few_pairs_p_is_that_of_all_sign_patterns(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.gauss(0.5, 1) for _ in range(9)]
    observed = abs(trimmed_mean(values))
    extremes = [
        abs(trimmed_mean([s * v for s, v in zip(signs, values, strict=True)]))
        >= observed - 1e-12
        for signs in itertools.product((1, -1), repeat=len(values))
    ]

    assert sign_flip_p(values, seed=0) == sum(extremes) / 512


def test_random_patterns_estimate_what_all_patterns_give() -> None:
    rng = random.Random(3)
    values = [rng.gauss(0.2, 1) for _ in range(12)]

    exact = sign_flip_p(values, seed=0, num_draws=4096)
    drawn = sign_flip_p(values, seed=0, num_draws=4000)

    assert 0.01 < exact < 0.5
    assert abs(drawn - exact) < 0.03


def test_p_is_never_zero_since_the_observed_signs_count() -> None:
    assert sign_flip_p([1.0] * 40, seed=0, num_draws=999) == 1 / 1000


def gaussian(rng: random.Random) -> float:
    return rng.gauss(0, 1)


def with_outliers(rng: random.Random) -> float:
    """One in ten is thirty times as far out, as when somebody else has the core."""
    return rng.gauss(0, 1) + (rng.random() < 0.1) * rng.gauss(0, 30)


@pytest.mark.parametrize("draw", [gaussian, with_outliers])
def test_without_a_difference_one_in_a_hundred_is_significant_at_one_percent(
    draw: Callable[[random.Random], float],
) -> None:
    rng = random.Random(1)
    num_found = sum(
        sign_flip_p([draw(rng) for _ in range(24)], seed=i, num_draws=1500) <= 0.01
        for i in range(500)
    )

    assert num_found <= 12  # 5 on average; 12 or more once in 200 times


@pytest.mark.parametrize("draw, least", [(gaussian, 0.9), (with_outliers, 0.75)])
def test_what_is_called_detectable_is_found_nine_times_in_ten(
    draw: Callable[[random.Random], float], least: float
) -> None:
    rng = random.Random(2)
    sizes = [
        detectable([draw(rng) for _ in range(24)], alpha=0.01, power=0.9)
        for _ in range(200)
    ]
    size = sum(sizes) / len(sizes)

    def share_found(true_difference: float) -> float:
        found = [
            sign_flip_p(
                [draw(rng) + true_difference for _ in range(24)],
                seed=i,
                num_draws=1500,
            )
            <= 0.01
            for i in range(300)
        ]
        return sum(found) / len(found)

    assert share_found(size) >= least
    assert share_found(size / 2) < 0.6  # so the number is no exaggeration


def test_what_is_detectable_does_not_depend_on_signs() -> None:
    """So measuring until it is small does not make significance any likelier."""
    rng = random.Random(4)
    values = [rng.gauss(0.3, 1) for _ in range(24)]
    flipped = [value * rng.choice((1, -1)) for value in values]

    assert detectable(values, alpha=0.01, power=0.9) == pytest.approx(
        detectable(flipped, alpha=0.01, power=0.9), rel=1e-12
    )


def test_more_pairs_detect_less() -> None:
    rng = random.Random(5)
    values = [rng.gauss(0, 1) for _ in range(96)]

    few = detectable(values[:24], alpha=0.01, power=0.9)

    assert detectable(values, alpha=0.01, power=0.9) < 0.7 * few


def test_the_interval_holds_the_true_difference_at_its_level() -> None:
    rng = random.Random(6)
    num_covering = 0
    for index in range(300):
        values = [rng.gauss(2.0, 1) for _ in range(24)]
        test = compare_pairs(values, alpha=0.01, power=0.9, seed=index, num_draws=100)
        num_covering += test.low <= 2.0 <= test.high

    assert num_covering >= 290  # 297 on average


@pytest.mark.parametrize(
    "probability, degrees, value",
    [
        (0.995, 4, 4.6041),
        (0.995, 15, 2.9467),
        (0.975, 10, 2.2281),
        (0.9, 23, 1.3195),
        (0.005, 15, -2.9467),
    ],
)
def test_quantiles_of_student_are_those_of_the_tables(
    probability: float, degrees: int, value: float
) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(value, rel=0.01)


def test_the_luck_of_guessing_is_binomial() -> None:
    assert binomial_tail(3, 3, 1 / 6) == pytest.approx(1 / 216)
    assert binomial_tail(0, 5, 1 / 6) == pytest.approx(1.0)
    assert binomial_tail(4, 5, 0.5) == pytest.approx(6 / 32)
