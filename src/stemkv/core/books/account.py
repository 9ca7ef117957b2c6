"""Two kinds of account in the ledger: of a tenant, and of one run of blocks.

Owns their integrals over time and how a run's account is divided and joined. Knows
nothing of who has an account, or of trees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from stemkv.core.books.cost import CostModel
from stemkv.core.prefix.identity import Domain

__all__ = ["Account", "PrefixAccount"]


@dataclass(slots=True)
class Account:
    """What one tenant holds and held. Blocks and block-seconds are exact."""

    num_active_blocks: int = 0
    num_cached_blocks: int = 0
    active_block_s: float = 0.0
    retained_block_s: float = 0.0
    num_evicted_blocks: int = 0
    num_refused_blocks: int = 0  # not retained after their last lease
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

    Hits are kept by where they began and ended, so a run that is cut later gives each
    part exactly its own. Its time in memory is divided by blocks.
    """

    domain: Domain
    start: int  # first token of the run
    end: int  # one past its last token
    num_blocks: int
    is_pinned: bool
    since_s: float
    hits: dict[tuple[int, int], int] = field(default_factory=dict)  # tokens → how often
    active_block_s: float = 0.0
    retained_block_s: float = 0.0
    num_evicted_blocks: int = 0

    @property
    def num_hits(self) -> int:
        """Requests that reused it, from its first token on."""
        return sum(n for (low, _), n in self.hits.items() if low == self.start)

    @property
    def hit_tokens(self) -> int:
        """Tokens that were reused, each as often as it was."""
        return sum(n * (high - low) for (low, high), n in self.hits.items())

    def saved_s(self, costs: CostModel) -> float:
        """Return the prefill seconds that its hits saved."""
        return math.fsum(
            n * costs.prefill_seconds(low, high)
            for (low, high), n in sorted(self.hits.items())
        )

    def hit(self, low: int, high: int, count: int = 1) -> None:
        """Credit hits on tokens `[low, high)`."""
        self.hits[low, high] = self.hits.get((low, high), 0) + count

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
        return replace(self, hits=dict(self.hits))

    def split_off(self, cut: int) -> PrefixAccount:
        """Cut the run at token `cut`; return the leading part, keep the rest.

        The part is empty if all of the run is behind the cut, the rest if all is before
        it. Evictions stay with the rest, unless that is empty: they took its tail.
        """
        cut = min(max(cut, self.start), self.end)
        length = self.end - self.start
        share = (cut - self.start) / length
        part = replace(self, hits={})
        part.num_blocks = self.num_blocks * (cut - self.start) // length
        part.end = cut
        part.active_block_s = self.active_block_s * share
        part.retained_block_s = self.retained_block_s * share
        if cut == self.end:
            self.num_evicted_blocks = 0
        else:
            part.num_evicted_blocks = 0
        self.num_blocks -= part.num_blocks
        self.start = cut
        self.active_block_s -= part.active_block_s
        self.retained_block_s -= part.retained_block_s
        hits, self.hits = self.hits, {}
        for (low, high), count in hits.items():
            if low < cut:
                part.hit(low, min(high, cut), count)
            if high > cut:
                self.hit(max(low, cut), high, count)
        return part

    def add(self, other: PrefixAccount) -> None:
        """Add what another account earned and cost, and where.

        Blocks held now are the caller's matter.
        """
        self.start = min(self.start, other.start)
        self.end = max(self.end, other.end)
        for (low, high), count in other.hits.items():
            self.hit(low, high, count)
        self.active_block_s += other.active_block_s
        self.retained_block_s += other.retained_block_s
        self.num_evicted_blocks += other.num_evicted_blocks
