"""`stemkv identity`: the same words in every process, and those of the engine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stemkv.cli.identity import IdentityOptions, run_identity
from stemkv.core.prefix.identity import FIELD_TAGS, SCHEMA_VERSION
from stemkv.engine import Engine, EngineConfig, load_model
from stemkv.engine.adapter import read_adapter
from stemkv.errors import ConfigError, ModelNotFound
from tests.cli.traces import stemkv
from tests.engine.models import build_engine
from tests.engine.test_load import save

FLOAT32 = IdentityOptions(dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny-llama")


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from stemkv.cli import main; main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "100", **environment},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def document(
    capsys: pytest.CaptureFixture[str], model: Path | None, options: IdentityOptions
) -> dict[str, Any]:
    capsys.readouterr()
    run_identity(model, options, Path("-"))
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


# The text


def test_every_process_prints_the_same(folder: Path, tmp_path: Path) -> None:
    """Three at once, one of them hashing anew, sharing one digest record (LMCache#2136)."""
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    common = ("identity", str(folder), "--dtype=float32")
    processes = [
        start(*common, *more, PYTHONHASHSEED=seed, **cache)
        for seed, more in (
            ("0", ()),
            ("4242", ("--recompute",)),
            ("random", ()),
        )
    ]
    results = [finish(process) for process in processes]

    assert [code for code, _, _ in results] == [0] * 3, results
    (printed,) = {out for _, out, _ in results}
    engine = build_engine(load_model(folder, dtype=torch.float32), block_size=16)
    assert engine.namespace is not None
    assert printed.splitlines()[-1] == f"namespace: {engine.namespace.hex()}"
    assert all("loading weights" in err for _, _, err in results)


def test_the_text_is_canonical_json_then_encoding_and_namespace(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_identity(folder, FLOAT32, None)
    *lines, encoding, namespace = capsys.readouterr().out.splitlines()

    facts = json.loads("".join(lines))
    assert list(facts) == list(FIELD_TAGS)
    assert len(lines) == len(FIELD_TAGS), "a line for each field"
    compact = json.dumps(facts, separators=(",", ":"))
    assert "".join(lines) == compact
    engine = build_engine(load_model(folder, dtype=torch.float32), block_size=16)
    for name, value in facts.items():
        held = getattr(engine.identity, name)
        assert value == (held.hex() if isinstance(held, bytes) else held), name
    assert encoding == f"encoding: {engine.identity.encode().hex()}"
    digest = hashlib.sha256(engine.identity.encode()).hexdigest()
    assert namespace == f"namespace: {digest}"


def test_a_dash_leaves_one_json_document_on_standard_output(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = document(capsys, folder, FLOAT32)
    assert result["schema_version"] == SCHEMA_VERSION
    assert list(result["identity"]) == list(FIELD_TAGS)
    encoded = bytes.fromhex(result["encoding"])
    assert hashlib.sha256(encoded).hexdigest() == result["namespace"]

    file = tmp_path / "identity.json"
    run_identity(folder, FLOAT32, file)
    assert json.loads(file.read_text()) == result
    assert result["namespace"] in capsys.readouterr().out


def test_nothing_says_where_the_model_lies(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = save(tmp_path / "moved")
    assert document(capsys, folder, FLOAT32) == document(capsys, moved, FLOAT32)
    assert str(tmp_path) not in json.dumps(document(capsys, moved, FLOAT32))


# Options


@pytest.mark.parametrize(
    "options, changed",
    [
        ({"block_size": 32}, ["block_size"]),
        ({"start_position": 7}, ["start_position"]),
        ({"numerics": "tolerant"}, ["numerics_class"]),
        ({"dtype": "bfloat16"}, ["kv_dtype", "weights_digest"]),
        ({"trusts_digest_record": False}, []),
    ],
    ids=str,
)
def test_options_change_the_facts_they_name(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    changed: list[str],
) -> None:
    base = document(capsys, folder, FLOAT32)
    other = document(capsys, folder, IdentityOptions(**{"dtype": "float32"} | options))
    facts, others = base["identity"], other["identity"]
    # A build need not pack both dtypes.
    differing = {n for n in facts if facts[n] != others[n]} - {"engine_build"}
    assert differing - {"numerics_tile"} == set(changed)
    assert (base["namespace"] == other["namespace"]) == (not changed)


def test_an_adapter_is_named_by_its_content_and_scale(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def save_adapter(name: str, value: float) -> Path:
        target = tmp_path / name
        target.mkdir()
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}
        (target / "adapter_config.json").write_text(json.dumps(config))
        prefix = "base_model.model.model.layers.0.self_attn.q_proj"
        tensors = {
            f"{prefix}.lora_A.weight": torch.full((2, 64), value),
            f"{prefix}.lora_B.weight": torch.ones(64, 2),
        }
        save_file(tensors, target / "adapter_model.safetensors")
        return target

    def of(adapter: Path | None, scale: float | None = None) -> dict[str, Any]:
        options = IdentityOptions(dtype="float32", adapter=adapter, adapter_scale=scale)
        return document(capsys, folder, options)

    path = save_adapter("one", 1.0)
    plain, one, half = of(None), of(path), of(path, 0.5)
    other = of(save_adapter("other", 2.0))
    facts = one["identity"]
    assert facts["adapter_digest"] == read_adapter(path).digest.hex()
    assert (facts["adapter_scale"], facts["adapter_generation"]) == (1.0, 0)
    assert facts["weights_digest"] == plain["identity"]["weights_digest"]
    assert of(save_adapter("twin", 1.0)) == one
    assert len({each["namespace"] for each in (plain, one, half, other)}) == 4


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"start_position": -1}, "start_position must be at least 0, got -1"),
        ({"adapter_scale": 0.5}, "name one with --adapter"),
        ({"adapter": Path("a"), "adapter_scale": float("nan")}, "must be finite"),
        ({"adapter": Path("a"), "adapter_scale": float("inf")}, "must be finite"),
        ({"start_position": 2**63}, "must be below the context"),
        ({"adapter": Path("a"), "adapter_scale": 0.0}, "above 0"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"numerics": "fuzzy"}, "numerics must be"),
        ({"dtype": "int3"}, "dtype must be"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(
    folder: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_identity(folder, IdentityOptions(**options), None)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=str(tmp_path / "none")):
        run_identity(tmp_path / "none", FLOAT32, None)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["/no/such/model"], "does not exist"),
        (["/no/such/model", "--adapter=/no/such/adapter"], "/no/such/model"),
        (["--start-position=-1"], "start_position must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_bad_call_ends_with_a_sentence_and_exit_code_2(
    arguments: list[str], sentence: str
) -> None:
    done = stemkv("identity", *arguments)

    assert done.exit_code == 2
    assert done.stdout == ""
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.model
def test_the_embedded_model_is_named_as_its_engine_names_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = document(capsys, None, IdentityOptions())
    config = EngineConfig(kv_memory_bytes=1 << 24, runs_self_test=False)
    engine = Engine(load_model(), config)
    assert engine.namespace is not None
    assert result["encoding"] == engine.identity.encode().hex()
    assert result["namespace"] == engine.namespace.hex()
    assert engine.identity.tokenizer_digest is not None
    assert engine.identity.chat_template_digest is not None
