"""One row for each request of a replay: what the ledger and the clock know of it.

Owns what is in a row. Sums over rows are `outcome`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from stemkv.core.books.entry import LedgerEntry, Stall
from stemkv.core.books.ledger import PUBLIC_ACCOUNT
from stemkv.core.prefix.identity import Domain
from stemkv.core.schedule.request import RequestId
from stemkv.measure.results import RequestResult, StallSpan, WaitSpan
from stemkv.sim.replica import Replica
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace

__all__ = ["RequestRows", "spelled"]


class RequestRows:
    """Makes the rows of one replay. `placed` and `arrived_s` are by request."""

    def __init__(
        self,
        trace: Trace,
        sharing: SharingRule,
        *,
        cost_source: str,
        public_label: str,
        placed: Mapping[int, int],
        arrived_s: Mapping[int, float],
    ) -> None:
        self._trace = trace
        self._sharing = sharing
        self._cost_source = cost_source
        self._public_label = public_label
        self._placed = placed
        self._arrived_s = arrived_s

    def ended(self, entry: LedgerEntry, replica: Replica) -> RequestResult:
        """Return the row of a request that ran."""
        index = int(entry.request_id)
        request = self._trace.requests[index]
        times = replica.times[RequestId(entry.request_id)]
        misses: Counter[str] = Counter()
        for miss in entry.misses:
            misses[miss.reason.value] += miss.end - miss.start
        first, share = entry.first_miss, entry.share
        return RequestResult(
            request_id=request.request_id,
            tenant=entry.tenant,
            domain=spelled(entry.domain),
            identity=request.identity,
            namespace="" if entry.namespace is None else entry.namespace.hex(),
            prefix="" if entry.prefix_digest is None else entry.prefix_digest.hex(),
            replica=replica.index,
            arrival_s=entry.arrival_s,
            admitted_s=entry.admitted_s,
            first_token_s=times.first_token_s,
            end_s=times.end_s,
            finish_reason=entry.finish_reason,
            prompt_tokens=entry.num_prompt_tokens,
            output_tokens=entry.num_output_tokens,
            reused_tokens=entry.num_reused_tokens,
            computed_tokens=entry.num_computed_tokens,
            copied_tokens=entry.num_copied_tokens,
            recomputed_tokens=entry.num_recomputed_tokens,
            reused_blocks=entry.num_reused_blocks,
            retained_blocks=entry.num_retained_blocks,
            saved_s=entry.saved_s,
            saved_how=self._cost_source,
            misses=dict(sorted(misses.items())),
            regret_tokens=sum(regret.num_tokens for regret in entry.regrets),
            first_miss_position=None if first is None else first.start,
            first_miss_reason=None if first is None else first.reason.value,
            differing_fields=() if first is None else first.differing_fields,
            num_preemptions=entry.num_preemptions,
            stall_s=entry.stall_s,
            stalls=tuple(self._stall(stall) for stall in entry.stalls),
            waits=tuple(
                WaitSpan(
                    reason=wait.reason.value, start_s=wait.start_s, end_s=wait.end_s
                )
                for wait in entry.waits
            ),
            wait_s={
                reason.value: seconds
                for reason, seconds in sorted(
                    entry.wait_s.items(), key=lambda item: item[0].value
                )
            },
            own_backlog_tokens=None if share is None else share.own_backlog,
            own_run_tokens=None if share is None else share.own_run,
            own_lost_tokens=None if share is None else share.own_lost,
            backlog_tokens=None if share is None else share.backlog,
            run_tokens=None if share is None else share.run,
        )

    def _stall(self, stall: Stall) -> StallSpan:
        return StallSpan(
            start_s=stall.start_s,
            end_s=stall.end_s,
            num_missing_blocks=stall.num_missing_blocks,
            active=tuple(
                (self._request_name(each), blocks) for each, blocks in stall.active
            ),
            retained=tuple(
                (self._public_label if name == PUBLIC_ACCOUNT else name, blocks)
                for name, blocks in stall.retained
            ),
        )

    def _request_name(self, request_id: str) -> str:
        index, _, sample = request_id.partition("#")
        name = self._trace.requests[int(index)].request_id
        return f"{name}#{sample}" if sample else name

    def refused(self, index: int) -> RequestResult:
        """Return the row of a request that could never run."""
        request = self._trace.requests[index]
        namespace, domain = self._sharing.of(request)
        return RequestResult(
            request_id=request.request_id,
            tenant=request.tenant,
            domain=spelled(domain),
            identity=request.identity,
            namespace=namespace.hex(),
            prefix="",
            replica=self._placed[index],
            arrival_s=self._arrived_s[index],
            admitted_s=None,
            first_token_s=None,
            end_s=None,
            finish_reason="refused",
            prompt_tokens=request.input_length,
            output_tokens=0,
            reused_tokens=0,
            computed_tokens=0,
            copied_tokens=0,
            recomputed_tokens=0,
            reused_blocks=0,
            retained_blocks=0,
            saved_s=0.0,
            saved_how=self._cost_source,
            misses={},
            regret_tokens=0,
            first_miss_position=None,
            first_miss_reason=None,
            differing_fields=(),
            num_preemptions=0,
            stall_s=0.0,
        )


def spelled(domain: Domain) -> str:
    """Return a domain as it is written in results."""
    kind = domain.kind.value
    return f"{kind}:{domain.name}" if domain.name else kind
