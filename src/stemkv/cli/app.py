"""The commands and their options.

Owns names and help texts. Exit codes: 0 fine, 1 a promise does not hold, 2 the call was
wrong or cannot be served, 3 it cannot be decided, 70 a defect of StemKV.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stemkv.cli.audit_commands import audit
from stemkv.cli.options import (
    DtypeOption,
    JsonOption,
    ModelOption,
    NumericsOption,
    ThreadsOption,
    errors_explained,
)
from stemkv.cli.trace_commands import export, replay, sweep

__all__ = ["app"]

app = typer.Typer(
    name="stemkv",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # else "[default: …]" in help texts is taken for markup
    help="Compute every shared prompt prefix once, safely and exactly.",
)

app.add_typer(audit, name="audit")
for command in (replay, sweep, export):
    app.command()(command)


@app.callback()
def _root() -> None:
    """Group the commands, also while there are few."""


@app.command()
def demo(
    model: ModelOption = None,
    dtype: DtypeOption = "auto",
    numerics: NumericsOption = "exact",
    threads: ThreadsOption = None,
    seed: Annotated[int, typer.Option(help="Arrival order and times.")] = 0,
    kv_tokens: Annotated[int, typer.Option(help="Tokens the cache can hold.")] = 8192,
    load: Annotated[
        float, typer.Option(help="Seconds of uncached prefill per second of arrivals.")
    ] = 2.0,
    json_file: JsonOption = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write the report as one HTML file.")
    ] = None,
) -> None:
    """Serve the worked example without and with reuse and compare every bit.

    Example: stemkv demo --html demo.html
    """
    with errors_explained():
        from stemkv.cli.demo import DemoOptions, run_demo
        from stemkv.cli.loading import load_with_progress
        from stemkv.cli.outputs import check_outputs

        check_outputs({"--json": json_file, "--html": html_file}, {"--model": model})
        console = Console(stderr=json_file == Path("-"))
        options = DemoOptions(
            numerics=numerics,
            num_threads=threads,
            seed=seed,
            kv_tokens=kv_tokens,
            load=load,
        )
        loaded = load_with_progress(console, model, dtype)
        is_equal = run_demo(console, loaded, options, json_file, html_file)
    if not is_equal:
        raise typer.Exit(1)


@app.command()
def generate(
    prompt: Annotated[list[str], typer.Option(help="Text to continue; repeatable.")],
    n: Annotated[int, typer.Option("--n", help="Samples per prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="New tokens per sample.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus, in (0, 1].")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Likeliest tokens kept.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of every request.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends an output; repeatable.")
    ] = None,
    allow_stop_in_prompt: Annotated[
        bool, typer.Option(help="Accept a stop text that occurs in the prompt.")
    ] = False,
    chat: Annotated[bool, typer.Option(help="Apply the chat template.")] = False,
    adapter: Annotated[
        Path | None, typer.Option(help="Folder of a LoRA adapter (PEFT format).")
    ] = None,
    adapter_scale: Annotated[
        float | None, typer.Option(help="Of the adapter [default: 1.0].")
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="TOML file: who shares, what is kept.")
    ] = None,
    tenant: Annotated[str, typer.Option(help="Who asks.")] = "default",
    request_class: Annotated[
        str | None, typer.Option(help="Class of the requests, as in the settings.")
    ] = None,
    model: ModelOption = None,
    dtype: DtypeOption = "auto",
    numerics: NumericsOption = "exact",
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Continue prompts; print completions, cached tokens and TTFT.

    Example: stemkv generate --prompt 'Once upon a time' --n 3 --temperature 0.8
    """
    with errors_explained("cli,engine,sim"):
        from stemkv.cli.generate import GenerateOptions, run_generate
        from stemkv.cli.loading import load_with_progress
        from stemkv.cli.outputs import check_outputs
        from stemkv.cli.settings import Settings, read_settings
        from stemkv.engine import EngineConfig, SamplingParams

        check_outputs({"--json": json_file}, {"--model": model, "--settings": settings})
        # With JSON on standard output, what is for people goes elsewhere.
        console = Console(stderr=json_file == Path("-"))
        params = SamplingParams(
            max_new_tokens=max_tokens,
            num_samples=n,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=tuple(stop or ()),
            allows_stop_in_prompt=allow_stop_in_prompt,
        )
        config = EngineConfig(numerics=numerics, num_threads=threads)
        options = GenerateOptions(
            prompts=prompt,
            is_chat=chat,
            tenant=tenant,
            request_class=request_class,
            adapter=adapter,
            adapter_scale=adapter_scale,
        )
        # Before the model: a mistake in the file shows at once.
        read = Settings() if settings is None else read_settings(settings)
        loaded = load_with_progress(console, model, dtype)
        run_generate(
            console,
            loaded,
            config,
            params,
            options,
            settings=read,
            json_file=json_file,
        )


