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

if TYPE_CHECKING:
    from stemkv.audit.verdict import AuditReport
    from stemkv.engine import LoadedModel

__all__ = ["audit"]

audit = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Attack what is promised: identity, exactness, isolation.",
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

    def run(loaded: LoadedModel, progress: Callable[[str], None]) -> AuditReport:
        from stemkv.audit.identity.audit import IdentityOptions, audit_identity

        options = IdentityOptions(
            revision=revision, adapters=tuple(adapter or ()), key=key, seed=seed
        )
        return audit_identity(loaded, options, progress)

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

    def run(loaded: LoadedModel, progress: Callable[[str], None]) -> AuditReport:
        from stemkv.audit.exact.audit import ExactOptions, audit_exact

        options = ExactOptions(numerics=numerics, num_prompts=num_prompts, seed=seed)
        return audit_exact(loaded, options, progress)

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

    def run(loaded: LoadedModel, progress: Callable[[str], None]) -> AuditReport:
        from stemkv.audit.isolation.audit import IsolationOptions, audit_isolation

        return audit_isolation(loaded, IsolationOptions(seed=seed), progress)

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

    def run_identity(
        loaded: LoadedModel, progress: Callable[[str], None]
    ) -> AuditReport:
        from stemkv.audit.identity.audit import IdentityOptions, audit_identity

        return audit_identity(loaded, IdentityOptions(seed=seed), progress)

    def run_exact(loaded: LoadedModel, progress: Callable[[str], None]) -> AuditReport:
        from stemkv.audit.exact.audit import ExactOptions, audit_exact

        return audit_exact(loaded, ExactOptions(seed=seed), progress)

    def run_isolation(
        loaded: LoadedModel, progress: Callable[[str], None]
    ) -> AuditReport:
        from stemkv.audit.isolation.audit import IsolationOptions, audit_isolation

        return audit_isolation(loaded, IsolationOptions(seed=seed), progress)

    audits: list[Audit] = [run_identity, run_exact, run_isolation]
    _run(audits, model, dtype, threads, json_file, html_file)


def _run(
    audits: list[Any],
    model: Path | None,
    dtype: str,
    threads: int | None,
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    with errors_explained():
        from rich.console import Console

        from stemkv.cli.audit import exit_code, show_reports, with_progress
        from stemkv.cli.loading import load_with_progress

        # Progress is for people: standard output is the report's alone.
        console = Console(stderr=True)
        reports = []
        for run in audits:
            loaded = load_with_progress(console, model, dtype)
            reports.append(with_progress(console, loaded, threads, run))
        show_reports(reports, json_file=json_file, html_file=html_file)
    if code := exit_code(reports):
        raise typer.Exit(code)
