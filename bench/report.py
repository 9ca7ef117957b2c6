"""Prints what a benchmark measured beside what was promised.

Owns the table, the JSON file and the exit code that all benchmarks share. Knows
nothing of what is measured.
"""

from __future__ import annotations

import json
import math
import os
import platform
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

__all__ = ["Bar", "finish", "parser", "pin_to_one_core"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One number and what was promised about it."""

    name: str
    measured: float
    unit: str
    limit: float | None = None  # None: information, promises nothing
    sense: Literal["at most", "at least"] = "at most"
    # exact: a count; estimated: by a model of costs
    basis: Literal["measured", "exact", "estimated"] = "measured"

    @property
    def is_met(self) -> bool:
        """Whether the promise holds; a NaN keeps none."""
        if self.limit is None:
            return True
        if self.sense == "at most":
            return self.measured <= self.limit
        return self.measured >= self.limit

    @property
    def shortfall(self) -> str:
        """What to say when it does not hold."""
        limit = "nothing" if self.limit is None else number(self.limit)
        return (
            f"{self.name}: {number(self.measured)} {self.unit}, "
            f"promised {self.sense} {limit} {self.unit}"
        )


def parser(description: str) -> ArgumentParser:
    """Return the argument parser every benchmark starts from."""
    result = ArgumentParser(description=description)
    result.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    result.add_argument(
        "--check", action="store_true", help="exit 1 if a promise is not kept"
    )
    result.add_argument("--quick", action="store_true", help="fewer repeats")
    return result


def pin_to_one_core() -> str:
    """Stay on one core from now on, where the system can; say where this runs."""
    where = f"{_cpu_model()}, Python {platform.python_version()}"
    if not hasattr(os, "sched_setaffinity"):
        return f"{where}, not pinned to a core"
    core = max(os.sched_getaffinity(0))  # low cores serve most interrupts
    os.sched_setaffinity(0, {core})
    return f"{where}, pinned to core {core}"


def finish(
    title: str,
    bars: Sequence[Bar],
    options: Namespace,
    *,
    facts: Mapping[str, str],
) -> int:
    """Print the table, write the JSON file if asked for, and return the exit code."""
    print(f"{title}\n")
    for name, fact in facts.items():
        print(f"{name}: {fact}")
    print()
    print("\n".join(_table(bars)))
    if options.json is not None:
        _write_json(options.json, title, bars, facts)
    if not options.check:
        return 0
    missed = [bar for bar in bars if not bar.is_met]
    for bar in missed:
        print(f"falls short: {bar.shortfall}")
    if not missed:
        print("all promises kept")
    return 1 if missed else 0


def number(value: float) -> str:
    """Write a number with three significant digits, counts in full."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 2 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def _table(bars: Sequence[Bar]) -> list[str]:
    rows = [("what", "value", "unit", "promised", "", "basis")]
    for bar in bars:
        promised = verdict = ""
        if bar.limit is not None:
            promised = f"{bar.sense} {number(bar.limit)}"
            verdict = "kept" if bar.is_met else "MISSED"
        value = number(bar.measured)
        rows.append((bar.name, value, bar.unit, promised, verdict, bar.basis))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i == 1 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return lines


def _write_json(
    path: Path, title: str, bars: Sequence[Bar], facts: Mapping[str, str]
) -> None:
    document = {
        "title": title,
        "facts": dict(facts),
        "bars": [{**asdict(bar), "is_met": bar.is_met} for bar in bars],
    }
    text = json.dumps(document, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
