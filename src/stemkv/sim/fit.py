"""How long steps take, learnt from the steps of a log.

Owns the least-squares fit that makes a `FittedCost`, the error on steps it was not
fitted to, and the file that keeps it. Runs nothing and measures nothing itself.

What is fitted is the time from one `schedule` to the next while there is work: the
forward pass, sampling, and what the driver does between steps. Before an idle time,
where the next `schedule` tells nothing, it is the time to the commit and the median of
what the others took from commit to the next `schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from stemkv.core.books.cost import FittedCost, StepShape
from stemkv.core.schedule.request import RequestId
from stemkv.errors import ConfigError, StepLogError
from stemkv.measure.steplog import Committed, PlanRecord, StepLog
from stemkv.measure.timeline import percentile

__all__ = [
    "Fit",
    "FitError",
    "ModelFacts",
    "TimedStep",
    "fit_cost",
    "fit_error",
    "nonnegative_least_squares",
    "read_cost",
    "timed_steps",
    "write_cost",
]

_SCHEMA: Final = "stemkv.cost/1"
# Coefficient of `FittedCost` → what it multiplies in a `StepShape`; None: every step.
_TERMS: Final[dict[str, str | None]] = {
    "step_s": None,
    "prefill_chunk_s": "num_prefills",
    "prefill_token_s": "num_prefill_tokens",
    "prefill_pair_s": "num_prefill_pairs",
    "decode_s": "num_decodes",
    "decode_context_s": "num_decode_context",
    "copied_token_s": "num_copied_tokens",
}
_NUM_ROUNDS: Final = 12
_HUBER: Final = 1.345 * 1.4826  # efficient for normal errors; median to deviation
_LEAST_ERROR: Final = 1e-6  # below that, steps count as fitted
_MIN_STEPS: Final = 5 * len(_TERMS)  # fewer say more of their noise than of the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """One executed step: how much work it was and how long it took."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How far predicted step times are from measured ones."""

    num_steps: int
    median: float  # of |predicted / measured - 1|
    p90: float  # of the same
    total: float  # of all steps together, predicted / measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a cost model must know besides times; see `FittedCost`."""

    bytes_per_token: int
    flops_per_token: float
    flops_per_pair: float
    assumed_watts: float
    measured_watts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A fitted cost, and how well it does on the steps that were held out."""

    cost: FittedCost  # fitted to all steps
    held_out: FitError  # of a fit to every other step, on those between
    num_steps: int


def timed_steps(log: StepLog) -> list[TimedStep]:
    """Return the steps of a log that computed something, in their order."""
    prompt_lengths = {spec.request_id: len(spec.prompt) for spec in log.specs}
    steps = log.steps()
    gaps = [
        plan.now - before.now
        for (_, before), (plan, _) in pairwise(steps)
        if _has_work(before)
    ]
    gap = median(gaps) if gaps else 0.0
    timed = []
    for index, (plan, committed) in enumerate(steps):
        if not plan.chunks:
            continue
        end = committed.now + gap
        if _has_work(committed) and index + 1 < len(steps):
            end = steps[index + 1][0].now
        shape = _shape_of(plan, prompt_lengths)
        timed.append(TimedStep(shape=shape, seconds=end - plan.now))
    return timed


def fit_cost(steps: Sequence[TimedStep], facts: ModelFacts, *, source: str) -> Fit:
    """Fit a cost to steps; raises `ConfigError` if they are too few or too alike.

    Steps with even index are fitted and the odd ones predicted for `held_out`; the
    cost itself is fitted to all.
    """
    if len(steps) < _MIN_STEPS:
        raise ConfigError(
            f"a fit of {len(_TERMS)} coefficients needs at least {_MIN_STEPS} steps, "
            f"got {len(steps)}; record a longer run"
        )
    if any(step.seconds <= 0 for step in steps):
        raise ConfigError("a step took no time; record with a clock that runs")
    half = _fitted(steps[::2], facts, source)
    return Fit(
        cost=_fitted(steps, facts, f"{source}, fitted to {len(steps)} steps"),
        held_out=fit_error(half, steps[1::2]),
        num_steps=len(steps),
    )


def fit_error(cost: FittedCost, steps: Sequence[TimedStep]) -> FitError:
    """Return how far off a cost is on some steps; there must be one at least."""
    predicted = [cost.step_seconds(step.shape) for step in steps]
    measured = [step.seconds for step in steps]
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return FitError(
        num_steps=len(steps),
        median=median(errors),
        p90=percentile(errors, 90),
        total=sum(predicted) / sum(measured) - 1,
    )


def nonnegative_least_squares(
    matrix: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the `x >= 0` with the least `|matrix x - target|`.

    Tries every choice of columns that may be above 0: the optimum is the ordinary
    least-squares solution on its own. 2^columns small solves, for a dozen at most.
    """
    num_columns = matrix.shape[1]
    # Columns of one size each: counts of tokens and of pairs are 1e6 apart.
    norms = np.linalg.norm(matrix, axis=0)
    used = [j for j in range(num_columns) if norms[j] > 0]
    # Turned, so that the solves see as many rows as columns, however many steps.
    turn, scaled = np.linalg.qr(matrix / np.where(norms > 0, norms, 1.0))
    goal = turn.T @ target
    best, least = np.zeros(num_columns), float(goal @ goal)
    for size in range(1, len(used) + 1):
        for columns in combinations(used, size):
            part = scaled[:, columns]
            solution, _, rank, _ = np.linalg.lstsq(part, goal, rcond=None)
            if rank < size or solution.min() < 0:
                continue
            left = goal - part @ solution
            if (squares := float(left @ left)) < least:
                least, best = squares, np.zeros(num_columns)
                best[list(columns)] = solution / norms[list(columns)]
    return best


