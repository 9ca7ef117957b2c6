"""What the attack found, before it is judged or shown.

Owns the record that checks and tables are made of, and the sums both need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stemkv.audit.identity.attack import Arena, Outcome
from stemkv.audit.identity.contexts import Context, Prompt
from stemkv.audit.identity.damage import Damage, state_of
from stemkv.audit.identity.evidence import Evidence
from stemkv.audit.identity.keys import FieldKey
from stemkv.audit.identity.trial import KeyFault

__all__ = ["Findings", "KeyFinding", "worst"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFinding:
    """One key function: what it answered, here and in another process."""

    key: FieldKey
    outcome: Outcome | KeyFault
    # Whether other processes give the same keys; a fault: it could not be told. `None`
    # where it wasn't asked.
    elsewhere: bool | KeyFault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that was found."""

    evidence: Evidence
    arena: Arena
    ours: Outcome
    num_foreign_hits: int  # readers that find something among fifteen other writers
    num_own_hits: int  # readers that find their own among all sixteen
    field_separates: dict[str, bool]  # by field of the identity
    keys: tuple[KeyFinding, ...]  # seen in the field
    users: KeyFinding | None = None

    def damage(self, prompt: Prompt, writer: Context, reader: Context) -> Damage:
        """Return what a reader gets of a writer's KV."""
        pair = state_of(writer, prompt), state_of(reader, prompt)
        return self.evidence.pairs[pair]

    def damages(self, outcome: Outcome) -> list[Damage]:
        """Return what each wrong hit of the sixteen contexts comes to."""
        return [
            self.damage(prompt, writer, reader)
            for prompt in self.arena.prompts
            for writer, reader in outcome.wrong_pairs(prompt.name)
        ]


def worst(values: Sequence[float]) -> float | None:
    """Return the largest number; `None` without any. Not a number is the worst."""
    if not values:
        return None
    return next((v for v in values if math.isnan(v)), max(values))
