"""`stemkv audit`: shows and stores what an audit found.

Owns printing, files and exit codes: 0 every claim holds, 1 one is broken, 3 one could
not be decided. Knows nothing of the attacks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as RichTable

from stemkv.audit.verdict import AuditReport, Table, Verdict
from stemkv.cli.outputs import write_text
from stemkv.engine import LoadedModel
from stemkv.engine.threads import default_num_threads
from stemkv.report import Page, Section

__all__ = [
    "exit_code",
    "show_report",
    "with_progress",
    "write_reports",
]

_MARKS = {
    Verdict.HOLDS: "[green]holds[/green]",
    Verdict.BROKEN: "[bold red]broken[/bold red]",
    Verdict.INCONCLUSIVE: "[yellow]inconclusive[/yellow]",
}
_WIDTH = 110  # characters
_SECONDS_BETWEEN_LINES = 5.0  # of progress, where nobody watches
_EXIT_CODES = {Verdict.HOLDS: 0, Verdict.BROKEN: 1, Verdict.INCONCLUSIVE: 3}


def exit_code(reports: Sequence[AuditReport]) -> int:
    """Return what a script should see: the worst of the verdicts."""
    verdicts = {report.verdict for report in reports}
    for worst in (Verdict.BROKEN, Verdict.INCONCLUSIVE):
        if worst in verdicts:
            return _EXIT_CODES[worst]
    return 0


def with_progress(
    console: Console,
    loaded: LoadedModel,
    num_threads: int | None,
    run: Callable[[LoadedModel, Callable[[str], None]], AuditReport],
) -> AuditReport:
    """Run an audit while showing what it is at; lines if nobody watches."""
    torch.set_num_threads(num_threads or default_num_threads())
    start = time.monotonic()
    printed = -math.inf
    with console.status("audit") as status:

        def show(stage: str) -> None:
            nonlocal printed
            seconds = time.monotonic() - start
            status.update(f"{stage} [{seconds:.0f} s so far]")
            if not console.is_terminal and seconds >= printed + _SECONDS_BETWEEN_LINES:
                printed = seconds
                console.print(f"[{seconds:.0f} s] {stage}", markup=False)

        report = run(loaded, show)
    console.print(f"audit {report.name} took {time.monotonic() - start:.1f} s")
    return report


def show_report(report: AuditReport) -> None:
    """Print a report for people."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)  # a file has no width of its own
    _print(report, console)


def write_reports(
    reports: Sequence[AuditReport], *, json_file: Path | None, html_file: Path | None
) -> None:
    """Write what was asked for; `-` prints the JSON. One report as it is, more as a list."""
    values = [report.as_json() for report in reports]
    document = json.dumps(
        values if len(values) > 1 else values[0], indent=2, sort_keys=True
    )
    if json_file is not None:
        write_text(document + "\n", json_file)
    if html_file is not None:
        write_text(_page(reports).render(), html_file)


def _print(report: AuditReport, console: Console) -> None:
    for table in report.tables:
        console.print(_rich(table))
    for check in report.checks:
        control = " (control)" if check.is_control else ""
        console.print(f"{_MARKS[check.verdict]}{control} ", end="")
        console.print(f"{check.claim}: {check.evidence}", markup=False, highlight=False)
    for name, value in report.method.items():
        console.print(f"{name}: {value}", markup=False, highlight=False, style="dim")
    console.print(f"audit {report.name}: {_MARKS[report.verdict]}. ", end="")
    console.print(report.headline, markup=False, highlight=False)


def _rich(table: Table) -> RichTable:
    title = f"{table.title} ({table.label})"
    shown = RichTable(title=title, caption=table.note or None, title_justify="left")
    for index, column in enumerate(table.columns):
        is_number = any(isinstance(row[index], int | float) for row in table.rows)
        # A number that is cut short would be another number.
        shown.add_column(
            column,
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
        )
    for row in table.rows:
        shown.add_row(*map(_cell, row))
    return shown


def _cell(cell: str | int | float | None) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell.replace("[", "\\[")
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}"


def _page(reports: Sequence[AuditReport]) -> Page:
    sections = [each for report in reports for each in _sections(report)]
    names = ", ".join(report.name for report in reports)
    headline = " ".join(
        f"{report.name} {report.verdict.value}: {report.headline}" for report in reports
    )
    return Page(title=f"StemKV audit: {names}", headline=headline, sections=sections)


def _sections(report: AuditReport) -> list[Section]:
    checks = Section(
        title=f"{report.name}: claims",
        columns=("claim", "verdict", "evidence", "control"),
        rows=[
            (c.claim, c.verdict.value, c.evidence, "control" if c.is_control else "")
            for c in report.checks
        ],
    )
    tables = [
        Section(
            title=f"{report.name}: {table.title}",
            columns=table.columns,
            rows=table.rows,
            note=table.note,
            label=table.label,
        )
        for table in report.tables
    ]
    method = Section(
        title=f"{report.name}: method",
        columns=("what", "how"),
        rows=list(report.method.items()),
    )
    return [checks, *tables, method]
