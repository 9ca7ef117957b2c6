"""The commands that take a trace.

Owns their options and what these are by default. What a command does is in the module
of its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stemkv.cli.options import errors_explained
from stemkv.cli.trace_options import (
    BlockSizeOption,
    BudgetOption,
    ClockOption,
    CostOption,
    DecodeWeightOption,
    DeviceOption,
    DevicesOption,
    FormatOption,
    HintsOption,
    HtmlOutput,
    JsonOutput,
    KvDtypeOption,
    LaneOption,
    LimitOption,
    LookaheadOption,
    LoopOption,
    MapOption,
    MaxRunningOption,
    ModelNameOption,
    ObjectiveOption,
    PausePrefillsOption,
    QuantumOption,
    QuotasOption,
    RateOption,
    ReplicasOption,
    RequestsOption,
    RetainedFloorOption,
    RoutingOption,
    SeedOption,
    SessionShareOption,
    SloClassOption,
    SloTpotOption,
    SloTtftOption,
    SpreadOption,
    StepTimeOption,
    StrictOption,
    TokensOption,
    TraceArgument,
    WeightDtypeOption,
    WeightsOption,
    WorkloadOption,
    WrongHintsOption,
)

__all__ = ["export", "replay", "sweep"]

_EXTRAS = "cli,sim,report"
_ALL = "all"  # eviction policies
# Parameters that mean nothing where requests go one after another.
_OF_CLOCK = {
    "budget": "--budget",
    "max_running": "--max-running",
    "replicas": "--replicas",
    "routing": "--routing",
    "order": "--order",
    "lane": "--lane",
    "quantum": "--quantum",
    "decode_weight": "--decode-weight",
    "pause_prefills": "--pause-prefills",
    "weights": "--weights",
    "slo_class": "--slo-class",
    "step_time": "--step-time",
    "retained_floor": "--retained-floor",
    "session_share": "--session-share",
    "quotas": "--quotas",
    "loop": "--loop",
    "rate": "--rate",
    "spread": "--spread",
    "slo_ttft": "--slo-ttft",
    "slo_tpot": "--slo-tpot",
    "parquet_file": "--parquet",
    "timeline_file": "--timeline",
}


def replay(
    context: typer.Context,
    trace: TraceArgument = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Replay a made-up workload; no input.")
    ] = False,
    workload: WorkloadOption = None,
    requests: RequestsOption = None,
    format: FormatOption = None,
    map: MapOption = None,
    tokens: TokensOption = None,
    strict: StrictOption = False,
    limit: LimitOption = None,
    model: ModelNameOption = None,
    device: DeviceOption = None,
    devices: DevicesOption = 1,
    memory: Annotated[
        str | None,
        typer.Option(
            help="For KV, of a replica, as in 24GiB [default: what is left beside the "
            "weights]."
        ),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option("--blocks", help="The same as a number of blocks.")
    ] = None,
    kv_dtype: KvDtypeOption = None,
    weight_dtype: WeightDtypeOption = None,
    cost: CostOption = None,
    block_size: BlockSizeOption = 16,
    budget: BudgetOption = 8192,
    max_running: MaxRunningOption = 256,
    replicas: ReplicasOption = 1,
    routing: RoutingOption = "round_robin",
    eviction: Annotated[
        str,
        typer.Option(
            help="Which block goes: reuse_index, lru, lfu_da, gdsf or s3fifo; with "
            "--no-clock also clairvoyant."
        ),
    ] = "reuse_index",
    objective: ObjectiveOption = "tokens",
    quotas: QuotasOption = None,
    hints: HintsOption = "trace",
    wrong_hints: WrongHintsOption = 0.0,
    lookahead: LookaheadOption = None,
    order: Annotated[
        str,
        typer.Option(
            help="Who goes first: fair, fcfs, lpm, dfs, residual or deadline."
        ),
    ] = "fair",
    lane: LaneOption = 4,
    quantum: QuantumOption = 8192,
    decode_weight: DecodeWeightOption = 2.0,
    pause_prefills: PausePrefillsOption = True,
    weights: WeightsOption = None,
    slo_class: SloClassOption = None,
    step_time: StepTimeOption = None,
    retained_floor: RetainedFloorOption = None,
    session_share: SessionShareOption = None,
    sharing: Annotated[
        str, typer.Option(help="Between tenants: isolated, shared or public.")
    ] = "isolated",
    loop: LoopOption = "open",
    rate: RateOption = None,
    spread: SpreadOption = 0.0,
    seed: SeedOption = 0,
    slo_ttft: SloTtftOption = None,
    slo_tpot: SloTpotOption = None,
    clock: ClockOption = True,
    curves: Annotated[
        bool, typer.Option(help="Hit rates at every size, and bounds.")
    ] = True,
    html_file: HtmlOutput = None,
    json_file: JsonOutput = None,
    parquet_file: Annotated[
        Path | None,
        typer.Option("--parquet", help="Write the ledger, a row per request."),
    ] = None,
    timeline_file: Annotated[
        Path | None,
        typer.Option("--timeline", help="Write trace events for Perfetto."),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME<LIMIT or NAME>LIMIT: exit 1 if met, 3 if undecided; repeatable. "
            "Names: hit-rate, steady-hit-rate, request-hit-rate, saved-seconds, "
            "goodput, goodput-share, skipped, refused, preemptions, stalls, "
            "stall-seconds, evicted-blocks, regret-tokens, and ttft, tpot, itl, e2e or "
            "queue with -mean, -p50, -p90, -p95, -p99 or -max. Shares as 0.3 or 30%, "
            "times as 0.5 (seconds) or 500ms."
        ),
    ] = None,
) -> None:
    """What does prefix reuse save on real traffic, and where is it lost?

    Example: stemkv replay trace.jsonl --memory 24GiB --fail-on 'hit-rate<30%'

    Example: stemkv replay trace.jsonl --eviction gdsf --objective seconds --quotas q.json
    """
    with errors_explained(_EXTRAS):
        from stemkv.cli.deployment import DeploymentOptions
        from stemkv.cli.orders import OrderOptions, sessions_of
        from stemkv.cli.replay import DEMO, Outputs, ReplayOptions, run_replay
        from stemkv.cli.traces import TraceOptions
        from stemkv.errors import ConfigError
        from stemkv.sim.arrivals import LoadConfig
        from stemkv.sim.config import ReplayConfig
        from stemkv.sim.hinting import HintRule
        from stemkv.sim.sharing import SharingRule

        if eviction == _ALL:
            raise ConfigError(
                "a replay has one --eviction; to compare all, `stemkv sweep --eviction "
                "all`"
            )
        if not clock:
            _refuse_clock(
                context,
                is_workload=demo or workload is not None,
                remedy="drop --no-clock",
            )
        if demo:
            if trace is not None or workload is not None:
                raise ConfigError("--demo takes no trace and no workload")
            workload = DEMO.workload
            requests = DEMO.num_requests if requests is None else requests
            rate = DEMO.rate if rate is None else rate
            memory = DEMO.memory if memory is None and blocks is None else memory
            slo_ttft = DEMO.slo_ttft_s if slo_ttft is None else slo_ttft
            slo_tpot = DEMO.slo_tpot_s if slo_tpot is None else slo_tpot
            html_file = DEMO.html if html_file is None else html_file
        rate = 1.0 if rate is None else rate
        is_workload = workload is not None
        options = ReplayOptions(
            trace=TraceOptions(
                trace=trace,
                format=format,
                map=tuple(map or ()),
                tokens=tokens,
                is_strict=strict,
                limit=limit,
                workload=workload,
                num_requests=requests,
                seed=seed,
            ),
            workload_rate=rate,
            num_tenants=DEMO.num_tenants if demo else None,
            deployment=DeploymentOptions(
                model=model,
                device=device,
                num_devices=devices,
                kv_dtype=kv_dtype,
                weight_dtype=weight_dtype,
                cost=cost,
                block_size=block_size,
            ),
            memory=memory,
            num_blocks=blocks,
            config=ReplayConfig(
                num_blocks=1,
                block_size=block_size,
                token_budget=budget,
                max_num_running=max_running,
                num_replicas=replicas,
                routing=routing,
                eviction=eviction,
                objective=objective,
                order=OrderOptions(
                    lane=lane,
                    quantum=quantum,
                    decode_weight=decode_weight,
                    pauses_prefills=pause_prefills,
                    weights=weights,
                    slo_classes=slo_class,
                ).config(order),
                step_time_s=None if step_time is None else step_time / 1e3,
                sessions=sessions_of(session_share),
                sharing=SharingRule(name=sharing),
                hints=HintRule(name=hints, wrong_share=wrong_hints, seed=seed),
                lookahead=lookahead,
                load=LoadConfig(
                    loop=loop,
                    rate=1.0 if is_workload else rate,
                    spread_s=spread,
                    seed=seed,
                ),
                slo_ttft_s=slo_ttft,
                slo_tpot_s=slo_tpot,
            ),
            quotas=quotas,
            retained_floor=retained_floor,
            has_clock=clock,
            has_curves=curves,
            outputs=Outputs(
                html=html_file,
                json=json_file,
                parquet=parquet_file,
                timeline=timeline_file,
            ),
            fail_on=tuple(fail_on or ()),
        )
        code = run_replay(options)
    if code:
        raise typer.Exit(code)


def _refuse_clock(context: typer.Context, *, is_workload: bool, remedy: str) -> None:
    """Raise `ConfigError` for options that were typed and need the clock."""
    from stemkv.errors import ConfigError

    for parameter, option in _OF_CLOCK.items():
        if is_workload and parameter == "rate":
            continue  # it makes the workload
        if _is_typed(context, parameter):
            raise ConfigError(f"{option} needs the clock; {remedy}")


def _is_typed(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def sweep(
    context: typer.Context,
    trace: TraceArgument = None,
    workload: WorkloadOption = None,
    requests: RequestsOption = None,
    format: FormatOption = None,
    map: MapOption = None,
    tokens: TokensOption = None,
    strict: StrictOption = False,
    limit: LimitOption = None,
    model: ModelNameOption = None,
    device: DeviceOption = None,
    devices: DevicesOption = 1,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Sizes for KV, as in 8GiB,16GiB [default: an eighth to all of what is "
            "left beside the weights]."
        ),
    ] = None,
    blocks: Annotated[
        str | None, typer.Option("--blocks", help="The same as numbers of blocks.")
    ] = None,
    kv_dtype: KvDtypeOption = None,
    weight_dtype: WeightDtypeOption = None,
    cost: CostOption = None,
    block_size: BlockSizeOption = 16,
    budget: BudgetOption = 8192,
    max_running: MaxRunningOption = 256,
    replicas: ReplicasOption = 1,
    routing: RoutingOption = "round_robin",
    eviction: Annotated[
        str,
        typer.Option(
            help="List of: reuse_index, lru, lfu_da, gdsf, s3fifo; with --no-clock also "
            "clairvoyant. all: compare them, without a clock unless --clock is there."
        ),
    ] = "reuse_index",
    objective: ObjectiveOption = "tokens",
    quotas: QuotasOption = None,
    hints: HintsOption = "trace",
    wrong_hints: WrongHintsOption = 0.0,
    lookahead: LookaheadOption = None,
    order: Annotated[
        str,
        typer.Option(
            help="List of: fair, fcfs, lpm, dfs, residual, deadline. all: compare them; "
            "deadline only with --slo-class."
        ),
    ] = "fair",
    lane: LaneOption = 4,
    quantum: QuantumOption = 8192,
    decode_weight: DecodeWeightOption = 2.0,
    pause_prefills: PausePrefillsOption = True,
    weights: WeightsOption = None,
    slo_class: SloClassOption = None,
    step_time: StepTimeOption = None,
    retained_floor: RetainedFloorOption = None,
    session_share: SessionShareOption = None,
    sharing: Annotated[
        str | None,
        typer.Option(
            help="List of: isolated, shared, public [default: isolated,shared; isolated "
            "with --eviction all, --order all or --quotas]."
        ),
    ] = None,
    loop: LoopOption = "open",
    rate: RateOption = None,
    spread: SpreadOption = 0.0,
    seed: SeedOption = 0,
    slo_ttft: SloTtftOption = None,
    slo_tpot: SloTpotOption = None,
    clock: ClockOption = True,
    jobs: Annotated[int, typer.Option(help="Processes at a time.")] = 2,
    cpu_time: Annotated[
        bool,
        typer.Option(
            "--cpu-time",
            help="Put measured CPU time of policies and of the scheduler in the JSON, "
            "which then is another one in every run.",
        ),
    ] = False,
    html_file: HtmlOutput = None,
    json_file: JsonOutput = None,
) -> None:
    """What would another size, policy or sharing rule do?

    Example: stemkv sweep trace.jsonl --memory 8GiB,16GiB,32GiB --html sweep.html

    Example: stemkv sweep trace.jsonl --eviction all --html policies.html
    """
    with errors_explained(_EXTRAS):
        from stemkv.cli.deployment import DeploymentOptions
        from stemkv.cli.orders import OrderOptions, sessions_of
        from stemkv.cli.replay import Outputs
        from stemkv.cli.sweep import SweepOptions, listed, numbers_listed, run_sweep
        from stemkv.cli.traces import TraceOptions
        from stemkv.core.schedule.orders import ORDERS
        from stemkv.sim.arrivals import LoadConfig
        from stemkv.sim.config import ReplayConfig
        from stemkv.sim.hinting import HintRule

        is_workload = workload is not None
        compares = eviction == _ALL
        if compares and not _is_typed(context, "clock"):
            clock = False
            _refuse_clock(context, is_workload=is_workload, remedy="add --clock")
        elif not clock:
            _refuse_clock(context, is_workload=is_workload, remedy="drop --no-clock")
        asked = OrderOptions(
            lane=lane,
            quantum=quantum,
            decode_weight=decode_weight,
            pauses_prefills=pause_prefills,
            weights=weights,
            slo_classes=slo_class,
        )
        compares_orders = order == _ALL
        orders = listed("--order", order)
        if compares_orders:
            orders = tuple(n for n in ORDERS if n != "deadline" or slo_class)
        if sharing is None:
            is_one = compares or compares_orders or quotas
            sharing = "isolated" if is_one else "isolated,shared"
        rate = 1.0 if rate is None else rate
        options = SweepOptions(
            trace=TraceOptions(
                trace=trace,
                format=format,
                map=tuple(map or ()),
                tokens=tokens,
                is_strict=strict,
                limit=limit,
                workload=workload,
                num_requests=requests,
                seed=seed,
            ),
            workload_rate=rate,
            deployment=DeploymentOptions(
                model=model,
                device=device,
                num_devices=devices,
                kv_dtype=kv_dtype,
                weight_dtype=weight_dtype,
                cost=cost,
                block_size=block_size,
            ),
            memory=() if memory is None else listed("--memory", memory),
            num_blocks=() if blocks is None else numbers_listed("--blocks", blocks),
            evictions=() if compares else listed("--eviction", eviction),
            orders=orders,
            sharings=listed("--sharing", sharing),
            config=ReplayConfig(
                num_blocks=1,
                block_size=block_size,
                token_budget=budget,
                max_num_running=max_running,
                num_replicas=replicas,
                routing=routing,
                objective=objective,
                order=asked.config("fair"),
                step_time_s=None if step_time is None else step_time / 1e3,
                sessions=sessions_of(session_share),
                hints=HintRule(name=hints, wrong_share=wrong_hints, seed=seed),
                lookahead=lookahead,
                load=LoadConfig(
                    loop=loop,
                    rate=1.0 if is_workload else rate,
                    spread_s=spread,
                    seed=seed,
                ),
                slo_ttft_s=slo_ttft,
                slo_tpot_s=slo_tpot,
            ),
            quotas=quotas,
            retained_floor=retained_floor,
            has_clock=clock,
            num_jobs=jobs,
            keeps_cpu_time=cpu_time,
            outputs=Outputs(html=html_file, json=json_file),
        )
        code = run_sweep(options)
    if code:
        raise typer.Exit(code)


def export(
    trace: TraceArgument = None,
    out: Annotated[
        Path, typer.Option(help="File to write; - is standard output.")
    ] = Path("-"),
    form: Annotated[
        str, typer.Option("--as", help="What to write: mooncake or bailian.")
    ] = "mooncake",
    salt: Annotated[
        str | None,
        typer.Option(help="Key of the pseudonyms, kept secret [default: random]."),
    ] = None,
    format: FormatOption = None,
    map: MapOption = None,
    tokens: TokensOption = None,
    strict: StrictOption = False,
    limit: LimitOption = None,
    workload: WorkloadOption = None,
    requests: RequestsOption = None,
    seed: SeedOption = 0,
) -> None:
    """Write a trace for others: replayable, without text and without names.

    Example: stemkv export requests.jsonl --out anonymous.jsonl
    """
    with errors_explained(_EXTRAS):
        from stemkv.cli.export import run_export
        from stemkv.cli.traces import TraceOptions

        options = TraceOptions(
            trace=trace,
            format=format,
            map=tuple(map or ()),
            tokens=tokens,
            is_strict=strict,
            limit=limit,
            workload=workload,
            num_requests=requests,
            seed=seed,
        )
        run_export(options, out=out, form=form, salt=salt)
