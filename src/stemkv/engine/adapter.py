"""Reads LoRA adapters in PEFT's format.

Owns what is in an adapter's folder: its matrices, its scaling and a digest of both,
taken from the bytes that were read. Refuses what would be computed wrongly. Knows
nothing of the model it is for (see `lora`) or of the names it is served under.

The format is that of the `peft` library (checked with 0.21): `adapter_config.json`
beside `adapter_model.safetensors`. The library itself is not needed to serve.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from stemkv.engine.digest import tensor_digest
from stemkv.errors import BrokenAdapter, UnsupportedModel

__all__ = ["AdapterWeights", "LoraPair", "finite_float", "read_adapter"]

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")

# Ways to begin training that leave the base model as it is. The others (pissa, olora,
# corda, loftq …) change its weights again whenever peft loads the adapter.
_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")

# Settings that say nothing of what is computed, or that are looked at below. Any other
# one that is set may change it, whatever peft adds in time, so it is refused.
_KNOWN = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "eva_config",  # concerns the beginning only
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)

# Words for the settings that are refused most.
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules beside LoRA",
    "fan_in_fan_out": "transposed weights",
    "lora_bias": "biases in LoRA's B",
    "trainable_token_indices": "trained embeddings",
    "layer_replication": "replicated layers",
    "megatron_config": "Megatron layers",
    "target_parameters": "LoRA on bare parameters",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
}


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What one linear gets added: `x @ a.T @ b.T * scaling`."""

    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [out_features, rank]
    scaling: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWeights:
    """An adapter as read."""

    path: Path  # for people
    digest: bytes  # SHA-256 over modules, matrices and scalings
    pairs: Mapping[str, LoraPair]  # by name of the linear, sorted


def read_adapter(path: Path | str) -> AdapterWeights:
    """Read an adapter's folder.

    Raises `BrokenAdapter` if files are missing, damaged or contradict each other, and
    `UnsupportedModel` for kinds of adapters that would be computed wrongly.
    """
    try:
        path = Path(path)
    except TypeError as error:
        raise BrokenAdapter(f"adapter {path!r:.80} is no path ({error})") from error
    config = _read_config(path)
    tensors = _read_tensors(path / _WEIGHTS)
    matrices: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key)
        if found is None or not key.startswith(_PREFIX):
            raise UnsupportedModel(
                f"adapter {path} has a tensor {key}, which is no LoRA matrix of a "
                f"linear layer; only plain LoRA is supported"
            )
        module = found["module"].removeprefix(_PREFIX)
        if not _is_target(path, config, module):
            raise BrokenAdapter(
                f"adapter {path} has matrices for {module}, which {_CONFIG} leaves out "
                f"(target_modules, exclude_modules, layers_to_transform): peft would "
                f"not use them"
            )
        matrices.setdefault(module, {})[found["matrix"]] = tensor
    if not matrices:
        raise BrokenAdapter(f"adapter {path} holds no LoRA matrix in {_WEIGHTS}")
    pairs = {
        module: _pair(path, config, module, matrices[module])
        for module in sorted(matrices)
    }
    return AdapterWeights(path=path, digest=_digest(pairs), pairs=pairs)


def _is_target(path: Path, config: dict[str, Any], module: str) -> bool:
    """Whether the config means this module, by peft's rules."""
    wanted = config.get("target_modules")
    excluded = config.get("exclude_modules")
    if excluded and _is_named(path, excluded, module):
        return False
    if wanted and wanted != "all-linear" and not _is_named(path, wanted, module):
        return False
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return True
    indices = [layers] if isinstance(layers, int) else layers
    return any(f".{index}." in f".{module}." for index in indices)


