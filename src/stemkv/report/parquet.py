"""The ledger of requests as a Parquet file, one row per request.

Owns the columns and their types, which are the same for every run: `miss_<reason>` for
every reason there is, zero where it does not occur, and `wait_<reason>_s` likewise.
What is of the whole run and of no request, is in the file's metadata: policies and what
they came to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stemkv.core.books.entry import MissReason
from stemkv.core.books.waits import WaitReason
from stemkv.errors import ConfigError, InvariantError
from stemkv.measure.results import ReplayResult, RequestResult

__all__ = ["SCHEMA_NAME", "facts_of", "write_requests"]

SCHEMA_NAME = "stemkv.requests/1"  # in the file's metadata, under "schema"

_REASONS = tuple(reason.value for reason in MissReason)
_WAITS = tuple(reason.value for reason in WaitReason)
_SPANS = frozenset({"stalls", "waits"})  # several for a request: they are in the JSON


def facts_of(result: ReplayResult) -> dict[str, str]:
    """Return what the metadata say of a replay, as text."""
    config, saved = result.config, result.saved
    facts = {
        "eviction": config.get("eviction"),
        "objective": config.get("objective"),
        "order": config.get("order"),
        "saved_s": saved.seconds,
        "retained_gib_s": saved.retained_gib_s,
        "seconds_per_gib_s": saved.seconds_per_gib_s,
        "regret_tokens": result.regret_tokens,
        "evicted_bytes": result.evicted_bytes,
        "refused_bytes": result.refused_bytes,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def write_requests(
    results: Sequence[RequestResult],
    path: Path,
    *,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the rows as one row group; equal rows and facts give equal bytes."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            "a Parquet file needs pyarrow; install: pip install 'stemkv[report]'"
        ) from error
    schema = _schema(pa, facts or {})
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    for result in results:
        for name, value in _row(result).items():
            columns[name].append(value)
    table = pa.Table.from_pydict(columns, schema=schema)
    pq.write_table(table, path, row_group_size=max(1, len(results)), compression="zstd")


def _schema(pa: Any, facts: Mapping[str, str]) -> Any:
    types = {
        "str": pa.string(),
        "int": pa.int64(),
        "float": pa.float64(),
        "tuple[str, ...]": pa.list_(pa.string()),
    }
    fields = []
    for field in dataclasses.fields(RequestResult):
        if field.name in _SPANS:
            continue
        if field.name == "misses":
            fields += [_counts(pa, reason) for reason in _REASONS]
            continue
        if field.name == "wait_s":
            fields += [_seconds(pa, reason) for reason in _WAITS]
            continue
        kind = str(field.type)  # annotations are text under `annotations`
        is_optional = kind.endswith(" | None")
        name = types[kind.removesuffix(" | None")]
        fields.append(pa.field(field.name, name, nullable=is_optional))
    return pa.schema(fields, metadata={"schema": SCHEMA_NAME, **facts})


def _counts(pa: Any, reason: str) -> Any:
    return pa.field(f"miss_{reason}", pa.int64(), nullable=False)


def _seconds(pa: Any, reason: str) -> Any:
    return pa.field(f"wait_{reason}_s", pa.float64(), nullable=False)


def _utf8(text: str) -> str:
    """Return text with lone surrogates, which Parquet has no form for, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _row(result: RequestResult) -> dict[str, Any]:
    strange = sorted(set(result.misses) - set(_REASONS))
    if strange:
        raise InvariantError(
            f"request {result.request_id!r} missed tokens for {', '.join(strange)}, "
            f"which is no reason of {', '.join(_REASONS)}; this is a defect of StemKV"
        )
    row: dict[str, Any] = {}
    for field in dataclasses.fields(result):
        if field.name in _SPANS:
            continue
        if field.name == "misses":
            row |= {f"miss_{r}": result.misses.get(r, 0) for r in _REASONS}
        elif field.name == "wait_s":
            row |= {f"wait_{r}_s": result.wait_s.get(r, 0.0) for r in _WAITS}
        else:
            value = getattr(result, field.name)
            row[field.name] = _utf8(value) if isinstance(value, str) else value
    row["differing_fields"] = list(result.differing_fields)
    return row
