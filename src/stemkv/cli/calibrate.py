"""`stemkv calibrate`: learn what steps cost from an engine's own steps.

Owns the workload, the open loop that plays it, and the printing. Two runs: one to fit,
in bursts; one with other requests, a steady stream of shorter ones, and smaller steps, to
see how well the fit predicts what it has not seen. Short ones, because percentiles of few
requests say little: who arrives a moment before a long step begins waits for it, and who
arrives a moment later does not.
"""

from __future__ import annotations

import io
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from stemkv.cli.outputs import replaced, write_text
from stemkv.core.core import CoreConfig
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.engine import Engine, EngineConfig, LoadedModel, SamplingParams
from stemkv.engine.energy import EnergyMeter, open_meter
from stemkv.engine.recorder import StepRecorder
from stemkv.engine.threads import default_num_threads
from stemkv.errors import ConfigError
from stemkv.measure.steplog import StepLog
from stemkv.measure.steplog_lines import read_step_log
from stemkv.measure.timeline import percentile
from stemkv.sim.agreement import Agreement, Prediction, predict, repeat
from stemkv.sim.fit import (
    Fit,
    ModelFacts,
    fit_cost,
    fit_error,
    timed_steps,
    write_cost,
)
from stemkv.sim.model_shape import shape_of

__all__ = [
    "Arrival",
    "CalibrateOptions",
    "Clock",
    "OwnClock",
    "Speed",
    "WallClock",
    "make_workload",
    "run_calibrate",
]

_WARM_UP_TOKENS = 256
_TOKEN_BUDGETS = (512, 128)  # of the run to fit and of the other
_MAX_TOKENS = 1024  # of a prompt and its output
_NUM_DOCUMENTS = 4  # that half of the prompts begin with
_DECODES_PER_STEP = 3  # about
_LOAD = 0.7  # seconds of estimated work per second of arrivals
_TTFT_BAR = 0.1  # relative error of the percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """What of the runs can be varied."""

    numerics: str = "exact"
    num_threads: int | None = None
    seed: int = 0
    seconds: float = 35.0  # of work in each run
    kv_tokens: int = 16384
    assumed_watts: float = 65.0  # under load, where there is no meter
    is_own_time: bool = False  # see `OwnClock`

    def __post_init__(self) -> None:
        for name in ("seconds", "kv_tokens", "assumed_watts"):
            if not 0 < getattr(self, name) < 1e9:
                raise ConfigError(
                    f"{name} must be above 0 and finite, got {getattr(self, name)}"
                )
        num_threads = self.num_threads or default_num_threads()
        if self.is_own_time and num_threads > 1:
            raise ConfigError(
                f"own time of {num_threads} threads is no duration: each adds its own; "
                f"use 1 thread, or the time on the wall"
            )


class Clock(Protocol):
    """What the open loop and the engine go by, seconds."""

    def now(self) -> float:
        """Return the time; never goes back."""

    def wait(self, seconds: float) -> None:
        """Let so much time pass."""


class WallClock:
    """The time that users see."""

    def now(self) -> float:
        """Return the time since some moment before."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


class OwnClock:
    """The processor time of this process, and what was waited.

    On a machine that others use too, it tells what the engine takes when it is alone.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0

    def now(self) -> float:
        """Return the time this process has computed or waited."""
        return time.process_time() + self._waited_s

    def wait(self, seconds: float) -> None:
        """Count the time as passed; nobody has to sit through it."""
        self._waited_s += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of the workload and when it arrives, seconds from the start."""

    prompt: TokenIds
    num_new: int
    tenant: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a first look at the engine gives; good enough to size a workload."""

    prefill_token_s: float
    decode_step_s: float  # of one request alone


