"""The demo compares what it says it compares, and fails when it should."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
import torch
from rich.console import Console

from stemkv.cli import demo
from stemkv.cli.worked_example import load_requests, shared_messages
from stemkv.engine import load_model

pytestmark = pytest.mark.model


def test_the_worked_example_is_what_it_says() -> None:
    requests = load_requests(random.Random(0))

    assert len(requests) == 24
    assert sum(r.shares_prefix for r in requests) == 10
    assert {r.tenant for r in requests} == {"acme", "globex"}
    assert all(16 <= r.max_new_tokens <= 32 for r in requests)
    shared = shared_messages()
    for request in requests:
        assert (request.messages[: len(shared)] == shared) == request.shares_prefix
    assert load_requests(random.Random(0)) == requests


@pytest.fixture
def short_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of the requests, so that the test takes seconds."""

    def few(rng: random.Random) -> tuple[demo.ExampleRequest, ...]:
        requests = load_requests(rng)
        sharing = [r for r in requests if r.shares_prefix]
        single = sorted(
            (r for r in requests if not r.shares_prefix),
            key=lambda r: len(r.messages[-1]["content"]),
        )
        return (*sharing[:2], *single[:2])

    monkeypatch.setattr(demo, "load_requests", few)


def run(tmp_path: Path) -> tuple[bool, str, dict[str, object]]:
    out = io.StringIO()
    console = Console(file=out, width=120)
    file = tmp_path / "demo.json"
    page = tmp_path / "demo.html"
    is_equal = demo.run_demo(console, load_model(), demo.DemoOptions(), file, page)
    return is_equal, out.getvalue(), json.loads(file.read_text())


@pytest.mark.usefixtures("short_example")
def test_the_demo_reports_reuse_and_equal_bits(tmp_path: Path) -> None:
    is_equal, text, report = run(tmp_path)

    assert is_equal
    page = (tmp_path / "demo.html").read_text()
    assert "bit for bit equal: 4 of 4 outputs" in text
    assert "bit for bit equal: 4 of 4 outputs" in page
    assert "TTFT p50, sharing requests" in page
    off, on = report["reuse_off"], report["reuse_on"]
    assert isinstance(off, dict)
    assert isinstance(on, dict)
    assert off["prompt_tokens_reused"] == 0
    assert on["prompt_tokens_reused"] > 1900
    total = report["num_prompt_tokens"]
    for numbers in (off, on):
        assert (
            numbers["prompt_tokens_reused"] + numbers["prompt_tokens_computed"] == total
        )
    assert on["cached_bytes"] > 0
    assert off["cached_bytes"] == 0


@pytest.mark.usefixtures("short_example")
def test_a_single_different_bit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = demo._run

    def with_a_flipped_bit(*arguments: object) -> object:
        run = keep(*arguments)  # type: ignore[arg-type]
        if arguments[3] == "reuse on":
            row = run.logits[min(run.logits)][0].view(torch.uint8)
            row[5] ^= 1
        return run

    monkeypatch.setattr(demo, "_run", with_a_flipped_bit)

    is_equal, text, report = run(tmp_path)

    assert not is_equal
    assert report["logits_differing"] == 1
    assert "DIFFERENT" in text
    assert "DIFFERENT" in (tmp_path / "demo.html").read_text()
