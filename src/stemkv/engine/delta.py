"""What one sample's text gains, token by token, for those who stream it.

Owns the values. Text in them is final: half a character, and what may yet turn out to
be a stop string, is held back until it is known. All texts of a sample joined, from its
start or since it was last taken back, are the text of its completion.
"""

from __future__ import annotations

from dataclasses import dataclass

from stemkv.core.schedule.request import FinishReason, RequestId

__all__ = ["Delta", "TextDelta", "TextEnded", "TextTakenBack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A token was sampled."""

    request_id: RequestId  # of the request, not of the sample
    sample: int
    index: int  # of the token in the output
    token: int
    text: str  # often "", as text is held back; may be of earlier tokens too
    # Natural logarithms of what the model gave to the token and to the likeliest ones,
    # before temperature, top-k and top-p; see `SamplingParams.num_logprobs`.
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()  # token, value; likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTakenBack:
    """A rollout made the sample begin again: nothing of its text so far counts."""

    request_id: RequestId
    sample: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEnded:
    """The sample ended, for whatever reason; nothing more comes of it."""

    request_id: RequestId
    sample: int
    text: str  # what had been held back
    finish_reason: FinishReason


Delta = TextDelta | TextTakenBack | TextEnded
