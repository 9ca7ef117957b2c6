"""Fills the cache identity from the model as loaded.

Owns the mapping from engine facts to `ComputeIdentity` fields. What adapters, start
positions and rollouts change is `Identities`' matter; keys are made from final token
ids, so tool schemas and media preprocessing cannot matter.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import transformers

from stemkv.core.prefix.identity import ComputeIdentity
from stemkv.engine.load import LoadedModel
from stemkv.engine.numerics import Numerics

__all__ = ["identify"]

# Config values that cannot change KV: names, versions, generation and training.
_INCONSEQUENTIAL = frozenset(
    {
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def identify(
    loaded: LoadedModel, numerics: Numerics, *, block_size: int, is_packed: bool
) -> ComputeIdentity:
    """Return the identity under which this engine computes KV."""
    config = loaded.config
    return ComputeIdentity(
        model_architecture=_architecture(loaded),
        weights_digest=loaded.weights_digest,
        weights_generation=0,
        adapter_digest=None,
        adapter_scale=None,
        adapter_generation=None,
        position_scheme=_position_scheme(config, loaded),
        start_position=0,
        mask_rule="causal",
        attention_window=None,
        kv_dtype=str(loaded.dtype).removeprefix("torch."),
        kv_scales_digest=None,
        kv_layout="block,slot,head,dim",
        block_size=block_size,
        parallel_layout="single",
        # Keys are made from final token ids, so nothing above them can change KV. These
        # two are a belt beside the braces: what they cannot say ("no tokenizer", "one
        # of an unknown kind") is `None` and not unknown.
        tokenizer_digest=loaded.tokenizer_digest,
        chat_template_digest=loaded.chat_template_digest,
        tool_schema_version=None,
        media_preprocessing_version=None,
        numerics_class=numerics.name,
        numerics_tile=numerics.tile,
        engine_build=_build(is_packed),
    )


def _architecture(loaded: LoadedModel) -> str:
    """Return the class and a digest of its config: widths, activation, epsilons, all.

    A value that changes nothing costs hits at worst, one left out costs correctness;
    so only what is known to be of no consequence is left out.
    """
    facts = {
        name: value
        for name, value in loaded.config.to_dict().items()
        if name not in _INCONSEQUENTIAL and not name.startswith("_")
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{type(loaded.model).__name__}:{digest}"


def _position_scheme(config: Any, loaded: LoadedModel) -> str:
    """Return every rotary parameter of the config, as canonical JSON.

    And a digest of the frequencies as they are in memory: their dtype, and whoever
    changed them, is in no config.
    """
    facts = {
        name: value
        for name, value in config.to_dict().items()
        if "rope" in name or "rotary" in name
    }
    facts["head_dim"] = loaded.head_dim
    facts["buffers"] = loaded.buffers_digest.hex()
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)


def _build(is_packed: bool) -> str:
    """Name the kernels that fix the rounding."""
    return ";".join(
        (
            f"torch={torch.__version__}",
            f"transformers={transformers.__version__}",
            f"cpu={torch.backends.cpu.get_cpu_capability()}",
            f"linear={'packed' if is_packed else 'plain'}",
            f"matmul={torch.get_float32_matmul_precision()}",
            "attention=sdpa-rows",
        )
    )
