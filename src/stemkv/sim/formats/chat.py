"""OpenAI requests: chat or completion bodies, batch lines, gateway logs that hold one.

A body stands at the top, or under `body` (batch lines), `request`, or in a column
`request_json` of a CSV file.
"""

from __future__ import annotations

from .fields import Layout
from .line import Line
from .token_ids import ARRIVALS

__all__ = ["LAYOUT"]

_BODIES = ("", "body.", "request.", "request_json.")
# Where the answer is logged beside its request.
_ANSWERS = ("", "response.", "response.body.", "response_json.")


def _in_body(*names: str) -> tuple[str, ...]:
    return tuple(body + name for name in names for body in _BODIES)


def _in_answer(*names: str) -> tuple[str, ...]:
    return tuple(answer + name for name in names for answer in _ANSWERS)


_MESSAGES = _in_body("messages")
_PROMPT = _in_body("prompt")


def _recognises(line: Line) -> bool:
    if any(isinstance(line.get(path), list) for path in _MESSAGES):
        return True
    return any(isinstance(line.get(path), str | list) for path in _PROMPT)


LAYOUT = Layout(
    name="openai",
    description="JSONL of OpenAI chat or completion bodies or batch lines; "
    "CSV with request_json",
    recognises=_recognises,
    fields={
        "request_id": ("custom_id", "request_id", "id"),
        "arrival": ARRIVALS,
        "messages": _MESSAGES,
        "prompt": _PROMPT,
        "tools": _in_body("tools", "functions"),
        "input_length": _in_answer("usage.prompt_tokens", "prompt_tokens"),
        "output_length": _in_answer("usage.completion_tokens", "completion_tokens"),
        "output_limit": _in_body("max_completion_tokens", "max_tokens"),
        "model": _in_body("model"),
        "salt": _in_body("cache_salt", "extra_body.cache_salt"),
        "tenant": ("tenant", "metadata.tenant", *_in_body("user")),
        "session": ("session_id", "conversation_id", "metadata.session_id"),
        "ends_session": ("ends_session",),
        "next_use": ("next_use_s:s",),
        "ephemeral_from": ("ephemeral_from",),
        "routing_key": _in_body("prompt_cache_key"),
        "status": ("status", "status_code", "response.status_code"),
        "error": ("error", "response.error"),
    },
)
