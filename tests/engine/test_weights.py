"""Weights replaced in place: what may be given, and by what name it is served.

What an engine computes afterwards is what a fresh one computes on the new weights, bit
for bit; an update that does not fit changes nothing (C1, I2, I9).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stemkv.engine import InFlight, wrap_model
from stemkv.errors import ConfigError
from tests.engine.lora_files import make_adapter
from tests.engine.models import (
    VOCABULARY,
    build_engine,
    random_ids,
    randomise,
    tiny,
    tokens,
)
from tests.engine.states import (
    BASE,
    TRAINED,
    Revision,
    alone,
    asked,
    assert_got,
    play,
    revisions,
    weights,
)
from tests.seeds import slow

POLICIES = tuple(InFlight)


# What is given to an update


def test_the_caller_may_do_what_it_likes_with_its_tensors() -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    played.add("early", asked())
    played.step()
    given = {name: each.clone() for name, each in weights(1).items()}
    played.engine.update_weights(given)  # waits for the early one
    for each in given.values():
        each.fill_(float("nan"))
    given.clear()
    played.drain()
    played.run("late", asked())
    assert_got(played, "late", TRAINED)
    namespace = played.engine.namespace
    again = BASE.engine(block_size=4)
    again.update_weights(weights(1))
    assert again.namespace == namespace, "named by what was given, not by what became"


@pytest.mark.parametrize("make", ["transposed", "double", "parameter", "strided"])
def test_tensors_come_in_any_form(make: str) -> None:
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transposed": lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
        "double": lambda t: t.double(),
        "parameter": lambda t: torch.nn.Parameter(t.clone()),
        "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    }
    played = play(BASE.engine(block_size=4))
    plain = BASE.engine(block_size=4)
    plain.update_weights(weights(1))
    played.engine.update_weights({n: forms[make](t) for n, t in weights(1).items()})
    assert played.engine.identity == plain.identity
    played.run("late", asked())
    assert_got(played, "late", TRAINED)


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "no tensors"),
        (
            {"model.layers.0.self_attn.q_proj": torch.zeros(64, 64)},
            "did you mean model.layers.0.self_attn.q_proj.weight",
        ),
        ({"zzz": torch.zeros(1)}, "no tensor 'zzz'"),
        ({"model.norm.weight": torch.zeros(65)}, r"has shape \[64\], got \[65\]"),
        ({"model.norm.weight": torch.zeros(64, 1)}, r"has shape \[64\]"),
        (
            {"model.layers.0.self_attn.q_proj.weight": torch.zeros(192, 64)},
            r"has shape \[64, 64\], got \[192, 64\]",
        ),
        ({"model.norm.weight": torch.full((64,), float("nan"))}, "not finite"),
        ({"model.norm.weight": torch.full((64,), float("inf"))}, "not finite"),
        (
            {"model.norm.weight": torch.full((64,), 1e300, dtype=torch.double)},
            "not finite in torch.float32",
        ),
        ({"model.norm.weight": [1.0] * 64}, "must be a tensor, got list"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, "no tensor"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "policy",
    [InFlight.FINISH, *slow(each for each in POLICIES if each is not InFlight.FINISH)],
    ids=lambda policy: policy.value,
)
def test_an_update_that_does_not_fit_changes_nothing(
    given: Mapping[str, Any], message: str, policy: InFlight
) -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    engine = played.engine
    played.run("warm", asked())
    played.add("in flight", asked(tokens(random_ids(30, seed=4))))
    played.step()
    before = (engine.generation, engine.identity, engine.namespace, engine.usage())
    good = {"lm_head.weight": weights(1)["lm_head.weight"]}
    with pytest.raises(ConfigError, match=message):
        engine.update_weights({**good, **given} if given else given, in_flight=policy)
    assert before == (
        engine.generation,
        engine.identity,
        engine.namespace,
        engine.usage(),
    )
    assert engine.num_rollouts_waiting == 0
    played.drain()
    assert_got(played, "in flight", BASE)
    assert played.run("again", asked()).reused > 0
    assert_got(played, "again", BASE)


@pytest.mark.parametrize("names", [("embed",), ("head",), ("embed", "head")], ids=str)
def test_a_tied_tensor_may_go_by_either_name(names: tuple[str, ...]) -> None:
    model = "llama-group3-tied"
    full = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
    new = weights(1, model)
    assert torch.equal(new[full["embed"]], new[full["head"]])
    given = {n: t for n, t in new.items() if n not in full.values()}
    given |= {full[name]: new[full[name]] for name in names}
    old = Revision(model=model, weights=revisions(model)[0])
    played = play(old.engine(block_size=4))
    both = old.engine(block_size=4)
    both.update_weights(new)
    played.engine.update_weights(given)
    assert played.engine.identity == both.identity
    played.run("late", asked())
    assert_got(played, "late", replace(old, weights=revisions(model)[1]))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t + 1,
        lambda t: t[:-1],
        lambda t: t.double() * 2,
        lambda t: t.double(),
        lambda t: "a text",
    ],
    ids=["value", "shape", "dtype and value", "dtype", "no tensor"],
)
def test_a_tied_tensor_has_one_value(spoil: Callable[[torch.Tensor], Any]) -> None:
    model = "llama-group3-tied"
    engine = build_engine(tiny(model))
    tied = weights(1, model)["lm_head.weight"]
    before = (engine.generation, engine.identity)
    given = {"lm_head.weight": tied, "model.embed_tokens.weight": spoil(tied)}
    try:
        engine.update_weights(given)
    except ConfigError:
        assert (engine.generation, engine.identity) == before
    else:
        assert torch.equal(torch.as_tensor(spoil(tied)).float(), tied)


def test_a_bias_may_be_updated_without_its_weight() -> None:
    model = "qwen2-group7-biased"
    old, new = weights(0, model), weights(1, model)
    mixed = {n: new[n] if n.endswith("bias") else t for n, t in old.items()}
    revision = Revision(model=model, weights=old)
    played = play(revision.engine(block_size=4))
    played.engine.update_weights({n: new[n] for n in new if n.endswith("bias")})
    played.run("late", asked())
    wanted = alone(replace(revision, weights=mixed), asked())[0]
    played.outcome("late").assert_same_as(wanted)
    assert wanted.differs_from(alone(revision, asked())[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "model", ["llama-group3-tied", "qwen2-group7-biased", "qwen3-group2-normed"]
)
def test_every_model_takes_its_whole_state(model: str, dtype: torch.dtype) -> None:
    """What is trained in float32 is served as a fresh engine would serve it."""
    before = Revision(model=model, dtype=dtype, weights=revisions(model)[0])
    after = replace(before, weights=revisions(model)[2])
    played = play(before.engine(block_size=4, token_budget=16))
    played.run("early", asked())
    played.engine.update_weights(weights(2, model))
    assert played.run("late", asked()).reused == 0
    played.outcome("late").assert_same_as(alone(after, asked())[0])
    assert played.run("again", asked()).reused > 0
    played.outcome("again").assert_same_as(alone(after, asked())[0])


def wide() -> LlamaForCausalLM:
    """Its products are long enough that thin matrices take another path."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=None,
    )
    module = LlamaForCausalLM(config)
    randomise(module)
    return module


