"""The waiting line: who waits for admission and what of it is cached now.

Owns what has to be told together when somebody comes, goes or is held: the order, the
matches and the backlog. Why a request is held is others' matter.
"""

from __future__ import annotations

from collections.abc import Iterator

from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.schedule.journal import Journal
from stemkv.core.schedule.order.base import Order
from stemkv.core.schedule.request import Request, RequestId, RequestState
from stemkv.core.schedule.waiting import WaitingMatches

__all__ = ["Line"]


class Line:
    """The requests that wait, and through `order` the unfinished prefills."""

    def __init__(self, order: Order, cache: PrefixCache, journal: Journal) -> None:
        self.order = order
        self.matches = WaitingMatches(cache.tree)
        self._block_size = cache.config.block_size
        self._journal = journal
        cache.watch(self.matches)
        order.watch(self.matches)

    def __len__(self) -> int:
        """Return how many wait, those on hold included."""
        return len(self.order)

    def add(self, request: Request) -> None:
        """Let a request wait, new, preempted or begun again."""
        self._match(request)
        self.order.add(request)
        self._journal.wants(request)

    def remove(self, request: Request) -> None:
        """Take a request out that waits."""
        self.order.remove(request)
        self.matches.remove(request.request_id)
        self._journal.wants_no_more(request)

    def start(self, request: Request) -> None:
        """Make a request that runs now an unfinished prefill."""
        self.matches.remove(request.request_id)
        self.order.start(request)
        self._journal.wants(request)

    def end(self, request: Request) -> None:
        """Take an unfinished prefill out: it is done, or its request stops."""
        self.order.remove(request)
        self._journal.wants_no_more(request)

    def match_again(self, request: Request) -> None:
        """Follow a request that may share less than before."""
        if request.state is RequestState.RUNNING:
            return
        self.matches.remove(request.request_id)
        self._match(request)
        self.order.moved(request)
        self._journal.wants(request)

    def take_moved(self) -> Iterator[RequestId]:
        """Return and forget whose cached part has changed."""
        return iter(self.matches.take_moved())

    def read_match(self, request: Request) -> None:
        """Note what is cached of a request now."""
        matches, size = self.matches, self._block_size
        request.num_cached = matches.num_blocks(request.request_id) * size
        request.num_public = matches.num_public_blocks(request.request_id) * size

    def _match(self, request: Request) -> None:
        self.matches.add(
            request.request_id, request.namespace, request.spec.domain, request.tokens
        )
        self.read_match(request)
