"""Trace files for tests, written the way others write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stemkv.sim.trace import Trace, TraceRequest

__all__ = ["SHARED", "mooncake", "shared_trace", "shape", "write_jsonl"]

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"


def shared_trace(name: str) -> Path:
    """Return a real trace's path; skips the test where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the real trace {name} is not here")
    return path


def write_jsonl(folder: Path, *records: Any, name: str = "trace.jsonl") -> Path:
    """Write records, one a line; a text is written as it is."""
    path = folder / name
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def mooncake(timestamp: Any = 0, ids: Any = (0,), **others: Any) -> dict[str, Any]:
    """Return a Mooncake record whose last block is full."""
    return {
        "timestamp": timestamp,
        "input_length": 512 * len(ids),
        "output_length": 10,
        "hash_ids": list(ids),
        **others,
    }


def shape(trace: Trace) -> list[tuple[Any, ...]]:
    """Return what a replay depends on: units by structure, names by equality."""
    first: dict[Any, int] = {}

    def seen(kind: str, value: Any) -> int | None:
        return None if value is None else first.setdefault((kind, value), len(first))

    return [
        (
            request.input_length,
            request.output_length,
            [seen("unit", unit) for unit in request.units],
            request.arrival_s,
            seen("tenant", request.tenant),
            seen("identity", request.identity),
            seen("session", request.session),
            request.parent,
            request.think_s,
            request.is_opaque,
            request.ends_session,
            request.next_use_s,
            request.ephemeral_from,
        )
        for request in _checked(trace)
    ]


def _checked(trace: Trace) -> list[TraceRequest]:
    """Check what `Trace` promises, for every trace that a test looks at."""
    assert len({r.request_id for r in trace.requests}) == len(trace.requests)
    arrivals = [r.arrival_s for r in trace.requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] == 0.0
    for index, request in enumerate(trace.requests):
        whole = request.input_length // trace.unit_size
        assert len(request.units) in (
            whole,
            -(-request.input_length // trace.unit_size),
        )
        assert request.parent is None or 0 <= request.parent < index
        assert request.think_s >= 0.0
    return trace.requests