def make_workload(
    rng: random.Random,
    *,
    vocab_size: int,
    max_tokens: int,
    speed: Speed,
    work_s: float,
    max_burst: int,
) -> list[Arrival]:
    """Return requests that take about `work_s` seconds, in bursts of up to `max_burst`.

    Prompts are short and long, half of them begin with part of one of a few documents,
    so that there are hits of every depth, partly matching blocks included. Tokens are
    random: what they say costs nothing.
    """
    longest = max_tokens // 2
    documents = [_random_ids(rng, longest, vocab_size) for _ in range(_NUM_DOCUMENTS)]
    bursts: list[list[Arrival]] = []
    gaps: list[float] = []
    spent = 0.0
    while spent < work_s:
        burst = []
        for _ in range(rng.randint(1, max_burst)):
            shared: list[int] = []
            if rng.random() < 0.5:
                document = documents[rng.randrange(_NUM_DOCUMENTS)]
                shared = document[: rng.randint(1, longest)]
            num_own = int(8 * (longest / 16) ** rng.random())
            arrival = Arrival(
                prompt=TokenIds.from_ids(
                    shared + _random_ids(rng, num_own, vocab_size)
                ),
                num_new=rng.randint(4, max(4, max_tokens // 24)),
                tenant=rng.choice(("acme", "globex")),
                at_s=0.0,
            )
            # Most of what is shared is found in the cache, and decodes share steps.
            spent += speed.prefill_token_s * (num_own + len(shared) / 4)
            spent += speed.decode_step_s * arrival.num_new / _DECODES_PER_STEP
            burst.append(arrival)
        bursts.append(burst)
        gaps.append(len(burst) * rng.expovariate(1.0))
    # Stretched, so that the load is what it should be whatever the gaps came to.
    stretch = spent / _LOAD / sum(gaps)
    starts = [0.0, *accumulate(stretch * gap for gap in gaps[:-1])]
    return [
        replace(arrival, at_s=at_s)
        for at_s, burst in zip(starts, bursts, strict=True)
        for arrival in burst
    ]


def run_calibrate(
    console: Console,
    loaded: LoadedModel,
    options: CalibrateOptions,
    *,
    out: Path | None,
    json_file: Path | None,
) -> bool:
    """Run, fit and print; return whether both logs replay to the same plans."""
    shape = shape_of(loaded.config.to_dict(), name=loaded.name)
    meter = open_meter()
    first, watts = _record(console, loaded, options, meter, is_first=True)
    facts = ModelFacts(
        bytes_per_token=loaded.kv_bytes_per_token,
        flops_per_token=shape.flops_per_token,
        flops_per_pair=shape.flops_per_pair,
        assumed_watts=options.assumed_watts,
        measured_watts=watts,
    )
    num_threads = options.num_threads or default_num_threads()
    seconds = "own time" if options.is_own_time else "time on the wall"
    source = (
        f"{loaded.name} on this machine's CPU, {num_threads} thread(s), "
        f"{options.numerics}, {seconds}"
    )
    fit = fit_cost(timed_steps(first), facts, source=source)
    second, _ = _record(console, loaded, options, None, is_first=False)
    report = _report(fit, first, second, meter)
    _print(console, report)
    if out is not None:
        with replaced(out) as path:
            write_cost(fit.cost, path)
        console.print(f"wrote {out}", markup=False)
    if json_file is not None:
        write_text(json.dumps(report, indent=2) + "\n", json_file)
    agreements = report["agreement"].values()
    return all(each["first_difference"] is None for each in agreements)


def _random_ids(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def _record(
    console: Console,
    loaded: LoadedModel,
    options: CalibrateOptions,
    meter: EnergyMeter | None,
    *,
    is_first: bool,
) -> tuple[StepLog, float | None]:
    """Play one workload on a fresh engine; return its log and the measured watts."""
    speed = _warm_up(loaded, options)
    max_tokens = min(_MAX_TOKENS, loaded.context_length, options.kv_tokens)
    arrivals = make_workload(
        random.Random(2 * options.seed + (not is_first)),
        vocab_size=loaded.vocab_size,
        max_tokens=max_tokens if is_first else max_tokens // 2,
        speed=speed,
        work_s=options.seconds,
        max_burst=8 if is_first else 1,
    )
    title = "to fit" if is_first else "to predict"
    console.print(
        f"run {title}: {len(arrivals)} requests over {arrivals[-1].at_s:.0f} s "
        f"({1 / speed.prefill_token_s:.0f} prefill tokens/s, measured)"
    )
    file = io.StringIO()
    clock: Clock = OwnClock() if options.is_own_time else WallClock()
    engine = _make_engine(
        loaded,
        options,
        clock,
        token_budget=_TOKEN_BUDGETS[0 if is_first else 1],
        recorder=StepRecorder(file, model=loaded.name),
    )
    watts = _play(console, engine, arrivals, clock, meter, title)
    return read_step_log(file.getvalue().splitlines(), file=f"run {title}"), watts


def _make_engine(
    loaded: LoadedModel,
    options: CalibrateOptions,
    clock: Clock,
    *,
    token_budget: int,
    recorder: StepRecorder | None = None,
) -> Engine:
    config = EngineConfig(
        numerics=options.numerics,
        kv_memory_bytes=options.kv_tokens * loaded.kv_bytes_per_token,
        core=CoreConfig(scheduler=SchedulerConfig(token_budget=token_budget)),
        num_threads=options.num_threads,
        runs_self_test=False,  # about times, not about bits
    )
    return Engine(loaded, config, clock=clock.now, recorder=recorder)


def _warm_up(loaded: LoadedModel, options: CalibrateOptions) -> Speed:
    """Return measured speeds; kernels and memory are warm then."""
    clock: Clock = OwnClock() if options.is_own_time else WallClock()
    engine = _make_engine(loaded, options, clock, token_budget=_TOKEN_BUDGETS[0])
    length = min(_WARM_UP_TOKENS, loaded.context_length // 2, options.kv_tokens // 2)
    for index in range(3):
        prompt = TokenIds.from_ids([(7 * i + index) % 100 for i in range(length)])
        engine.steps.clear()
        engine.generate([prompt], SamplingParams(max_new_tokens=4, ignore_eos=True))
    prefill, *_, decode = engine.steps
    return Speed(
        prefill_token_s=prefill.seconds / prefill.num_prefill_tokens,
        decode_step_s=decode.seconds,
    )


def _play(
    console: Console,
    engine: Engine,
    arrivals: Sequence[Arrival],
    clock: Clock,
    meter: EnergyMeter | None,
    title: str,
) -> float | None:
    """Play an open loop to its end; return the watts while steps ran."""
    waiting = list(reversed(arrivals))
    joules = seconds = 0.0
    num_ended = 0
    start = clock.now()
    with _progress(console) as progress:
        task = progress.add_task(title, total=len(arrivals))
        while waiting or engine.has_work:
            now = clock.now() - start
            while waiting and waiting[-1].at_s <= now:
                _add(engine, waiting.pop(), start)
            if not engine.has_work:
                clock.wait(waiting[-1].at_s - now)
                continue
            if meter is None:
                num_ended += len(engine.step())
            else:
                joules_before, began = meter.joules(), time.monotonic()
                num_ended += len(engine.step())
                seconds += time.monotonic() - began
                joules += meter.joules() - joules_before
            progress.update(task, completed=num_ended)
    return joules / seconds if joules and seconds else None


def _add(engine: Engine, arrival: Arrival, start: float) -> None:
    engine.add(
        arrival.prompt,
        SamplingParams(max_new_tokens=arrival.num_new, ignore_eos=True),
        tenant=arrival.tenant,
        arrival_s=start + arrival.at_s,
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} requests"),
        TimeElapsedColumn(),
        console=console,
    )


def _report(
    fit: Fit, first: StepLog, second: StepLog, meter: EnergyMeter | None
) -> dict[str, Any]:
    """Return all numbers; `kind` says how each was obtained."""
    logs = {"fitted_run": first, "other_run": second}
    return {
        "schema": "stemkv.calibrate/1",
        "kind": {
            "agreement": "exact",
            "ttft measured_s": "measured",
            "cost, ttft predicted_s": "fitted to measured steps",
            "watts": "assumed" if meter is None else meter.source,
        },
        "cost": asdict(fit.cost),
        "num_steps": fit.num_steps,
        "step_error": {
            "held_out": asdict(fit.held_out),
            "other_run": asdict(fit_error(fit.cost, timed_steps(second))),
        },
        "ttft": {name: _ttft_row(predict(log, fit.cost)) for name, log in logs.items()},
        "agreement": {name: _agreement_row(repeat(log)) for name, log in logs.items()},
    }


def _ttft_row(prediction: Prediction) -> dict[str, Any]:
    rows: dict[str, Any] = {"num_requests": len(prediction.measured_s)}
    for percent in (50, 90):
        rows[f"p{percent}"] = {
            "measured_s": percentile(prediction.measured_s.values(), percent),
            "predicted_s": percentile(prediction.predicted_s.values(), percent),
            "error": prediction.error(percent),
        }
    return rows


def _agreement_row(agreement: Agreement) -> dict[str, Any]:
    difference = agreement.first_difference
    return {
        "num_plans": agreement.num_plans,
        "num_equal_plans": agreement.num_equal_plans,
        "hit_tokens": sum(agreement.hit_tokens.values()),
        "first_difference": None if difference is None else str(difference),
    }


_UNITS = (
    ("step_s", "a step", 1e3, "ms"),
    ("prefill_chunk_s", "a prefill chunk", 1e3, "ms"),
    ("prefill_token_s", "a prefill token", 1e6, "µs"),
    ("prefill_pair_s", "a (query, key) pair", 1e9, "ns"),
    ("decode_s", "a decode", 1e3, "ms"),
    ("decode_context_s", "a token of a decode's context", 1e9, "ns"),
    ("copied_token_s", "a copied token", 1e6, "µs"),
)


def _print(console: Console, report: dict[str, Any]) -> None:
    cost = report["cost"]
    table = Table(title=cost["source"])
    table.add_column("one more")
    table.add_column("costs", justify="right")
    for name, label, factor, unit in _UNITS:
        table.add_row(label, f"{cost[name] * factor:,.3f} {unit}")
    console.print(table)
    for name, label in (("held_out", "held-out steps"), ("other_run", "other run")):
        error = report["step_error"][name]
        console.print(
            f"{label}: {error['num_steps']} steps, error of a step {error['median']:.1%} "
            f"median, {error['p90']:.1%} p90; of all together {error['total']:+.1%}"
        )
    for name, label in (("fitted_run", "fitted run"), ("other_run", "other run")):
        for percent in ("p50", "p90"):
            row = report["ttft"][name][percent]
            verdict = "within" if abs(row["error"]) <= _TTFT_BAR else "NOT within"
            console.print(
                f"{label}: TTFT {percent} {row['measured_s']:.3f} s measured, "
                f"{row['predicted_s']:.3f} s predicted ({row['error']:+.1%}, {verdict} "
                f"{_TTFT_BAR:.0%})"
            )
    if cost["measured_watts"] is None:
        console.print(
            f"no energy meter: joules are estimated at {cost['assumed_watts']:g} W"
        )
    else:
        console.print(
            f"energy: {cost['measured_watts']:.1f} W while steps ran "
            f"({report['kind']['watts']})"
        )
    for name, row in report["agreement"].items():
        equal, total = row["num_equal_plans"], row["num_plans"]
        text = f"{name.replace('_', ' ')}: {equal} of {total} plans replayed equally"
        is_equal = row["first_difference"] is None
        console.print(text, style="bold green" if is_equal else "bold red")
        if not is_equal:
            console.print(row["first_difference"], markup=False)
