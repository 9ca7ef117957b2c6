"""Sessions put on one clock: which of them run at once, and until when.

Owns how a trace of sessions becomes another timeline of the same sessions, and units
joined to larger ones. Knows no file format, no cache and no policy. What a session asks
and in which order stays as it is; equal input and seed give an equal trace.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace, TraceRequest

__all__ = ["cut_at", "in_units_of", "overlapped"]

_PAUSE_SIGMA = 1.0  # of the logarithm; the middle two thirds are 0.4 to 2.7 medians
_GRID_S = 1e-6  # times are rounded to it, so that sums of draws print alike everywhere


def overlapped(
    trace: Trace, *, spread_s: float, seed: int, median_pause_s: float | None = None
) -> Trace:
    """Return the same sessions, started uniformly within `spread_s` seconds.

    Within a session the recorded gaps are kept, or, with `median_pause_s`, replaced by
    lognormal ones of that median: for traces without a clock. A request without a
    session is one of its own. Starts are drawn in order of first appearance, so
    `spread_s` decides how many sessions run at once, and `seed` which ones.
    """
    if not 0 <= spread_s < math.inf:
        raise ConfigError(f"spread_s must be at least 0 and finite, got {spread_s}")
    if median_pause_s is not None and not 0 < median_pause_s < math.inf:
        raise ConfigError(
            f"median_pause_s must be above 0 and finite, got {median_pause_s}"
        )
    rng = random.Random(seed)
    times = [0.0] * len(trace.requests)
    for indices in _sessions(trace):
        at = rng.uniform(0, spread_s)
        before = trace.requests[indices[0]].arrival_s
        for number, index in enumerate(indices):
            arrival_s = trace.requests[index].arrival_s
            if median_pause_s is None:
                at += arrival_s - before
            elif number:
                at += rng.lognormvariate(math.log(median_pause_s), _PAUSE_SIGMA)
            before = arrival_s
            times[index] = round(at / _GRID_S) * _GRID_S
    pauses = "recorded gaps kept"
    if median_pause_s is not None:
        pauses = f"gaps drawn with a median of {median_pause_s:g} s"
    note = f"sessions start uniformly within {spread_s:,.0f} s (seed {seed}), {pauses}"
    return _reordered(trace, times, note, has_drawn_pauses=median_pause_s is not None)


def cut_at(trace: Trace, end_s: float) -> Trace:
    """Return the requests that arrive before `end_s`, in which sessions may end early.

    Composed sessions thin out towards the end; a trace that stops while they still
    overlap shows the cache under a load that lasts.
    """
    if not end_s > 0:
        raise ConfigError(f"end_s must be above 0, got {end_s}")
    kept = [request for request in trace.requests if request.arrival_s < end_s]
    if len(kept) == len(trace.requests):
        return trace
    return replace(
        trace,
        requests=kept,
        notes=[*trace.notes, f"cut at {end_s:,.0f} s: {len(kept):,} requests are left"],
    )


def in_units_of(trace: Trace, unit_size: int) -> Trace:
    """Return the trace in larger units, as with blocks of `unit_size` tokens.

    A multiple of the trace's unit. Ids are chained, so the id of a unit's last part
    stands for all of it: every k-th id is kept, and what does not fill a unit is nobody
    else's, as with real blocks.
    """
    joined, rest = divmod(unit_size, trace.unit_size)
    if rest or joined < 1:
        raise ConfigError(
            f"unit_size must be a multiple of the trace's {trace.unit_size}, "
            f"got {unit_size}"
        )
    if joined == 1:
        return trace
    return replace(
        trace,
        unit_size=unit_size,
        requests=[
            replace(request, units=request.units[joined - 1 :: joined])
            for request in trace.requests
        ],
        notes=[*trace.notes, f"{joined} units joined to one of {unit_size} tokens"],
    )


def _sessions(trace: Trace) -> Iterator[list[int]]:
    """Yield the indices of each session's requests, in order of first appearance."""
    by_name: dict[tuple[str, str], list[int]] = {}
    alone: list[list[int]] = []
    for index, request in enumerate(trace.requests):
        if request.session is None:
            alone.append([index])
        else:
            name = request.tenant, request.session
            by_name.setdefault(name, []).append(index)
    yield from sorted([*by_name.values(), *alone])


def _reordered(
    trace: Trace, times: list[float], note: str, *, has_drawn_pauses: bool
) -> Trace:
    """Return the trace with these arrivals, sorted, the first at 0."""
    order = sorted(range(len(times)), key=lambda index: (times[index], index))
    place = {index: at for at, index in enumerate(order)}
    start_s = times[order[0]] if order else 0.0
    requests: list[TraceRequest] = []
    for index in order:
        request = trace.requests[index]
        parent = None if request.parent is None else place[request.parent]
        think_s = request.think_s
        if parent is not None and has_drawn_pauses:
            assert request.parent is not None
            think_s = times[index] - times[request.parent]
        requests.append(
            replace(
                request,
                arrival_s=times[index] - start_s,
                parent=parent,
                think_s=think_s,
            )
        )
    return replace(
        trace, requests=requests, has_arrivals=True, notes=[*trace.notes, note]
    )
