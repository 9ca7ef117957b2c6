"""Options and errors that commands have in common.

Owns their words, and the mapping of errors to exit code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from stemkv.errors import StemKVError

__all__ = [
    "DtypeOption",
    "JsonOption",
    "ModelOption",
    "NumericsOption",
    "ThreadsOption",
    "errors_explained",
]

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


@contextmanager
def errors_explained(extras: str = "cli,engine") -> Iterator[None]:
    """Print what StemKV or a missing extra says, without a traceback.

    `extras` are those that the command needs.
    """
    try:
        yield
    except StemKVError as error:
        _fail(f"{type(error).__name__}: {error}")
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename or ''}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("stemkv"):
            raise
        _fail(f"{error.name} is missing; install: pip install 'stemkv[{extras}]'")


def _fail(message: str) -> None:
    print(f"stemkv: {message}", file=sys.stderr)
    raise typer.Exit(2)
