"""How much work everybody was given, and how much is ahead of whom.

Owns the counts of prefill and decode tokens by tenant, and what the requests that wait
or are unfinished still want. Decides nothing: orders have accounts of their own. From
these counts a request's wait can be told in units of its own backlog, which is what
`fair` bounds.

All counts are tokens, exact. The backlog of a request that waits is what is not cached
of it now, in whole blocks. Tenants without a request in flight are forgotten, but for
the last few: whoever wants what each was given since the start adds up the ledger's
entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stemkv.core.books.share import ShareOfWork
from stemkv.errors import InvariantError

__all__ = ["Served", "Service"]

_MAX_IDLE = 256  # so that who goes on at once has not begun anew


@dataclass(slots=True)
class Served:
    """What one tenant was given, and what it still wants."""

    num_prefill: int = 0  # tokens, those computed again as well
    num_decode: int = 0
    backlog: int = 0  # uncached tokens of what waits or is unfinished
    num_queued: int = 0  # requests of which those are
    num_in_flight: int = 0  # samples
    num_lost: int = 0  # tokens that were cached or computed, and are wanted again
    num_came: int = 0
    # By number of those that came, from the oldest without a first token on, what each
    # has lost; what older ones lose is in the sum alone.
    lost: list[int] = field(default_factory=list)
    first_number: int = 0  # of that list
    numbers: dict[int, None] = field(default_factory=dict)  # without a first token


class Service:
    """The counts of one scheduler."""

    def __init__(self) -> None:
        self._tenants: dict[str, Served] = {}
        self._idle: dict[str, None] = {}  # nothing in flight, the longest first
        self._wanted: dict[str, tuple[str, int]] = {}  # by request id
        self._num_prefill = 0
        self._backlog = 0

    @property
    def num_prefill(self) -> int:
        """Prefill tokens run since the start."""
        return self._num_prefill

    @property
    def backlog(self) -> int:
        """Tokens that all who wait or are unfinished want."""
        return self._backlog

    @property
    def tenants(self) -> Mapping[str, Served]:
        """What each tenant was given since it was idle last; not to be changed."""
        return self._tenants

    def of(self, tenant: str) -> Served:
        """Return the counts of a tenant."""
        served = self._tenants.get(tenant)
        if served is None:
            served = self._tenants[tenant] = Served()
            self._note_idle(tenant)
        return served

    def took_in(self, tenant: str) -> None:
        """Tell that one more request of a tenant is in flight."""
        self.of(tenant).num_in_flight += 1
        self._idle.pop(tenant, None)

    def let_go(self, tenant: str) -> None:
        """Tell that a request of a tenant has ended."""
        served = self._tenants[tenant]
        served.num_in_flight -= 1
        if not served.num_in_flight:
            self._note_idle(tenant)

    def wants(self, request_id: str, tenant: str, num_tokens: int) -> None:
        """Tell how much a request wants now."""
        served = self.of(tenant)
        known = self._wanted.get(request_id)
        if known is None:
            served.num_queued += 1
        before = 0 if known is None else known[1]
        served.backlog += num_tokens - before
        self._backlog += num_tokens - before
        self._wanted[request_id] = (tenant, num_tokens)

    def wants_no_more(self, request_id: str) -> None:
        """Tell that a request's prefill is done, or that it has ended."""
        known = self._wanted.pop(request_id, None)
        if known is None:
            raise InvariantError(f"request {request_id} wanted nothing")
        tenant, num_tokens = known
        served = self._tenants[tenant]
        served.backlog -= num_tokens
        served.num_queued -= 1
        self._backlog -= num_tokens

    def came(self, share: ShareOfWork, tenant: str) -> None:
        """Note what a request finds that wants its tokens since just now."""
        served = self.of(tenant)
        share.backlog, share.own_backlog = self._backlog, served.backlog
        share.run_before, share.own_run_before = self._num_prefill, served.num_prefill
        share.number, share.own_lost_before = served.num_came, served.num_lost
        served.numbers[served.num_came] = None
        served.lost.append(0)
        served.num_came += 1

    def lost(self, share: ShareOfWork, tenant: str, num_tokens: int) -> None:
        """Tell that a request wants tokens again that it had found or computed."""
        served = self.of(tenant)
        served.num_lost += num_tokens
        if share.number is not None and share.number >= served.first_number:
            served.lost[share.number - served.first_number] += num_tokens

    def prefilled(self, tenant: str, num_tokens: int) -> None:
        """Tell that prefill tokens of a tenant were run."""
        self._num_prefill += num_tokens
        self.of(tenant).num_prefill += num_tokens

    def decoded(self, tenant: str, num_tokens: int) -> None:
        """Tell that a tenant decodes so many tokens."""
        self.of(tenant).num_decode += num_tokens

    def began(self, share: ShareOfWork, tenant: str) -> None:
        """Note that a request has its first token."""
        share.run = self._num_prefill - share.run_before
        served = self.of(tenant)
        share.own_run = served.num_prefill - share.own_run_before
        if share.number is not None:
            # What those lost that came later was not ahead.
            later = served.lost[share.number + 1 - served.first_number :]
            share.own_lost = served.num_lost - share.own_lost_before - sum(later)
        self.waits_no_more(share, tenant)

    def waits_no_more(self, share: ShareOfWork, tenant: str) -> None:
        """Tell that a request has its first token, or ends without."""
        served = self.of(tenant)
        if share.number is None or share.number not in served.numbers:
            return
        del served.numbers[share.number]
        first = next(iter(served.numbers), served.num_came)
        # Not for each of them, as what is behind moves forward.
        if first == served.num_came or 2 * (first - served.first_number) >= len(
            served.lost
        ):
            del served.lost[: first - served.first_number]
            served.first_number = first

    def _note_idle(self, tenant: str) -> None:
        self._idle[tenant] = None
        if len(self._idle) > _MAX_IDLE:
            longest = next(iter(self._idle))
            del self._idle[longest], self._tenants[longest]
