"""What happened to requests, told to whoever keeps count.

Owns the telling: service (work by tenant), each request's waits, and the ledger, if
there is one. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest

from stemkv.core.books.ledger import Ledger
from stemkv.core.books.waits import WaitReason
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.schedule.request import Request
from stemkv.core.schedule.service import Service

__all__ = ["Journal"]

_MOST_HOLDERS = 5  # that are named where an admission waits for memory


class Journal:
    """Tells the books of one scheduler."""

    def __init__(self, ledger: Ledger | None) -> None:
        self.service = Service()
        self.ledger = ledger

    # Work

    def took_in(self, request: Request) -> None:
        """Note that a request, or a sample of one, is in flight."""
        self.service.took_in(request.spec.owner)

    def came(self, request: Request) -> None:
        """Note what a new request finds ahead of it."""
        self.service.came(request.share, request.spec.owner)

    def wants(self, request: Request) -> None:
        """Note how much is left of a request that waits or is unfinished."""
        num_left, share = request.num_tokens - request.num_ready, request.share
        has_come = share.number is not None or request.sample > 0
        if has_come and num_left > share.wanted:
            self.service.lost(share, request.spec.owner, num_left - share.wanted)
        share.wanted = num_left
        self.service.wants(request.request_id, request.spec.owner, num_left)

    def wants_no_more(self, request: Request) -> None:
        """Note that a prefill is done or was taken away."""
        self.service.wants_no_more(request.request_id)

    def prefilled(self, request: Request, num_tokens: int) -> None:
        """Note that tokens of an unfinished prefill were computed."""
        self.service.prefilled(request.spec.owner, num_tokens)
        self.wants(request)

    def decoded(self, tenants: Mapping[str, int]) -> None:
        """Note how many tokens each tenant decodes."""
        for tenant, num_tokens in tenants.items():
            self.service.decoded(tenant, num_tokens)

    def sampled(self, request: Request) -> None:
        """Note that a request has an output token; its first one ends the prefill."""
        if request.share.run is None and request.sample == 0:
            self.service.began(request.share, request.spec.owner)

    def waits(self, request: Request, reason: WaitReason | None, now: float) -> None:
        """Note why a request waits from now on; `None`: it does not."""
        request.waits.now_for(reason, now)

    # What the ledger is told

    def started(
        self, request: Request, num_awaitable: Callable[[Request], int], now: float
    ) -> None:
        """Note what a request found; asks what it could have awaited the first time."""
        if self.ledger is None:
            return
        lease = request.held
        path = [] if lease.node is None else lease.node.path()
        copied = None
        if lease.copy is not None and lease.copy_source is not None:
            copied = (lease.copy_source, lease.copy.num_tokens)
        # It was preempted; a sample that begins again has no books of its own either.
        if self.ledger.entry(request.request_id) is not None or request.sample:
            self.ledger.resumed(
                request.request_id,
                path=path,
                copied=copied,
                num_known=request.num_counted,
                now=now,
            )
            return
        self.ledger.admitted(
            request.request_id,
            tenant=request.spec.owner,
            domain=request.spec.domain,
            namespace=request.namespace,
            prompt=request.spec.prompt.buffer,
            path=path,
            copied=copied,
            num_awaitable=num_awaitable(request),
            arrival_s=request.spec.arrival_s,
            now=now,
        )

    def stalled(
        self,
        request: Request,
        cache: PrefixCache,
        running: Sequence[Request],
        num_missing: Callable[[], int],
        now: float,
    ) -> None:
        """Note, once for each wait, who has the memory that a request lacks."""
        ledger = self.ledger
        if ledger is None or ledger.is_stalled(request.request_id):
            return
        largest = nlargest(_MOST_HOLDERS, running, key=lambda r: len(r.held.table))
        ledger.stalled(
            request.request_id,
            tenant=request.spec.owner,
            num_missing=num_missing(),
            num_active=cache.num_active_blocks,
            num_shared=cache.tree.num_pinned_blocks,
            num_cached=cache.tree.num_unpinned_blocks,
            holders=tuple((r.request_id, len(r.held.table)) for r in largest),
            now=now,
        )

    def published(self, request: Request, num_added: int) -> None:
        """Note how many blocks a request left to others."""
        if num_added and self.ledger is not None:
            self.ledger.left_blocks(request.request_id, num_added)

    def restarted(self, request: Request, now: float) -> None:
        """Note that a request begins again and waits its turn."""
        self.waits(request, WaitReason.QUEUE, now)
        if self.ledger is not None:
            self.ledger.restarted(request.request_id)

    def ended(self, request: Request, now: float) -> None:
        """Note a request's end."""
        self.waits(request, None, now)
        self.service.waits_no_more(request.share, request.spec.owner)
        self.service.let_go(request.spec.owner)
        if self.ledger is None:
            return
        counts = request.counts
        assert request.finish_reason is not None, "it has just ended"
        self.ledger.ended(
            request.request_id,
            reason=request.finish_reason.value,
            num_reused=counts.reused,
            num_computed=counts.computed,
            num_recomputed=counts.recomputed,
            num_output=request.num_output_tokens,
            num_preemptions=request.num_preemptions,
            share=request.share,
            waits=request.waits,
            now=now,
        )
