"""One short call of a model: by itself, and through the paged path.

Owns the verdict whether the two agree. Whatever a model does with positions, masks or
scales that the engine does not know of shows here, before anybody is served: a decoder
that counts positions from 2, say, or from the start of every chunk.
"""

from __future__ import annotations

import math
from array import array
from typing import Any

import torch

from stemkv.core.prefix.table import BlockTable
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine.probe import Probe, ProbeSequence
from stemkv.engine.runner import ModelRunner
from stemkv.errors import StemKVError, UnsupportedModel

__all__ = ["check_own_call"]

_NUM_TOKENS = 12
_FIRST_CHUNK = 7  # so that the second one must know where it is
_START_POSITION = 3

# Relative difference of logits that counts as rounding when kernels differ, in epsilons
# of the dtype. It grows with depth: sound models came to 4 with 2 layers and 22 with 30,
# in bfloat16 (docs/lab/LOG.md). In float32 kernels differ by more than their epsilon
# says, and a wrong position by hundreds of times this.
_EPSILONS_PER_ROOT_LAYER = 8
_LEAST_TOLERANCE = 1e-3


@torch.inference_mode()
def check_own_call(
    model: Any, runner: ModelRunner, *, vocab_size: int, context_length: int, name: str
) -> None:
    """Raise `UnsupportedModel` if the model would be served wrongly, or not at all.

    `runner` may have any KV memory: it is not touched.
    """
    num_tokens = min(_NUM_TOKENS, context_length)
    ids = [(7919 * (i + 1)) % vocab_size for i in range(num_tokens)]
    rounding = tolerance(runner.kv.dtype, runner.kv.num_layers)
    try:
        paged = _paged_logits(runner, ids, 0)  # first: it knows what it cannot serve
        own = _own_logits(model, ids)
        from_0 = dict(enumerate(_own_logits(model, ids, start=0)))
        # The same kernels twice, so this tells positions apart in any dtype.
        _compare(own, from_0, 0, name, _LEAST_TOLERANCE)
        _compare(own, paged, 0, name, rounding)
        if num_tokens + _START_POSITION <= context_length:
            own = _own_logits(model, ids, start=_START_POSITION)
            paged = _paged_logits(runner, ids, _START_POSITION)
            _compare(own, paged, _START_POSITION, name, rounding)
    except (StemKVError, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"model {name} ({type(model).__name__}) cannot run a step "
            f"({type(error).__name__}: {error!s:.200})"
        ) from error


def _own_logits(
    model: Any, ids: list[int], *, start: int | None = None
) -> torch.Tensor:
    """Return what the model gives by itself, `[tokens, vocab_size]`.

    Without a start it numbers positions as it likes.
    """
    inputs = {"input_ids": torch.tensor([ids])}
    if start is not None:
        inputs["position_ids"] = torch.arange(start, start + len(ids))[None]
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(implementation)
    return logits


def _paged_logits(
    runner: ModelRunner, ids: list[int], start: int
) -> dict[int, torch.Tensor]:
    """Return what we get in two chunks, the second beside somebody else."""
    size = runner.kv.block_size
    num_blocks = -(-len(ids) // size)
    probe = Probe(runner.over(runner.kv.like(num_blocks + 1)))
    tokens = TokenIds.from_ids(ids)
    own = ProbeSequence(
        "own", tokens, BlockTable(array("i", range(num_blocks))), start_position=start
    )
    mate = ProbeSequence(
        "mate", TokenIds.from_ids(ids[:1]), BlockTable(array("i", [num_blocks]))
    )
    first = min(_FIRST_CHUNK, len(ids))
    probe.run([(own, first)])
    if own.num_remaining:
        probe.run([(mate, 1), (own, own.num_remaining)])
    return own.logits


def _compare(
    own: torch.Tensor,
    ours: dict[int, torch.Tensor],
    start: int,
    name: str,
    tolerance: float,
) -> None:
    for index, row in ours.items():
        wanted, got = own[index].double(), row.double()
        if not bool(wanted.isfinite().all()):
            continue  # so the model is: each of its requests will say so
        error = got - wanted
        # Of the differences between tokens, which are all that logits mean.
        size = (wanted - wanted.mean()).norm().clamp_min(1e-3 * float(wanted.norm()))
        difference = float(error.norm() / size.clamp_min(1e-30))
        if not difference <= tolerance:  # NaN neither
            raise UnsupportedModel(
                f"model {name} would be served wrongly: after {index + 1} tokens from "
                f"position {start} on, logits differ from its own call by up to "
                f"{float(error.abs().max()):.3g}, {difference:.2g} of their size, where "
                f"{tolerance:.2g} might be rounding; models that count positions in a "
                f"way of their own are not supported yet"
            )


def tolerance(dtype: torch.dtype, num_layers: int) -> float:
    """Return the relative difference up to which other kernels may have computed it."""
    epsilons = _EPSILONS_PER_ROOT_LAYER * math.sqrt(num_layers)
    return max(_LEAST_TOLERANCE, epsilons * torch.finfo(dtype).eps)
