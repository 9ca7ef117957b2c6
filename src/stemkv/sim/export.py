"""A trace written for others: replayable, and without names.

Owns what leaves the house: unit ids renumbered by first appearance, names turned into
keyed pseudonyms, times relative to the first arrival. Lengths, times and the structure
of sharing stay as they are; whoever must hide those cannot share a trace.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Literal, TextIO

import msgspec

from ..errors import ConfigError
from .formats.fields import NEVER
from .trace import NO_TENANT, Trace, TraceRequest

__all__ = ["export_trace"]

_PSEUDONYM_BYTES = 8
_DEFAULT_TENANT = "default"  # what a trace without tenants has


def export_trace(
    trace: Trace,
    out: TextIO,
    *,
    format: Literal["mooncake", "bailian"] = "mooncake",
    salt: str,
) -> None:
    """Write a trace as JSONL that the readers of its format, ours too, replay alike.

    Pseudonyms of tenants, sessions and identities are BLAKE2b keyed with `salt`: equal
    names get equal ones under one salt, and without it names cannot be tried out. Keep
    it secret, and use another one for every recipient who must not compare.

    Fields beyond the format's own (`block_size`, `tenant`, `identity`, links between
    turns, `is_estimate`, `is_opaque`, hints) are written only where they say something.
    """
    if not salt:
        raise ConfigError("salt must not be empty: pseudonyms could be guessed")
    if format not in ("mooncake", "bailian"):
        raise ConfigError(f"format must be mooncake or bailian, got {format!r}")
    write = _mooncake if format == "mooncake" else _bailian
    names = _Pseudonyms(salt)
    # The one name that names nobody is left out.
    nobody = _DEFAULT_TENANT if trace.tenants() == [_DEFAULT_TENANT] else NO_TENANT
    renumbered: dict[int, int] = {}
    turns: list[int] = []
    for index, request in enumerate(trace.requests):
        turns.append(1 if request.parent is None else turns[request.parent] + 1)
        ids = [renumbered.setdefault(unit, len(renumbered)) for unit in request.units]
        record = write(trace, index, ids, turns[index])
        if request.session is not None:
            record["session_id"] = names.of("session", request.session)
        if request.tenant != nobody:
            record["tenant"] = names.of("tenant", request.tenant)
        if request.identity:
            record["identity"] = names.of("identity", request.identity)
        if not trace.is_exact:
            record["is_estimate"] = True
        if request.is_opaque:
            record["is_opaque"] = True
        record.update(_hints(request))
        out.write(msgspec.json.encode(record).decode() + "\n")


def _mooncake(trace: Trace, index: int, ids: list[int], turn: int) -> dict[str, object]:
    request = trace.requests[index]
    record: dict[str, object] = {
        "timestamp": _scaled(request.arrival_s, 10**6),
        "input_length": request.input_length,
        "output_length": request.output_length,
        "hash_ids": ids,
    }
    if trace.unit_size != 512:
        record["block_size"] = trace.unit_size
    record["request_id"] = str(index)
    if request.parent is not None:
        record["parent_id"] = str(request.parent)
        record["think_ms"] = _scaled(request.think_s, 10**6)
    return record


def _bailian(trace: Trace, index: int, ids: list[int], turn: int) -> dict[str, object]:
    request = trace.requests[index]
    record: dict[str, object] = {
        "chat_id": index,
        "parent_chat_id": -1 if request.parent is None else request.parent,
        # A point, as an integer would be read as milliseconds elsewhere.
        "timestamp": request.arrival_s,
        "input_length": request.input_length,
        "output_length": request.output_length,
        "type": "text",
        "turn": turn,
        "hash_ids": ids,
    }
    if trace.unit_size != 16:
        record["block_size"] = trace.unit_size
    if request.parent is not None:
        record["think_s"] = request.think_s
    return record


def _hints(request: TraceRequest) -> dict[str, object]:
    hints: dict[str, object] = {}
    if request.ends_session:
        hints["ends_session"] = True
    if request.next_use_s is not None:
        is_never = math.isinf(request.next_use_s)
        hints["next_use_s"] = NEVER if is_never else request.next_use_s
    if request.ephemeral_from is not None:
        hints["ephemeral_from"] = request.ephemeral_from
    return hints


def _scaled(seconds: float, unit_ns: int) -> int | float:
    """Return a time in a unit: a whole number if it is one, to the nanosecond."""
    nanoseconds = round(seconds * 1e9)
    whole, rest = divmod(nanoseconds, unit_ns)
    return whole if not rest else nanoseconds / unit_ns


class _Pseudonyms:
    """Names to pseudonyms, different for different kinds of names."""

    def __init__(self, salt: str) -> None:
        self._key = blake2b(salt.encode(), digest_size=64).digest()
        self._taken: dict[str, tuple[str, str]] = {}

    def of(self, kind: str, name: str) -> str:
        digest = blake2b(
            f"{kind}\0{name}".encode(), key=self._key, digest_size=_PSEUDONYM_BYTES
        ).hexdigest()
        if self._taken.setdefault(digest, (kind, name)) != (kind, name):
            raise ConfigError(
                "two names have one pseudonym under this salt; choose another salt"
            )
        return digest
