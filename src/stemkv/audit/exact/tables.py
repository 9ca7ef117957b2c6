"""Tables and data of the audit of exactness.

Owns how its findings are laid out. Judges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stemkv.audit.exact.bits import Tally
from stemkv.audit.exact.branches import Branching
from stemkv.audit.exact.hits import Reached
from stemkv.audit.exact.naive import Reuse
from stemkv.audit.verdict import Table, Verdict
from stemkv.engine.numerics import EXACT

__all__ = [
    "Found",
    "branch_data",
    "branch_tables",
    "num_changed",
    "proof",
    "reuse_data",
    "reuse_table",
    "state_data",
    "state_table",
    "total",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One state, compared and judged."""

    state: str
    verdict: Verdict
    reached: Reached | None  # None: it could not be tried
    tally: Tally
    problem: str = ""


def proof(reached: Reached) -> str:
    """Return what shows that a state was reached, and what is missing for that."""
    missing = [name for name, count in reached.proofs.items() if count < 1]
    text = ", ".join(f"{count:,} {name}" for name, count in reached.proofs.items())
    return f"not reached ({', '.join(missing)}): {text}" if missing else text


def total(results: Sequence[Reuse]) -> Tally:
    """Return the tallies of all results as one."""
    tally = Tally()
    for result in results:
        tally.add(result.tally)
    return tally


def num_changed(results: Sequence[Reuse]) -> int:
    """Return in how many prompts at least one greedy token is another."""
    return sum(result.tally.num_changed_tokens > 0 for result in results)


def state_table(found: Sequence[Found]) -> Table:
    """Return one row per state; relative differences only if bits differ."""
    has_differences = any(each.tally.num_differing for each in found)
    worst = ("worst in KV (measured)", "worst in logits (measured)")
    rows = []
    for each in found:
        reached = each.reached
        differences = (each.tally.worst_kv, each.tally.worst_logits)
        rows.append(
            (
                each.state,
                each.verdict.value,
                len(reached.seen) if reached else 0,
                sum(seen.counts.reused for seen in reached.seen) if reached else 0,
                each.tally.num_values,
                each.tally.num_differing,
                *(differences if has_differences else ()),
                proof(reached) if reached else each.problem,
            )
        )
    return Table(
        title="Every state against a cold run of the same tokens",
        columns=(
            "state",
            "verdict",
            "requests",
            "tokens reused",
            "values",
            "differing",
            *(worst if has_differences else ()),
            "reached by",
        ),
        rows=tuple(rows),
        note=(
            "Values are those of KV in all layers and of the first and last row of "
            "logits. Differences are relative: the norm of the error by that of the truth."
        ),
    )


def reuse_table(by_hand: Mapping[str, Sequence[Reuse]], *, num_greedy: int) -> Table:
    """Return one row per numerics class and kind of chat."""
    rows = []
    for name, results in by_hand.items():
        rules = "padded (exact)" if name == EXACT.name else "none (tolerant)"
        for kind, is_second in (("same text", False), ("second turn", True)):
            some = [r for r in results if r.chat.is_second_turn == is_second]
            if not some:
                continue
            tally = total(some)
            rows.append(
                (
                    rules,
                    kind,
                    len(some),
                    sum(r.num_reused for r in some),
                    tally.num_values,
                    tally.num_differing,
                    tally.worst_kv,
                    tally.worst_logits,
                    f"{tally.num_changed_tokens} of {tally.num_rows}",
                    f"{num_changed(some)} of {len(some)}",
                    tally.worst_gap,
                )
            )
    return Table(
        title="Reuse at any boundary, without and with the padding rules",
        columns=(
            "rules",
            "what was reused",
            "prompts",
            "tokens reused",
            "values",
            "differing",
            "worst in KV (measured)",
            "worst in logits (measured)",
            "tokens changed",
            "prompts changed",
            "widest lead lost (measured)",
        ),
        rows=tuple(rows),
        note=(
            f"Per prompt {num_greedy} greedy tokens of the cold run, teacher-forced. "
            "The lead is that of the token that lost its place, in logits. Second turns "
            "reuse KV that was written while decoding."
        ),
    )


def branch_tables(branching: Branching | str) -> list[Table]:
    """Return who held which blocks, and the checksums of the shared ones."""
    if isinstance(branching, str):
        return []
    return [
        Table(
            title="Branches of one prefix",
            columns=("branch", "tokens", "shared blocks", "own blocks", "copied from"),
            rows=tuple(
                (
                    branch.name,
                    branch.num_tokens,
                    _ids(branch.shared_blocks),
                    _ids(branch.own_blocks),
                    ", ".join(
                        f"{c.num_tokens} slots of block {c.source} into {c.target}"
                        for c in branch.copies
                    ),
                )
                for branch in branching.branches
            ),
            note=(
                "Block ids. The last sample to write keeps the block that the others "
                "copied; nobody else holds it then."
            ),
        ),
        Table(
            title="Shared blocks before and after all branches",
            columns=("block", "branches", "SHA-256 before", "SHA-256 after"),
            rows=tuple(
                (
                    block,
                    sum(block in b.shared_blocks for b in branching.branches),
                    branching.before[block][:16],
                    branching.after[block][:16],
                )
                for block in branching.before
            ),
            note="First 16 digits; the report's data has all 64.",
        ),
    ]


def _ids(block_ids: Sequence[int]) -> str:
    return ", ".join(map(str, block_ids))


def state_data(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Return what is known of every state."""
    return [
        {
            "state": each.state,
            "verdict": each.verdict.value,
            "proofs": dict(each.reached.proofs) if each.reached else {},
            "problem": each.problem,
            **_tally_data(each.tally),
        }
        for each in found
    ]


def reuse_data(by_hand: Mapping[str, Sequence[Reuse]]) -> dict[str, Any]:
    """Return every prompt's numbers by numerics class."""
    return {
        name: [
            {
                "topic": result.chat.topic,
                "is_second_turn": result.chat.is_second_turn,
                "num_prompt_tokens": len(result.prompt),
                "num_reused_tokens": result.num_reused,
                **_tally_data(result.tally),
            }
            for result in results
        ]
        for name, results in by_hand.items()
    }


def branch_data(branching: Branching | str) -> dict[str, Any]:
    """Return all blocks and checksums."""
    if isinstance(branching, str):
        return {"problem": branching}
    return {
        "before": {str(b): digest for b, digest in branching.before.items()},
        "after": {str(b): digest for b, digest in branching.after.items()},
        "branches": [
            {
                "branch": branch.name,
                "num_tokens": branch.num_tokens,
                "shared_blocks": list(branch.shared_blocks),
                "own_blocks": list(branch.own_blocks),
                "copies": [
                    {
                        "source": copy.source,
                        "target": copy.target,
                        "num_tokens": copy.num_tokens,
                    }
                    for copy in branch.copies
                ],
            }
            for branch in branching.branches
        ],
        **_tally_data(branching.tally),
    }


def _tally_data(tally: Tally) -> dict[str, Any]:
    return {
        "num_values": tally.num_values,
        "num_differing_values": tally.num_differing,
        "worst_kv_difference": _finite(tally.worst_kv),
        "worst_logits_difference": _finite(tally.worst_logits),
        "num_logits_rows": tally.num_rows,
        "num_changed_tokens": tally.num_changed_tokens,
        "widest_lead_lost": _finite(tally.worst_gap),
    }


def _finite(value: float) -> float | str:
    """Return what JSON can hold: it knows no NaN."""
    return value if value - value == 0 else str(value)
