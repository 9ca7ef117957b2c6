"""Admission orders: what each does to those who wait, and its price.

Replays with a clock, on the loads of `bench.scheduling_traffic`. Promised are, of the
default order `fair`:

- S1: at the load that first come, first served just drains, of the worked example the
  share of requests with a first token within 2 s and 50 ms per token, alone and against
  `lpm` and `fcfs`; of traffic over 24 prefixes that do not fit, no less than `lpm`.
  Medians of five seeds.
- S2: the Mooncake conversation hour at 0.9 of that load, steps of 40 ms.
- S3: no request's tenant runs more than (k + 0.5) times the work that was ahead of the
  request; and `residual`, the same without a bound, breaks it. When memory is short (24
  prefixes that do not fit), work that was cached and had to be computed after all counts
  as ahead.
- S4: two backlogged tenants are never further apart than three quanta, and when memory is
  short than six and the largest prompt; light tenants are better off than with `fcfs`.
- S5: nothing is lost at half the load, and with few agents.
- S6: what ordering costs: microseconds of CPU a step with 1,000 and 4,000 waiting.
- S7: agents whose sessions together exceed memory: throughput against `fcfs`, and, as
  information, what a limit on active sessions changes.
- S8: sparing what the queue will hit, the one rule of memory that is on by default, is
  within 5 % of none in the mean.

Times are estimated by a cost model, counts are exact, S6 is measured. The traces are
looked for in `../shared/traces`. `--only S3` runs one part.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from bench.report import Bar, finish, parser, pin_to_one_core
from bench.scheduling_engine import engine_backlog
from bench.scheduling_traffic import (
    COST,
    EVERYBODY,
    config,
    conversation,
    copies,
    groups,
    of_one_tenant,
    users,
    worked,
)
from stemkv.core.schedule.orders import OrderConfig
from stemkv.core.schedule.request import RequestId
from stemkv.core.schedule.sessions import SessionConfig
from stemkv.measure.results import ReplayResult
from stemkv.measure.scheduling import STRICT
from stemkv.sim.arrivals import Arrivals, LoadConfig
from stemkv.sim.replay import replay
from stemkv.sim.replica import Replica
from stemkv.sim.trace import Trace

SEEDS = (1, 2, 3, 4, 5)
SMALL_POOL = 200_000  # tokens
STEP_TOKENS = 1_024  # of `bench.scheduling_traffic.config` without a limit of time
FCFS = OrderConfig(name="fcfs")
LPM = OrderConfig(name="lpm")
RESIDUAL = OrderConfig(name="residual", pauses_prefills=False)
FAIR = OrderConfig()
UNPAUSED = OrderConfig(pauses_prefills=False)

SLACK = 0.5  # of the wait bound, beside k
MAX_GAP_QUANTA = 3.0
MAX_SHORT_GAP_QUANTA = 6.0  # beside the largest prompt
_WARM_UP = 50  # steps
MAX_STEP_US = {1_000: 50.0, 4_000: 200.0}


def main() -> int:
    """Run the parts asked for and print what came of them."""
    options = _options()
    bars: list[Bar] = []
    facts = {"machine": pin_to_one_core(), "costs": COST.source, "seeds": str(SEEDS)}
    for name, part in PARTS.items():
        if options.only in (None, name):
            started = time.monotonic()
            bars += part(options.quick)
            print(f"{name}: done in {time.monotonic() - started:.0f} s", flush=True)
    return finish("Admission orders", bars, options, facts=facts)


def _options() -> Namespace:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--only", choices=list(PARTS), help="run one part")
    return arguments.parse_args()


# Runs


def play(what: str, trace: Trace, order: OrderConfig, **settings: Any) -> ReplayResult:
    """Replay and say so."""
    result = replay(trace, config(order, **settings), COST)
    print(f"  {what}, {_called(order)}: {_headline(result)}", flush=True)
    return result


@cache
def drain_rate(workload: str, is_quick: bool) -> float:
    """Return requests per second that fcfs serves if all are there at once."""
    settings = {"num_tokens": SMALL_POOL} if workload == "groups" else {}
    make = {"worked": worked, "groups": groups}[workload]
    trace = make(SEEDS[0], EVERYBODY, num_requests=_num_requests(is_quick))
    result = play(f"{workload}, all at once", trace, FCFS, **settings)
    return result.num_finished / result.end_s


@cache
def at_load(
    workload: str, load: float, seed: int, order: str, is_quick: bool
) -> ReplayResult:
    """Replay one seed of a workload at a load; `order` is a key of `ORDERS`."""
    settings = {"num_tokens": SMALL_POOL} if workload == "groups" else {}
    make = {"worked": worked, "groups": groups}[workload]
    rate = load * drain_rate(workload, is_quick)
    trace = make(seed, rate, num_requests=_num_requests(is_quick))
    return play(
        f"{workload} at {load:g}, seed {seed}", trace, ORDERS[order], **settings
    )


ORDERS: Mapping[str, OrderConfig] = {
    "fcfs": FCFS,
    "lpm": LPM,
    "residual": RESIDUAL,
    "fair": FAIR,
    "fair, k = 2": replace(FAIR, lane=2),
}


def strict(result: ReplayResult) -> float:
    """Return the share of requests within 2 s and 50 ms, in percent."""
    found = result.scheduling
    assert found is not None, "a replay with a clock has it"
    assert (found.slo_ttft_s, found.slo_tpot_s) == (STRICT.ttft_s, STRICT.tpot_s)
    return 100 * found.slo_share


def ttft(result: ReplayResult, name: str = "all") -> Any:
    """Return the TTFT of a class."""
    assert result.scheduling is not None, "a replay with a clock has it"
    return result.scheduling.ttft(name)


def wait_ratio(result: ReplayResult) -> float:
    """Return the longest wait in units of the own backlog."""
    assert result.scheduling is not None, "a replay with a clock has it"
    return result.scheduling.most_wait_ratio or 0.0


def wait_ratio_with_lost(result: ReplayResult) -> float:
    """Return the same, with what was evicted of the backlog counted as ahead.

    Less the one chunk that may be in between: beside a backlog that was cached it shows.
    """
    return max(
        max(0, (each.own_run_tokens or 0) - STEP_TOKENS)
        / max(1, (each.own_backlog_tokens or 0) + (each.own_lost_tokens or 0))
        for each in result.requests
    )


def gap(result: ReplayResult) -> float:
    """Return the gap between tenants, in weighted tokens."""
    assert result.scheduling is not None, "a replay with a clock has it"
    return result.scheduling.tenant_gap_tokens or 0.0


def throughput(result: ReplayResult) -> float:
    """Return finished requests per second."""
    return result.num_finished / result.end_s


def tpot_p95_ms(result: ReplayResult) -> float:
    """Return the 95th percentile of the time per output token."""
    return next(1e3 * each.p95 for each in result.latencies if each.name == "TPOT")


# Parts


def s1_worked(is_quick: bool) -> list[Bar]:
    """At saturation, with one hot prefix, and with 24 that do not fit."""

    def medians(workload: str, of: Callable[[ReplayResult], float]) -> dict[str, float]:
        return {
            order: statistics.median(
                of(at_load(workload, 1.0, seed, order, is_quick))
                for seed in _seeds(is_quick)
            )
            for order in ("fcfs", "lpm", "fair")
        }

    good = medians("worked", strict)
    middle = medians("worked", lambda r: float(ttft(r).p50))
    end = medians("worked", lambda r: float(ttft(r).p99))
    bars = [
        _least("S1 worked, strict SLO, fair", good["fair"], 80.0, "%"),
        _least("S1 worked, strict SLO, fair / lpm", _over(good, "lpm"), 1.5, "x"),
        _least("S1 worked, strict SLO, fair / fcfs", _over(good, "fcfs"), 3.0, "x"),
        _least("S1 worked, TTFT p50, lpm / fair", 1 / _over(middle, "lpm"), 4.0, "x"),
        _info("S1 worked, TTFT p99, fair / fcfs (the price)", _over(end, "fcfs"), "x"),
    ]
    good = medians("groups", strict)
    middle = medians("groups", lambda r: float(ttft(r).p50))
    return [
        *bars,
        _least("S1 24 prefixes, strict SLO, fair / lpm", _over(good, "lpm"), 1.0, "x"),
        _most("S1 24 prefixes, TTFT p50, fair / lpm", _over(middle, "lpm"), 1.1, "x"),
    ]


def s2_conversation(is_quick: bool) -> list[Bar]:
    """Long prompts with little to reuse: what is left is to order them by length."""
    trace = conversation(limit=2_000 if is_quick else None)
    settings = {"block_size": 512}
    at_once = LoadConfig(rate=EVERYBODY)
    drained = play("conversation, all at once", trace, FCFS, load=at_once, **settings)
    rate = 0.9 * throughput(drained) * trace.duration_s / len(trace.requests)
    load = LoadConfig(rate=rate, spread_s=3.0 / rate, seed=SEEDS[0])
    found = {
        "fcfs": play("conversation at 0.9", trace, FCFS, load=load, **settings),
        "lpm": play("conversation at 0.9", trace, LPM, load=load, **settings),
        "fair": play(
            "conversation at 0.9", trace, FAIR, load=load, step_time_s=0.04, **settings
        ),
    }
    # The promise is of each order as it is served by default; what of it is the step's
    # and not the order's, equal steps show.
    equal = {
        "fcfs": play(
            "conversation, 40 ms", trace, FCFS, load=load, step_time_s=0.04, **settings
        ),
        "lpm": play(
            "conversation, 40 ms", trace, LPM, load=load, step_time_s=0.04, **settings
        ),
        "fair": found["fair"],
    }
    good = {order: strict(result) for order, result in found.items()}
    alike = {order: strict(result) for order, result in equal.items()}
    return [
        _info("S2 all in steps of 40 ms, fair / fcfs", _over(alike, "fcfs"), "x"),
        _info("S2 all in steps of 40 ms, fair / lpm", _over(alike, "lpm"), "x"),
        _least("S2 conversation, strict SLO, fair", good["fair"], 60.0, "%"),
        _least(
            "S2 conversation, strict SLO, fair / fcfs", _over(good, "fcfs"), 2.5, "x"
        ),
        _least("S2 conversation, strict SLO, fair / lpm", _over(good, "lpm"), 2.5, "x"),
        _most("S2 conversation, TPOT p95", tpot_p95_ms(found["fair"]), 45.0, "ms"),
        _info(
            "S2 conversation, tenant gap (memory is short)", gap(found["fair"]), "tok"
        ),
        _info("S2 conversation, longest wait", wait_ratio(found["fair"]), "x backlog"),
    ]


def s3_wait_bound(is_quick: bool) -> list[Bar]:
    """Everybody's wait is bounded in work; without the lane it is not."""

    def worst(
        order: str,
        workload: str = "worked",
        of: Callable[[ReplayResult], float] = wait_ratio,
    ) -> float:
        return max(
            of(at_load(workload, 1.0, seed, order, is_quick))
            for seed in _seeds(is_quick)
        )

    with_lost = worst("fair", "groups", wait_ratio_with_lost)
    return [
        _most("S3 longest wait, k = 4", worst("fair"), 4 + SLACK, "x backlog", "exact"),
        _most(
            "S3 longest wait, k = 2",
            worst("fair, k = 2"),
            2 + SLACK,
            "x backlog",
            "exact",
        ),
        _least(
            "S3 longest wait, residual (must break it)",
            worst("residual"),
            4 + SLACK,
            "x backlog",
            "exact",
        ),
        _most(
            "S3 short memory, with what was lost", with_lost, 4 + SLACK, "x", "exact"
        ),
        _info(
            "S3 short memory, without", worst("fair", "groups"), "x backlog", "exact"
        ),
    ]


