"""Models, devices, and what follows from them, against figures from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stemkv.core.books.cost import StepShape
from stemkv.errors import ConfigError
from stemkv.sim.catalogue import DEVICES, MODELS, device_named, model_named
from stemkv.sim.model_shape import shape_of
from stemkv.sim.pricing import (
    kv_bytes_per_token,
    memory_left,
    num_blocks,
    parse_memory,
    roofline,
    weight_bytes,
)

GIB = 2**30
H100 = device_named("h100")

# The fields of published config.json files that costs follow from.
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA_8B,
    "llama-3.2-1b": LLAMA_8B
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "sliding_window": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "deepseek-v3": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8"},
    },
}


# Known figures: ../shared/knowledge/performance.md, 1.5, and the model cards


@pytest.mark.parametrize(
    "name, kv_kib, kv_gib, petaflops, seconds, joules",
    [
        ("llama-3.1-8b", 128, 1.46, 0.230, 0.47, 326),
        ("qwen3-32b", 256, 2.93, 0.938, 1.90, 1_330),
        ("llama-3.1-70b", 320, 3.66, 1.88, 3.81, 2_670),
        ("llama-2-7b", 512, 5.86, 0.200, 0.40, 282),
    ],
)
def test_a_prefix_of_12000_tokens_costs_what_was_calculated_by_hand(
    name: str,
    kv_kib: float,
    kv_gib: float,
    petaflops: float,
    seconds: float,
    joules: float,
) -> None:
    cost = roofline(model_named(name), H100)

    assert cost.bytes_per_token == kv_kib * 1024
    assert round(cost.bytes_per_token * 12_000 / GIB, 2) == kv_gib
    assert cost.prefill_flops(0, 12_000) / 1e15 == pytest.approx(petaflops, rel=0.005)
    assert cost.prefill_seconds(0, 12_000) == pytest.approx(seconds, rel=0.01)
    assert cost.prefill_joules(0, 12_000) == pytest.approx(joules, rel=0.005)


def test_latent_attention_caches_the_latent_and_the_rotary_part() -> None:
    deepseek = model_named("deepseek-v3")

    assert kv_bytes_per_token(deepseek) / 1024 == pytest.approx(68.6, abs=0.05)
    assert 12_000 * deepseek.flops_per_token / 1e15 == pytest.approx(0.89, abs=0.005)


@pytest.mark.parametrize(
    "name, gigabytes",
    [("gpt-oss-20b", 13.8), ("gpt-oss-120b", 65.2), ("llama-3.1-8b", 16.1)],
)
def test_weights_take_what_the_published_files_take(
    name: str, gigabytes: float
) -> None:
    assert weight_bytes(model_named(name)) / 1e9 == pytest.approx(gigabytes, abs=0.1)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_models_numbers_fit_together(model: Any) -> None:
    idle = model.num_expert_parameters * (1 - model.expert_share)

    # Active is all but the experts a token skips; some cards leave out the input
    # embedding, which is never multiplied, and all round.
    assert model.num_active_parameters == pytest.approx(
        model.num_parameters - idle, rel=0.15
    )
    assert model.num_active_parameters <= model.num_parameters
    assert (model.num_experts > 1) == (model.num_expert_parameters > 0)
    assert model.num_query_heads % model.num_kv_heads == 0
    assert model.source


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_pair_of_model_and_device_has_a_price(device: Any) -> None:
    shape = StepShape()
    shape.add_chunk(99, 100, is_decode=True)
    for model in MODELS:
        cost = roofline(model, device, num_devices=8)

        assert 0.002 < cost.step_seconds(shape) < 10
        assert f"{model.name} " in cost.source
        assert cost.source.endswith(f"on 8 × {device.name}, estimated")


def test_quantised_weights_and_kv_are_smaller_and_fp8_computes_faster() -> None:
    llama = model_named("llama-3.1-8b")
    plain = roofline(llama, H100)
    small = roofline(llama, H100, kv_dtype="fp8", weight_dtype="fp8")
    # The A100 multiplies no FP8: it widens.
    a100 = device_named("a100-80")
    widened = roofline(llama, a100, weight_dtype="fp8")

    assert small.bytes_per_token * 2 == plain.bytes_per_token
    assert small.weight_bytes * 2 == plain.weight_bytes
    assert small.prefill_seconds(0, 9) == pytest.approx(
        plain.prefill_seconds(0, 9) / 2, rel=1e-3
    )
    assert widened.prefill_seconds(0, 9) == roofline(llama, a100).prefill_seconds(0, 9)


def test_windowed_layers_keep_kv_but_are_not_read() -> None:
    cost = roofline(model_named("gpt-oss-20b"), H100)

    assert cost.read_bytes_per_token == cost.bytes_per_token / 2


# Names


@pytest.mark.parametrize(
    "word",
    [
        "llama-3.1-8b",
        "Llama 3.1 8B",
        "LLAMA_3.1_8B",
        "meta-llama/Llama-3.1-8B-Instruct",
    ],
)
def test_case_and_punctuation_of_a_name_do_not_matter(word: str) -> None:
    assert model_named(word).name == "llama-3.1-8b"


def test_every_name_finds_its_own_row() -> None:
    assert [model_named(model.name) for model in MODELS] == list(MODELS)
    assert [device_named(device.name) for device in DEVICES] == list(DEVICES)


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"near it: qwen3-8b.*config\.json"):
        model_named("qwen3-80b")
    with pytest.raises(ConfigError, match="near it: h100"):
        device_named("h100x")
    with pytest.raises(ConfigError, match="it has: h100, h100-pcie, h200"):
        device_named("zzz")


# A model's own config.json


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_config_says_what_the_catalogue_says(name: str) -> None:
    row = model_named(name)
    shape = shape_of(CONFIGS[name], name=name)

    assert shape.num_parameters == pytest.approx(row.num_parameters, rel=5e-4)
    assert shape.num_active_parameters == pytest.approx(
        row.num_active_parameters, rel=0.17
    )
    for field in (
        "num_layers",
        "num_windowed_layers",
        "num_query_heads",
        "num_kv_heads",
        "head_dim",
        "latent_dim",
        "num_expert_parameters",
        "expert_share",
        "weight_dtype",
    ):
        assert getattr(shape, field) == getattr(row, field), field


def test_a_model_can_be_a_file_or_the_folder_it_is_in(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))

    for word in (folder, folder / "config.json"):
        model = model_named(str(word))
        assert model.name == "my-model"
        assert kv_bytes_per_token(model) == 131_072


def test_the_decoders_part_of_a_model_with_images_counts() -> None:
    nested = {"text_config": LLAMA_8B, "vision_config": {"hidden_size": 1}}

    assert shape_of(nested, name="x") == shape_of(LLAMA_8B, name="x")


def test_long_windows_are_counted_as_if_they_were_none() -> None:
    windows = {"layer_types": ["sliding_attention"] * 32, "sliding_window": 4096}

    assert shape_of(LLAMA_8B | windows, name="x").num_windowed_layers == 0


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"hidden_size": "4096"}, "hidden_size must be a whole number of at least 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        (
            {"layer_types": ["linear_attention"] * 32},
            "layer_types has linear_attention",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types must list 32 layers"),
        (
            {"num_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok is 5 of only 4 experts",
        ),
    ],
)
def test_a_config_that_is_not_understood_names_file_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B | change))

    with pytest.raises(ConfigError, match=re.escape(f"{file}: {message}")):
        model_named(str(file))


def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere\.json"):
        model_named(str(tmp_path / "nowhere.json"))
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"bad\.json is no JSON object"):
        model_named(str(tmp_path / "bad.json"))


# Memory


@pytest.mark.parametrize(
    "text, num_bytes",
    [
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("24Gi", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("800MiB", 800 * 2**20),
        ("2TiB", 2 * 2**40),
        ("4096", 4096),
        ("4096B", 4096),
    ],
)
def test_memory_reads_as_people_write_it(text: str, num_bytes: int) -> None:
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "24iB", "-1GiB", "nan", "24 GiB x", "0"])
def test_memory_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="memory must be"):
        parse_memory(text)


def test_a_memory_holds_whole_blocks_and_at_least_one() -> None:
    size = {"bytes_per_token": 131_072, "block_size": 16}

    assert num_blocks(parse_memory("24GiB"), **size) == 12_288
    assert num_blocks(2**21 * 2 - 1, **size) == 1
    with pytest.raises(ConfigError, match="less than one block of 16 tokens"):
        num_blocks(2**21 - 1, **size)


def test_what_is_left_beside_the_weights_is_for_kv() -> None:
    left = memory_left(model_named("llama-3.1-8b"), H100)

    assert left == int(80e9 * 0.9 - 2 * 8_030_261_248)
    with pytest.raises(
        ConfigError, match=r"take 141\.1 GB, but 1 × h100 have 72\.0 GB"
    ):
        memory_left(model_named("llama-3.1-70b"), H100)
    assert memory_left(model_named("llama-3.1-70b"), H100, num_devices=4) > 0


def test_an_unknown_dtype_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="kv_dtype must be one of bf16, fp16, fp8"):
        roofline(MODELS[0], H100, kv_dtype="int3")
    with pytest.raises(ConfigError, match="weight_dtype must be one of bf16, fp16"):
        roofline(MODELS[0], H100, weight_dtype="int3")
