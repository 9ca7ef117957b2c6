"""Prompts as token ids, one JSON object a line, under the names that are in use."""

from __future__ import annotations

from .fields import Layout
from .line import Line

__all__ = ["ARRIVALS", "LAYOUT"]

_TOKENS = ("token_ids", "prompt_token_ids", "input_ids", "input_tok_ids")

# Times with a unit in their name come first; the others are told by their look.
ARRIVALS = (
    "arrival_s:s",
    "arrival_time_ns:ns",
    "timestamp_ms:ms",
    "timestamp",
    "arrival",
    "arrival_time",
    "ts",
    "time",
    "created",
    "created_at",
    "start_time",
    "startTime",
)


def _recognises(line: Line) -> bool:
    return any(isinstance(line.get(name), list) for name in _TOKENS)


LAYOUT = Layout(
    name="token-ids",
    description="JSONL: token_ids, prompt_token_ids or input_ids; tenant, timestamp",
    recognises=_recognises,
    fields={
        "request_id": ("request_id", "id"),
        "arrival": ARRIVALS,
        "tokens": _TOKENS,
        "output_length": ("output_length", "output_tokens", "output_toks"),
        "output_limit": ("max_tokens",),
        "tenant": ("tenant",),
        "session": ("session_id", "session"),
        "model": ("model",),
        "adapter": ("lora_name", "adapter"),
        "salt": ("cache_salt",),
        "ends_session": ("ends_session",),
        "next_use": ("next_use_s:s",),
        "ephemeral_from": ("ephemeral_from",),
        "status": ("status", "status_code"),
        "error": ("error",),
    },
)
