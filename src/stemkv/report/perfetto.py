"""A replay as trace events, for Perfetto and chrome://tracing.

Owns the JSON form. It is Google's "Trace Event Format"
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).

Replicas are processes with their steps as slices and their requests as nested spans,
waiting by its reason, and by whom memory was held where it was waited for;
memory is a process of its own, as samples of it count all replicas together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from stemkv.measure.results import (
    MemorySample,
    ReplayResult,
    RequestResult,
    StallSpan,
    StepSpan,
    WaitSpan,
)

__all__ = ["trace_events"]

_MEMORY = 0  # process id; replica r is process r + 1


def trace_events(result: ReplayResult) -> str:
    """Return the document; equal results give equal text, times ascend."""
    replicas = sorted(
        set(range(result.num_replicas))
        | {step.replica for step in result.steps}
        | {request.replica for request in result.requests}
    )
    names = [_process(_MEMORY, "memory")]
    names += [_process(replica + 1, f"replica {replica}") for replica in replicas]
    events = [
        *_steps(result.steps),
        *_requests(result.requests, result.end_s),
        *_memory(result.memory),
    ]
    # Sorting is stable: spans that begin together stay nested as they were written.
    events.sort(key=lambda event: event["ts"])
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "schema": "stemkv.timeline/1",
            "trace": result.trace.name,
            "costs": result.cost_source,
            "times are": result.cost_kind.value,
            "steps in the run": result.num_steps,
        },
        "traceEvents": [*names, *events],
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":")) + "\n"


def _process(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}


def _microseconds(second: float) -> float:
    return round(second * 1e6, 3)


def _steps(steps: Sequence[StepSpan]) -> Iterator[dict[str, Any]]:
    for step in steps:
        start = _microseconds(step.start_s)
        yield {
            "ph": "X",
            "name": "prefill" if step.num_prefill_tokens else "decode",
            "cat": "step",
            "pid": step.replica + 1,
            "tid": 0,
            "ts": start,
            "dur": round(_microseconds(step.end_s) - start, 3),
            "args": {
                "prefill tokens": step.num_prefill_tokens,
                "decodes": step.num_decodes,
                "saved tokens": step.saved_tokens,
                "saved prefill s": step.saved_s,
                "saved joules": step.saved_joules,
            },
        }


def _requests(
    requests: Sequence[RequestResult], end_s: float
) -> Iterator[dict[str, Any]]:
    for index, request in enumerate(requests):
        is_running = request.end_s is None and request.admitted_s is not None
        last = end_s if is_running else request.end_s
        if last is None:
            last = request.arrival_s  # refused at once
        admitted = last if request.admitted_s is None else request.admitted_s
        first = last if request.first_token_s is None else request.first_token_s
        common = {"cat": "request", "id": index, "pid": request.replica + 1, "tid": 0}
        yield {
            "ph": "b",
            "name": f"{request.tenant} {request.request_id}",
            "ts": _microseconds(request.arrival_s),
            "args": {
                "tenant": request.tenant,
                "prompt tokens": request.prompt_tokens,
                "reused tokens": request.reused_tokens,
                "output tokens": request.output_tokens,
                "preemptions": request.num_preemptions,
                "finish": request.finish_reason,
            },
            **common,
        }
        waits = list(request.waits)
        if not waits and admitted > request.arrival_s:
            waits = [
                WaitSpan(reason="queue", start_s=request.arrival_s, end_s=admitted)
            ]
        before = [wait for wait in waits if wait.start_s < admitted]
        yield from _waits(before, request.stalls, common)
        for name, start, end in (
            ("prefill", admitted, first),
            ("decode", first, last),
        ):
            if end > start:
                within = [
                    wait
                    for wait in waits
                    if wait not in before and start <= wait.start_s < end
                ]
                yield {"ph": "b", "name": name, "ts": _microseconds(start), **common}
                yield from _waits(within, request.stalls, common)
                yield {"ph": "e", "name": name, "ts": _microseconds(end), **common}
        yield {
            "ph": "e",
            "name": f"{request.tenant} {request.request_id}",
            "ts": _microseconds(last),
            **common,
        }


def _waits(
    waits: Sequence[WaitSpan],
    stalls: Sequence[StallSpan],
    common: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    for wait in waits:
        begin: dict[str, Any] = {
            "ph": "b",
            "name": f"waiting: {wait.reason}",
            "ts": _microseconds(wait.start_s),
            **common,
        }
        stall = next(
            (
                each
                for each in stalls
                if wait.reason == "memory"
                and each.start_s < wait.end_s
                and wait.start_s < each.end_s
            ),
            None,
        )
        if stall is not None:
            begin["args"] = {
                "missing blocks": stall.num_missing_blocks,
                "active blocks": dict(stall.active),
                "retained blocks": dict(stall.retained),
            }
        yield begin
        yield {
            "ph": "e",
            "name": f"waiting: {wait.reason}",
            "ts": _microseconds(wait.end_s),
            **common,
        }


def _memory(samples: Sequence[MemorySample]) -> Iterator[dict[str, Any]]:
    common = {"pid": _MEMORY, "tid": 0}
    for sample in samples:
        at = _microseconds(sample.at_s)
        blocks = {"active": sample.active, "cached": sample.cached, "free": sample.free}
        yield {"ph": "C", "name": "blocks", "ts": at, "args": blocks, **common}
        for name, amount in (("evicted", sample.evicted), ("stalled", sample.stalled)):
            if amount:
                unit = "blocks" if name == "evicted" else "requests"
                args = {unit: amount}
                yield {
                    "ph": "i",
                    "s": "p",
                    "name": name,
                    "ts": at,
                    "args": args,
                    **common,
                }