def s4_tenants(is_quick: bool) -> list[Bar]:
    """One tenant sends 60 %; the others must not feel it."""
    seeds = _seeds(is_quick)
    runs = {
        order: [at_load("worked", 1.0, seed, order, is_quick) for seed in seeds]
        for order in ("fcfs", "fair")
    }
    light = {
        order: statistics.median(ttft(r, "light tenants").p95 for r in results)
        for order, results in runs.items()
    }
    quanta = max(map(gap, runs["fair"])) / FAIR.quantum
    short = [at_load("groups", 1.0, seed, "fair", is_quick) for seed in seeds]
    beside = max(
        (gap(result) - max(each.prompt_tokens for each in result.requests))
        for result in short
    )
    return [
        _most("S4 tenant gap, worked", quanta, MAX_GAP_QUANTA, "quanta", "exact"),
        _most(
            "S4 tenant gap, short memory, beside the largest prompt",
            beside / FAIR.quantum,
            MAX_SHORT_GAP_QUANTA,
            "quanta",
            "exact",
        ),
        _least(
            "S4 light tenants' TTFT p95, fcfs / fair",
            1 / _over(light, "fcfs"),
            4.0,
            "x",
        ),
    ]


def s5_light_load(is_quick: bool) -> list[Bar]:
    """Where nothing waits, nothing is to be gained, and nothing may be lost."""
    closed = LoadConfig(loop="closed")
    cases: list[tuple[str, dict[str, ReplayResult]]] = [
        (
            "worked at 0.5",
            {o: at_load("worked", 0.5, 1, o, is_quick) for o in ("fcfs", "fair")},
        )
    ]
    agents: dict[str, Callable[[], Trace]] = {
        "miniswe x 2": lambda: copies("miniswe", 2),
        "magagent x 2": lambda: copies("magagent", 2),
        "tau, 32 users": lambda: users(32, num_requests=1_500 if is_quick else 6_000),
    }
    for name, make in agents.items():
        trace = make()
        cases.append(
            (
                name,
                {
                    order: play(
                        name,
                        trace,
                        ORDERS[order],
                        num_tokens=SMALL_POOL,
                        block_size=64,
                        load=closed,
                    )
                    for order in ("fcfs", "fair")
                },
            )
        )
    bars = []
    for name, found in cases:
        fair, fcfs = found["fair"], found["fcfs"]
        for what in ("p50", "p95"):
            ratio = getattr(ttft(fair), what) / getattr(ttft(fcfs), what)
            bars.append(_most(f"S5 {name}, TTFT {what}, fair / fcfs", ratio, 1.05, "x"))
        ratio = throughput(fair) / throughput(fcfs)
        bars.append(_least(f"S5 {name}, throughput, fair / fcfs", ratio, 0.95, "x"))
    return bars