def write_cost(cost: FittedCost, path: Path) -> None:
    """Write a cost as JSON that `read_cost` reads."""
    document = {"schema": _SCHEMA, **msgspec.to_builtins(cost)}
    path.write_bytes(
        msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=1)
        + b"\n"
    )


def read_cost(path: Path) -> FittedCost:
    """Read what `write_cost` wrote; raises `ConfigError` naming file and field."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not a cost file: {error}") from None
    schema = document.pop("schema", None)
    if schema != _SCHEMA:
        raise ConfigError(
            f"{path}: schema: must be {_SCHEMA!r}, got {schema!r:.60}; make the file "
            f"with `stemkv calibrate --out`"
        )
    names = {field.name for field in fields(FittedCost)}
    for name in sorted(document.keys() - names):
        raise ConfigError(f"{path}: {name}: not a field of {_SCHEMA}")
    try:
        return msgspec.convert(document, FittedCost)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None


def _shape_of(plan: PlanRecord, prompt_lengths: dict[RequestId, int]) -> StepShape:
    shape = StepShape(num_copied_tokens=sum(copy.num_tokens for copy in plan.copies))
    for chunk in plan.chunks:
        root = RequestId(chunk.request_id.partition("#")[0])
        if root not in prompt_lengths:
            raise StepLogError(f"step {plan.step}: {root!r:.60} was never added")
        # One token after the prompt that is sampled from: what was sampled last.
        is_decode = (
            chunk.end - chunk.start == 1
            and chunk.start >= prompt_lengths[root]
            and chunk.num_samples > 0
        )
        shape.add_chunk(chunk.start, chunk.end, is_decode=is_decode)
    return shape


def _has_work(committed: Committed) -> bool:
    return committed.state.num_running + committed.state.num_waiting > 0


def _fitted(steps: Sequence[TimedStep], facts: ModelFacts, source: str) -> FittedCost:
    matrix = np.array(
        [
            [
                1.0 if name is None else getattr(step.shape, name)
                for name in _TERMS.values()
            ]
            for step in steps
        ],
        dtype=np.float64,
    )
    seconds = np.array([step.seconds for step in steps])
    solution = _robust(matrix / seconds[:, None])
    coefficients = dict(zip(_TERMS, map(float, solution), strict=True))
    return FittedCost(
        source=source,
        bytes_per_token=facts.bytes_per_token,
        flops_per_token=facts.flops_per_token,
        flops_per_pair=facts.flops_per_pair,
        assumed_watts=facts.assumed_watts,
        measured_watts=facts.measured_watts,
        **coefficients,
    )


def _robust(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fit rows to 1, those that nothing fits with less weight.

    Rows are counts over measured seconds, so residuals are relative errors: a step of
    20 ms counts as much as one of 2 s. A machine that does something else for a moment
    makes single steps several times as long; Huber's weights (Annals of Mathematical
    Statistics 35, 1964), by iterated least squares, keep those from pulling the rest.
    """
    target = np.ones(len(matrix))
    weights = np.ones(len(matrix))
    for _ in range(_NUM_ROUNDS):
        root = np.sqrt(weights)
        solution = nonnegative_least_squares(matrix * root[:, None], target * root)
        errors = np.abs(matrix @ solution - 1)
        limit = max(_HUBER * float(np.median(errors)), _LEAST_ERROR)
        weights = np.minimum(1.0, limit / np.maximum(errors, limit))
    return solution
