"""The command line: words, progress and exit codes.

Owns the entry point only and imports the rest when it is called, so that `stemkv`
without its extras says what to install instead of failing on an import.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; exits 2 with a sentence when something is wrong."""
    try:
        from stemkv.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("stemkv"):
            raise
        sys.exit(
            f"stemkv: the command line needs {error.name}; "
            f"install it with: pip install 'stemkv[cli,engine]'"
        )
    app()
