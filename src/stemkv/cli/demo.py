"""`stemkv demo`: the worked example, without and with reuse, every bit compared.

Owns the load (who asks when), the comparison and the printing. The same requests
arrive at the same times in both runs; only reuse differs.

Arrivals are open-loop: the span is set so that computing every prompt from scratch
would take `load` times as long as the arrivals last, from a prefill speed measured
first. Above 1 requests queue up without reuse, and waiting is most of their TTFT; the
prefill seconds, not the TTFT, are the measure of work saved.
"""

from __future__ import annotations

import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from stemkv.cli.outputs import write_text
from stemkv.cli.worked_example import ExampleRequest, load_requests, shared_messages
from stemkv.core.core import CoreConfig
from stemkv.core.prefix.cache import CacheUsage
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.request import RequestId
from stemkv.engine import Completion, Engine, EngineConfig, LoadedModel, SamplingParams
from stemkv.errors import ConfigError
from stemkv.measure.steps import prefill_seconds
from stemkv.measure.timeline import percentile
from stemkv.report import Page
from stemkv.report.value import DemoRow, demo_page

__all__ = ["DemoOptions", "run_demo"]

_BLOCK_SIZE = 16
_CALIBRATION_TOKENS = 512
_MIN_TTFT_RATIO = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What of the worked example can be varied."""

    numerics: str = "exact"
    num_threads: int | None = None
    seed: int = 0
    kv_tokens: int = 8192
    load: float = 2.0  # seconds of uncached prefill per second of arrivals

    def __post_init__(self) -> None:
        if not 0 < self.load < math.inf:
            raise ConfigError(f"load must be above 0 and finite, got {self.load}")
        if self.kv_tokens < _BLOCK_SIZE:
            raise ConfigError(
                f"kv_tokens must be at least one block of {_BLOCK_SIZE}, "
                f"got {self.kv_tokens}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrival:
    """One request of the example, encoded, with its arrival in seconds."""

    example: ExampleRequest
    prompt: TokenIds
    at_s: float


@dataclass(slots=True, kw_only=True)
class _Run:
    """What one run gave."""

    completions: dict[str, Completion]
    logits: dict[str, list[torch.Tensor]]
    usage: CacheUsage
    bytes_per_block: int
    wall_s: float
    prefill_s: float


def run_demo(
    console: Console,
    loaded: LoadedModel,
    options: DemoOptions,
    json_file: Path | None,
    html_file: Path | None = None,
) -> bool:
    """Run the example twice, print the comparison; return whether all bits agree."""
    with console.status("self-test: does this build keep every bit?"):
        without = _make_engine(loaded, options, reuses_prefixes=False)
        seconds_per_token = _calibrate(without)
        arrivals = _arrivals(without, options, seconds_per_token)
    public = _encode(without, shared_messages(), is_answer_next=False)
    num_sharing = sum(a.example.shares_prefix for a in arrivals)
    console.print(
        f"{len(arrivals)} requests of two tenants, "
        f"{sum(len(a.prompt) for a in arrivals):,} prompt tokens; {num_sharing} begin "
        f"with the same {len(public):,} tokens; arrivals over "
        f"{arrivals[-1].at_s:.1f} s (load {options.load:g} at {1 / seconds_per_token:.0f} "
        f"prefill tokens/s, measured); numerics {options.numerics}, "
        f"{torch.get_num_threads()} thread(s)"
    )
    off = _run(console, without, arrivals, "reuse off")
    del without  # its KV memory
    engine = _make_engine(loaded, options, reuses_prefixes=True)
    engine.declare_public(public)
    on = _run(console, engine, arrivals, "reuse on")
    differences = _compare(off, on)
    report = _report(arrivals, off, on, differences)
    _print(console, report)
    if json_file is not None:
        write_text(json.dumps(report, indent=2) + "\n", json_file)
    if html_file is not None:
        write_text(_page(loaded, options, report).render(), html_file)
    return not differences["outputs_differing"] and not differences["logits_differing"]


def _make_engine(
    loaded: LoadedModel, options: DemoOptions, *, reuses_prefixes: bool
) -> Engine:
    return Engine(
        loaded,
        EngineConfig(
            numerics=options.numerics,
            kv_memory_bytes=options.kv_tokens * loaded.kv_bytes_per_token,
            core=CoreConfig(cache=CacheConfig(block_size=_BLOCK_SIZE)),
            reuses_prefixes=reuses_prefixes,
            num_threads=options.num_threads,
            # Once is enough: model, dtype and kernels are the same in both runs.
            runs_self_test=not reuses_prefixes,
        ),
    )


def _encode(
    engine: Engine, messages: tuple[dict[str, str], ...], *, is_answer_next: bool
) -> TokenIds:
    if engine.loaded.tokenizer is not None and engine.loaded.tokenizer.chat_template:
        return engine.encode(messages, is_answer_next=is_answer_next)
    return engine.encode("\n\n".join(message["content"] for message in messages))


def _calibrate(engine: Engine) -> float:
    """Return measured prefill seconds per token, with everything warmed up."""
    length = min(_CALIBRATION_TOKENS, engine.loaded.context_length - 1)
    prompt = TokenIds.from_ids([7 * i % 1000 for i in range(length)])
    for _ in range(2):
        engine.generate([prompt], SamplingParams(max_new_tokens=1))
    seconds = engine.steps[-1].seconds
    engine.steps.clear()
    return seconds / length


def _arrivals(
    engine: Engine, options: DemoOptions, seconds_per_token: float
) -> list[_Arrival]:
    rng = random.Random(options.seed)
    examples = load_requests(rng)
    prompts = [_encode(engine, e.messages, is_answer_next=True) for e in examples]
    gaps = [rng.expovariate(1.0) for _ in examples]
    span = seconds_per_token * sum(map(len, prompts)) / options.load
    arrivals = []
    at = 0.0
    for example, prompt, gap in zip(examples, prompts, gaps, strict=True):
        arrivals.append(_Arrival(example=example, prompt=prompt, at_s=at))
        at += gap * span / sum(gaps)
    return arrivals


def _run(
    console: Console, engine: Engine, arrivals: list[_Arrival], title: str
) -> _Run:
    logits: dict[str, list[torch.Tensor]] = {a.example.name: [] for a in arrivals}

    def keep(request_id: RequestId, index: int, row: torch.Tensor) -> None:
        logits[request_id].append(row.clone())

    engine.on_logits = keep
    completions: dict[str, Completion] = {}
    waiting = list(reversed(arrivals))
    total = sum(a.example.max_new_tokens for a in arrivals)
    start = time.monotonic()
    with _progress(console) as progress:
        task = progress.add_task(title, total=total)
        while waiting or engine.has_work:
            now = time.monotonic() - start
            while waiting and waiting[-1].at_s <= now:
                _add(engine, waiting.pop(), start)
            if not engine.has_work:
                time.sleep(waiting[-1].at_s - now)
                continue
            for completion in engine.step():
                completions[completion.request_id] = completion
            progress.update(task, completed=sum(map(len, logits.values())))
        progress.update(task, completed=total)
    return _Run(
        completions=completions,
        logits=logits,
        usage=engine.usage(),
        bytes_per_block=engine.kv.bytes_per_block,
        wall_s=time.monotonic() - start,
        prefill_s=prefill_seconds(engine.steps),
    )


def _add(engine: Engine, arrival: _Arrival, start: float) -> None:
    example = arrival.example
    engine.add(
        arrival.prompt,
        SamplingParams(max_new_tokens=example.max_new_tokens, ignore_eos=True),
        tenant=example.tenant,
        request_id=example.name,
        arrival_s=start + arrival.at_s,
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>9}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} new tokens"),
        TimeElapsedColumn(),
        console=console,
    )


def _compare(off: _Run, on: _Run) -> dict[str, int]:
    """Compare every output token and every bit of every logits row."""
    outputs = rows = bad_outputs = bad_rows = 0
    for name in sorted(off.completions.keys() | on.completions.keys()):
        outputs += 1
        tokens = [
            run.completions[name].token_ids if name in run.completions else None
            for run in (off, on)
        ]
        bad_outputs += tokens[0] is None or tokens[0] != tokens[1]
        a, b = off.logits[name], on.logits[name]
        rows += max(len(a), len(b))
        bad_rows += abs(len(a) - len(b))
        bad_rows += sum(not _same_bits(x, y) for x, y in zip(a, b, strict=False))
    return {
        "outputs_compared": outputs,
        "outputs_differing": bad_outputs,
        "logits_rows_compared": rows,
        "logits_differing": bad_rows,
    }


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _report(
    arrivals: list[_Arrival], off: _Run, on: _Run, differences: dict[str, int]
) -> dict[str, Any]:
    """Return all numbers; `kind` says how each was obtained."""
    return {
        "num_requests": len(arrivals),
        "num_sharing": sum(a.example.shares_prefix for a in arrivals),
        "num_prompt_tokens": sum(len(a.prompt) for a in arrivals),
        "kind": {"latencies, seconds, rates": "measured", "counts, bytes": "exact"},
        "reuse_off": _numbers(arrivals, off),
        "reuse_on": _numbers(arrivals, on),
        "prefill_s_saved": off.prefill_s - on.prefill_s,
        **differences,
    }


def _numbers(arrivals: list[_Arrival], run: _Run) -> dict[str, float]:
    completions = run.completions

    def ttfts(*, is_sharing_only: bool) -> list[float]:
        values = [
            completions[a.example.name].timeline.ttft_s
            for a in arrivals
            if a.example.shares_prefix or not is_sharing_only
        ]
        return [value for value in values if value is not None]

    num_output = sum(len(c.token_ids) for c in completions.values())
    usage = run.usage
    return {
        "ttft_p50_s": percentile(ttfts(is_sharing_only=False), 50),
        "ttft_p95_s": percentile(ttfts(is_sharing_only=False), 95),
        "sharing_ttft_p50_s": percentile(ttfts(is_sharing_only=True), 50),
        "sharing_ttft_p95_s": percentile(ttfts(is_sharing_only=True), 95),
        "prompt_tokens_computed": sum(c.counts.computed for c in completions.values()),
        "prompt_tokens_reused": sum(c.counts.reused for c in completions.values()),
        "tokens_recomputed": sum(c.counts.recomputed for c in completions.values()),
        "prefill_s": run.prefill_s,
        "cached_bytes": usage.num_cached_blocks * run.bytes_per_block,
        "peak_active_kv_bytes": usage.peak_active_blocks * run.bytes_per_block,
        "evicted_blocks": usage.num_evicted_blocks,
        "output_tokens_per_s": num_output / run.wall_s,
        "wall_s": run.wall_s,
    }


_ROWS = (
    ("TTFT p50, all", "ttft_p50_s", "s"),
    ("TTFT p95, all", "ttft_p95_s", "s"),
    ("TTFT p50, sharing requests", "sharing_ttft_p50_s", "s"),
    ("TTFT p95, sharing requests", "sharing_ttft_p95_s", "s"),
    ("prompt tokens computed", "prompt_tokens_computed", "count"),
    ("prompt tokens reused", "prompt_tokens_reused", "count"),
    ("tokens recomputed after preemption", "tokens_recomputed", "count"),
    ("prefill seconds", "prefill_s", "s"),
    ("cached bytes at the end", "cached_bytes", "bytes"),
    ("peak active KV bytes", "peak_active_kv_bytes", "bytes"),
    ("evicted blocks", "evicted_blocks", "count"),
    ("output tokens/s", "output_tokens_per_s", "rate"),
)


def _print(console: Console, report: dict[str, Any]) -> None:
    off, on = report["reuse_off"], report["reuse_on"]
    table = Table(title="the same requests, without and with prefix reuse")
    table.add_column("")
    for heading in ("reuse off", "reuse on", "off / on"):
        table.add_column(heading, justify="right")
    for label, key, unit in _ROWS:
        ratio = f"{off[key] / on[key]:.2f}" if off[key] and on[key] else ""
        table.add_row(label, _shown(off[key], unit), _shown(on[key], unit), ratio)
    console.print(table)
    console.print(
        "seconds and rates are measured (prefill seconds: step times shared out by "
        "tokens); counts and bytes are exact"
    )
    console.print(f"measured prefill seconds saved: {report['prefill_s_saved']:.2f}")
    if on["sharing_ttft_p50_s"] > 0:
        ratio = off["sharing_ttft_p50_s"] / on["sharing_ttft_p50_s"]
        verdict = "kept" if ratio >= _MIN_TTFT_RATIO else "MISSED"
        console.print(
            f"TTFT p50 of the sharing requests fell {ratio:.1f} times "
            f"(promised: at least {_MIN_TTFT_RATIO:g}, {verdict})"
        )
    is_equal = not (report["outputs_differing"] or report["logits_differing"])
    console.print(_verdict(report), style="bold green" if is_equal else "bold red")


def _verdict(report: dict[str, Any]) -> str:
    """Return whether all bits agree, in words."""
    outputs, rows = report["outputs_compared"], report["logits_rows_compared"]
    bad_outputs, bad_rows = report["outputs_differing"], report["logits_differing"]
    if bad_outputs or bad_rows:
        return (
            f"DIFFERENT: {bad_outputs} of {outputs} outputs and {bad_rows} of {rows} "
            f"logits rows differ between the two runs"
        )
    return (
        f"bit for bit equal: {outputs} of {outputs} outputs, "
        f"{rows} of {rows} logits rows"
    )


def _page(loaded: LoadedModel, options: DemoOptions, report: dict[str, Any]) -> Page:
    off, on = report["reuse_off"], report["reuse_on"]
    return demo_page(
        headline=(
            f"Reuse saved {report['prefill_s_saved']:.1f} s of "
            f"{off['prefill_s']:.1f} s of prefill; {_verdict(report)}."
        ),
        paragraphs=[
            f"{report['num_requests']} requests of two tenants, "
            f"{report['num_sharing']} of which begin with the same tokens, were served "
            f"twice: computed from the first token each time, and with prefixes reused."
        ],
        rows=[
            DemoRow(name=label, off=off[key], on=on[key], unit=unit)
            for label, key, unit in _ROWS
        ],
        config={
            "model": loaded.name,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "numerics": options.numerics,
            "threads": torch.get_num_threads(),
            "seed": options.seed,
            "tokens the cache can hold": options.kv_tokens,
            "load": options.load,
        },
    )


def _shown(value: float, unit: str) -> str:
    match unit:
        case "bytes":
            return f"{value / 2**20:,.1f} MiB"
        case "count":
            return f"{value:,.0f}"
        case "rate":
            return f"{value:.1f}"
        case _:
            return f"{value:.3f} s"
