"""Linear layers with weights packed once for the CPU's matrix kernels.

Owns the replacement of `nn.Linear`. The packed kernel is 1.4 to 2.3 times as fast at
one to eight rows, and its rows do not depend on how many others there are (from two
rows on), which plain float32 `nn.Linear` does not offer on every CPU.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["PackedLinear", "can_pack", "pack_linears"]


class PackedLinear(nn.Module):
    """`nn.Linear` for inference, weight in the matrix kernel's own layout.

    Takes over the bias; the original weight can be freed.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # Not registered: a packed tensor can be neither moved, cast nor saved.
        self._packed = [torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())]
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`."""
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed[0], self.bias, "none", [], ""
        )
        return y


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build has the packed kernel for `dtype` and it agrees with plain.

    The kernel is a private operator of torch, so it is tried rather than trusted.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 48, bias=True, dtype=dtype)
    x = torch.randn(5, 64, generator=generator).to(dtype)
    with torch.inference_mode():
        linear.weight.copy_(torch.randn(48, 64, generator=generator) / 8)
        try:
            packed = PackedLinear(linear)(x)
        except (RuntimeError, NotImplementedError, AttributeError):
            return False
        return torch.allclose(packed, linear(x), rtol=0.02, atol=0.02)


def pack_linears(model: nn.Module) -> int:
    """Replace every plain `nn.Linear` below `model` in place; return how many.

    Subclasses of `nn.Linear` are left alone: they compute something else. A weight
    tied to the embedding keeps its unpacked copy there.
    """
    num_packed = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))
                num_packed += 1
    return num_packed
