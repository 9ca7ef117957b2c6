"""Fills the cache identity from the model as loaded.

Owns the mapping from engine facts to `ComputeIdentity` fields. Adapters, rollouts and
media do not exist in this engine yet, so their fields state exactly that.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import transformers

from stemkv.core.identity import ComputeIdentity
from stemkv.engine.load import LoadedModel
from stemkv.engine.numerics import Numerics

__all__ = ["identify"]


def identify(
    loaded: LoadedModel, numerics: Numerics, *, block_size: int, is_packed: bool
) -> ComputeIdentity:
    """Return the identity under which this engine computes KV."""
    config = loaded.config
    return ComputeIdentity(
        model_architecture=type(loaded.model).__name__,
        weights_digest=loaded.weights_digest,
        weights_generation=0,
        adapter_digest=None,
        adapter_scale=None,
        adapter_generation=None,
        position_scheme=_position_scheme(config, loaded.head_dim),
        start_position=0,
        mask_rule="causal",
        attention_window=None,
        kv_dtype=str(loaded.dtype).removeprefix("torch."),
        kv_scales_digest=None,
        kv_layout="block,slot,head,dim",
        block_size=block_size,
        parallel_layout="single",
        # Keys are made from final token ids: nothing above them can matter.
        tokenizer_digest=None,
        chat_template_digest=None,
        tool_schema_version=None,
        media_preprocessing_version=None,
        numerics_class=numerics.name,
        numerics_tile=numerics.tile,
        engine_build=_build(is_packed),
    )


def _position_scheme(config: Any, head_dim: int) -> str:
    """Return every rotary parameter of the config, as canonical JSON."""
    facts = {
        name: value
        for name, value in config.to_dict().items()
        if "rope" in name or "rotary" in name
    }
    facts["head_dim"] = head_dim
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)


def _build(is_packed: bool) -> str:
    """Name the kernels that fix the rounding."""
    return ";".join(
        (
            f"torch={torch.__version__}",
            f"transformers={transformers.__version__}",
            f"cpu={torch.backends.cpu.get_cpu_capability()}",
            f"linear={'packed' if is_packed else 'plain'}",
            "attention=sdpa-rows",
        )
    )
