"""`--fail-on`: conditions on a replay's numbers that make it fail.

Owns their syntax, their names and what they mean for the exit code: 1 if one is met, 3
if one cannot be judged, else 0.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from stemkv.errors import ConfigError
from stemkv.measure.results import ReplayResult, TraceFacts
from stemkv.sim.sequence import SequenceResult

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
_SHARES = {*_RATES, "goodput-share"}
_OF_REUSE = {*_RATES, "saved-seconds"}
_WITHOUT_SERVICE = {"skipped", "refused"}  # true also where nothing finished
_SYNTAX = re.compile(r"\s*([a-z0-9-]+)\s*([<>]=?)\s*(\S+?)\s*(%|ms|s|)\s*")


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
    result: SequenceResult, trace: TraceFacts
) -> dict[str, float | None]:
    """Return the numbers that a replay without a clock has."""
    return {
        "hit-rate": result.hits.hit_rate,
        "steady-hit-rate": result.hits.steady_hit_rate,
        "request-hit-rate": result.request_hit_rate,
        "saved-seconds": result.hits.saved_s,
        "skipped": trace.num_skipped_lines,
    }


def judge(
    thresholds: Sequence[Threshold],
    numbers: Mapping[str, float | None],
    trace: TraceFacts,
    *,
    num_finished: int,
) -> tuple[Finding, ...]:
    """Compare numbers with their limits.

    Unknown prompts reuse nothing in a replay, but might have in truth: where there are
    some, what reuse came to is a lower bound, and where there are no others it is no
    number at all. Where nothing finished there are no numbers of service either.
    """
    return tuple(
        Finding(threshold=each, judgement=judgement, because=because)
        for each in thresholds
        for judgement, because in [
            _judged(each, numbers[each.name], trace, num_finished)
        ]
    )


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
    name, comparison, digits, unit = found.groups()
    if name not in names:
        needs_clock = name in NUMBERS
        raise ConfigError(
            f"--fail-on {text}: {name} "
            f"{'needs the clock; drop --no-clock' if needs_clock else 'is no number'}; "
            f"there are {', '.join(names)}"
        )
    try:
        number = float(digits)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"--fail-on {text}: {digits!r:.40} is no finite number")
    return Threshold(
        text=text.strip(),
        name=name,
        comparison=comparison,
        limit=_limit(text, name, number, unit),
    )


def _limit(text: str, name: str, number: float, unit: str) -> float:
    """Return a limit in the unit of its number: shares of 1, seconds or a count."""
    if name in _SHARES:
        limit = number / 100 if unit == "%" else number
        if unit not in ("", "%") or not 0 <= limit <= 1:
            remedy = f"; for {number:g} percent write {number:g}%" if not unit else ""
            raise ConfigError(
                f"--fail-on {text}: {name} is a share, from 0 to 1 or from 0% to "
                f"100%{remedy}"
            )
        return limit
    is_time = name.endswith("-seconds") or name.partition("-")[0] in _LATENCIES
    if unit == "%" or (unit and not is_time):
        kind = "a time, in seconds as 0.5 or 500ms" if is_time else "no share or time"
        raise ConfigError(f"--fail-on {text}: {name} is {kind}")
    return number / 1000 if unit == "ms" else number


def _judged(
    threshold: Threshold, value: float | None, trace: TraceFacts, num_finished: int
) -> tuple[Judgement, str]:
    name = threshold.name
    if not num_finished and name not in _WITHOUT_SERVICE:
        return Judgement.UNDECIDED, "no request finished"
    if value is None or math.isnan(value):
        if name.startswith("goodput"):
            because = "no limits were given; give --slo-ttft or --slo-tpot"
            return Judgement.UNDECIDED, because
        return Judgement.UNDECIDED, "this replay has no such number"
    is_met = threshold.is_met(value)
    judgement = Judgement.MET if is_met else Judgement.NOT_MET
    if name not in _OF_REUSE or not trace.num_opaque:
        return judgement, f"it is {value:.6g}"
    if trace.is_opaque:
        return Judgement.UNDECIDED, "only lengths of the prompts are known"
    # What is above a limit stays above it, whatever the unknown prompts would add.
    if is_met != threshold.comparison.startswith(">"):
        judgement = Judgement.UNDECIDED
    return judgement, (
        f"it is at least {value:.6g}: {trace.num_opaque:,} of {trace.num_requests:,} "
        f"prompts are unknown"
    )