def s6_price(is_quick: bool) -> list[Bar]:
    """What ordering costs: order and index of waiting requests, in pure Python."""
    bars = []
    for num, most in MAX_STEP_US.items():
        step_us, arrival_us = ordering_us(num, num_steps=200 if is_quick else 600)
        bars += [
            _most(
                f"S6 order and index, {num:,} waiting, mean",
                step_us,
                most,
                "us a step",
                "measured",
            ),
            _info(
                f"S6 the same, an arrival, {num:,} waiting",
                arrival_us,
                "us",
                "measured",
            ),
        ]
    return bars


def ordering_us(num_waiting: int, *, num_steps: int) -> tuple[float, float]:
    """Return the mean time of order and index, a step and an arrival.

    An arrival is matched once and ranked; all that happens to it later is of the steps.
    The queue is kept at its length by arrivals. Residuals are compared with a full
    re-match every 50 steps.
    """
    trace = conversation()
    settings = config(FAIR, num_tokens=420_000, block_size=512)
    arrivals = Arrivals(trace, settings.sharing, settings.load)
    watch = _Watch()
    replica = Replica(
        0,
        cache=settings.cache(),
        limits=settings.limits(),
        make_policy=settings.policy().make(settings.cache(), COST),
        order=watch.of(FAIR.make(COST)),
        costs=COST,
        on_end=lambda request_id, now: None,
    )
    scheduler = replica.scheduler
    line = scheduler._lives.line
    matches = line.matches
    watched = line.matches = watch.of(matches)
    audience = replica.cache.residency.audience
    for event in audience.__slots__:
        hooks = [
            getattr(watched, event) if hook.__self__ is matches else hook
            for hook in getattr(audience, event)
        ]
        setattr(audience, event, tuple(hooks))
    now, num_added, arriving_us = 0.0, 0, 0.0
    num_before, step_us_before, arriving_us_before = 0, 0.0, 0.0
    for step in range(num_steps + _WARM_UP):
        before_us = watch.us
        while scheduler.num_waiting < num_waiting:
            # The trace again, as often as it takes.
            index = num_added % len(trace.requests)
            request_id = RequestId(str(num_added))
            spec = replace(arrivals.spec(index, now), request_id=request_id)
            replica.add(spec, arrivals.output_token(index))
            num_added += 1
        arriving_us += watch.us - before_us
        if step == _WARM_UP:  # from here on the queue has its length
            num_before, step_us_before = num_added, watch.us - arriving_us
            arriving_us_before = arriving_us
        now = replica.start_step(now, now)
        replica.finish_step()
        if step % 50 == 0:
            matches.check()
    step_us = watch.us - arriving_us - step_us_before
    num_arrived = max(1, num_added - num_before)
    return step_us / num_steps, (arriving_us - arriving_us_before) / num_arrived


