"""Waiting requests and unfinished prefills, ranked within and between domains.

Owns the groups, one for each domain and tenant, and the rule by which one of them is
next. Knows no credit, deficit or memory.

What is cached in a private domain must not tell others anything, and an order would:
whoever is served first has a hit. So requests are ranked twice, by all they would find
and by what is public of it. Between domains only the second decides; within a domain,
whose members share their cache anyhow, the first does.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from heapq import merge
from itertools import islice

from stemkv.core.prefix.identity import Domain
from stemkv.core.schedule.order.base import Candidate
from stemkv.core.schedule.order.keys import KeyOf
from stemkv.core.schedule.order.ranking import Ranking, Row, request_of
from stemkv.core.schedule.request import RequestId, RequestState
from stemkv.errors import InvariantError

__all__ = ["Group", "RequestQueue"]


class RequestQueue:
    """Requests that want chunks.

    `pauses`: an unfinished prefill may wait while another request goes on; else it goes
    before all that wait, by arrival.
    """

    def __init__(self, key: KeyOf, *, pauses: bool) -> None:
        self._key = key
        self.pauses = pauses
        self._groups: dict[tuple[Domain, str], Group] = {}
        self._num_groups: dict[Domain, int] = {}
        # Whether what is public is ranked as well: not as long as one domain is alone.
        self._ranks_public = False
        self._unfinished = Ranking()  # by arrival, if they are not paused
        self._held: dict[RequestId, Candidate] = {}
        self._passed: set[RequestId] = set()  # in this step
        self._barred: set[str] = set()  # in this step: tenants of whom nobody may start
        self._group_of: dict[RequestId, Group] = {}
        self._admits = True
        self._num_waiting = 0

    def __len__(self) -> int:
        """Return how many wait, those on hold included."""
        return self._num_waiting

    # Requests

    def add(self, request: Candidate) -> None:
        """Take a waiting request."""
        self._num_waiting += 1
        self._rank(request)

    def start(self, request: Candidate) -> None:
        """Make a waiting request an unfinished prefill; it is running already."""
        self._num_waiting -= 1
        if request.request_id in self._held:
            raise InvariantError(f"request {request.request_id} starts while on hold")
        self._unrank(request, is_waiting=True)
        if self.pauses:
            self._rank(request)
        else:
            self._unfinished.put(request, ())

    def moved(self, request: Candidate) -> None:
        """Rank a request anew."""
        if request.request_id in self._held:
            return
        if self.pauses or request.state is not RequestState.RUNNING:
            self._rank(request)

    def remove(self, request: Candidate) -> None:
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

    def hold(self, request: Candidate) -> None:
        """Leave a waiting request out until `release`."""
        self._unrank(request, is_waiting=True)
        self._held[request.request_id] = request

    def release(self, request: Candidate) -> None:
        """Rank a request again that was on hold."""
        del self._held[request.request_id]
        self._rank(request)

    # A step

    def begin(self, *, admits: bool) -> None:
        """Begin a step; without `admits` nobody who waits is a candidate."""
        if admits != self._admits or self._barred:
            self._admits = admits
            self._barred.clear()
            self._forget_heads()
        if self._passed:
            for request_id in self._passed:
                group = self._group_of.get(request_id)
                if group is not None:
                    group.knows_head = False
            self._passed.clear()

    def stop_admitting(self) -> None:
        """Let nobody start who has not in this step."""
        self._admits = False
        self._forget_heads()

    def pass_tenant(self, tenant: str) -> None:
        """Let nobody of a tenant start who has not in this step."""
        self._barred.add(tenant)
        self._forget_heads()

    def pass_over(self, request: Candidate) -> None:
        """Leave a request out for the rest of the step."""
        self._passed.add(request.request_id)
        group = self._group_of.get(request.request_id)
        if group is not None:
            group.knows_head = False

    def is_candidate(self, request: Candidate) -> bool:
        """Whether a request of the queue may be picked now."""
        return (
            request.request_id not in self._passed
            and request.request_id not in self._held
            and (
                self._may_start(request.spec.owner)
                or request.state is RequestState.RUNNING
            )
        )

    def to_go_on(self) -> Candidate | None:
        """Return the unfinished prefill that goes before all else, if there is one."""
        if self.pauses:
            return None
        row = self._unfinished.first(self._passed)
        return None if row is None else request_of(row)

    def candidates(self) -> list[Group]:
        """Return the groups that have a candidate, in a fixed order."""
        found: list[Group] = []
        for group in self._groups.values():
            if not group.knows_head:
                admits = self._may_start(group.tenant)
                group.head = group.first(self._passed, admits=admits, in_public=False)
                group.knows_head = True
            if group.head is not None:
                found.append(group)
        return found

    def tenants(self) -> set[str]:
        """Return who has a request that is not on hold."""
        return {group.tenant for group in self._groups.values()}

    def best(self, groups: Sequence[Group]) -> Candidate:
        """Return which of some groups' first candidates is next; there is one."""
        if len(self._num_groups) > 1:
            # By what is public it may be another one of the same group that counts.
            public = []
            for group in groups:
                admits = self._may_start(group.tenant)
                row = group.first(self._passed, admits=admits, in_public=True)
                assert row is not None, "both rankings have the same requests"
                public.append((row, group.domain))
            domain = min(public)[1]
            groups = [group for group in groups if group.domain == domain]
        best: Row | None = None
        for group in groups:
            row = group.head
            assert row is not None, "a group with a candidate has a first one"
            if best is None or row < best:
                best = row
        assert best is not None, "asked of groups with candidates"
        return request_of(best)

    def pop_while(self, is_due: Callable[[Row], bool]) -> Iterator[Candidate]:
        """Yield first ones of rankings as long as they are due; the caller moves them."""
        for group in self._groups.values():
            for ranking in (group.waiting, group.unfinished):
                while (row := ranking.first()) is not None and is_due(row):
                    yield request_of(row)

    def first(self, num: int) -> Iterator[Candidate]:
        """Yield the first waiting requests, as if nothing but keys decided; pure."""
        groups = list(self._groups.values())
        if len(groups) == 1:
            rows = groups[0].waiting.rows()
        else:
            rows = merge(*(group.waiting.rows() for group in groups))
        return iter([request_of(row) for row in islice(rows, num)])

    # Private

    def _may_start(self, tenant: str) -> bool:
        return self._admits and tenant not in self._barred

    def _forget_heads(self) -> None:
        for group in self._groups.values():
            group.knows_head = False

    def _rank(self, request: Candidate) -> None:
        group = self._group_of.get(request.request_id)
        if group is None:
            where = (request.spec.domain, request.spec.owner)
            group = self._groups.get(where) or self._new_group(where)
            self._group_of[request.request_id] = group
        is_waiting = request.state is not RequestState.RUNNING
        ranking, public = group.rankings(is_waiting=is_waiting)
        group.knows_head = False
        ranking.put(request, self._key(request, request.num_ready))
        if self._ranks_public:
            public.put(request, self._key(request, request.num_ready_in_public))

    def _new_group(self, where: tuple[Domain, str]) -> Group:
        if not self._groups:
            self._ranks_public = False
        group = self._groups[where] = Group(*where)
        self._num_groups[where[0]] = self._num_groups.get(where[0], 0) + 1
        if len(self._num_groups) > 1 and not self._ranks_public:
            # From now on there is something to decide between domains.
            self._ranks_public = True
            for each in self._groups.values():
                for is_waiting in (True, False):
                    ranking, public = each.rankings(is_waiting=is_waiting)
                    for row in ranking.rows():
                        request = request_of(row)
                        key = self._key(request, request.num_ready_in_public)
                        public.put(request, key)
        return group

    def _unrank(self, request: Candidate, *, is_waiting: bool) -> None:
        group = self._group_of.pop(request.request_id)
        ranking, public = group.rankings(is_waiting=is_waiting)
        group.knows_head = False
        ranking.remove(request)
        if self._ranks_public:
            public.remove(request)
        if not group.waiting and not group.unfinished:
            del self._groups[group.domain, group.tenant]
            self._num_groups[group.domain] -= 1
            if not self._num_groups[group.domain]:
                del self._num_groups[group.domain]


class Group:
    """What one tenant has in one domain; the queue's own, to be read by orders."""

    __slots__ = (
        "domain",
        "head",
        "knows_head",
        "tenant",
        "unfinished",
        "unfinished_in_public",
        "waiting",
        "waiting_in_public",
    )

    def __init__(self, domain: Domain, tenant: str) -> None:
        self.domain = domain
        self.tenant = tenant
        self.head: Row | None = None  # the first candidate, if that is known
        self.knows_head = False
        self.waiting = Ranking()
        self.waiting_in_public = Ranking()
        self.unfinished = Ranking()
        self.unfinished_in_public = Ranking()

    def rankings(self, *, is_waiting: bool) -> tuple[Ranking, Ranking]:
        if is_waiting:
            return self.waiting, self.waiting_in_public
        return self.unfinished, self.unfinished_in_public

    def first(
        self, passed: Container[RequestId], *, admits: bool, in_public: bool
    ) -> Row | None:
        row = (self.unfinished_in_public if in_public else self.unfinished).first(
            passed
        )
        if not admits:
            return row
        other = (self.waiting_in_public if in_public else self.waiting).first(passed)
        if row is None or other is None:
            return row or other
        return min(row, other)
