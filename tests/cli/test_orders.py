"""Orders on the command line: what is compared, what is drawn, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_sweep import stemkv

MADE = ("--workload", "heavy-tenant", "--requests", "60", "--rate", "6")


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_orders_are_compared_and_drawn() -> None:
    page, file = Path("o.html"), Path("o.json")

    result = stemkv(
        "sweep", *MADE, "--order", "all", "--memory", "8GiB", "--html", page,
        "--json", file, "--jobs", "1",
    )  # fmt: skip

    assert result.exit_code == 0, result.stderr
    cells = json.loads(file.read_text())["cells"]
    assert [c["order"] for c in cells] == ["fair", "fcfs", "lpm", "dfs", "residual"]
    for cell in cells:
        found = cell["scheduling"]
        assert found["slo_ttft_s"] == 2.0  # the strict one, as none was given
        assert found["most_wait_ratio"] >= 1
        assert found["scheduler_cpu_s"] is None  # measured: not in a JSON to compare
        names = {each["name"] for each in found["classes"]}
        assert {"all", "cold", "light tenants", "tenant heavy"} <= names
    text = page.read_text()
    for title in ("Admission orders with", "The longest wait", "TTFT p95 by tenant"):
        assert title in text
    assert "scheduler CPU s" in text
    assert "admission orders" in result.stdout


def test_deadline_is_compared_where_it_has_limits() -> None:
    file = Path("o.json")

    result = stemkv(
        "sweep", *MADE, "--order", "all", "--slo-class", "heavy=1,light-0=0.5",
        "--memory", "8GiB", "--json", file, "--jobs", "1",
    )  # fmt: skip

    assert result.exit_code == 0, result.stderr
    assert "deadline" in {c["order"] for c in json.loads(file.read_text())["cells"]}


def test_every_number_of_an_order_reaches_the_replay() -> None:
    file = Path("r.json")

    result = stemkv(
        "replay", *MADE, "--lane", "2", "--quantum", "512", "--decode-weight", "1.5",
        "--no-pause-prefills", "--weights", "heavy=2", "--step-time", "40",
        "--retained-floor", "1GiB", "--session-share", "0.5", "--memory", "8GiB",
        "--json", file,
    )  # fmt: skip

    assert result.exit_code == 0, result.stderr
    config = json.loads(file.read_text())["config"]
    assert config["order"] == "fair"
    assert (config["lane"], config["quantum"], config["decode_weight"]) == (2, 512, 1.5)
    assert config["pauses_prefills"] is False
    assert config["weights"] == "heavy=2"
    assert config["step_time_s"] == 0.04
    assert config["retained_floor_blocks"] == 512
    assert config["session_share"] == 0.5
    assert "Why requests waited" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--order", "oldest"), "order must be one of fair, fcfs"),
        (("--lane", "0"), "lane must be an integer of at least 1"),
        (("--weights", "heavy"), "--weights takes names and numbers"),
        (("--weights", "a=1,a=2"), "--weights has 'a' twice"),
        (("--weights", "nobody=2"), "--weights: the trace has no tenant 'nobody'"),
        (("--weights", "a=0"), "weights of 'a' must be a number above 0"),
        (("--order", "deadline"), "order deadline needs slo_ttft_s"),
        (("--step-time", "0"), "--step-time must be a number of seconds above 0"),
        (("--retained-floor", "8GiB"), "leaves nothing"),
        (("--session-share", "2"), "sessions.share must be above 0"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_sentence(
    options: tuple[str, ...], message: str
) -> None:
    result = stemkv("replay", *MADE, "--memory", "8GiB", *options)

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_an_order_without_the_clock_is_refused() -> None:
    result = stemkv("replay", *MADE, "--no-clock", "--lane", "2")

    assert result.exit_code == 2
    assert "--lane needs the clock" in result.stderr


@pytest.mark.parametrize("has_parents", [False, True])
def test_a_closed_loop_in_which_nobody_waits_is_told(has_parents: bool) -> None:
    lines = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.0},
        {"chat_id": 2, "parent_chat_id": 1 if has_parents else -1, "timestamp": 1.0},
    ]
    usual = {"input_length": 32, "output_length": 2, "hash_ids": [1, 2], "turn": 1}
    Path("t.jsonl").write_text("\n".join(json.dumps(line | usual) for line in lines))

    result = stemkv(
        "replay", "t.jsonl", "--format", "bailian", "--loop", "closed", "--memory",
        "1GiB", "--no-curves",
    )  # fmt: skip

    assert result.exit_code == 0, result.stderr
    is_told = "no request of the trace names the turn before it" in result.stderr
    assert is_told is not has_parents


def test_a_timeline_says_why_requests_waited_and_who_held_the_memory() -> None:
    file, document = Path("t.json"), Path("r.json")

    result = stemkv(
        "replay", *MADE, "--memory", "2GiB", "--timeline", file, "--json", document,
        "--no-curves",
    )  # fmt: skip

    assert result.exit_code == 0, result.stderr
    events = json.loads(file.read_text())["traceEvents"]
    found = json.loads(document.read_text())
    drawn: dict[str, float] = {}
    open_since: dict[tuple[int, str], float] = {}
    for event in events:
        if event["name"].startswith("waiting: "):
            key = (event["id"], event["name"])
            if event["ph"] == "b":
                open_since[key] = event["ts"]
            else:
                reason = event["name"].removeprefix("waiting: ")
                seconds = (event["ts"] - open_since.pop(key)) / 1e6
                drawn[reason] = drawn.get(reason, 0.0) + seconds
    assert not open_since
    assert drawn == pytest.approx(found["scheduling"]["wait_s"], abs=1e-3)
    assert {"queue", "memory"} <= set(drawn)
    waits = [e for e in events if e["name"] == "waiting: memory" and e["ph"] == "b"]
    for wait in waits:
        assert wait["args"]["active blocks"]
        assert wait["args"]["missing blocks"] > 0
    steps = [event for event in events if event.get("cat") == "step"]
    saved_s = sum(step["args"]["saved prefill s"] for step in steps)
    assert saved_s == pytest.approx(found["saved"]["seconds"])
    joules = sum(step["args"]["saved joules"] for step in steps)
    assert joules == pytest.approx(found["saved"]["joules"])
