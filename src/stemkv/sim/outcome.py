"""From the books of all replicas to the numbers of one replay.

Owns the sums over replicas and tenants, and the equations they must fulfil before
anybody sees them. Definitions of latencies and rates are those of `measure`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from stemkv.core.books.account import Account, PrefixAccount
from stemkv.core.books.cost import CostModel
from stemkv.core.books.entry import LedgerEntry, MissReason, Stall
from stemkv.core.books.ledger import PUBLIC_ACCOUNT
from stemkv.core.prefix.identity import Domain
from stemkv.core.schedule.request import RequestId
from stemkv.errors import InvariantError
from stemkv.measure.latency import Goodput, goodput, summarize, summarize_weighted
from stemkv.measure.results import (
    GIB,
    Check,
    LatencySummary,
    MemorySample,
    PrefixValue,
    ReplayResult,
    RequestResult,
    SavedWork,
    Scheduling,
    Source,
    StallSpan,
    TenantResult,
    TokenTotals,
    TraceFacts,
    WaitSpan,
    WriterReader,
)
from stemkv.measure.scheduling import (
    STRICT,
    Slo,
    scheduling_of,
    tpot_of,
    ttft_of,
)
from stemkv.sim.config import ReplayConfig
from stemkv.sim.replica import Replica, join_samples
from stemkv.sim.thinning import Thinned
from stemkv.sim.trace import Trace

__all__ = ["Outcome", "listed_pairs", "trace_facts"]

_MAX_PREFIXES = 50
_MAX_PROBLEMS = 20


class Outcome:
    """The numbers of one finished replay."""

    def __init__(
        self,
        trace: Trace,
        config: ReplayConfig,
        costs: CostModel,
        replicas: Sequence[Replica],
        *,
        placed: dict[int, int],
        arrived_s: dict[int, float],
        refused: Sequence[tuple[int, str]],
    ) -> None:
        self._trace = trace
        self._config = config
        self._costs = costs
        self._replicas = replicas
        self._placed = placed
        self._arrived_s = arrived_s
        self._refused = refused
        self._block_bytes = config.block_size * costs.bytes_per_token
        self._end_s = max(
            (r.memory.points()[-1].at_s for r in replicas if r.steps.num_added),
            default=0.0,
        )
        self._entries = sorted(
            ((entry, replica) for replica in replicas for entry in replica.entries),
            key=lambda pair: int(pair[0].request_id),
        )
        self._public_label = "(public)"
        while self._public_label in trace.tenants():
            self._public_label = f"({self._public_label})"  # some tenant is called so
        self._accounts = [replica.ledger.accounts(self._end_s) for replica in replicas]

    def result(self) -> ReplayResult:
        """Return everything; raises `InvariantError` if a sum does not agree."""
        for replica in self._replicas:
            replica.ledger.check(replica.cache.tree.nodes(), self._end_s)
        entries = [entry for entry, _ in self._entries]
        requests = self._requests()
        tokens = _totals(entries)
        tenants = self._tenants(requests)
        prefixes = self._prefixes()
        saved = self._saved(entries, PUBLIC_ACCOUNT, *self._trace.tenants())
        usages = [replica.cache.usage() for replica in self._replicas]
        num_evicted = sum(usage.num_evicted_blocks for usage in usages)
        stalls = [replica.ledger.stalls for replica in self._replicas]
        num_stalls = sum(stall.num_stalls for stall in stalls)
        slo = self._goodput(requests)
        regrets = [regret for entry in entries for regret in entry.regrets]
        by_arrival = sorted(entries, key=lambda e: (e.arrival_s, int(e.request_id)))
        half = by_arrival[len(entries) // 2 :]
        result = ReplayResult(
            trace=trace_facts(self._trace),
            config=self._settings(),
            cost_source=self._costs.source,
            cost_kind=Source.ESTIMATED,  # a fitted model's steps were measured, not these
            num_blocks=self._config.num_blocks,
            block_size=self._config.block_size,
            block_bytes=self._block_bytes,
            num_replicas=len(self._replicas),
            end_s=self._end_s,
            num_finished=len(entries),
            num_refused=len(self._refused),
            tokens=tokens,
            saved=saved,
            request_hit_rate=_mean([entry.num_reused_tokens > 0 for entry in entries]),
            steady_hit_rate=_totals(half).hit_rate,
            num_evicted_blocks=num_evicted,
            num_refused_blocks=sum(r.num_refused_blocks for r in self._replicas),
            num_published_blocks=sum(u.num_published_blocks for u in usages),
            peak_active_blocks=max(usage.peak_active_blocks for usage in usages),
            regret_tokens=sum(regret.num_tokens for regret in regrets),
            regret_delay_s=summarize_weighted(
                "regret", [(r.delay_s, r.num_tokens) for r in regrets]
            ),
            num_preemptions=sum(r.num_preemptions for r in self._replicas),
            num_stalls=num_stalls,
            stall_s=sum(entry.stall_s for entry in entries),
            stall_active_blocks=_share(
                sum(s.active_blocks for s in stalls), num_stalls
            ),
            stall_shared_blocks=_share(
                sum(s.shared_blocks for s in stalls), num_stalls
            ),
            stall_cached_blocks=_share(
                sum(s.cached_blocks for s in stalls), num_stalls
            ),
            stall_accounts=self._stall_accounts(num_stalls),
            latencies=self._latencies(requests),
            slo_ttft_s=self._config.slo_ttft_s,
            slo_tpot_s=self._config.slo_tpot_s,
            goodput_rps=None if slo is None else slo.per_second,
            goodput_share=None if slo is None else slo.share,
            output_tokens_per_s=_share(tokens.output, self._end_s),
            busy_share=_share(
                sum(replica.busy_s for replica in self._replicas),
                len(self._replicas) * self._end_s,
            ),
            tenants=tenants,
            writers=self._writers(entries),
            prefixes=tuple([p for p in prefixes if p.hit_tokens][:_MAX_PREFIXES]),
            bounds=(),
            curves=(),
            memory=self._memory(),
            steps=tuple(
                span for replica in self._replicas for span in replica.steps.points()
            ),
            num_steps=sum(replica.num_steps for replica in self._replicas),
            requests=requests,
            checks=(),
            scheduling=self._scheduling(requests),
        )
        checks = self._checks(result, prefixes)
        for check in checks:
            if not check.holds:
                raise InvariantError(
                    f"the replay does not add up: {check.name}: {check.left} and "
                    f"{check.right}"
                )
        return replace(result, checks=checks)

    # Parts

    def _requests(self) -> tuple[RequestResult, ...]:
        done = [self._request(entry, replica) for entry, replica in self._entries]
        refused = [self._refusal(index) for index, _ in self._refused]
        return tuple(
            sorted([*done, *refused], key=lambda r: (r.arrival_s, r.request_id))
        )

    def _request(self, entry: LedgerEntry, replica: Replica) -> RequestResult:
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
            domain=_spelled(entry.domain),
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
            saved_how=self._costs.source,
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

    def _scheduling(self, requests: Sequence[RequestResult]) -> Scheduling:
        config = self._config
        slo = Slo(config.slo_ttft_s, config.slo_tpot_s)
        if slo.ttft_s is None and slo.tpot_s is None:
            slo = STRICT
        cpu = [each.scheduler_cpu_s for each in self._replicas]
        cpu_s = [each for each in cpu if each is not None]
        gaps = [each.gap.largest for each in self._replicas if each.gap is not None]
        return scheduling_of(
            requests,
            order=config.order.name,
            end_s=self._end_s,
            slo=slo,
            gap_tokens=max(gaps, default=None),
            cpu_s=math.fsum(cpu_s) if cpu_s else None,
        )

    def _refusal(self, index: int) -> RequestResult:
        request = self._trace.requests[index]
        namespace, domain = self._config.sharing.of(request)
        return RequestResult(
            request_id=request.request_id,
            tenant=request.tenant,
            domain=_spelled(domain),
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
            saved_how=self._costs.source,
            misses={},
            regret_tokens=0,
            first_miss_position=None,
            first_miss_reason=None,
            differing_fields=(),
            num_preemptions=0,
            stall_s=0.0,
        )

    def _tenants(self, requests: Sequence[RequestResult]) -> tuple[TenantResult, ...]:
        """Return the tenants by name, and last what is public."""
        entries: dict[str, list[LedgerEntry]] = {}
        for entry, _ in self._entries:
            entries.setdefault(entry.tenant, []).append(entry)
        by_tenant: dict[str, list[RequestResult]] = {}
        for request in requests:
            if request.end_s is not None:
                by_tenant.setdefault(request.tenant, []).append(request)
        names = sorted({*entries, *self._trace.tenants()})
        if any(PUBLIC_ACCOUNT in accounts for accounts in self._accounts):
            names.append(PUBLIC_ACCOUNT)
        results = []
        for name in names:
            own = entries.get(name, [])
            finished = by_tenant.get(name, [])
            accounts = self._accounts_of(name)
            results.append(
                TenantResult(
                    tenant=self._public_label if name == PUBLIC_ACCOUNT else name,
                    num_requests=len(own),
                    tokens=_totals(own),
                    saved=self._saved(own, name),
                    num_evicted_blocks=sum(a.num_evicted_blocks for a in accounts),
                    num_refused_blocks=sum(a.num_refused_blocks for a in accounts),
                    regret_tokens=sum(
                        regret.num_tokens for each in own for regret in each.regrets
                    ),
                    num_stalls=sum(account.num_stalls for account in accounts),
                    stall_s=sum(account.stall_s for account in accounts),
                    ttft=summarize("TTFT", map(ttft_of, finished)),
                    tpot=summarize("TPOT", _tpots(finished)),
                )
            )
        return tuple(results)

    def _accounts_of(self, name: str) -> list[Account]:
        return [accounts[name] for accounts in self._accounts if name in accounts]

    def _saved(self, entries: Sequence[LedgerEntry], *names: str) -> SavedWork:
        accounts = [each for name in names for each in self._accounts_of(name)]
        costs = self._costs
        reused = [tokens for entry in entries for tokens in entry.reused]
        return SavedWork(
            seconds=math.fsum(entry.saved_s for entry in entries),
            joules=math.fsum(costs.prefill_joules(*tokens) for tokens in reused),
            flops=math.fsum(costs.prefill_flops(*tokens) for tokens in reused),
            retained_gib_s=self._gib(math.fsum(a.retained_block_s for a in accounts)),
            active_gib_s=self._gib(math.fsum(a.active_block_s for a in accounts)),
        )

    def _prefixes(self) -> list[PrefixValue]:
        """Return all runs that were hit, the most valuable per byte first.

        Runs that saved less than a hundredth of it all come last: a few tokens that
        were kept for a moment can have any ratio.
        """
        merged: dict[bytes, list[PrefixAccount]] = {}
        for replica in self._replicas:
            accounts = replica.ledger.prefixes(replica.cache.tree.nodes(), self._end_s)
            for digest, account in accounts.items():
                merged.setdefault(digest, []).append(account)
        values = [
            PrefixValue(
                digest=digest.hex(),
                domain=_spelled(parts[0].domain),
                start=min(part.start for part in parts),
                end=parts[0].end,
                num_hits=sum(part.num_hits for part in parts),
                hit_tokens=sum(part.hit_tokens for part in parts),
                saved_s=math.fsum(part.saved_s(self._costs) for part in parts),
                retained_gib_s=self._gib(sum(part.retained_block_s for part in parts)),
                active_gib_s=self._gib(sum(part.active_block_s for part in parts)),
                num_evicted_blocks=sum(part.num_evicted_blocks for part in parts),
            )
            for digest, parts in merged.items()
        ]
        least = math.fsum(value.saved_s for value in values) / 100
        values.sort(
            key=lambda v: (
                v.saved_s < least,
                -v.seconds_per_gib_s,
                -v.saved_s,
                v.digest,
            )
        )
        return values

    def _stall_accounts(self, num_stalls: int) -> tuple[tuple[str, float], ...]:
        """Return who held active blocks while admissions waited, the most first."""
        totals: Counter[str] = Counter()
        for accounts in self._accounts:
            for name, account in accounts.items():
                if account.stalling_blocks:
                    totals[name] += account.stalling_blocks
        return tuple(
            (
                self._public_label if name == PUBLIC_ACCOUNT else name,
                blocks / num_stalls,
            )
            for name, blocks in sorted(
                totals.items(), key=lambda item: (-item[1], item[0])
            )
        )

    def _writers(self, entries: Iterable[LedgerEntry]) -> tuple[WriterReader, ...]:
        totals: Counter[tuple[str, str]] = Counter()
        for entry in entries:
            for writer, num_tokens in entry.writers.items():
                totals[writer, entry.tenant] += num_tokens
        return tuple(
            WriterReader(writer=writer, reader=reader, tokens=num_tokens)
            for (writer, reader), num_tokens in sorted(totals.items())
        )

    def _latencies(
        self, requests: Sequence[RequestResult]
    ) -> tuple[LatencySummary, ...]:
        finished = [request for request in requests if request.end_s is not None]
        gaps: Counter[float] = Counter()
        for replica in self._replicas:
            gaps.update(replica.itl_s)
        summaries = [
            summarize("TTFT", map(ttft_of, finished)),
            summarize("TPOT", _tpots(finished)),
            summarize_weighted("ITL", gaps.items()),
            summarize("E2E", [_time(r.end_s) - r.arrival_s for r in finished]),
            summarize("queue", [_time(r.admitted_s) - r.arrival_s for r in finished]),
        ]
        return tuple(summary for summary in summaries if summary is not None)

    def _goodput(self, requests: Sequence[RequestResult]) -> Goodput | None:
        ttft_s, tpot_s = self._config.slo_ttft_s, self._config.slo_tpot_s
        if ttft_s is None and tpot_s is None:
            return None
        # One that was refused was not served within any limit.
        latencies = [
            (None, None) if r.end_s is None else (ttft_of(r), tpot_of(r))
            for r in requests
        ]
        return goodput(latencies, self._end_s, ttft_s=ttft_s, tpot_s=tpot_s)

    def _memory(self) -> tuple[MemorySample, ...]:
        """Return the samples of all replicas as one series: sums of blocks by state."""
        if len(self._replicas) == 1:
            return self._replicas[0].memory.points()
        zero = MemorySample(at_s=0.0, active=0, cached=0, free=self._config.num_blocks)
        states = [zero] * len(self._replicas)
        series = Thinned[MemorySample](1000, join_samples)
        samples = sorted(
            (
                (sample.at_s, replica.index, sample)
                for replica in self._replicas
                for sample in replica.memory.points()
            ),
            key=lambda each: each[:2],
        )
        for at_s, index, sample in samples:
            states[index] = sample
            series.add(
                MemorySample(
                    at_s=at_s,
                    active=sum(state.active for state in states),
                    cached=sum(state.cached for state in states),
                    free=sum(state.free for state in states),
                    evicted=sample.evicted,
                    stalled=sum(state.stalled for state in states),
                )
            )
        return series.points()

    def _settings(self) -> dict[str, str | int | float | None]:
        config, load = self._config, self._config.load
        return {
            "num_blocks": config.num_blocks,
            "block_size": config.block_size,
            "memory_gib": config.num_blocks * self._block_bytes / GIB,
            "token_budget": config.token_budget,
            "max_num_running": config.max_num_running,
            "max_request_tokens": config.max_request_tokens,
            "max_steps_awaiting": config.max_steps_awaiting,
            "watermark": config.watermark,
            "num_replicas": config.num_replicas,
            "routing": config.routing,
            "eviction": config.eviction,
            "objective": config.objective,
            "lookahead": config.limits().lookahead,
            "hints": str(config.hints),
            "quotas": None if config.quotas is None else str(config.quotas),
            "order": config.order.name,
            "lane": config.order.lane,
            "quantum": config.order.quantum,
            "decode_weight": config.order.decode_weight,
            "pauses_prefills": config.order.pauses_prefills,
            "weights": listed_pairs(config.order.weights),
            "slo_ttft_s_by_class": listed_pairs(config.order.slo_ttft_s),
            "step_time_s": config.step_time_s,
            "retained_floor_blocks": config.retained_floor_blocks,
            "session_share": None if config.sessions is None else config.sessions.share,
            "sharing": config.sharing.name,
            "public_min_tenants": config.sharing.public_min_tenants,
            "loop": load.loop,
            "rate": load.rate,
            "spread_s": load.spread_s,
            "seed": load.seed,
            "cost": self._costs.source,
        }

    def _checks(
        self, result: ReplayResult, prefixes: Sequence[PrefixValue]
    ) -> tuple[Check, ...]:
        tokens, tenants = result.tokens, result.tenants
        finished = sum(
            self._trace.requests[int(entry.request_id)].input_length
            for entry, _ in self._entries
        )
        num_output = sum(
            max(1, self._trace.requests[int(entry.request_id)].output_length)
            for entry, _ in self._entries
        )
        num_requests = len(self._trace.requests)
        pairs: list[tuple[str, float, float]] = [
            (
                "prompt tokens of the trace that ran = reused + computed",
                finished,
                tokens.reused + tokens.computed,
            ),
            (
                "computed tokens = misses by reason",
                tokens.computed,
                sum(tokens.misses.values()),
            ),
            (
                "requests = finished + refused",
                num_requests,
                result.num_finished + result.num_refused,
            ),
            (
                "reused tokens = those by writer and reader",
                tokens.reused,
                sum(pair.tokens for pair in result.writers),
            ),
            (
                "reused tokens by the books = those of the tenants",
                sum(replica.ledger.num_reused_tokens for replica in self._replicas),
                sum(tenant.tokens.reused for tenant in tenants),
            ),
            (
                "reused tokens = those of the prefixes",
                tokens.reused,
                sum(prefix.hit_tokens for prefix in prefixes),
            ),
            (
                "saved seconds by the books = those of the tenants",
                math.fsum(replica.ledger.saved_s for replica in self._replicas),
                math.fsum(tenant.saved.seconds for tenant in tenants),
            ),
            (
                "saved seconds = those of the prefixes",
                result.saved.seconds,
                math.fsum(prefix.saved_s for prefix in prefixes),
            ),
            (
                "retained GiB-seconds = those of the prefixes",
                result.saved.retained_gib_s,
                math.fsum(prefix.retained_gib_s for prefix in prefixes),
            ),
            (
                "evicted blocks = those of the tenants",
                result.num_evicted_blocks,
                sum(tenant.num_evicted_blocks for tenant in tenants),
            ),
            (
                "refused blocks = those of the tenants",
                result.num_refused_blocks,
                sum(tenant.num_refused_blocks for tenant in tenants),
            ),
            (
                "stall seconds = those of the tenants",
                result.stall_s,
                math.fsum(tenant.stall_s for tenant in tenants),
            ),
            (
                "output tokens = those of the trace that ran, at least one each",
                tokens.output,
                num_output,
            ),
        ]
        return tuple(Check(name=n, left=left, right=right) for n, left, right in pairs)

    def _gib(self, block_s: float) -> float:
        return block_s * self._block_bytes / GIB


def _spelled(domain: Domain) -> str:
    kind = domain.kind.value
    return f"{kind}:{domain.name}" if domain.name else kind


def trace_facts(trace: Trace) -> TraceFacts:
    """Return what a report says of a trace."""
    return TraceFacts(
        name=trace.name,
        format=trace.format,
        num_requests=len(trace.requests),
        num_tenants=len(trace.tenants()),
        duration_s=trace.duration_s,
        prompt_tokens=trace.num_input_tokens,
        output_tokens=trace.num_output_tokens,
        unit_size=trace.unit_size,
        is_exact=trace.is_exact,
        has_arrivals=trace.has_arrivals,
        num_skipped_lines=len(trace.problems),
        num_opaque=sum(request.is_opaque for request in trace.requests),
        problems=tuple(map(str, trace.problems[:_MAX_PROBLEMS])),
        notes=tuple(trace.notes),
    )


def listed_pairs(values: Mapping[str, float]) -> str | None:
    """Return numbers by name as people type them; `None` if there are none."""
    pairs = (f"{name}={value:g}" for name, value in sorted(values.items()))
    return ", ".join(pairs) or None


def _totals(entries: Sequence[LedgerEntry]) -> TokenTotals:
    misses = {reason.value: 0 for reason in MissReason}
    for entry in entries:
        for miss in entry.misses:
            misses[miss.reason.value] += miss.end - miss.start
    reused = sum(entry.num_reused_tokens for entry in entries)
    computed = sum(entry.num_computed_tokens for entry in entries)
    return TokenTotals(
        prompt=reused + computed,
        reused=reused,
        computed=computed,
        copied=sum(entry.num_copied_tokens for entry in entries),
        recomputed=sum(entry.num_recomputed_tokens for entry in entries),
        output=sum(entry.num_output_tokens for entry in entries),
        misses=misses,
    )


def _tpots(requests: Iterable[RequestResult]) -> Iterator[float]:
    return (tpot for each in requests if (tpot := tpot_of(each)) is not None)


def _time(value: float | None) -> float:
    assert value is not None, "a finished request has all its times"
    return value


def _mean(flags: Sequence[bool]) -> float:
    return _share(sum(flags), len(flags))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
