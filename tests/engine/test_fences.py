"""Ways around a fence that were open once: each is tried here."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stemkv.core import Sharing, SharingPolicy, TokenIds
from stemkv.core.schedule.events import Event
from stemkv.core.schedule.request import FinishReason
from stemkv.engine import Engine, InFlight, SamplingParams, wrap_model
from stemkv.engine.adapter import read_adapter
from stemkv.errors import BrokenAdapter, ConfigError, InvariantError, ModelError
from tests.engine.models import build_engine, build_model, random_ids, tiny, tiny_once

MODEL = "llama-group3-tied"
PROMPT = TokenIds.from_ids(random_ids(40, seed=1))
ONE = SamplingParams(max_new_tokens=1)
GROUP = SharingPolicy(groups={"g": {"ann", "bob"}})


def engine_of(**config: Any) -> Engine:
    return build_engine(tiny_once(MODEL, torch.float32), **config)


def reused(engine: Engine, tenant: str = "ann") -> int:
    (completion,) = engine.generate([PROMPT], ONE, tenant=tenant)
    return completion.counts.reused


# Identity


def test_frequencies_that_differ_in_memory_differ_in_identity() -> None:
    """They are computed at load and in no file, and KV follows from them."""
    model = build_model(MODEL)
    changed = deepcopy(model)
    for name, buffer in changed.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(0.5)
    one = build_engine(wrap_model(model, name="m"))
    other = build_engine(wrap_model(changed, name="m"))
    assert one.identity.weights_digest == other.identity.weights_digest
    assert one.namespace != other.namespace


def test_the_precision_of_products_is_part_of_the_identity() -> None:
    before = engine_of().namespace
    torch.set_float32_matmul_precision("medium")
    try:
        assert engine_of().namespace != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert engine_of().namespace == before


def test_weights_that_another_engine_replaced_are_never_served() -> None:
    loaded = tiny(MODEL)
    ours, theirs = build_engine(loaded), build_engine(loaded)
    assert reused(ours) == 0
    name = "model.norm.weight"
    weight = loaded.model.get_parameter(name).detach()
    theirs.update_weights({name: weight * 1.5})
    with pytest.raises(InvariantError, match="another engine replaced weights"):
        reused(ours)
    assert reused(theirs) == 0


def test_weights_tied_by_hand_are_updated_together() -> None:
    model: Any = build_model("llama-group1")
    model.lm_head.weight = model.model.embed_tokens.weight  # its config says untied
    fresh = deepcopy(model)
    engine = build_engine(wrap_model(model, name="tied"))
    new = torch.randn(model.model.embed_tokens.weight.shape) * 0.2
    engine.update_weights({"model.embed_tokens.weight": new})
    with torch.no_grad():
        fresh.model.embed_tokens.weight.copy_(new)
    other = build_engine(wrap_model(fresh, name="tied"))
    assert engine.identity.weights_digest == other.identity.weights_digest
    params = SamplingParams(max_new_tokens=6)
    (one,), (two,) = engine.generate([PROMPT], params), other.generate([PROMPT], params)
    assert one.token_ids == two.token_ids


# Sharing


@pytest.mark.parametrize("policy", InFlight, ids=lambda policy: policy.value)
def test_who_leaves_a_group_publishes_nothing_more_into_it(policy: InFlight) -> None:
    engine = engine_of(token_budget=8, sharing=GROUP)
    running = engine.add(PROMPT, ONE, tenant="bob")
    engine.step()  # in the middle of its prefill
    waiting = engine.add(PROMPT, ONE, tenant="bob")
    generation = engine.generation
    alone = SharingPolicy(groups={"g": {"ann"}})

    assert engine.update_sharing(alone, in_flight=policy) == generation + 1

    ended = {c.request_id: c for c in engine.drain()}
    aborted = policy is InFlight.ABORT
    for request_id in (running, waiting):
        is_aborted = ended[request_id].finish_reason is FinishReason.REPLACED
        assert is_aborted == aborted
    # Only what was published before is left to the group: at most a chunk.
    assert reused(engine) <= 8
    if policy is InFlight.RESTART:
        assert reused(engine, "bob") > 0, "they share again in a domain of their own"


def test_requests_whose_domain_stays_are_left_alone_by_another_policy() -> None:
    engine = engine_of(token_budget=8, sharing=GROUP)
    engine.add(PROMPT, ONE, tenant="ann")
    engine.step()
    engine.update_sharing(
        SharingPolicy(groups={"g": {"ann"}}, tenants={"bob": Sharing.NONE})
    )
    engine.drain()
    assert reused(engine) > 8


def test_a_policy_that_is_none_is_refused() -> None:
    engine = engine_of()
    with pytest.raises(ConfigError, match="must be a SharingPolicy"):
        engine.update_sharing(None)  # type: ignore[arg-type]
    assert reused(engine) == 0


# Rollouts


def new_norm(engine: Engine) -> dict[str, torch.Tensor]:
    name = "model.norm.weight"
    return {name: engine.loaded.model.get_parameter(name).detach() * 1.1}


def test_a_waiting_update_is_made_though_the_last_request_ended_in_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build_engine(tiny(MODEL))
    engine.add(PROMPT, SamplingParams(max_new_tokens=9))
    engine.step()
    engine.update_weights(new_norm(engine))
    assert engine.num_rollouts_waiting == 1

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine._served.runner, "execute", fail)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert engine.has_work, "the change still waits"
    engine.drain()
    assert engine.num_rollouts_waiting == 0


def test_no_verb_inside_on_event_opens_the_way_for_a_rollout() -> None:
    engine = build_engine(tiny(MODEL))
    refused = []

    def on_event(event: Event) -> None:
        engine.cancel("nobody")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="inside on_logits or on_event"):
            engine.update_weights(new_norm(engine))
        refused.append(event)

    engine.on_event = on_event
    assert reused(engine) == 0
    assert refused
    assert engine.generation == 0


def test_after_a_reset_those_who_waited_share_again() -> None:
    engine = engine_of(max_num_running=1)
    for _ in range(3):
        engine.add(PROMPT, ONE)
    engine.step()
    engine.reset()
    counts = sorted(c.counts.reused for c in engine.drain())
    assert counts[-1] > 0


@pytest.mark.parametrize(
    "arguments",
    [{5: torch.ones(1)}, [("model.norm.weight", torch.ones(96))], None],
    ids=["a number", "a list", "nothing"],
)
def test_an_update_that_is_no_mapping_of_names_is_refused(arguments: Any) -> None:
    engine = engine_of()
    with pytest.raises(ConfigError):
        engine.update_weights(arguments)
    assert engine.generation == 0


def test_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(BrokenAdapter, match="is no path"):
        engine_of().load_adapter("a", None)  # type: ignore[arg-type]
    with pytest.raises(BrokenAdapter, match="is no folder"):
        engine_of().load_adapter("a", Path("no/such"))


# Adapters that peft would serve otherwise


def save_adapter(folder: Path, **config: Any) -> Path:
    """One with matrices for the queries of two layers."""
    tensors = {}
    for layer in (0, 1):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.ones(2, 96)
        tensors[f"{prefix}.lora_B.weight"] = torch.ones(96, 2)
    save_file(tensors, folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(plain | config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.q_proj"},
        {"target_modules": ["self_attn.q_proj", "v_proj"]},
        {"target_modules": None},
        {"exclude_modules": ["v_proj"], "layers_to_transform": [0, 1]},
        {"bias": None, "use_dora": False, "kasa_config": None, "loftq_config": {}},
    ],
    ids=str,
)
def test_matrices_that_the_settings_mean_are_served(
    config: dict[str, Any], tmp_path: Path
) -> None:
    assert len(read_adapter(save_adapter(tmp_path, **config)).pairs) == 2


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["v_proj"]},
        {"target_modules": "q_proj"},  # an expression for the whole name
        {"exclude_modules": ["q_proj"]},
        {"layers_to_transform": [0]},
        {"layers_to_transform": 1},
        {"kasa_config": {"beta": 0.1}},
        {"arrow_config": {"top_k": 2}},
        {"use_bdlora": True},
        {"a_setting_of_tomorrow": True},
        {"r": "2"},
        {"target_modules": {"q_proj": 1}},
        {"target_modules": "("},
    ],
    ids=str,
)
def test_what_peft_would_compute_otherwise_is_refused(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError):
        read_adapter(save_adapter(tmp_path, **config))
