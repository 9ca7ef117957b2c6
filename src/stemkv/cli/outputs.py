"""Where output goes: results to standard output or files, all else to standard error.

Owns what happens when a reader goes away, and when a file cannot be written; a file is
written whole or not at all, and never over what is read. Knows nothing of what is shown.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from stemkv.errors import ConfigError
from stemkv.report import Section
from stemkv.report.wording import number, visible

__all__ = [
    "STDOUT",
    "Counter",
    "PeoplesConsole",
    "check_outputs",
    "closed_quietly",
    "counted",
    "print_section",
    "replaced",
    "say",
    "write_text",
    "written",
]

STDOUT = Path("-")
_WIDTH = 110  # characters, where nobody's terminal has one
_LEAST_WIDTH = 12  # of a column of words, which are folded
_DEVICES = ("dev", "proc")  # folders of what looks like a file and is none


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
    with written(file) as stream:
        stream.write(text)


@contextmanager
def written(file: Path) -> Iterator[TextIO]:
    """Open a file or, for `-`, standard output, for text; see `replaced`."""
    if file == STDOUT:
        with closed_quietly():
            yield sys.stdout
            sys.stdout.flush()
        return
    with replaced(file) as path, path.open("w", encoding="utf-8") as stream:
        yield stream


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Give a path to write; what was written there becomes `file` once all of it is.

    If writing fails, what was in `file` stays. Pipes and devices are written directly.
    """
    try:
        if _is_in_place(file):
            with suppress(BrokenPipeError):  # whoever read it has seen enough
                yield file
            return
        target = file.resolve()  # a link stays one
        part = target.with_name(f".stemkv-{os.getpid()}.part")
        try:
            yield part
            if target.exists():
                shutil.copymode(target, part)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{file} could not be written: {error.strerror or error}"
        ) from error


def _is_in_place(file: Path) -> bool:
    """Return whether a new file cannot take the place of what is there."""
    if not file.exists():
        return False
    is_device = not file.is_file() or file.absolute().parts[1] in _DEVICES
    return is_device or not os.access(file.resolve().parent, os.W_OK)


@contextmanager
def closed_quietly() -> Iterator[None]:
    """Take it for the end, and not for an error, that a reader goes away."""
    try:
        yield
    except BrokenPipeError:
        _close(sys.stdout)


def check_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Mapping[str, str | Path | None] | None = None,
    *,
    streams: Collection[str] = ("--json",),
) -> None:
    """Raise `ConfigError` if a file could not be written, or would be written over.

    Both are by the words that name them on the command line, such as "--json". An
    output is no input, and no other output, by whatever path. Only those of `streams`
    may be `-`.
    """
    files = {name: file for name, file in outputs.items() if file is not None}
    for name, file in files.items():
        if file != STDOUT:
            _check_writable(name, file)
        elif name not in streams:
            raise ConfigError(
                f"{name}: only {', '.join(streams)} can be written to standard output"
            )
    # What does not exist is no file that is read: a model's name, or a mistake.
    read = {
        name: Path(each)
        for name, each in (inputs or {}).items()
        if each is not None and Path(each) != STDOUT and Path(each).exists()
    }
    for (one, file), (other, second) in [
        *combinations(files.items(), 2),
        *((out, source) for out in files.items() for source in read.items()),
    ]:
        is_read = other in read
        if _is_same(file, second):
            raise ConfigError(
                f"{one} {file} is the same file as {other} {second}"
                f"{', which is read' if is_read else ''}; name another"
            )


def _check_writable(name: str, file: Path) -> None:
    if file.is_dir():
        raise ConfigError(f"{name}: {file} is a folder; name a file to write")
    folder = (file.absolute() if file.exists() else file.resolve()).parent
    if not folder.is_dir():
        raise ConfigError(
            f"{name}: {file} cannot be written: its folder does not exist"
        )
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ConfigError(f"{name}: {file} cannot be written: permission denied")


def _is_same(one: Path, other: Path) -> bool:
    if STDOUT in (one, other):
        return one == other
    if one.exists() and other.exists():
        # Two reports may go to one pipe or to nowhere.
        return one.is_file() and one.samefile(other)
    return one.resolve() == other.resolve()


def say(text: str) -> None:
    """Tell people what happened, on standard error, in one line."""
    Console(stderr=True).print(
        visible(text), markup=False, highlight=False, soft_wrap=True
    )


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
    title = f"{escape(visible(section.title))}{label}"
    table = Table(title=title, title_justify="left")
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
        console.print(visible(section.note), markup=False, style="dim")


def _cell(cell: str | int | float | None) -> str:
    match cell:
        case None:
            return ""
        case str():
            return visible(cell)
        case int():
            return f"{cell:,}"
        case _:
            return number(cell, digits=4)


def _close(stream: object) -> None:
    """Let what is still in a stream's buffer go nowhere, quietly."""
    fileno = getattr(stream, "fileno", None)
    if fileno is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), fileno())
