"""Linear layers whose rows do not depend on how many others there are.

Owns the replacement of `nn.Linear`: weights are packed once for the CPU's matrix
kernels where the build can (1.4 to 2.3 times as fast at one to eight rows),
projections that read the same input are packed as one matrix, and inputs of fewer rows
than the kernel needs for a row's bits to be independent are padded (rule R2 of
`numerics`). How many that is, is tried on the running build with each shape.

Also owns where a named weight has gone, so that it can be replaced in place, and the
seam at which adapters add their part to some rows of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

__all__ = [
    "AdapterRows",
    "LinearFacts",
    "LinearPlace",
    "StableLinear",
    "can_pack",
    "linear_places",
    "replace_linears",
]

# Projections that transformers' decoder layers apply to one and the same input.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

_CANDIDATES = (1, 2, 4, 8, 16)
_PROBED_ROWS = (*range(1, 10), 13, 15, 16, 17, 31, 32, 33, 48, 63, 64)
_NUM_PROBES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFacts:
    """What was found out about a model's linears on this build."""

    is_packed: bool
    is_stable: bool  # whether padding makes every linear's rows independent
    max_min_rows: int  # the most rows that any of them is padded to
    other_matrices: tuple[str, ...]  # modules that multiply by a matrix of their own


Delta = Callable[[torch.Tensor], torch.Tensor]


class AdapterRows:
    """Which rows of the running step belong to an adapter; one object per model.

    The runner sets `ranges` before a forward pass and clears it after: `(start, end,
    deltas)`, where `deltas` has what the adapter adds to the output of the linear with
    that index, and nothing for the others.
    """

    def __init__(self) -> None:
        self.ranges: tuple[tuple[int, int, Mapping[int, Delta]], ...] = ()


