"""Models from files: found, converted once, and refused by name when broken."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

from stemkv.engine import LoadedModel, load, load_model
from stemkv.engine.load import default_cache_dir, dtype_named, embedded_model
from stemkv.errors import (
    BrokenModel,
    ConfigError,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
)
from tests.engine.models import VOCABULARY, build_engine, build_model, tokens

CACHE = "converted"


def save(folder: Path, model: torch.nn.Module | None = None) -> Path:
    """A small model folder as other tools write it."""
    model = build_model("llama-group1") if model is None else model
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(saved, tmp_path / "broken"))


def weights_of(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def conversions_in(cache: Path) -> list[Path]:
    """What was kept of GGUF files; digests of them may lie beside it."""
    return [path for path in cache.iterdir() if path.name != "digests"]


def load_float32(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, dtype=torch.float32, **options)


# Folders


def test_a_saved_model_comes_back_with_its_weights_and_its_words(saved: Path) -> None:
    loaded = load_float32(saved)
    assert loaded.name == "tiny-llama"
    assert (loaded.num_layers, loaded.num_query_heads, loaded.num_kv_heads) == (2, 4, 4)
    assert (loaded.head_dim, loaded.vocab_size) == (16, VOCABULARY)
    assert loaded.context_length == 1024
    assert loaded.dtype == torch.float32
    original = build_model("llama-group1").state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, original[name]), name
    engine = build_engine(loaded, runs_self_test=True)
    assert engine.encode("w5 w17 nothing") == tokens([5, 17, 0])
    (completion,) = engine.generate(["w5 w17"])
    assert len(completion.text.split()) == 64


def test_paths_may_be_given_as_text(saved: Path, tmp_path: Path) -> None:
    loaded = load_model(str(saved), cache_dir=str(tmp_path), dtype=torch.float32)
    assert loaded.name == saved.resolve().name


@pytest.mark.parametrize("path", [5, b"model", "", ["model"], True], ids=repr)
def test_what_is_no_path_is_refused_by_name(path: Any) -> None:
    with pytest.raises(ConfigError, match="path must be a path or its text"):
        load_model(path)


@pytest.mark.parametrize("dtype", ["float32", 32, float], ids=repr)
def test_what_is_no_dtype_is_refused_by_name(saved: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="dtype must be a torch.dtype"):
        load_model(saved, dtype=dtype)


def test_two_loads_of_one_folder_have_one_digest(saved: Path) -> None:
    assert load_float32(saved).weights_digest == load_float32(saved).weights_digest


def test_the_digest_is_of_the_weights_as_loaded(saved: Path) -> None:
    half = load_model(saved, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert half.weights_digest != load_float32(saved).weights_digest


def test_the_digest_sees_one_changed_weight(saved: Path, folder: Path) -> None:
    path = weights_of(folder)
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] += 0.25
    save_file(tensors, path, metadata={"format": "pt"})
    before, after = load_float32(saved), load_float32(folder)
    assert after.weights_digest != before.weights_digest


def test_stages_are_told_in_order(folder: Path) -> None:
    stages: list[str] = []
    load_float32(folder, progress=stages.append)
    assert stages == [
        "reading config and tokenizer",
        "loading weights",
        "hashing weights",
    ]


# What is not there


def test_an_unknown_path_is_not_found(tmp_path: Path) -> None:
    path = tmp_path / "no-such-model"
    with pytest.raises(ModelNotFound, match=str(path)):
        load_model(path)


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=rf"{tmp_path} has no config\.json"):
        load_model(tmp_path)


def test_a_file_of_another_kind_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a model")
    with pytest.raises(ModelNotFound, match=rf"{path} is a file but not a \.gguf"):
        load_model(path)


def test_a_missing_embedded_model_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="make setup"):
        embedded_model()


# What is broken


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def without_tensor(folder: Path) -> None:
    path = weights_of(folder)
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def with_another_shape(folder: Path) -> None:
    path = weights_of(folder)
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path, metadata={"format": "pt"})


def with_other_names(folder: Path) -> None:
    """As of another architecture: every tensor is there, and none is expected."""
    path = weights_of(folder)
    tensors = {f"decoder.{name}": each for name, each in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def with_more_layers_promised(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["num_hidden_layers"] = 3
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))


def with_fewer_layers_promised(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["num_hidden_layers"] = 1
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda f: truncate(weights_of(f)), id="weights cut in half"),
        pytest.param(lambda f: weights_of(f).write_bytes(b""), id="weights empty"),
        pytest.param(lambda f: weights_of(f).unlink(), id="weights gone"),
        pytest.param(without_tensor, id="a tensor gone"),
        pytest.param(with_another_shape, id="a tensor of another shape"),
        pytest.param(with_other_names, id="tensors of another model"),
        pytest.param(with_more_layers_promised, id="fewer layers than promised"),
        pytest.param(with_fewer_layers_promised, id="more layers than promised"),
        pytest.param(
            lambda f: (f / "config.json").write_text("{"), id="config cut off"
        ),
        pytest.param(
            lambda f: (f / "config.json").write_text("{}"), id="config of nothing"
        ),
        pytest.param(
            lambda f: (f / "config.json").write_text('{"model_type": "no-such"}'),
            id="config of the unknown",
        ),
        pytest.param(
            lambda f: (f / "tokenizer.json").write_text("{"), id="tokenizer cut off"
        ),
    ],
)
def test_a_damaged_folder_is_refused_by_name(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=str(folder)):
        load_float32(folder)


def test_code_that_comes_with_a_model_is_not_run(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["model_type"] = "own-model"
    config["auto_map"] = {
        "AutoConfig": "own.Config",
        "AutoModelForCausalLM": "own.Model",
    }
    path.write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('ran the code of a model')")
    with pytest.raises(ModelError, match=str(folder)):
        load_float32(folder)


def test_an_unsupported_model_is_refused_before_its_weights_are_read(
    tmp_path: Path,
) -> None:
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
    )
    folder = save(tmp_path / "windowed", MistralForCausalLM(config))
    weights_of(folder).unlink()
    with pytest.raises(UnsupportedModel, match=rf"{folder} has a sliding window"):
        load_float32(folder)


def test_a_model_whose_attention_cannot_be_replaced_is_refused_by_path(
    tmp_path: Path,
) -> None:
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=1, n_head=4)
    folder = save(tmp_path / "bloom", BloomForCausalLM(config))
    with pytest.raises(UnsupportedModel, match=f"{folder} .*attention interface"):
        load_float32(folder)


# GGUF files and their conversion


def test_a_file_that_does_not_begin_like_a_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content in (b"", b"GG", b"GGML and so on", b"\0" * 100):
        path.write_bytes(content)
        with pytest.raises(BrokenModel, match=f"{path} is not a GGUF file"):
            load_model(path, cache_dir=tmp_path / CACHE)


def test_a_gguf_of_nonsense_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 8)
    with pytest.raises(BrokenModel, match=str(path)):
        load_model(path, cache_dir=tmp_path / CACHE)
    assert conversions_in(tmp_path / CACHE) == []


@pytest.mark.model
def test_a_gguf_cut_in_half_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    shutil.copyfile(embedded_model(), path)
    truncate(path)
    with pytest.raises(BrokenModel, match=rf"{path} cannot be loaded .*incomplete"):
        load_model(path, cache_dir=tmp_path / CACHE)
    assert conversions_in(tmp_path / CACHE) == []


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Let converting a GGUF be saving a tiny model; remember each time."""
    done: list[torch.dtype] = []

    def convert(gguf: Path, dtype: torch.dtype, folder: Path, progress: Any) -> None:
        done.append(dtype)
        save(folder, build_model("llama-group1", dtype))

    monkeypatch.setattr(load, "_convert", convert)
    return done


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF and whatever a conversion would read")
    return path


