"""Weights replaced in place, as reinforcement learning does between batches.

Owns one update: which tensors, checked against the model, and where they go. The
tensors are copied when the update is made and hashed from the copies, so what is named
by the new identity is what will be served, whatever the caller does meanwhile.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from stemkv.engine.digest import digest_tensors
from stemkv.engine.linear import LinearPlace, StableLinear
from stemkv.errors import ConfigError

__all__ = ["WeightUpdate"]


class WeightUpdate:
    """Some tensors of a model, ready to be written into it.

    `names` are all tensors of the model as it was loaded, `places` where its linears
    are now, `tied_tensors` which names stand for one tensor; it may be given under any
    of them. Raises `ConfigError`
    for a name, a shape or values that do not fit; nothing has changed then.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: Mapping[str, torch.Tensor],
        *,
        names: Mapping[str, bytes],
        places: Mapping[str, LinearPlace],
        tied_tensors: Iterable[tuple[str, ...]],
    ) -> None:
        if not isinstance(tensors, Mapping) or not tensors:
            raise ConfigError(
                "update_weights got no tensors: a mapping of at least one is needed"
            )
        self._places = places
        self._others = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        for name, tensor in tensors.items():
            _check_kind(name, tensor)
        tied = _with_tied(dict(tensors), tied_tensors)
        self._tensors = {
            name: self._checked(name, tensor, names) for name, tensor in tied.items()
        }
        self.digests = digest_tensors(self._tensors)  # by name

    @torch.no_grad()
    def apply(self) -> None:
        """Write the tensors into the model."""
        by_linear: dict[int, tuple[StableLinear, list[str]]] = {}
        for name, tensor in self._tensors.items():
            place = self._place(name)
            if place is None:
                self._others[name].copy_(tensor)
            else:
                # Parts of a joint linear are written together: it is packed once.
                _, parts = by_linear.setdefault(place.linear.index, (place.linear, []))
                parts.append(name)
        for linear, parts in by_linear.values():
            weight, bias = linear.weight(), linear.bias()
            for name in parts:
                place = self._place(name)
                assert place is not None, "grouped by its place just now"
                target = bias if name.endswith(".bias") else weight
                assert target is not None, "checked when the update was made"
                target[place.start : place.end] = self._tensors[name]
            linear.replace(weight, bias)

    def _checked(
        self, name: str, tensor: torch.Tensor, names: Mapping[str, bytes]
    ) -> torch.Tensor:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"the model has no tensor {name!r}{hint}")
        expected = self._shape(name)
        if tuple(tensor.shape) != expected:
            raise ConfigError(
                f"{name} has shape {list(expected)}, got {list(tensor.shape)}"
            )
        own = tensor.detach().to("cpu", self._dtype(name), copy=True).contiguous()
        if not bool(own.isfinite().all()):
            raise ConfigError(f"{name} has values that are not finite in {own.dtype}")
        return own

    def _place(self, name: str) -> LinearPlace | None:
        return self._places.get(name.rpartition(".")[0])

    def _shape(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        if place is None:
            return tuple(self._others[name].shape)
        width = place.end - place.start
        if name.endswith(".bias"):
            return (width,)
        return (width, place.linear.in_features)

    def _dtype(self, name: str) -> torch.dtype:
        place = self._place(name)
        return self._others[name].dtype if place is None else place.linear.dtype


def _check_kind(name: object, tensor: object) -> None:
    """Refuse what is no dense tensor of real numbers with values behind it."""
    if not isinstance(name, str):
        raise ConfigError(f"names of tensors must be text, got {type(name).__name__}")
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name!r} must be a tensor, got {type(tensor).__name__}")
    is_dense = tensor.layout == torch.strided and not tensor.is_meta
    if not is_dense or not tensor.is_floating_point():
        raise ConfigError(
            f"{name!r} must be a dense tensor of floating-point numbers, got "
            f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        )


def _with_tied(
    tensors: dict[str, torch.Tensor], tied_tensors: Iterable[tuple[str, ...]]
) -> dict[str, torch.Tensor]:
    """Give tied tensors the same new value under all their names."""
    for names in tied_tensors:
        given = [name for name in names if name in tensors]
        for name in given[1:]:
            if not torch.equal(tensors[given[0]], tensors[name]):
                raise ConfigError(
                    f"{given[0]} and {name} are one tensor, got two values"
                )
        if given:
            tensors.update(dict.fromkeys(names, tensors[given[0]]))
    return tensors
