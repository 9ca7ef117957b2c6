"""LMCache agent traces: whole prompts as text, microseconds, sessions.

The format of LMCache/lmcache-agent-trace.
"""

from __future__ import annotations

from .fields import Layout
from .line import Line

__all__ = ["LAYOUT"]


def _recognises(line: Line) -> bool:
    return isinstance(line.get("input"), str) and line.get("session_id") is not None


LAYOUT = Layout(
    name="lmcache",
    description="JSONL: timestamp (us), input (text), output, session_id",
    recognises=_recognises,
    fields={
        "arrival": ("timestamp:us",),
        "prompt": ("input",),
        "output": ("output",),
        "output_length": ("output_length",),
        "session": ("session_id",),
    },
)
