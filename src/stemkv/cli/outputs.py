"""Where output goes: results to standard output or files, all else to standard error.

Owns what happens when a reader goes away, and when a file cannot be written. Knows
nothing of what is shown.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from stemkv.errors import ConfigError
from stemkv.report import Section
from stemkv.report.wording import number

__all__ = [
    "STDOUT",
    "Counter",
    "PeoplesConsole",
    "check_writable",
    "closed_quietly",
    "counted",
    "print_section",
    "say",
    "write_text",
]

STDOUT = Path("-")
_WIDTH = 110  # characters, where nobody's terminal has one
_LEAST_WIDTH = 12  # of a column of words, which are folded


class PeoplesConsole(Console):
    """Standard output, or standard error where that is for the JSON alone.

    A reader that goes away, as `head` does, ends the printing and nothing else: files
    are still written and the exit code still says what was found.
    """

    def __init__(self, *, json_file: Path | None) -> None:
        stream = sys.stderr if json_file == STDOUT else sys.stdout
        width = None if stream.isatty() or "COLUMNS" in os.environ else _WIDTH
        super().__init__(file=stream, width=width, highlight=False)

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        self.quiet = True
        _close(sys.stdout)


def write_text(text: str, file: Path) -> None:
    """Write a text to a file or, for `-`, to standard output."""
    if file != STDOUT:
        file.write_text(text, encoding="utf-8")
        return
    with closed_quietly():
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def closed_quietly() -> Iterator[None]:
    """Take it for the end, and not for an error, that a reader goes away."""
    try:
        yield
    except BrokenPipeError:
        _close(sys.stdout)


def check_writable(file: Path | None) -> None:
    """Raise `ConfigError` if a report could not be written there."""
    if file is None or file == STDOUT:
        return
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; name a file to write")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{file} cannot be written: its folder does not exist")


def say(text: str) -> None:
    """Tell people what happened, on standard error, in one line."""
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


class Counter(Protocol):
    """Told how much is done of how much; `None` if nobody knows."""

    def __call__(self, done: int, total: int | None, /) -> None: ...


@contextmanager
def counted(what: str, unit: str) -> Iterator[Counter]:
    """Show progress on standard error: a bar, and how many units of how many."""
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        TextColumn("{task.fields[shown]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=None, shown="")

        def show(done: int, total: int | None) -> None:
            whole = "" if total is None else f" of {total:,}"
            shown = f"{done:,}{whole} {unit}"
            progress.update(task, completed=done, total=total, shown=shown)

        yield show


def print_section(console: Console, section: Section) -> None:
    """Print a table as it is on a page, its note below."""
    label = f" ({section.label})" if section.label else ""
    table = Table(title=f"{escape(section.title)}{label}", title_justify="left")
    rows = [[_cell(cell) for cell in row] for row in section.rows]
    for index, column in enumerate(section.columns):
        is_number = any(isinstance(row[index], int | float) for row in section.rows)
        longest = max((len(row[index]) for row in rows), default=0)
        # A number that is cut short would be another number.
        table.add_column(
            escape(column),
            justify="right" if is_number else "left",
            min_width=longest if is_number else min(longest, _LEAST_WIDTH),
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(escape, row))
    # Where there is no room, lines go on in the next one; nothing is cut off.
    console.print(table, crop=False)
    if section.note:
        console.print(section.note, markup=False, style="dim")


def _cell(cell: str | int | float | None) -> str:
    match cell:
        case None:
            return ""
        case str():
            return cell
        case int():
            return f"{cell:,}"
        case _:
            return number(cell, digits=4)


def _close(stream: object) -> None:
    """Let what is still in a stream's buffer go nowhere, quietly."""
    fileno = getattr(stream, "fileno", None)
    if fileno is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), fileno())