def test_zero_weights_at_the_start_do_not_spoil_later_ones() -> None:
    """How many rows a product needs is tried on weights; zeros would show nothing."""
    trained = wide()
    state = {
        name: each.clone()
        for name, each in trained.state_dict().items()
        if name.endswith("down_proj.weight")
    }
    at_start = wide()
    at_start.load_state_dict(
        {name: torch.zeros_like(each) for name, each in state.items()}, strict=False
    )
    engines = [
        build_engine(wrap_model(module, name="wide"), num_blocks=60)
        for module in (at_start, trained)
    ]
    engines[0].update_weights(state)
    what = asked(tokens(random_ids(60)), max_new_tokens=40)
    changed, fresh = (play(engine).run("r", what) for engine in engines)
    changed.assert_same_as(fresh)


def test_adapters_stay_on_top_of_new_weights(tmp_path: Path) -> None:
    one = make_adapter(tmp_path, seed=1, model=BASE.model)
    old = replace(BASE, adapters=(("x", one, 0.5),))
    played = play(old.engine(block_size=4))
    played.run("early", asked(adapter="x"))
    played.engine.update_weights(weights(1))
    assert [a.name for a in played.engine.adapters()] == ["x"]
    assert played.run("late", asked(adapter="x")).reused == 0
    assert_got(played, "late", replace(TRAINED, adapters=old.adapters))


# An engine after another on the same model


def test_a_new_engine_on_updated_weights_says_so_in_its_identity() -> None:
    loaded = BASE.load()
    first = build_engine(loaded, block_size=4)
    original = first.identity
    first.update_weights(weights(1))
    second = build_engine(loaded, block_size=4)
    fresh = build_engine(TRAINED.load(), block_size=4)
    assert second.identity.weights_digest != original.weights_digest
    assert second.identity == fresh.identity
    assert second.namespace != original.namespace()
    played = play(second)
    played.run("r", asked())
    assert_got(played, "r", TRAINED)


