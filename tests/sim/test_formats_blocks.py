"""Formats that come with block ids, and what every format has in common."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zstandard

from stemkv.errors import ConfigError, TraceError
from stemkv.sim.formats import FORMATS, read_trace

from .trace_files import mooncake, shape, write_jsonl

BAILIAN = {
    "chat_id": 7,
    "parent_chat_id": -1,
    "timestamp": 3.5,
    "input_length": 40,
    "output_length": 5,
    "type": "text",
    "turn": 1,
    "hash_ids": [0, 1, 2],
}


# Times


def test_mooncake_times_are_milliseconds_and_bailian_times_seconds(
    tmp_path: Path,
) -> None:
    ms = read_trace(write_jsonl(tmp_path, mooncake(1000), mooncake(3500)))
    s = read_trace(
        write_jsonl(
            tmp_path, BAILIAN, {**BAILIAN, "chat_id": 8, "timestamp": 6.0}, name="b"
        )
    )

    assert (ms.format, s.format) == ("mooncake", "bailian")
    assert ms.duration_s == s.duration_s == 2.5


def test_whether_hashed_or_mooncake_is_told_by_the_point_in_the_time(
    tmp_path: Path,
) -> None:
    records = [mooncake(t, block_size=512) for t in (0, 2)]
    floats = [mooncake(float(t), block_size=512) for t in (0, 2)]

    assert read_trace(write_jsonl(tmp_path, *records)).duration_s == 0.002
    assert read_trace(write_jsonl(tmp_path, *floats)).duration_s == 2.0


def test_a_rate_that_cannot_be_is_pointed_out_and_mended_by_a_unit(
    tmp_path: Path,
) -> None:
    path = write_jsonl(tmp_path, *(mooncake(t) for t in range(200)))

    trace = read_trace(path)
    mended = read_trace(path, fields={"arrival": "timestamp:s"})

    assert any("timestamp:s" in note for note in trace.notes)
    assert mended.duration_s == 199.0
    assert mended.notes == []


def test_unsorted_lines_are_sorted_and_no_time_is_changed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, *(mooncake(t) for t in (5000, 1000, 3000, 1000)))

    trace = read_trace(path)

    assert [(r.arrival_s, r.line) for r in trace.requests] == [
        (0.0, 2),
        (0.0, 4),
        (2.0, 3),
        (4.0, 1),
    ]
    assert any("not in order" in note for note in trace.notes)


def test_without_any_arrival_the_order_of_the_file_is_kept_and_said(
    tmp_path: Path,
) -> None:
    records = [mooncake(block_size=512, ids=[i]) for i in range(3)]
    for record in records:
        del record["timestamp"]

    trace = read_trace(write_jsonl(tmp_path, *records))

    assert not trace.has_arrivals
    assert [r.line for r in trace.requests] == [1, 2, 3]
    assert any("no arrival times" in note for note in trace.notes)


def test_a_line_without_an_arrival_among_others_is_a_bad_line(tmp_path: Path) -> None:
    bare = mooncake()
    del bare["timestamp"]

    trace = read_trace(write_jsonl(tmp_path, mooncake(0), bare, mooncake(1)))

    assert [r.line for r in trace.requests] == [1, 3]
    assert [(p.line, p.field) for p in trace.problems] == [(2, "arrival")]


# Blocks


def test_mooncake_blocks_are_512_tokens_unless_a_record_says_otherwise(
    tmp_path: Path,
) -> None:
    short = {**mooncake(ids=[0, 1]), "input_length": 20, "block_size": 16}

    assert read_trace(write_jsonl(tmp_path, mooncake())).unit_size == 512
    assert read_trace(write_jsonl(tmp_path, short)).unit_size == 16
    # The record's own wins over the argument.
    assert read_trace(write_jsonl(tmp_path, short), unit_size=32).unit_size == 16


def test_a_wrong_block_size_is_refused_and_the_right_one_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {**mooncake(ids=range(60)), "input_length": 950})

    with pytest.raises(TraceError, match="unit_size=16 they would") as caught:
        read_trace(path)

    assert (caught.value.line, caught.value.field) == (1, "hash_ids")
    assert read_trace(path, unit_size=16).unit_size == 16


@pytest.mark.parametrize("count", [0, 1, 4, 5])
def test_units_that_do_not_make_the_length_are_a_bad_line(
    tmp_path: Path, count: int
) -> None:
    bad = {**mooncake(5, ids=range(count)), "input_length": 1100}  # 2 or 3 units

    trace = read_trace(write_jsonl(tmp_path, mooncake(), bad))

    assert [(p.line, p.field) for p in trace.problems] == [(2, "hash_ids")]


def test_the_partial_last_unit_may_be_listed_or_not(tmp_path: Path) -> None:
    both = [{**mooncake(ids=range(n)), "input_length": 1100} for n in (2, 3)]

    trace = read_trace(write_jsonl(tmp_path, *both))

    assert [list(r.units) for r in trace.requests] == [[0, 1], [0, 1, 2]]


def test_two_block_sizes_in_one_file_are_not_mixed(tmp_path: Path) -> None:
    trace = read_trace(
        write_jsonl(
            tmp_path,
            mooncake(0, block_size=512),
            {**mooncake(5, block_size=256), "input_length": 256},
        )
    )

    assert [(p.line, p.field) for p in trace.problems] == [(2, "block_size")]


def test_ids_that_do_not_chain_are_chained_and_it_is_said(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, mooncake(0, [1, 9]), mooncake(1, [2, 9]))

    trace = read_trace(path)

    assert [list(r.units) for r in trace.requests] == [[0, 1], [2, 3]]
    assert any("do not chain: 1 times" in note for note in trace.notes)


def test_block_ids_may_be_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, mooncake(0, ["ff", "ee"]), mooncake(1, ["ff", "dd"]))

    assert [list(r.units) for r in read_trace(path).requests] == [[0, 1], [0, 2]]


# Turns


def test_bailian_turns_follow_their_parent_wherever_it_stands(tmp_path: Path) -> None:
    second = {**BAILIAN, "chat_id": 8, "parent_chat_id": 7, "timestamp": 5.5, "turn": 2}
    third = {**BAILIAN, "chat_id": 9, "parent_chat_id": 8, "timestamp": 9.0, "turn": 3}
    orphan = {**BAILIAN, "chat_id": 1, "parent_chat_id": 99, "timestamp": 10.0}

    trace = read_trace(write_jsonl(tmp_path, third, BAILIAN, second, orphan))

    assert [(r.request_id, r.parent, r.think_s, r.session) for r in trace.requests] == [
        ("7", None, 0.0, "7"),
        ("8", 0, 2.0, "7"),
        ("9", 1, 3.5, "7"),
        ("1", None, 0.0, None),
    ]
    assert any("1 requests continue one that is not here" in n for n in trace.notes)
    assert any("time that the earlier turn took" in note for note in trace.notes)


def test_a_turn_that_arrives_before_its_parent_stands_alone(tmp_path: Path) -> None:
    early = {**BAILIAN, "chat_id": 1, "parent_chat_id": 7, "timestamp": 1.0}
    itself = {**BAILIAN, "chat_id": 2, "parent_chat_id": 2}

    trace = read_trace(write_jsonl(tmp_path, BAILIAN, early, itself))

    assert [r.parent for r in trace.requests] == [None, None, None]
    assert any("2 requests continue one" in note for note in trace.notes)


def test_a_delay_is_the_think_time_after_the_sessions_earlier_turn(
    tmp_path: Path,
) -> None:
    first = mooncake(100, session_id="a", delay=5000)  # no turn before: no meaning
    other = mooncake(200, session_id="b")
    second = mooncake(session_id="a", delay=1500)
    del second["timestamp"]

    trace = read_trace(write_jsonl(tmp_path, first, other, second))

    assert [(r.line, r.arrival_s, r.parent, r.think_s) for r in trace.requests] == [
        (1, 0.0, None, 0.0),
        (2, 0.1, None, 0.0),
        (3, 1.5, 0, 1.5),
    ]


# Sessions without a clock


def weka(name: str, *requests: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "id": name,
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": list(requests),
        **others,
    }


def call(t: float, ids: list[int], **others: Any) -> dict[str, Any]:
    return {
        "t": t,
        "type": "n",
        "model": "m",
        "in": 64 * len(ids) + 3,
        "out": 5,
        "hash_ids": ids,
        **others,
    }


def test_local_ids_of_two_sessions_never_meet_and_global_ones_do(
    tmp_path: Path,
) -> None:
    sessions = [weka(name, call(0.0, [1, 2])) for name in ("x", "y")]
    shared = [{**session, "hash_id_scope": "global"} for session in sessions]

    local = read_trace(write_jsonl(tmp_path, *sessions))
    common = read_trace(write_jsonl(tmp_path, *shared))

    assert sorted(u for r in local.requests for u in r.units) == [0, 1, 2, 3]
    assert {tuple(r.units) for r in common.requests} == {(0, 1)}


def test_a_session_is_a_closed_loop_with_its_subagents_beside_it(
    tmp_path: Path,
) -> None:
    agent = {
        "t": 10.0,
        "type": "subagent",
        "agent_id": "helper",
        "requests": [call(0.0, [7]), call(4.0, [7, 8], think_time=1.0, model="n")],
    }
    session = weka(
        "s",
        call(0.0, [1], api_time=2.0),
        agent,
        call(30.0, [1, 2], think_time=25.0),
        call(60.0, [1, 2, 3]),  # no think time: what its time leaves
    )

    trace = read_trace(write_jsonl(tmp_path, session))

    assert [
        (r.request_id, r.arrival_s, r.parent, r.think_s) for r in trace.requests
    ] == [
        ("s/0", 0.0, None, 0.0),
        ("s/helper/0", 10.0, 0, 8.0),
        ("s/helper/1", 14.0, 1, 1.0),
        ("s/2", 30.0, 0, 25.0),
        ("s/3", 60.0, 3, 30.0),
    ]
    assert {r.session for r in trace.requests} == {"s"}
    assert [r.identity for r in trace.requests][1:3] == ["model=m", "model=n"]


def test_session_starts_are_drawn_by_the_seed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, *(weka(str(i), call(0.0, [1])) for i in range(20)))

    first = read_trace(path, seed=1)

    assert shape(first) == shape(read_trace(path, seed=1))
    assert shape(first) != shape(read_trace(path, seed=2))
    assert read_trace(path, session_spread_s=0.0).duration_s == 0.0
    assert any("drawn uniformly over 86,400 s (seed 1)" in n for n in first.notes)


def test_one_session_in_one_indented_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    path.write_text(json.dumps(weka("s", call(0.0, [1, 2])), indent=2))

    assert [list(r.units) for r in read_trace(path).requests] == [[0, 1]]


def test_a_session_with_a_bad_request_is_left_out_as_a_whole(tmp_path: Path) -> None:
    bad = weka("bad", call(0.0, [1]), call(1.0, [1], **{"in": 9000}))

    trace = read_trace(write_jsonl(tmp_path, bad, weka("good", call(0.0, [1]))))

    assert [r.request_id for r in trace.requests] == ["good/0"]
    assert [(p.line, p.field) for p in trace.problems] == [(1, "requests.1.hash_ids")]


# Bad lines

BAD_FIELDS = {
    "negative": ("input_length", -1),
    "boolean": ("input_length", True),
    "fraction": ("output_length", 1.5),
    "text": ("output_length", "10"),
    "zero": ("input_length", 0),
    "negative time": ("timestamp", -5),
    "boolean time": ("timestamp", True),
    "time as text": ("timestamp", "yesterday"),
    "ids no list": ("hash_ids", "0"),
    "ids no integers": ("hash_ids", [0.5]),
    "ids boolean": ("hash_ids", [True]),
    "block size": ("block_size", 0),
}


@pytest.mark.parametrize("name", sorted(BAD_FIELDS))
def test_a_bad_field_is_named_by_file_line_and_field(tmp_path: Path, name: str) -> None:
    field, value = BAD_FIELDS[name]
    path = write_jsonl(tmp_path, mooncake(), {**mooncake(1), field: value})

    trace = read_trace(path)

    assert len(trace.requests) == 1
    (problem,) = trace.problems
    assert (problem.file, problem.line) == (str(path), 2)
    # A prompt length of zero shows where the blocks do not fit it.
    assert problem.field in (field, "hash_ids")
    with pytest.raises(TraceError) as caught:
        read_trace(path, is_strict=True)
    assert str(caught.value) == str(problem)


@pytest.mark.parametrize(
    "text",
    ['{"timestamp": 1, ', '{"timestamp": NaN}', '{"timestamp": 1e999}', "[" * 9000],
    ids=["cut", "nan", "huge", "deep"],
)
def test_a_line_that_is_no_json_is_counted_and_the_rest_read(
    tmp_path: Path, text: str
) -> None:
    for records in ([mooncake(), text], [text, mooncake()]):
        trace = read_trace(write_jsonl(tmp_path, *records))

        assert len(trace.requests) == 1
        assert [p.line for p in trace.problems] == [records.index(text) + 1]
        assert "not a JSON value" in trace.problems[0].message


def test_a_message_about_a_bad_field_never_shows_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {**mooncake(), "hash_ids": "my secret"})

    with pytest.raises(TraceError) as caught:
        read_trace(path)

    assert "secret" not in str(caught.value)


def test_a_file_of_bad_lines_only_is_given_up_early(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, *(mooncake(input_length=True) for _ in range(5000)))

    with pytest.raises(TraceError, match=r"no line can be read as mooncake \(1,000"):
        read_trace(path)


# Files


def test_duplicate_ids_are_made_unique(tmp_path: Path) -> None:
    names = ["a", "a", "a#2", "a"]
    path = write_jsonl(
        tmp_path, *(mooncake(i, request_id=n) for i, n in enumerate(names))
    )

    trace = read_trace(path)

    assert [r.request_id for r in trace.requests] == ["a", "a#3", "a#2", "a#4"]
    assert any("2 requests have an id" in note for note in trace.notes)


def test_compression_is_told_by_content(tmp_path: Path) -> None:
    plain = json.dumps(mooncake()).encode()
    variants = {
        "plain.gz": plain,
        "trace.jsonl": gzip.compress(plain),
        "trace": zstandard.compress(plain),
        "two.zst": zstandard.compress(plain + b"\n") + zstandard.compress(plain),
    }
    for name, content in variants.items():
        (tmp_path / name).write_bytes(content)

    counts = {name: len(read_trace(tmp_path / name).requests) for name in variants}

    assert counts == {"plain.gz": 1, "trace.jsonl": 1, "trace": 1, "two.zst": 2}


@pytest.mark.parametrize(
    "pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"]
)
def test_damaged_compression_is_an_error_of_the_file(tmp_path: Path, pack: Any) -> None:
    packed = pack("\n".join(json.dumps(mooncake(i)) for i in range(5000)).encode())
    path = tmp_path / "cut"
    path.write_bytes(packed[: len(packed) // 2])

    with pytest.raises(TraceError, match="cut"):
        read_trace(path)


def test_a_mark_and_dos_line_ends_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "dos"
    lines = [json.dumps(mooncake(i)) for i in range(2)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(lines).encode() + b"\r\n")

    assert [r.line for r in read_trace(path).requests] == [1, 3]


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff"], ids=["0", "blank", "bom"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "nothing"
    path.write_text(content, encoding="utf-8")

    with pytest.raises(TraceError, match="empty"):
        read_trace(path)


def test_a_file_that_is_not_there_or_utf16_is_an_error(tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    wide.write_text(json.dumps(mooncake()), encoding="utf-16")

    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(TraceError, match="UTF-16"):
        read_trace(wide)


def test_standard_input_is_read_once_and_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.BufferedReader(io.BytesIO(json.dumps(mooncake()).encode()))  # type: ignore[arg-type]
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=stream))

    trace = read_trace("-")

    assert (trace.name, len(trace.requests)) == ("stdin", 1)
    assert not stream.closed


def test_progress_ends_with_the_size_of_the_file(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, *(mooncake(i) for i in range(1000)))
    seen: list[tuple[int, int | None]] = []

    read_trace(path, progress=lambda done, size: seen.append((done, size)))

    assert seen == sorted(seen)
    assert len(seen) > 3
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


def test_a_limit_stops_and_says_so(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, *(mooncake(i) for i in range(9)))

    trace = read_trace(path, limit=4)

    assert [r.line for r in trace.requests] == [1, 2, 3, 4]
    assert any("only the first 4" in note for note in trace.notes)


def test_an_unknown_format_is_an_error_that_lists_what_there_is(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, {"foo": 1})

    with pytest.raises(TraceError) as caught:
        read_trace(path)

    assert all(f"  {name}: " in str(caught.value) for name in FORMATS)


@pytest.mark.parametrize(
    "arguments",
    [
        {"format": "nonsense"},
        {"unit_size": 0},
        {"limit": 0},
        {"session_spread_s": -1.0},
        {"session_spread_s": float("nan")},
        {"fields": {"nonsense": "a"}},
        {"fields": {"arrival": "ts:years"}},
        {"fields": {"tenant": ""}},
        {"tokens": "nonsense"},
    ],
    ids=str,
)
def test_a_bad_argument_is_a_config_error(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        read_trace(write_jsonl(tmp_path, mooncake()), **arguments)
