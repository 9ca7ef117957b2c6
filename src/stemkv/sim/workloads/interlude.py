"""Chat, then a batch of documents, then the same chat again.

Owns the traffic that shows whether a burst of new text flushes what people come back to.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace, TraceRequest
from stemkv.sim.workloads.chat import chat
from stemkv.sim.workloads.documents import documents

__all__ = ["interlude"]


def interlude(
    *,
    num_requests: int,
    rate: float,
    seed: int,
    num_tenants: int = 4,
    share: float = 1 / 3,
    num_documents: int = 300,
) -> Trace:
    """Return the workload `chat`, paused in the middle for questions about documents.

    `share` of the requests are about documents (as in the workload `documents`); while
    they run nobody chats, and afterwards conversations go on where they were.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"share must be from 0 to 1, got {share}")
    num_inner = round(share * num_requests)
    inner = outer = None
    if num_inner:
        inner = documents(
            num_requests=num_inner,
            rate=rate,
            seed=seed,
            num_tenants=num_tenants,
            num_documents=num_documents,
        )
    if num_requests - num_inner:
        outer = chat(
            num_requests=num_requests - num_inner,
            rate=rate,
            seed=seed,
            num_tenants=num_tenants,
        )
    if inner is None or outer is None:
        whole = inner or outer
        assert whole is not None, "there is at least one request"
        return _named(whole, whole.requests)
    half = len(outer.requests) // 2
    at_s = outer.requests[half].arrival_s
    pause_s = inner.duration_s + 1 / rate
    first_unit = 1 + max((max(r.units, default=0) for r in outer.requests), default=0)
    between = [
        replace(
            request,
            arrival_s=at_s + request.arrival_s,
            units=array("i", [first_unit + unit for unit in request.units]),
        )
        for request in inner.requests
    ]
    after = []
    for request in outer.requests[half:]:
        parent, think_s = request.parent, request.think_s
        if parent is not None and parent < half:
            think_s += pause_s
        elif parent is not None:
            parent += num_inner
        after.append(
            replace(
                request,
                arrival_s=request.arrival_s + pause_s,
                parent=parent,
                think_s=think_s,
            )
        )
    return _named(outer, [*outer.requests[:half], *between, *after])


def _named(trace: Trace, requests: list[TraceRequest]) -> Trace:
    return replace(
        trace,
        name="interlude",
        requests=[
            replace(request, request_id=f"interlude-{index:06d}")
            for index, request in enumerate(requests)
        ],
        num_lines=len(requests),
    )
