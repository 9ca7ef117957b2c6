"""Files for other programs: Parquet rows and a timeline of trace events."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from stemkv.core.books.entry import MissReason
from stemkv.core.books.waits import WaitReason
from stemkv.errors import InvariantError
from stemkv.report.parquet import SCHEMA_NAME, facts_of, write_requests
from stemkv.report.perfetto import trace_events
from tests.report.examples import make_result

# Parquet


def test_every_field_comes_back_and_misses_are_columns(tmp_path: Path) -> None:
    requests = make_result(num_requests=50).requests
    path = tmp_path / "requests.parquet"
    write_requests(requests, path)
    rows = pq.read_table(path).to_pylist()

    assert len(rows) == 50
    for request, row in zip(requests, rows, strict=True):
        expected = dataclasses.asdict(request)
        misses, wait_s = expected.pop("misses"), expected.pop("wait_s")
        del expected["waits"], expected["stalls"]  # several for a request
        expected["differing_fields"] = list(request.differing_fields)
        expected |= {f"miss_{r.value}": misses.get(r.value, 0) for r in MissReason}
        expected |= {f"wait_{r.value}_s": wait_s.get(r.value, 0.0) for r in WaitReason}
        assert row == expected


def test_names_come_back_whole_also_what_is_no_text(tmp_path: Path) -> None:
    request = make_result(num_requests=1).requests[0]
    strange = dataclasses.replace(request, tenant="n" * 70, request_id="a\ud800")
    path = tmp_path / "requests.parquet"
    write_requests([strange], path)
    (row,) = pq.read_table(path).to_pylist()

    assert row["tenant"] == "n" * 70
    assert row["request_id"] == r"a\ud800"


def test_the_schema_is_the_same_for_every_run(tmp_path: Path) -> None:
    unlucky = dataclasses.replace(
        make_result(num_requests=1).requests[0],
        admitted_s=None,
        first_token_s=None,
        end_s=None,
        first_miss_position=None,
        first_miss_reason=None,
        misses={},
    )
    schemas = []
    for number, requests in enumerate(
        [(), (unlucky,), make_result(num_requests=20).requests]
    ):
        path = tmp_path / f"{number}.parquet"
        write_requests(requests, path)
        file = pq.ParquetFile(path)
        schemas.append(file.schema_arrow)
        assert file.num_row_groups <= 1
        assert file.schema_arrow.metadata[b"schema"] == SCHEMA_NAME.encode()

    assert schemas[0] == schemas[1] == schemas[2]
    assert str(schemas[0].field("reused_tokens").type) == "int64"
    assert not schemas[0].field("tenant").nullable
    assert schemas[0].field("end_s").nullable


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_requests(make_result().requests, tmp_path / name)

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_is_of_the_whole_run_is_in_the_metadata(tmp_path: Path) -> None:
    result = make_result(num_requests=50)
    path = tmp_path / "requests.parquet"
    write_requests(result.requests, path, facts=facts_of(result))
    told = pq.read_table(path).schema.metadata

    assert told[b"schema"] == SCHEMA_NAME.encode()
    assert told[b"eviction"] == b"reuse_index"
    assert float(told[b"saved_s"]) == result.saved.seconds
    assert int(told[b"evicted_bytes"]) == result.evicted_bytes > 0
    assert int(told[b"refused_bytes"]) == result.refused_bytes > 0
    assert int(told[b"regret_tokens"]) == result.regret_tokens > 0
    assert float(told[b"seconds_per_gib_s"]) == result.saved.seconds_per_gib_s


def test_a_reason_that_has_no_column_is_not_dropped(tmp_path: Path) -> None:
    request = make_result(num_requests=1).requests[0]
    strange = dataclasses.replace(request, misses={"mislaid": 7})

    with pytest.raises(InvariantError, match="mislaid"):
        write_requests([strange], tmp_path / "requests.parquet")


# Trace events


def events(**how: Any) -> list[dict[str, Any]]:
    result = make_result(**how)
    return list(json.loads(trace_events(result))["traceEvents"])


def test_times_ascend_and_spans_of_a_request_nest() -> None:
    result = make_result()
    all_events = events()
    timed = [event for event in all_events if event["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)

    open_spans: dict[int, list[str]] = {}
    phases: dict[int, list[str]] = {}
    for event in timed:
        if event["ph"] == "b":
            open_spans.setdefault(event["id"], []).append(event["name"])
            phases.setdefault(event["id"], []).append(event["name"])
        elif event["ph"] == "e":
            assert open_spans[event["id"]].pop() == event["name"]
    assert len(phases) == len(result.requests)
    assert all(not stack for stack in open_spans.values())
    assert max(len(names) for names in phases.values()) == 4


def test_steps_counters_and_instants_are_those_of_the_result() -> None:
    result = make_result()
    kinds = [event["ph"] for event in events()]

    assert kinds.count("X") == len(result.steps)
    assert kinds.count("C") == len(result.memory)
    happened = sum((s.evicted > 0) + (s.stalled > 0) for s in result.memory)
    assert kinds.count("i") == happened > 0
    names = {e["args"]["name"] for e in events() if e["ph"] == "M"}
    assert names == {"memory", "replica 0"}


def test_a_request_that_never_began_has_no_phase_after_it() -> None:
    result = make_result(num_requests=2)
    refused, running = result.requests
    requests = (
        dataclasses.replace(refused, admitted_s=None, first_token_s=None, end_s=None),
        dataclasses.replace(running, end_s=None),
    )
    text = trace_events(dataclasses.replace(result, requests=requests, end_s=999.0))
    spans = [e for e in json.loads(text)["traceEvents"] if e.get("cat") == "request"]

    assert [e["ph"] for e in spans if e["id"] == 0] == ["b", "e"]
    assert max(e["ts"] for e in spans if e["id"] == 1) == 999e6


def test_equal_results_give_equal_timelines() -> None:
    assert trace_events(make_result()) == trace_events(make_result())