class StableLinear(nn.Module):
    """`nn.Linear` for inference, row by row.

    The rows of several linears with the same input may be joined. Weights and biases
    are copied; the originals can be freed. Input `[..., rows, in_features]`.
    `verdicts` keeps the smallest stable number of rows by shape between linears.
    `adapter_rows` and `index` tell which deltas of which rows are this linear's.
    """

    def __init__(
        self,
        linears: Iterable[nn.Linear],
        *,
        is_packed: bool,
        verdicts: dict[tuple[int, ...], int | None],
        adapter_rows: AdapterRows | None = None,
        index: int = 0,
    ) -> None:
        super().__init__()
        linears = tuple(linears)
        self.adapter_rows = AdapterRows() if adapter_rows is None else adapter_rows
        self.index = index
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.is_packed = is_packed
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        bias = torch.cat([b.detach() for b in biases]) if biases else None
        self._set(weight, bias)
        # Linears of one shape use one kernel, so one trial serves them all.
        shape = tuple(weight.shape)
        if shape not in verdicts:
            verdicts[shape] = _min_stable_rows(shape, weight.dtype, is_packed)
        found = verdicts[shape]
        self.is_stable = found is not None
        self.min_rows = 1 if found is None else found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x @ weight.T + bias`, and what adapters add to their rows."""
        rows = x.shape[-2]
        if rows >= self.min_rows:
            y = self._multiply(x)
        else:
            # R4: real copies, an expanded view would take another path.
            padded = torch.cat([x, *[x[..., :1, :]] * (self.min_rows - rows)], dim=-2)
            y = self._multiply(padded)[..., :rows, :]
        for start, end, deltas in self.adapter_rows.ranges:
            delta = deltas.get(self.index)
            if delta is not None:
                y[..., start:end, :] += delta(x[..., start:end, :])
        return y

    def weight(self) -> torch.Tensor:
        """Return a copy of the weight, `[out_features, in_features]`."""
        weight = self._weight
        return weight.to_dense() if self.is_packed else weight.detach().clone()

    def bias(self) -> torch.Tensor | None:
        """Return a copy of the bias, `[out_features]`, if there is one."""
        return None if self._bias is None else self._bias.detach().clone()

    def replace(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Take other values of the same shapes and dtypes; they are copied."""
        self._set(weight.detach().clone(), None if bias is None else bias.clone())

    def _set(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        # Not registered as parameters: a packed tensor can be neither moved, cast nor
        # saved. Packing it again gives the same bits.
        if self.is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        product = _packed_product if self.is_packed else _plain_product
        self._weight, self._bias = weight, bias
        self._multiply = product(weight, bias)


def _packed_product(
    packed: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    # The overload itself: finding it by arguments costs more than a small product.
    operator = torch.ops.mkldnn._linear_pointwise.default

    def multiply(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = operator(x, packed, bias, "none", [], "")
        return y

    return multiply


def _plain_product(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    def multiply(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight, bias)

    return multiply


class _Joint:
    """Several projections of one input, computed by the first that asks.

    The results wait for the others, which must ask with the very same tensor object;
    one that asks with another recomputes. Nothing is kept once all have been taken.
    """

    def __init__(self, linear: StableLinear, sizes: Iterable[int]) -> None:
        self.linear = linear
        ends = list(accumulate(sizes))
        self.ranges = list(zip([0, *ends[:-1]], ends, strict=True))
        self._input: torch.Tensor | None = None
        self._outputs: dict[int, torch.Tensor] = {}

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self._input is not x or index not in self._outputs:
            self._input = x
            y = self.linear.forward(x)  # without the hooks of a module call
            # Slices, as `split` costs more than the small products around it.
            self._outputs = {
                part: y[..., start:end] for part, (start, end) in enumerate(self.ranges)
            }
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return output


class _JointPart(nn.Module):
    """The place of one projection in its module."""

    def __init__(self, joint: _Joint, index: int) -> None:
        super().__init__()
        self.joint = joint
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.joint.take(self.index, x)


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """Where the weight of a former `nn.Linear` is: rows of a (joint) stable one."""

    linear: StableLinear
    start: int  # first output feature
    end: int


def linear_places(model: nn.Module) -> dict[str, LinearPlace]:
    """Return where each linear that `replace_linears` took over is now, by its name."""
    places = {}
    for name, module in model.named_modules():
        if isinstance(module, StableLinear):
            places[name] = LinearPlace(module, 0, module.out_features)
        elif isinstance(module, _JointPart):
            start, end = module.joint.ranges[module.index]
            places[name] = LinearPlace(module.joint.linear, start, end)
    return places


@torch.inference_mode()
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
    linear.weight.copy_(torch.randn(48, 64, generator=generator) / 8)
    try:
        packed = StableLinear([linear], is_packed=True, verdicts={})(x)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return torch.allclose(packed, linear(x), rtol=0.02, atol=0.02)


@torch.inference_mode()
def replace_linears(model: nn.Module) -> LinearFacts:
    """Replace every plain `nn.Linear` below `model` in place; say what was found.

    Subclasses of `nn.Linear` are left alone: they compute something else. A weight
    tied to the embedding keeps its unpacked copy there. A second call changes nothing.
    """
    is_packed = can_pack(next(model.parameters()).dtype)
    verdicts: dict[tuple[int, ...], int | None] = {}
    adapter_rows = AdapterRows()
    num_made = 0

    def stable(*linears: nn.Linear) -> StableLinear:
        nonlocal num_made
        num_made += 1
        return StableLinear(
            linears,
            is_packed=is_packed,
            verdicts=verdicts,
            adapter_rows=adapter_rows,
            index=num_made,
        )

    for module in list(model.modules()):
        for names in _SIBLINGS:
            linears = [getattr(module, name, None) for name in names]
            if _can_join(linears):
                plain = [each for each in linears if isinstance(each, nn.Linear)]
                joint = _Joint(stable(*plain), [each.out_features for each in plain])
                for index, name in enumerate(names):
                    setattr(module, name, _JointPart(joint, index))
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, stable(child))
    found = [
        module.joint.linear if isinstance(module, _JointPart) else module
        for module in model.modules()
        if isinstance(module, _JointPart | StableLinear)
    ]
    return LinearFacts(
        is_packed=all(linear.is_packed for linear in found),
        is_stable=all(linear.is_stable for linear in found),
        max_min_rows=max((linear.min_rows for linear in found), default=1),
        other_matrices=tuple(
            name
            for name, module in model.named_modules()
            if not isinstance(module, nn.Embedding)
            and any(
                p.dim() > 1 and not _is_scale(module, p)
                for p in module.parameters(recurse=False)
            )
        ),
    )


def _is_scale(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a module uses a parameter value by value, as norms of heads do.

    Tried with an input of the parameter's shape: a product with a matrix of unequal
    sides would give another shape, or none. Equal sides tell nothing, and count as a
    matrix.
    """
    if parameter.dim() != 2 or parameter.shape[0] == parameter.shape[1]:
        return False
    probe = torch.ones(2, 3, *parameter.shape, dtype=parameter.dtype)
    try:
        output = module(probe)
    except Exception:  # whatever else it wants, it is no norm
        return False
    return isinstance(output, torch.Tensor) and output.shape == probe.shape


def _can_join(linears: list[nn.Module | None]) -> bool:
    """Whether these exist, are plain, and agree in input, dtype and having a bias."""
    plain = [each for each in linears if type(each) is nn.Linear]
    return len(plain) == len(linears) and (
        len({(e.in_features, e.weight.dtype, e.bias is None) for e in plain}) == 1
    )


def _min_stable_rows(
    shape: tuple[int, ...], dtype: torch.dtype, is_packed: bool
) -> int | None:
    """Return from how many rows on a row's bits are the same among any others.

    `None` if 16 rows do not suffice. Tried with random weights: those that are served
    may be zero now and others later, and zeros show nothing. Sums that nearly cancel
    show the order of additions in their last bits, where ordinary ones are rounded
    alike in bfloat16; so each probe row is made orthogonal to one of the weight's rows.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    if is_packed:
        multiply = _packed_product(
            torch.ops.mkldnn._reorder_linear_weight(weight), None
        )
    else:
        multiply = _plain_product(weight, None)
    # Rows of the weight, evenly spread; the same one twice if there are fewer.
    picked = torch.arange(_NUM_PROBES) * len(weight) // _NUM_PROBES
    against = weight[picked].double()
    x = torch.randn(against.shape, generator=generator, dtype=torch.double)
    norms = (against * against).sum(1).clamp_min(1e-30)
    x -= against * ((x * against).sum(1) / norms)[:, None]
    x = x.to(weight.dtype)
    whole = multiply(x)
    unstable = 0
    for rows in _PROBED_ROWS:
        step = max(rows, _NUM_PROBES // 16) if rows > 1 else 1
        for start in range(0, _NUM_PROBES - rows + 1, step):
            part = multiply(x[start : start + rows].contiguous())
            if not torch.equal(part, whole[start : start + rows]):
                unstable = rows
                break
    return next((c for c in _CANDIDATES if c > unstable), None)
