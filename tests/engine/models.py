"""Tiny models with random weights, and the engines over them.

Weights are large enough that logits differ visibly: a wrong row, position or block
changes the greedy token, not only a last bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stemkv.core import CostModel, RequestId, TokenIds
from stemkv.engine import Engine, LoadedModel, wrap_model
from stemkv.engine.kv import KvMemory
from stemkv.engine.numerics import EXACT, Numerics, fitted
from stemkv.engine.runner import ModelRunner
from tests.knobs import engine_config

__all__ = [
    "TINY",
    "ByteTokenizer",
    "VOCABULARY",
    "build_engine",
    "build_kv",
    "build_model",
    "build_runner",
    "kv_bytes",
    "random_ids",
    "randomise",
    "tiny",
    "tiny_once",
    "tokens",
]

VOCABULARY = 307  # a prime: nothing lines up with it by accident
_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    max_position_embeddings=1024,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


def _llama(**shape: Any) -> Callable[[], torch.nn.Module]:
    return lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, **shape))


# Name → maker. The names say what is special: query heads per KV head, mostly.
TINY: dict[str, Callable[[], torch.nn.Module]] = {
    "llama-group1": _llama(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    ),
    "llama-group3-tied": _llama(
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen2-group7-biased": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **_SHAPE,
            hidden_size=112,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=7,
            num_key_value_heads=1,
        )
    ),
    "qwen3-group2-normed": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **_SHAPE,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,  # not hidden_size / heads
        )
    ),
}


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Give every parameter a value drawn from `seed`, norms near one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.2 * noise)
            else:
                # Norm weights start at one, biases at zero.
                parameter.copy_(parameter.detach().mean().round() + 0.1 * noise)
    return model


def build_model(
    name: str, dtype: torch.dtype = torch.float32, *, seed: int = 0
) -> torch.nn.Module:
    """A model of its own: changing it or giving it to an engine concerns nobody."""
    return deepcopy(_built(name, dtype, seed))


@cache
def _built(name: str, dtype: torch.dtype, seed: int) -> torch.nn.Module:
    return randomise(TINY[name](), seed).to(dtype).eval()


def tiny(
    name: str = "llama-group3-tied",
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
) -> LoadedModel:
    return wrap_model(build_model(name, dtype, seed=seed), name=name)


@cache
def tiny_once(name: str, dtype: torch.dtype) -> LoadedModel:
    """One model for many engines: packing it is done once, and serving changes nothing."""
    return tiny(name, dtype)


def kv_bytes(loaded: LoadedModel, num_blocks: int, block_size: int) -> int:
    """Memory that holds exactly so many blocks."""
    per_token = 2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim
    return num_blocks * block_size * per_token * loaded.dtype.itemsize


def build_engine(
    loaded: LoadedModel | None = None,
    *,
    num_blocks: int = 64,
    block_size: int = 8,
    token_budget: int = 512,
    max_num_running: int = 8,
    on_logits: Callable[[RequestId, int, torch.Tensor], None] | None = None,
    costs: CostModel | None = None,
    **config: Any,
) -> Engine:
    """An engine on one thread with few blocks, not self-tested unless asked to be.

    Who names no tenant is its only one: most tests are not about whose a request is.
    """
    loaded = tiny() if loaded is None else loaded
    settings: dict[str, Any] = dict(
        kv_memory_bytes=kv_bytes(loaded, num_blocks, block_size),
        block_size=block_size,
        token_budget=token_budget,
        max_num_running=min(max_num_running, token_budget),
        num_threads=1,
        runs_self_test=False,
        single_tenant=True,
    )
    return Engine(
        loaded, engine_config(**settings | config), on_logits=on_logits, costs=costs
    )


def build_kv(loaded: LoadedModel, *, num_blocks: int, block_size: int = 16) -> KvMemory:
    return KvMemory(
        num_layers=loaded.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=loaded.num_kv_heads,
        head_dim=loaded.head_dim,
        dtype=loaded.dtype,
    )


def build_runner(
    loaded: LoadedModel,
    *,
    num_blocks: int,
    block_size: int = 16,
    numerics: Numerics = EXACT,
) -> ModelRunner:
    """A runner as an engine makes it, over KV memory of its own."""
    kv = build_kv(loaded, num_blocks=num_blocks, block_size=block_size)
    runner = _runner_of(loaded).over(kv)
    runner.numerics = fitted(
        numerics, is_float32=loaded.dtype == torch.float32, head_dim=loaded.head_dim
    )
    return runner


_RUNNERS: dict[int, tuple[LoadedModel, ModelRunner]] = {}


def _runner_of(loaded: LoadedModel) -> ModelRunner:
    """What an engine finds out about a model takes a while; do it once."""
    if id(loaded.model) not in _RUNNERS:
        runner = build_engine(loaded, num_blocks=1)._served.runner
        _RUNNERS[id(loaded.model)] = (loaded, runner)  # kept, so the id stays taken
    return _RUNNERS[id(loaded.model)][1]


def tokens(ids: Iterable[int]) -> TokenIds:
    return TokenIds.from_ids(list(ids))


def random_ids(num_tokens: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(num_tokens)]


class ByteTokenizer:
    """One token per byte, some for longer texts, and special ones that are not shown.

    What a real tokenizer can do to text, in a few lines: halves of characters, texts
    of several characters, tokens without any text.
    """

    FIRST_WORD = 256
    FIRST_SPECIAL = 300
    eos_token_id = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        parts = [
            self._bytes(token)
            for token in ids
            if not (skip_special_tokens and token >= self.FIRST_SPECIAL)
        ]
        return b"".join(parts).decode(errors="replace")

    def _bytes(self, token: int) -> bytes:
        if token < self.FIRST_WORD:
            return bytes([token])
        if token < self.FIRST_SPECIAL:
            return f" w{token - self.FIRST_WORD}é".encode()
        return f"<|{token}|>".encode()
