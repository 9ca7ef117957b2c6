"""Loading a model while saying what happens.

Owns the progress display of start-up.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from stemkv.engine import LoadedModel

__all__ = ["load_with_progress"]


def load_with_progress(console: Console, model: Path | None, dtype: str) -> LoadedModel:
    """Load a model, showing each stage while it works and the time it all took."""
    start = time.monotonic()
    with console.status("importing torch and transformers") as status:
        # Here and not above: these take seconds, and the display should be up first.
        from stemkv.engine.load import dtype_named, load_model

        def show(stage: str) -> None:
            status.update(f"{stage} [{time.monotonic() - start:.0f} s so far]")
            if not console.is_terminal:
                console.print(f"{stage} …")

        loaded = load_model(model, dtype=dtype_named(dtype), progress=show)
    console.print(
        f"loaded {loaded.name} in {str(loaded.dtype).removeprefix('torch.')} "
        f"({time.monotonic() - start:.1f} s)"
    )
    return loaded
