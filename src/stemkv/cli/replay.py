"""`stemkv replay`: a trace through the real core, for people and for scripts.

Owns the order of things: check the call, read, replay, study, write, print, judge.
Numbers are `sim`'s, pages `report`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from stemkv.cli.deployment import Deployment, deploy
from stemkv.cli.options import remedy_as_typed
from stemkv.cli.orders import check_names
from stemkv.cli.outputs import (
    STDOUT,
    PeoplesConsole,
    check_outputs,
    counted,
    replaced,
    say,
    write_text,
)
from stemkv.cli.quotas import check_in, read_quotas
from stemkv.cli.sequence import SequenceReport, print_sequence, sequence_page
from stemkv.cli.summary import print_findings, print_replay
from stemkv.cli.thresholds import (
    CLOCKLESS_NUMBERS,
    NUMBERS,
    Threshold,
    exit_code,
    judge,
    numbers_of,
    numbers_of_sequence,
    parse_thresholds,
)
from stemkv.cli.trace_options import DeploymentOptions, LoadOptions, TraceOptions
from stemkv.cli.traces import load_trace, say_if_open
from stemkv.measure.results import GIB, ReplayResult, to_json
from stemkv.report.replay import replay_page
from stemkv.sim.config import ReplayConfig, check_online
from stemkv.sim.curves import Study, study, with_study
from stemkv.sim.replay import replay
from stemkv.sim.settings import cannot_hit, trace_facts
from stemkv.sim.trace import Trace
from stemkv.sim.untimed import Untimed

__all__ = ["DEMO", "Demo", "Outputs", "ReplayOptions", "run_replay", "with_memory"]

_INCONCLUSIVE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """What `--demo` replays unless told otherwise: isolation that costs something.

    Memory holds the shared prefix twice with little room beside it, and three tenants
    each need it.
    """

    workload: str = "worked-example"
    num_requests: int = 600
    num_tenants: int = 3
    rate: float = 2.0  # requests per second; an H100 is nearly busy with it
    memory: str = "4GiB"
    slo_ttft_s: float = 1.0
    slo_tpot_s: float = 0.05
    html: Path = Path("stemkv-replay.html")

    def trace(self, typed: TraceOptions) -> TraceOptions:
        """Return what to replay, as far as nobody said otherwise."""
        requests = self.num_requests if typed.requests is None else typed.requests
        return replace(typed, workload=self.workload, requests=requests)

    def load(self, typed: LoadOptions) -> LoadOptions:
        """Return how it arrives and how soon it must be served, likewise."""
        own = {
            "rate": self.rate,
            "slo_ttft": self.slo_ttft_s,
            "slo_tpot": self.slo_tpot_s,
        }
        left = {name: own[name] for name in own if getattr(typed, name) is None}
        return replace(typed, **left)  # type: ignore[arg-type]


DEMO: Final = Demo()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Files to write; `-` as JSON is standard output."""

    html: Path | None = None
    json: Path | None = None
    parquet: Path | None = None
    timeline: Path | None = None

    def check(
        self,
        trace: TraceOptions,
        deployment: DeploymentOptions,
        quotas: Path | None = None,
    ) -> None:
        """Raise `ConfigError` if one cannot be written, or would be over what is read."""
        outputs = {
            "--html": self.html,
            "--json": self.json,
            "--parquet": self.parquet,
            "--timeline": self.timeline,
        }
        inputs = {**trace.inputs(), **deployment.inputs(), "--quotas": quotas}
        check_outputs(outputs, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """A replay as it was asked for."""

    trace: TraceOptions
    num_tenants: int | None = None  # of a workload
    deployment: DeploymentOptions
    memory: str | None = None
    num_blocks: int | None = None
    config: ReplayConfig  # its num_blocks follow from the above
    load: LoadOptions  # from which it was made, besides what needs a deployment
    has_clock: bool = True
    has_curves: bool = True
    outputs: Outputs
    fail_on: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.has_clock:
            check_online(self.config.eviction)
        self.trace.check()
        self.outputs.check(self.trace, self.deployment, self.load.quotas)


def run_replay(options: ReplayOptions) -> int:
    """Replay, write and print; return the exit code."""
    # What is wrong with the call shows now and not after minutes of work.
    names = NUMBERS if options.has_clock else CLOCKLESS_NUMBERS
    thresholds = parse_thresholds(options.fail_on, names)
    deployment = deploy(options.deployment, block_size=options.config.block_size)
    config = options.config.sized(_num_blocks(options, deployment))
    config = with_memory(config, options.load, deployment, config.num_blocks)
    console = PeoplesConsole(json_file=options.outputs.json)
    trace = load_trace(
        options.trace, rate=options.load.workload_rate, num_tenants=options.num_tenants
    )
    check_names(config.core.order, trace)
    say_if_open(trace, config.load.loop)
    for text in cannot_hit(trace, config.core.cache if options.has_clock else None):
        say(f"warning: {remedy_as_typed(text)}")
    run = _run_timed if options.has_clock else _run_sequence
    return run(console, trace, config, deployment, options, thresholds)


def with_memory(
    config: ReplayConfig, load: LoadOptions, deployment: Deployment, num_blocks: int
) -> ReplayConfig:
    """Return the settings with quotas and a floor, in memory of so many blocks."""
    if load.quotas is not None:
        config = replace(config, quotas=read_quotas(load.quotas))
    if load.retained_floor is None:
        return config
    floor = deployment.floor_of(load.retained_floor, num_blocks)
    scheduler = replace(config.core.scheduler, retained_floor_blocks=floor)
    return replace(config, core=replace(config.core, scheduler=scheduler))


def _num_blocks(options: ReplayOptions, deployment: Deployment) -> int:
    given = deployment.blocks_of(
        [] if options.memory is None else [options.memory],
        [] if options.num_blocks is None else [options.num_blocks],
    )
    return (given or deployment.blocks_left(1.0))[0]


def _run_timed(
    console: Console,
    trace: Trace,
    config: ReplayConfig,
    deployment: Deployment,
    options: ReplayOptions,
    thresholds: Sequence[Threshold],
) -> int:
    if options.load.quotas is not None:
        check_in(options.load.quotas, trace, [config], deployment.costs)
    with counted("replaying", "requests") as progress:
        result = replay(trace, config, deployment.costs, progress=progress)
    if options.has_curves:
        found = _study(trace, config, deployment)
        result = with_study(result, found)
    page = deployment.noted(replay_page(result), [config.num_blocks])
    outputs = options.outputs
    if outputs.html is not None:
        _write(page.render(), outputs.html)
    _write_details(result, outputs)
    if outputs.json is not None:
        _write(to_json(result, schema="stemkv.replay/1"), outputs.json)
    print_replay(console, result, page)
    findings = judge(
        thresholds, numbers_of(result), result.trace, num_finished=result.num_finished
    )
    print_findings(console, findings)
    code = exit_code(findings)
    if not result.num_finished:
        console.print("inconclusive: no request finished", style="bold yellow")
        return code or _INCONCLUSIVE
    return code or (_INCONCLUSIVE if result.trace.is_opaque else 0)


def _run_sequence(
    console: Console,
    trace: Trace,
    config: ReplayConfig,
    deployment: Deployment,
    options: ReplayOptions,
    thresholds: Sequence[Threshold],
) -> int:
    with counted("replaying", "requests") as progress:
        run = Untimed().replay(trace, config, deployment.costs, progress=progress)
    sequence = run.found
    none = Study(curves=(), bounds=())
    found = _study(trace, config, deployment) if options.has_curves else none
    block_bytes = config.block_size * deployment.costs.bytes_per_token
    gib = config.num_blocks * block_bytes / GIB
    report = SequenceReport(
        trace=trace_facts(trace),
        config={
            "num_blocks": config.num_blocks,
            "block_size": config.block_size,
            "memory_gib": gib,
            "eviction": config.eviction,
            "objective": config.core.eviction.objective,
            "hints": str(config.hints),
            "lookahead": config.untimed_lookahead,
            "sharing": config.sharing.name,
            "public_min_tenants": config.sharing.public_min_tenants,
        },
        cost_source=deployment.costs.source,
        num_blocks=config.num_blocks,
        gib=gib,
        sequence=sequence,
        curves=found.curves,
        bounds=found.bounds,
    )
    page = deployment.noted(sequence_page(report), [config.num_blocks])
    outputs = options.outputs
    if outputs.html is not None:
        _write(page.render(), outputs.html)
    if outputs.json is not None:
        _write(to_json(report, schema="stemkv.sequence/1"), outputs.json)
    print_sequence(console, report, page)
    findings = judge(
        thresholds,
        numbers_of_sequence(sequence, report.trace),
        report.trace,
        num_finished=sequence.num_requests,
    )
    print_findings(console, findings)
    return exit_code(findings) or (_INCONCLUSIVE if report.trace.is_opaque else 0)


def _study(trace: Trace, config: ReplayConfig, deployment: Deployment) -> Study:
    with Console(stderr=True).status("curves and bounds"):
        return study(
            trace,
            config.sharing,
            deployment.costs,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_replicas=config.num_replicas,
        )


def _write_details(result: ReplayResult, outputs: Outputs) -> None:
    if outputs.parquet is not None:
        from stemkv.report.parquet import facts_of, write_requests

        with replaced(outputs.parquet) as path:
            write_requests(result.requests, path, facts=facts_of(result))
        say(f"wrote {outputs.parquet}")
    if outputs.timeline is not None:
        from stemkv.report.perfetto import trace_events

        _write(trace_events(result), outputs.timeline)


def _write(text: str, file: Path) -> None:
    write_text(text, file)
    if file != STDOUT:
        say(f"wrote {file}")
