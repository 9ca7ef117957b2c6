"""Who gets the next chunk of a step: a request that waits, or an unfinished prefill.

Owns the protocol only. An order sees requests and how much of them is cached, never
blocks, tokens of others or other tenants' private caches. The scheduler asks it for one
`Pick` after another until the step is full; whether a pick fits is the scheduler's
matter, what follows if it does not is the order's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from stemkv.core.prefix.identity import Domain
from stemkv.core.schedule.request import RequestId, RequestState
from stemkv.core.schedule.waiting import WaitingMatches

__all__ = ["Asked", "Candidate", "Order", "Pick"]


class Asked(Protocol):
    """What an order may know of what a caller asked for."""

    @property
    def domain(self) -> Domain: ...
    @property
    def owner(self) -> str: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def request_class(self) -> str | None: ...


class Candidate(Protocol):
    """All that an order sees of a request, waiting or unfinished."""

    is_late: bool  # the order's own note: its time for starting has passed

    @property
    def request_id(self) -> RequestId: ...
    @property
    def spec(self) -> Asked: ...
    @property
    def state(self) -> RequestState: ...
    @property
    def order_key(self) -> tuple[float, int, int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_ready(self) -> int: ...
    @property
    def num_ready_in_public(self) -> int: ...


C = TypeVar("C", bound=Candidate)


class Pick(NamedTuple):
    """Whose chunk is next."""

    request: Candidate
    most_tokens: int | None = None  # of this chunk; None: as many as the step takes
    lane: str | None = None  # the tenant in whose lane it goes; None: in no lane


class Order(Protocol):
    """Holds the requests that wait and the prefills that are not finished."""

    @property
    def is_timeless(self) -> bool:
        """Whether picks depend neither on time nor on what else is computed."""

    def __len__(self) -> int:
        """Return how many wait, those on hold included."""

    def watch(self, matches: WaitingMatches) -> None:
        """Take what knows where waiting requests match in the tree."""

    # Requests

    def add(self, request: Candidate) -> None:
        """Take a request that waits, new or preempted."""

    def start(self, request: Candidate) -> None:
        """Hear that a waiting request was admitted: its prefill has begun."""

    def moved(self, request: Candidate) -> None:
        """Hear that less, or more, of a request is left to compute."""

    def remove(self, request: Candidate) -> None:
        """Forget a request: its prefill is done, or it was taken away."""

    def hold(self, request: Candidate, leader: Candidate | None) -> None:
        """Do not pick a waiting request until `release`.

        It waits for `leader`, whose prefill computes its prefix, or for a driver.
        """

    def release(self, request: Candidate) -> None:
        """Pick a request again that was on hold."""

    # A step

    def begin(self, now: float, *, admits: bool) -> None:
        """Begin a step; without `admits` only unfinished prefills are picked."""

    def pick(self) -> Pick | None:
        """Return whose chunk is next; `None`: nobody's in this step."""

    def ran(self, pick: Pick, num_tokens: int, *, is_last: bool) -> None:
        """Hear that so many tokens of a pick are planned.

        `is_last`: there is no more of its prefill to plan, in this step or ever.
        """

    def cannot_start(self, pick: Pick) -> bool:
        """Hear that there is no memory or place for a waiting pick now.

        Returns whether nobody else may start either in this step, so that what becomes
        free is left for it; else the order passes it over and picks another.
        """

    def yields_to(self, pick: Pick, running: Sequence[C]) -> C | None:
        """Return who is preempted for a pick that nobody may pass; `None`: it waits.

        Of the running ones, sorted by arrival, never the first.
        """

    def decoded(self, tenant: str, num_tokens: int) -> None:
        """Hear that a tenant's requests decode so many tokens."""

    # Questions

    def first(self, num: int, now: float) -> Iterator[Candidate]:
        """Yield about the first `num` waiting requests, next one first; pure."""

    def victim(self, running: Sequence[C]) -> C:
        """Return who is preempted next, of several running ones sorted by arrival.

        Never the first of them: the oldest ends, and then the next oldest does.
        """
