"""Two kinds of account in the ledger: of a tenant, and of one run of blocks.

Owns their integrals over time and how a run's account is divided and joined. Knows
nothing of who has an account, or of trees.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stemkv.core.identity import Domain

__all__ = ["Account", "PrefixAccount"]


@dataclass(slots=True)
class Account:
    """What one tenant holds and held. Blocks and block-seconds are exact."""

    num_active_blocks: int = 0
    num_cached_blocks: int = 0
    active_block_s: float = 0.0
    retained_block_s: float = 0.0
    num_evicted_blocks: int = 0
    num_published_blocks: int = 0
    num_stalls: int = 0
    stall_s: float = 0.0
    since_s: float = 0.0  # up to when the two integrals are

    def settle(self, now: float) -> None:
        """Bring the integrals up to `now`."""
        seconds = now - self.since_s
        self.active_block_s += self.num_active_blocks * seconds
        self.retained_block_s += self.num_cached_blocks * seconds
        self.since_s = now

    def copy(self) -> Account:
        """Return an account that goes its own way."""
        return replace(self)


@dataclass(slots=True)
class PrefixAccount:
    """What one run of published blocks cost and was worth.

    Sums are exact. How they are divided among the parts of a run that is cut later is
    not: as if each hit had reached as far as the farthest, and each token saved alike.
    """

    domain: Domain
    start: int  # first token of the run
    end: int  # one past its last token
    num_blocks: int
    is_pinned: bool
    since_s: float
    num_hits: int = 0  # requests that reused it, from its first token on
    hit_end: int = 0  # one past the farthest token that a hit reached
    hit_tokens: int = 0
    saved_s: float = 0.0
    active_block_s: float = 0.0
    retained_block_s: float = 0.0
    num_evicted_blocks: int = 0

    def settle(self, now: float) -> None:
        """Bring the integrals up to `now`."""
        block_s = self.num_blocks * (now - self.since_s)
        if self.is_pinned:
            self.active_block_s += block_s
        else:
            self.retained_block_s += block_s
        self.since_s = now

    def copy(self) -> PrefixAccount:
        """Return an account that goes its own way."""
        return replace(self)

    def split_off(self, cut: int) -> PrefixAccount:
        """Cut the run at token `cut`; return the leading part, keep the rest.

        The part is empty if all of the run is behind the cut, the rest if all is before
        it. Evictions stay with the rest, unless that is empty: they took its tail.
        """
        cut = min(max(cut, self.start), self.end)
        length = self.end - self.start
        share = (cut - self.start) / length
        part = self.copy()
        part.num_blocks = self.num_blocks * (cut - self.start) // length
        part.end = cut
        is_beyond = self.hit_end > cut  # else no hit reached the rest
        hit_share = (cut - self.start) / (self.hit_end - self.start) if is_beyond else 1
        part.saved_s = self.saved_s * hit_share
        part.hit_tokens = round(self.hit_tokens * hit_share)
        part.hit_end = min(self.hit_end, cut)
        part.active_block_s = self.active_block_s * share
        part.retained_block_s = self.retained_block_s * share
        if cut == part.start:
            part.num_hits = 0
        if cut == self.end:
            self.num_evicted_blocks = 0
        else:
            part.num_evicted_blocks = 0
        self.num_blocks -= part.num_blocks
        self.start = cut
        self.saved_s -= part.saved_s
        self.active_block_s -= part.active_block_s
        self.retained_block_s -= part.retained_block_s
        self.hit_tokens -= part.hit_tokens
        if not is_beyond:
            self.num_hits = self.hit_end = 0
        return part

    def add(self, other: PrefixAccount) -> None:
        """Add what another account earned and cost, and where.

        Hits and blocks held now are the caller's matter.
        """
        self.start = min(self.start, other.start)
        self.end = max(self.end, other.end)
        self.hit_tokens += other.hit_tokens
        self.hit_end = max(self.hit_end, other.hit_end)
        self.saved_s += other.saved_s
        self.active_block_s += other.active_block_s
        self.retained_block_s += other.retained_block_s
        self.num_evicted_blocks += other.num_evicted_blocks
