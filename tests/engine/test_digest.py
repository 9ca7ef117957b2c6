"""Digests are of what was loaded, and a record never says otherwise."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AddedToken, PreTrainedTokenizerFast

from stemkv.engine import LoadedModel, digest, load, load_model, wrap_model
from stemkv.engine.digest import (
    RECORD_NAME,
    combine,
    digest_chat_template,
    digest_tensors,
    digest_tokenizer,
    see_folder,
    tensor_digest,
)
from stemkv.engine.load import digest_weights
from stemkv.errors import BrokenModel, InvariantError
from tests.engine.models import ByteTokenizer, build_model, tiny
from tests.engine.test_load import save, weights_of

CACHE = "cache"


# Tensors


def leaf_by_hand(name: bytes, dtype: bytes, shape: tuple[int, ...], data: bytes) -> str:
    """What the module's documentation says, byte by byte."""
    parts = [b"stemkv-tensor\0", struct.pack(">H", 1)]
    parts += [struct.pack(">I", len(name)), name, struct.pack(">I", len(dtype)), dtype]
    parts += [struct.pack(">I", len(shape)), *[struct.pack(">Q", n) for n in shape]]
    parts += [struct.pack(">Q", len(data)), data]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_a_leaf_is_what_its_documentation_says() -> None:
    tensor = torch.tensor([[1.0, -2.0, 0.5]])
    data = struct.pack("=3f", 1.0, -2.0, 0.5)
    by_hand = leaf_by_hand(b"layer.weight", b"float32", (1, 3), data)
    assert tensor_digest("layer.weight", tensor).hex() == by_hand
    half = torch.tensor(1.0, dtype=torch.bfloat16)
    by_hand = leaf_by_hand("schicht.ä".encode(), b"bfloat16", (), b"\x80\x3f")
    assert tensor_digest("schicht.ä", half).hex() == by_hand


def test_the_digest_of_weights_is_what_its_documentation_says() -> None:
    leaves = {"b": bytes(range(32)), "a": bytes(32)}
    parts = [b"stemkv-weights\0", struct.pack(">HI", 1, 2)]
    parts += [struct.pack(">I", 1), b"a", bytes(32)]
    parts += [struct.pack(">I", 1), b"b", bytes(range(32))]
    assert combine(leaves) == hashlib.sha256(b"".join(parts)).digest()


def test_tensors_of_equal_bytes_are_told_apart_by_all_the_rest() -> None:
    """Blind to shape or boundaries, as in vllm#17378, dynamo#8341 and sglang#25462."""
    zeros = torch.zeros(2, 3)
    variants = {
        "as it is": tensor_digest("w", zeros),
        "shape": tensor_digest("w", zeros.reshape(3, 2)),
        "axes": tensor_digest("w", zeros.reshape(6)),
        "an axis of one": tensor_digest("w", zeros.reshape(1, 2, 3)),
        "dtype": tensor_digest("w", zeros.view(torch.int32)),
        "half as wide": tensor_digest("w", torch.zeros(2, 6, dtype=torch.bfloat16)),
        "name": tensor_digest("v", zeros),
        "name and dtype joined": tensor_digest("wfloat32", zeros),
        "sign": tensor_digest("w", -zeros),
        "nothing": tensor_digest("w", torch.zeros(0, 3)),
        "nothing, across": tensor_digest("w", torch.zeros(3, 0)),
        "one element": tensor_digest("w", torch.zeros(1)),
        "no axis": tensor_digest("w", torch.zeros(())),
    }
    assert len(set(variants.values())) == len(variants)


def test_a_view_has_the_digest_of_its_copy() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    views = [whole.T, whole[1:3], whole[:, ::2], whole[2, 3], whole.expand(2, 4, 6)]
    for view in views:
        assert tensor_digest("w", view) == tensor_digest("w", view.clone())
    parameter = torch.nn.Parameter(whole)
    assert tensor_digest("w", parameter) == tensor_digest("w", whole)


