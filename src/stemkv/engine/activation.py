"""Activations whose elements do not depend on how many others there are.

Owns the slicing of element-wise activations. torch splits a large float32 tensor among
threads and computes the odd elements at the end of each part by another formula, so a
row's bits would depend on the number of rows and threads. Below the size at which it
splits there is one part only.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2CLS

__all__ = ["slice_activations"]

# torch's grain: tensors of at most this many elements are not divided among threads.
_MAX_ELEMENTS = 32768


class _SlicedActivation(nn.Module):
    """Applies an element-wise module to slices of whole rows."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() <= _MAX_ELEMENTS:
            result: torch.Tensor = self.activation(x)
            return result
        rows = max(1, _MAX_ELEMENTS // x.shape[-1])
        return torch.cat(
            [self.activation(part) for part in torch.split(x, rows, -2)], dim=-2
        )


def slice_activations(model: nn.Module) -> None:
    """Wrap every activation below `model` that transformers knows, in place.

    For float32 only: in bfloat16 they are computed in float32 and rounded, which
    hides the difference (all 65,536 inputs of SiLU were tried).
    """
    known = tuple(
        entry if isinstance(entry, type) else entry[0] for entry in ACT2CLS.values()
    )
    for module in list(model.modules()):
        if isinstance(module, _SlicedActivation):
            continue
        for name, child in list(module.named_children()):
            if isinstance(child, known):
                setattr(module, name, _SlicedActivation(child))
