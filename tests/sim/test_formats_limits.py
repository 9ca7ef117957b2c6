"""Absurd values: one of them costs its own line and nothing else."""

from __future__ import annotations

import copy
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stemkv.errors import ConfigError, TraceError
from stemkv.sim.formats import read_trace
from stemkv.sim.trace import Trace

from .trace_files import mooncake, shape, write_jsonl

ABSURD: dict[str, Any] = {
    "float": 1e308,
    "negative": -1e308,
    "small": 5e-324,
    "20 digits": 10**19,
    "401 digits": 10**400,
    "2**63": 2**63,
    "length": 2**27 + 1,
    "text of a float": "1e308",
    "text of 5000 digits": "9" * 5000,
    "superscript": "²",
    "year 0": "0000-01-01T00:00:00Z",
    "year 1": "0001-01-01T00:00:00+23:59",
    "year 9999": "9999-12-31T23:59:59.9-23:59",
    "true": True,
    "list": [[]],
    "object": {"a": None},
    "broken JSON": "{",
    "lone surrogate": "\ud800",
}

CALL = {"t": 0.5, "type": "n", "in": 64, "out": 5, "hash_ids": [7], "api_time": 0.5}
RECORDS: dict[str, Any] = {
    "mooncake": mooncake(5, delay=5, session_id="s", think_ms=1, parent_id="x"),
    "bailian": mooncake(5.5, [0], chat_id=3, parent_chat_id=1, block_size=512),
    "hashed": mooncake(5.5, [0], block_size=512),
    "weka": {
        "id": "s",
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [
            {**CALL, "think_time": 1.0},
            {"t": 1.0, "type": "subagent", "requests": [CALL]},
        ],
    },
    "lmcache": {"timestamp": 5, "input": "a b", "output_length": 2, "session_id": "s"},
    "token-ids": {"token_ids": [1, 2], "timestamp": 1.5, "max_tokens": 3},
    "openai": {
        "messages": [{"role": "user", "content": "a"}],
        "created": 1_700_000_000,
        "usage": {"prompt_tokens": 1, "completion_tokens": 1},
        "status": "200",
    },
    "litellm": {
        "startTime": 1_700_000_000.5,
        "endTime": 1_700_000_001.5,
        "prompt_tokens": 50,
        "completion_tokens": 9,
    },
    "kv-events": [
        5.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [1],
                "parent_block_hash": None,
                "block_size": 16,
                "group_idx": 0,
            }
        ],
        0,
    ],
    "azure": {
        "TIMESTAMP": "2023-11-16 18:17:03.9",
        "ContextTokens": 40,
        "GeneratedTokens": 1,
    },
    "burstgpt": {"Timestamp": 5, "Request tokens": 40, "Response tokens": 1},
}


def write(folder: Path, name: str, *records: Any) -> Path:
    """Write records the way that their format is written."""
    if name not in ("azure", "burstgpt"):
        return write_jsonl(folder, *records)
    path = folder / "trace.csv"
    with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
        writer = csv.DictWriter(file, list(RECORDS[name]))
        writer.writeheader()
        writer.writerows(records)
    return path


def spoilt(record: Any, value: Any) -> Iterator[Any]:
    """Yield copies of a record with one value in it, at any depth, replaced."""
    places = record.items() if isinstance(record, dict) else enumerate(record)
    for place, inner in list(places):
        changed = copy.copy(record)
        changed[place] = value
        yield changed
        if isinstance(inner, dict | list):
            for deeper in spoilt(inner, value):
                changed = copy.copy(record)
                changed[place] = deeper
                yield changed


@pytest.mark.parametrize("absurd", sorted(ABSURD))
@pytest.mark.parametrize("name", sorted(RECORDS))
def test_whatever_stands_in_a_field_the_other_lines_are_read(
    tmp_path: Path, name: str, absurd: str
) -> None:
    good = RECORDS[name]
    for bad in spoilt(good, ABSURD[absurd]):
        path = write(tmp_path, name, good, bad, good)

        trace = read_trace(path, format=name)

        first = 2 if path.suffix == ".csv" else 1
        lines = {request.line for request in trace.requests}
        # What follows from recorded events may follow from the batch before.
        assert {first} | (
            {first + 2} - ({3} if name == "kv-events" else set())
        ) <= lines
        assert {problem.line for problem in trace.problems} <= {first + 1}
        assert max(request.input_length for request in shape_of(trace)) <= 2**27
        assert trace.duration_s < 2**63 / 1e9


def shape_of(trace: Trace) -> Any:
    shape(trace)  # keeps what a trace promises
    return trace.requests


@pytest.mark.parametrize(
    "value", [1e308, 10**400, 2**63, -1], ids=["1e308", "10**400", "2**63", "-1"]
)
def test_a_time_that_cannot_be_is_a_bad_line_with_its_field(
    tmp_path: Path, value: Any
) -> None:
    trace = read_trace(write_jsonl(tmp_path, mooncake(), mooncake(value)))

    assert [(p.line, p.field) for p in trace.problems] == [(2, "timestamp")]
    assert len(str(trace.problems[0])) < 300


@pytest.mark.parametrize("year", ["0000", "0001", "1969", "2263", "9999"])
def test_a_date_that_no_request_has_is_a_bad_line(tmp_path: Path, year: str) -> None:
    dates = [f"{y}-06-01T00:00:00Z" for y in ("2026", year)]
    path = write_jsonl(tmp_path, *({"token_ids": [1], "ts": date} for date in dates))

    trace = read_trace(path)

    assert [(p.line, p.field) for p in trace.problems] == [(2, "ts")]


@pytest.mark.parametrize("length", [2**27 + 1, 99_999_999_999_999_999_999])
def test_one_absurd_length_costs_one_line(tmp_path: Path, length: int) -> None:
    path = write_jsonl(
        tmp_path,
        {"n": 5},
        {"n": length},
        {"n": 7},
    )

    trace = read_trace(path, fields={"input_length": "n"})

    assert [r.input_length for r in trace.requests] == [5, 7]
    assert [(p.line, p.field) for p in trace.problems] == [(2, "n")]
    assert any("1 lines left out" in note for note in trace.notes)


def test_when_ids_run_out_the_line_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stemkv.sim.units.MAX_UNITS", 10)
    path = write_jsonl(tmp_path, *({"n": 64} for _ in range(4)))

    with pytest.raises(TraceError, match="more than 10 distinct units") as caught:
        read_trace(path, fields={"input_length": "n"})

    assert caught.value.line == 3


@pytest.mark.parametrize("argument", ["unit_size", "tokens", "fields"])
@pytest.mark.parametrize("name", ["weka", "kv-events"])
def test_what_a_format_says_itself_cannot_be_said_again(
    tmp_path: Path, name: str, argument: str
) -> None:
    values: dict[str, Any] = {
        "unit_size": 32,
        "tokens": "words",
        "fields": {"tenant": "id"},
    }
    path = write(tmp_path, name, RECORDS[name])

    with pytest.raises(ConfigError, match=f"{argument} cannot be used .* {name}"):
        read_trace(path, **{argument: values[argument]})