def _is_named(path: Path, names: Any, module: str) -> bool:
    """Whether a module is in a list of (last parts of) names, or fits an expression."""
    if isinstance(names, str):
        try:
            return re.fullmatch(names, module) is not None
        except re.error as error:
            raise BrokenAdapter(
                f"adapter {path}: {names!r:.80} is no regular expression ({error})"
            ) from error
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise BrokenAdapter(f"adapter {path}: names of modules must be a list of texts")
    return any(module == name or module.endswith(f".{name}") for name in names)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise BrokenAdapter(
            f"adapter {path} is no folder; give one that peft has saved"
        )
    file = path / _CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BrokenAdapter(f"adapter folder {path} has no {_CONFIG}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BrokenAdapter(f"{file} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise BrokenAdapter(f"{file} must hold an object, got {type(config).__name__}")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(
            f"adapter {path} is of type {kind!r}; only LORA is served"
        )
    for name, value in config.items():
        if value and name not in _KNOWN:
            what = _REFUSED.get(name, "a setting that is not known here")
            raise UnsupportedModel(
                f"adapter {path} uses {what} ({name}), which is not supported"
            )
    beginning = config.get("init_lora_weights")
    if not any(beginning is known or beginning == known for known in _BEGINNINGS):
        raise UnsupportedModel(
            f"adapter {path} was begun with init_lora_weights = {beginning!r:.80}, for "
            f"which peft changes the base model's weights; convert it to plain LoRA "
            f"when saving"
        )
    if config.get("bias") not in (None, "none"):
        raise UnsupportedModel(
            f"adapter {path} trains biases (bias = {config['bias']!r}), which is not "
            f"supported; train it with bias = 'none'"
        )
    return config


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Read the file once, into memory: what is hashed is what is served."""
    try:
        data = file.read_bytes()
        return safetensors.torch.load(data)
    except FileNotFoundError:
        hint = ""
        if file.with_suffix(".bin").exists() or list(file.parent.glob("*.bin")):
            hint = "; pickled weights are not read, as that can run code"
        raise BrokenAdapter(f"adapter {file.parent} has no {file.name}{hint}") from None
    except (OSError, safetensors.SafetensorError, ValueError, KeyError) as error:
        raise BrokenAdapter(f"{file} cannot be read ({error})") from error


def _pair(
    path: Path, config: dict[str, Any], module: str, found: dict[str, torch.Tensor]
) -> LoraPair:
    if len(found) != 2:
        missing = "B" if "A" in found else "A"
        raise BrokenAdapter(f"adapter {path} has no lora_{missing} for {module}")
    a, b = found["A"], found["B"]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or 0 in a.shape:
        raise BrokenAdapter(
            f"adapter {path}: lora_A {list(a.shape)} and lora_B {list(b.shape)} of "
            f"{module} do not fit together"
        )
    if not (a.is_floating_point() and b.is_floating_point()):
        raise UnsupportedModel(f"adapter {path}: {module} has {a.dtype} matrices")
    # In float32: the smallest types cannot be asked.
    if not (a.float().isfinite().all() and b.float().isfinite().all()):
        raise BrokenAdapter(f"adapter {path}: {module} has values that are not finite")
    return LoraPair(a, b, _scaling(path, config, module, rank=a.shape[0]))


def _scaling(path: Path, config: dict[str, Any], module: str, *, rank: int) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA.

    The rank is that of the matrices; a config that says another was not written for
    them.
    """
    declared = _by_pattern(path, config, "rank_pattern", module, config.get("r"))
    if declared != rank:
        raise BrokenAdapter(
            f"adapter {path}: {module} has rank {rank} but {_CONFIG} says {declared!r}"
        )
    alpha = finite_float(
        _by_pattern(path, config, "alpha_pattern", module, config.get("lora_alpha"))
    )
    if alpha is None:
        raise BrokenAdapter(f"adapter {path}: lora_alpha must be a finite number")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def finite_float(value: object) -> float | None:
    """Return a number as a float, or `None` for anything that is no finite one."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def _by_pattern(
    path: Path, config: dict[str, Any], name: str, module: str, default: Any
) -> Any:
    """Return the value of the first pattern that fits the module, as peft does."""
    patterns = config.get(name) or {}
    if not isinstance(patterns, dict):
        raise BrokenAdapter(f"adapter {path}: {name} must be an object")
    for pattern, value in patterns.items():
        try:
            fits = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise BrokenAdapter(
                f"adapter {path}: {name} has the pattern {pattern!r:.80}, which is no "
                f"regular expression ({error})"
            ) from error
        if fits:
            return value
    return default


def _digest(pairs: Mapping[str, LoraPair]) -> bytes:
    digest = hashlib.sha256(b"stemkv-adapter\0" + struct.pack(">I", len(pairs)))
    for module, pair in pairs.items():
        name = module.encode()
        digest.update(struct.pack(">I", len(name)) + name)
        digest.update(tensor_digest("a", pair.a) + tensor_digest("b", pair.b))
        digest.update(struct.pack(">d", pair.scaling))
    return digest.digest()
