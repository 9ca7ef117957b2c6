"""`stemkv export`: the same traffic, and nobody's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stemkv.sim.formats import read_trace
from tests.cli.traces import QUICK, bad_trace, small_trace, stemkv
from tests.sim.trace_files import shape


def numbers(trace: Path) -> dict[str, Any]:
    result = stemkv("replay", trace, "--no-curves", "--json", "-")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    return {key: document[key] for key in ("tokens", "saved", "latencies", "num_steps")}


@pytest.mark.parametrize("form", ["mooncake", "bailian"])
def test_an_export_is_replayed_alike_and_names_nobody(
    form: str, tmp_path: Path
) -> None:
    trace, out = small_trace(tmp_path), tmp_path / "out.jsonl"

    result = stemkv("export", trace, "--out", out, "--as", form, "--salt", "s3cret")

    assert result.exit_code == 0, result.stderr
    assert f"wrote 12 requests to {out} as {form}" in result.stderr
    assert shape(read_trace(out)) == shape(read_trace(trace))
    assert numbers(out) == numbers(trace)
    text = out.read_text()
    assert not any(word in text for word in ("acme", "globex", "s3cret"))


def test_equal_salts_give_equal_names_and_none_gives_new_ones(tmp_path: Path) -> None:
    trace = small_trace(tmp_path)

    def exported(*salt: str) -> str:
        result = stemkv("export", trace, *salt)
        assert result.exit_code == 0, result.stderr
        assert ("random salt" in result.stderr) == (not salt)
        return result.stdout

    assert exported("--salt", "a") == exported("--salt", "a")
    assert exported("--salt", "a") != exported("--salt", "b")
    assert exported() != exported()


def test_standard_output_is_a_trace_for_the_next_command(tmp_path: Path) -> None:
    written = stemkv("export", small_trace(tmp_path)).stdout

    assert stemkv("replay", "-", "--no-curves", stdin=written).exit_code == 0


def test_a_workload_can_be_exported(tmp_path: Path) -> None:
    result = stemkv("export", *QUICK[:4])

    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 30


def test_lines_left_out_are_said(tmp_path: Path) -> None:
    result = stemkv("export", bad_trace(tmp_path))

    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 3
    assert "left out: 1, first: " in result.stderr
    assert "bad.jsonl:2: input_length" in result.stderr


def test_a_trace_is_never_written_over_itself(tmp_path: Path) -> None:
    trace = small_trace(tmp_path)
    before = trace.read_bytes()
    link = tmp_path / "link.jsonl"
    link.symlink_to(trace)

    for out in (trace, link):
        result = stemkv("export", trace, "--out", out)

        assert result.exit_code == 2
        assert f"--out {out} is the same file as the trace {trace}" in result.stderr
    assert trace.read_bytes() == before


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "name a TRACE or a --workload"),
        (["no/such/file"], "no/such/file: cannot be read"),
        ([*QUICK[:4], "--as", "csv"], "--as must be mooncake or bailian, got 'csv'"),
        ([*QUICK[:4], "--salt", ""], "salt must not be empty"),
        ([*QUICK[:4], "--out", "no/such/folder/a"], "folder does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_call_ends_with_a_sentence_and_code_two(
    arguments: list[str], sentence: str
) -> None:
    result = stemkv("export", *arguments)

    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


def test_help_has_an_example() -> None:
    assert "Example: stemkv export " in stemkv("export", "--help").stdout
