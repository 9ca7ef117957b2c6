"""The numbers of a model that prices follow from, and how a config.json gives them.

Owns `ModelShape` and the reading of one from the `config.json` that comes with a model
on the Hugging Face hub. Knows no device and no price (see `pricing`), loads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stemkv.errors import ConfigError

__all__ = ["SHORT_WINDOW", "ModelShape", "read_config", "shape_of"]

# Layers that see at most so many tokens (gpt-oss: 128, gemma-3: 1,024) hardly add to
# the cost of a long context. Longer windows are counted as if they were none.
SHORT_WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What of a decoder's architecture decides its cost.

    Attention costs what all layers but the windowed ones cost. KV is kept in all
    layers: engines that give every layer the same blocks can't forget what has left a
    window, and prefixes are cached in such blocks.
    """

    name: str
    source: str  # where the numbers stand
    num_parameters: int
    num_active_parameters: int  # that one token is multiplied with
    num_layers: int
    num_windowed_layers: int = 0  # of these; windows of at most `SHORT_WINDOW`
    num_query_heads: int
    num_kv_heads: int
    # Mean of the widths of a key and of a value; they differ in DeepSeek's attention.
    head_dim: int
    # Width of what latent attention (MLA) caches per layer instead of keys and values:
    # the latent and the rotary part. `None`: keys and values.
    latent_dim: int | None = None
    num_expert_parameters: int = 0  # of all, those in routed experts
    num_experts: int = 1  # routed, per layer
    num_experts_per_token: int = 1
    weight_dtype: str = "bf16"  # as it was published

    @property
    def kv_width(self) -> int:
        """Cached numbers per token and layer."""
        return self.latent_dim or 2 * self.num_kv_heads * self.head_dim

    @property
    def flops_per_token(self) -> float:
        """Two per active parameter: one multiplication, one addition."""
        return 2.0 * self.num_active_parameters

    @property
    def flops_per_pair(self) -> float:
        """Operations of attention per query and key, in all layers without a window."""
        num_layers = self.num_layers - self.num_windowed_layers
        return 4.0 * num_layers * self.num_query_heads * self.head_dim

    @property
    def expert_share(self) -> float:
        """Share of the routed experts that one token goes through."""
        return self.num_experts_per_token / self.num_experts


def read_config(path: Path) -> ModelShape:
    """Return the shape that a `config.json`, or the folder it is in, describes.

    Raises `ConfigError` naming the file and the field that is missing or not
    understood.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"model: cannot read {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"model: {file} is no JSON object: {error}") from error
    try:
        return shape_of(config, name=_name(config, file))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def shape_of(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """Return the shape of a decoder with gated feed-forward layers.

    That is the Llama family and what came after it: with grouped-query or DeepSeek's
    latent attention, dense or with experts, in the fields' Hugging Face names. Biases
    and norms, less than a thousandth, are not counted. The input embedding is.
    """
    nested = config.get("text_config")  # of models that also take images
    if isinstance(nested, Mapping):
        config = nested
    hidden = _number(config, "hidden_size")
    num_layers = _number(config, "num_hidden_layers")
    num_heads = _number(config, "num_attention_heads")
    num_kv_heads = _number(config, "num_key_value_heads", default=num_heads)
    head_dim = _number(config, "head_dim", default=hidden // num_heads)
    vocabulary = _number(config, "vocab_size") * hidden
    num_windowed = _num_windowed_layers(config, num_layers)
    latent_dim = None
    if config.get("kv_lora_rank"):
        attention, head_dim, latent_dim = _latent_attention(config, hidden, num_heads)
    else:
        attention = 2 * hidden * head_dim * (num_heads + num_kv_heads)
    experts = _Experts.of(config)
    num_sparse = _num_sparse_layers(config, num_layers, experts)
    expert = 3 * hidden * experts.width
    num_expert_parameters = num_sparse * experts.count * expert
    num_parameters = (
        vocabulary * (1 if config.get("tie_word_embeddings") else 2)
        + num_layers * attention
        + num_sparse * (3 * hidden * experts.shared_width + hidden * experts.count)
        + num_expert_parameters
    )
    if num_sparse < num_layers:
        width = _number(config, "intermediate_size")
        num_parameters += (num_layers - num_sparse) * 3 * hidden * width
    idle = num_sparse * (experts.count - experts.per_token) * expert
    return ModelShape(
        name=name,
        source="its config.json",
        num_parameters=num_parameters,
        num_active_parameters=num_parameters - idle,
        num_layers=num_layers,
        num_windowed_layers=num_windowed,
        num_query_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        latent_dim=latent_dim,
        num_expert_parameters=num_expert_parameters,
        num_experts=max(1, experts.count),
        num_experts_per_token=max(1, experts.per_token),
        weight_dtype=_weight_dtype(config),
    )


def _name(config: Mapping[str, Any], file: Path) -> str:
    return str(config.get("_name_or_path") or file.resolve().parent.name)


def _number(
    config: Mapping[str, Any],
    *names: str,
    default: int | None = None,
    minimum: int = 1,
) -> int:
    """Return the first of the fields that is there."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigError(
                f"{name} must be a whole number of at least {minimum}, got {value!r}"
            )
        return value
    if default is None:
        raise ConfigError(
            f"{' or '.join(names)} is missing; only decoders whose config.json has "
            f"the fields of the Llama family are understood"
        )
    return default