def test_a_gguf_is_converted_once(
    gguf: Path, tmp_path: Path, conversions: list[torch.dtype]
) -> None:
    first = load_float32(gguf, cache_dir=tmp_path / CACHE)
    second = load_float32(gguf, cache_dir=tmp_path / CACHE)
    assert conversions == [torch.float32]
    assert first.weights_digest == second.weights_digest
    assert first.name == "small"


def test_a_damaged_conversion_is_made_again(
    gguf: Path, tmp_path: Path, conversions: list[torch.dtype]
) -> None:
    """The GGUF file is sound; telling its owner to fetch it again would not help."""
    first = load_float32(gguf, cache_dir=tmp_path / CACHE)
    (kept,) = conversions_in(tmp_path / CACHE)
    truncate(weights_of(kept))

    second = load_float32(gguf, cache_dir=tmp_path / CACHE)

    assert conversions == [torch.float32, torch.float32]
    assert first.weights_digest == second.weights_digest


def test_a_full_disk_is_not_blamed_on_the_model(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(load, "_convert", convert)
    with pytest.raises(OSError, match="No space left"):
        load_float32(gguf, cache_dir=tmp_path / CACHE)


def test_a_gguf_is_known_by_its_content_not_by_its_name(
    gguf: Path, tmp_path: Path, conversions: list[torch.dtype]
) -> None:
    cache = tmp_path / CACHE
    load_float32(gguf, cache_dir=cache)
    renamed = gguf.rename(tmp_path / "renamed.gguf")
    load_float32(renamed, cache_dir=cache)
    assert len(conversions) == 1
    renamed.write_bytes(b"GGUF with other content")
    load_float32(renamed, cache_dir=cache)
    assert len(conversions) == 2


def test_each_dtype_is_converted_for_itself(
    gguf: Path, tmp_path: Path, conversions: list[torch.dtype]
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        loaded = load_model(gguf, dtype=dtype, cache_dir=tmp_path / CACHE)
        assert loaded.dtype == dtype
    assert conversions == [torch.float32, torch.bfloat16]


def test_converted_weights_are_kept_under_the_users_cache(
    gguf: Path,
    tmp_path: Path,
    conversions: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_cache_dir() == tmp_path / "cache/stemkv/models"
    load_float32(gguf)
    (kept,) = conversions_in(default_cache_dir())
    assert (kept / "config.json").is_file()


@pytest.mark.parametrize(
    "interruption", [KeyboardInterrupt(), RuntimeError("disk full"), SystemExit()]
)
def test_an_interrupted_conversion_leaves_nothing_half_made(
    gguf: Path,
    tmp_path: Path,
    conversions: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
    interruption: BaseException,
) -> None:
    convert = load._convert

    def interrupted(*args: Any) -> None:
        convert(*args)
        raise interruption

    monkeypatch.setattr(load, "_convert", interrupted)
    with pytest.raises((type(interruption), BrokenModel)):
        load_float32(gguf, cache_dir=tmp_path / CACHE)
    assert conversions_in(tmp_path / CACHE) == []

    monkeypatch.setattr(load, "_convert", convert)
    load_float32(gguf, cache_dir=tmp_path / CACHE)
    assert len(conversions) == 2


def test_whoever_finishes_a_conversion_second_takes_the_first(
    gguf: Path,
    tmp_path: Path,
    conversions: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    convert = load._convert

    def overtaken(*args: Any) -> None:
        convert(*args)
        monkeypatch.setattr(load, "_convert", convert)
        load_float32(gguf, cache_dir=tmp_path / CACHE)

    monkeypatch.setattr(load, "_convert", overtaken)
    load_float32(gguf, cache_dir=tmp_path / CACHE)
    assert len(conversions) == 2
    assert len(conversions_in(tmp_path / CACHE)) == 1


def test_a_cache_that_cannot_be_written_is_named(
    gguf: Path, tmp_path: Path, conversions: list[torch.dtype]
) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    with pytest.raises((ModelError, ConfigError), match=str(blocked)):
        load_float32(gguf, cache_dir=blocked / "models")


# Words for dtypes


def test_dtypes_are_named() -> None:
    assert dtype_named("bfloat16") == torch.bfloat16
    assert dtype_named("float32") == torch.float32
    assert dtype_named("auto") in (torch.bfloat16, torch.float32)
    with pytest.raises(ConfigError, match="dtype must be .*'int8'"):
        dtype_named("int8")


@pytest.mark.model
def test_the_embedded_model_is_what_it_says(plain_smol: LoadedModel) -> None:
    loaded = plain_smol
    assert "SmolLM2-135M" in loaded.name
    assert (loaded.num_layers, loaded.num_query_heads, loaded.num_kv_heads) == (
        30,
        9,
        3,
    )
    assert (loaded.head_dim, loaded.vocab_size) == (64, 49_152)
    assert loaded.context_length == 8192
    names = {loaded.tokenizer.decode([token]) for token in loaded.eos_token_ids}
    assert "<|im_end|>" in names
