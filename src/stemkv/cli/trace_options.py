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
    "DecodeWeightOption",
    "DeviceOption",
    "DevicesOption",
    "FormatOption",
    "HintsOption",
    "HtmlOutput",
    "JsonOutput",
    "KvDtypeOption",
    "LaneOption",
    "LimitOption",
    "LookaheadOption",
    "LoopOption",
    "MapOption",
    "MaxRunningOption",
    "ModelNameOption",
    "ObjectiveOption",
    "PausePrefillsOption",
    "QuantumOption",
    "QuotasOption",
    "RateOption",
    "ReplicasOption",
    "RequestsOption",
    "RetainedFloorOption",
    "RoutingOption",
    "SeedOption",
    "SessionShareOption",
    "SloClassOption",
    "SloTpotOption",
    "SloTtftOption",
    "SpreadOption",
    "StepTimeOption",
    "StrictOption",
    "TokensOption",
    "TraceArgument",
    "WeightDtypeOption",
    "WeightsOption",
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
LaneOption = Annotated[
    int,
    typer.Option(
        help="fair: one in so many of a tenant's prefill tokens goes to its oldest "
        "request; bounds everybody's wait."
    ),
]
QuantumOption = Annotated[
    int, typer.Option(help="fair: tokens a tenant gets in a round, times its weight.")
]
DecodeWeightOption = Annotated[
    float, typer.Option(help="fair: what a decoded token counts, in prefill tokens.")
]
PausePrefillsOption = Annotated[
    bool,
    typer.Option(
        help="fair, residual: an unfinished prefill may wait while others go on; better "
        "where computing is short, worse where memory is."
    ),
]
WeightsOption = Annotated[
    str | None, typer.Option(help="fair: of tenants, as in acme=2,globex=0.5.")
]
SloClassOption = Annotated[
    str | None,
    typer.Option(
        "--slo-class",
        help="deadline: seconds to the first token by class, as in acme=2,globex=10; in "
        "a replay the class of a request is its tenant.",
    ),
]
StepTimeOption = Annotated[
    float | None,
    typer.Option(
        help="Milliseconds that a step with prefills may take, as predicted; 0.8 of the "
        "promised time per token is a good choice [default: the budget alone]."
    ),
]
SessionShareOption = Annotated[
    float | None,
    typer.Option(
        help="Experiment: share of the memory that active sessions may work with; the "
        "others wait [default: no limit]."
    ),
]
RetainedFloorOption = Annotated[
    str | None,
    typer.Option(
        help="Retained memory that admission leaves, as in 2GiB; for fleets of agents "
        "that outgrow memory [default: none]."
    ),
]
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
