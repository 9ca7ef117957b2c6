"""The commands and their options.

Owns names, help texts and the mapping of errors to exit codes: 0 fine, 1 a promise
does not hold, 2 the call was wrong or cannot be served.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from stemkv.errors import StemKVError

__all__ = ["app"]

app = typer.Typer(
    name="stemkv",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # else "[default: …]" in help texts is taken for markup
    help="Compute every shared prompt prefix once, safely and exactly.",
)

ModelOption = Annotated[
    Path | None,
    typer.Option("--model", help="Model folder or .gguf file [default: embedded]."),
]
DtypeOption = Annotated[str, typer.Option(help="auto, bfloat16 or float32.")]
NumericsOption = Annotated[str, typer.Option(help="exact or tolerant.")]
ThreadsOption = Annotated[
    int | None, typer.Option(help="Tensor threads [default: usable cores - 1].")
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Write the numbers to this file.")
]


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
) -> None:
    """Serve the worked example without and with reuse and compare every bit."""
    with _errors_explained():
        from stemkv.cli.demo import DemoOptions, run_demo
        from stemkv.cli.loading import load_with_progress

        console = Console()
        options = DemoOptions(
            numerics=numerics,
            num_threads=threads,
            seed=seed,
            kv_tokens=kv_tokens,
            load=load,
        )
        loaded = load_with_progress(console, model, dtype)
        is_equal = run_demo(console, loaded, options, json_file)
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
    model: ModelOption = None,
    dtype: DtypeOption = "auto",
    numerics: NumericsOption = "exact",
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Continue prompts; print completions, cached tokens and TTFT."""
    with _errors_explained():
        from stemkv.cli.generate import run_generate
        from stemkv.cli.loading import load_with_progress
        from stemkv.engine import EngineConfig, SamplingParams

        console = Console()
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
        loaded = load_with_progress(console, model, dtype)
        run_generate(
            console,
            loaded,
            config,
            params,
            prompts=prompt,
            is_chat=chat,
            json_file=json_file,
        )


@contextmanager
def _errors_explained() -> Iterator[None]:
    """Print what StemKV or a missing extra says, without a traceback."""
    try:
        yield
    except StemKVError as error:
        _fail(f"{type(error).__name__}: {error}")
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename or ''}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("stemkv"):
            raise
        _fail(f"{error.name} is missing; install: pip install 'stemkv[cli,engine]'")


def _fail(message: str) -> None:
    print(f"stemkv: {message}", file=sys.stderr)
    raise typer.Exit(2)
