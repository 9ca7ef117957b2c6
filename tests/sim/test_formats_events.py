"""Recordings of KV events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stemkv.errors import TraceError
from stemkv.sim.formats import read_trace

from .trace_files import write_jsonl

Hash = int | str


def stored(
    hashes: list[Hash], parent: Hash | None = None, **others: Any
) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": [4711] * (16 * len(hashes)),
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        **others,
    }


def positional(event: dict[str, Any]) -> list[Any]:
    names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size")
    return [*(event[name] for name in names), event["lora_id"], event["medium"]]


HASHES: dict[str, list[Hash]] = {
    "integers": [2**64 - 1, -5, 7, 8],
    "hex": ["00ff", "00fe", "00fd", "00fc"],
}


@pytest.mark.parametrize("is_positional", [False, True], ids=["maps", "arrays"])
@pytest.mark.parametrize("name", sorted(HASHES))
def test_stored_chains_become_requests_in_every_encoding(
    tmp_path: Path, name: str, is_positional: bool
) -> None:
    a, b, c, d = HASHES[name]
    events: list[Any] = [stored([a, b, c]), stored([d], b)]
    if is_positional:
        events = [[*positional(event), "a field of tomorrow"] for event in events]

    trace = read_trace(
        write_jsonl(tmp_path, [100.0, [events[0]], 0], [130.5, [events[1]], None])
    )

    assert (trace.format, trace.unit_size) == ("kv-events", 16)
    assert [(list(r.units), r.arrival_s) for r in trace.requests] == [
        ([0, 1, 2], 0.0),
        ([0, 1, 3], 30.5),
    ]
    assert any("reconstructed" in note for note in trace.notes)


def test_chunks_and_output_blocks_belong_to_the_request_before_them(
    tmp_path: Path,
) -> None:
    trace = read_trace(
        write_jsonl(
            tmp_path,
            [10.0, [stored([1, 2])], 0],
            [10.5, [stored([3, 4], 2)], 0],  # the next chunk
            [11.0, [stored([5], 4)], 0],  # output
            [11.5, [stored([6], 5)], 0],
            [60.0, [stored([7, 8], 6)], 0],  # the next turn
        )
    )

    first, second = trace.requests
    assert (first.input_length, first.output_length) == (64, 32)
    assert list(second.units) == list(range(8))


def test_other_mediums_groups_and_removals_are_counted_and_change_nothing(
    tmp_path: Path,
) -> None:
    events = [
        stored([1, 2], group_idx=0),
        stored([1, 2], group_idx=1),
        stored([1, 2], medium="CPU", group_idx=0),
        {"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"},
        ["AllBlocksCleared"],
        {"type": "BlockMoved"},
    ]

    trace = read_trace(
        write_jsonl(tmp_path, [1.0, events[:5], 0], [1.0, events[5:], 0])
    )

    assert [list(r.units) for r in trace.requests] == [[0, 1]]
    assert len(trace.notes) == 7  # five counts, two limits


def test_what_was_stored_before_the_recording_is_counted(tmp_path: Path) -> None:
    batch = [1.0, [stored([2], 1), stored([3], 1)], 0]

    trace = read_trace(write_jsonl(tmp_path, batch))

    assert [list(r.units) for r in trace.requests] == [[0, 1], [0, 2]]
    assert any("before the recording began" in note for note in trace.notes)


def test_adapters_and_extra_keys_separate_and_no_salt_is_kept(tmp_path: Path) -> None:
    batch = [
        1.0,
        [
            stored([1], lora_name="sql"),
            stored([2], extra_keys=[["pepper"]]),
            stored([3], extra_keys=[["salt"]]),
            stored([4], extra_keys=[["pepper"]]),
        ],
        0,
    ]

    trace = read_trace(write_jsonl(tmp_path, batch))

    identities = [r.identity for r in trace.requests]
    assert identities == ["adapter=sql", "keys=1", "keys=2", "keys=1"]
    assert not any(word in repr(trace) for word in ("pepper", "4711"))


def test_a_batch_may_be_an_object(tmp_path: Path) -> None:
    batch = {"ts": 1.0, "events": [stored([1])], "data_parallel_rank": 0}

    assert read_trace(write_jsonl(tmp_path, batch)).format == "kv-events"


@pytest.mark.parametrize(
    "field, value",
    [
        ("block_hashes", []),
        ("block_hashes", [1.5]),
        ("block_hashes", [True]),
        ("parent_block_hash", [1]),
        ("block_size", 0),
        ("block_size", 32),
        ("group_idx", "a"),
    ],
)
def test_a_broken_event_is_a_bad_line_with_its_place(
    tmp_path: Path, field: str, value: Any
) -> None:
    path = write_jsonl(
        tmp_path, [1.0, [stored([1])], 0], [2.0, [stored([2], **{field: value})], 0]
    )

    with pytest.raises(TraceError) as caught:
        read_trace(path, is_strict=True)

    assert (caught.value.line, caught.value.field) == (2, f"events.0.{field}")
