"""A model in memory, ready to serve, and the facts about it that others need.

Owns switching a transformers model to paged attention, and refusing the ones the engine
would compute wrongly, each with its reason. Files are `load`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from stemkv.engine.attention import ATTENTION_NAME, attend
from stemkv.engine.digest import (
    Digests,
    combine,
    digest_chat_template,
    digest_tensors,
    digest_tokenizer,
)
from stemkv.engine.kv import KvMemory
from stemkv.engine.linear import StableLinear
from stemkv.engine.numerics import EXACT
from stemkv.engine.own_call import check_own_call
from stemkv.engine.runner import ModelRunner
from stemkv.errors import StemKVError, UnsupportedModel

__all__ = [
    "LoadedModel",
    "check_supported",
    "describe",
    "digest_model",
    "digest_weights",
    "wrap_model",
]

_BLOCK_SIZE = 16  # for one short call; an engine has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to serve and the facts about it that others need."""

    name: str  # for people
    model: nn.Module
    tokenizer: Any  # a transformers tokenizer; None: token ids only
    config: Any  # the transformers config
    dtype: torch.dtype
    # Name in the model's state → leaf; an engine that replaces tensors in place writes
    # their new digests here, so that the model is never taken for what it was.
    tensor_digests: dict[str, bytes]
    tied_tensors: tuple[tuple[str, ...], ...]  # names that stand for one tensor
    buffers_digest: bytes  # of what is computed at load and not saved, as loaded
    tokenizer_digest: bytes | None  # None: no tokenizer, or nothing known of it
    chat_template_digest: bytes | None  # None: no template
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    embedding_size: int  # of an input vector; some models project it to another
    context_length: int  # tokens
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        # Each model its own: a copy that is updated must not rename the original.
        object.__setattr__(self, "tensor_digests", dict(self.tensor_digests))

    @property
    def weights_digest(self) -> bytes:
        """SHA-256 over the digests of all tensors, see `digest.combine`."""
        return combine(self.tensor_digests)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that a token takes, over all layers."""
        per_layer = 2 * self.num_kv_heads * self.head_dim
        return self.num_layers * per_layer * self.dtype.itemsize


def wrap_model(model: nn.Module, *, name: str, tokenizer: Any = None) -> LoadedModel:
    """Describe a transformers model that is in memory already.

    It must have been made with `attn_implementation=ATTENTION_NAME`, or be switchable
    to it. Raises `UnsupportedModel`.
    """
    return describe(
        model,
        name=name,
        label=name,
        tokenizer=tokenizer,
        # Nothing on disk says what is in memory by now: always hashed.
        digest=lambda: digest_model(model, tokenizer),
    )


def describe(
    model: nn.Module,
    *,
    name: str,
    label: str,
    tokenizer: Any,
    digest: Callable[[], Digests],
) -> LoadedModel:
    """Do what `wrap_model` says; `label` names the model in errors."""
    AttentionInterface.register(ATTENTION_NAME, attend)
    with _refusal_named(model, label):
        _prepare(model, label)
        facts = _facts_of(model)
        runner = ModelRunner(
            model,
            KvMemory(
                num_layers=facts["num_layers"],
                num_blocks=0,
                block_size=_BLOCK_SIZE,
                num_kv_heads=facts["num_kv_heads"],
                head_dim=facts["head_dim"],
                dtype=facts["dtype"],
            ),
            EXACT,
            num_query_heads=facts["num_query_heads"],
        )
        check_own_call(
            model,
            runner,
            vocab_size=facts["vocab_size"],
            context_length=facts["context_length"],
            name=label,
        )
        facts["eos_token_ids"] = _eos_token_ids(model, tokenizer)
        facts["tied_tensors"] = _tied_tensors(model)
    digests = digest()
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        tensor_digests=dict(digests.tensors),
        buffers_digest=_digest_buffers(model),
        tokenizer_digest=digests.tokenizer,
        chat_template_digest=digests.chat_template,
        **facts,
    )


def _prepare(model: Any, label: str) -> None:
    """Switch a model to paged attention; raises `UnsupportedModel` if it has none."""
    model.eval()
    check_supported(model.config, label)
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"model {label} ({type(model).__name__}) does not use transformers' "
            f"attention interface, so its KV cannot be paged"
        )
    if model.config._attn_implementation != ATTENTION_NAME:
        model.set_attn_implementation(ATTENTION_NAME)
    for module_name, module in model.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModel(
                f"model {label} has non-causal attention in {module_name}; only causal "
                f"decoders are supported"
            )


def _facts_of(model: Any) -> dict[str, Any]:
    """Return what a model's config and modules say, by the fields of `LoadedModel`."""
    text = model.config.get_text_config()
    num_query_heads = int(text.num_attention_heads)
    embedding = model.get_input_embeddings()
    return {
        "config": text,
        "dtype": next(model.parameters()).dtype,
        "num_layers": int(text.num_hidden_layers),
        "num_query_heads": num_query_heads,
        "num_kv_heads": int(
            getattr(text, "num_key_value_heads", None) or num_query_heads
        ),
        "head_dim": int(
            getattr(text, "head_dim", None) or text.hidden_size // num_query_heads
        ),
        "vocab_size": int(embedding.num_embeddings),
        "embedding_size": int(embedding.embedding_dim),
        "context_length": int(text.max_position_embeddings),
    }


