"""Adapters over a model's linears: what is added to which rows.

Owns the matrices in the form in which they are multiplied, and their fit to the model.
Knows nothing of files (see `adapter`) or of requests.

An adapter costs two products for every linear it touches, over its own rows only.
Projections that were joined for the base model are joined here too: one matrix A of
all parts, and one B with a block for each, which trades a few idle multiplications for
half the calls.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
from torch import nn

from stemkv.engine.adapter import AdapterWeights, LoraPair, finite_float
from stemkv.engine.linear import LinearPlace, StableLinear
from stemkv.errors import BrokenAdapter, ConfigError, NumericsError

__all__ = ["Lora", "Verdicts", "check_scale"]

# Verdicts on rows by shape are the same for all adapters of a process, so they are
# tried once per kind: (rank, in_features) is shared by most of them.
Verdicts = dict[tuple[int, ...], int | None]


class Lora:
    """One version of an adapter, ready to be added.

    `places` are the linears that adapters may change: those that see every row of a
    step. `deltas` maps the index of a linear to what the adapter adds to its output.
    `scale` multiplies the adapter's own scaling. Raises `BrokenAdapter` if a module
    or a width is not the model's, `NumericsError` if rows would depend on each other.
    """

    def __init__(
        self,
        weights: AdapterWeights,
        places: Mapping[str, LinearPlace],
        *,
        scale: float,
        dtype: torch.dtype,
        verdicts: Verdicts,
        needs_stable_rows: bool,
    ) -> None:
        by_linear: dict[int, list[tuple[LinearPlace, LoraPair]]] = {}
        for name, pair in weights.pairs.items():
            place = _place(weights, places, name, pair)
            by_linear.setdefault(place.linear.index, []).append((place, pair))
        self.is_stable = True  # whether rows are independent of each other
        self.deltas: dict[int, _Delta] = {}
        for index, parts in by_linear.items():
            a, b = _matrices(parts, scale=scale, dtype=dtype)
            if not (a.isfinite().all() and b.isfinite().all()):
                raise BrokenAdapter(
                    f"adapter {weights.path} at scale {scale:g} has values that are "
                    f"not finite in {dtype}; use a smaller scale"
                )
            delta = _Delta(parts[0][0].linear, a, b, verdicts)
            if needs_stable_rows and not delta.is_stable:
                raise NumericsError(
                    f"adapter {weights.path}: rows of its products depend on each other "
                    f"on this build, which numerics class 'exact' excludes; use "
                    f"'tolerant'"
                )
            self.is_stable &= delta.is_stable
            self.deltas[index] = delta


def check_scale(scale: object) -> float:
    """Return the scale as a float; raises `ConfigError` unless finite and above 0."""
    value = finite_float(scale)
    if value is None or value <= 0:
        raise ConfigError(
            f"adapter scale must be finite and above 0, got {scale!r:.80}"
        )
    return value


class _Delta:
    """`x -> x A^T B^T`, with scaling in B, for one (joint) linear."""

    def __init__(
        self, linear: StableLinear, a: torch.Tensor, b: torch.Tensor, verdicts: Verdicts
    ) -> None:
        self._down = _stable(a, linear.is_packed, verdicts)
        self._up = _stable(b, linear.is_packed, verdicts)
        self.is_stable = self._down.is_stable and self._up.is_stable

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._up.forward(self._down.forward(x))


def _matrices(
    parts: list[tuple[LinearPlace, LoraPair]], *, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A of all parts `[rank, in_features]` and B `[out_features, rank]`."""
    linear = parts[0][0].linear
    rank = sum(len(pair.a) for _, pair in parts)
    a = torch.cat([pair.a.float() for _, pair in parts]).to(dtype)
    b = torch.zeros(linear.out_features, rank, dtype=dtype)
    column = 0
    for place, pair in parts:
        end = column + len(pair.a)
        # In float32, so that scaling rounds once.
        scaled = pair.b.float() * (pair.scaling * scale)
        b[place.start : place.end, column:end] = scaled.to(dtype)
        column = end
    return a, b


def _stable(weight: torch.Tensor, is_packed: bool, verdicts: Verdicts) -> StableLinear:
    with torch.device("meta"):
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    return StableLinear([plain], is_packed=is_packed, verdicts=verdicts)


def _place(
    weights: AdapterWeights,
    places: Mapping[str, LinearPlace],
    name: str,
    pair: LoraPair,
) -> LinearPlace:
    """Find the linear an adapter's module names; refuse what does not fit."""
    place = places.get(name)
    if place is None:
        close = difflib.get_close_matches(name, places, n=1)
        hint = f"; the closest is {close[0]}" if close else ""
        raise BrokenAdapter(
            f"adapter {weights.path} is for {name}, which is no linear layer inside "
            f"this model{hint}; was it trained on another one?"
        )
    expected = (place.linear.in_features, place.end - place.start)
    found = (pair.a.shape[1], pair.b.shape[0])
    if found != expected:
        raise BrokenAdapter(
            f"adapter {weights.path}: {name} goes from {found[0]} to {found[1]} "
            f"features, the model's from {expected[0]} to {expected[1]}; was it "
            f"trained on another model?"
        )
    return place
