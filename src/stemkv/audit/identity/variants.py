"""A second revision of the weights, and two adapters: the user's, or made up.

Owns tensors and files of what is compared. What is made up is seeded and says so; it is
written in the formats, and read by the readers, that real ones go through.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stemkv.audit.adapters import ADAPTER_FILES, adaptable_places, make_up_adapter
from stemkv.audit.identity.contexts import ADAPTERS
from stemkv.engine.adapter import AdapterWeights, read_adapter
from stemkv.engine.identity import identify
from stemkv.engine.linear import StableLinear, linear_places
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
_PROJECTIONS = ("q_proj", "v_proj")  # as most adapters have


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """Tensors that make the second revision, and those that undo it."""

    label: str
    tensors: Mapping[str, torch.Tensor]  # by name in the model's state
    original: Mapping[str, torch.Tensor]


def make_revision(loaded: LoadedModel, *, seed: int) -> Revision:
    """Return the model with a little noise on every linear inside its layers.

    The model's linears must be the engine's already (`prepare_model`).
    """
    generator = torch.Generator().manual_seed(seed)
    places = adaptable_places(loaded)
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
            for file in ADAPTER_FILES:
                shutil.copyfile(given[index] / file, target / file)
        else:
            make_up_adapter(loaded, target, seed=seed + index, projections=_PROJECTIONS)
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
        adaptable_places(loaded),
        scale=scale,
        dtype=loaded.dtype,
        verdicts={},
        needs_stable_rows=numerics.pads_context,
    )


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