class _Watch:
    """Adds up the time inside the methods of what it stands for."""

    def __init__(self) -> None:
        self.us = 0.0

    def of(self, subject: Any) -> Any:
        return _Watched(subject, self)


class _Watched:
    def __init__(self, subject: Any, watch: _Watch) -> None:
        self._subject = subject
        self._watch = watch

    def __len__(self) -> int:
        return len(self._subject)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._subject, name)
        if not callable(member):
            return member
        watch = self._watch

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return member(*args, **kwargs)
            finally:
                watch.us += (time.perf_counter() - start) * 1e6

        setattr(self, name, timed)
        return timed


def s7_thrash(is_quick: bool) -> list[Bar]:
    """240 agent sessions over memory for a few: who is served first evicts the others."""
    num_copies = 4 if is_quick else 12
    name, closed = f"miniswe x {num_copies}", LoadConfig(loop="closed")
    trace = copies("miniswe", num_copies)
    pool = SMALL_POOL // 3 if is_quick else SMALL_POOL
    limited = {"sessions": SessionConfig()}
    runs: dict[str, tuple[Trace, OrderConfig, dict[str, Any]]] = {
        "fcfs": (trace, FCFS, {}),
        "lpm": (trace, LPM, {}),
        # One lane for all: the order without tenants. A quantum without end would
        # leave each tenant a lane and bound nothing between them.
        "bounded": (of_one_tenant(trace), UNPAUSED, {}),
        "fair": (trace, UNPAUSED, {}),
        "pausing": (trace, FAIR, {}),
        "limited": (trace, UNPAUSED, limited),
        "lpm, limited": (trace, LPM, limited),
    }
    found = {
        key: throughput(
            play(
                f"{name}, {key}",
                requests,
                order,
                num_tokens=pool,
                block_size=64,
                load=closed,
                **settings,
            )
        )
        for key, (requests, order, settings) in runs.items()
    }

    def over(key: str, peer: str) -> float:
        return found[key] / found[peer]

    return [
        _least("S7 agents, bounded / fcfs", over("bounded", "fcfs"), 1.5, "x"),
        _least("S7 agents, fair / fcfs", over("fair", "fcfs"), 1.3, "x"),
        _info("S7 agents, fair with pauses / fcfs", over("pausing", "fcfs"), "x"),
        _info("S7 agents, lpm / fcfs (unbounded)", over("lpm", "fcfs"), "x"),
        _info("S7 agents, fair, sessions limited / lpm", over("limited", "lpm"), "x"),
        _info(
            "S7 agents, lpm, sessions limited / lpm", over("lpm, limited", "lpm"), "x"
        ),
    ]