def _latent_attention(
    config: Mapping[str, Any], hidden: int, num_heads: int
) -> tuple[int, int, int]:
    """Return parameters per layer, mean width of key and value, and cached width.

    The sizes of the matrices follow DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """
    latent = _number(config, "kv_lora_rank")
    rope = _number(config, "qk_rope_head_dim")
    nope = _number(config, "qk_nope_head_dim")
    value = _number(config, "v_head_dim")
    query = num_heads * (nope + rope)
    parameters = hidden * (latent + rope) + latent * num_heads * (nope + value)
    parameters += num_heads * value * hidden
    if config.get("q_lora_rank"):
        rank = _number(config, "q_lora_rank")
        parameters += rank * (hidden + query)
    else:
        parameters += hidden * query
    return parameters, (nope + rope + value) // 2, latent + rope


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """The sparse layers' experts; all 0 in a dense model."""

    count: int = 0
    per_token: int = 0
    width: int = 0
    shared_width: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> _Experts:
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        if not any(config.get(name) for name in names):
            return cls()
        count = _number(config, *names)
        per_token = _number(config, "num_experts_per_tok", "experts_per_token")
        if per_token > count:
            raise ConfigError(
                f"num_experts_per_tok is {per_token} of only {count} experts"
            )
        width = _number(config, "moe_intermediate_size", "intermediate_size")
        return cls(
            count=count,
            per_token=per_token,
            width=width,
            shared_width=_shared_width(config, width),
        )


def _shared_width(config: Mapping[str, Any], width: int) -> int:
    if config.get("n_shared_experts"):
        return width * _number(config, "n_shared_experts")
    if config.get("shared_expert_intermediate_size"):
        return _number(config, "shared_expert_intermediate_size")
    return 0


def _num_sparse_layers(
    config: Mapping[str, Any], num_layers: int, experts: _Experts
) -> int:
    if not experts.count:
        return 0
    dense = set(range(_number(config, "first_k_dense_replace", default=0, minimum=0)))
    dense |= {
        layer
        for layer in config.get("mlp_only_layers") or []
        if layer in range(num_layers)
    }
    step = _number(config, "decoder_sparse_step", "moe_layer_freq", default=1)
    dense |= {layer for layer in range(num_layers) if (layer + 1) % step}
    return num_layers - len(dense & set(range(num_layers)))


def _num_windowed_layers(config: Mapping[str, Any], num_layers: int) -> int:
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(f"layer_types must list {num_layers} layers, got {kinds!r}")
    strange = sorted(set(map(str, kinds)) - {"full_attention", "sliding_attention"})
    if strange:
        raise ConfigError(
            f"layer_types has {', '.join(strange)}; only attention over keys and "
            f"values can be priced per token"
        )
    window = _number(config, "sliding_window", default=SHORT_WINDOW + 1)
    return kinds.count("sliding_attention") if window <= SHORT_WINDOW else 0


def _weight_dtype(config: Mapping[str, Any]) -> str:
    method = (config.get("quantization_config") or {}).get("quant_method")
    return method if method in ("fp8", "mxfp4") else "bf16"