@app.command()
def identity(
    model: Annotated[
        Path | None,
        typer.Argument(help="Model folder or .gguf file [default: embedded]."),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Folder of a LoRA adapter.")
    ] = None,
    adapter_scale: Annotated[
        float | None, typer.Option(help="Of the adapter [default: 1.0].")
    ] = None,
    numerics: NumericsOption = "exact",
    dtype: DtypeOption = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    start_position: Annotated[
        int, typer.Option(help="Position of the first token.")
    ] = 0,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Hash everything anew.")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Print what must be equal before KV is shared, its encoding and its name.

    Example: stemkv identity models/llama --dtype bfloat16 --json identity.json
    """
    with errors_explained():
        from stemkv.cli.identity import IdentityOptions, run_identity
        from stemkv.cli.outputs import check_outputs

        check_outputs({"--json": json_file}, {"the model": model})
        options = IdentityOptions(
            dtype=dtype,
            numerics=numerics,
            block_size=block_size,
            start_position=start_position,
            adapter=adapter,
            adapter_scale=adapter_scale,
            trusts_digest_record=not recompute,
        )
        run_identity(model, options, json_file)


@app.command()
def calibrate(
    model: ModelOption = None,
    dtype: DtypeOption = "auto",
    numerics: NumericsOption = "exact",
    threads: ThreadsOption = None,
    seed: Annotated[int, typer.Option(help="Of the requests and arrivals.")] = 0,
    seconds: Annotated[
        float, typer.Option(help="Of work in each run: one to fit, one to check.")
    ] = 35.0,
    kv_tokens: Annotated[int, typer.Option(help="Tokens the cache can hold.")] = 16384,
    watts: Annotated[
        float, typer.Option(help="Assumed under load, where there is no meter.")
    ] = 65.0,
    own_time: Annotated[
        bool,
        typer.Option(
            "--own-time",
            help="Go by this process's CPU time, for machines that others use too.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the cost for `stemkv replay --cost`.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Fit a cost model to an engine's own steps; say how well it predicts others.

    Example: stemkv calibrate --out cost.json && stemkv replay --cost cost.json TRACE
    """
    with errors_explained("cli,engine,sim"):
        from stemkv.cli.calibrate import CalibrateOptions, run_calibrate
        from stemkv.cli.loading import load_with_progress
        from stemkv.cli.outputs import check_outputs

        check_outputs({"--out": out, "--json": json_file}, {"--model": model})
        console = Console(stderr=json_file == Path("-"))
        options = CalibrateOptions(
            numerics=numerics,
            num_threads=threads,
            seed=seed,
            seconds=seconds,
            kv_tokens=kv_tokens,
            assumed_watts=watts,
            is_own_time=own_time,
        )
        loaded = load_with_progress(console, model, dtype)
        is_equal = run_calibrate(console, loaded, options, out=out, json_file=json_file)
    if not is_equal:
        raise typer.Exit(1)


@app.command()
def value(
    model: Annotated[
        str | None,
        typer.Option(help="Name or config.json [default: llama-3.1-8b]."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="What the model runs on [default: h100].")
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option(help="Costs by `stemkv calibrate` instead of model and device."),
    ] = None,
    prefix_tokens: Annotated[
        int, typer.Option(help="Tokens that requests have in common.")
    ] = 12_000,
    share: Annotated[
        float, typer.Option(help="Of requests that begin with them, 0 to 1.")
    ] = 0.4,
    memory: Annotated[
        str | None,
        typer.Option(help="For KV [default: 24GiB, or what the device leaves]."),
    ] = None,
    tenants: Annotated[int, typer.Option(help="Who ask, all equally often.")] = 4,
    requests: Annotated[int, typer.Option(help="In each of some 35 replays.")] = 300,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Requests/s, repeatable [default: light load to overload]."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    slo_ttft: Annotated[float, typer.Option(help="Limit of TTFT, seconds.")] = 2.0,
    slo_tpot: Annotated[float, typer.Option(help="Limit of TPOT, seconds.")] = 0.1,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="Write a page to this file.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Is it worth keeping one prefix: what it saves, displaces and delays.

    Example: stemkv value --share 0.1 --memory 6GiB --html value.html
    """
    with errors_explained("cli,sim,report"):
        from stemkv.cli.trace_options import DeploymentOptions
        from stemkv.cli.value import ValueOptions, run_value

        options = ValueOptions(
            deployment=DeploymentOptions(model=model, device=device, cost=cost),
            prefix_tokens=prefix_tokens,
            share=share,
            memory=memory,
            num_tenants=tenants,
            num_requests=requests,
            rates=tuple(rate or ()),
            seed=seed,
            slo_ttft_s=slo_ttft,
            slo_tpot_s=slo_tpot,
        )
        code = run_value(options, html_file=html_file, json_file=json_file)
    if code:
        raise typer.Exit(code)
