"""`stemkv sweep`: every combination, in order, the same with any number of jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stemkv.core.retention.policies import EVICTIONS as ONLINE_EVICTIONS
from stemkv.sim.config import EVICTIONS
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
    document = swept(
        *WORKLOAD, "--blocks", "2048,1024", "--no-clock", "--eviction", "lru"
    )

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


# Eviction policies compared

ALL = (*WORKLOAD, "--blocks", "1024,2048", "--eviction", "all", "--jobs", "1")


def test_all_policies_are_compared_without_a_clock_and_one_knows_the_future() -> None:
    document = swept(*ALL)

    cells = document["cells"]
    assert {cell["eviction"] for cell in cells} == {*EVICTIONS}
    assert {cell["sharing"] for cell in cells} == {"isolated"}
    assert len(cells) == 2 * len(EVICTIONS)
    assert document["clockless"] == []
    assert document["config"]["clock"].startswith("none")
    for cell in cells:
        assert cell["ttft_p50_s"] is None
        if cell["eviction"] in ("lru", "clairvoyant"):
            gap = float(cell["eviction"] == "clairvoyant")
            assert (cell["token_gap"], cell["seconds_gap"]) == (gap, gap)


def test_what_is_measured_is_in_the_json_only_if_it_is_asked_for() -> None:
    one, two = (stemkv("sweep", *ALL, "--json", "-") for _ in range(2))
    measured = swept(*ALL, "--cpu-time")["cells"]

    assert one.stdout == two.stdout
    assert all(cell["policy_cpu_s"] is None for cell in json.loads(one.stdout)["cells"])
    for cell in measured:
        if cell["eviction"] == "clairvoyant":
            assert cell["net_saved_s"] is None
            continue
        assert cell["policy_cpu_s"] > 0
        assert cell["net_saved_s"] < cell["saved_s"]


def test_a_comparison_has_a_table_for_each_size_and_a_picture(tmp_path: Path) -> None:
    page = tmp_path / "policies.html"

    result = stemkv("sweep", *ALL, "--html", page)

    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert text.startswith("Of 4 eviction policies “")
    for size in ("2 GiB", "4 GiB"):
        assert f"Eviction policies with {size}" in text
    for word in ("gap", "regret", "evicted", "CPU s", "net", "CPU time measured"):
        assert word in text
    assert text.count("worst") >= 2
    assert "Configurations" not in text
    assert "Gap closed between LRU and clairvoyant, in seconds" in page.read_text()


def test_with_the_clock_asked_for_both_are_done() -> None:
    document = swept(*ALL, "--clock")
    without = swept(*ALL)

    assert {cell["eviction"] for cell in document["cells"]} == {*ONLINE_EVICTIONS}
    assert all(cell["ttft_p50_s"] is not None for cell in document["cells"])
    assert all(cell["token_gap"] is None for cell in document["cells"])
    assert document["clockless"] == without["cells"]

    result = stemkv("sweep", *ALL, "--clock")

    text = " ".join(result.stdout.split())
    for words in ("Of 4 eviction policies", "Of 10 configurations", "Configurations"):
        assert words in text


def test_hints_from_hindsight_are_told_from_what_lru_does_without() -> None:
    plain = swept(*ALL)["cells"]
    document = swept(*ALL, "--hints", "next_use", "--wrong-hints", "0.2", "--seed", "3")

    assert document["config"]["hints"] == (
        "next_use, from hindsight, 0.2 of them at random, seed 3"
    )
    blind = [cell for cell in document["cells"] if not cell["is_hinted"]]
    assert [cell["eviction"] for cell in blind] == ["clairvoyant", "clairvoyant"] + [
        "lru",
        "lru",
    ]
    for cell in blind:
        assert cell["token_gap"] == float(cell["eviction"] == "clairvoyant")
    assert {cell["eviction"]: cell["is_hinted"] for cell in plain}["lru"] is False

    text = " ".join(stemkv("sweep", *ALL, "--hints", "session_end").stdout.split())
    assert "what such hints are worth at best" in text
    assert "without" in text


def test_an_objective_and_a_queue_are_passed_on() -> None:
    plain, seconds, looking = (
        swept(*WORKLOAD, "--blocks", "1024", "--no-clock", "--eviction", "gdsf", *more)
        for more in ((), ("--objective", "seconds"), ("--lookahead", "20"))
    )

    assert seconds["config"]["objective"] == "seconds"
    assert (plain["config"]["lookahead"], looking["config"]["lookahead"]) == (0, 20)
    assert looking["cells"] != plain["cells"]


def test_quotas_are_those_of_the_file_at_every_size(tmp_path: Path) -> None:
    file = tmp_path / "quotas.json"
    file.write_text('{"default": {"cap": "1GiB"}}')

    capped = swept(*WORKLOAD, *SIZES, "--quotas", file)
    free = swept(*WORKLOAD, *SIZES, "--sharing", "isolated")

    assert capped["config"]["quotas"] == "others: cap 1 GiB"
    assert free["config"]["quotas"] is None
    assert {cell["sharing"] for cell in capped["cells"]} == {"isolated"}
    for with_cap, without in zip(capped["cells"], free["cells"], strict=True):
        assert with_cap["hit_rate"] < without["hit_rate"]


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
        ([*WORKLOAD, "--eviction", "clairvoyant"], "replay with --no-clock"),
        ([*WORKLOAD, "--eviction", "lru,all"], "--eviction must be one of"),
        ([*WORKLOAD, "--eviction", "all", "--replicas", "2"], "add --clock"),
        ([*WORKLOAD, "--eviction", "all", "--quotas", "q.json"], "add --clock"),
        (
            [*WORKLOAD, "--clock", "--eviction", "all", "--quotas", "q.json"],
            "list them, as in --eviction reuse_index,lru",
        ),
        ([*WORKLOAD, "--no-clock", "--quotas", "q.json"], "--quotas needs the clock"),
        ([*WORKLOAD, "--quotas", "q.json"], "q.json: the file does not exist"),
        ([*WORKLOAD, "--objective", "joules"], "--objective must be one of"),
        ([*WORKLOAD, "--hints", "luck"], "--hints must be one of"),
        (
            [*WORKLOAD, "--wrong-hints", "0.2"],
            "--wrong-hints is of the answers of hints next_use",
        ),
        (
            [*WORKLOAD, "--hints", "next_use", "--wrong-hints", "2"],
            "--wrong-hints must be from 0 to 1",
        ),
        ([*WORKLOAD, "--lookahead", "-1"], "--lookahead must be at least 0"),
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
    text = stemkv("sweep", "--help").stdout

    assert "Example: stemkv sweep " in text
    for name in EVICTIONS:
        assert name in text