def test_a_conjugate_is_not_taken_for_what_lies_in_memory() -> None:
    tensor = torch.tensor([1 + 2j])
    assert tensor_digest("w", tensor.conj()) != tensor_digest("w", tensor)
    assert tensor_digest("w", tensor.conj()) == tensor_digest(
        "w", torch.tensor([1 - 2j])
    )


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_leaves_do_not_depend_on_threads_or_order(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    state = build_model("qwen3-group2-normed").state_dict()
    leaves = digest_tensors(state)
    assert leaves == {name: tensor_digest(name, state[name]) for name in state}
    assert combine(dict(reversed(leaves.items()))) == combine(leaves)


def test_the_digest_of_weights_sees_every_way_to_mix_leaves_up() -> None:
    a, b = bytes(32), bytes(range(32))
    mixes = [{"a": a, "b": b}, {"a": b, "b": a}, {"a": a}, {"b": b}, {}]
    mixes += [{"a": a, "b": b, "c": a}, {"a": a, "B": b}, {"ab": a}, {"": a}]
    assert len({combine(mix) for mix in mixes}) == len(mixes)


@pytest.mark.parametrize("leaf", [b"", b"x", bytes(31), bytes(33)])
def test_a_narrowed_leaf_is_refused(leaf: bytes) -> None:
    with pytest.raises(InvariantError, match=f"{len(leaf)} bytes"):
        combine({"a": leaf})


def test_a_model_names_the_leaf_of_each_tensor_tied_ones_too() -> None:
    loaded = tiny("llama-group3-tied")
    state = loaded.model.state_dict()
    assert "lm_head.weight" in state, "tied, and listed"
    assert list(loaded.tensor_digests) == list(state)
    for name, leaf in loaded.tensor_digests.items():
        assert leaf == tensor_digest(name, state[name])
    assert loaded.weights_digest == combine(loaded.tensor_digests)
    assert loaded.weights_digest == digest_weights(loaded.model)


def test_hashing_what_changed_is_enough() -> None:
    loaded = tiny("llama-group1")
    name = "model.layers.1.mlp.down_proj.weight"
    with torch.no_grad():
        loaded.model.get_parameter(name)[0, 0] += 1
    state = loaded.model.state_dict()
    leaves = {**loaded.tensor_digests, **digest_tensors({name: state[name]})}
    assert combine(leaves) == digest_weights(loaded.model) != loaded.weights_digest


# Tokenizers


def fast(words: list[str], **options: Any) -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=words[0]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


class Renamed(PreTrainedTokenizerFast):
    """Another class may split text otherwise."""


class WordTokenizer:
    """A tokenizer without a fast backend."""

    def __init__(self, words: list[Any], added: dict[int, AddedToken]) -> None:
        self._words = words
        self.added_tokens_decoder = added
        self.special_tokens_map = {"eos_token": "</s>"}

    def get_vocab(self) -> dict[Any, int]:
        return {word: index for index, word in enumerate(self._words)}


def test_tokenizers_that_may_differ_have_different_digests() -> None:
    end = AddedToken("</s>")
    stripping = AddedToken("</s>", lstrip=True)
    added = fast(["a", "b"])
    added.add_tokens(["c"])
    tokenizers = [
        fast(["a", "b"]),
        fast(["b", "a"]),
        fast(["a", "b", "c"]),
        added,
        fast(["a", "b"], eos_token="b"),
        fast(["a", "b"], bos_token="b"),
        Renamed(tokenizer_object=fast(["a", "b"]).backend_tokenizer),
        WordTokenizer(["a", "b"], {}),
        WordTokenizer(["b", "a"], {}),
        WordTokenizer(["a", "b"], {2: end}),
        WordTokenizer(["a", "b"], {3: end}),
        WordTokenizer(["a", "b"], {2: stripping}),
        WordTokenizer([b"a", b"b"], {}),
    ]
    digests = [digest_tokenizer(each) for each in tokenizers]
    assert None not in digests
    assert len(set(digests)) == len(tokenizers)


def test_equal_tokenizers_have_equal_digests() -> None:
    assert digest_tokenizer(fast(["a", "b"])) == digest_tokenizer(fast(["a", "b"]))
    one, other = (WordTokenizer(["a"], {1: AddedToken("x")}) for _ in range(2))
    assert digest_tokenizer(one) == digest_tokenizer(other)


def test_a_tokenizer_that_shows_nothing_has_no_digest() -> None:
    for tokenizer in (None, ByteTokenizer()):
        assert digest_tokenizer(tokenizer) is None
        assert digest_chat_template(tokenizer) is None
    # It is informative only: keys are made from token ids, so such a model shares.
    loaded = wrap_model(
        build_model("llama-group1"), name="x", tokenizer=ByteTokenizer()
    )
    assert (loaded.tokenizer_digest, loaded.chat_template_digest) == (None, None)


def test_templates_are_told_apart() -> None:
    def of(template: Any) -> bytes | None:
        tokenizer = fast(["a"])
        tokenizer.chat_template = template
        return digest_chat_template(tokenizer)

    templates = ["x", "y", "", {"default": "x"}, {"tool": "x"}, '{"default":"x"}']
    templates += [{"default": "x", "tool": "y"}]
    digests = [of(template) for template in templates]
    assert None not in digests
    assert len(set(digests)) == len(templates)
    assert of(None) is None
    assert of({"a": "x", "b": "y"}) == of({"b": "y", "a": "x"})


# The record: a saved model, and what can happen to its files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "model")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take files as old enough, as nobody can set a change time back."""
    monkeypatch.setattr(digest, "_SETTLING_NS", -(10**9))


def load_and_look(folder: Path, **options: Any) -> tuple[LoadedModel, bool]:
    """Load, and say whether that took hashing."""
    stages: list[str] = []
    settings: dict[str, Any] = dict(
        dtype=torch.float32, cache_dir=folder.parent / CACHE, progress=stages.append
    )
    loaded = load_model(folder, **settings | options)
    return loaded, "hashing weights" in stages


def assert_true(loaded: LoadedModel) -> None:
    """The digests are those of the objects that were loaded."""
    assert loaded.tensor_digests == digest_tensors(loaded.model.state_dict())
    assert loaded.weights_digest == digest_weights(loaded.model)
    assert loaded.tokenizer_digest == digest_tokenizer(loaded.tokenizer)
    assert loaded.chat_template_digest == digest_chat_template(loaded.tokenizer)


def facts(loaded: LoadedModel) -> tuple[object, ...]:
    digests = (loaded.tokenizer_digest, loaded.chat_template_digest)
    return (loaded.weights_digest, dict(loaded.tensor_digests), *digests)


def change_weights(path: Path) -> None:
    """Write other weights of the same size into the very same file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    with path.open("r+b") as file:
        file.write(content)


def replace_weights(path: Path) -> None:
    """Put another file of the same size, name and modification time in its place."""
    before = path.stat()
    aside = path.with_suffix(".aside")
    shutil.copyfile(path, aside)
    change_weights(aside)
    os.utime(aside, ns=(before.st_atime_ns, before.st_mtime_ns))
    aside.replace(path)


@pytest.mark.usefixtures("settled")
def test_unchanged_files_are_hashed_once(folder: Path) -> None:
    first, was_hashed = load_and_look(folder)
    assert was_hashed
    second, was_hashed = load_and_look(folder)
    assert not was_hashed
    assert facts(second) == facts(first)
    assert_true(second)


@pytest.mark.usefixtures("settled")
def test_a_record_says_nothing_of_where_it_was_made(folder: Path) -> None:
    load_and_look(folder)
    text = (folder / RECORD_NAME).read_text()
    assert str(folder) not in text
    assert folder.parent.name not in text
    assert not list(folder.glob(f"{RECORD_NAME}.*")), "nothing is left aside"


def test_files_that_were_just_written_are_not_recorded(folder: Path) -> None:
    """Git's "racily clean": within a tick of the clock a change leaves no trace."""
    change_weights(weights_of(folder))
    load_and_look(folder)
    assert not (folder / RECORD_NAME).exists()
    assert not (folder.parent / CACHE).exists()
    assert load_and_look(folder)[1]


def same_size_same_mtime(folder: Path) -> None:
    path = weights_of(folder)
    before = path.stat()
    change_weights(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def with_a_word_more(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["w0new"] = len(content["model"]["vocab"])
    path.write_text(json.dumps(content))


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "change, is_seen_in",
    [
        pytest.param(same_size_same_mtime, "weights_digest", id="times set back"),
        pytest.param(
            lambda f: replace_weights(weights_of(f)), "weights_digest", id="replaced"
        ),
        pytest.param(with_a_word_more, "tokenizer_digest", id="another tokenizer"),
        pytest.param(
            lambda f: (f / "chat_template.jinja").write_text("{{ messages }}"),
            "chat_template_digest",
            id="a template added",
        ),
    ],
)
def test_whatever_changes_on_disk_is_seen(
    folder: Path, change: Callable[[Path], None], is_seen_in: str
) -> None:
    before, _ = load_and_look(folder)
    change(folder)
    after, was_hashed = load_and_look(folder)
    assert was_hashed
    assert getattr(after, is_seen_in) != getattr(before, is_seen_in)
    assert_true(after)
    again, was_hashed = load_and_look(folder)
    assert not was_hashed, "the record was replaced"
    assert facts(again) == facts(after)


@pytest.mark.usefixtures("settled")
def test_a_file_taken_away_is_seen(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert load_and_look(folder)[0].chat_template_digest is not None
    (folder / "chat_template.jinja").unlink()
    loaded, was_hashed = load_and_look(folder)
    assert was_hashed
    assert loaded.chat_template_digest is None


@pytest.mark.usefixtures("settled")
def test_a_link_to_another_revision_is_followed(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    change_weights(weights_of(other))
    link = tmp_path / "current"
    link.symlink_to(folder)
    first, _ = load_and_look(link)
    link.unlink()
    link.symlink_to(other)
    second, _ = load_and_look(link)
    assert first.weights_digest != second.weights_digest
    for loaded in (first, second, load_and_look(link)[0]):
        assert_true(loaded)


# Files that change while they are read (vllm#48352)


def hook_loading(
    monkeypatch: pytest.MonkeyPatch,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
) -> None:
    """Do something just before and after the weights of the next load are read."""
    plain = load.AutoModelForCausalLM.from_pretrained

    def hooked(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", plain)
        before()
        result = plain(*args, **options)
        after()
        return result

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", hooked)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("change", [change_weights, replace_weights])
def test_a_file_swapped_during_a_load_gives_the_digest_of_what_was_loaded(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_recorded: bool,
    moment: str,
    change: Callable[[Path], None],
) -> None:
    old = load_and_look(folder)[0] if is_recorded else None
    record = (folder / RECORD_NAME).read_bytes() if is_recorded else None
    hook: dict[str, Any] = {moment: lambda: change(weights_of(folder))}
    hook_loading(monkeypatch, **hook)

    loaded, was_hashed = load_and_look(folder)

    assert was_hashed
    assert_true(loaded)
    if old is not None and moment == "before":
        assert loaded.weights_digest != old.weights_digest
    path = folder / RECORD_NAME
    left = path.read_bytes() if path.exists() else None
    assert left == record, "what was read is remembered of no file"
    assert_true(load_and_look(folder)[0])


@pytest.mark.usefixtures("settled")
def test_a_file_swapped_there_and_back_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, _ = load_and_look(folder)
    path = weights_of(folder)
    aside = folder.parent / "aside"

    def swap() -> None:
        path.rename(aside)
        shutil.copyfile(aside, path)
        change_weights(path)

    hook_loading(monkeypatch, before=swap, after=lambda: aside.replace(path))
    loaded, was_hashed = load_and_look(folder)
    assert was_hashed
    assert loaded.weights_digest != original.weights_digest
    assert_true(loaded)
    assert load_and_look(folder)[0].weights_digest == original.weights_digest


@pytest.mark.usefixtures("settled")
def test_a_folder_swapped_there_and_back_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, _ = load_and_look(folder)
    other = Path(shutil.copytree(folder, folder.parent / "other"))
    change_weights(weights_of(other))
    aside = folder.parent / "aside"

    def swap() -> None:
        folder.rename(aside)
        other.rename(folder)

    def swap_back() -> None:
        folder.rename(other)
        aside.rename(folder)

    hook_loading(monkeypatch, before=swap, after=swap_back)
    loaded, _ = load_and_look(folder)
    assert loaded.weights_digest != original.weights_digest
    assert_true(loaded)


@pytest.mark.usefixtures("settled")
def test_a_link_turned_there_and_back_leads_nowhere_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path(shutil.copytree(folder, folder.parent / "other"))
    change_weights(weights_of(other))
    link = folder.parent / "current"

    def turn(target: Path) -> None:
        link.unlink(missing_ok=True)
        link.symlink_to(target)

    turn(folder)
    original, _ = load_and_look(link)
    hook_loading(monkeypatch, before=lambda: turn(other), after=lambda: turn(folder))
    loaded, _ = load_and_look(link)
    assert loaded.weights_digest == original.weights_digest
    assert_true(loaded)


@pytest.mark.usefixtures("settled")
def test_a_file_overwritten_in_place_does_not_change_a_loaded_model(
    folder: Path,
) -> None:
    """Weights that stayed mapped from their file would change under the engine."""
    for _ in range(2):  # hashed, then from the record
        loaded, _ = load_and_look(folder)
        path = weights_of(folder)
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.write(bytes(len(content)))
        assert_true(loaded)
        path.write_bytes(content)
        load_and_look(folder)


@pytest.mark.usefixtures("settled")
def test_what_is_changed_in_memory_is_always_hashed(folder: Path) -> None:
    load_and_look(folder)
    loaded, was_hashed = load_and_look(folder)
    assert not was_hashed
    with torch.no_grad():
        loaded.model.get_parameter("model.norm.weight")[0] += 1
    described = wrap_model(loaded.model, name="x", tokenizer=loaded.tokenizer)
    assert described.weights_digest != loaded.weights_digest
    assert_true(described)
    assert load_and_look(folder)[0].weights_digest == loaded.weights_digest


# What the record depends on besides files


@pytest.mark.usefixtures("settled")
def test_each_dtype_is_recorded_for_itself(folder: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    first = [load_and_look(folder, dtype=dtype) for dtype in dtypes]
    second = [load_and_look(folder, dtype=dtype) for dtype in dtypes]
    assert [was_hashed for _, was_hashed in first + second] == [True] * 2 + [False] * 2
    for (one, _), (other, _) in zip(first, second, strict=True):
        assert facts(one) == facts(other)
    assert first[0][0].weights_digest != first[1][0].weights_digest


@pytest.mark.usefixtures("settled")
def test_other_libraries_hash_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_and_look(folder)
    monkeypatch.setattr(digest.torch, "__version__", "2.99.0")
    assert load_and_look(folder)[1]
    assert not load_and_look(folder)[1]
    monkeypatch.setattr(digest.importlib.metadata, "version", lambda name: "9.9")
    assert load_and_look(folder)[1]
    monkeypatch.setattr(digest, "_SCHEME", 2)
    assert load_and_look(folder)[1]


@pytest.mark.usefixtures("settled")
def test_records_of_past_versions_do_not_pile_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in range(9):
        monkeypatch.setattr(digest.torch, "__version__", f"3.{version}.0")
        load_and_look(folder)
    kept = json.loads((folder / RECORD_NAME).read_text())["digests"]
    assert [f"torch=3.{v}.0" in key for v, key in zip(range(5, 9), kept, strict=True)]
    assert not load_and_look(folder)[1]


@pytest.mark.usefixtures("settled")
def test_the_record_can_be_distrusted(folder: Path) -> None:
    true, _ = load_and_look(folder)
    forge(folder / RECORD_NAME, lambda digests: digests.update(tokenizer="00" * 32))
    believed, was_hashed = load_and_look(folder)
    assert not was_hashed
    assert believed.tokenizer_digest == bytes(32), "whoever can write it can lie"
    loaded, was_hashed = load_and_look(folder, trusts_digest_record=False)
    assert was_hashed
    assert facts(loaded) == facts(true)
    assert facts(load_and_look(folder)[0]) == facts(true), "and was put right"


# Records that are none


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the digests in a record and make its checksum fit."""
    content = json.loads(path.read_text())
    del content["checksum"]
    for value in content["digests"].values():
        change(value)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["checksum"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(content))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def as_link(path: Path) -> None:
    target = path.rename(path.with_name("elsewhere"))
    path.symlink_to(target)
    # Beside the model it would be a file more, so it is moved out of the folder.
    moved = target.rename(path.parent.parent / "elsewhere")
    path.unlink()
    path.symlink_to(moved)


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def without_a_leaf(digests: dict[str, Any]) -> None:
    digests["tensors"].popitem()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda p: p.write_bytes(b""), id="empty"),
        pytest.param(lambda p: os.truncate(p, 100), id="cut off"),
        pytest.param(lambda p: p.write_bytes(os.urandom(500)), id="noise"),
        pytest.param(lambda p: p.write_text("[" * 100_000), id="nested"),
        pytest.param(lambda p: p.write_text("1" * 10_000), id="a long number"),
        pytest.param(lambda p: p.write_text("[]"), id="a list"),
        pytest.param(lambda p: p.write_text('{"format": 1}'), id="no fields"),
        pytest.param(lambda p: edit(p, '"format":1', '"format":2'), id="newer"),
        pytest.param(lambda p: edit(p, '"tensors"', '"tensor"'), id="bits flipped"),
        pytest.param(
            lambda p: forge(p, lambda d: d.pop("tensors")), id="without tensors"
        ),
        pytest.param(
            lambda p: forge(p, lambda d: d.update(tokenizer="00")), id="a short digest"
        ),
        pytest.param(
            lambda p: forge(p, lambda d: d.update(tensors=[])), id="of another shape"
        ),
        pytest.param(lambda p: forge(p, without_a_leaf), id="a tensor short"),
        pytest.param(lambda p: p.chmod(0o664), id="writable by the group"),
        pytest.param(lambda p: p.chmod(0o646), id="writable by all"),
        pytest.param(as_link, id="a link"),
        pytest.param(as_pipe, id="a pipe"),
    ],
)
def test_what_is_no_record_is_ignored_and_replaced(
    folder: Path, damage: Callable[[Path], object]
) -> None:
    true, _ = load_and_look(folder)
    damage(folder / RECORD_NAME)

    loaded, was_hashed = load_and_look(folder)

    assert was_hashed
    assert facts(loaded) == facts(true)
    again, was_hashed = load_and_look(folder)
    assert not was_hashed
    assert facts(again) == facts(true)


@pytest.mark.usefixtures("settled")
def test_a_record_of_somebody_else_is_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_and_look(folder)
    owner = (folder / RECORD_NAME).stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    is_roots = owner == 0  # root could do anything anyway
    assert load_and_look(folder)[1] != is_roots


@pytest.mark.usefixtures("settled")
def test_a_record_of_another_model_is_none(folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", build_model("llama-group1", seed=1))
    load_and_look(folder)
    shutil.copy2(folder / RECORD_NAME, other / RECORD_NAME)
    loaded, was_hashed = load_and_look(other)
    assert was_hashed
    assert_true(loaded)


# Places


def read_only(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    """Refuse new files in these folders, also to root, as a read-only mount does."""
    plain = tempfile.mkstemp

    def refusing(*args: Any, dir: Any, **options: Any) -> Any:
        if Path(dir) in places:
            raise OSError(30, "Read-only file system", str(dir))
        return plain(*args, dir=dir, **options)

    monkeypatch.setattr(digest.tempfile, "mkstemp", refusing)


@pytest.mark.usefixtures("settled")
def test_the_record_of_a_read_only_folder_is_kept_in_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only(monkeypatch, folder)
    first, was_hashed = load_and_look(folder)
    assert was_hashed
    assert not (folder / RECORD_NAME).exists()
    assert len(list((folder.parent / CACHE / "digests").iterdir())) == 1
    second, was_hashed = load_and_look(folder)
    assert not was_hashed
    assert facts(second) == facts(first)


@pytest.mark.usefixtures("settled")
def test_nowhere_to_write_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only(monkeypatch, folder, folder.parent / CACHE / "digests")
    for _ in range(2):
        loaded, was_hashed = load_and_look(folder)
        assert was_hashed
        assert_true(loaded)


@pytest.mark.usefixtures("settled")
def test_a_folder_in_place_of_the_record_is_gone_around(folder: Path) -> None:
    (folder / RECORD_NAME).mkdir()
    load_and_look(folder)
    assert not load_and_look(folder)[1]
    assert list(folder.glob(f"{RECORD_NAME}*")) == [folder / RECORD_NAME]


# Folders whose files are not all that counts


def with_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def with_shards(folder: Path, *shards: str) -> None:
    weight_map = {f"tensor.{shard}": shard for shard in shards}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def with_a_linked_folder(folder: Path) -> None:
    (folder.parent / "templates").mkdir()
    (folder / "additional_chat_templates").symlink_to(folder.parent / "templates")


def with_many_files(folder: Path) -> None:
    for index in range(1000):
        (folder / f"{index}.txt").touch()


@pytest.mark.parametrize(
    "add",
    [
        pytest.param(with_a_linked_folder, id="a folder elsewhere"),
        pytest.param(
            lambda f: (f / "adapter_config.json").write_text("{}"), id="an adapter"
        ),
        pytest.param(
            lambda f: with_config(f, quantization_config={}), id="a quantisation"
        ),
        pytest.param(lambda f: with_shards(f, "../a.safetensors"), id="shards above"),
        pytest.param(lambda f: with_shards(f, "gone.safetensors"), id="shards gone"),
        pytest.param(
            lambda f: (f / "model.safetensors.index.json").write_text("[]"),
            id="an odd index",
        ),
        pytest.param(
            lambda f: (f / "tokenizer_config.json").write_text(
                '{"vocab_file": "/elsewhere"}'
            ),
            id="words elsewhere",
        ),
        pytest.param(
            lambda f: (f / "tokenizer_config.json").write_text("[1]"), id="odd JSON"
        ),
        pytest.param(lambda f: (f / "config.json").unlink(), id="no config"),
        pytest.param(lambda f: os.mkfifo(f / "pipe"), id="a pipe"),
        pytest.param(lambda f: (f / "link").symlink_to("nowhere"), id="a dead link"),
        pytest.param(with_many_files, id="many files"),
    ],
)
def test_a_folder_that_is_not_the_whole_story_is_not_recorded(
    folder: Path, add: Callable[[Path], object]
) -> None:
    assert see_folder(folder) is not None
    add(folder)
    assert see_folder(folder) is None


@pytest.mark.usefixtures("settled")
def test_a_model_in_shards_is_recorded_and_each_shard_counts(tmp_path: Path) -> None:
    folder = save(tmp_path / "model")
    tensors = load_file(weights_of(folder))
    weights_of(folder).unlink()
    build_model("llama-group1").save_pretrained(folder, max_shard_size="100KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    first, _ = load_and_look(folder)
    assert first.model.state_dict().keys() == tensors.keys()
    assert not load_and_look(folder)[1]
    last = load_file(shards[-1])
    for tensor in last.values():
        tensor += 1
    save_file(last, shards[-1], metadata={"format": "pt"})
    second, was_hashed = load_and_look(folder)
    assert was_hashed
    assert second.weights_digest != first.weights_digest


@pytest.mark.usefixtures("settled")
def test_a_model_that_is_not_recorded_is_hashed_every_time(folder: Path) -> None:
    with_a_linked_folder(folder)
    for _ in range(2):
        loaded, was_hashed = load_and_look(folder)
        assert was_hashed
        assert_true(loaded)
    assert not (folder / RECORD_NAME).exists()


# GGUF files


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose conversion is saving a tiny model."""

    def convert(gguf: Path, dtype: torch.dtype, folder: Path, progress: Any) -> None:
        save(folder, build_model("llama-group1", dtype))

    monkeypatch.setattr(load, "_convert", convert)
    path = tmp_path / "small.gguf"
    path.write_bytes(b"GGUF and whatever a conversion would read")
    return path


def stages_of(gguf: Path, **options: Any) -> list[str]:
    stages: list[str] = []
    cache = gguf.parent / CACHE
    load_model(
        gguf, dtype=torch.float32, cache_dir=cache, progress=stages.append, **options
    )
    return stages


HASHING = "hashing the GGUF file"


@pytest.mark.usefixtures("settled")
def test_an_unchanged_gguf_is_hashed_once(gguf: Path) -> None:
    assert HASHING in stages_of(gguf)
    assert HASHING not in stages_of(gguf)
    assert HASHING in stages_of(gguf, trusts_digest_record=False)
    before = gguf.stat()
    gguf.write_bytes(gguf.read_bytes().replace(b"w", b"W"))
    os.utime(gguf, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert HASHING in stages_of(gguf)
    assert [path.name for path in gguf.parent.iterdir()].count(RECORD_NAME) == 0


@pytest.mark.usefixtures("settled")
def test_a_record_of_a_gguf_that_is_none_is_ignored(gguf: Path) -> None:
    stages_of(gguf)
    (record,) = (gguf.parent / CACHE / "digests").iterdir()
    for value in ("../../elsewhere", 7, None, "00"):
        content = json.loads(record.read_text())
        del content["checksum"]
        content["digests"]["sha256"] = value
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        content["checksum"] = hashlib.sha256(text.encode()).hexdigest()
        record.write_text(json.dumps(content))
        assert HASHING in stages_of(gguf)


def test_a_gguf_that_was_just_written_is_not_recorded(gguf: Path) -> None:
    assert HASHING in stages_of(gguf)
    assert HASHING in stages_of(gguf)


@pytest.mark.usefixtures("settled")
def test_a_gguf_that_changes_while_it_is_converted_is_refused(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else other weights would be kept under its digest for good."""
    convert = load._convert

    def changing(*args: Any) -> None:
        gguf.write_bytes(b"GGUF with other content")
        convert(*args)

    monkeypatch.setattr(load, "_convert", changing)
    with pytest.raises(BrokenModel, match=f"{gguf} changed while it was read"):
        stages_of(gguf)
    assert [p.name for p in (gguf.parent / CACHE).iterdir()] == ["digests"]
    monkeypatch.setattr(load, "_convert", convert)
    assert HASHING in stages_of(gguf)
