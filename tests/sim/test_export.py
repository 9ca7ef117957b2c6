from __future__ import annotations

import io
import json
import math
from array import array
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.errors import ConfigError
from stemkv.sim.export import export_trace
from stemkv.sim.formats import read_trace
from stemkv.sim.trace import Trace, TraceRequest

from .trace_files import shape

Format = Literal["mooncake", "bailian"]
FORMATS: tuple[Format, ...] = ("mooncake", "bailian")


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Traces with everything that a trace can have."""
    unit_size = draw(st.sampled_from([4, 16, 512]))
    ids: dict[tuple[int, ...], int] = {}
    requests: list[TraceRequest] = []
    now = 0
    for index in range(draw(st.integers(1, 6))):
        content = draw(st.lists(st.integers(0, 2), max_size=4))
        units = array("i")
        for end in range(1, len(content) + 1):
            # Ids with gaps, as of a part of a trace.
            units.append(7 * ids.setdefault(tuple(content[:end]), len(ids)) + 3)
        is_opaque = draw(st.booleans())
        if is_opaque:
            # Units that nothing else has, above every id of the others.
            units = array("i", range(10**6 + 2 * index, 10**6 + 2 * index + 2))
        rest = draw(st.integers(0 if units else 1, unit_size - 1))
        now += draw(st.integers(0, 10**10)) if index else 0  # nanoseconds
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        session = draw(st.sampled_from([None, "anna", "bert"]))
        if parent is not None:
            # A reader gives a turn, and the one before it, a session.
            before = requests[parent]
            before.session = before.session or f"of {parent}"
            session = session or before.session
        requests.append(
            TraceRequest(
                request_id=f"secret-{index}",
                input_length=len(units) * unit_size + rest,
                output_length=draw(st.integers(0, 9)),
                units=units,
                arrival_s=now / 1e9,
                tenant=draw(st.sampled_from(["default", "(none)", "anna", "bert"])),
                identity=draw(st.sampled_from(["", "model=anna", "model=bert"])),
                session=session,
                parent=parent,
                think_s=draw(st.integers(0, 10**6)) / 1000
                if parent is not None
                else 0.0,
                is_opaque=is_opaque,
                ends_session=session is not None and draw(st.booleans()),
                next_use_s=draw(
                    st.sampled_from([None, math.inf])
                    | st.integers(0, 10**6).map(lambda ms: ms / 1000)
                ),
                ephemeral_from=draw(st.none() | st.integers(0, 99)),
            )
        )
    return Trace(
        name="t",
        format="made",
        unit_size=unit_size,
        requests=requests,
        is_exact=draw(st.booleans()),
    )


def exported(trace: Trace, format: Format, *, salt: str = "s") -> str:
    out = io.StringIO()
    export_trace(trace, out, format=format, salt=salt)
    return out.getvalue()


@pytest.mark.parametrize("format", FORMATS)
@given(trace=traces())
def test_what_is_written_replays_like_what_was_read(
    tmp_path_factory: pytest.TempPathFactory, format: Format, trace: Trace
) -> None:
    path = tmp_path_factory.mktemp("export") / "trace.jsonl"
    path.write_text(exported(trace, format))

    again = read_trace(path)

    assert again.format == format
    assert again.unit_size == trace.unit_size
    assert again.is_exact == trace.is_exact
    assert shape(again) == shape(trace)


@pytest.mark.parametrize("format", FORMATS)
@given(trace=traces())
def test_no_name_and_no_id_leaves_the_house(format: Format, trace: Trace) -> None:
    text = exported(trace, format)

    assert not any(name in text for name in ("anna", "bert", "secret"))
    ids = [i for line in text.splitlines() for i in json.loads(line)["hash_ids"]]
    assert sorted(set(ids)) == list(range(len(set(ids))))


def named_trace() -> Trace:
    return Trace(
        name="t",
        format="made",
        unit_size=512,
        requests=[
            TraceRequest(
                request_id="0",
                input_length=600,
                output_length=1,
                units=array("i", [5]),
                arrival_s=0.0,
                tenant="blue",
                session="blue",
            )
        ],
    )


def test_pseudonyms_depend_on_the_salt_and_on_what_is_named() -> None:
    one, same, other = (
        json.loads(exported(named_trace(), "mooncake", salt=salt))
        for salt in ("a", "a", "b")
    )

    assert one == same
    assert one["tenant"] != other["tenant"]
    assert one["tenant"] != one["session_id"]


def test_mooncake_lines_have_the_fields_and_units_of_the_format() -> None:
    record = json.loads(exported(named_trace(), "mooncake"))

    assert {key: record[key] for key in ("timestamp", "input_length", "hash_ids")} == {
        "timestamp": 0,
        "input_length": 600,
        "hash_ids": [0],
    }
    assert "block_size" not in record  # 512 is what readers assume


def test_an_export_needs_a_salt_and_a_format_it_knows() -> None:
    with pytest.raises(ConfigError, match="salt"):
        exported(named_trace(), "mooncake", salt="")
    with pytest.raises(ConfigError, match="mooncake or bailian"):
        exported(named_trace(), "weka")  # type: ignore[arg-type]


def test_part_of_an_export_is_read_like_the_whole(tmp_path: Path) -> None:
    """The first lines may be cut off: a time with a point stays in milliseconds."""
    trace = named_trace()
    trace.unit_size = 256
    trace.requests[0].input_length = 256
    for index, arrival in enumerate([0.0100005, 0.0200005], 1):
        request = TraceRequest(
            request_id=str(index),
            input_length=256,
            output_length=1,
            units=array("i", [5]),
            arrival_s=arrival,
        )
        trace.requests.append(request)
    path = tmp_path / "tail.jsonl"
    path.write_text("".join(exported(trace, "mooncake").splitlines(True)[1:]))

    assert read_trace(path).duration_s == 0.01


def test_an_opaque_prompt_stays_one_whatever_ids_stand_beside_it(
    tmp_path: Path,
) -> None:
    trace = named_trace()
    trace.requests[0].is_opaque = True
    path = tmp_path / "opaque.jsonl"
    path.write_text(2 * exported(trace, "mooncake"))

    first, second = read_trace(path).requests

    assert first.is_opaque
    assert second.is_opaque
    assert first.units != second.units  # what is not known is not the same


def test_a_tenant_called_default_is_a_name_beside_others(tmp_path: Path) -> None:
    trace = named_trace()
    trace.requests.append(
        TraceRequest(
            request_id="1",
            input_length=600,
            output_length=1,
            units=array("i", [5]),
            arrival_s=0.0,
        )
    )

    lines = [json.loads(line) for line in exported(trace, "mooncake").splitlines()]

    assert len({line["tenant"] for line in lines}) == 2
