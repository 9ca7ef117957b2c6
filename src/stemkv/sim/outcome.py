"""From the books of all replicas to the numbers of one replay.

Owns the sums over replicas and tenants, and the equations they must fulfil before
anybody sees them. Definitions of latencies and rates are those of `measure`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from stemkv.core.books.account import Account, PrefixAccount
from stemkv.core.books.cost import CostModel
from stemkv.core.books.entry import LedgerEntry, MissReason
from stemkv.core.books.ledger import PUBLIC_ACCOUNT
from stemkv.errors import InvariantError
from stemkv.measure.latency import Goodput, goodput, summarize, summarize_weighted
from stemkv.measure.results import (
    GIB,
    LatencySummary,
    MemorySample,
    PrefixValue,
    ReplayResult,
    RequestResult,
    SavedWork,
    Scheduling,
    Source,
    TenantResult,
    TokenTotals,
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
from stemkv.sim.equations import checks_of
from stemkv.sim.replica import Replica, join_samples
from stemkv.sim.rows import RequestRows, spelled
from stemkv.sim.settings import replay_settings, trace_facts
from stemkv.sim.thinning import Thinned
from stemkv.sim.trace import Trace

__all__ = ["Outcome"]

_MAX_PREFIXES = 50


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
        self._rows = RequestRows(
            trace,
            config.sharing,
            cost_source=costs.source,
            public_label=self._public_label,
            placed=placed,
            arrived_s=arrived_s,
        )
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
            trace=trace_facts(self._trace, self._config.core.cache),
            config={
                **replay_settings(self._config, self._block_bytes),
                "cost": self._costs.source,
            },
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
            peak_active_tokens=max(r.peak_active_tokens for r in self._replicas),
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
        checks = checks_of(
            result,
            prefixes,
            trace=self._trace,
            entries=entries,
            replicas=self._replicas,
        )
        for check in checks:
            if not check.holds:
                raise InvariantError(
                    f"the replay does not add up: {check.name}: {check.left} and "
                    f"{check.right}"
                )
        return replace(result, checks=checks)

    # Parts

    def _requests(self) -> tuple[RequestResult, ...]:
        done = [self._rows.ended(entry, replica) for entry, replica in self._entries]
        refused = [self._rows.refused(index) for index, _ in self._refused]
        return tuple(
            sorted([*done, *refused], key=lambda r: (r.arrival_s, r.request_id))
        )

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
            order=config.core.order.name,
            end_s=self._end_s,
            slo=slo,
            gap_tokens=max(gaps, default=None),
            cpu_s=math.fsum(cpu_s) if cpu_s else None,
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
                domain=spelled(parts[0].domain),
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

    def _gib(self, block_s: float) -> float:
        return block_s * self._block_bytes / GIB


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
