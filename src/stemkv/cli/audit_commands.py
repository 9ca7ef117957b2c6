"""The commands below `stemkv audit` and their options.

Owns their words only: attacks are in `stemkv.audit`, showing what they found is in
`stemkv.cli.audit`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stemkv.cli.options import (
    DtypeOption,
    ModelOption,
    NumericsOption,
    ThreadsOption,
    errors_explained,
)
from stemkv.errors import StemKVError

if TYPE_CHECKING:
    from stemkv.audit.verdict import AuditReport
    from stemkv.engine import LoadedModel

__all__ = ["audit"]

audit = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Attack what is promised: identity, exactness, isolation.\n\n"
    "Example: stemkv audit all --html audit.html",
)

JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write the report as JSON; - is standard output."),
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", help="Write the report as one HTML file.")
]
SeedOption = Annotated[int, typer.Option(help="Of everything drawn.")]

Audit = Callable[["LoadedModel", Callable[[str], None]], "AuditReport"]


@audit.command()
def identity(
    model: ModelOption = None,
    revision: Annotated[
        Path | None,
        typer.Option(help="Second revision of the model [default: made up]."),
    ] = None,
    adapter: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a LoRA adapter; give two [default: made up]."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="Attack a key function of yours, MODULE:FUNCTION."),
    ] = None,
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Who may share what: 16 contexts against each other, under many keys.

    Example: stemkv audit identity --key mykeys:prefix_key
    """
    run = _identity(
        revision=revision, adapters=tuple(adapter or ()), key=key, seed=seed
    )
    if key is not None:
        with errors_explained():  # before a model is loaded
            from stemkv.audit.identity.trial import find_key_function

            find_key_function(key)
    _run([run], model, dtype, threads, json_file, html_file)


@audit.command()
def exact(
    model: ModelOption = None,
    numerics: NumericsOption = "exact",
    num_prompts: Annotated[int, typer.Option(help="For the naive cache.")] = 50,
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Is reused KV what a fresh prefill gives: every way to a hit, bit for bit.

    Example: stemkv audit exact --numerics tolerant --html exact.html
    """
    run = _exact(numerics=numerics, num_prompts=num_prompts, seed=seed)
    _run([run], model, dtype, threads, json_file, html_file)


@audit.command()
def isolation(
    model: ModelOption = None,
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """What one tenant can learn of another: hits, counts, events, order, time.

    Example: stemkv audit isolation --json isolation.json
    """
    run = _isolation(seed=seed)
    _run([run], model, dtype, threads, json_file, html_file)


@audit.command("all")
def all_audits(
    model: ModelOption = None,
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    html_file: HtmlOption = None,
) -> None:
    """Run all three audits, each on a model loaded afresh.

    Example: stemkv audit all --html audit.html
    """
    audits = [_identity(seed=seed), _exact(seed=seed), _isolation(seed=seed)]
    _run(audits, model, dtype, threads, json_file, html_file)


# Options reach an audit once a model is loaded: importing it takes seconds.


def _identity(**settings: Any) -> Audit:
    def run(loaded: LoadedModel, progress: Callable[[str], None]) -> AuditReport:
        from stemkv.audit.identity.audit import IdentityOptions, audit_identity

        return audit_identity(loaded, IdentityOptions(**settings), progress)

    return run


def _exact(**settings: Any) -> Audit:
    def run(loaded: LoadedModel, progress: Callable[[str], None]) -> AuditReport:
        from stemkv.audit.exact.audit import ExactOptions, audit_exact

        return audit_exact(loaded, ExactOptions(**settings), progress)

    return run


def _isolation(**settings: Any) -> Audit:
    def run(loaded: LoadedModel, progress: Callable[[str], None]) -> AuditReport:
        from stemkv.audit.isolation.audit import IsolationOptions, audit_isolation

        return audit_isolation(loaded, IsolationOptions(**settings), progress)

    return run


def _run(
    audits: list[Audit],
    model: Path | None,
    dtype: str,
    threads: int | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    with errors_explained():
        from rich.console import Console

        from stemkv.cli.audit import (
            exit_code,
            show_report,
            with_progress,
            write_reports,
        )
        from stemkv.cli.loading import load_with_progress
        from stemkv.cli.outputs import check_outputs
        from stemkv.engine import EngineConfig

        # What is wrong with the call shows now and not after minutes of work.
        EngineConfig(num_threads=threads)
        check_outputs({"--json": json_file, "--html": html_file}, {"--model": model})
        # Progress is for people: standard output is the report's alone.
        console = Console(stderr=True)
        reports: list[AuditReport] = []
        try:
            for run in audits:
                loaded = load_with_progress(console, model, dtype)
                reports.append(with_progress(console, loaded, threads, run))
                if json_file != Path("-"):
                    show_report(reports[-1])
        except StemKVError:
            raise
        except Exception:
            # Not 1: that would say that a promise is broken.
            console.print_exception()
            raise typer.Exit(3) from None
        finally:
            if reports:
                write_reports(reports, json_file=json_file, html_file=html_file)
    if code := exit_code(reports):
        raise typer.Exit(code)
