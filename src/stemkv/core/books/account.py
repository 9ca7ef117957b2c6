"""Two kinds of account in the ledger: of a tenant, and of one run of blocks.

Owns their integrals over time, the accounts of all tenants, and how a run's account is
divided and joined. Knows nothing of trees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

from stemkv.core.books.cost import CostModel
from stemkv.core.prefix.identity import Domain

__all__ = ["Account", "Accounts", "PrefixAccount", "RunTotals"]


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
    stalling_blocks: int = 0  # active ones while admissions waited, over all stalls
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

    def add(self, other: Account) -> None:
        """Add what another account, which holds nothing now, held."""
        for each in fields(self):
            if each.name != "since_s":
                total = getattr(self, each.name) + getattr(other, each.name)
                setattr(self, each.name, total)


class Accounts:
    """The accounts of all tenants.

    Of tenants that hold nothing the last `max_idle` keep their account (`None`: all do);
    what those before them held is added up in `departed`.
    """

    def __init__(self, max_idle: int | None = None) -> None:
        self.departed = Account()
        self._max_idle = max_idle
        self._accounts: dict[str, Account] = {}
        self._holding: dict[str, None] = {}  # with active blocks
        self._idle: dict[str, None] = {}  # with none at all, the longest first

    def copies(self, now: float) -> dict[str, Account]:
        """Return copies of all accounts, with integrals up to `now`."""
        copies = {}
        for name, account in sorted(self._accounts.items()):
            copies[name] = account.copy()
            copies[name].settle(now)
        return copies

    def retained(self) -> tuple[tuple[str, int], ...]:
        """Return who has cached blocks, and how many, the most first."""
        retained = [
            (name, account.num_cached_blocks)
            for name, account in self._accounts.items()
            if account.num_cached_blocks
        ]
        retained.sort(key=lambda pair: (-pair[1], pair[0]))
        return tuple(retained)

    def of(self, name: str, now: float) -> Account:
        """Return an account, opening it if it is new."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(since_s=now)
            self._note_idle(name)
        return account

    def move(self, name: str, now: float, *, active: int = 0, cached: int = 0) -> None:
        """Change what somebody holds."""
        account = self.of(name, now)
        account.settle(now)
        account.num_active_blocks += active
        account.num_cached_blocks += cached
        if account.num_active_blocks:
            self._holding[name] = None
        else:
            self._holding.pop(name, None)
        self._idle.pop(name, None)
        if not account.num_active_blocks and not account.num_cached_blocks:
            self._note_idle(name)

    def blame(self) -> None:
        """Count for a stall what everybody holds."""
        for name in self._holding:
            account = self._accounts[name]
            account.stalling_blocks += account.num_active_blocks

    def _note_idle(self, name: str) -> None:
        if self._max_idle is None:
            return
        self._idle[name] = None
        if len(self._idle) > self._max_idle:
            longest = next(iter(self._idle))
            del self._idle[longest]
            self.departed.add(self._accounts.pop(longest))


@dataclass(slots=True)
class RunTotals:
    """What runs of published blocks cost and were worth, wherever they lie.

    Hits are kept by how many of them cover each token, so that a run which is cut later
    gives each part exactly its own, and any number of hits needs as many entries as
    there are places where one begins or ends.
    """

    changes: dict[int, int] = field(
        default_factory=dict
    )  # token → hits more from it on
    active_block_s: float = 0.0
    retained_block_s: float = 0.0
    num_evicted_blocks: int = 0

    @property
    def hit_tokens(self) -> int:
        """Tokens that were reused, each as often as it was."""
        return sum(n * (high - low) for low, high, n in self._levels())

    def saved_s(self, costs: CostModel) -> float:
        """Return the prefill seconds that the hits saved."""
        return math.fsum(
            n * costs.prefill_seconds(low, high) for low, high, n in self._levels()
        )

    def hit(self, low: int, high: int) -> None:
        """Credit a hit on tokens `[low, high)`."""
        self._change(low, 1)
        self._change(high, -1)

    def add(self, other: RunTotals) -> None:
        """Add what others earned and cost."""
        for token, change in other.changes.items():
            self._change(token, change)
        self.active_block_s += other.active_block_s
        self.retained_block_s += other.retained_block_s
        self.num_evicted_blocks += other.num_evicted_blocks

    def _levels(self) -> Iterator[tuple[int, int, int]]:
        """Yield tokens `[low, high)` that were hit equally often, and how often."""
        low = level = 0
        for token, change in sorted(self.changes.items()):
            if level:
                yield low, token, level
            low, level = token, level + change

    def _change(self, token: int, change: int) -> None:
        total = self.changes.get(token, 0) + change
        if total:
            self.changes[token] = total
        else:
            self.changes.pop(token, None)


@dataclass(slots=True, kw_only=True)
class PrefixAccount(RunTotals):
    """What one run cost and was worth. Its time in memory is divided by blocks."""

    domain: Domain
    start: int  # first token of the run
    end: int  # one past its last token
    num_blocks: int  # held now
    is_pinned: bool
    since_s: float

    @property
    def num_hits(self) -> int:
        """Requests that reused it, from its first token on."""
        return self.changes.get(self.start, 0)

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
        return replace(self, changes=dict(self.changes))

    def split_off(self, cut: int) -> PrefixAccount:
        """Cut the run at token `cut`; return the leading part, keep the rest.

        The part is empty if all of the run is behind the cut, the rest if all is before
        it. Evictions stay with the rest, unless that is empty: they took its tail.
        """
        cut = min(max(cut, self.start), self.end)
        length = self.end - self.start
        share = (cut - self.start) / length
        part = replace(self, changes={})
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
        for token in [each for each in self.changes if each < cut]:
            part.changes[token] = self.changes.pop(token)
        num_across = sum(part.changes.values())
        part._change(cut, -num_across)
        self._change(cut, num_across)
        return part

    def join(self, other: PrefixAccount) -> None:
        """Add what another run earned and cost, and where.

        Blocks held now are the caller's matter.
        """
        self.start = min(self.start, other.start)
        self.end = max(self.end, other.end)
        self.add(other)
