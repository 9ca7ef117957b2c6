"""Block ids with seconds and a `block_size` in every record, whole blocks only.

Mooncake's fields otherwise. Without a clock (`order` instead of `timestamp`) the
records are replayed in file order.
"""

from __future__ import annotations

from .fields import Layout
from .line import Line

__all__ = ["LAYOUT"]


def _recognises(line: Line) -> bool:
    # An integer timestamp is Mooncake's milliseconds; so is one of our own export,
    # which is known by its request ids.
    return (
        line.get("hash_ids") is not None
        and line.get("block_size") is not None
        and not isinstance(line.get("timestamp"), int)
        and line.get("request_id") is None
    )


LAYOUT = Layout(
    name="hashed",
    description="JSONL: timestamp (s, with a point), block_size, hash_ids, session_id",
    recognises=_recognises,
    fields={
        "arrival": ("timestamp:s",),
        "input_length": ("input_length",),
        "output_length": ("output_length",),
        "units": ("hash_ids",),
        "unit_size": ("block_size",),
        "session": ("session_id",),
        "tenant": ("tenant",),
        "ends_session": ("ends_session",),
        "next_use": ("next_use_s:s",),
        "ephemeral_from": ("ephemeral_from",),
    },
)