def s8_look_ahead(is_quick: bool) -> list[Bar]:
    """What of memory is on by default, sparing what the queue will hit, costs nobody."""
    rate = drain_rate("worked", is_quick)
    num = _num_requests(is_quick)
    few = 4 if is_quick else 12
    closed = LoadConfig(loop="closed")
    agents = {"num_tokens": SMALL_POOL, "block_size": 64, "load": closed}
    cases: dict[str, tuple[Trace, OrderConfig, dict[str, Any]]] = {
        "worked at 1": (worked(SEEDS[0], rate, num_requests=num), FAIR, {}),
        "24 prefixes at 1": (
            groups(SEEDS[0], drain_rate("groups", is_quick), num_requests=num),
            FAIR,
            {"num_tokens": SMALL_POOL},
        ),
        f"miniswe x {few}": (copies("miniswe", few), UNPAUSED, agents),
        "tau, 200 users": (
            users(200, num_requests=1_500 if is_quick else 6_000),
            FAIR,
            agents,
        ),
    }
    bars = []
    for name, (trace, order, settings) in cases.items():
        means = [
            ttft(play(f"{name}, look-ahead {num_ahead}", trace, order, **each)).mean
            for num_ahead in (None, 0)
            for each in ({**settings, "lookahead": num_ahead},)
        ]
        ratio = means[0] / means[1]
        bars.append(_most(f"S8 {name}, mean TTFT, with / without", ratio, 1.05, "x"))
    return bars


