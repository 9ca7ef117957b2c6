"""Who waits for whose prefill.

Owns the holds: a request whose next missing block an unfinished prefill is about to
publish waits for it, instead of computing it a second time. Knows no order; what a hold
means for it is told by whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.identity import PUBLIC
from stemkv.core.prefix.tokens import TOKEN_BYTES, common_prefix_bytes
from stemkv.core.schedule.request import Request, RequestId

__all__ = ["Followers", "Hold"]


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """A request that waits for another's prefill."""

    request: Request
    leader: Request
    num_tokens: int  # whole blocks of them are computed for both
    since: int  # number of the plan


class Followers:
    """The holds, by follower and by leader."""

    def __init__(self, cache: PrefixCache, *, max_steps: int) -> None:
        self.holds: dict[RequestId, Hold] = {}
        self._cache = cache
        self._size = cache.config.block_size
        self._max_steps = max_steps
        self._by_leader: dict[RequestId, dict[RequestId, None]] = {}
        self._ends: list[tuple[int, int, Hold]] = []  # heap, by plan number
        self._num_holds = 0

    # Questions

    def find_leader(
        self, request: Request, prefills: Iterable[Request]
    ) -> Request | None:
        """Return whose prefill will publish the first block that a request misses."""
        if request.namespace is None:
            return None
        if request.num_steps_awaiting >= self._max_steps:
            return None
        index = request.num_cached // self._size
        end = (index + 1) * self._size
        if end > request.num_tokens - 1:
            return None  # no whole block of it may be matched
        begin = index * self._size * TOKEN_BYTES
        block = request.growing_tokens[begin : end * TOKEN_BYTES]
        for leader in prefills:
            # Most differ in that one block already.
            if leader.growing_tokens.startswith(block, begin) and self._will_publish(
                leader, request, index, end
            ):
                return leader
        return None

    def num_awaitable(self, request: Request, prefills: Iterable[Request]) -> int:
        """Return up to where a running prefill computes the request's own tokens."""
        if request.namespace is None:
            return 0
        longest = 0
        for leader in prefills:
            if leader.namespace != request.namespace:
                continue
            lease = leader.held
            domain = self._cache.domain_of_next(lease, lease.num_published_blocks)
            is_visible = domain is not None and (
                leader.spec.domain == request.spec.domain or domain == PUBLIC
            )
            if is_visible:
                longest = max(longest, self._num_shared(leader, request))
        return longest

    # Verbs

    def hold(self, request: Request, leader: Request, step: int) -> None:
        """Let a request wait until what it shares with a leader is published.

        Or the leader's prefill ends, or `max_steps` steps are over.
        """
        num_shared = self._num_shared(leader, request) // self._size * self._size
        hold = Hold(request, leader, num_shared, since=step)
        self.holds[request.request_id] = hold
        of_leader = self._by_leader.setdefault(leader.request_id, {})
        of_leader[request.request_id] = None
        self._num_holds += 1
        num_steps_left = self._max_steps - request.num_steps_awaiting
        heappush(self._ends, (step + num_steps_left, self._num_holds, hold))

    def is_served(self, request: Request) -> bool:
        """Whether a request is held and what it waited for is published."""
        hold = self.holds.get(request.request_id)
        return hold is not None and request.num_cached >= hold.num_tokens

    def end(self, request: Request, step: int) -> None:
        """Count what a request has waited, which is held no longer."""
        hold = self.forget(request)
        assert hold is not None, "it is held"
        request.num_steps_awaiting += max(1, step - hold.since)

    def forget(self, request: Request) -> Hold | None:
        """Forget a request, if it is held."""
        hold = self.holds.pop(request.request_id, None)
        if hold is not None:
            of_leader = self._by_leader[hold.leader.request_id]
            del of_leader[request.request_id]
            if not of_leader:
                del self._by_leader[hold.leader.request_id]
        return hold

    def take_overdue(self, step: int) -> list[Request]:
        """Return and forget who has waited as long as it may."""
        overdue: list[Request] = []
        while self._ends and self._ends[0][0] <= step:
            hold = heappop(self._ends)[-1]
            if self.holds.get(hold.request.request_id) is hold:
                self.end(hold.request, step)
                overdue.append(hold.request)
        return overdue

    def take_of(self, leader: Request, step: int) -> list[Request]:
        """Return and forget who waited for a leader."""
        ids = tuple(self._by_leader.get(leader.request_id, ()))
        free = [self.holds[request_id].request for request_id in ids]
        for request in free:
            self.end(request, step)
        return free

    # Private

    def _will_publish(
        self, leader: Request, follower: Request, index: int, end: int
    ) -> bool:
        """Whether a prefill will publish the block before `end` where it is seen."""
        lease = leader.held
        return (
            leader.namespace == follower.namespace
            and leader.num_tokens >= end
            and lease.num_published_blocks <= index
            and self._cache.domain_of_next(lease, index)
            in (PUBLIC, follower.spec.domain)
            and leader.growing_tokens.startswith(
                follower.growing_tokens[: end * TOKEN_BYTES]
            )
        )

    def _num_shared(self, leader: Request, follower: Request) -> int:
        """Return how many leading tokens a prefill computes for another to see."""
        limit = min(len(leader.growing_tokens), len(follower.growing_tokens))
        if leader.spec.domain != follower.spec.domain:
            size = self._size * TOKEN_BYTES
            limit = min(limit, leader.held.num_public_blocks * size)
        same = common_prefix_bytes(
            leader.growing_tokens, 0, follower.growing_tokens, 0, limit
        )
        return same // TOKEN_BYTES
