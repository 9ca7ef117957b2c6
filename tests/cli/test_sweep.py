"""`stemkv sweep`: every combination, in order, the same with any number of jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.traces import QUICK, piped_to_head, small_trace, stemkv

WORKLOAD = QUICK[:4]
SIZES = ("--memory", "2GiB,4GiB")


def swept(*arguments: str | Path) -> dict[str, Any]:
    result = stemkv("sweep", *arguments, "--json", "-")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_a_trace_alone_is_swept_over_what_the_device_leaves(tmp_path: Path) -> None:
    document = swept(small_trace(tmp_path), "--jobs", "1")

    sizes = [cell["gib"] for cell in document["cells"]]
    assert [size / sizes[-1] for size in sizes] == pytest.approx(
        [0.125, 0.125, 0.25, 0.25, 0.5, 0.5, 1, 1], abs=0.001
    )
    assert document["schema"] == "stemkv.sweep/1"
    assert [curve["name"] for curve in document["curves"]] == ["isolated", "shared"]


def test_the_json_is_equal_to_the_byte_with_any_number_of_jobs() -> None:
    arguments = ("sweep", *WORKLOAD, *SIZES, "--json", "-")

    one, two = (stemkv(*arguments, "--jobs", jobs) for jobs in ("1", "2"))

    assert one.exit_code == two.exit_code == 0
    assert one.stdout == two.stdout


def test_a_cell_is_what_a_replay_of_it_finds() -> None:
    document = swept(*WORKLOAD, *SIZES, "--jobs", "1", "--sharing", "shared")
    result = stemkv(
        *("replay", *QUICK, "--sharing", "shared", "--no-curves", "--json", "-")
    )
    alone = json.loads(result.stdout)

    cell = document["cells"][1]
    assert cell["gib"] == alone["capacity_gib"] == 4.0
    assert cell["hit_rate"] == alone["tokens"]["hit_rate"]
    assert cell["saved_s"] == alone["saved"]["seconds"]


def test_people_get_a_sentence_a_table_and_a_page(tmp_path: Path) -> None:
    page = tmp_path / "sweep.html"

    result = stemkv("sweep", *WORKLOAD, *SIZES, "--slo-ttft", "1", "--html", page)

    assert result.exit_code == 0, result.stderr
    assert "Of 4 configurations" in result.stdout
    for column in ("GiB", "sharing", "TTFT p99", "goodput"):
        assert column in result.stdout
    assert "4 of 4 configurations" in result.stderr
    assert f"wrote {page}" in result.stderr
    assert "StemKV sweep of worked-example" in page.read_text()


def test_without_a_clock_there_are_hits_only() -> None:
    document = swept(*WORKLOAD, "--blocks", "2048,1024", "--no-clock")

    cells = document["cells"]
    assert [cell["num_blocks"] for cell in cells] == [1_024, 1_024, 2_048, 2_048]
    assert all(cell["ttft_p50_s"] is None for cell in cells)
    assert all(cell["seconds_per_gib_s"] is None for cell in cells)
    lines = {curve["name"]: curve["points"] for curve in document["curves"]}
    for cell in cells:
        point = next(
            each
            for each in lines[cell["sharing"]]
            if each["num_blocks"] == cell["num_blocks"]
        )
        assert point["hit_rate"] == cell["hit_rate"]


def test_a_reader_that_goes_away_is_no_error() -> None:
    code, line, errors = piped_to_head("sweep", *WORKLOAD, *SIZES, "--no-clock")

    assert code == 0
    assert line.startswith("Of 4 configurations")
    assert "Traceback" not in errors


def test_without_a_clock_labels_tell_what_is_exact() -> None:
    result = stemkv("sweep", *WORKLOAD, *SIZES, "--no-clock")

    text = " ".join(result.stdout.split())
    assert "(hit rates and blocks exact, saved seconds estimated)" in text


def test_a_sweep_that_served_nobody_is_inconclusive(tmp_path: Path) -> None:
    result = stemkv("sweep", *WORKLOAD, "--blocks", "10,20", "--jobs", "1")

    assert result.exit_code == 3
    assert result.stdout.startswith("Inconclusive: none of 4 configurations could")

    lengths = tmp_path / "azure.csv"
    lengths.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
    )
    opaque = stemkv("sweep", lengths, "--memory", "4GiB", "--jobs", "1")

    assert opaque.exit_code == 3
    assert opaque.stdout.startswith("Inconclusive: only lengths are known")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "name a TRACE or a --workload"),
        ([*WORKLOAD, "--memory", "1GiB,,2GiB"], "--memory has an empty entry"),
        ([*WORKLOAD, "--eviction", "lru,lru"], "--eviction has an entry twice"),
        ([*WORKLOAD, "--blocks", "9,x"], "--blocks takes numbers of at least 1"),
        ([*WORKLOAD, "--eviction", "lru,mru"], "eviction must be one of"),
        ([*WORKLOAD, "--sharing", "all"], "sharing must be one of"),
        ([*WORKLOAD, "--jobs", "0"], "--jobs must be at least 1"),
        ([*WORKLOAD, *SIZES, "--blocks", "9"], "either --memory or --blocks"),
        ([*WORKLOAD, "--no-clock", "--replicas", "2"], "--replicas needs the clock"),
        ([*WORKLOAD, "--no-clock", "--order", "fcfs"], "--order needs the clock"),
        ([*WORKLOAD, "--no-clock", "--slo-tpot", "1"], "--slo-tpot needs the clock"),
        ([*WORKLOAD, "--html", "-"], "only --json"),
        ([*WORKLOAD, "--html", "no/such/folder/a.html"], "folder does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_call_ends_with_a_sentence_and_code_two(
    arguments: list[str], sentence: str
) -> None:
    result = stemkv("sweep", *arguments)

    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_help_has_an_example() -> None:
    assert "Example: stemkv sweep " in stemkv("sweep", "--help").stdout
