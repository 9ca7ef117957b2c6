"""The commands that take a trace.

Owns what only one of them has. Groups of options are `trace_options`', knobs of the core
`expand`'s; what a command does is in the module of its name.
"""

from __future__ import annotations

from dataclasses import replace as with_changes
from pathlib import Path
from typing import Annotated

import typer

from stemkv.cli.expand import expanded
from stemkv.cli.trace_options import (
    DeploymentOptions,
    LoadOptions,
    TraceOptions,
    is_typed,
    refuse_clock,
)
from stemkv.core.core import CoreConfig

__all__ = ["export", "replay", "sweep"]

_EXTRAS = "cli,sim,report"
_ALL = "all"  # eviction policies or orders

ClockOption = Annotated[
    bool,
    typer.Option(help="Without: one request after another, hits only, much faster."),
]
JsonOutput = Annotated[
    Path | None,
    typer.Option("--json", help="Write everything as JSON; - is standard output."),
]
HtmlOutput = Annotated[
    Path | None, typer.Option("--html", help="Write the report as one HTML file.")
]


@expanded(_EXTRAS)
def replay(
    context: typer.Context,
    *,
    trace: TraceOptions,
    demo: Annotated[
        bool, typer.Option("--demo", help="Replay a made-up workload; no input.")
    ] = False,
    deployment: DeploymentOptions,
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
    core: CoreConfig,
    eviction: Annotated[
        str,
        typer.Option(
            help="Which block goes: reuse_index, lru, lfu_da, gdsf or s3fifo; with "
            "--no-clock also clairvoyant."
        ),
    ] = "reuse_index",
    order: Annotated[
        str,
        typer.Option(
            help="Who goes first: fair, fcfs, lpm, dfs, residual or deadline."
        ),
    ] = "fair",
    sharing: Annotated[
        str, typer.Option(help="Between tenants: isolated, shared or public.")
    ] = "isolated",
    load: LoadOptions,
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
    from stemkv.cli.replay import DEMO, Outputs, ReplayOptions, run_replay
    from stemkv.errors import ConfigError
    from stemkv.sim.sharing import SharingRule

    if eviction == _ALL:
        raise ConfigError(
            "a replay has one --eviction; to compare all, `stemkv sweep --eviction all`"
        )
    is_workload = demo or trace.workload is not None
    if not clock:
        refuse_clock(context, is_workload=is_workload, remedy="drop --no-clock")
    if demo:
        if trace.trace is not None or trace.workload is not None:
            raise ConfigError("--demo takes no trace and no workload")
        trace, load = DEMO.trace(trace), DEMO.load(load)
        memory = DEMO.memory if memory is None and blocks is None else memory
        html_file = DEMO.html if html_file is None else html_file
    config = load.config(core, is_workload=is_workload)
    config = config.evicting(eviction).ordering(order)
    code = run_replay(
        ReplayOptions(
            trace=trace,
            num_tenants=DEMO.num_tenants if demo else None,
            deployment=deployment,
            memory=memory,
            num_blocks=blocks,
            config=with_changes(config, sharing=SharingRule(name=sharing)),
            load=load,
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
    )
    if code:
        raise typer.Exit(code)


@expanded(_EXTRAS)
def sweep(
    context: typer.Context,
    *,
    trace: TraceOptions,
    deployment: DeploymentOptions,
    core: CoreConfig,
    load: LoadOptions,
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
    eviction: Annotated[
        str,
        typer.Option(
            help="List of: reuse_index, lru, lfu_da, gdsf, s3fifo; with --no-clock also "
            "clairvoyant. all: compare them, without a clock unless --clock is there."
        ),
    ] = "reuse_index",
    order: Annotated[
        str,
        typer.Option(
            help="List of: fair, fcfs, lpm, dfs, residual, deadline. all: compare them; "
            "deadline only with --slo-class."
        ),
    ] = "fair",
    sharing: Annotated[
        str | None,
        typer.Option(
            help="List of: isolated, shared, public [default: isolated,shared; isolated "
            "with --eviction all, --order all or --quotas]."
        ),
    ] = None,
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
    from stemkv.cli.replay import Outputs
    from stemkv.cli.sweep import SweepOptions, listed, numbers_listed, run_sweep
    from stemkv.core.schedule.orders import ORDERS

    is_workload = trace.workload is not None
    compares, compares_orders = eviction == _ALL, order == _ALL
    if compares and not is_typed(context, "clock"):
        clock = False
        refuse_clock(context, is_workload=is_workload, remedy="add --clock")
    elif not clock:
        refuse_clock(context, is_workload=is_workload, remedy="drop --no-clock")
    orders = listed("--order", order)
    if compares_orders:
        orders = tuple(n for n in ORDERS if n != "deadline" or core.order.slo_ttft_s)
    if sharing is None:
        is_one = compares or compares_orders or load.quotas
        sharing = "isolated" if is_one else "isolated,shared"
    code = run_sweep(
        SweepOptions(
            trace=trace,
            deployment=deployment,
            memory=() if memory is None else listed("--memory", memory),
            num_blocks=() if blocks is None else numbers_listed("--blocks", blocks),
            evictions=() if compares else listed("--eviction", eviction),
            orders=orders,
            sharings=listed("--sharing", sharing),
            config=load.config(core, is_workload=is_workload),
            load=load,
            has_clock=clock,
            num_jobs=jobs,
            keeps_cpu_time=cpu_time,
            outputs=Outputs(html=html_file, json=json_file),
        )
    )
    if code:
        raise typer.Exit(code)


@expanded(_EXTRAS)
def export(
    *,
    trace: TraceOptions,
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
) -> None:
    """Write a trace for others: replayable, without text and without names.

    Example: stemkv export requests.jsonl --out anonymous.jsonl
    """
    from stemkv.cli.export import run_export

    trace.check()
    run_export(trace, out=out, form=form, salt=salt)
