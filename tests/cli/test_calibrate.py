"""`stemkv calibrate` fits to a run and says how well that predicts another."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from stemkv.cli import calibrate
from stemkv.cli.calibrate import (
    Arrival,
    CalibrateOptions,
    OwnClock,
    Speed,
    make_workload,
    run_calibrate,
)
from stemkv.errors import ConfigError
from stemkv.measure.steplog import StepLog
from stemkv.sim.agreement import repeat
from stemkv.sim.fit import read_cost
from tests.engine.models import tiny_once


def workload(seed: int, **changes: Any) -> list[Arrival]:
    settings: dict[str, Any] = dict(
        vocab_size=300,
        max_tokens=512,
        speed=Speed(prefill_token_s=0.001, decode_step_s=0.01),
        work_s=20.0,
        max_burst=8,
    )
    return make_workload(random.Random(seed), **settings | changes)


def test_the_same_seed_gives_the_same_workload_and_another_gives_another() -> None:
    assert workload(1) == workload(1)
    assert workload(1) != workload(2)


@pytest.mark.parametrize("seed", range(5))
def test_a_workload_has_short_and_long_prompts_hits_and_bursts(seed: int) -> None:
    arrivals = workload(seed)

    lengths = sorted(len(arrival.prompt) for arrival in arrivals)
    assert lengths[0] < 40
    assert lengths[-1] > 250
    assert all(len(a.prompt) + a.num_new <= 512 + 64 for a in arrivals)
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert len(set(times)) < len(times), "some arrive together"
    heads = [bytes(a.prompt.buffer[:32]) for a in arrivals if len(a.prompt) > 16]
    assert len(set(heads)) < len(heads) - 3, "some begin alike"


def test_a_workload_without_bursts_has_none() -> None:
    times = [arrival.at_s for arrival in workload(1, max_burst=1)]

    assert len(set(times)) == len(times)


@pytest.mark.parametrize("field", ["seconds", "kv_tokens", "assumed_watts"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_options_that_mean_nothing_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be above 0"):
        CalibrateOptions(**{field: value})


def test_own_time_of_several_threads_is_refused() -> None:
    with pytest.raises(ConfigError, match="own time of 2 threads"):
        CalibrateOptions(is_own_time=True, num_threads=2)


def test_waiting_on_the_own_clock_takes_no_time_and_counts() -> None:
    clock = OwnClock()
    start = clock.now()

    clock.wait(1e6)

    assert clock.now() - start >= 1e6


def run(
    tmp_path: Path, options: CalibrateOptions
) -> tuple[bool, str, dict[str, Any], Path]:
    text = io.StringIO()
    json_file, out = tmp_path / "numbers.json", tmp_path / "cost.json"
    is_equal = run_calibrate(
        Console(file=text, width=120),
        tiny_once("llama-group1", torch.float32),
        options,
        out=out,
        json_file=json_file,
    )
    return is_equal, text.getvalue(), json.loads(json_file.read_text()), out


OPTIONS = CalibrateOptions(seconds=1.0, num_threads=1, kv_tokens=2048, is_own_time=True)


def test_a_tiny_model_is_calibrated_and_its_logs_are_repeated(tmp_path: Path) -> None:
    is_equal, text, report, out = run(tmp_path, OPTIONS)

    assert is_equal
    for name in ("fitted_run", "other_run"):
        row = report["agreement"][name]
        assert row["num_equal_plans"] == row["num_plans"] > 10
        assert row["hit_tokens"] > 0
        assert row["first_difference"] is None
        assert report["ttft"][name]["p50"]["measured_s"] > 0
    assert read_cost(out).source == report["cost"]["source"]
    assert report["kind"]["watts"] == "assumed"
    assert "held-out steps:" in text
    assert "other run: TTFT p90" in text
    assert "joules are estimated at 65 W" in text


def test_a_plan_that_is_not_repeated_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repeat_smaller(log: StepLog) -> Any:
        core = log.header.core
        core = core.sized(core.cache.num_blocks - 1)
        return repeat(replace(log, header=replace(log.header, core=core)))

    monkeypatch.setattr(calibrate, "repeat", repeat_smaller)

    is_equal, text, report, _ = run(tmp_path, OPTIONS)

    assert not is_equal
    assert report["agreement"]["fitted_run"]["first_difference"] is not None
    assert "recorded" in text


class Meter:
    """Draws 20 W whatever happens; its clock is the number of readings."""

    source = "a fake"

    def __init__(self) -> None:
        self.num_readings = 0

    def joules(self) -> float:
        self.num_readings += 1
        return 5.0 * self.num_readings


def test_measured_energy_takes_the_place_of_what_was_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "open_meter", Meter)

    _, text, report, out = run(tmp_path, OPTIONS)

    watts = report["cost"]["measured_watts"]
    assert watts > 0
    assert read_cost(out).watts == watts
    assert report["kind"]["watts"] == "a fake"
    assert "W while steps ran (a fake)" in text


@pytest.mark.slow
@pytest.mark.model
def test_the_command_prints_json_alone_and_writes_a_cost(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from stemkv.cli import main; main()",
            "calibrate",
            "--seconds=8",
            f"--out={out}",
            "--json=-",
            "--own-time",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "100"},
    )

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "stemkv.calibrate/1"
    assert report["agreement"]["other_run"]["first_difference"] is None
    assert read_cost(out).prefill_token_s > 0
    assert "plans replayed equally" in done.stderr
