"""From the words of a command line to a cost model and a number of blocks.

Owns what a dtype weighs, how a model and a device become a `RooflineCost`, and how an
amount of memory is written. Holds no figures of models or devices (see `catalogue`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from stemkv.core.books.cost import RooflineCost
from stemkv.errors import ConfigError
from stemkv.sim.catalogue import Device
from stemkv.sim.model_shape import ModelShape

__all__ = [
    "KV_DTYPES",
    "WEIGHT_DTYPES",
    "kv_bytes_per_token",
    "memory_left",
    "num_blocks",
    "parse_memory",
    "roofline",
    "weight_bytes",
]

# Bytes per number.
KV_DTYPES: Final = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
WEIGHT_DTYPES: Final = {
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    # 32 numbers of 4 bits share a scale of 8 (OCP Microscaling Formats, version 1.0).
    # Where a model has experts, only these are quantised, as in gpt-oss.
    "mxfp4": 4.25 / 8,
}

_UNITS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def roofline(
    model: ModelShape,
    device: Device,
    *,
    kv_dtype: str = "bf16",
    weight_dtype: str | None = None,
    num_devices: int = 1,
    mfu: float = 0.5,
    bandwidth_efficiency: float = 0.8,
    step_overhead_s: float = 0.002,
) -> RooflineCost:
    """Return what `model` costs on `num_devices` of `device`, tensor-parallel.

    `weight_dtype=None` is the dtype the model was published in. Weights in FP8 compute
    at the FP8 rate where the device has one; all else at the rate of bfloat16, because
    smaller weights are widened before they are multiplied. The shares of the peaks and
    the overhead are assumptions; give measured ones where there are some.
    """
    weight_dtype = weight_dtype or model.weight_dtype
    num_bytes, expert_bytes = _weight_bytes(model, weight_dtype)
    flops_per_s = device.bf16_flops_per_s
    if weight_dtype == "fp8" and device.fp8_flops_per_s is not None:
        flops_per_s = device.fp8_flops_per_s
    bytes_per_token = kv_bytes_per_token(model, kv_dtype)
    num_reading = model.num_layers - model.num_windowed_layers
    count = f"{num_devices} × " if num_devices != 1 else ""
    return RooflineCost(
        source=(
            f"{model.name} ({weight_dtype}, KV {kv_dtype}) on {count}{device.name}, "
            f"estimated"
        ),
        bytes_per_token=bytes_per_token,
        read_bytes_per_token=bytes_per_token * num_reading // model.num_layers,
        flops_per_token=model.flops_per_token,
        flops_per_pair=model.flops_per_pair,
        weight_bytes=num_bytes,
        expert_bytes=expert_bytes,
        expert_share=model.expert_share,
        flops_per_s=flops_per_s,
        bytes_per_s=device.bytes_per_s,
        watts=device.watts,
        num_devices=num_devices,
        mfu=mfu,
        bandwidth_efficiency=bandwidth_efficiency,
        step_overhead_s=step_overhead_s,
    )


def kv_bytes_per_token(model: ModelShape, kv_dtype: str = "bf16") -> int:
    """Return bytes of KV per token, in all layers; scales of FP8 aren't counted."""
    size = _size_of(kv_dtype, KV_DTYPES, field="kv_dtype")
    return int(model.num_layers * model.kv_width * size)


def weight_bytes(model: ModelShape, weight_dtype: str | None = None) -> float:
    """Return bytes of all weights; `None` is the dtype the model was published in."""
    return _weight_bytes(model, weight_dtype or model.weight_dtype)[0]


def _weight_bytes(model: ModelShape, weight_dtype: str) -> tuple[float, float]:
    """Return bytes of all weights, and of these the routed experts'."""
    size = _size_of(weight_dtype, WEIGHT_DTYPES, field="weight_dtype")
    experts = model.num_expert_parameters * size
    if weight_dtype == "mxfp4" and model.num_expert_parameters:
        size = WEIGHT_DTYPES["bf16"]
    rest = (model.num_parameters - model.num_expert_parameters) * size
    return rest + experts, experts


def _size_of(dtype: str, sizes: Mapping[str, float], *, field: str) -> float:
    if dtype not in sizes:
        raise ConfigError(f"{field} must be one of {', '.join(sizes)}, got {dtype!r}")
    return sizes[dtype]


def memory_left(
    model: ModelShape,
    device: Device,
    *,
    weight_dtype: str | None = None,
    num_devices: int = 1,
    utilisation: float = 0.9,
) -> int:
    """Return bytes left for KV beside the weights, when nobody said how many.

    Activations are not counted; the tenth that `utilisation` leaves is for them. Raises
    `ConfigError` when the weights alone don't fit.
    """
    available = device.memory_bytes * num_devices * utilisation
    weights = weight_bytes(model, weight_dtype)
    if weights >= available:
        raise ConfigError(
            f"the weights of {model.name} take {weights / 1e9:.1f} GB, but "
            f"{num_devices} × {device.name} have {available / 1e9:.1f} GB to use; take "
            f"more devices or a smaller weight dtype"
        )
    return int(available - weights)


def parse_memory(text: str) -> int:
    """Return the bytes of "24GiB", "1.5 GiB", "800MiB" (powers of 2) or "24GB" (of 10).

    Without a unit, bytes. Case and the final B don't matter: "24gi" is 24 GiB.
    """
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if found is None or (found[3] and not found[2]):
        raise ConfigError(
            f"memory must be a number and a unit such as 24GiB or 800MiB, got "
            f"{text!r:.80}"
        )
    scale: int = (1024 if found[3] else 1000) ** _UNITS[found[2]]
    num_bytes = math.floor(float(found[1]) * scale)
    if num_bytes < 1:
        raise ConfigError(f"memory must be at least 1 byte, got {text!r:.80}")
    return num_bytes


def num_blocks(memory_bytes: int, *, bytes_per_token: int, block_size: int) -> int:
    """Return how many whole blocks of `block_size` tokens fit; raise if none does."""
    block_bytes = bytes_per_token * block_size
    if block_bytes < 1:
        raise ConfigError(f"block_size must be at least 1, got {block_size}")
    count = memory_bytes // block_bytes
    if count < 1:
        raise ConfigError(
            f"memory of {memory_bytes:,} bytes is less than one block of {block_size} "
            f"tokens, which takes {block_bytes:,}; give more memory or a smaller "
            f"block_size"
        )
    return count
