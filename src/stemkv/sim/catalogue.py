"""Models and devices that people name in one word.

Owns two tables and the look-up of a word in them. Every row says where its numbers
stand; nothing in here was measured. Knows no price (see `pricing`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from stemkv.errors import ConfigError
from stemkv.sim.model_shape import ModelShape, read_config

__all__ = ["DEVICES", "MODELS", "Device", "device_named", "model_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU socket, as its maker describes it."""

    name: str
    source: str  # where the numbers stand
    bf16_flops_per_s: float  # peak, dense (half of what is given "with sparsity")
    fp8_flops_per_s: float | None = None  # None: no such units
    bytes_per_s: float  # peak memory bandwidth
    memory_bytes: int
    watts: float  # the maker's limit for the whole board or socket (TDP)


# Heads, layers and widths from each model's config.json on the Hugging Face hub.
# Parameters as that architecture has them, input embedding included; of models with
# experts, active parameters as the model card gives them.
MODELS: Final = (
    ModelShape(
        name="llama-3.1-8b",
        source="config.json of meta-llama/Llama-3.1-8B",
        num_parameters=8_030_261_248,
        num_active_parameters=8_030_261_248,
        num_layers=32,
        num_query_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
    ModelShape(
        name="llama-3.1-70b",
        source="config.json of meta-llama/Llama-3.1-70B; Llama 3.3 is the same",
        num_parameters=70_553_706_496,
        num_active_parameters=70_553_706_496,
        num_layers=80,
        num_query_heads=64,
        num_kv_heads=8,
        head_dim=128,
    ),
    ModelShape(
        name="llama-3.2-1b",
        source="config.json of meta-llama/Llama-3.2-1B",
        num_parameters=1_235_814_400,
        num_active_parameters=1_235_814_400,
        num_layers=16,
        num_query_heads=32,
        num_kv_heads=8,
        head_dim=64,
    ),
    ModelShape(
        name="llama-3.2-3b",
        source="config.json of meta-llama/Llama-3.2-3B",
        num_parameters=3_212_749_824,
        num_active_parameters=3_212_749_824,
        num_layers=28,
        num_query_heads=24,
        num_kv_heads=8,
        head_dim=128,
    ),
    ModelShape(
        name="llama-2-7b",
        source="config.json of meta-llama/Llama-2-7b-hf; keys for every query head",
        num_parameters=6_738_415_616,
        num_active_parameters=6_738_415_616,
        num_layers=32,
        num_query_heads=32,
        num_kv_heads=32,
        head_dim=128,
    ),
    ModelShape(
        name="qwen3-8b",
        source="config.json of Qwen/Qwen3-8B",
        num_parameters=8_190_735_360,
        num_active_parameters=8_190_735_360,
        num_layers=36,
        num_query_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
    ModelShape(
        name="qwen3-14b",
        source="config.json of Qwen/Qwen3-14B",
        num_parameters=14_768_307_200,
        num_active_parameters=14_768_307_200,
        num_layers=40,
        num_query_heads=40,
        num_kv_heads=8,
        head_dim=128,
    ),
    ModelShape(
        name="qwen3-32b",
        source="config.json of Qwen/Qwen3-32B",
        num_parameters=32_762_123_264,
        num_active_parameters=32_762_123_264,
        num_layers=64,
        num_query_heads=64,
        num_kv_heads=8,
        head_dim=128,
    ),
    ModelShape(
        name="qwen3-30b-a3b",
        source="config.json and model card of Qwen/Qwen3-30B-A3B",
        num_parameters=30_532_122_624,
        num_active_parameters=3_300_000_000,
        num_layers=48,
        num_query_heads=32,
        num_kv_heads=4,
        head_dim=128,
        num_expert_parameters=48 * 128 * 3 * 2048 * 768,
        num_experts=128,
        num_experts_per_token=8,
    ),
    ModelShape(
        name="qwen2.5-7b",
        source="config.json of Qwen/Qwen2.5-7B",
        num_parameters=7_615_616_512,
        num_active_parameters=7_615_616_512,
        num_layers=28,
        num_query_heads=28,
        num_kv_heads=4,
        head_dim=128,
    ),
    ModelShape(
        name="mistral-7b",
        source="config.json of mistralai/Mistral-7B-v0.3, which has no window",
        num_parameters=7_248_023_552,
        num_active_parameters=7_248_023_552,
        num_layers=32,
        num_query_heads=32,
        num_kv_heads=8,
        head_dim=128,
    ),
    ModelShape(
        name="mixtral-8x7b",
        source="config.json and announcement of mistralai/Mixtral-8x7B-v0.1",
        num_parameters=46_702_792_704,
        num_active_parameters=12_900_000_000,
        num_layers=32,
        num_query_heads=32,
        num_kv_heads=8,
        head_dim=128,
        num_expert_parameters=32 * 8 * 3 * 4096 * 14336,
        num_experts=8,
        num_experts_per_token=2,
    ),
    ModelShape(
        name="gpt-oss-20b",
        source="config.json and model card of openai/gpt-oss-20b",
        num_parameters=20_914_757_184,
        num_active_parameters=3_610_000_000,
        num_layers=24,
        num_windowed_layers=12,  # of 128 tokens, every other layer
        num_query_heads=64,
        num_kv_heads=8,
        head_dim=64,
        num_expert_parameters=24 * 32 * 3 * 2880 * 2880,
        num_experts=32,
        num_experts_per_token=4,
        weight_dtype="mxfp4",
    ),
    ModelShape(
        name="gpt-oss-120b",
        source="config.json and model card of openai/gpt-oss-120b",
        num_parameters=116_829_156_672,
        num_active_parameters=5_130_000_000,
        num_layers=36,
        num_windowed_layers=18,  # of 128 tokens, every other layer
        num_query_heads=64,
        num_kv_heads=8,
        head_dim=64,
        num_expert_parameters=36 * 128 * 3 * 2880 * 2880,
        num_experts=128,
        num_experts_per_token=4,
        weight_dtype="mxfp4",
    ),
    ModelShape(
        name="deepseek-v3",
        source="config.json and technical report (arXiv 2412.19437); R1 is the same",
        num_parameters=671_026_404_352,
        num_active_parameters=37_000_000_000,
        num_layers=61,
        num_query_heads=128,
        num_kv_heads=128,
        head_dim=(128 + 64 + 128) // 2,  # keys are 192 wide, values 128
        latent_dim=512 + 64,
        num_expert_parameters=58 * 256 * 3 * 7168 * 2048,
        num_experts=256,
        num_experts_per_token=8,
        weight_dtype="fp8",
    ),
    ModelShape(
        name="smollm2-135m",
        source="config.json of HuggingFaceTB/SmolLM2-135M",
        num_parameters=134_515_008,
        num_active_parameters=134_515_008,
        num_layers=30,
        num_query_heads=9,
        num_kv_heads=3,
        head_dim=64,
    ),
)

DEVICES: Final = (
    Device(
        name="h100",
        source="NVIDIA H100 data sheet, SXM",
        bf16_flops_per_s=989e12,
        fp8_flops_per_s=1979e12,
        bytes_per_s=3.35e12,
        memory_bytes=80 * 10**9,
        watts=700,
    ),
    Device(
        name="h100-pcie",
        source="NVIDIA H100 data sheet, PCIe",
        bf16_flops_per_s=756e12,
        fp8_flops_per_s=1513e12,
        bytes_per_s=2.0e12,
        memory_bytes=80 * 10**9,
        watts=350,
    ),
    Device(
        name="h200",
        source="NVIDIA H200 data sheet, SXM",
        bf16_flops_per_s=989e12,
        fp8_flops_per_s=1979e12,
        bytes_per_s=4.8e12,
        memory_bytes=141 * 10**9,
        watts=700,
    ),
    Device(
        name="b200",
        source="NVIDIA DGX B200 data sheet, one of its eight GPUs",
        bf16_flops_per_s=2250e12,
        fp8_flops_per_s=4500e12,
        bytes_per_s=8.0e12,
        memory_bytes=180 * 10**9,
        watts=1000,
    ),
    Device(
        name="a100-80",
        source="NVIDIA A100 data sheet, 80 GB SXM",
        bf16_flops_per_s=312e12,
        bytes_per_s=2.039e12,
        memory_bytes=80 * 10**9,
        watts=400,
    ),
    Device(
        name="l40s",
        source="NVIDIA L40S data sheet",
        bf16_flops_per_s=362e12,
        fp8_flops_per_s=733e12,
        bytes_per_s=864e9,
        memory_bytes=48 * 10**9,
        watts=350,
    ),
    Device(
        name="l4",
        source="NVIDIA L4 data sheet",
        bf16_flops_per_s=121e12,
        fp8_flops_per_s=242e12,
        bytes_per_s=300e9,
        memory_bytes=24 * 10**9,
        watts=72,
    ),
    Device(
        name="a10g",
        source="NVIDIA A10G data sheet; power limit as AWS G5 instances report it",
        bf16_flops_per_s=70e12,
        bytes_per_s=600e9,
        memory_bytes=24 * 10**9,
        watts=300,
    ),
    Device(
        name="mi300x",
        source="AMD Instinct MI300X data sheet",
        bf16_flops_per_s=1307.4e12,
        fp8_flops_per_s=2614.9e12,
        bytes_per_s=5.3e12,
        memory_bytes=192 * 10**9,
        watts=750,
    ),
    Device(
        name="rtx-4090",
        source="NVIDIA Ada GPU architecture white paper, accumulating in FP32",
        bf16_flops_per_s=165.2e12,
        fp8_flops_per_s=330.3e12,
        bytes_per_s=1.008e12,
        memory_bytes=24 * 10**9,
        watts=450,
    ),
    # 56 cores × 2.0 GHz × 1,024 operations a cycle in the matrix units; eight channels
    # of DDR5-4800; memory as far as one usually sees it filled.
    Device(
        name="cpu",
        source="Intel ARK on the Xeon Platinum 8480+, and Intel's AMX guide",
        bf16_flops_per_s=56 * 2.0e9 * 1024,
        bytes_per_s=8 * 4800e6 * 8,
        memory_bytes=512 * 10**9,
        watts=350,
    ),
)

# Words in a hub name that don't change the numbers.
_DECORATION: Final = frozenset({"base", "chat", "hf", "instruct", "it", "meta"})

_Row = TypeVar("_Row", ModelShape, Device)


def model_named(name: str) -> ModelShape:
    """Return the model of that name, in whatever case and punctuation.

    A hub name (`meta-llama/Llama-3.1-8B-Instruct`) is as good. A path that ends in
    `.json`, or a folder with a `config.json`, is read instead. Raises `ConfigError`
    with near names.
    """
    path = Path(name)
    if path.suffix == ".json" or (path / "config.json").is_file():
        return read_config(path)
    return _row_named(
        name, MODELS, kind="model", remedy="or give the path of a config.json"
    )


def device_named(name: str) -> Device:
    """Return the device of that name, in whatever case and punctuation."""
    return _row_named(
        name, DEVICES, kind="device", remedy="or describe it with a `Device`"
    )


def _row_named(name: str, rows: tuple[_Row, ...], *, kind: str, remedy: str) -> _Row:
    by_key: Mapping[str, _Row] = {_key(row.name): row for row in rows}
    found = by_key.get(_key(name))
    if found is not None:
        return found
    keys = difflib.get_close_matches(_key(name), list(by_key), n=3, cutoff=0.5)
    near = [by_key[key].name for key in keys]
    known = near or [row.name for row in rows]
    raise ConfigError(
        f"{kind} {name!r:.80} is not in the catalogue; "
        f"{'near it' if near else 'it has'}: {', '.join(known)}; {remedy}"
    )


def _key(name: str) -> str:
    words = re.findall(r"[a-z]+|\d+", name.rpartition("/")[2].lower())
    return "".join(word for word in words if word not in _DECORATION)
