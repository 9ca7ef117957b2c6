"""What a user names must be there, and nobody shares with whom he does not know."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from stemkv.errors import ConfigError, TraceError
from stemkv.sim.formats import read_trace

from .trace_files import mooncake, write_jsonl


def record(**others: Any) -> dict[str, Any]:
    return mooncake(request_id="secret id", **others)


@pytest.mark.parametrize(
    "path, told",
    [
        ("metadata.taem", "metadata.team, metadata.region"),
        ("metdata.team", "timestamp, input_length"),
        ("metadata.team.name", "metadata.team, metadata.region"),
        ("inner.a.c", "inner.a.b"),
    ],
)
def test_a_path_in_no_line_is_an_error_that_shows_keys_and_no_values(
    tmp_path: Path, path: str, told: str
) -> None:
    line = record(
        metadata={"team": "secret team", "region": None},
        inner='{"a": {"b": "secret text"}}',
    )

    with pytest.raises(TraceError) as caught:
        read_trace(write_jsonl(tmp_path, line, line), fields={"tenant": path})

    message = str(caught.value)
    assert caught.value.field == "tenant"
    assert f"'{path}' is in none of 2 lines" in message
    assert told in message
    assert "secret" not in message


def test_a_column_in_no_table_is_an_error_that_shows_the_columns(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log.csv"
    path.write_text("team,n\nblue,5\n")

    with pytest.raises(TraceError, match="there is team, n"):
        read_trace(path, fields={"tenant": "taem", "input_length": "n"})


def test_a_path_in_some_lines_is_noted_and_null_is_there(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path, record(team="blue"), record(team=None), record(), record(team="blue")
    )

    trace = read_trace(path, fields={"tenant": "team"})
    empty = read_trace(
        write_jsonl(tmp_path, record(team=None)), fields={"tenant": "team"}
    )

    assert any("tells something in 2 of 4 lines" in note for note in trace.notes)
    assert empty.tenants() == ["default"]


def test_a_log_without_errors_may_be_read_with_errors_mapped(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, record(team="blue"))

    trace = read_trace(path, fields={"error": "fault", "is_cached": "hit"})

    assert any("error: 'fault' is in none of 1 lines" in note for note in trace.notes)


def test_who_names_no_tenant_is_nobody_elses_neighbour(tmp_path: Path) -> None:
    lines = [record(tenant=name) for name in ("default", "(none)", None)]

    trace = read_trace(write_jsonl(tmp_path, *lines))
    alone = read_trace(write_jsonl(tmp_path, record(), record()))

    assert trace.tenants() == ["(none)", "(none)*", "default"]
    assert any("1 of 3 requests name no tenant" in note for note in trace.notes)
    assert alone.tenants() == ["default"]
    assert not any("tenant" in note for note in alone.notes)


def test_a_bad_role_is_named_before_the_format_is_sought(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'bogus' is no role"):
        read_trace(write_jsonl(tmp_path, {"foo": 1}), fields={"bogus": "when"})


def test_broken_json_behind_a_mapped_path_is_told_as_what_it_is(
    tmp_path: Path,
) -> None:
    path = write_jsonl(tmp_path, record(meta="{"))

    with pytest.raises(TraceError, match="not a JSON value"):
        read_trace(path, fields={"tenant": "meta.team"})


# What senders said of the future


def test_hints_are_read_where_our_own_export_puts_them(tmp_path: Path) -> None:
    lines = [
        record(session_id="s", next_use_s=2.5),
        record(session_id="s", next_use_s="never", ephemeral_from=100),
        record(session_id="s", ends_session=True),
        record(),
    ]

    requests = read_trace(write_jsonl(tmp_path, *lines)).requests

    assert [each.next_use_s for each in requests] == [2.5, math.inf, None, None]
    assert [each.ephemeral_from for each in requests] == [None, 100, None, None]
    assert [each.ends_session for each in requests] == [False, False, True, False]


def test_hints_of_any_log_can_be_mapped(tmp_path: Path) -> None:
    line = record(say={"last": True, "again": 1_500, "once": 7})
    fields = {
        "ends_session": "say.last",
        "next_use": "say.again:ms",
        "ephemeral_from": "say.once",
    }

    (request,) = read_trace(write_jsonl(tmp_path, line), fields=fields).requests

    assert (request.next_use_s, request.ephemeral_from) == (1.5, 7)
    assert request.ends_session


def test_who_ends_a_session_without_a_name_was_all_of_it(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, mooncake(request_id="alone", ends_session=True))

    (request,) = read_trace(path).requests

    assert (request.session, request.ends_session) == ("alone", True)


@pytest.mark.parametrize(
    "field, value",
    [("next_use_s", -1), ("next_use_s", "soon"), ("ephemeral_from", -2)],
)
def test_a_hint_that_makes_no_sense_is_a_bad_line(
    tmp_path: Path, field: str, value: Any
) -> None:
    trace = read_trace(write_jsonl(tmp_path, record(), record(**{field: value})))

    assert len(trace.requests) == 1
    assert [problem.field for problem in trace.problems] == [field]


# Files that are not quite what they look like


@pytest.mark.parametrize("text", ['{"timestamp": 1, ', '{"a": tru}\n{"b": }'])
def test_where_no_line_is_json_the_first_one_is_named(
    tmp_path: Path, text: str
) -> None:
    with pytest.raises(TraceError, match="not a JSON value") as caught:
        read_trace(write_jsonl(tmp_path, text))

    assert caught.value.line == 1


def test_an_empty_list_holds_no_record(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="empty list"):
        read_trace(write_jsonl(tmp_path, "[]"))


def test_columns_with_one_name_are_named(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("tenant,n,,tenant,\nblue,5,,red,\n")

    with pytest.raises(TraceError, match="one name.*: tenant; rename") as caught:
        read_trace(path, fields={"input_length": "n"})

    assert caught.value.line == 1


@pytest.mark.parametrize(
    "times, is_noted",
    [
        ([0.0, 1.5, 3.25], True),
        ([0, 1.5, 3.25], False),
        ([0.5, 90_000.5], False),  # a minute and a half; as seconds it were a day
        ([1.5, 1.5], False),
    ],
    ids=["seconds", "a whole number", "long", "no span"],
)
def test_milliseconds_with_a_point_that_look_like_seconds_are_noted(
    tmp_path: Path, times: list[float], is_noted: bool
) -> None:
    path = write_jsonl(tmp_path, *(mooncake(time) for time in times))

    trace = read_trace(path)
    told = read_trace(path, fields={"arrival": "timestamp:s"})

    hint = "--map arrival=timestamp:s"
    assert any(hint in note for note in trace.notes) == is_noted
    assert not any(hint in note for note in told.notes)