def test_a_new_engine_while_an_update_waits_is_named_by_what_it_serves() -> None:
    loaded = BASE.load()
    first = play(build_engine(loaded, block_size=4, token_budget=16))
    first.add("early", asked())
    first.step()
    first.engine.update_weights(weights(1))
    second = play(build_engine(loaded, block_size=4))
    assert second.engine.identity == build_engine(BASE.load(), block_size=4).identity
    second.run("r", asked())
    assert_got(second, "r", BASE)
    first.drain()
    assert_got(first, "early", BASE)
    third = build_engine(loaded, block_size=4)
    assert third.identity == build_engine(TRAINED.load(), block_size=4).identity


def test_weights_back_where_they_were_have_their_old_digest() -> None:
    loaded = BASE.load()
    original = build_engine(loaded).identity
    build_engine(loaded).update_weights(weights(1))
    build_engine(loaded).update_weights(weights(0))
    assert build_engine(loaded).identity == original


def test_a_copy_of_a_model_keeps_the_name_of_what_is_in_it() -> None:
    """`replace` with a copy of the module is how one model is given to two engines."""
    loaded = BASE.load()
    copied = replace(loaded, model=deepcopy(loaded.model))
    build_engine(copied, block_size=4).update_weights(weights(1))
    untouched = play(build_engine(loaded, block_size=4))
    untouched.run("r", asked())
    assert_got(untouched, "r", BASE)
    fresh = build_engine(BASE.load(), block_size=4)
    assert untouched.engine.identity == fresh.identity


def test_what_was_refused_halfway_is_not_in_the_digest() -> None:
    """A later update must not carry over what an earlier, refused one named."""
    engine = BASE.engine(block_size=4)
    name, other = "model.norm.weight", "lm_head.weight"
    with pytest.raises(ConfigError):
        engine.update_weights({name: weights(1)[name], other: torch.zeros(1)})
    engine.update_weights({other: weights(1)[other]})
    fresh = BASE.engine(block_size=4)
    fresh.update_weights({other: weights(1)[other]})
    assert engine.identity == fresh.identity


def test_the_order_of_names_is_of_no_consequence() -> None:
    one, other = BASE.engine(), BASE.engine()
    one.update_weights(weights(1))
    other.update_weights(dict(reversed(weights(1).items())))
    assert one.identity == other.identity


def test_updating_a_part_is_updating_that_part() -> None:
    """Parts of joined projections come one by one, each in its own place."""
    names = [
        f"model.layers.1.{p}.weight"
        for p in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
    ]
    for name in names:
        mixed = weights(0) | {name: weights(1)[name]}
        played = play(BASE.engine(block_size=4))
        played.engine.update_weights({name: weights(1)[name]})
        played.run("r", asked())
        truth = alone(replace(BASE, weights=mixed), asked())[0]
        played.outcome("r").assert_same_as(truth)
        assert truth.differs_from(alone(BASE, asked())[0])


def test_a_tensor_that_holds_what_is_there_already_still_advances() -> None:
    """A generation is a generation: nobody has to guess what changed."""
    played = play(BASE.engine(block_size=4))
    played.run("warm", asked())
    digest = played.engine.identity.weights_digest
    played.engine.update_weights({"model.norm.weight": weights(0)["model.norm.weight"]})
    assert played.engine.identity.weights_digest == digest
    assert played.engine.generation == 1
    assert played.run("again", asked()).reused == 0
    assert_got(played, "again", BASE)


@pytest.mark.parametrize("policy", ["finish", None, 0, "FINISH"])
def test_a_policy_must_be_one(policy: Any) -> None:
    engine = BASE.engine()
    verbs: list[Callable[[], object]] = [
        lambda: engine.update_weights(weights(1), in_flight=policy),
        lambda: engine.update_numerics("tolerant", in_flight=policy),
    ]
    for verb in verbs:
        with pytest.raises(ConfigError, match="in_flight must be"):
            verb()
    assert engine.generation == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(64, dtype=torch.complex64),
        torch.zeros(64, device="meta"),
        torch.zeros(64).to_sparse(),
    ],
    ids=lambda t: f"{t.dtype} {t.layout} {t.device}",
)
def test_tensors_that_are_no_weights_are_refused(tensor: torch.Tensor) -> None:
    engine = BASE.engine()
    with pytest.raises(ConfigError, match="model.norm.weight"):
        engine.update_weights({"model.norm.weight": tensor})
    assert engine.generation == 0
