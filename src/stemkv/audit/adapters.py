"""Made-up LoRA adapters for a model, in PEFT's format.

Owns their matrices and files. They are drawn from a seed and as strong as a given share
of the matrices they are added to, so that they change tokens and not only last bits on
any model; whoever uses them must call them made up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from stemkv.engine import LoadedModel
from stemkv.engine.linear import LinearPlace, linear_places

__all__ = ["ADAPTER_FILES", "adaptable_places", "make_up_adapter"]

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_RANK = 8
_STRENGTH = 0.1  # norm of what is added, by the norm of what it is added to


def adaptable_places(loaded: LoadedModel) -> dict[str, LinearPlace]:
    """Return the linears inside the layers: all but the output one.

    The model's linears must be replaced already (`prepare_model`).
    """
    model: Any = loaded.model  # transformers' class is not typed
    output = model.get_output_embeddings()
    places = linear_places(loaded.model)
    return {n: places[n] for n in sorted(places) if places[n].linear is not output}


def make_up_adapter(
    loaded: LoadedModel,
    folder: Path,
    *,
    seed: int,
    projections: Container[str] | None = None,
) -> bool:
    """Write an adapter; `False` if the model has no place for one.

    `projections` are the last parts of the names of linears to change; `None`, or
    names the model does not have: all, so that none can be left out unseen.
    """
    places = adaptable_places(loaded)
    if projections is not None:
        chosen = {
            n: p for n, p in places.items() if n.rpartition(".")[2] in projections
        }
        places = chosen or places
    if not places:
        return False
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, place in places.items():
        weight = place.linear.weight()[place.start : place.end].float()
        num_out, num_in = weight.shape
        a = torch.randn(_RANK, num_in, generator=generator) / math.sqrt(num_in)
        b = torch.randn(num_out, _RANK, generator=generator)
        b *= _STRENGTH * float(weight.norm()) / float((b @ a).norm())
        key = f"base_model.model.{name}.lora_"
        tensors |= {f"{key}A.weight": a.contiguous(), f"{key}B.weight": b.contiguous()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": sorted({name.rpartition(".")[2] for name in places}),
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_FILES[0]).write_text(json.dumps(config), encoding="utf-8")
    safetensors.torch.save_file(tensors, folder / ADAPTER_FILES[1])
    return True
