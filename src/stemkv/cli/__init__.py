"""The command line: words, progress and exit codes.

Owns the entry point only and imports the rest when it is called, so that `stemkv`
without its extras says what to install instead of failing on an import.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; exits 2 with a sentence when something is wrong."""
    if sys.stderr is None:  # closed by whoever called
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        _fail("standard output is closed; send it to a file, a pipe or /dev/null")
    try:
        from stemkv.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("stemkv"):
            raise
        _fail(
            f"the command line needs {error.name}; "
            f"install it with: pip install 'stemkv[cli,engine]'"
        )
    app()


def _fail(message: str) -> None:
    print(f"stemkv: {message}", file=sys.stderr)
    sys.exit(2)
