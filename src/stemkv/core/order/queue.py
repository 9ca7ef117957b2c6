"""Waiting requests and unfinished prefills, ranked within and between domains.

Owns the groups, one for each domain and tenant, and the rule by which one of them is
next. Knows no credit, deficit or memory.

What is cached in a private domain must not tell others anything, and an order would:
whoever is served first has a hit. So requests are ranked twice, by all they would find
and by what is public of it. Between domains only the second decides; within a domain,
whose members share their cache anyhow, the first does.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from heapq import merge
from itertools import islice

from stemkv.core.identity import Domain
from stemkv.core.order.keys import KeyOf
from stemkv.core.order.ranking import Ranking, Row
from stemkv.core.request import Request, RequestId, RequestState
from stemkv.errors import InvariantError

__all__ = ["RequestQueue"]

_Groups = Iterable[tuple[tuple[Domain, str], "_Group"]]


class RequestQueue:
    """Requests that want chunks.

    `pauses`: an unfinished prefill may wait while another request goes on; else it goes
    before all that wait, by arrival.
    """

    def __init__(self, key: KeyOf, *, pauses: bool) -> None:
        self._key = key
        self.pauses = pauses
        self._groups: dict[tuple[Domain, str], _Group] = {}
        self._num_groups: dict[Domain, int] = {}
        self._unfinished = Ranking()  # by arrival, if they are not paused
        self._held: dict[RequestId, Request] = {}
        self._passed: set[RequestId] = set()  # in this step
        self._admits = True
        self._num_waiting = 0

    def __len__(self) -> int:
        """Return how many wait, those on hold included."""
        return self._num_waiting

    # Requests

    def add(self, request: Request) -> None:
        """Take a waiting request."""
        self._num_waiting += 1
        self._rank(request)

    def start(self, request: Request) -> None:
        """Make a waiting request an unfinished prefill; it is running already."""
        self._num_waiting -= 1
        if request.request_id in self._held:
            raise InvariantError(f"request {request.request_id} starts while on hold")
        self._unrank(request, is_waiting=True)
        if self.pauses:
            self._rank(request)
        else:
            self._unfinished.put(request, ())

    def moved(self, request: Request) -> None:
        """Rank a request anew."""
        if request.request_id in self._held:
            return
        if self.pauses or request.state is not RequestState.RUNNING:
            self._rank(request)

    def remove(self, request: Request) -> None:
        """Forget a request."""
        if request.state is RequestState.RUNNING:
            if self.pauses:
                self._unrank(request, is_waiting=False)
            else:
                self._unfinished.remove(request)
            return
        self._num_waiting -= 1
        if self._held.pop(request.request_id, None) is None:
            self._unrank(request, is_waiting=True)

    def hold(self, request: Request) -> None:
        """Leave a waiting request out until `release`."""
        self._unrank(request, is_waiting=True)
        self._held[request.request_id] = request

    def release(self, request: Request) -> None:
        """Rank a request again that was on hold."""
        del self._held[request.request_id]
        self._rank(request)

    # A step

    def begin(self, *, admits: bool) -> None:
        """Begin a step; without `admits` nobody who waits is a candidate."""
        self._passed.clear()
        self._admits = admits

    def stop_admitting(self) -> None:
        """Let nobody start who has not in this step."""
        self._admits = False

    def pass_over(self, request: Request) -> None:
        """Leave a request out for the rest of the step."""
        self._passed.add(request.request_id)

    def is_candidate(self, request: Request) -> bool:
        """Whether a request of the queue may be picked now."""
        return (
            request.request_id not in self._passed
            and request.request_id not in self._held
            and (self._admits or request.state is RequestState.RUNNING)
        )

    def to_go_on(self) -> Request | None:
        """Return the unfinished prefill that goes before all else, if there is one."""
        row = self._unfinished.first(self._passed)
        return None if row is None else row[2]

    def tenants(self) -> dict[str, None]:
        """Return the tenants that have a candidate, in a fixed order."""
        found: dict[str, None] = {}
        for (_, tenant), group in self._groups.items():
            if tenant not in found and group.has_candidate(self._passed, self._admits):
                found[tenant] = None
        return found

    def best(self, tenants: Container[str] | None = None) -> Request | None:
        """Return the candidate that is next, of all or of some tenants."""
        if len(self._num_groups) == 1:
            return self._best_of(self._groups.items(), tenants)
        chosen: tuple[Row, Domain] | None = None
        for (domain, tenant), group in self._groups.items():
            if tenants is not None and tenant not in tenants:
                continue
            row = group.first(self._passed, self._admits, in_public=True)
            if row is not None and (chosen is None or row < chosen[0]):
                chosen = (row, domain)
        if chosen is None:
            return None
        own = [each for each in self._groups.items() if each[0][0] == chosen[1]]
        return self._best_of(own, tenants)

    def unfinished(self) -> Iterator[Request]:
        """Yield the paused prefills that may go on in this step."""
        for group in self._groups.values():
            for _, _, request in group.unfinished.rows():
                if request.request_id not in self._passed:
                    yield request

    def pop_while(self, is_due: Callable[[Row], bool]) -> Iterator[Request]:
        """Yield first ones of rankings as long as they are due; the caller moves them."""
        for group in self._groups.values():
            for ranking in (group.waiting, group.unfinished):
                while (row := ranking.first()) is not None and is_due(row):
                    yield row[2]

    def first(self, num: int) -> Iterator[Request]:
        """Yield the first waiting requests, as if nothing but keys decided; pure."""
        groups = list(self._groups.values())
        if len(groups) == 1:
            rows = groups[0].waiting.rows()
        else:
            rows = merge(*(group.waiting.rows() for group in groups))
        return iter([row[2] for row in islice(rows, num)])

    # Private

    def _best_of(
        self, groups: _Groups, tenants: Container[str] | None
    ) -> Request | None:
        best: Row | None = None
        for (_, tenant), group in groups:
            if tenants is not None and tenant not in tenants:
                continue
            row = group.first(self._passed, self._admits, in_public=False)
            if row is not None and (best is None or row < best):
                best = row
        return None if best is None else best[2]

    def _rank(self, request: Request) -> None:
        where = (request.spec.domain, request.spec.owner)
        group = self._groups.get(where)
        if group is None:
            group = self._groups[where] = _Group()
            domain = where[0]
            self._num_groups[domain] = self._num_groups.get(domain, 0) + 1
        own, public = group.rankings(is_waiting=_is_waiting(request))
        own.put(request, self._key(request, request.num_ready))
        public.put(request, self._key(request, request.num_ready_in_public))

    def _unrank(self, request: Request, *, is_waiting: bool) -> None:
        where = (request.spec.domain, request.spec.owner)
        group = self._groups[where]
        for ranking in group.rankings(is_waiting=is_waiting):
            ranking.remove(request)
        if not group.waiting and not group.unfinished:
            del self._groups[where]
            self._num_groups[where[0]] -= 1
            if not self._num_groups[where[0]]:
                del self._num_groups[where[0]]


class _Group:
    """What one tenant has in one domain."""

    __slots__ = ("unfinished", "unfinished_in_public", "waiting", "waiting_in_public")

    def __init__(self) -> None:
        self.waiting = Ranking()
        self.waiting_in_public = Ranking()
        self.unfinished = Ranking()
        self.unfinished_in_public = Ranking()

    def rankings(self, *, is_waiting: bool) -> tuple[Ranking, Ranking]:
        if is_waiting:
            return self.waiting, self.waiting_in_public
        return self.unfinished, self.unfinished_in_public

    def first(
        self, passed: Container[RequestId], admits: bool, *, in_public: bool
    ) -> Row | None:
        row = self.rankings(is_waiting=False)[in_public].first(passed)
        if not admits:
            return row
        other = self.rankings(is_waiting=True)[in_public].first(passed)
        if row is None or other is None:
            return row or other
        return min(row, other)

    def has_candidate(self, passed: Container[RequestId], admits: bool) -> bool:
        if self.unfinished.first(passed) is not None:
            return True
        return admits and self.waiting.first(passed) is not None


def _is_waiting(request: Request) -> bool:
    return request.state is not RequestState.RUNNING
