"""The numerics classes: which bits a forward pass promises.

Owns the padding rules and their constants. Knows nothing of models.

Floating-point sums depend on the shape in which rows are batched. In class `exact`
the shapes are padded so that KV and logits are a function of (model, adapter, dtype,
build, tile, token prefix) alone, whatever the chunking, batch mates, hit boundary or
block placement. The rules, each seen to break bits when dropped (measured on CPU with
torch 2.13: AMD Zen 4 and Intel Emerald Rapids):

* R1 attention of position p reads keys `[0, (p // tile + 1) * tile)`, masked beyond p;
* R2 no linear sees fewer rows than its kernel needs for them to be independent of
  each other: between one and sixteen, found by trying at start-up
  (`StableLinear`);
* R3 rows of an attention call are a multiple of `row_multiple`, since the kernel cuts
  queries in blocks and takes another path for blocks of few rows: one to three, and
  up to fifteen in float32 with heads of more than 64;
* R4 padding rows are real copies, never expanded views.

`tolerant` obeys neither R1 nor R3; differences are bounded and can be measured, not zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from stemkv.errors import ConfigError

__all__ = ["EXACT", "TOLERANT", "Numerics", "fitted", "numerics_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Padding constants of a numerics class."""

    name: str  # "exact" or "tolerant"; part of the cache identity
    tile: int  # tokens: queries are cut, and exact contexts padded, at its multiples
    pads_context: bool  # R1
    row_multiple: int  # R3

    def context_length(self, end: int) -> int:
        """Return how many key positions queries up to position `end - 1` read."""
        return -(-end // self.tile) * self.tile if self.pads_context else end

    def num_padded_rows(self, num_rows: int) -> int:
        """Return the rows of an attention call that has `num_rows` real ones."""
        return -(-num_rows // self.row_multiple) * self.row_multiple


EXACT: Final = Numerics(name="exact", tile=64, pads_context=True, row_multiple=4)
TOLERANT: Final = Numerics(name="tolerant", tile=64, pads_context=False, row_multiple=1)


def fitted(numerics: Numerics, *, is_float32: bool, head_dim: int) -> Numerics:
    """Return the class with the row multiple that the attention kernel needs (R3)."""
    if numerics.row_multiple > 1 and is_float32 and head_dim > 64:
        return replace(numerics, row_multiple=16)
    return numerics


def numerics_named(name: str) -> Numerics:
    """Return the class called `name`; raises `ConfigError` for any other word."""
    for numerics in (EXACT, TOLERANT):
        if numerics.name == name:
            return numerics
    raise ConfigError(f"numerics must be 'exact' or 'tolerant', got {name!r}")
