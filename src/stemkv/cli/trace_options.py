"""The options of all commands that take a trace, as they are typed.

Owns their names and help texts, and imports nothing that takes time: help is quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "BlockSizeOption",
    "BudgetOption",
    "ClockOption",
    "CostOption",
    "DeviceOption",
    "DevicesOption",
    "FormatOption",
    "HintsOption",
    "HtmlOutput",
    "JsonOutput",
    "KvDtypeOption",
    "LimitOption",
    "LookaheadOption",
    "LoopOption",
    "MapOption",
    "MaxRunningOption",
    "ModelNameOption",
    "ObjectiveOption",
    "QuotasOption",
    "RateOption",
    "ReplicasOption",
    "RequestsOption",
    "RoutingOption",
    "SeedOption",
    "SloTpotOption",
    "SloTtftOption",
    "SpreadOption",
    "StrictOption",
    "TokensOption",
    "TraceArgument",
    "WeightDtypeOption",
    "WorkloadOption",
    "WrongHintsOption",
]

TraceArgument = Annotated[
    str | None,
    typer.Argument(help="Trace or log, also .gz or .zst; - is standard input."),
]
FormatOption = Annotated[
    str | None,
    typer.Option("--format", help="Of the trace [default: told by its first records]."),
]
MapOption = Annotated[
    list[str] | None,
    typer.Option("--map", help="ROLE=PATH, as in tenant=metadata.team; repeatable."),
]
TokensOption = Annotated[
    str | None,
    typer.Option(
        help="Text to tokens: words, chars4 or a tokenizer.json [default: chars4]."
    ),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Stop at the first bad line.")
]
LimitOption = Annotated[
    int | None, typer.Option(help="Read no more than so many requests.")
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(help="Replay made-up requests of this kind instead of a trace."),
]
RequestsOption = Annotated[
    int | None, typer.Option(help="Of a workload [default: 1000].")
]

ModelNameOption = Annotated[
    str | None,
    typer.Option("--model", help="Name or config.json [default: llama-3.1-8b]."),
]
DeviceOption = Annotated[
    str | None, typer.Option(help="What the model runs on [default: h100].")
]
DevicesOption = Annotated[
    int, typer.Option("--devices", help="Devices of one replica, tensor-parallel.")
]
KvDtypeOption = Annotated[
    str | None, typer.Option(help="bf16, fp16 or fp8 [default: bf16].")
]
WeightDtypeOption = Annotated[
    str | None, typer.Option(help="bf16, fp16, fp8 or mxfp4 [default: as published].")
]
CostOption = Annotated[
    Path | None,
    typer.Option("--cost", help="Costs by `stemkv calibrate` instead of a model."),
]
BlockSizeOption = Annotated[int, typer.Option(help="Tokens per block.")]
BudgetOption = Annotated[int, typer.Option(help="Most tokens in one step.")]
MaxRunningOption = Annotated[int, typer.Option(help="Most requests in one step.")]
ReplicasOption = Annotated[int, typer.Option("--replicas", help="Equal engines.")]
RoutingOption = Annotated[
    str, typer.Option(help="Of replicas: round_robin, session or prefix.")
]

ObjectiveOption = Annotated[
    str,
    typer.Option(help="What eviction shall save: tokens or seconds."),
]
QuotasOption = Annotated[
    Path | None,
    typer.Option(
        "--quotas",
        help='JSON of what tenants may keep, as in {"tenants": {"acme": {"floor": '
        '"2GiB", "cap": "8GiB", "weight": 2}}, "public": "1GiB"}.',
    ),
]
HintsOption = Annotated[
    str,
    typer.Option(
        help="What requests say of the future: trace (its own fields) or none; from "
        "hindsight, to see what it would be worth: session_end or next_use."
    ),
]
WrongHintsOption = Annotated[
    float,
    typer.Option(help="Share of next_use hints that are drawn at random, as 0.2."),
]
LookaheadOption = Annotated[
    int | None,
    typer.Option(
        help="Waiting requests whose cached prefixes go late [default: 32; 0 without "
        "a clock]."
    ),
]

LoopOption = Annotated[
    str, typer.Option(help="open: as recorded; closed: turns wait for answers.")
]
RateOption = Annotated[
    float | None,
    typer.Option(help="Of a trace: times faster; of a workload: requests/s."),
]
SpreadOption = Annotated[
    float,
    typer.Option(help="Spread equal arrival times over so many seconds."),
]
SeedOption = Annotated[int, typer.Option(help="Of everything drawn.")]
SloTtftOption = Annotated[
    float | None, typer.Option("--slo-ttft", help="For goodput: TTFT within, seconds.")
]
SloTpotOption = Annotated[
    float | None, typer.Option("--slo-tpot", help="For goodput: TPOT within, seconds.")
]
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
