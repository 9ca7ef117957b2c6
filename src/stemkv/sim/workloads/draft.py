"""Requests before they have a place in a trace.

Owns the sorting by arrival and what follows from it: ids, and the index of the request
that one waits for. Generators make drafts and know neither.
"""

from __future__ import annotations

from dataclasses import dataclass

from stemkv.sim.trace import Trace, TraceRequest
from stemkv.sim.workloads.prompts import UNIT_SIZE, Prompt

__all__ = ["SECONDS_PER_OUTPUT_TOKEN", "Draft", "trace_of"]

# An open loop must fix when the next turn of a session comes, before anybody has served
# the one it answers. This pace is assumed for that; a closed loop doesn't use it.
SECONDS_PER_OUTPUT_TOKEN = 0.02


@dataclass(slots=True, kw_only=True, eq=False)
class Draft:
    """One request; `parent` is the one that it follows `think_s` after."""

    prompt: Prompt
    output_length: int
    arrival_s: float
    tenant: str
    session: str | None = None
    parent: Draft | None = None
    think_s: float = 0.0

    def next_arrival_s(self, think_s: float) -> float:
        """Return when a request `think_s` after this one ended arrives, at that pace."""
        answer_s = self.output_length * SECONDS_PER_OUTPUT_TOKEN
        return self.arrival_s + answer_s + think_s


def trace_of(drafts: list[Draft], *, name: str) -> Trace:
    """Return the drafts as a trace, the first arrival at 0.

    Of equal arrivals the one drafted first is first, so a parent is before its
    children, and equal drafts give an equal trace.
    """
    ordered = sorted(drafts, key=lambda draft: draft.arrival_s)
    index_of = {id(draft): index for index, draft in enumerate(ordered)}
    start_s = ordered[0].arrival_s if ordered else 0.0
    requests = [
        TraceRequest(
            request_id=f"{name}-{index:06d}",
            input_length=draft.prompt.length,
            output_length=draft.output_length,
            units=draft.prompt.units,
            arrival_s=draft.arrival_s - start_s,
            tenant=draft.tenant,
            session=draft.session,
            parent=None if draft.parent is None else index_of[id(draft.parent)],
            think_s=draft.think_s,
        )
        for index, draft in enumerate(ordered)
    ]
    notes = []
    if any(request.parent is not None for request in requests):
        notes.append(
            f"arrivals within sessions suppose {SECONDS_PER_OUTPUT_TOKEN:g} s per "
            f"output token; a closed loop takes the replay's own times"
        )
    return Trace(
        name=name,
        format="generated",
        unit_size=UNIT_SIZE,
        requests=requests,
        num_lines=len(requests),
        notes=notes,
    )