PARTS: Mapping[str, Callable[[bool], list[Bar]]] = {
    "S1": s1_worked,
    "S2": s2_conversation,
    "S3": s3_wait_bound,
    "S4": s4_tenants,
    "S5": s5_light_load,
    "S6": s6_price,
    "S7": s7_thrash,
    "S8": s8_look_ahead,
    "engine": engine_backlog,
}


def _seeds(is_quick: bool) -> tuple[int, ...]:
    return SEEDS[:1] if is_quick else SEEDS


def _num_requests(is_quick: bool) -> int:
    return 800 if is_quick else 4_000


def _over(values: Mapping[str, float], peer: str) -> float:
    return values["fair"] / values[peer]


def _called(order: OrderConfig) -> str:
    if order.name != "fair":
        return order.name
    pauses = "" if order.pauses_prefills else ", no pauses"
    return f"fair, k = {order.lane}{pauses}"


def _headline(result: ReplayResult) -> str:
    every = ttft(result)
    return (
        f"TTFT {every.p50:.2f} / {every.p95:.2f} / {every.p99:.2f} s, "
        f"strict {strict(result):.1f} %, hit {result.tokens.hit_rate:.3f}, "
        f"{throughput(result):.2f} req/s, gap {gap(result) / 1e3:.1f} k, "
        f"wait {wait_ratio(result):.1f} x"
    )


def _least(
    name: str, value: float, limit: float, unit: str, basis: Any = "estimated"
) -> Bar:
    return Bar(
        name=name, measured=value, limit=limit, sense="at least", unit=unit, basis=basis
    )


def _most(
    name: str, value: float, limit: float, unit: str, basis: Any = "estimated"
) -> Bar:
    return Bar(name=name, measured=value, limit=limit, unit=unit, basis=basis)


def _info(name: str, value: float, unit: str, basis: Any = "estimated") -> Bar:
    return Bar(name=name, measured=value, unit=unit, basis=basis)


if __name__ == "__main__":
    sys.exit(main())
