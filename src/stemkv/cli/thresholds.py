"""`--fail-on`: conditions on a replay's numbers that make it fail.

Owns their syntax, their names and what they mean for the exit code: 1 if one is met, 3
if one cannot be judged, else 0.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from stemkv.errors import ConfigError
from stemkv.measure.results import ReplayResult
from stemkv.sim.sequence import SequenceResult
from stemkv.sim.trace import Trace

__all__ = [
    "CLOCKLESS_NUMBERS",
    "NUMBERS",
    "Finding",
    "Judgement",
    "Threshold",
    "exit_code",
    "judge",
    "numbers_of",
    "numbers_of_sequence",
    "parse_thresholds",
]

_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"} | {
    "queue": "queue"
}
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
_RATES = ("hit-rate", "steady-hit-rate", "request-hit-rate")
CLOCKLESS_NUMBERS: Final = (*_RATES, "saved-seconds", "skipped")
NUMBERS: Final = (
    *CLOCKLESS_NUMBERS,
    *(f"{name}-{each}" for name in _LATENCIES for each in _STATISTICS),
    "goodput",
    "goodput-share",
    "refused",
    "preemptions",
    "stalls",
    "stall-seconds",
    "evicted-blocks",
    "regret-tokens",
)
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SYNTAX = re.compile(r"\s*([a-z0-9-]+)\s*([<>]=?)\s*([^\s%]+)\s*(%?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One condition; `text` is how it was typed."""

    text: str
    name: str
    comparison: str
    limit: float

    def is_met(self, value: float) -> bool:
        """Return whether a value is beyond the limit."""
        return _COMPARISONS[self.comparison](value, self.limit)


class Judgement(Enum):
    """What became of a condition."""

    MET = "met"
    NOT_MET = "not met"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A condition and what became of it, in words too."""

    threshold: Threshold
    judgement: Judgement
    because: str


def parse_thresholds(
    texts: Sequence[str], names: Sequence[str] = NUMBERS
) -> tuple[Threshold, ...]:
    """Read conditions such as `hit-rate<30%` on any of `names`."""
    return tuple(_parse(text, names) for text in texts)


def numbers_of(result: ReplayResult) -> dict[str, float | None]:
    """Return every number that a condition may be on; `None` where there is none."""
    numbers: dict[str, float | None] = {
        "hit-rate": result.tokens.hit_rate,
        "steady-hit-rate": result.steady_hit_rate,
        "request-hit-rate": result.request_hit_rate,
        "saved-seconds": result.saved.seconds,
        "skipped": result.trace.num_skipped_lines,
        "goodput": result.goodput_rps,
        "goodput-share": result.goodput_share,
        "refused": result.num_refused,
        "preemptions": result.num_preemptions,
        "stalls": result.num_stalls,
        "stall-seconds": result.stall_s,
        "evicted-blocks": result.num_evicted_blocks,
        "regret-tokens": result.regret_tokens,
    }
    summaries = {summary.name: summary for summary in result.latencies}
    for word, name in _LATENCIES.items():
        summary = summaries.get(name)
        for each in _STATISTICS:
            numbers[f"{word}-{each}"] = (
                None if summary is None else getattr(summary, each)
            )
    return numbers


def numbers_of_sequence(
    result: SequenceResult, trace: Trace
) -> dict[str, float | None]:
    """Return the numbers that a replay without a clock has."""
    return {
        "hit-rate": result.hits.hit_rate,
        "steady-hit-rate": result.hits.steady_hit_rate,
        "request-hit-rate": result.request_hit_rate,
        "saved-seconds": result.hits.saved_s,
        "skipped": len(trace.problems),
    }


def judge(
    thresholds: Sequence[Threshold],
    numbers: Mapping[str, float | None],
    trace: Trace,
) -> tuple[Finding, ...]:
    """Compare numbers with their limits.

    A rate of hits says nothing where no two requests can share: traces of lengths know
    no prompts.
    """
    return tuple(_judged(thresholds, numbers, has_prefixes=_has_prefixes(trace)))


def exit_code(findings: Sequence[Finding]) -> int:
    """Return what a script should see: the worst that was found."""
    judgements = {finding.judgement for finding in findings}
    if Judgement.MET in judgements:
        return 1
    return 3 if Judgement.UNDECIDED in judgements else 0


def _parse(text: str, names: Sequence[str]) -> Threshold:
    found = _SYNTAX.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"--fail-on takes NAME<LIMIT, NAME<=LIMIT, NAME>LIMIT or NAME>=LIMIT, as in "
            f"hit-rate<30% or ttft-p99>2, got {text!r:.80}"
        )
    name, comparison, digits, percent = found.groups()
    if name not in names:
        needs_clock = name in NUMBERS
        raise ConfigError(
            f"--fail-on {text}: {name} "
            f"{'needs the clock; drop --no-clock' if needs_clock else 'is no number'}; "
            f"there are {', '.join(names)}"
        )
    try:
        limit = float(digits) / (100 if percent else 1)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ConfigError(f"--fail-on {text}: {digits!r:.40} is no finite number")
    return Threshold(text=text.strip(), name=name, comparison=comparison, limit=limit)


def _has_prefixes(trace: Trace) -> bool:
    """Return whether any two requests have something in common.

    Ids are chained, so they would have the first unit in common.
    """
    first = [request.units[0] for request in trace.requests if request.units]
    return len(set(first)) < len(first)


def _judged(
    thresholds: Sequence[Threshold],
    numbers: Mapping[str, float | None],
    *,
    has_prefixes: bool,
) -> Iterator[Finding]:
    for threshold in thresholds:
        value = numbers[threshold.name]
        is_of_hits = threshold.name in (*_RATES, "saved-seconds")
        if value is None or math.isnan(value):
            judgement, because = Judgement.UNDECIDED, "this replay has no such number"
            if threshold.name.startswith("goodput"):
                because = "no limits were given; give --slo-ttft or --slo-tpot"
        elif is_of_hits and not has_prefixes:
            judgement = Judgement.UNDECIDED
            because = (
                "no two requests of the trace have a prefix in common, as in traces "
                "that tell lengths only"
            )
        else:
            is_met = threshold.is_met(value)
            judgement = Judgement.MET if is_met else Judgement.NOT_MET
            because = f"it is {value:.6g}"
        yield Finding(threshold=threshold, judgement=judgement, because=because)
