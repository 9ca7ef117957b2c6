"""Key functions: those from the field confuse what they did there; users' are contained."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from stemkv.audit.identity.keys import FIELD_KEYS, KeyContext, builtin_hash, everything
from stemkv.audit.identity.trial import (
    KeyFault,
    find_key_function,
    number_keys,
    try_elsewhere,
)
from stemkv.errors import ConfigError

BUILTIN_HASH = "stemkv.audit.identity.keys:builtin_hash"


def context(**facts: Any) -> KeyContext:
    plain: dict[str, Any] = dict(
        tokens=(1, 2, 3, 4),
        model_name="model",
        model_path="models/model",
        model_revision="revision 1",
        weights_digest="aa",
        weights_generation=0,
        architecture="Llama:00",
        adapter_name="beta",
        adapter_path="adapters/beta",
        adapter_digest="bb",
        adapter_scale=1.0,
        adapter_generation=0,
        tenant="team1",
        cache_salt="team1",
        start_position=0,
        position_scheme="{}",
        kv_dtype="float32",
        block_size=2,
        numerics_class="exact",
        engine_build="torch",
        tokenizer_digest="cc",
        media=("dd",),
        media_positions=((0, 2),),
    )
    return KeyContext(**plain | facts)


def key_named(name: str) -> Any:
    (found,) = [key.function for key in FIELD_KEYS if key.name == name]
    return found


def write_module(folder: Path, name: str, body: str) -> str:
    """Write a module with a function `key`; return what names it."""
    (folder / f"{name}.py").write_text(dedent(body))
    return f"{name}:key"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, whose modules nobody has imported."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("theirs_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


# What keys are made of


def test_names_of_keys_are_told_apart_and_each_says_where_it_is_from() -> None:
    names = [key.name for key in FIELD_KEYS]

    assert len(set(names)) == len(names)
    assert all(key.source for key in FIELD_KEYS)


def test_facts_cannot_be_changed_by_a_key_function() -> None:
    with pytest.raises(FrozenInstanceError):
        context().tenant = "other"  # type: ignore[misc]


LABELS = {  # what a key of every fact leaves out, and why it may
    "model_name",
    "model_path",
    "model_revision",
    "adapter_name",
    "adapter_path",
    "cache_salt",
    "tokenizer_digest",
}
OTHER: dict[str, Any] = {
    "tokens": (1, 2, 3, 5),
    "weights_generation": 1,
    "adapter_scale": 0.5,
    "adapter_generation": 1,
    "start_position": 128,
    "block_size": 4,
    "media": ("ee",),
    "media_positions": ((2, 4),),
}


@pytest.mark.parametrize("name", [field.name for field in fields(KeyContext)])
def test_a_key_of_every_fact_notices_each_fact_and_no_label(name: str) -> None:
    other = replace(context(), **{name: OTHER.get(name, "another")})

    assert (everything(other) == everything(context())) == (name in LABELS)


def test_joined_texts_of_two_tenants_are_one_key() -> None:
    joined = key_named("salt and adapter joined")
    one = context(cache_salt="team1", adapter_name="beta")
    other = context(cache_salt="team", adapter_name="1beta")

    assert joined(one) == joined(other)
    assert everything(replace(one, tenant="team1")) != everything(
        replace(other, tenant="team")
    )


def test_an_untyped_salt_poses_as_an_adapter() -> None:
    untyped = key_named("adapter and salt untyped")

    assert untyped(context(adapter_name="x", cache_salt=None)) == untyped(
        context(adapter_name=None, cache_salt="x")
    )


def test_the_last_block_stands_for_all_before_it() -> None:
    last_block = key_named("last block only")

    assert last_block(context(tokens=(1, 2, 3, 4))) == last_block(
        context(tokens=(9, 9, 3, 4))
    )
    assert last_block(context(tokens=(1, 2, 3, 4))) != last_block(
        context(tokens=(1, 2, 3, 5))
    )


# Finding a user's function


def test_a_function_is_found_in_the_current_directory(here: Path) -> None:
    name = write_module(here, "theirs_a", "def key(c):\n    return c.tokens\n")

    assert find_key_function(name)(context()) == (1, 2, 3, 4)
    assert str(here) not in sys.path


@pytest.mark.parametrize("name", ["", "module", "module:", ":key", "a b"])
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="MODULE:FUNCTION"):
        find_key_function(name)


def test_an_unknown_module_is_named(here: Path) -> None:
    with pytest.raises(ConfigError, match="there is no module theirs_missing"):
        find_key_function("theirs_missing:key")


def test_a_module_that_lacks_another_one_is_not_called_missing(here: Path) -> None:
    name = write_module(here, "theirs_b", "import theirs_missing\n")

    with pytest.raises(
        ConfigError, match="theirs_b cannot be imported.*theirs_missing"
    ):
        find_key_function(name)


@pytest.mark.parametrize("body", ["1 / 0", "raise SystemExit(3)", "def key(:", "x = ."])
def test_a_module_that_fails_to_import_is_a_wrong_setting(
    here: Path, body: str
) -> None:
    name = write_module(here, "theirs_c", body)

    with pytest.raises(ConfigError, match="theirs_c cannot be imported"):
        find_key_function(name)


def test_a_misspelt_function_gets_a_suggestion(here: Path) -> None:
    write_module(here, "theirs_d", "def prefix_key(c):\n    return c.tokens\n")

    with pytest.raises(ConfigError, match="did you mean prefix_key"):
        find_key_function("theirs_d:prefx_key")


def test_something_that_cannot_be_called_is_refused(here: Path) -> None:
    with pytest.raises(ConfigError, match="must be a function of a KeyContext"):
        find_key_function(write_module(here, "theirs_e", "key = 3"))


# Asking it


def ask(function: Any, asked: list[KeyContext]) -> list[int] | KeyFault:
    return number_keys(function, asked, pickle.loads(pickle.dumps(asked)))


def test_equal_keys_have_equal_numbers() -> None:
    asked = [context(), context(tokens=(9,)), context()]

    assert ask(everything, asked) == [0, 1, 0]


def counting() -> Any:
    calls = iter(range(1000))
    return lambda c: (c.tokens, next(calls))


class Grudging:
    """A key that cannot be compared."""

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "function, reason",
    [
        (counting(), "not deterministic"),
        (lambda c: float("nan"), "not deterministic"),
        (lambda c: object(), "not deterministic"),
        (lambda c: (c.tokens, id(c)), "not deterministic"),
        (lambda c: id(c.tokens), "not deterministic"),
        (lambda c: list(c.tokens), "cannot be hashed"),
        (lambda c: {"tokens": c.tokens}, "cannot be hashed"),
        (lambda c: Grudging(), "cannot be hashed"),
        (lambda c: 1 / c.start_position, "it raised ZeroDivisionError"),
        (lambda c: sys.exit("enough"), "it raised SystemExit: enough"),
        (lambda c: c.adaptor_name, "adaptor_name.*did you mean adapter_name"),
        (lambda c: c.zzz, "zzz.*there are tokens, model_name"),
        (lambda: 3, "it raised TypeError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_a_key_function_does_is_a_finding(function: Any, reason: str) -> None:
    found = ask(function, [context(), context(tokens=(5, 6))])

    assert isinstance(found, KeyFault)
    assert re.search(reason, found.reason), found.reason


def test_what_a_key_function_prints_stays_out_of_the_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ask(lambda c: print("loud") or c.tokens, [context()])

    assert capsys.readouterr().out == ""


# Asking it in another process


def test_a_key_of_facts_is_the_same_elsewhere(here: Path) -> None:
    name = write_module(
        here, "theirs_f", "def key(c):\n    return c.tokens, c.tenant\n"
    )

    assert try_elsewhere(name, find_key_function(name), [context()], seed=1) is True


def test_pythons_hash_is_another_one_elsewhere() -> None:
    answers = [
        try_elsewhere(BUILTIN_HASH, builtin_hash, [context()], seed=seed)
        for seed in (1, 2)
    ]

    assert False in answers  # one of the seeds may be this process's own


def test_a_function_that_fails_elsewhere_is_no_verdict(here: Path) -> None:
    body = """\
        import os
        def key(c):
            if os.environ.get("PYTHONHASHSEED") == "7":
                raise OSError("not here")
            return c.tokens
        """
    name = write_module(here, "theirs_g", body)

    found = try_elsewhere(name, find_key_function(name), [context()], seed=7)

    assert isinstance(found, KeyFault)
    assert "not here" in found.reason


def test_keys_that_cannot_be_sent_are_no_verdict(here: Path) -> None:
    body = """\
        def key(c):
            class Local(tuple):
                pass
            return Local((c.tokens,))
        """
    name = write_module(here, "theirs_h", body)

    found = try_elsewhere(name, find_key_function(name), [context()], seed=1)

    assert isinstance(found, KeyFault)


def test_keys_can_be_tried_without_loading_tensors() -> None:
    code = (
        "import sys, stemkv.audit.identity.keys, stemkv.audit.identity.trial\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False)

    assert done.returncode == 0
