"""Qwen-Bailian traces: block ids, seconds, 16 tokens a block, turns of chats.

The format of alibaba-edu/qwen-bailian-usagetraces-anon. `block_size`,
`session_id`, `tenant`, `identity`, `think_s`, `is_estimate`, `is_opaque` and the hints
(`ends_session`, `next_use_s`, `ephemeral_from`) are what our own export adds.
"""

from __future__ import annotations

from .fields import Layout
from .line import Line

__all__ = ["LAYOUT"]


def _recognises(line: Line) -> bool:
    return line.get("hash_ids") is not None and line.get("chat_id") is not None


LAYOUT = Layout(
    name="bailian",
    description="JSONL: chat_id, parent_chat_id, timestamp (s), hash_ids, turn",
    recognises=_recognises,
    fields={
        "request_id": ("chat_id",),
        "parent": ("parent_chat_id",),
        "arrival": ("timestamp:s",),
        "think": ("think_s:s",),
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
    },
    notes=(
        "the log has no end times: think times are gaps between arrivals, so they "
        "contain the time that the earlier turn took",
    ),
)
