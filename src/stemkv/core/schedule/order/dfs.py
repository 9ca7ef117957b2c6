"""Siblings together: the waiting requests in depth-first order of where they match.

Of the branches below a node the one with most waiting requests goes first, as SGLang's
"dfs-weight" (`schedule_policy.py`). A baseline: it has no bound on waiting, and is
computed anew, in O(waiting * depth), whenever the queue has changed.

Domains stay together and go by how many of them wait, so what is cached in one shows in
no other's place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stemkv.core.prefix.identity import Domain
from stemkv.core.schedule.order.base import C, Candidate, Pick
from stemkv.core.schedule.order.ranking import Ranking, request_of
from stemkv.core.schedule.request import RequestId, RequestState
from stemkv.core.schedule.waiting import WaitingMatches
from stemkv.errors import InvariantError

__all__ = ["Dfs"]


class Dfs:
    """Groups of siblings, the largest first; within a group by arrival."""

    is_timeless = True

    def __init__(self) -> None:
        self._matches: WaitingMatches | None = None
        self._waiting: dict[RequestId, Candidate] = {}
        self._held: set[RequestId] = set()
        self._unfinished = Ranking()
        self._passed: set[RequestId] = set()
        self._admits = True
        self._sorted: list[Candidate] | None = []  # None: the queue has changed

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def watch(self, matches: WaitingMatches) -> None:
        """Take what knows at which nodes requests match."""
        self._matches = matches

    def add(self, request: Candidate) -> None:
        """Take a request that waits."""
        self._waiting[request.request_id] = request
        self._sorted = None

    def start(self, request: Candidate) -> None:
        """Let its prefill go on in later steps."""
        del self._waiting[request.request_id]
        self._unfinished.put(request, ())
        self._sorted = None

    def moved(self, request: Candidate) -> None:
        """Sort again."""
        if request.state is not RequestState.RUNNING:
            self._sorted = None

    def remove(self, request: Candidate) -> None:
        """Forget it."""
        if request.state is RequestState.RUNNING:
            self._unfinished.remove(request)
            return
        del self._waiting[request.request_id]
        self._held.discard(request.request_id)
        self._sorted = None

    def hold(self, request: Candidate, leader: Candidate | None) -> None:
        """Leave it out until `release`."""
        self._held.add(request.request_id)

    def release(self, request: Candidate) -> None:
        """Take it in again."""
        self._held.remove(request.request_id)

    def begin(self, now: float, *, admits: bool) -> None:
        """Begin a step."""
        self._passed.clear()
        self._admits = admits

    def pick(self) -> Pick | None:
        """Return an unfinished prefill, the oldest first, or the next of the tree."""
        row = self._unfinished.first(self._passed)
        if row is not None:
            return Pick(request_of(row))
        if not self._admits:
            return None
        for request in self._in_order():
            request_id = request.request_id
            if (
                request_id in self._waiting  # else it was taken since they were sorted
                and request_id not in self._passed
                and request_id not in self._held
            ):
                return Pick(request)
        return None

    def ran(self, pick: Pick, num_tokens: int, *, is_last: bool) -> None:
        """Leave it out for the rest of the step."""
        self._passed.add(pick.request.request_id)

    def cannot_start(self, pick: Pick) -> bool:
        """Let nobody overtake it."""
        self._admits = False
        return True

    def yields_to(self, pick: Pick, running: Sequence[C]) -> C | None:
        """Let it wait until somebody ends."""
        return None

    def decoded(self, tenant: str, num_tokens: int) -> None:
        """Nobody pays."""

    def first(self, num: int, now: float) -> Iterator[Candidate]:
        """Yield the first ones."""
        return iter(self._in_order()[:num])

    def victim(self, running: Sequence[C]) -> C:
        """Return the youngest."""
        return running[-1]

    def _in_order(self) -> list[Candidate]:
        if self._sorted is None:
            domains: dict[Domain, list[Candidate]] = {}
            for request in self._waiting.values():
                domains.setdefault(request.spec.domain, []).append(request)
            self._sorted = [
                request
                for members in sorted(domains.values(), key=_place)
                for request in self._depth_first(members)
            ]
        return self._sorted

    def _depth_first(self, requests: list[Candidate]) -> list[Candidate]:
        if self._matches is None:
            raise InvariantError("dfs was not told where requests match")
        root = _Branch()
        for request in requests:
            branch = root
            branch.count(request)
            for node in self._matches.path(request.request_id):
                branch = branch.below.setdefault(node.id, _Branch())
                branch.count(request)
            branch.ends.append(request)
        # Backwards, as what ends at a node comes after all that is below it: first the
        # node's own, then its branches from the lightest to the heaviest.
        backwards: list[Candidate] = []
        stack = [root]
        while stack:
            branch = stack.pop()
            backwards += sorted(branch.ends, key=_arrival, reverse=True)
            stack += sorted(branch.below.values(), key=_Branch.place)
        backwards.reverse()
        return backwards


class _Branch:
    """A node of the tree and the requests that match into it."""

    __slots__ = ("below", "ends", "num", "oldest")

    oldest: tuple[float, int, int]

    def __init__(self) -> None:
        self.below: dict[int, _Branch] = {}
        self.ends: list[Candidate] = []
        self.num = 0

    def count(self, request: Candidate) -> None:
        arrival = _arrival(request)
        self.oldest = min(self.oldest, arrival) if self.num else arrival
        self.num += 1

    def place(self) -> tuple[int, tuple[float, int, int]]:
        return -self.num, self.oldest


def _arrival(request: Candidate) -> tuple[float, int, int]:
    return request.order_key


def _place(members: Iterable[Candidate]) -> tuple[int, tuple[float, int, int]]:
    arrivals = [_arrival(request) for request in members]
    return -len(arrivals), min(arrivals)
