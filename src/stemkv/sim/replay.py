"""A trace through the real core, with time: who waits, what is reused, what is lost.

Owns the virtual clock, the loop of arrivals and steps over all replicas, and the
routing between them. What a step decides is the core's business, how long it takes the
cost model's. Deterministic: equal traces, settings and seeds give equal results.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from stemkv.core.books.cost import CostModel
from stemkv.core.schedule.request import RequestId, RequestSpec
from stemkv.errors import ConfigError, PromptTooLong
from stemkv.measure.results import ReplayResult
from stemkv.measure.scheduling import TenantGap
from stemkv.sim.arrivals import Arrivals, identity_facts, public_tokens
from stemkv.sim.config import ReplayConfig, check_online
from stemkv.sim.outcome import Outcome
from stemkv.sim.replica import Replica
from stemkv.sim.trace import Trace

__all__ = ["check_quotas", "replay"]

# What happens at one moment happens in this order: whoever arrives when a step ends is
# considered for the next one, as by an engine that takes requests in before a step.
_MAX_COMPARED = 12  # tenants between which a gap is followed, those with most requests
_ARRIVAL, _STEP_END, _STEP_START = 0, 1, 2


def replay(
    trace: Trace,
    config: ReplayConfig,
    costs: CostModel,
    *,
    progress: Callable[[int, int], None] | None = None,
    cpu_clock: Callable[[], float] | None = None,
) -> ReplayResult:
    """Replay a trace until every request has ended.

    `progress(done, total)` is called now and then. With `cpu_clock`, in seconds, the
    scheduler is timed by it; that number is measured, all others are not. Requests that can never run are
    refused and counted. Raises `ConfigError` for a policy that has to know the future,
    and for quotas that the memory cannot keep; `InvariantError` if the ledger does not
    add up.
    """
    if not trace.requests:
        raise ConfigError(f"trace {trace.name} has no requests")
    check_online(config.eviction)
    check_quotas(trace, config, costs)
    loop = _Loop(trace, config, costs, cpu_clock)
    loop.run(progress)
    return loop.outcome()


def check_quotas(trace: Trace, config: ReplayConfig, costs: CostModel) -> None:
    """Raise `ConfigError` for quotas that the memory cannot keep for this trace."""
    if config.quotas is not None:
        config.quotas.check(
            trace,
            config.sharing,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            block_bytes=config.block_size * costs.bytes_per_token,
        )


class _Loop:
    """All replicas and one clock."""

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        costs: CostModel,
        cpu_clock: Callable[[], float] | None = None,
    ) -> None:
        self._trace = trace
        self._cpu_clock = cpu_clock
        self._config = config
        self._costs = costs
        self._arrivals = Arrivals(trace, config.sharing, config.load)
        self._hints = config.hints.of(trace, config.sharing)
        self._public = public_tokens(trace, config.sharing)
        self._facts = {
            namespace: identity_facts(request.identity)
            for request in trace.requests
            if (namespace := config.sharing.of(request)[0]) is not None
        }
        self._replicas = [self._replica(index) for index in range(config.num_replicas)]
        # (time, kind, number): the number is a request's or a replica's index.
        self._moments: list[tuple[float, int, int]] = []
        self._placed: dict[int, int] = {}  # request → replica
        self._arrived_s: dict[int, float] = {}
        self._refused: list[tuple[int, str]] = []
        self._times: list[float] = []  # of all that wait for nobody, in order
        self._num_arrived = 0
        self._num_ended = 0
        self._now = 0.0

    def run(self, progress: Callable[[int, int], None] | None) -> None:
        """Let everything arrive and end."""
        for arrival_s, index in self._arrivals.first():
            self._moments.append((arrival_s, _ARRIVAL, index))
            self._times.append(arrival_s)
        heapq.heapify(self._moments)
        num_reported = 0
        while self._moments:
            now, kind, number = heapq.heappop(self._moments)
            self._now = now
            if kind == _ARRIVAL:
                self._arrive(number, now)
            elif kind == _STEP_END:
                self._replicas[number].finish_step()
                heapq.heappush(self._moments, (now, _STEP_START, number))
            else:
                self._start_step(self._replicas[number], now)
            if progress is not None and self._num_ended - num_reported >= 100:
                num_reported = self._num_ended
                progress(self._num_ended, len(self._trace.requests))
        if progress is not None:
            progress(self._num_ended, len(self._trace.requests))

    def outcome(self) -> ReplayResult:
        """Return what was found."""
        return Outcome(
            self._trace,
            self._config,
            self._costs,
            self._replicas,
            placed=self._placed,
            arrived_s=self._arrived_s,
            refused=self._refused,
        ).result()

    def _replica(self, index: int) -> Replica:
        config, costs = self._config, self._costs
        replica = Replica(
            index,
            config=config.of_replica(config.block_size * costs.bytes_per_token),
            costs=costs,
            on_end=self._ended,
            gap=self._gap(),
            cpu_clock=self._cpu_clock,
        )
        for namespace, facts in self._facts.items():
            replica.ledger.name(namespace, facts)
        for namespace, prefix in self._public:
            replica.core.declare(namespace, prefix)
        return replica

    def _gap(self) -> TenantGap | None:
        counts = Counter(request.tenant for request in self._trace.requests)
        if len(counts) < 2:
            return None
        largest = sorted(counts, key=lambda tenant: (-counts[tenant], tenant))
        order = self._config.core.order
        return TenantGap(
            largest[:_MAX_COMPARED],
            decode_weight=order.decode_weight,
            weights=order.weights,
        )

    def _start_step(self, replica: Replica, now: float) -> None:
        if not replica.is_busy and replica.has_work:
            end = replica.start_step(now, self._next_arrival_s())
            heapq.heappush(self._moments, (end, _STEP_END, replica.index))

    def _next_arrival_s(self) -> float:
        """Return before when surely nobody arrives."""
        if self._config.load.loop == "open":
            return (
                self._times[self._num_arrived]
                if self._num_arrived < len(self._times)
                else math.inf
            )
        # Whoever ends next, anywhere, may be followed by somebody.
        return self._moments[0][0] if self._moments else math.inf

    def _arrive(self, index: int, now: float) -> None:
        spec = replace(self._arrivals.spec(index, now), hints=self._hints[index])
        replica = self._route(index, spec)
        self._arrived_s[index] = now
        self._num_arrived += 1
        self._placed[index] = replica.index
        try:
            replica.add(spec, self._arrivals.output_token(index))
            if not replica.is_busy:
                heapq.heappush(self._moments, (now, _STEP_START, replica.index))
        except PromptTooLong as error:
            self._refused.append((index, str(error)))
            self._follow(index, now)

    def _route(self, index: int, spec: RequestSpec) -> Replica:
        replicas = self._replicas
        if len(replicas) == 1:
            return replicas[0]
        match self._config.routing:
            case "session":
                request = self._trace.requests[index]
                key = request.session or request.tenant
                digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"))
                number = int.from_bytes(digest.digest()[:8], "big")
                return replicas[number % len(replicas)]
            case "prefix":
                return min(replicas, key=lambda each: self._distance(each, spec))
            case _:
                return replicas[self._num_arrived % len(replicas)]

    def _distance(self, replica: Replica, spec: RequestSpec) -> tuple[int, int, int]:
        found = replica.cache.peek(spec.namespace, spec.domain, spec.prompt.buffer)
        scheduler = replica.scheduler
        num_in_flight = scheduler.num_running + scheduler.num_waiting
        return (-found.num_tokens, num_in_flight, replica.index)

    def _ended(self, request_id: RequestId, now: float) -> None:
        self._follow(int(request_id), now)

    def _follow(self, index: int, now: float) -> None:
        self._num_ended += 1
        for arrival_s, child in self._arrivals.after(index, now):
            heapq.heappush(self._moments, (arrival_s, _ARRIVAL, child))