@contextlib.contextmanager
def _refusal_named(model: object, label: str) -> Iterator[None]:
    """Turn whatever an odd model makes us stumble over into `UnsupportedModel`."""
    try:
        yield
    except (StemKVError, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"model {label} ({type(model).__name__}) is not like a decoder of "
            f"transformers ({type(error).__name__}: {error!s:.200})"
        ) from error


def check_supported(config: Any, name: str) -> None:
    """Raise `UnsupportedModel` for anything but plain causal full attention."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"model {name} is an encoder-decoder; give a decoder")
    text = config.get_text_config()
    layer_types = getattr(text, "layer_types", None)
    if layer_types is not None:
        other = sorted(set(layer_types) - {"full_attention"})
        if other:
            raise UnsupportedModel(
                f"model {name} has layers of type {', '.join(other)}; only "
                f"full_attention is supported yet"
            )
    elif getattr(text, "sliding_window", None) is not None and getattr(
        text, "use_sliding_window", True
    ):
        raise UnsupportedModel(
            f"model {name} has a sliding window of {text.sliding_window} tokens, "
            f"which is not supported yet; use a model with full attention"
        )
    scaling = getattr(text, "rope_parameters", None) or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("dynamic", "longrope"):
        raise UnsupportedModel(
            f"model {name} scales its positions by the longest sequence of a step "
            f"({kind}), so a prompt's KV would depend on its batch mates"
        )


def digest_weights(model: nn.Module) -> bytes:
    """Return the digest of every tensor's name, dtype, shape and bytes.

    Raises `UnsupportedModel` for a model whose linears an engine has replaced already:
    their weights are no longer in its state.
    """
    return combine(digest_tensors(_state_of(model)))


def digest_model(
    model: nn.Module,
    tokenizer: Any,
    progress: Callable[[str], None] = lambda stage: None,
) -> Digests:
    """Return the digests of a model and its tokenizer, computed from memory."""
    state = _state_of(model)
    progress("hashing weights")
    return Digests(
        tensors=digest_tensors(state),
        tokenizer=digest_tokenizer(tokenizer),
        chat_template=digest_chat_template(tokenizer),
    )


def _state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    if any(isinstance(module, StableLinear) for module in model.modules()):
        raise UnsupportedModel(
            "this model was given to an engine before; pass its LoadedModel instead of "
            "describing it again"
        )
    return model.state_dict()


def _digest_buffers(model: nn.Module) -> bytes:
    """Return SHA-256 over the buffers that are computed at load and not saved.

    Rotary frequencies, for one: no weights, but KV follows from them.
    """
    saved = model.state_dict().keys()
    buffers = {n: b for n, b in model.named_buffers() if n not in saved}
    return combine(digest_tensors(buffers))


def _tied_tensors(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names that stand for one and the same memory, where there are several.

    Linears that an engine has replaced are not among them any more.
    """
    names: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, tensor in model.state_dict().items():
        if tensor.numel():
            key = (tensor.data_ptr(), tuple(tensor.shape))
            names.setdefault(key, []).append(name)
    return tuple(tuple(each) for each in names.values() if len(each) > 1)


def _eos_token_ids(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    generation: Any = getattr(model, "generation_config", None)
    for owner in (generation, model.config, tokenizer):
        value: Any = getattr(owner, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        elif value is not None:
            ids.update(int(token) for token in value)
    return frozenset(ids)
