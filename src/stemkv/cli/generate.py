"""`stemkv generate`: continue prompts and show what the cache did.

Owns the printing; the engine does the work.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from stemkv.cli.outputs import write_text
from stemkv.cli.settings import PublicPrefix, Settings
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine import Completion, Engine, EngineConfig, LoadedModel, SamplingParams
from stemkv.errors import ConfigError

__all__ = ["GenerateOptions", "run_generate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Who asks, for what, and how the prompts are written."""

    prompts: Sequence[str]
    is_chat: bool = False
    tenant: str = "default"
    request_class: str | None = None
    adapter: Path | None = None  # folder of a LoRA adapter for all prompts
    adapter_scale: float | None = None  # None: 1.0, if there is an adapter

    def __post_init__(self) -> None:
        if self.adapter_scale is not None and self.adapter is None:
            raise ConfigError("adapter_scale is of an adapter; name one with --adapter")


def run_generate(
    console: Console,
    loaded: LoadedModel,
    config: EngineConfig,
    params: SamplingParams,
    options: GenerateOptions,
    *,
    settings: Settings,
    json_file: Path | None,
) -> None:
    """Continue all prompts in one batch; raises what the engine raises."""
    memory = settings.memory
    config = replace(
        config,
        core=memory.core,
        quotas=memory.quotas,
        sharing=settings.sharing,
        single_tenant=True,  # one person at a terminal
    )
    engine = Engine(loaded, config, costs=memory.costs)
    for prefix in settings.public:
        tokens = _public_tokens(engine, prefix)
        num_blocks = engine.declare_public(tokens)
        shared = f"{num_blocks} blocks"
        if num_blocks == 0:
            shared = f"nothing: {len(tokens)} tokens fill no block"
        console.print(f"public: {prefix.name}, {shared}", markup=False, style="dim")
    adapter = None
    if options.adapter is not None:
        adapter = options.adapter.resolve().name
        scale = 1.0 if options.adapter_scale is None else options.adapter_scale
        engine.load_adapter(adapter, options.adapter, scale=scale)
    prompts, is_chat = options.prompts, options.is_chat
    encoded = [
        engine.encode([{"role": "user", "content": p}] if is_chat and p else p)
        for p in prompts
    ]
    ids = [
        engine.add(
            tokens,
            params,
            tenant=options.tenant,
            request_class=options.request_class,
            adapter=adapter,
        )
        for tokens in encoded
    ]
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
        write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", json_file)


def _public_tokens(engine: Engine, prefix: PublicPrefix) -> TokenIds:
    """Turn what the operator wrote into the exact tokens that requests begin with."""
    if prefix.token_ids is not None:
        return prefix.token_ids
    if prefix.messages is not None:
        return engine.encode(prefix.messages, is_answer_next=False)
    assert prefix.text is not None, "a public prefix has exactly one source"
    return engine.encode(prefix.text)


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
