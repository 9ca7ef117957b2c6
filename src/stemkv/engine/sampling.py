"""From a row of logits to a token.

Owns sampling parameters and the choice. Each sample of each request has a generator of
its own, so what it draws depends on its seed and its logits only, never on batch mates.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

from stemkv.errors import InvalidLimit

__all__ = ["SamplingParams", "choose_token", "log_probabilities", "make_generator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is continued."""

    max_new_tokens: int = 64
    num_samples: int = 1  # independent continuations
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # keep the likeliest tokens up to this probability
    top_k: int | None = None  # keep this many tokens; None: all
    seed: int = 0
    stop: tuple[str, ...] = ()  # texts that end the output, not part of it
    ignore_eos: bool = False
    allows_stop_in_prompt: bool = False  # else one near the prompt's end is refused
    # How many of the likeliest tokens are told with each one; 0: only its own
    # log-probability; None: none at all. They come with `Engine.on_delta`.
    num_logprobs: int | None = None

    def __post_init__(self) -> None:
        for field in ("max_new_tokens", "num_samples"):
            _integer_at_least(field, getattr(self, field), 1)
        if self.top_k is not None:
            _integer_at_least("top_k", self.top_k, 1)
        if self.num_logprobs is not None:
            _integer_at_least("num_logprobs", self.num_logprobs, 0)
        if not _is_finite(self.temperature) or self.temperature < 0:
            raise InvalidLimit(
                f"temperature must be 0 (greedy) or more, got {self.temperature!r}",
                field="temperature",
            )
        if not _is_finite(self.top_p) or not 0 < self.top_p <= 1:
            raise InvalidLimit(
                f"top_p must be a number in (0, 1], got {self.top_p!r}", field="top_p"
            )
        is_integer = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if not is_integer or not -(2**63) <= self.seed < 2**64:
            raise InvalidLimit(
                f"seed must be an integer of 64 bits, got a {type(self.seed).__name__} "
                f"that is none",
                field="seed",
            )
        is_tuple = isinstance(self.stop, tuple)
        if not is_tuple or not all(isinstance(s, str) and s for s in self.stop):
            raise InvalidLimit(
                f"stop must be a tuple of non-empty texts, got {self.stop!r}",
                field="stop",
            )


def make_generator(seed: int, sample: int) -> torch.Generator:
    """Return the generator of one sample; samples of one seed are unrelated."""
    digest = hashlib.sha256(f"{seed}/{sample}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))


def choose_token(
    logits: torch.Tensor, params: SamplingParams, generator: torch.Generator
) -> int:
    """Return the next token for logits `[vocab_size]`.

    Greedy ties go to the smallest id. Otherwise temperature, then top-k, then top-p.
    """
    if params.temperature == 0:
        return int(logits.argmax())
    # From the largest down, so that a tiny temperature cannot overflow.
    scores = logits.float()
    scores = (scores - scores.max()) / max(params.temperature, 1e-20)
    if params.top_k is not None and params.top_k < len(scores):
        # Stable, so that equal scores at the edge are cut by id and not by chance.
        order = scores.argsort(descending=True, stable=True)[: params.top_k]
    elif params.top_p < 1:
        order = scores.argsort(descending=True, stable=True)
    else:
        order = torch.arange(len(scores))
    probabilities = scores[order].softmax(dim=0)
    if params.top_p < 1:
        before = probabilities.cumsum(dim=0) - probabilities
        probabilities = probabilities.masked_fill(before >= params.top_p, 0.0)
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return int(order[drawn])


def log_probabilities(
    logits: torch.Tensor, token: int, num_top: int
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the log-probability of a token, and the `num_top` likeliest with theirs.

    Natural logarithms of the model's own distribution: temperature, top-k and top-p do
    not show. Equal ones go by token id.
    """
    scores = logits.float().log_softmax(dim=0)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        order = scores.argsort(descending=True, stable=True)[:num_top].tolist()
        top = tuple((each, float(scores[each])) for each in order)
    return float(scores[token]), top


def _is_finite(value: object) -> bool:
    """Whether this is a number that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _integer_at_least(field: str, value: int, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise InvalidLimit(
            f"{field} must be an integer of at least {minimum}, got {value!r}",
            field=field,
        )
