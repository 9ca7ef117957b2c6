"""A second revision of the weights, and two adapters: the user's, or made up.

Owns tensors and files of what is compared. What is made up is seeded and says so; it is
written in the formats, and read by the readers, that real ones go through.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from stemkv.audit.identity.contexts import ADAPTERS
from stemkv.engine.adapter import AdapterWeights, read_adapter
from stemkv.engine.identity import identify
from stemkv.engine.linear import LinearPlace, StableLinear, linear_places
from stemkv.engine.load import LoadedModel, load_model
from stemkv.engine.lora import Lora
from stemkv.engine.numerics import EXACT, Numerics
from stemkv.errors import ConfigError

__all__ = [
    "Revision",
    "load_revision",
    "make_lora",
    "make_revision",
    "place_adapters",
]

_NOISE = 0.02  # of a made-up revision: relative to the spread of each matrix
_RANK = 8
_ADAPTER_STRENGTH = 0.1  # norm of what an adapter adds, relative to the matrix
_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """Tensors that make the second revision, and those that undo it."""

    label: str
    tensors: Mapping[str, torch.Tensor]  # by name in the model's state
    original: Mapping[str, torch.Tensor]


def _adaptable_places(loaded: LoadedModel) -> dict[str, LinearPlace]:
    """Return the linears inside the layers: all but the output one."""
    model: Any = loaded.model  # transformers' class is not typed
    output = model.get_output_embeddings()
    places = linear_places(loaded.model)
    return {n: place for n, place in places.items() if place.linear is not output}


def make_revision(loaded: LoadedModel, *, seed: int) -> Revision:
    """Return the model with a little noise on every linear inside its layers.

    The model's linears must be the engine's already (`prepare_model`).
    """
    generator = torch.Generator().manual_seed(seed)
    places = _adaptable_places(loaded)
    original = _weights(loaded, [f"{name}.weight" for name in places])
    tensors = {}
    for name in sorted(original):
        weight = original[name].float()
        spread = float(weight.norm()) / math.sqrt(weight.numel())
        noise = torch.randn(weight.shape, generator=generator) * (_NOISE * spread)
        tensors[name] = (weight + noise).to(loaded.dtype)
    return Revision(
        label=f"synthetic: {_NOISE:.0%} noise on {len(tensors)} matrices",
        tensors=tensors,
        original=original,
    )


def load_revision(loaded: LoadedModel, path: Path) -> Revision:
    """Read another revision of the same model from a folder or GGUF file.

    Raises `ConfigError` if it is not one: another config, other tensors, or no
    difference at all; and what `load_model` raises.
    """
    other = load_model(path, dtype=loaded.dtype)
    mine, theirs = (_architecture(each) for each in (loaded, other))
    if mine != theirs:
        names = _differing(loaded.config.to_dict(), other.config.to_dict())
        raise ConfigError(
            f"revision {path} is of another architecture than {loaded.name} (config "
            f"differs in {', '.join(names) or 'its class'}); give one that could "
            f"replace its weights in place"
        )
    mine_by_name, theirs_by_name = loaded.tensor_digests, other.tensor_digests
    if mine_by_name.keys() != theirs_by_name.keys():
        name = min(mine_by_name.keys() ^ theirs_by_name.keys())
        raise ConfigError(f"revision {path} has other tensors than the model: {name}")
    changed = [n for n in mine_by_name if mine_by_name[n] != theirs_by_name[n]]
    if not changed:
        raise ConfigError(f"revision {path} has the very weights of {loaded.name}")
    state = other.model.state_dict()
    return Revision(
        label=f"given: {len(changed)} of {len(mine_by_name)} tensors differ",
        tensors={name: state[name] for name in changed},
        original=_weights(loaded, changed),
    )


def place_adapters(
    given: tuple[Path, ...], loaded: LoadedModel, folder: Path, *, seed: int
) -> dict[str, AdapterWeights]:
    """Lay two adapters below `folder`, each under its name; return them as read.

    Without given ones, two are made up. Raises what `read_adapter` raises, and
    `ConfigError` if both are the same.
    """
    for index, name in enumerate(ADAPTERS):
        target = folder / name
        target.mkdir()
        if given:
            read_adapter(given[index])  # its errors name the user's path
            for file in _FILES:
                shutil.copyfile(given[index] / file, target / file)
        else:
            _write_adapter(target, loaded, seed=seed + index)
    read = {name: read_adapter(folder / name) for name in ADAPTERS}
    if len({weights.digest for weights in read.values()}) != len(read):
        raise ConfigError("the two adapters are the same; give two that differ")
    return read


def make_lora(
    weights: AdapterWeights, loaded: LoadedModel, *, scale: float, numerics: Numerics
) -> Lora:
    """Return an adapter ready to run, as an engine makes it."""
    return Lora(
        weights,
        _adaptable_places(loaded),
        scale=scale,
        dtype=loaded.dtype,
        verdicts={},
        needs_stable_rows=numerics.pads_context,
    )


def _write_adapter(folder: Path, loaded: LoadedModel, *, seed: int) -> None:
    """Write a LoRA adapter in PEFT's format, on queries and values as most are."""
    places = _adaptable_places(loaded)
    usual = [n for n in places if n.rpartition(".")[2] in ("q_proj", "v_proj")]
    targets = sorted(usual or places)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    weights = _weights(loaded, [f"{name}.weight" for name in targets])
    for name in targets:
        weight = weights[f"{name}.weight"].float()
        num_out, num_in = weight.shape
        a = torch.randn(_RANK, num_in, generator=generator) / math.sqrt(num_in)
        b = torch.randn(num_out, _RANK, generator=generator)
        b *= _ADAPTER_STRENGTH * float(weight.norm()) / float((b @ a).norm())
        key = f"base_model.model.{name}.lora_"
        tensors |= {f"{key}A.weight": a.contiguous(), f"{key}B.weight": b.contiguous()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": sorted({name.rpartition(".")[2] for name in targets}),
        "bias": "none",
    }
    (folder / _FILES[0]).write_text(json.dumps(config), encoding="utf-8")
    safetensors.torch.save_file(tensors, folder / _FILES[1])


def _weights(loaded: LoadedModel, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return copies of tensors of the model by their names in its state as loaded."""
    places = linear_places(loaded.model)
    others = {
        **dict(loaded.model.named_parameters(remove_duplicate=False)),
        **dict(loaded.model.named_buffers(remove_duplicate=False)),
    }
    unpacked: dict[int, torch.Tensor] = {}  # joint linears have several names
    found = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        place = places.get(module)
        if place is None:
            found[name] = others[name].detach().clone()
        elif kind == "weight":
            if place.linear.index not in unpacked:
                unpacked[place.linear.index] = place.linear.weight()
            whole = unpacked[place.linear.index]
            found[name] = whole[place.start : place.end].clone()
        else:
            found[name] = _bias(place.linear)[place.start : place.end]
    return found


def _bias(linear: StableLinear) -> torch.Tensor:
    bias = linear.bias()
    assert bias is not None, "a linear whose bias is in the state has one"
    return bias


def _architecture(loaded: LoadedModel) -> object:
    identity = identify(loaded, EXACT, block_size=1, is_packed=False)
    return identity.model_architecture


def _differing(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    names = sorted(mine.keys() | theirs.keys())
    return [
        name
        for name in names
        if not name.startswith("_") and mine.get(name) != theirs.get(name)
    ][:5]
