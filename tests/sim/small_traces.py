"""Small traces whose units are letters, and what the slow twins are built from.

`trace("abc", "abd")`: two prompts of three units that share two. Equal letters at one
place behind equal ones get one id, as in a real trace. The twins know a unit by what it
is: who may see it and all letters up to it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace, TraceRequest

__all__ = ["UNIT", "Unit", "paths", "random_traces", "rules", "trace"]

UNIT = 10  # tokens

Unit = tuple[str, str, str]  # identity, who sees it, letters up to and including it


def trace(
    *prompts: str,
    tenants: str = "a",
    identities: str = "m",
    lacking: int = 0,
    unit_size: int = UNIT,
) -> Trace:
    """One request a prompt; tenants and identities (one letter each) go round.

    `lacking`: tokens that the last unit of each prompt is short of being full.
    """
    ids: dict[str, int] = {}
    requests = []
    for index, prompt in enumerate(prompts):
        heads = [prompt[: end + 1] for end in range(len(prompt))]
        requests.append(
            TraceRequest(
                request_id=f"request-{index}",
                input_length=max(1, len(prompt) * unit_size - lacking),
                output_length=1,
                units=array("i", [ids.setdefault(head, len(ids)) for head in heads]),
                arrival_s=float(index),
                tenant=tenants[index % len(tenants)],
                identity=identities[index % len(identities)],
            )
        )
    return Trace(name="small", format="test", unit_size=unit_size, requests=requests)


def rules() -> list[SharingRule]:
    return [
        SharingRule(name="isolated"),
        SharingRule(name="shared"),
        SharingRule(name="public"),
        SharingRule(name="public", public_min_tenants=3),
    ]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A random trace and the letters it was made of."""

    prompts: tuple[str, ...]
    trace: Trace


@st.composite
def random_traces(
    draw: st.DrawFn, *, letters: str = "xy", ending: str = "", max_requests: int = 24
) -> Drawn:
    """Prompts over few letters, so that they share much; `ending` closes each one.

    With an `ending` no prompt is a proper prefix of another.
    """
    prompts = draw(
        st.lists(st.text(letters, max_size=6), min_size=1, max_size=max_requests)
    )
    prompts = [prompt + ending for prompt in prompts]
    tenants = draw(st.text("abc", min_size=1, max_size=6))
    identities = draw(st.text("mn", min_size=1, max_size=3))
    lacking = draw(st.integers(0, UNIT - 1))
    drawn = trace(*prompts, tenants=tenants, identities=identities, lacking=lacking)
    return Drawn(tuple(prompts), drawn)


def paths(drawn: Drawn, rule: SharingRule) -> list[list[Unit]]:
    """Every request's units as what they are, root first."""
    return [
        [
            (
                request.identity,
                _seen_by(drawn, request, rule, prompt[:end]),
                prompt[:end],
            )
            for end in range(1, len(prompt) + 1)
        ]
        for prompt, request in zip(drawn.prompts, drawn.trace.requests, strict=True)
    ]


def _seen_by(drawn: Drawn, request: TraceRequest, rule: SharingRule, head: str) -> str:
    if rule.name == "shared":
        return "everybody"
    if rule.name == "public":
        showing = {tenant for tenant, whole in _shown(drawn, request.identity, head)}
        if len(showing) >= rule.public_min_tenants:
            return "public"
    return request.tenant


def _shown(drawn: Drawn, identity: str, head: str) -> Iterator[tuple[str, str]]:
    """Who shows these letters as whole units, by the definition."""
    for prompt, request in zip(drawn.prompts, drawn.trace.requests, strict=True):
        whole = prompt[: request.input_length // drawn.trace.unit_size]
        if request.identity == identity and whole.startswith(head):
            yield request.tenant, whole
