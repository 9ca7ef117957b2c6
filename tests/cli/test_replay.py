"""`stemkv replay`: what is asked is what is replayed, and scripts can rely on it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from stemkv.cli.deployment import DeploymentOptions, deploy
from stemkv.cli.thresholds import NUMBERS, Judgement, judge, parse_thresholds
from stemkv.cli.traces import parse_map
from stemkv.core.books.cost import FittedCost
from stemkv.errors import ConfigError
from stemkv.sim.fit import write_cost
from tests.cli.traces import (
    QUICK,
    bad_trace,
    command,
    piped_to_head,
    small_trace,
    stemkv,
    writes,
)
from tests.report.examples import make_result


def replayed(*arguments: str | Path) -> dict[str, Any]:
    """Replay to JSON on standard output, which must hold nothing else."""
    result = stemkv("replay", *arguments, "--json", "-")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# The defaults


def test_a_trace_alone_is_enough(tmp_path: Path) -> None:
    result = stemkv("replay", small_trace(tmp_path))

    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("Reuse saved ")
    text = " ".join(result.stdout.split())
    assert "llama-3.1-8b (bf16, KV bf16) on h100, estimated" in text
    for title in ("Where the prompt tokens went", "Tenants", "Latencies", "Bounds"):
        assert title in result.stdout


def test_memory_is_what_the_device_leaves_beside_the_weights(tmp_path: Path) -> None:
    trace = small_trace(tmp_path)

    left = replayed(trace, "--no-curves")["capacity_gib"]
    less = replayed(trace, "--no-curves", "--kv-dtype", "fp8")

    assert left == pytest.approx((0.9 * 80e9 - 2 * 8_030_261_248) / 2**30, abs=0.002)
    assert less["num_blocks"] == pytest.approx(2 * left * 2**30 / 2**21, abs=2)


def test_the_demo_needs_no_input_and_writes_a_page_and_says_so() -> None:
    result = stemkv("replay", "--demo", "--requests", "40")

    assert result.exit_code == 0, result.stderr
    assert "isolating tenants costs" in " ".join(result.stdout.split())
    assert "wrote stemkv-replay.html" in result.stderr
    page = Path("stemkv-replay.html").read_text()
    assert "StemKV replay of worked-example" in page
    assert "TTFT within 1" in page


def test_the_demo_takes_other_settings_than_its_own() -> None:
    arguments = ("--demo", "--requests", "20", "--html", "other.html", "--no-curves")
    document = replayed(*arguments, "--blocks", "5000", "--slo-ttft", "3")

    assert Path("other.html").exists()
    assert not Path("stemkv-replay.html").exists()
    assert document["num_blocks"] == 5_000
    assert document["slo_ttft_s"] == 3.0
    assert document["trace"]["num_tenants"] == 3


# For scripts


def test_the_demos_json_is_equal_to_the_byte() -> None:
    arguments = ("replay", "--demo", "--requests", "40", "--json", "-")

    first, second = stemkv(*arguments), stemkv(*arguments)

    assert first.exit_code == second.exit_code == 0
    assert first.stdout == second.stdout
    assert json.loads(first.stdout)["schema"] == "stemkv.replay/1"


def test_with_json_on_standard_output_people_read_standard_error() -> None:
    result = stemkv("replay", *QUICK, "--json", "-")

    assert json.loads(result.stdout)["num_finished"] == 30
    assert "Reuse saved " in result.stderr


def test_another_seed_is_another_workload() -> None:
    one, other = (replayed(*QUICK, "--seed", seed)["tokens"] for seed in ("1", "2"))

    assert one != other


@pytest.mark.parametrize(
    "conditions, code",
    [
        ([], 0),
        (["hit-rate<10%", "skipped>0"], 0),
        (["hit-rate>10%"], 1),
        (["hit-rate>0.1"], 1),
        (["ttft-p99>0"], 1),
        (["goodput<1"], 3),  # nobody said what is good
        (["goodput<1", "refused>=0"], 1),  # the worst wins
    ],
    ids=str,
)
def test_the_exit_code_says_whether_a_condition_is_met(
    conditions: list[str], code: int, tmp_path: Path
) -> None:
    options = [f"--fail-on={condition}" for condition in conditions]

    result = stemkv("replay", small_trace(tmp_path), "--no-curves", *options)

    assert result.exit_code == code, result.output
    for condition in conditions:
        assert f": {condition}: " in result.stdout


def test_nothing_that_finished_is_inconclusive_and_no_success() -> None:
    result = stemkv("replay", *QUICK[:4], "--blocks", "10")

    assert result.exit_code == 3
    assert "no request finished" in result.stdout
    assert "30 requests could never run" in result.stdout
    assert "No admission waited" not in result.stdout

    judged = stemkv("replay", *QUICK[:4], "--blocks", "10", "--fail-on", "ttft-p50>0")

    assert judged.exit_code == 3
    assert "undecided: ttft-p50>0: no request finished" in judged.stdout


@pytest.mark.parametrize("clock", ["--clock", "--no-clock"])
def test_a_hit_rate_is_not_judged_where_prompts_are_unknown(
    clock: str, tmp_path: Path
) -> None:
    lengths = tmp_path / "azure.csv"
    lengths.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
    )

    result = stemkv("replay", lengths, clock, "--fail-on", "hit-rate<0.3")

    assert result.exit_code == 3
    assert "undecided: hit-rate<0.3: only lengths of the prompts" in result.stdout
    assert result.stdout.startswith("Inconclusive: only lengths are known")
    for claim in ("never seen", "Bounds", "hit rate %", "stalled nobody"):
        assert claim not in result.stdout
    assert stemkv("replay", lengths, clock).exit_code == 3


@pytest.mark.parametrize(
    "condition, judgement",
    [
        ("hit-rate<30%", Judgement.UNDECIDED),  # it may be more
        ("hit-rate<10%", Judgement.NOT_MET),
        ("hit-rate>10%", Judgement.MET),
        ("hit-rate>30%", Judgement.UNDECIDED),
        ("refused>0", Judgement.NOT_MET),
    ],
)
def test_with_some_prompts_unknown_a_hit_rate_is_a_lower_bound(
    condition: str, judgement: Judgement
) -> None:
    trace = dataclasses.replace(make_result().trace, num_opaque=7)
    numbers = {"hit-rate": 0.2, "refused": 0.0}

    (found,) = judge(parse_thresholds([condition]), numbers, trace, num_finished=400)

    assert found.judgement is judgement


def test_prompts_that_share_nothing_have_a_hit_rate_that_is_judged(
    tmp_path: Path,
) -> None:
    record = {"timestamp": 0, "input_length": 600, "output_length": 5}
    trace = writes(tmp_path, *({**record, "hash_ids": [i, i + 1]} for i in (1, 3)))

    result = stemkv("replay", trace, "--no-curves", "--fail-on", "hit-rate<30%")

    assert result.exit_code == 1, result.output
    assert "met: hit-rate<30%: it is 0" in result.stdout


@pytest.mark.parametrize("clock", ["--clock", "--no-clock"])
def test_memory_beyond_the_device_is_noted(clock: str) -> None:
    note = "is more than the device leaves beside the weights"

    for size, is_noted in (("200GiB", True), ("8GiB", False)):
        result = stemkv("replay", *QUICK[:4], "--memory", size, "--no-curves", clock)

        assert result.exit_code == 0, result.stderr
        text = " ".join(result.stdout.split())
        assert (f"200 GiB {note}" in text) == is_noted


@pytest.mark.parametrize("json_file", [None, "-"], ids=["text", "json"])
def test_a_reader_that_goes_away_changes_nothing_else(
    json_file: str | None, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    to_json = () if json_file is None else ("--json", json_file)
    failing = ("--fail-on", "hit-rate>0")

    code, line, errors = piped_to_head(
        "replay", *QUICK, *failing, "--html", page, *to_json
    )

    assert code == 1
    assert line
    assert "Traceback" not in errors
    assert "Broken pipe" not in errors
    assert page.exists()


# What is wrong


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "name a TRACE or a --workload"),
        (["no/such/file"], "no/such/file: cannot be read"),
        (["a.jsonl", "--workload", "chat"], "not both"),
        (["a.jsonl", "--requests", "3"], "a trace takes --limit"),
        ([*QUICK, "--strict"], "a workload takes --requests"),
        ([*QUICK, "--blocks", "9"], "either --memory or --blocks"),
        ([*QUICK[:4], "--memory", "much"], "memory must be a number and a unit"),
        ([*QUICK[:4], "--memory", "1kB"], "less than one block"),
        ([*QUICK, "--model", "gpt-9"], "'gpt-9' is not in the catalogue"),
        ([*QUICK, "--device", "abacus"], "'abacus' is not in the catalogue"),
        ([*QUICK, "--kv-dtype", "int3"], "--kv-dtype must be one of"),
        ([*QUICK, "--eviction", "mru"], "--eviction must be one of reuse_index, lru"),
        ([*QUICK, "--eviction", "all"], "`stemkv sweep --eviction all`"),
        ([*QUICK, "--eviction", "clairvoyant"], "replay with --no-clock"),
        ([*QUICK, "--objective", "luck"], "--objective must be one of"),
        ([*QUICK, "--hints", "luck"], "--hints must be one of"),
        ([*QUICK, "--lookahead", "-1"], "--lookahead must be at least 0"),
        ([*QUICK, "--order", "none"], "order must be one of"),
        ([*QUICK, "--sharing", "all"], "sharing must be one of"),
        ([*QUICK, "--routing", "away"], "routing must be one of"),
        ([*QUICK, "--loop", "round"], "loop must be open or closed"),
        ([*QUICK, "--rate", "-1"], "rate must be above 0"),
        ([*QUICK, "--budget", "0"], "--budget must be"),
        ([*QUICK, "--devices", "0"], "--devices must be at least 1"),
        ([*QUICK, "--fail-on", "luck<1"], "luck is no number"),
        ([*QUICK, "--fail-on", "hit-rate"], "--fail-on takes NAME<LIMIT"),
        ([*QUICK, "--fail-on", "skipped>nan"], "is no finite number"),
        ([*QUICK, "--fail-on", "hit-rate<60"], "for 60 percent write 60%"),
        ([*QUICK, "--fail-on", "goodput-share<-0.1"], "from 0 to 1 or from 0% to 100%"),
        ([*QUICK, "--fail-on", "hit-rate>120%"], "from 0 to 1 or from 0% to 100%"),
        ([*QUICK, "--fail-on", "ttft-p99>20%"], "in seconds as 0.5 or 500ms"),
        ([*QUICK, "--fail-on", "skipped>3s"], "skipped is no share or time"),
        ([*QUICK, "--slo-ttft", "nan"], "--slo-ttft must be"),
        ([*QUICK, "--slo-tpot", "-1"], "--slo-tpot must be"),
        ([*QUICK, "--html", "-"], "only --json"),
        ([*QUICK, "--no-clock", "--slo-ttft", "1"], "--slo-ttft needs the clock"),
        ([*QUICK, "--no-clock", "--loop", "open"], "--loop needs the clock"),
        ([*QUICK, "--no-clock", "--budget", "8192"], "--budget needs the clock"),
        (["a.jsonl", "--no-clock", "--rate", "2"], "--rate needs the clock"),
        ([*QUICK, "--html", "no/such/folder/a.html"], "folder does not exist"),
        ([*QUICK, "--no-clock", "--timeline", "t"], "--timeline needs the clock"),
        ([*QUICK, "--no-clock", "--fail-on", "ttft-p99>1"], "drop --no-clock"),
        (["a.jsonl", "--map", "tenant"], "--map takes ROLE=PATH"),
        (["--demo", "a.jsonl"], "--demo takes no trace"),
        (["--workload", "dreams"], "there are worked-example, chat"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_call_ends_with_a_sentence_and_code_two(
    arguments: list[str], sentence: str
) -> None:
    result = stemkv("replay", *arguments)

    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_bad_line_is_named_counted_and_left_out(tmp_path: Path) -> None:
    result = stemkv("replay", bad_trace(tmp_path), "--fail-on", "skipped>0")

    assert result.exit_code == 1
    assert "bad.jsonl:2: input_length: " in result.stdout
    assert "met: skipped>0: it is 1" in result.stdout


def test_strict_stops_at_a_bad_line(tmp_path: Path) -> None:
    result = stemkv("replay", bad_trace(tmp_path), "--strict")

    assert result.exit_code == 2
    assert "TraceError" in result.stderr
    assert "bad.jsonl:2: input_length: " in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("package", ["msgspec", "numpy", "zstandard"])
def test_a_missing_extra_is_named_with_what_to_install(package: str) -> None:
    done = subprocess.run(
        command("replay", *QUICK, without=package),
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 2
    assert f"{package} is missing" in done.stderr
    assert "pip install 'stemkv[cli,sim,report]'" in done.stderr
    assert "Traceback" not in done.stderr


# What is read


def test_standard_input_is_a_trace(tmp_path: Path) -> None:
    text = small_trace(tmp_path).read_text()

    result = stemkv("replay", "-", "--no-curves", stdin=text)

    assert result.exit_code == 0, result.stderr
    assert "Reuse saved" in result.stdout


def test_fields_of_any_log_can_be_mapped(tmp_path: Path) -> None:
    log = writes(
        tmp_path,
        *(
            {"at": 1.5 * i, "who": {"team": f"t{i % 2}"}, "said": "same words " * 40}
            for i in range(6)
        ),
    )

    mapping = ("arrival=at:s", "tenant=who.team", "prompt=said")
    document = replayed(
        log,
        "--tokens",
        "words",
        "--no-curves",
        *(part for entry in mapping for part in ("--map", entry)),
    )

    assert [each["tenant"] for each in document["tenants"]] == ["t0", "t1"]
    assert document["tokens"]["prompt"] == 6 * 80
    assert document["trace"]["is_exact"]
    assert document["trace"]["duration_s"] == pytest.approx(7.5)


def test_a_limit_reads_the_first_requests(tmp_path: Path) -> None:
    document = replayed(small_trace(tmp_path), "--limit", "5", "--no-curves")

    assert document["trace"]["num_requests"] == 5


def test_a_rate_makes_a_traces_arrivals_faster(tmp_path: Path) -> None:
    trace = small_trace(tmp_path)

    usual = replayed(trace, "--no-curves")
    quick = replayed(trace, "--no-curves", "--rate", "10")

    last = [max(r["arrival_s"] for r in each["requests"]) for each in (usual, quick)]
    assert last == [pytest.approx(5.5), pytest.approx(0.55)]


def test_a_rate_of_a_workload_is_requests_per_second() -> None:
    document = replayed(*QUICK, "--rate", "4", "--no-curves")

    assert document["config"]["rate"] == 1.0
    assert 30 / document["trace"]["duration_s"] == pytest.approx(4.0, rel=0.5)


def test_a_role_is_mapped_once() -> None:
    assert parse_map(["a = b.c", "d=e=f"]) == {"a": "b.c", "d": "e=f"}
    with pytest.raises(ConfigError, match="tenant twice: a and b"):
        parse_map(["tenant=a", "tenant=b"])


# What is replayed


def test_sharing_is_what_it_is_called(tmp_path: Path) -> None:
    trace = small_trace(tmp_path)

    reused = {
        rule: replayed(trace, "--sharing", rule, "--no-curves")["tokens"]["reused"]
        for rule in ("isolated", "public", "shared")
    }

    assert reused["isolated"] == 10 * 1_024  # the first of each tenant finds nothing
    assert reused["shared"] == 11 * 1_024
    assert reused["public"] == 11 * 1_024


def test_replicas_and_limits_arrive_where_they_belong(tmp_path: Path) -> None:
    document = replayed(
        small_trace(tmp_path),
        "--no-curves",
        *("--replicas", "2", "--routing", "session", "--budget", "512"),
        *("--max-running", "3", "--block-size", "32", "--blocks", "600"),
        *("--loop", "closed", "--spread", "0.5", "--seed", "7"),
        *("--slo-ttft", "1", "--slo-tpot", "0.5"),
    )

    expected = {
        "num_replicas": 2,
        "routing": "session",
        "token_budget": 512,
        "max_num_running": 3,
        "block_size": 32,
        "num_blocks": 600,
        "loop": "closed",
        "spread_s": 0.5,
        "seed": 7,
    }
    assert expected.items() <= document["config"].items()
    assert document["goodput_share"] == 1.0


def test_curves_and_bounds_stand_in_the_json_unless_left_out() -> None:
    document = replayed(*QUICK)
    without = replayed(*QUICK, "--no-curves")

    names = [curve["name"] for curve in document["curves"]]
    assert names == ["shared", "isolated", "clairvoyant, isolated"]
    assert len(document["bounds"]) == 4
    assert without["curves"] == without["bounds"] == []
    assert document["opportunity"] is not None  # which follows from a curve
    assert {**document, "curves": [], "bounds": [], "opportunity": None} == without


def test_costs_come_from_a_calibration(tmp_path: Path) -> None:
    cost = FittedCost(
        source="a small engine",
        bytes_per_token=1_024,
        flops_per_token=1e6,
        flops_per_pair=1e3,
        assumed_watts=65.0,
        step_s=0.01,
        prefill_chunk_s=0.0,
        prefill_token_s=0.001,
        prefill_pair_s=0.0,
        decode_s=0.001,
        decode_context_s=0.0,
    )
    file = tmp_path / "cost.json"
    write_cost(cost, file)
    trace = small_trace(tmp_path)

    document = replayed(trace, "--cost", file, "--memory", "8MiB", "--no-curves")

    assert document["cost_source"] == "a small engine"
    assert document["num_blocks"] == 512
    assert document["saved"]["seconds"] == pytest.approx(10 * 1_024 * 0.001)
    with pytest.raises(ConfigError, match="--model would say so again"):
        DeploymentOptions(cost=file, model="qwen3-8b")
    with pytest.raises(ConfigError, match="give --memory or --blocks"):
        deploy(DeploymentOptions(cost=file)).blocks_left(1.0)


def test_policies_and_hints_arrive_where_they_belong(tmp_path: Path) -> None:
    document = replayed(
        *(*QUICK, "--no-curves", "--eviction", "gdsf", "--objective", "seconds"),
        *("--hints", "none", "--lookahead", "5"),
    )
    default = replayed(*QUICK, "--no-curves")["config"]

    expected = {
        "eviction": "gdsf",
        "objective": "seconds",
        "hints": "none",
        "lookahead": 5,
        "quotas": None,
    }
    assert expected.items() <= document["config"].items()
    assert (default["eviction"], default["objective"]) == ("reuse_index", "tokens")
    assert (default["hints"], default["lookahead"]) == ("trace", 32)


def test_hints_of_a_trace_are_in_the_books(tmp_path: Path) -> None:
    record = {"input_length": 1_024, "output_length": 2, "hash_ids": [1, 2]}
    trace = writes(
        tmp_path,
        {**record, "timestamp": 0, "ephemeral_from": 512},
        {**record, "timestamp": 9_000},
    )

    told = replayed(trace, "--no-curves")
    ignored = replayed(trace, "--no-curves", "--hints", "none")

    assert told["tokens"]["misses"]["not_retained"] == 496  # less the last block
    assert told["refused_bytes"] == 32 * told["block_bytes"]
    assert ignored["refused_bytes"] == ignored["tokens"]["misses"]["not_retained"] == 0


def test_without_a_clock_a_policy_may_know_the_future() -> None:
    best, lru = (
        replayed(*QUICK, "--no-clock", "--no-curves", "--eviction", name)
        for name in ("clairvoyant", "lru")
    )

    assert best["config"]["eviction"] == "clairvoyant"
    assert best["hit_rate"] > lru["hit_rate"]


# What is written


def test_the_ledger_has_a_row_per_request_and_the_timeline_every_one() -> None:
    ledger, timeline = Path("ledger.parquet"), Path("timeline.json")

    result = stemkv(*("replay", *QUICK, "--parquet", ledger, "--timeline", timeline))

    assert result.exit_code == 0, result.stderr
    assert "wrote ledger.parquet" in result.stderr
    table = pq.read_table(ledger)
    assert table.num_rows == 30
    assert table.schema.metadata[b"eviction"] == b"reuse_index"
    events = json.loads(timeline.read_text())["traceEvents"]
    begun = [e for e in events if e["ph"] == "b" and "args" in e]
    stalls = [e for e in begun if e["name"] == "waiting: memory"]
    assert len(begun) - len(stalls) == 30
    assert all(stall["args"]["active blocks"] for stall in stalls)


def test_without_a_clock_hits_are_those_of_the_curve_and_latencies_are_none() -> None:
    page = Path("page.html")
    document = replayed(*QUICK, "--no-clock", "--eviction", "lru", "--html", page)

    lru = next(c for c in document["curves"] if c["name"] == "isolated")
    own = next(p for p in lru["points"] if p["num_blocks"] == document["num_blocks"])
    assert document["schema"] == "stemkv.sequence/1"
    assert document["hit_rate"] == own["hit_rate"] > 0
    assert not any("ttft" in key for key in document)
    assert "without a clock" in page.read_text()


def test_without_a_clock_a_terminal_shows_tenants_and_bounds(tmp_path: Path) -> None:
    result = stemkv("replay", bad_trace(tmp_path), "--no-clock")

    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("Without a clock, ")
    for text in ("Tenants", "Bounds", "left out: ", "bad.jsonl:2: input_length"):
        assert text in result.stdout


def test_names_with_brackets_are_no_markup(tmp_path: Path) -> None:
    tenants = ("[bold]a", "b[/red]")

    for clock in ("--clock", "--no-clock"):
        result = stemkv("replay", small_trace(tmp_path, tenants=tenants), clock)

        assert result.exit_code == 0, result.stderr
        for tenant in tenants:
            assert tenant in result.stdout


def test_help_has_an_example_and_every_name_of_a_condition() -> None:
    result = stemkv("replay", "--help")

    assert "Example: stemkv replay " in result.stdout
    text = "".join(result.stdout.split())  # help folds words at their hyphens
    for name in NUMBERS:
        family, _, statistic = name.rpartition("-")
        is_latency = family in ("ttft", "tpot", "itl", "e2e", "queue")
        for word in (family, f"-{statistic}") if is_latency else (name,):
            assert word in text, name


@pytest.mark.parametrize(
    "text, name, comparison, limit",
    [
        ("hit-rate<30%", "hit-rate", "<", 0.3),
        (" ttft-p99 >= 2e-1 ", "ttft-p99", ">=", 0.2),
        ("skipped>0", "skipped", ">", 0.0),
        ("goodput-share<100%", "goodput-share", "<", 1.0),
        ("ttft-p99>10ms", "ttft-p99", ">", 0.01),
        ("stall-seconds>1.5 s", "stall-seconds", ">", 1.5),
    ],
)
def test_a_condition_is_a_name_a_comparison_and_a_limit(
    text: str, name: str, comparison: str, limit: float
) -> None:
    (found,) = parse_thresholds([text])

    assert (found.name, found.comparison) == (name, comparison)
    assert found.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    "size, is_warned", [("32768", True), ("64", False)], ids=["large", "usual"]
)
def test_a_block_that_no_prompt_fills_is_told_at_once_and_in_every_report(
    tmp_path: Path, size: str, is_warned: bool
) -> None:
    page, file = tmp_path / "r.html", tmp_path / "r.json"

    result = stemkv(
        "replay", "--workload", "worked-example", "--requests", "8", "--no-curves",
        "--memory", "8GiB", "--block-size", size, "--html", page, "--json", file,
    )  # fmt: skip

    found = json.loads(file.read_text())
    assert bool(found["trace"]["warnings"]) == is_warned
    assert (found["tokens"]["reused"] == 0) == is_warned
    assert ("Warning: nothing can be reused" in page.read_text()) == is_warned
    assert ("Warning: nothing can be reused" in result.stdout) == is_warned
    assert (
        f"warning: nothing can be reused: a block has {int(size):,} tokens"
        in result.stderr
    ) == is_warned
    assert 0 < found["peak_active_tokens"] <= found["peak_active_blocks"] * int(size)


def test_a_unit_longer_than_all_prompts_is_told_without_a_clock_too(
    tmp_path: Path,
) -> None:
    trace, file = tmp_path / "short.jsonl", tmp_path / "r.json"
    lines = [
        {"timestamp": at_ms, "input_length": 9, "output_length": 2, "hash_ids": []}
        for at_ms in (0, 1000)
    ]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    result = stemkv(
        "replay", trace, "--no-clock", "--no-curves", "--blocks", "64", "--json", file
    )

    (warning,) = json.loads(file.read_text())["trace"]["warnings"]
    assert "no prompt has a whole unit of 512 tokens, the longest has 9" in warning
    assert warning.partition(";")[0] in result.stderr
