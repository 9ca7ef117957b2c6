"""What people type of all commands that take a trace, in groups that belong together.

Owns names, defaults and help texts, and which go together. Imports nothing that takes
time: help is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stemkv.cli.expand import argument, option
from stemkv.cli.knobs import KNOBS
from stemkv.core.core import CoreConfig
from stemkv.errors import ConfigError

if TYPE_CHECKING:
    from stemkv.sim.config import ReplayConfig

__all__ = [
    "DeploymentOptions",
    "LoadOptions",
    "TraceOptions",
    "is_typed",
    "parse_map",
    "refuse_clock",
]

# What means nothing where requests go one after another, besides knobs of the core.
_OF_CLOCK = {
    *("--replicas", "--routing", "--order", "--retained-floor", "--quotas", "--loop"),
    *("--rate", "--spread", "--slo-ttft", "--slo-tpot", "--parquet", "--timeline"),
    *(knob.option.partition("/")[0] for knob in KNOBS if knob.needs_clock),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What is replayed, as it was typed."""

    trace: str | None = argument(
        None, "Trace or log, also .gz or .zst; - is standard input."
    )
    workload: str | None = option(
        None, "Replay made-up requests of this kind instead of a trace."
    )
    requests: int | None = option(None, "Of a workload [default: 1000].")
    format: str | None = option(
        None, "Of the trace [default: told by its first records]."
    )
    map: Sequence[str] = option(
        (), "ROLE=PATH, as in tenant=metadata.team; repeatable."
    )
    tokens: str | None = option(
        None, "Text to tokens: words, chars4 or a tokenizer.json [default: chars4]."
    )
    strict: bool = option(False, "Stop at the first bad line.", "--strict")
    limit: int | None = option(None, "Read no more than so many requests.")
    seed: int = option(0, "Of everything drawn.")

    def check(self) -> None:
        """Raise `ConfigError` for what does not go together."""
        if self.trace is None and self.workload is None:
            raise ConfigError("nothing to replay; name a TRACE or a --workload")
        if self.trace is not None and self.workload is not None:
            raise ConfigError(
                f"replay either the trace {self.trace} or the workload "
                f"{self.workload}, not both"
            )
        if self.trace is not None:
            wrong = {"--requests": self.requests is not None}
            remedy = "is for a workload; a trace takes --limit"
        else:
            wrong = {
                "--format": self.format is not None,
                "--map": bool(self.map),
                "--tokens": self.tokens is not None,
                "--strict": self.strict,
                "--limit": self.limit is not None,
            }
            remedy = "is for a trace; a workload takes --requests"
        for name, is_given in wrong.items():
            if is_given:
                raise ConfigError(f"{name} {remedy}")
        parse_map(self.map)

    def inputs(self) -> dict[str, str | Path | None]:
        """Return the files that are read, by the words that name each."""
        return {"the trace": self.trace, "--tokens": self.tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentOptions:
    """What serves the requests, as it was typed."""

    model: str | None = option(None, "Name or config.json [default: llama-3.1-8b].")
    device: str | None = option(None, "What the model runs on [default: h100].")
    devices: int = option(1, "Devices of one replica, tensor-parallel.")
    kv_dtype: str | None = option(None, "bf16, fp16 or fp8 [default: bf16].")
    weight_dtype: str | None = option(
        None, "bf16, fp16, fp8 or mxfp4 [default: as published]."
    )
    cost: Path | None = option(None, "Costs by `stemkv calibrate` instead of a model.")

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ConfigError(f"--devices must be at least 1, got {self.devices}")
        if self.cost is None:
            return
        described = {
            "--model": self.model is not None,
            "--device": self.device is not None,
            "--devices": self.devices != 1,
            "--kv-dtype": self.kv_dtype is not None,
            "--weight-dtype": self.weight_dtype is not None,
        }
        for name, is_given in described.items():
            if is_given:
                raise ConfigError(
                    f"--cost {self.cost} says what steps cost and how large KV is; "
                    f"{name} would say so again"
                )

    def inputs(self) -> dict[str, str | Path | None]:
        """Return the files that are read, by the option that names each."""
        return {"--cost": self.cost, "--model": self.model}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How requests come, where they go, and what is said of their future."""

    replicas: int = option(1, "Equal engines.")
    routing: str = option("round_robin", "Of replicas: round_robin, session or prefix.")
    quotas: Path | None = option(
        None,
        'JSON of what tenants may keep, as in {"tenants": {"acme": {"floor": "2GiB", '
        '"cap": "8GiB", "weight": 2}}, "public": "1GiB"}.',
    )
    retained_floor: str | None = option(
        None,
        "Retained memory that admission leaves, as in 2GiB; for fleets of agents that "
        "outgrow memory [default: none].",
    )
    hints: str = option(
        "trace",
        "What requests say of the future: trace (its own fields) or none; from "
        "hindsight, to see what it would be worth: session_end or next_use.",
    )
    wrong_hints: float = option(
        0.0, "Share of next_use hints that are drawn at random, as 0.2."
    )
    lookahead: int | None = option(
        None,
        "Waiting requests whose cached prefixes go late [default: 32; 0 without a clock].",
    )
    loop: str = option("open", "open: as recorded; closed: turns wait for answers.")
    rate: float | None = option(
        None, "Of a trace: times faster; of a workload: requests/s."
    )
    spread: float = option(0.0, "Spread equal arrival times over so many seconds.")
    seed: int = option(0, "Of everything drawn.")
    slo_ttft: float | None = option(None, "For goodput: TTFT within, seconds.")
    slo_tpot: float | None = option(None, "For goodput: TPOT within, seconds.")

    @property
    def workload_rate(self) -> float:
        """Requests per second, of a workload."""
        return 1.0 if self.rate is None else self.rate

    def config(self, core: CoreConfig, *, is_workload: bool) -> ReplayConfig:
        """Return the settings of replicas with such a core; raises `ConfigError`."""
        from stemkv.sim.arrivals import LoadConfig
        from stemkv.sim.config import ReplayConfig
        from stemkv.sim.hinting import HintRule

        if self.lookahead is not None:
            scheduler = replace(core.scheduler, lookahead=self.lookahead)
            core = replace(core, scheduler=scheduler)
        return ReplayConfig(
            core=core,
            num_replicas=self.replicas,
            routing=self.routing,
            hints=HintRule(
                name=self.hints, wrong_share=self.wrong_hints, seed=self.seed
            ),
            untimed_lookahead=self.lookahead or 0,
            load=LoadConfig(
                loop=self.loop,
                rate=1.0 if is_workload else self.workload_rate,
                spread_s=self.spread,
                seed=self.seed,
            ),
            slo_ttft_s=self.slo_ttft,
            slo_tpot_s=self.slo_tpot,
        )


def parse_map(entries: Sequence[str]) -> dict[str, str]:
    """Return role → path of the entries `role=path`; each role once."""
    fields: dict[str, str] = {}
    for entry in entries:
        role, is_separated, path = (part.strip() for part in entry.partition("="))
        if not (role and is_separated and path):
            raise ConfigError(
                f"--map takes ROLE=PATH, as in tenant=metadata.team, got {entry!r:.80}"
            )
        if role in fields:
            raise ConfigError(f"--map gives {role} twice: {fields[role]} and {path}")
        fields[role] = path
    return fields


def refuse_clock(context: typer.Context, *, is_workload: bool, remedy: str) -> None:
    """Raise `ConfigError` for options that were typed and need the clock."""
    for parameter in context.command.params:
        option = parameter.opts[0]
        if is_workload and option == "--rate":
            continue  # it makes the workload
        if option in _OF_CLOCK and is_typed(context, parameter.name or ""):
            raise ConfigError(f"{option} needs the clock; {remedy}")


def is_typed(context: typer.Context, parameter: str) -> bool:
    """Whether a parameter was on the command line."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"
