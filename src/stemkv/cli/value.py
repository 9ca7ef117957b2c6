"""`stemkv value`: is it worth keeping one prefix?

Owns the order of things: check the call, replay from all sides, write, print, judge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from stemkv.cli.conclusion import headline, paragraphs
from stemkv.cli.deployment import Deployment, deploy
from stemkv.cli.outputs import (
    PeoplesConsole,
    check_outputs,
    counted,
    print_section,
    write_text,
)
from stemkv.cli.trace_options import DeploymentOptions
from stemkv.cli.value_tables import charts, tables
from stemkv.measure.flood import FloodResult
from stemkv.measure.results import GIB, to_json
from stemkv.measure.value import ValueResult
from stemkv.report.page import Page
from stemkv.report.value import value_page
from stemkv.sim.flood import FloodConfig, study_flood
from stemkv.sim.pricing import parse_memory
from stemkv.sim.value import ValueConfig, study_value

__all__ = ["ValueOptions", "run_value"]

_MEMORY = 24 * GIB
_INCONCLUSIVE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOptions:
    """The case, as it was typed."""

    deployment: DeploymentOptions = field(default_factory=DeploymentOptions)
    prefix_tokens: int = 12_000
    share: float = 0.4
    memory: str | None = None
    num_tenants: int = 4
    num_requests: int = 300
    seed: int = 0
    rates: tuple[float, ...] = ()
    slo_ttft_s: float = 2.0
    slo_tpot_s: float = 0.1


def run_value(
    options: ValueOptions, *, html_file: Path | None, json_file: Path | None
) -> int:
    """Replay, print and write; return 0, or 3 if nothing could be concluded."""
    check_outputs(
        {"--html": html_file, "--json": json_file}, options.deployment.inputs()
    )
    deployment = deploy(options.deployment)
    config = ValueConfig(
        prefix_tokens=options.prefix_tokens,
        share=options.share,
        memory_bytes=_memory(options, deployment),
        num_tenants=options.num_tenants,
        num_requests=options.num_requests,
        seed=options.seed,
        rates=options.rates,
        slo_ttft_s=options.slo_ttft_s,
        slo_tpot_s=options.slo_tpot_s,
    )
    with counted("replaying", "replays") as progress:
        result = study_value(config, deployment.costs, progress=progress)
    with counted("flooding", "replays") as progress:
        flood = study_flood(
            _flood_of(config, result), deployment.costs, progress=progress
        )
    page = deployment.noted(
        page_of(result, flood), deployment.blocks_of([str(config.memory_bytes)])
    )
    if json_file is not None:
        beside = {"flood": flood}
        write_text(to_json(result, schema="stemkv.value/1", beside=beside), json_file)
    if html_file is not None:
        write_text(page.render(), html_file)
    console = PeoplesConsole(json_file=json_file)
    _print(console, result, flood, page)
    if html_file is not None:
        console.print(f"wrote {html_file}", markup=False)
    return 0 if result.is_conclusive else _INCONCLUSIVE


def page_of(result: ValueResult, flood: FloodResult | None = None) -> Page:
    """Return the page of a study, and of what a flood leaves of it."""
    return value_page(
        headline=headline(result),
        paragraphs=paragraphs(result, flood),
        sections=[*charts(result), *tables(result, flood)],
        config={"costs": result.cost_source, **result.config},
    )


def _flood_of(config: ValueConfig, result: ValueResult) -> FloodConfig:
    """Return a flood of the same mix: with it, all that reuse off can serve arrives."""
    flood = FloodConfig(rate=1.0).flood
    return FloodConfig(
        rate=result.capacity.off.requests_per_s / (1 + flood),
        prefix_tokens=config.prefix_tokens,
        share=config.share,
        memory_bytes=config.memory_bytes,
        num_tenants=config.num_tenants,
        num_requests=max(1, config.num_requests // 2),
        seed=config.seed,
    )


def _memory(options: ValueOptions, deployment: Deployment) -> int:
    if options.memory is not None:
        return parse_memory(options.memory)
    return min(_MEMORY, deployment.memory_bytes or _MEMORY)


def _print(
    console: Console, result: ValueResult, flood: FloodResult, page: Page
) -> None:
    console.print(page.headline, markup=False, style="bold")
    for text in page.paragraphs:
        console.print(text, markup=False)
    for section in tables(result, flood):
        print_section(console, section)
    console.print(f"costs: {result.cost_source}", markup=False, style="dim")
