"""Counts of what differs between two computations of the same KV and logits.

Owns the measures: bits, relative differences, greedy tokens, checksums. Knows nothing
of how either side was computed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from stemkv.engine.recheck import relative_difference

__all__ = ["Tally", "checksum", "logits_difference", "num_differing"]

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Tally:
    """Everything compared so far. Counts are exact, differences measured."""

    num_values: int = 0  # of KV and logits
    num_differing: int = 0  # of those, with other bits
    worst_kv: float = 0.0  # see `relative_difference`
    worst_logits: float = 0.0  # see `logits_difference`
    num_rows: int = 0  # rows of logits
    num_changed_tokens: int = 0  # rows whose greedy token is another
    worst_gap: float = 0.0  # lead of the greedy token where it changed, in logits

    def add_kv(self, truth: torch.Tensor, other: torch.Tensor) -> None:
        """Compare KV `[layers, 2, tokens, kv_heads, head_dim]`."""
        self.num_values += truth.numel()
        differing = num_differing(truth, other)
        self.num_differing += differing
        if differing:
            # `max` would drop a NaN on its right.
            self.worst_kv = _worse(self.worst_kv, relative_difference(truth, other))

    def add_logits(self, truth: torch.Tensor, other: torch.Tensor) -> bool:
        """Compare one row of logits; return whether the greedy token is another."""
        self.num_values += truth.numel()
        self.num_rows += 1
        differing = num_differing(truth, other)
        self.num_differing += differing
        if not differing:
            return False
        self.worst_logits = _worse(self.worst_logits, logits_difference(truth, other))
        if int(truth.argmax()) == int(other.argmax()):
            return False
        self.num_changed_tokens += 1
        first, second = truth.float().topk(2).values.tolist()
        self.worst_gap = _worse(self.worst_gap, first - second)
        return True

    def add(self, other: Tally) -> None:
        """Take in what another tally has compared."""
        self.num_values += other.num_values
        self.num_differing += other.num_differing
        self.worst_kv = _worse(self.worst_kv, other.worst_kv)
        self.worst_logits = _worse(self.worst_logits, other.worst_logits)
        self.num_rows += other.num_rows
        self.num_changed_tokens += other.num_changed_tokens
        self.worst_gap = _worse(self.worst_gap, other.worst_gap)


def num_differing(left: torch.Tensor, right: torch.Tensor) -> int:
    """Return how many values differ in bits: NaN equals itself, 0.0 not -0.0."""
    assert left.shape == right.shape, (left.shape, right.shape)
    word = _WORDS[left.element_size()]
    return int((left.contiguous().view(word) != right.contiguous().view(word)).sum())


def logits_difference(truth: torch.Tensor, other: torch.Tensor) -> float:
    """Return `|other - truth| / |truth|` of two rows, both without their mean.

    The mean of a row has no influence on what is sampled from it.
    """
    wanted = truth.double() - truth.double().mean()
    error = other.double() - other.double().mean() - wanted
    return float(error.norm() / wanted.norm().clamp_min(1e-30))


def checksum(tensor: torch.Tensor) -> str:
    """Return SHA-256 over the bytes of a tensor, as hexadecimal digits."""
    data = tensor.contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _worse(left: float, right: float) -> float:
    """Return the larger; NaN is the worst of all."""
    return right if right != right else max(left, right) if left == left else left
