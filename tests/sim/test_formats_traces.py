"""The real traces: what we read agrees with what their READMEs say."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from stemkv.sim.formats import read_trace
from stemkv.sim.trace import Trace

from .trace_files import shape, shared_trace, write_jsonl


def num_distinct(trace: Trace) -> int:
    return len({unit for request in trace.requests for unit in request.units})


def ideal_share(trace: Trace) -> float:
    """Share of input tokens in units that came before, in percent."""
    seen: set[int] = set()
    hit = 0
    for request in trace.requests:
        known = sum(unit in seen for unit in request.units)
        hit += min(known * trace.unit_size, request.input_length)
        seen.update(request.units)
    return 100 * hit / trace.num_input_tokens


def test_mooncake_has_the_totals_of_its_readme() -> None:
    trace = read_trace(shared_trace("mooncake/conversation_trace.jsonl.gz"))

    shape(trace)  # keeps what a trace promises
    assert (trace.format, len(trace.requests)) == ("mooncake", 12_031)
    assert trace.num_input_tokens == 144_793_823
    assert num_distinct(trace) == 182_790
    assert round(trace.duration_s) == 3537
    assert round(ideal_share(trace), 2) == 37.36
    assert (trace.notes, trace.problems) == ([], [])


@pytest.mark.parametrize(
    "name, num_requests, num_units, ideal",
    [
        ("lmcache-agent/miniswe_cl100k_blk16.jsonl.gz", 402, 10_001, 93.4),
        ("lmcache-agent/taubench_cl100k_blk16.jsonl.gz", 471, 648, 81.8),
        ("tau-bench/gpt-4o-airline_cl100k_blk16.jsonl.gz", 2_454, 31_517, 92.8),
        ("sharegpt-sample/sharegpt300_qwen3_blk16.jsonl.gz", 300, 14_756, 7.9),
    ],
)
def test_hashed_traces_have_the_totals_of_their_readmes(
    name: str, num_requests: int, num_units: int, ideal: float
) -> None:
    trace = read_trace(shared_trace(name))

    assert (trace.format, len(trace.requests)) == ("hashed", num_requests)
    assert num_distinct(trace) == num_units
    assert round(ideal_share(trace), 1) == ideal
    assert trace.problems == []


def test_requests_without_a_prompt_are_left_out_of_a_real_trace() -> None:
    trace = read_trace(shared_trace("lmcache-agent/magagent_cl100k_blk16.jsonl.gz"))

    assert (len(trace.requests), len(trace.problems)) == (693, 53)
    assert {problem.message for problem in trace.problems} == {"the prompt is empty"}
    assert num_distinct(trace) == 14_552
    assert round(ideal_share(trace), 1) == 83.9


@pytest.mark.parametrize(
    "name, num_requests, duration", [("code", 8_819, 3_436), ("conv", 19_366, 3_502)]
)
def test_azure_has_the_totals_of_its_readme(
    name: str, num_requests: int, duration: int
) -> None:
    trace = read_trace(shared_trace(f"azure-2023/AzureLLMInferenceTrace_{name}.csv.gz"))

    assert (trace.format, len(trace.requests)) == ("azure", num_requests)
    assert round(trace.duration_s) == duration
    assert ideal_share(trace) == 0.0


def test_the_first_agent_sessions_are_read_whole() -> None:
    trace = read_trace(shared_trace("kv-cache-tester/sessions.jsonl.zst"), limit=500)

    shape(trace)
    assert (trace.format, trace.unit_size, len(trace.requests)) == ("weka", 64, 500)
    assert not any("do not chain" in note for note in trace.notes)


@pytest.mark.slow
def test_the_agent_sessions_have_the_totals_of_their_readme() -> None:
    trace = read_trace(shared_trace("kv-cache-tester/sessions.jsonl.zst"))

    assert len(trace.requests) == 33_609
    assert trace.num_input_tokens == 4_335_435_086
    assert num_distinct(trace) == 2_748_147
    # Subagents count too; 552 sessions begin with a request that follows none.
    assert sum(request.parent is None for request in trace.requests) == 552
    assert trace.problems == []


def test_real_dialogues_share_about_what_their_tokens_share(tmp_path: Path) -> None:
    """Text by four characters a token against the README's cl100k tokens: 92.8 %."""
    path = shared_trace("tau-bench/gpt-4o-airline.json.gz")
    runs: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))
    records = [
        {"messages": run["traj"][:i], "session_id": str(number)}
        for number, run in enumerate(runs[:40])
        for i, message in enumerate(run["traj"])
        if message["role"] == "assistant"
    ]

    trace = read_trace(write_jsonl(tmp_path, *records))

    assert trace.format == "openai"
    assert not trace.is_exact
    assert len(trace.requests) == len(records)
    assert abs(ideal_share(trace) - 92.8) < 1.5
