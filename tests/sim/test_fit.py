"""A fit finds the prices that made the steps, and says how far off it is."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stemkv.core.books.cost import FittedCost, StepShape
from stemkv.core.core import CoreConfig
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.table import BlockCopy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.plan import Sample
from stemkv.core.schedule.request import RequestId, RequestSpec
from stemkv.errors import ConfigError, StepLogError
from stemkv.measure.steplog import (
    Added,
    Call,
    Committed,
    CoreState,
    Planned,
    PlannedChunk,
    PlanRecord,
    StepLog,
    StepLogHeader,
)
from stemkv.sim.fit import (
    ModelFacts,
    TimedStep,
    fit_cost,
    fit_error,
    nonnegative_least_squares,
    read_cost,
    timed_steps,
    write_cost,
)

FACTS = ModelFacts(
    bytes_per_token=23040,
    flops_per_token=2e8,
    flops_per_pair=7e4,
    assumed_watts=65.0,
)
TRUTH = FittedCost(
    source="the truth",
    step_s=0.04,
    prefill_chunk_s=0.002,
    prefill_token_s=0.0027,
    prefill_pair_s=1.2e-6,
    decode_s=0.0033,
    decode_context_s=7e-6,
    copied_token_s=0.0004,
    **asdict(FACTS),
)
SECONDS = [name for name in (f.name for f in fields(FittedCost)) if name.endswith("_s")]


def made_up_steps(num_steps: int, *, noise: float = 0.0, seed: int = 0) -> list[Any]:
    """Steps of every shape that take as long as `TRUTH` says, more or less."""
    draw = random.Random(seed)
    steps = []
    for _ in range(num_steps):
        shape = StepShape(num_copied_tokens=draw.choice((0, 0, draw.randint(1, 31))))
        for _ in range(draw.choice((0, 0, 1, 3))):
            start = draw.randint(0, 1000)
            length = draw.randint(1, 256)
            shape.add_chunk(start, start + length, is_decode=False)
        for _ in range(draw.randint(0 if shape.num_prefills else 1, 8)):
            end = draw.randint(2, 1500)
            shape.add_chunk(end - 1, end, is_decode=True)
        seconds = TRUTH.step_seconds(shape) * (1 + noise * draw.gauss(0, 1))
        steps.append(TimedStep(shape=shape, seconds=seconds))
    return steps


def test_the_prices_of_exact_steps_are_found_exactly() -> None:
    fit = fit_cost(made_up_steps(200), FACTS, source="test")

    for name in SECONDS:
        assert getattr(fit.cost, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6)
    assert fit.cost.source == "test, fitted to 200 steps"
    assert (fit.num_steps, fit.held_out.num_steps) == (200, 100)
    assert fit.held_out.p90 == pytest.approx(0.0, abs=1e-6)


def test_noise_shows_in_the_error_on_steps_that_were_held_out() -> None:
    fit = fit_cost(made_up_steps(400, noise=0.05), FACTS, source="test")

    # The median of |N(0, 0.05)| is 0.034, its 90th percentile 0.082.
    assert 0.025 < fit.held_out.median < 0.045
    assert 0.065 < fit.held_out.p90 < 0.1
    assert abs(fit.held_out.total) < 0.02
    assert fit.cost.prefill_token_s == pytest.approx(0.0027, rel=0.05)


def test_a_few_steps_that_took_much_longer_do_not_pull_the_rest() -> None:
    steps = made_up_steps(400, noise=0.002)
    slow = [
        replace(step, seconds=4 * step.seconds) if index % 9 == 0 else step
        for index, step in enumerate(steps)
    ]

    fit = fit_cost(slow, FACTS, source="test")

    # Unweighted, steps that took 4 times as long would raise prices by 2 %.
    assert fit_error(fit.cost, steps).median < 0.003
    assert fit.cost.prefill_token_s == pytest.approx(0.0027, rel=0.003)
    # They are held out too, and the error says so.
    assert fit.held_out.total < -0.1


def test_the_held_out_error_is_of_steps_that_were_not_fitted() -> None:
    steps = [
        replace(step, seconds=step.seconds * (1 + index % 2))
        for index, step in enumerate(made_up_steps(200))
    ]

    error = fit_cost(steps, FACTS, source="test").held_out

    assert (error.median, error.total) == pytest.approx((0.5, -0.5))


def test_the_error_is_of_predictions_against_measurements() -> None:
    steps = made_up_steps(4)
    wrong = [
        replace(step, seconds=step.seconds / factor)
        for step, factor in zip(steps, (1.0, 1.1, 0.8, 1.5), strict=True)
    ]

    error = fit_error(TRUTH, wrong)

    assert error.median == pytest.approx(0.15)
    assert error.p90 == pytest.approx(0.2 + 0.7 * 0.3)
    measured = sum(step.seconds for step in wrong)
    assert error.total == pytest.approx(
        sum(step.seconds for step in steps) / measured - 1
    )


def test_too_few_steps_and_steps_without_time_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 35 steps, got 34"):
        fit_cost(made_up_steps(34), FACTS, source="test")
    still = [*made_up_steps(40), TimedStep(shape=StepShape(num_decodes=1), seconds=0.0)]
    with pytest.raises(ConfigError, match="took no time"):
        fit_cost(still, FACTS, source="test")


def test_steps_that_never_prefill_make_no_cost() -> None:
    shape = StepShape(num_decodes=1, num_decode_context=10)
    steps = [TimedStep(shape=shape, seconds=0.1)] * 50

    with pytest.raises(ConfigError, match="prompts of several lengths"):
        fit_cost(steps, FACTS, source="test")


# Least squares


matrices = st.integers(0, 10_000).map(np.random.default_rng)


@given(matrices, st.integers(1, 5), st.integers(5, 12))
def test_no_other_nonnegative_solution_is_closer(
    draw: np.random.Generator, num_columns: int, num_rows: int
) -> None:
    """By the conditions of Karush, Kuhn and Tucker: no derivative points downhill."""
    matrix = draw.normal(size=(num_rows, num_columns)) * 10.0 ** draw.integers(
        -6, 7, num_columns
    )
    target = draw.normal(size=num_rows)

    solution = nonnegative_least_squares(matrix, target)

    assert (solution >= 0).all()
    slope = _unit(matrix).T @ (matrix @ solution - target)
    assert (slope > -1e-9).all()
    assert np.abs(slope[solution > 0]).max(initial=0.0) < 1e-9


def _unit(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(matrix / np.linalg.norm(matrix, axis=0))


def test_equal_columns_and_columns_of_zeros_have_a_solution() -> None:
    column = np.arange(1.0, 6.0)
    matrix = np.stack([column, np.zeros(5), column], axis=1)

    solution = nonnegative_least_squares(matrix, 3 * column)

    assert solution[1] == 0.0
    assert matrix @ solution == pytest.approx(3 * column)


# Steps of a log


def log_of(*calls: Call) -> StepLog:
    header = StepLogHeader(
        model="none",
        core=CoreConfig(cache=CacheConfig(num_blocks=10)),
    )
    return StepLog(header=header, calls=calls)


def added(name: str, num_prompt: int) -> Added:
    return Added(
        spec=RequestSpec(
            request_id=RequestId(name),
            prompt=TokenIds.from_ids(range(num_prompt)),
            max_new_tokens=9,
            arrival_s=0.0,
            domain=Domain.private("a"),
            namespace=None,
        )
    )


def step(
    now: float,
    end: float,
    *chunks: tuple[str, int, int, int],
    copied: int = 0,
    num_running: int = 1,
) -> tuple[Planned, Committed]:
    plan = PlanRecord(
        step=0,
        now=now,
        copies=(BlockCopy(0, 1, copied),) if copied else (),
        chunks=tuple(PlannedChunk(RequestId(n), a, b, k, 0) for n, a, b, k in chunks),
        digest="",
    )
    state = CoreState(
        num_running=num_running,
        num_waiting=0,
        num_free_blocks=0,
        num_active_blocks=0,
        num_cached_blocks=0,
        num_evicted_blocks=0,
        num_published_blocks=0,
        digest="",
    )
    samples = {RequestId(n): (Sample(1),) * k for n, _, _, k in chunks if k}
    return Planned(plan=plan), Committed(now=end, samples=samples, state=state)


def test_a_step_lasts_to_the_next_one_while_there_is_work() -> None:
    log = log_of(
        added("r", 20),
        *step(0.0, 1.0, ("r", 0, 20, 1)),
        *step(1.1, 2.0, ("r", 20, 21, 1)),
        *step(2.1, 3.0, ("r", 21, 22, 1), num_running=0),
        # Somebody waits here until a request comes.
        *step(50.0, 51.0, ("r", 22, 23, 1)),
        *step(51.3, 52.0, ("r", 23, 24, 1), num_running=0),
    )

    seconds = [timed.seconds for timed in timed_steps(log)]

    # The gaps were 0.1, 0.1 and 0.3; before idle times their median is taken.
    assert seconds == pytest.approx([1.1, 1.0, 1.0, 1.3, 0.8])


def test_the_work_of_a_step_is_what_its_chunks_and_copies_are() -> None:
    log = log_of(
        added("long", 100),
        added("r", 20),
        *step(0.0, 1.0, ("long", 16, 60, 0), ("r", 4, 20, 2), copied=4),
        *step(1.0, 2.0, ("long", 60, 100, 1), ("r", 20, 21, 1), ("r#1", 20, 21, 1)),
        # After a preemption: 20 … 23 are computed again, the last one is sampled from.
        *step(2.0, 3.0, ("r#1", 20, 23, 1), ("long", 99, 100, 0)),
        *step(3.0, 4.0),
    )

    first, second, third = (timed.shape for timed in timed_steps(log))

    expected = StepShape(num_copied_tokens=4)
    expected.add_chunk(16, 60, is_decode=False)
    expected.add_chunk(4, 20, is_decode=False)
    assert first == expected
    assert (second.num_prefill_tokens, second.num_prefills) == (40, 1)
    assert (second.num_decodes, second.num_decode_context) == (2, 42)
    assert (third.num_prefill_tokens, third.num_decodes) == (4, 0)


def test_a_step_of_a_request_that_was_never_added_is_refused() -> None:
    with pytest.raises(StepLogError, match="'ghost' was never added"):
        timed_steps(log_of(*step(0.0, 1.0, ("ghost", 0, 5, 1))))


# The file


def test_a_cost_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, again = tmp_path / "cost.json", tmp_path / "again.json"
    cost = replace(TRUTH, measured_watts=12.5)
    write_cost(cost, path)
    write_cost(cost, again)

    assert read_cost(path) == cost
    assert path.read_bytes() == again.read_bytes()
    assert read_cost(path).watts == 12.5


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"schema": "stemkv.cost/9"}, "schema: must be 'stemkv.cost/1'"),
        ({"step_s": "fast"}, "step_s"),
        ({"step_s": -1.0}, "step_s must be at least 0"),
        ({"speed": 1}, "speed: not a field"),
        ({"decode_s": None}, "decode_s"),
    ],
    ids=["schema", "text", "negative", "unknown", "null"],
)
def test_a_cost_file_that_is_wrong_is_named_with_its_field(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "cost.json"
    write_cost(TRUTH, path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises(ConfigError) as caught:
        read_cost(path)

    assert str(path) in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": "stemkv.cost/1"}'])
def test_what_is_no_cost_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"cost\.json"):
        read_cost(path)
