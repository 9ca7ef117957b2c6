"""What the entries of all requests add up to, and what must equal what.

Owns the sums over requests and the equations between them, prefixes and tenants. Knows
nothing of how an entry comes about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from stemkv.core.books.account import Account, RunTotals
from stemkv.core.books.cost import CostModel
from stemkv.core.books.entry import LedgerEntry, MissReason
from stemkv.errors import InvariantError

__all__ = ["Totals"]


class Totals:
    """Sums over requests that have ended, and over what was credited to prefixes."""

    def __init__(self) -> None:
        self.num_prompt = 0
        self.num_unreached = 0  # of those, not computed before an abort
        self.num_reused = 0
        self.num_computed = 0
        self.num_missed = dict.fromkeys(MissReason, 0)
        self.num_credited = 0  # tokens credited to prefixes, in vain ones included
        self.num_in_vain = 0  # of those, by requests that were restarted
        self.saved_s = 0.0
        self.credited_s = 0.0
        self.in_vain_s = 0.0

    def credit(self, num_tokens: int, seconds: float) -> None:
        """Count what was credited to a prefix."""
        self.num_credited += num_tokens
        self.credited_s += seconds

    def waste(self, entry: LedgerEntry) -> None:
        """Count an entry that was given up."""
        self.num_in_vain += entry.num_reused_tokens
        self.in_vain_s += entry.saved_s

    def add(self, entry: LedgerEntry, *, num_unreached: int) -> None:
        """Count an entry that is closed."""
        self.num_prompt += entry.num_prompt_tokens
        self.num_unreached += num_unreached
        self.num_reused += entry.num_reused_tokens
        self.num_computed += entry.num_computed_tokens
        self.saved_s += entry.saved_s
        for miss in entry.misses:
            self.num_missed[miss.reason] += miss.end - miss.start

    def check(
        self,
        runs: Sequence[RunTotals],
        accounts: Sequence[Account],
        entries: Iterable[LedgerEntry],
        cost: CostModel,
    ) -> None:
        """Raise `InvariantError` unless all sums agree; `entries` are open."""
        open_reused, open_saved = 0, 0.0
        for entry in entries:
            open_reused += entry.num_reused_tokens
            open_saved += entry.saved_s
        equations = [
            (
                "retained block-seconds of prefixes and of tenants",
                sum(r.retained_block_s for r in runs),
                sum(a.retained_block_s for a in accounts),
            ),
            (
                "evicted blocks of prefixes and of tenants",
                sum(r.num_evicted_blocks for r in runs),
                sum(a.num_evicted_blocks for a in accounts),
            ),
            (
                "tokens credited to prefixes and reused by requests",
                self.num_credited,
                self.num_reused + open_reused + self.num_in_vain,
            ),
            (
                "tokens credited to prefixes, by prefix and in total",
                sum(r.hit_tokens for r in runs),
                self.num_credited,
            ),
            (
                "seconds credited to prefixes and saved by requests",
                self.credited_s,
                self.saved_s + open_saved + self.in_vain_s,
            ),
            (
                "seconds credited to prefixes, by prefix and in total",
                sum(r.saved_s(cost) for r in runs),
                self.credited_s,
            ),
            (
                "prompt tokens and reused + computed + unreached ones",
                self.num_prompt,
                self.num_reused + self.num_computed + self.num_unreached,
            ),
            (
                "computed tokens and misses by reason",
                self.num_computed,
                sum(self.num_missed.values()),
            ),
        ]
        for name, left, right in equations:
            if not math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-6):
                raise InvariantError(
                    f"the ledger does not add up: {name}: {left} and {right}"
                )
