"""Which units of a prompt were seen before, and by whom last.

Owns the one fact about a trace from which bounds and curves follow without a cache:
the runs of leading units that some earlier request touched last. Knows no capacity and
no policy.

A request touches all its units. So whoever touches a unit has touched everything before
it, and along a prompt the last toucher can only get older: a few runs describe a prompt
of hundreds of units. And what later requests left of an earlier prompt is always its
end.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import repeat
from operator import neg
from typing import Final, NamedTuple

from stemkv.core.prefix.identity import Domain
from stemkv.errors import InvariantError
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace

__all__ = ["Reuses", "Run", "find_reuses"]

_NOBODY: Final = -1  # before every request


class Run(NamedTuple):
    """Units `[start, end)` of a prompt that request `last` touched last before it."""

    last: int  # index of the request
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuses:
    """The runs of every request, first units first, and how many units there are."""

    trace: Trace
    runs: list[list[Run]]  # by request; units after the last run were never seen
    num_distinct: int  # units that differ, by namespace and domain too


def find_reuses(trace: Trace, rule: SharingRule) -> Reuses:
    """Return who touched what last, among requests that may share; O(units)."""
    public = {
        namespace: {unit for prefix in prefixes for unit in prefix}
        for namespace, prefixes in rule.public_prefixes(trace).items()
    }
    # A unit in public prefixes is one for the whole namespace (`None`), others are one
    # per domain.
    last: dict[tuple[bytes, Domain | None], dict[int, int]] = {}
    runs: list[list[Run]] = []
    for index, request in enumerate(trace.requests):
        namespace, domain = rule.of(request)
        units = request.units
        num_public = 0
        declared = public.get(namespace)
        if declared:
            while num_public < len(units) and units[num_public] in declared:
                num_public += 1
        before: list[int] = []
        for scope, part in (
            ((namespace, None), units[:num_public]),
            ((namespace, domain), units[num_public:]),
        ):
            if part:
                seen = last.setdefault(scope, {})
                before += map(seen.get, part, repeat(_NOBODY))
                seen.update(dict.fromkeys(part, index))
        found = _runs(before)
        if found is None:
            raise InvariantError(
                f"request {request.request_id!r:.80} of trace {trace.name!r:.80}: its "
                f"units are not chained; an id stands for different prefixes"
            )
        runs.append(found)
    return Reuses(
        trace=trace,
        runs=runs,
        num_distinct=sum(len(seen) for seen in last.values()),
    )


def _runs(before: list[int]) -> list[Run] | None:
    """Cut the last touchers of a prompt's units into runs.

    `None` if they do not get older all the way: then somebody touched a unit and not
    what is before it. There are many units and few runs, so each run is found by
    bisection, behind which the next toucher is older, and then seen to be one.
    """
    runs: list[Run] = []
    start = 0
    while start < len(before):
        last = before[start]
        end = bisect_right(before, -last, start, key=neg)
        if before[start:end].count(last) < end - start:
            return None
        runs.append(Run(last, start, end))
        start = end
    if runs and runs[-1].last == _NOBODY:
        runs.pop()
    return runs
