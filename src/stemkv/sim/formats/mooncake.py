"""Mooncake traces: block ids, milliseconds, 512 tokens a block.

The format of kvcache-ai/Mooncake (FAST'25 release). AIPerf's `session_id` and `delay`
are read, its other additions ignored; `block_size` is kvcache-simulator's. `tenant`,
`identity`, `request_id`, `parent_id`, `think_ms`, `is_estimate`, `is_opaque` and the hints
(`ends_session`, `next_use_s`, `ephemeral_from`) are what our own export adds.
"""

from __future__ import annotations

from .fields import Layout
from .line import Line

__all__ = ["LAYOUT"]


def _recognises(line: Line) -> bool:
    return line.get("hash_ids") is not None and line.get("input_length") is not None


LAYOUT = Layout(
    name="mooncake",
    description="JSONL: timestamp (ms), input_length, output_length, hash_ids",
    recognises=_recognises,
    fields={
        "arrival": ("timestamp:ms",),
        "delay": ("delay:ms",),
        "think": ("think_ms:ms",),
        "input_length": ("input_length",),
        "output_length": ("output_length",),
        "units": ("hash_ids",),
        "unit_size": ("block_size",),
        "session": ("session_id",),
        "tenant": ("tenant",),
        "identity": ("identity",),
        "is_estimate": ("is_estimate",),
        "is_opaque": ("is_opaque",),
        "ends_session": ("ends_session",),
        "next_use": ("next_use_s:s",),
        "ephemeral_from": ("ephemeral_from",),
        "request_id": ("request_id",),
        "parent": ("parent_id",),
    },
    unit_size=512,
    is_time_doubtful=True,
)
