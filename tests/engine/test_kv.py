"""KV memory: what is copied, cleared, shared, left behind and never touched."""

from __future__ import annotations

import pytest
import torch

from stemkv.core import FinishReason
from stemkv.core.prefix.table import BlockCopy
from stemkv.engine import Engine, SamplingParams
from stemkv.engine.kv import KvMemory
from tests.engine.models import (
    build_engine,
    build_kv,
    random_ids,
    tiny,
    tiny_once,
    tokens,
)
from tests.engine.serving import assert_idle

FOUR = SamplingParams(max_new_tokens=4)


def random_kv(num_blocks: int = 5, block_size: int = 6) -> KvMemory:
    kv = KvMemory(
        num_layers=2,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=3,
        head_dim=4,
        dtype=torch.float32,
    )
    generator = torch.Generator().manual_seed(0)
    for memory in (*kv.keys, *kv.values):
        own = memory[:num_blocks]
        own.copy_(torch.randn(own.shape, generator=generator))
    return kv


def everything(kv: KvMemory) -> torch.Tensor:
    """All blocks, the zero block included: `[layers, 2, blocks, block_size, …]`."""
    blocks = [
        kv.read([block_id], kv.block_size) for block_id in range(kv.num_blocks + 1)
    ]
    return torch.stack(blocks, dim=2)


# The memory by itself


def test_memory_starts_as_zeros_so_that_masked_slots_are_finite() -> None:
    kv = build_kv(tiny_once("llama-group1", torch.float32), num_blocks=3)
    assert not everything(kv).any()


@pytest.mark.parametrize("num_tokens", range(1, 7))
def test_a_copy_moves_exactly_the_leading_slots_and_clears_the_rest(
    num_tokens: int,
) -> None:
    kv = random_kv()
    before = everything(kv)

    kv.copy(BlockCopy(source=1, target=3, num_tokens=num_tokens))

    expected = before.clone()
    expected[:, :, 3, :num_tokens] = before[:, :, 1, :num_tokens]
    expected[:, :, 3, num_tokens:] = 0
    assert torch.equal(everything(kv), expected)


def test_a_copy_clears_even_nan() -> None:
    kv = random_kv()
    kv.keys[0][3] = torch.nan

    kv.copy(BlockCopy(source=1, target=3, num_tokens=2))

    assert everything(kv).isfinite().all()


def test_clearing_touches_the_named_blocks_only() -> None:
    kv = random_kv()
    expected = everything(kv)
    expected[:, :, [0, 4]] = 0

    kv.zero([0, 4])

    assert torch.equal(everything(kv), expected)


def test_clearing_nothing_is_nothing() -> None:
    kv = random_kv()
    before = everything(kv)
    kv.zero([])
    assert torch.equal(everything(kv), before)


def test_reading_gives_tokens_in_the_order_of_the_table_as_a_copy() -> None:
    kv = random_kv()

    read = kv.read([4, 0], 8)

    assert read.shape == (2, 2, 8, 3, 4)
    for layer in range(2):
        assert torch.equal(read[layer, 0, :6], kv.keys[layer][4])
        assert torch.equal(read[layer, 1, 6:], kv.values[layer][0, :2])
    kv.zero([4])
    assert read.any(dim=0).all()


def test_sizes_are_what_the_tensors_take() -> None:
    kv = random_kv()
    per_layer = 2 * 3 * 4 * 4  # keys and values, heads, head size, bytes
    assert kv.bytes_per_token == 2 * per_layer
    assert kv.bytes_per_block == 6 * kv.bytes_per_token
    assert everything(kv).nbytes == (kv.num_blocks + 1) * kv.bytes_per_block


def test_an_engine_takes_as_many_whole_blocks_as_its_memory_holds() -> None:
    loaded = tiny()
    one_block = build_engine(loaded, num_blocks=1).kv.bytes_per_block
    engine = build_engine(loaded, kv_memory_bytes=7 * one_block - 1)
    assert engine.kv.num_blocks == 6


# Shared blocks


def published(engine: Engine) -> dict[int, torch.Tensor]:
    """Content of every published block."""
    return {
        block_id: engine.kv.read([block_id], engine.kv.block_size)
        for node in engine.cache.tree.nodes()
        for block_id in node.block_ids
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_published_blocks_are_never_written_again(dtype: torch.dtype) -> None:
    engine = build_engine(tiny_once("llama-group3-tied", dtype), num_blocks=200)
    prompt = random_ids(61)
    engine.generate([tokens(prompt)], FOUR)
    before = published(engine)
    assert len(before) == 8

    # Whole hits, hits that end inside a block, longer, shorter, forked, twice at once.
    prompts = [prompt, prompt[:61], prompt[:29], prompt[:8], [*prompt, *range(40)]]
    forked = SamplingParams(max_new_tokens=20, num_samples=3, temperature=2.0)
    engine.generate([tokens(each) for each in prompts * 2], FOUR)
    engine.generate([tokens(each) for each in prompts], forked)

    after = published(engine)
    assert len(after) > len(before)
    for block_id, content in before.items():
        assert torch.equal(after[block_id], content), f"block {block_id}"
    assert_idle(engine)


# What others left behind


def poison(engine: Engine, value: float) -> None:
    """Fill every free block, as a broken request might have left it."""
    free = torch.tensor(engine.cache.pool.free_block_ids())
    for memory in (*engine.kv.keys, *engine.kv.values):
        memory[free] = value


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("block_size, token_budget", [(8, 512), (8, 9), (24, 20)])
def test_what_lies_in_free_blocks_changes_nothing(
    value: float, token_budget: int, block_size: int
) -> None:
    loaded = tiny_once("llama-group3-tied", torch.float32)
    prompt = tokens(random_ids(100))
    params = SamplingParams(max_new_tokens=6, num_samples=2, temperature=1.0)
    settings = dict(block_size=block_size, token_budget=token_budget)
    expected = build_engine(loaded, **settings).generate([prompt], params)
    engine = build_engine(loaded, **settings)
    poison(engine, value)

    actual = engine.generate([prompt], params)

    assert [c.finish_reason for c in actual] == [FinishReason.LENGTH] * 2
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]


def test_numbers_that_others_left_in_a_block_change_no_bit() -> None:
    loaded = tiny_once("llama-group1", torch.float32)
    rows: list[torch.Tensor] = []
    for value in (0.0, 1e4):
        engine = build_engine(
            loaded,
            token_budget=11,
            on_logits=lambda _, __, row: rows.append(row.clone()),
        )
        poison(engine, value)
        engine.generate([tokens(random_ids(75))], FOUR)
    assert len(rows) == 8
    for clean, stale in zip(rows[:4], rows[4:], strict=True):
        assert torch.equal(clean, stale)


def test_the_zero_block_stays_zero() -> None:
    engine = build_engine(num_blocks=9, block_size=8, token_budget=13)
    for seed in range(6):
        engine.generate([tokens(random_ids(50, seed=seed))], FOUR)
    assert engine.usage().num_evicted_blocks > 0
    assert_idle(engine)  # looks at the zero block, too
