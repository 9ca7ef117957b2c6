"""`stemkv export`: a trace written for others, without names.

Owns the salt, which is drawn here if nobody gives one, and the file. What is written is
`sim.export`'s.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from stemkv.cli.outputs import check_outputs, say, written
from stemkv.cli.trace_options import TraceOptions
from stemkv.cli.traces import load_trace
from stemkv.errors import ConfigError
from stemkv.sim.export import export_trace

__all__ = ["run_export"]

_FORMS: Mapping[str, Literal["mooncake", "bailian"]] = {
    "mooncake": "mooncake",
    "bailian": "bailian",
}


def run_export(
    options: TraceOptions, *, out: Path, form: str, salt: str | None
) -> None:
    """Read a trace and write it again; says what of it went in."""
    known = _FORMS.get(form)
    if known is None:
        raise ConfigError(f"--as must be {' or '.join(_FORMS)}, got {form!r:.40}")
    if salt == "":
        raise ConfigError("salt must not be empty: pseudonyms could be guessed")
    check_outputs({"--out": out}, options.inputs(), streams=["--out"])
    trace = load_trace(options)
    drawn = secrets.token_hex(16) if salt is None else salt
    with written(out) as file:
        export_trace(trace, file, format=known, salt=drawn)
    say(
        f"wrote {len(trace.requests):,} requests to {out} as {known}; lengths, arrivals "
        f"and who shares what are as they were"
    )
    if trace.problems:
        say(f"left out: {len(trace.problems):,}, first: {trace.problems[0]}")
    if salt is None:
        say(
            "pseudonyms are keyed with a random salt that was not kept; give --salt to "
            "have equal ones in another export"
        )
