"""The identity under which an engine caches: equal facts, equal name, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from stemkv.core import UNKNOWN, ComputeIdentity
from stemkv.engine import Engine, wrap_model
from stemkv.engine.linear import replace_linears
from stemkv.errors import UnsupportedModel
from tests.engine.models import (
    ByteTokenizer,
    build_engine,
    build_model,
    randomise,
    tiny,
    tiny_once,
)

BASE = ("llama-group1", torch.float32)


def identity(**settings: Any) -> ComputeIdentity:
    return build_engine(tiny_once(*BASE), **settings).identity


def differing(one: ComputeIdentity, other: ComputeIdentity) -> set[str]:
    names = {f.name for f in fields(ComputeIdentity)}
    return {name for name in names if getattr(one, name) != getattr(other, name)}


def test_every_fact_is_known() -> None:
    assert identity().unknown_fields() == ()
    for field in fields(ComputeIdentity):
        assert getattr(identity(), field.name) is not UNKNOWN
    assert len(build_engine(tiny_once(*BASE)).namespace) == 32


def test_facts_are_what_they_should_be() -> None:
    facts = identity(block_size=24)
    assert str(facts.model_architecture).startswith("LlamaForCausalLM:")
    assert facts.weights_digest == tiny(*BASE).weights_digest
    assert facts.kv_dtype == "float32"
    assert facts.block_size == 24
    assert (facts.numerics_class, facts.numerics_tile) == ("exact", 64)
    assert torch.__version__ in facts.engine_build


def test_equal_engines_have_equal_identities() -> None:
    one = build_engine(tiny(*BASE), num_blocks=10, token_budget=30)
    other = build_engine(tiny(*BASE), num_blocks=99, max_num_running=2)
    assert one.identity == other.identity
    assert one.namespace == other.namespace


@pytest.mark.parametrize(
    "settings, changed",
    [
        ({"block_size": 24}, {"block_size"}),
        ({"numerics": "tolerant"}, {"numerics_class"}),
    ],
    ids=str,
)
def test_settings_that_change_kv_change_the_identity(
    settings: dict[str, Any], changed: set[str]
) -> None:
    assert differing(identity(), identity(**settings)) >= changed
    engine = build_engine(tiny_once(*BASE), **settings)
    assert engine.namespace != build_engine(tiny_once(*BASE)).namespace


@pytest.mark.parametrize(
    "settings",
    [
        {"token_budget": 40},
        {"max_num_running": 3},
        {"num_blocks": 100},
        {"num_threads": 2},
        {"runs_self_test": True},
    ],
    ids=str,
)
def test_settings_that_do_not_change_kv_do_not_change_the_identity(
    settings: dict[str, Any],
) -> None:
    assert identity(**settings) == identity()


def test_dtype_and_weights_change_the_identity() -> None:
    base = identity()
    half = build_engine(tiny_once(BASE[0], torch.bfloat16)).identity
    assert {"kv_dtype", "weights_digest"} <= differing(base, half)
    other = build_engine(tiny(*BASE, seed=1)).identity
    assert differing(base, other) == {"weights_digest"}


def test_one_changed_tensor_changes_its_leaf_and_the_identity() -> None:
    loaded = tiny(*BASE)
    name = "model.layers.0.self_attn.q_proj.weight"
    model = deepcopy(loaded.model)
    with torch.no_grad():
        model.get_parameter(name)[0, 0] += 1
    changed = wrap_model(model, name=loaded.name)
    leaves = [(n, d) for n, d in changed.tensor_digests.items()]
    assert [n for n, d in leaves if loaded.tensor_digests[n] != d] == [name]
    one, other = build_engine(loaded).identity, build_engine(changed).identity
    assert differing(one, other) == {"weights_digest"}


def words(*texts: str, template: str | None = None) -> PreTrainedTokenizerFast:
    vocabulary = {text: index for index, text in enumerate(texts)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=texts[0]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    return tokenizer


def test_tokenizer_and_template_are_part_of_the_identity() -> None:
    def of(tokenizer: Any) -> ComputeIdentity:
        model = build_model(*BASE)
        loaded = wrap_model(model, name="x", tokenizer=tokenizer)
        return build_engine(loaded).identity

    base = of(words("a", "b", template="{{ messages }}"))
    assert base.unknown_fields() == ()
    assert base == of(words("a", "b", template="{{ messages }}"))
    assert differing(base, of(words("b", "a", template="{{ messages }}"))) == {
        "tokenizer_digest"
    }
    assert differing(base, of(words("a", "b"))) == {"chat_template_digest"}
    assert differing(base, of(None)) == {"tokenizer_digest", "chat_template_digest"}


def test_a_tokenizer_of_an_unknown_kind_does_not_stop_sharing() -> None:
    """Keys are made from token ids, so what is above them cannot change KV."""
    loaded = wrap_model(build_model(*BASE), name="x", tokenizer=ByteTokenizer())
    engine = build_engine(loaded)
    assert engine.identity.tokenizer_digest is None
    assert engine.namespace == build_engine(tiny_once(*BASE)).namespace


def test_an_engine_that_reuses_nothing_has_no_namespace() -> None:
    engine = build_engine(tiny_once(*BASE), reuses_prefixes=False)
    assert engine.namespace is None
    assert engine.identity == identity()


# The same weights under another config compute other KV

SHAPE: dict[str, Any] = dict(
    vocab_size=307,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=None,
)


def llama_of(**config: Any) -> Engine:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE | config))
    return build_engine(wrap_model(randomise(model), name="llama"))


def granite_of(**config: Any) -> Engine:
    model = GraniteForCausalLM(GraniteConfig(**SHAPE | config))
    return build_engine(wrap_model(randomise(model), name="granite"))


@pytest.mark.parametrize(
    "family, config",
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                }
            },
        ),
        ("llama", {"rms_norm_eps": 0.1}),
        ("llama", {"hidden_act": "relu"}),
        ("granite", {"attention_multiplier": 0.5}),
        ("granite", {"residual_multiplier": 0.5}),
        ("granite", {"embedding_multiplier": 2.0}),
    ],
    ids=str,
)
def test_config_values_that_change_kv_change_the_identity(
    family: str, config: dict[str, Any]
) -> None:
    engine_of = {"llama": llama_of, "granite": granite_of}[family]
    usual, changed = engine_of(), engine_of(**config)
    assert usual.loaded.weights_digest == changed.loaded.weights_digest
    assert usual.namespace != changed.namespace, "would share KV that differs"


def test_config_values_that_do_not_change_kv_do_not_change_the_identity() -> None:
    assert llama_of().namespace == llama_of(use_cache=False).namespace


# The digest of the weights


def test_the_digest_changes_with_any_weight() -> None:
    model = build_model(*BASE)
    before = wrap_model(model, name="x").weights_digest
    for name, parameter in model.named_parameters():
        changed = deepcopy(model)
        with torch.no_grad():
            flat = changed.get_parameter(name).view(-1)
            flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0))  # by one last bit
        assert wrap_model(changed, name="x").weights_digest != before, name
        assert parameter.shape
    assert wrap_model(model, name="another name").weights_digest == before


def test_the_digest_tells_zeros_of_either_sign_apart() -> None:
    digests = set()
    for zero in (0.0, -0.0):
        model = build_model(*BASE)
        with torch.no_grad():
            model.lm_head.weight[0, 0] = zero
        digests.add(wrap_model(model, name="x").weights_digest)
    assert len(digests) == 2


def test_a_model_that_served_before_is_not_described_again() -> None:
    """Linears that an engine replaced are out of the model's state, not out of use."""
    model = build_model(*BASE)
    replace_linears(model)
    with pytest.raises(UnsupportedModel, match="given to an engine before"):
        wrap_model(model, name="x")


# Other processes

SCRIPT = """
import torch
from tests.engine.models import build_engine, tiny

for dtype in (torch.float32, torch.bfloat16):
    print(build_engine(tiny("llama-group1", dtype)).namespace.hex())
"""


@pytest.mark.slow  # another process is asked in tests/cli/test_identity.py, too
def test_another_process_gives_the_same_names() -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root / "src"), str(root)))
    output = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONHASHSEED": "4711", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = [
        build_engine(tiny("llama-group1", dtype)).namespace.hex()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert output.split() == here
    assert here[0] != here[1]
