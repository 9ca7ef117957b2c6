"""What does a forward pass of the engine cost, against the engines people run?

`python -m bench.engine [--json FILE] [--check] [--quick]`

Process CPU time, one thread, bfloat16, the embedded model, random prompts, nothing
reused. Ours in class `exact`, ours in class `tolerant` and the peers take turns, and
medians are compared, so that a disturbance hits all of them. With
`STEMKV_VLLM_PYTHON` naming an interpreter that has vLLM, the peer is vLLM on CPU, both
`enforce_eager` and compiled (its default); without it, plain transformers.

The bars are held against vLLM in eager mode, which executes layer by layer as this
engine does; the compiled mode, vLLM's default, is printed beside it. A decode step is the difference between a call with
17 new tokens and one with 1, over 16.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from bench.report import Bar, finish, parser
from stemkv.core.core import CoreConfig
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.engine import Engine, EngineConfig, SamplingParams, load_model

__all__ = ["main"]

# Seconds of CPU for (prompt tokens, batch, new tokens).
_Measure = Callable[[int, int, int], float]

_DECODE_STEPS = 16
_PREFILLS = ((256, 1.25), (1024, 1.25))  # prompt tokens, bar
_DECODES = ((256, 1, 1.15), (1024, 1, 1.15), (256, 8, 1.5))  # context, batch, bar
_MAX_EXACT_OVER_TOLERANT = 1.15


def main() -> int:
    """Measure all in turn, print ratios; the exit code is for `--check`."""
    options = parser("CPU cost of the engine against its peers.").parse_args()
    num_rounds = 3 if options.quick else 9
    torch.set_num_threads(1)
    console = Console()
    loaded = load_model(dtype=torch.bfloat16)
    folder = Path(loaded.config._name_or_path)
    peers, facts, close = _peers(folder, console)
    ours = {
        numerics: _ours(
            Engine(
                loaded,
                EngineConfig(
                    numerics=numerics,
                    core=CoreConfig(
                        scheduler=SchedulerConfig(token_budget=2048, max_num_running=16)
                    ),
                    reuses_prefixes=False,
                    num_threads=1,
                    kv_memory_bytes=1 << 28,
                ),
            )
        )
        for numerics in ("exact", "tolerant")
    }
    try:
        seconds = _measure_all({**ours, **peers}, num_rounds, console)
    finally:
        close()
    bars = _bars(seconds, list(peers))
    facts["threads"] = "1"
    facts["rounds"] = f"{num_rounds}, taking turns, medians of process CPU time"
    return finish("bench.engine", bars, options, facts=facts)


def _measure_all(
    measures: dict[str, _Measure], num_rounds: int, console: Console
) -> dict[str, dict[tuple[int, int, str], float]]:
    """Return per engine and case the median seconds."""
    cases: list[tuple[int, int, str]] = [(n, 1, "prefill") for n, _ in _PREFILLS]
    cases += [(n, batch, "decode") for n, batch, _ in _DECODES]
    found: dict[str, dict[tuple[int, int, str], list[float]]] = {
        name: {case: [] for case in cases} for name in measures
    }
    for measure in measures.values():
        for num_prompt, batch, _ in cases:
            measure(num_prompt, batch, 4)  # warm up
    with Progress(console=console) as progress:
        task = progress.add_task("rounds", total=num_rounds * len(cases))
        for _ in range(num_rounds):
            for case in cases:
                for name, measure in measures.items():
                    found[name][case].append(_case_seconds(measure, case))
                progress.advance(task)
    return {
        name: {case: statistics.median(values) for case, values in by_case.items()}
        for name, by_case in found.items()
    }


def _case_seconds(measure: _Measure, case: tuple[int, int, str]) -> float:
    num_prompt, batch, kind = case
    first = measure(num_prompt, batch, 1)
    if kind == "prefill":
        return first
    return (measure(num_prompt, batch, 1 + _DECODE_STEPS) - first) / _DECODE_STEPS


def _bars(
    seconds: dict[str, dict[tuple[int, int, str], float]], peers: list[str]
) -> list[Bar]:
    limits: dict[tuple[int, int, str], float] = {
        (n, 1, "prefill"): bar for n, bar in _PREFILLS
    }
    limits |= {(n, batch, "decode"): bar for n, batch, bar in _DECODES}
    bars = []
    for case, limit in limits.items():
        num_prompt, batch, kind = case
        title = f"{kind} {num_prompt}" + (f" x {batch}" if batch > 1 else "")
        for name in ("exact", "tolerant", *peers):
            label = name if name in peers else f"ours, {name}"
            bars.append(
                Bar(
                    name=f"{title}: {label}",
                    measured=1e3 * seconds[name][case],
                    unit="ms",
                )
            )
        for index, peer in enumerate(peers):
            bars.append(
                Bar(
                    name=f"{title}: exact / {peer}",
                    measured=seconds["exact"][case] / seconds[peer][case],
                    unit="×",
                    limit=limit if index == 0 else None,
                )
            )
        bars.append(
            Bar(
                name=f"{title}: exact / tolerant",
                measured=seconds["exact"][case] / seconds["tolerant"][case],
                unit="×",
                limit=_MAX_EXACT_OVER_TOLERANT,
            )
        )
    return bars


def _ours(engine: Engine) -> _Measure:
    rng = random.Random(0)

    def measure(num_prompt: int, batch: int, num_new: int) -> float:
        prompts = [
            TokenIds.from_ids([rng.randrange(3, 49000) for _ in range(num_prompt)])
            for _ in range(batch)
        ]
        params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        start = time.process_time()
        engine.generate(prompts, params)
        return time.process_time() - start

    return measure


def _peers(
    folder: Path, console: Console
) -> tuple[dict[str, _Measure], dict[str, str], Callable[[], None]]:
    """Return the peers, facts about them, and how to stop them."""
    python = os.environ.get("STEMKV_VLLM_PYTHON")
    if not python:
        console.print("STEMKV_VLLM_PYTHON is not set: comparing with transformers")
        facts = {"peer": "transformers (sdpa, dynamic cache); vLLM is absent"}
        return {"transformers": _transformers(folder)}, facts, lambda: None
    processes = []
    peers: dict[str, _Measure] = {}
    facts = {}
    for mode in ("eager", "compiled"):
        with console.status(f"starting vLLM ({mode}), up to two minutes"):
            process = subprocess.Popen(
                [python, "-m", "bench.vllm_engine", str(folder), mode],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            processes.append(process)
            hello = json.loads(_answer(process))
        facts["peer"] = f"vLLM {hello['version']} on CPU"
        peers[f"vLLM {mode}"] = _remote(process)

    def close() -> None:
        for process in processes:
            process.kill()
            process.wait()

    return peers, facts, close


def _remote(process: subprocess.Popen[str]) -> _Measure:
    def measure(num_prompt: int, batch: int, num_new: int) -> float:
        assert process.stdin is not None, "opened as a pipe"
        process.stdin.write(json.dumps([num_prompt, batch, num_new]) + "\n")
        process.stdin.flush()
        return float(_answer(process))

    return measure


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None, "opened as a pipe"
    line = process.stdout.readline()
    if not line:
        sys.exit("bench.engine: vLLM ended; is STEMKV_VLLM_PYTHON a working one?")
    return line


def _transformers(folder: Path) -> _Measure:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, local_files_only=True
    )
    model.eval()
    rng = random.Random(0)

    @torch.inference_mode()
    def measure(num_prompt: int, batch: int, num_new: int) -> float:
        ids = torch.tensor(
            [[rng.randrange(3, 49000) for _ in range(num_prompt)] for _ in range(batch)]
        )
        start = time.process_time()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=num_new,
            max_new_tokens=num_new,
            pad_token_id=0,
        )
        return time.process_time() - start

    return measure


if __name__ == "__main__":
    sys.exit(main())
