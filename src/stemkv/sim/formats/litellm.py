"""LiteLLM's StandardLoggingPayload, one JSON object a line.

Prompts are in it only if the gateway stores them; without, a record tells lengths. A
gateway that redacts them writes one fixed text, which must not pass for equal prompts.
Field names: docs.litellm.ai/docs/proxy/logging_spec.
"""

from __future__ import annotations

from .fields import Layout
from .line import Line

__all__ = ["LAYOUT"]


def _recognises(line: Line) -> bool:
    is_logged = line.get("startTime") is not None and (
        line.get("prompt_tokens") is not None or line.get("messages") is not None
    )
    return is_logged or (
        line.get("call_type") is not None and line.get("metadata") is not None
    )


LAYOUT = Layout(
    name="litellm",
    description="JSONL of LiteLLM StandardLoggingPayload",
    recognises=_recognises,
    fields={
        "request_id": ("id",),
        "arrival": ("startTime",),
        "end": ("endTime",),
        "messages": ("messages",),
        "tools": ("model_parameters.tools",),
        "input_length": ("prompt_tokens",),
        "output_length": ("completion_tokens",),
        "model": ("model",),
        "salt": (
            "cache_salt",
            "model_parameters.cache_salt",
            "model_parameters.extra_body.cache_salt",
        ),
        "tenant": (
            "metadata.user_api_key_team_id",
            "metadata.user_api_key_team_alias",
            "metadata.user_api_key_alias",
            "metadata.user_api_key_hash",
        ),
        "session": ("metadata.session_id",),
        "routing_key": ("model_parameters.prompt_cache_key",),
        "status": ("status",),
        "error": ("error_str",),
        "is_cached": ("cache_hit",),
    },
    redacted="redacted-by-litellm",
)
