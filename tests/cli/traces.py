"""Commands that take traces, called as a user calls them, and small files to give them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from stemkv.cli.app import app

__all__ = [
    "QUICK",
    "bad_trace",
    "command",
    "piped_to_head",
    "small_trace",
    "stemkv",
    "writes",
]

# Enough for the example's prompts, too little for all of its prefixes.
QUICK = ("--workload", "worked-example", "--requests", "30", "--memory", "4GiB")


def stemkv(*arguments: str | Path, stdin: str | None = None) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(
        app, [str(each) for each in arguments], input=stdin, env={"COLUMNS": "120"}
    )


def command(*arguments: str | Path, without: str | None = None) -> list[str]:
    """Return the words that run a command in a process of its own.

    `without`: a package that cannot be imported there.
    """
    hidden = "" if without is None else f"sys.modules[{without!r}] = None; "
    code = f"import sys; {hidden}from stemkv.cli import main; main()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def piped_to_head(*arguments: str | Path) -> tuple[int, str, str]:
    """Run a command whose reader reads one line and goes; return code, line, errors."""
    with subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "120"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        return process.wait(timeout=120), line, errors


def writes(folder: Path, *records: Any, name: str = "trace.jsonl") -> Path:
    """Write records, one a line."""
    path = folder / name
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def small_trace(folder: Path, *, tenants: Sequence[str] = ("acme", "globex")) -> Path:
    """Twelve requests of 1,100 tokens that share their first 1,024."""
    return writes(
        folder,
        *(
            {
                "timestamp": 500 * index,
                "input_length": 1_100,
                "output_length": 8,
                "hash_ids": [1, 2, 100 + index],
                "tenant": tenants[index % len(tenants)],
            }
            for index in range(12)
        ),
    )


def bad_trace(folder: Path) -> Path:
    """Three requests and one line between them that is none."""
    good = {"timestamp": 0, "input_length": 600, "output_length": 5}
    return writes(
        folder,
        {**good, "hash_ids": [1, 2]},
        {**good, "input_length": -3, "hash_ids": [1]},
        {**good, "timestamp": 900, "hash_ids": [1, 3]},
        {**good, "timestamp": 950, "hash_ids": [1, 3]},
        name="bad.jsonl",
    )
