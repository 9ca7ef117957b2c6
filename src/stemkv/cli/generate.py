"""`stemkv generate`: continue prompts and show what the cache did.

Owns the printing; the engine does the work.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from stemkv.engine import Completion, Engine, EngineConfig, LoadedModel, SamplingParams

__all__ = ["run_generate"]


def run_generate(
    console: Console,
    loaded: LoadedModel,
    config: EngineConfig,
    params: SamplingParams,
    *,
    prompts: Sequence[str],
    is_chat: bool,
    json_file: Path | None,
) -> None:
    """Continue all prompts in one batch; raises what the engine raises."""
    engine = Engine(loaded, config)
    encoded = [
        engine.encode([{"role": "user", "content": p}] if is_chat and p else p)
        for p in prompts
    ]
    ids = [engine.add(tokens, params) for tokens in encoded]
    completions = _drain(console, engine, len(ids) * params.num_samples)
    rank = {request_id: index for index, request_id in enumerate(ids)}
    completions.sort(key=lambda c: (rank[c.request_id], c.sample))
    rows = [
        _row(c, prompts[rank[c.request_id]], len(encoded[rank[c.request_id]]))
        for c in completions
    ]
    for row in rows:
        _print(console, row, params.num_samples)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")


def _drain(console: Console, engine: Engine, num_expected: int) -> list[Completion]:
    completions: list[Completion] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("generating", total=num_expected)
        while engine.has_work:
            completions.extend(engine.step())
            progress.update(task, completed=len(completions))
    return completions


def _row(completion: Completion, prompt: str, num_prompt: int) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "sample": completion.sample,
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": completion.counts.reused,
        "num_inherited_tokens": completion.counts.inherited,
        "num_output_tokens": len(completion.token_ids),
        "ttft_s": completion.timeline.ttft_s,
    }


def _print(console: Console, row: dict[str, Any], num_samples: int) -> None:
    sample = (
        f" (sample {row['sample'] + 1} of {num_samples})" if num_samples > 1 else ""
    )
    console.rule(f"prompt{sample}", align="left")
    # `markup=False`: prompts and outputs are data and may contain brackets.
    console.print(row["prompt"], markup=False, highlight=False, style="dim", end="")
    console.print(row["text"], markup=False, highlight=False)
    inherited = row["num_inherited_tokens"]
    cached = f"{row['num_cached_tokens']} of {row['num_prompt_tokens']} prompt tokens"
    if inherited:
        cached += f" ({inherited} more shared with sample 1)"
    ttft = "none" if row["ttft_s"] is None else f"{1000 * row['ttft_s']:.0f} ms"
    console.print(
        f"cached: {cached} · TTFT: {ttft} · {row['num_output_tokens']} new tokens, "
        f"ended by {row['finish_reason']}",
        markup=False,
        style="cyan",
    )
