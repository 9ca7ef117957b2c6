"""What an audit found, in a form that can be printed, stored and drawn.

Owns the shape of results. Knows nothing of any attack, nor of how results are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["AuditReport", "Check", "Table", "Verdict"]


class Verdict(Enum):
    """What an audit, or one of its checks, says."""

    HOLDS = "holds"
    BROKEN = "broken"
    INCONCLUSIVE = "inconclusive"  # it ran and cannot tell, or could not run


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One claim that was put to the test."""

    claim: str  # a sentence that is true or not
    verdict: Verdict
    evidence: str  # the numbers, in a sentence
    is_control: bool = False  # shows that the attack works where it should


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows that people compare. Cells are text, numbers or `None` for nothing."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | int | float | None, ...], ...]
    note: str = ""  # how to read it
    label: str = "exact"  # "exact", "measured" or "estimated": what the numbers are

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), (self.title, row)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The outcome of one audit."""

    name: str  # "identity", "exact", "isolation"
    headline: str  # one sentence
    checks: tuple[Check, ...]
    tables: tuple[Table, ...] = ()
    method: Mapping[str, str] = field(default_factory=dict)  # what was run, on what
    data: Mapping[str, Any] = field(default_factory=dict)  # JSON-ready, everything

    @property
    def verdict(self) -> Verdict:
        """The worst of the checks; an audit without checks is inconclusive."""
        verdicts = {check.verdict for check in self.checks}
        for worst in (Verdict.BROKEN, Verdict.INCONCLUSIVE):
            if worst in verdicts:
                return worst
        return Verdict.HOLDS if verdicts else Verdict.INCONCLUSIVE

    def as_json(self) -> dict[str, Any]:
        """Return the report as values that `json` can write."""
        return {
            "audit": self.name,
            "schema": 1,
            "verdict": self.verdict.value,
            "headline": self.headline,
            "checks": [
                {
                    "claim": check.claim,
                    "verdict": check.verdict.value,
                    "evidence": check.evidence,
                    "is_control": check.is_control,
                }
                for check in self.checks
            ],
            "tables": [
                {
                    "title": table.title,
                    "label": table.label,
                    "note": table.note,
                    "columns": list(table.columns),
                    "rows": [list(row) for row in table.rows],
                }
                for table in self.tables
            ],
            "method": dict(self.method),
            "data": dict(self.data),
        }
