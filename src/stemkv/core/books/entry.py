"""What the ledger writes down of one request: what it found, what it missed, and why.

Owns the record and the reasons. Knows nothing of how they are found out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from stemkv.core.books.share import ShareOfWork
from stemkv.core.books.waits import Wait, WaitReason
from stemkv.core.prefix.identity import Domain

__all__ = [
    "LedgerEntry",
    "Miss",
    "MissReason",
    "Regret",
    "Stall",
    "StepSavings",
    "first",
    "without",
]


class MissReason(Enum):
    """Why prompt tokens had to be computed."""

    NEVER_SEEN = "never_seen"  # nobody had them, as far as is remembered
    IDENTITY_DIFFERS = "identity_differs"  # another namespace has or had them
    OTHER_DOMAIN = "other_domain"  # another domain of this namespace has or had them
    EVICTED = "evicted"  # the request could have found them earlier
    NOT_RETAINED = "not_retained"  # dropped after use, as their caller said
    NOT_YET_COMPUTED = "not_yet_computed"  # somebody was computing them just then
    BELOW_BLOCK = "below_block"  # end of the prompt: no whole block, or its last token
    UNSHARABLE = "unsharable"  # the request shares with nobody


@dataclass(slots=True)
class Miss:
    """Prompt tokens `[start, end)` that were not reused, and why."""

    start: int
    end: int
    reason: MissReason
    # For IDENTITY_DIFFERS: which fields of the identity, where both are known.
    differing_fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Regret:
    """Tokens that were evicted and then asked for again."""

    num_tokens: int
    delay_s: float  # eviction to the request


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Once that a request waited because memory was short, and who held it then."""

    start_s: float
    end_s: float
    num_missing_blocks: int  # more would have had to be available
    # The running requests that held most, and how many blocks each; what they share is
    # counted for each of them.
    active: tuple[tuple[str, int], ...]
    retained: tuple[tuple[str, int], ...]  # account → cached blocks, the most first


@dataclass(slots=True)
class StepSavings:
    """What the hits of one step saved, by the ledger's cost model."""

    num_tokens: int = 0
    seconds: float = 0.0
    joules: float = 0.0


@dataclass(slots=True, kw_only=True)
class LedgerEntry:
    """One request: what it found, what it missed, what it left. Tokens of the prompt.

    While the request runs, only `PrefixCache`, `Scheduler` and `Ledger` change it.
    """

    request_id: str
    tenant: str
    domain: Domain
    namespace: bytes | None
    prefix_digest: bytes | None  # SHA-256 over namespace and reused tokens; None: none
    arrival_s: float
    admitted_s: float
    num_prompt_tokens: int
    num_reused_tokens: int
    num_reused_blocks: int  # whole blocks that were referenced, not copied
    num_copied_tokens: int
    saved_s: float  # prefill seconds, by the ledger's cost model
    misses: list[Miss]  # in order of position
    # Tokens [low, high) that were reused: one run, unless it was preempted and found
    # more when it came back.
    reused: list[tuple[int, int]]
    writers: dict[str, int]  # tenant who brought them in → tokens reused
    regrets: tuple[Regret, ...]
    stall_s: float = 0.0  # waited because memory was short
    stalls: tuple[Stall, ...] = ()
    num_retained_blocks: int = 0  # published by it
    # Known at the end
    ended_s: float | None = None
    finish_reason: str = ""
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    # Work ahead of it when it came, and run until its first token.
    share: ShareOfWork | None = None
    waits: tuple[Wait, ...] = ()  # the first ones, in order
    wait_s: dict[WaitReason, float] = field(default_factory=dict)

    @property
    def first_miss(self) -> Miss | None:
        """The miss at the first position that was not reused."""
        return self.misses[0] if self.misses else None


def without(misses: list[Miss], start: int, end: int) -> list[Miss]:
    """Return the misses less tokens `[start, end)`, which were found after all."""
    kept = []
    for miss in misses:
        for low, high in (
            (miss.start, min(miss.end, start)),
            (max(miss.start, end), miss.end),
        ):
            if low < high:
                kept.append(Miss(low, high, miss.reason, miss.differing_fields))
    return kept


def first(misses: list[Miss], num_tokens: int) -> list[Miss]:
    """Return the leading `num_tokens` tokens of the misses."""
    kept = []
    for miss in misses:
        taken = min(miss.end - miss.start, num_tokens)
        if taken <= 0:
            break
        kept.append(
            Miss(miss.start, miss.start + taken, miss.reason, miss.differing_fields)
        )
        num_tokens -= taken
    return kept
