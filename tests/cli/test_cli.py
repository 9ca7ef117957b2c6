"""The commands as a user types them: real model, real exit codes, and a real process."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from stemkv.engine import LoadedModel, load
from tests.cli.traces import command, stemkv

pytestmark = pytest.mark.model


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "100"},
    )


def test_generate_prints_completions_cached_tokens_and_ttft(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    story = "Once upon a time, in a small village by the sea, there lived a fisherman. "

    done = in_a_process(
        "generate",
        f"--prompt={story}He",
        f"--prompt={story}She",
        "--n=3",
        "--max-tokens=5",
        f"--json={numbers}",
    )

    assert done.returncode == 0, done.stderr
    assert "cached: 16 of" in done.stdout
    assert "TTFT:" in done.stdout
    rows = json.loads(numbers.read_text())
    assert [row["sample"] for row in rows] == [0, 1, 2, 0, 1, 2]
    first, second = rows[0], rows[3]
    assert first["num_cached_tokens"] == 0
    assert second["num_cached_tokens"] == 16, "waited for the first, then reused it"
    assert all(row["num_output_tokens"] == 5 for row in rows)
    # Greedy samples of one prompt are equal, and share its prompt by forking.
    assert len({row["text"] for row in rows[:3]}) == 1
    assert rows[1]["num_inherited_tokens"] == first["num_prompt_tokens"]


@pytest.fixture(scope="module")
def _model_is_loaded_once() -> Iterator[None]:
    load_model = load.load_model

    @cache
    def loaded(model: Path | None, dtype: torch.dtype | None) -> LoadedModel:
        return load_model(model, dtype=dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            load, "load_model", lambda model, *, dtype, progress: loaded(model, dtype)
        )
        yield


@pytest.mark.usefixtures("_model_is_loaded_once")
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["generate", "--prompt="], "EmptyPrompt"),
        (["generate", "--prompt=a", "--max-tokens=0"], "--max-tokens must be"),
        (["generate", "--prompt=a", "--n=-1"], "--n must be"),
        (["generate", "--prompt=a", "--temperature=-1"], "temperature must be"),
        (["generate", "--prompt=a b", "--stop=b"], "allows_stop_in_prompt"),
        (["generate", "--prompt=a", "--max-tokens=9000"], "context of 8192 tokens"),
        (["generate", "--prompt=a", "--model=/no/such/model"], "does not exist"),
        (["generate", "--prompt=a", "--dtype=int3"], "dtype must be"),
        (["generate", "--prompt=a", "--numerics=fuzzy"], "numerics must be"),
        (["generate", "--prompt=a", "--threads=0"], "--threads must be"),
        (["demo", "--kv-tokens=3"], "--kv-tokens must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_served_ends_with_a_sentence_and_exit_code_2(
    arguments: list[str], sentence: str
) -> None:
    done = stemkv(*arguments)

    assert done.exit_code == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_model_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))

    done = stemkv("generate", "--prompt=a", f"--model={broken}")

    assert done.exit_code == 2
    assert "BrokenModel" in done.stderr
    assert str(broken) in done.stderr.replace("\n", "")
