"""Adapters as `peft` saves them, and what `peft` itself computes with them.

The library writes the files and gives the reference, so a shared misreading of its
format cannot hide. Matrices are drawn large enough that an adapter which is missing,
scaled wrongly or added to the wrong rows changes tokens, not only last bits.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from tests.engine.models import build_model

__all__ = [
    "CONFIG",
    "Shelf",
    "WEIGHTS",
    "make_adapter",
    "peft_logits",
    "rewrite_config",
    "rewrite_weights",
    "row_difference",
    "save_adapter",
]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def make_adapter(
    folder: Path,
    model: str = "llama-group3-tied",
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    magnitude: float = 0.1,
    **config: Any,
) -> Path:
    """Save an adapter for one of the tiny models; its matrices are drawn from `seed`."""
    return save_adapter(
        folder, build_model(model, dtype), seed=seed, magnitude=magnitude, **config
    )


def save_adapter(
    folder: Path,
    model: nn.Module,
    *,
    seed: int = 0,
    magnitude: float = 0.1,
    **config: Any,
) -> Path:
    """Save an adapter for `model`, which peft changes: give it one of its own."""
    usual: dict[str, Any] = dict(r=4, lora_alpha=8, target_modules="all-linear")
    with warnings.catch_warnings():
        # Its advice on tied weights and the like; what it saves is what counts.
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(**usual | config))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(adapted.named_parameters()):
                if "lora_" in name and "magnitude" not in name:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(magnitude * noise)
        adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def peft_logits(
    model: nn.Module,
    folder: Path | None,
    ids: list[int],
    *,
    start_position: int = 0,
    scale: float = 1.0,
    embeddings: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return transformers' logits `[tokens, vocab]` with an adapter as peft loads it.

    `model` is changed by peft: give it one of its own. `scale` multiplies the
    adapter's scaling in peft's own layers.
    """
    if folder is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted: Any = PeftModel.from_pretrained(model, folder)
            for module in adapted.modules():
                if hasattr(module, "scale_layer") and scale != 1.0:
                    module.scale_layer(scale)
            model = adapted.eval()
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
    if embeddings is not None:
        inputs = {"inputs_embeds": embeddings[None]}
    num_tokens = len(ids) if embeddings is None else len(embeddings)
    positions = torch.arange(start_position, start_position + num_tokens)
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs, position_ids=positions[None]).logits
    return logits[0]


def row_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return `|actual - expected| / |expected|` of one row of logits."""
    wanted = expected.double()
    return float((actual.double() - wanted).norm() / wanted.norm())


def rewrite_config(folder: Path, **changes: Any) -> Path:
    """Change settings of a saved adapter."""
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def rewrite_weights(
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
) -> Path:
    """Change tensors of a saved adapter."""
    file = folder / WEIGHTS
    save_file(dict(change(load_file(file))), file)
    return folder


class Shelf:
    """Adapters by what they were made with; each is made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def adapter(
        self,
        model: str = "llama-group1",
        dtype: torch.dtype = torch.float32,
        **how: Any,
    ) -> Path:
        """Return a folder; nobody may change what is in it."""
        key = repr((model, dtype, sorted(how.items())))
        if key not in self._made:
            folder = self._folder / f"adapter{len(self._made)}"
            self._made[key] = make_adapter(folder, model, dtype, **how)
        return self._made[key]
