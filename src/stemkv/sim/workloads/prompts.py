"""Prompts without text: whole units and a partly filled end, grown at the end only.

Owns how unit ids come about. Two prompts share a unit only where both grew from the
same `Prompt`, so ids are chained by construction and nothing is hashed or compared.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from stemkv.errors import ConfigError

__all__ = ["UNIT_SIZE", "Prompt", "PromptWriter"]

UNIT_SIZE = 16  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Tokens that exist only as a length and the ids of their whole units."""

    length: int
    units: array[int]  # `length // UNIT_SIZE` of them; never changed in place


class PromptWriter:
    """Makes prompts for one trace: its tokens are new each time it is asked."""

    def __init__(self) -> None:
        self._next_unit = 0

    def new(self, length: int) -> Prompt:
        """Return a prompt that shares nothing with any other."""
        return self.extend(Prompt(length=0, units=array("i")), length)

    def extend(self, prompt: Prompt, length: int) -> Prompt:
        """Return `prompt` with `length` new tokens behind it.

        A unit that was partly filled gets an id when it is full. What fills it is new,
        so two extensions of one prompt never have the same unit there.
        """
        if length < 0:
            raise ConfigError(f"a prompt can't grow by {length} tokens")
        total = prompt.length + length
        num_new = total // UNIT_SIZE - len(prompt.units)
        first = self._next_unit
        self._next_unit += num_new
        return Prompt(
            length=total,
            units=prompt.units + array("i", range(first, first + num_new)),
        )
