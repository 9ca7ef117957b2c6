"""`stemkv sweep`: one trace under every combination of sizes and policies.

Owns reading the lists, the order of things, and the table. Replays are `sim.sweep`'s.

No list of eviction policies means that all are compared: without a clock, as the gap
between LRU and a clairvoyant policy is one of a single order of requests; and where the
clock is wanted, with it as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stemkv.cli.deployment import Deployment, deploy
from stemkv.cli.options import remedy_as_typed
from stemkv.cli.orders import check_names
from stemkv.cli.outputs import (
    STDOUT,
    PeoplesConsole,
    counted,
    print_section,
    say,
    write_text,
)
from stemkv.cli.quotas import check_in
from stemkv.cli.replay import Outputs, with_memory
from stemkv.cli.summary import print_notes, print_sentences
from stemkv.cli.trace_options import DeploymentOptions, LoadOptions, TraceOptions
from stemkv.cli.traces import load_trace, say_if_open
from stemkv.core.retention.policies import EVICTIONS as ONLINE_EVICTIONS
from stemkv.errors import ConfigError
from stemkv.measure.gap import BASELINE, compared, with_gaps
from stemkv.measure.results import SweepCell, SweepResult, to_json
from stemkv.report import Section
from stemkv.report.orders import order_tables
from stemkv.report.policies import policy_tables
from stemkv.report.sweep import is_conclusive, numbers_label, sweep_page
from stemkv.report.wording import per_cent
from stemkv.sim.config import (
    CLAIRVOYANT,
    EVICTIONS,
    ReplayConfig,
    check_online,
)
from stemkv.sim.curves import lru_curves, units_in
from stemkv.sim.hinting import HintRule
from stemkv.sim.settings import cannot_hit, replay_settings, trace_facts
from stemkv.sim.sweep import (
    Grid,
    Play,
    UntimedPlay,
    is_hinted,
    measured_cell,
    sweep,
    timed_cell,
)
from stemkv.sim.trace import Trace

__all__ = ["SweepOptions", "listed", "numbers_listed", "run_sweep"]

_INCONCLUSIVE = 3
# What a sweep varies, or nothing on its command line sets.
_VARIED = {
    *("num_blocks", "memory_gib", "eviction", "order", "sharing", "public_min_tenants"),
    *("max_request_tokens", "max_steps_awaiting", "watermark"),
}
_SHARES_LEFT = (1 / 8, 1 / 4, 1 / 2, 1.0)  # of the memory that the device leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """A sweep as it was asked for."""

    trace: TraceOptions
    deployment: DeploymentOptions
    memory: Sequence[str] = ()
    num_blocks: Sequence[int] = ()
    evictions: Sequence[str]  # empty: compare all there are
    orders: Sequence[str]
    sharings: Sequence[str]
    config: ReplayConfig  # what all configurations have in common
    load: LoadOptions  # from which it was made, besides what needs a deployment
    has_clock: bool = True
    num_jobs: int = 2
    keeps_cpu_time: bool = False  # measured, so that equal sweeps differ in JSON
    outputs: Outputs

    def __post_init__(self) -> None:
        if self.num_jobs < 1:
            raise ConfigError(f"--jobs must be at least 1, got {self.num_jobs}")
        if self.has_clock:
            for eviction in self.evictions:
                check_online(eviction)
        self.trace.check()
        if self.load.quotas is not None and not self.evictions:
            raise ConfigError(
                "--quotas need the clock, and a comparison of all policies has none; "
                "list them, as in --eviction reuse_index,lru"
            )
        self.outputs.check(self.trace, self.deployment, self.load.quotas)


def listed(option: str, text: str) -> tuple[str, ...]:
    """Return the words of a list with commas; each once."""
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise ConfigError(f"{option} has an empty entry: {text!r:.80}")
    if len(set(words)) < len(words):
        raise ConfigError(f"{option} has an entry twice: {text!r:.80}")
    return words


def numbers_listed(option: str, text: str) -> tuple[int, ...]:
    """Return the whole numbers of a list with commas."""
    words = listed(option, text)
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise ConfigError(f"{option} takes numbers of at least 1, got {word!r:.40}")
    return tuple(map(int, words))


def run_sweep(options: SweepOptions) -> int:
    """Replay every configuration, write and print; return 0, or 3 if nothing shows."""
    deployment = deploy(options.deployment, block_size=options.config.block_size)
    given = deployment.blocks_of(options.memory, options.num_blocks)
    sizes = tuple(sorted({*(given or deployment.blocks_left(*_SHARES_LEFT))}))
    base = options.config.sized(max(sizes))
    base = with_memory(base, options.load, deployment, min(sizes))
    every = EVICTIONS if not options.has_clock else ONLINE_EVICTIONS
    grid = Grid(
        num_blocks=sizes,
        evictions=tuple(options.evictions) or every,
        orders=tuple(options.orders),
        sharings=tuple(options.sharings),
    )
    console = PeoplesConsole(json_file=options.outputs.json)
    configs = grid.configs(base)
    trace = load_trace(options.trace, rate=options.load.workload_rate)
    check_names(base.core.order, trace)
    say_if_open(trace, base.load.loop)
    cache = base.core.cache if options.has_clock else None
    for text in cannot_hit(trace, cache):
        say(f"warning: {remedy_as_typed(text)}")
    if not (options.has_clock and options.evictions):
        for size in grid.num_blocks:
            units_in(trace, size, base.block_size)
    if options.load.quotas is not None:
        check_in(options.load.quotas, trace, configs, deployment.costs)
    result = SweepResult(
        trace=trace_facts(trace, cache),
        config=_settings(base, has_clock=options.has_clock),
        cost_source=deployment.costs.source,
        cells=_cells(options, trace, configs, deployment, has_clock=options.has_clock),
        curves=lru_curves(
            trace,
            grid.rules(base),
            deployment.costs,
            sizes=grid.num_blocks,
            block_size=base.block_size,
        ),
    )
    if options.has_clock and not options.evictions:
        every_one = replace(grid, evictions=EVICTIONS, orders=grid.orders[:1])
        clockless = every_one.configs(base)
        result = replace(
            result,
            clockless=_cells(options, trace, clockless, deployment, has_clock=False),
        )
    page = deployment.noted(sweep_page(result), grid.num_blocks)
    outputs = options.outputs
    if outputs.html is not None:
        write_text(page.render(), outputs.html)
        say(f"wrote {outputs.html}")
    if outputs.json is not None:
        written = result if options.keeps_cpu_time else _repeatable(result)
        write_text(to_json(written, schema="stemkv.sweep/1"), outputs.json)
        if outputs.json != STDOUT:
            say(f"wrote {outputs.json}")
    print_sentences(console, page)
    for section in policy_tables(result) if is_conclusive(result) else ():
        print_section(console, section)
    for section in order_tables(result):
        print_section(console, section)
    if options.has_clock or not compared(result):
        print_section(console, _table(result))
    print_notes(console, result.trace)
    return 0 if is_conclusive(result) else _INCONCLUSIVE


def _cells(
    options: SweepOptions,
    trace: Trace,
    configs: Sequence[ReplayConfig],
    deployment: Deployment,
    *,
    has_clock: bool,
) -> tuple[SweepCell, ...]:
    """Replay configurations with a clock, or without one and with their gaps."""
    compares = len({config.eviction for config in configs}) > 1
    if not has_clock:
        configs = [*configs, *_baselines(trace, configs)]
    with counted(
        "sweeping" if has_clock else "comparing", "configurations"
    ) as progress:
        progress(0, len(configs))
        cells = sweep(
            trace,
            configs,
            deployment.costs,
            _play(configs, has_clock=has_clock, compares=compares),
            num_jobs=options.num_jobs,
            progress=progress,
        )
    return cells if has_clock else with_gaps(cells)


def _play(configs: Sequence[ReplayConfig], *, has_clock: bool, compares: bool) -> Play:
    if not has_clock:
        return UntimedPlay(measures=compares)
    compares_orders = len({config.core.order.name for config in configs}) > 1
    return measured_cell if compares_orders else timed_cell


def _baselines(
    trace: Trace, configs: Sequence[ReplayConfig]
) -> tuple[ReplayConfig, ...]:
    """Return LRU without hints for each clairvoyant one, where there are hints."""
    return tuple(
        replace(
            config.evicting(BASELINE), hints=HintRule(name="none"), untimed_lookahead=0
        )
        for config in configs
        if config.eviction == CLAIRVOYANT and is_hinted(trace, config)
    )


def _repeatable(result: SweepResult) -> SweepResult:
    """Return the result without what is measured, which differs from run to run."""

    def without(cells: Sequence[SweepCell]) -> tuple[SweepCell, ...]:
        return tuple(
            replace(
                cell,
                policy_cpu_s=None,
                scheduling=None
                if cell.scheduling is None
                else replace(cell.scheduling, scheduler_cpu_s=None),
            )
            for cell in cells
        )

    return replace(
        result, cells=without(result.cells), clockless=without(result.clockless)
    )


def _settings(
    config: ReplayConfig, *, has_clock: bool
) -> dict[str, str | int | float | None]:
    """Return what all configurations have in common."""
    found = replay_settings(config, config.block_size) | {
        "clock": "virtual",
        "slo_ttft_s": config.slo_ttft_s,
        "slo_tpot_s": config.slo_tpot_s,
    }
    if has_clock:
        return {name: found[name] for name in found if name not in _VARIED}
    return {
        **{name: found[name] for name in ("block_size", "objective", "hints")},
        "lookahead": config.untimed_lookahead,
        "clock": "none: one request after another",
    }


def _table(result: SweepResult) -> Section:
    cells = result.cells
    words = [
        name
        for name in ("eviction", "order", "sharing")
        if len({getattr(cell, name) for cell in cells}) > 1
    ]
    columns = ["GiB", *words, "hit rate %", "saved s"]
    is_timed = any(cell.ttft_p50_s is not None for cell in cells)
    if is_timed:
        columns += ["saved s per GiB·s", "TTFT p50 s", "TTFT p99 s", "worst tenant p99"]
        if any(cell.goodput_rps is not None for cell in cells):
            columns.append("goodput per s")
    columns.append("evicted GiB")
    if "eviction" in words:
        columns.append("regret tokens")
    columns.append("refused")
    return Section(
        title="Configurations",
        columns=columns,
        rows=[_row(cell, words, columns, is_timed=is_timed) for cell in cells],
        label=numbers_label(result),
    )


def _row(
    cell: SweepCell, words: Sequence[str], columns: Sequence[str], *, is_timed: bool
) -> list[str | int | float | None]:
    row: list[str | int | float | None] = [cell.gib]
    row += [getattr(cell, name) for name in words]
    row += [per_cent(cell.hit_rate), cell.saved_s]
    if is_timed:
        row += [cell.seconds_per_gib_s, cell.ttft_p50_s, cell.ttft_p99_s]
        row.append(cell.worst_tenant_ttft_p99_s)
        if "goodput per s" in columns:
            row.append(cell.goodput_rps)
    row.append(cell.evicted_gib)
    if "eviction" in words:
        row.append(cell.regret_tokens)
    return [*row, cell.num_refused]
