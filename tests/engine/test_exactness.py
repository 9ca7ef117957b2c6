"""KV and logits are a function of the token prefix alone, bit for bit.

The runner is driven by hand here, so that chunks, batch mates, blocks and copies are
worse than any scheduler would choose. The last section shows that these tests can
fail: each without one of the padding rules.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from stemkv.core.prefix.table import BlockCopy, BlockTable
from stemkv.engine import LoadedModel, linear, wrap_model
from stemkv.engine.numerics import EXACT, TOLERANT, Numerics
from stemkv.engine.probe import Probe, ProbeSequence
from stemkv.engine.selftest import check_exact
from stemkv.errors import NumericsError, UnsupportedModel
from tests.engine.models import (
    TINY,
    build_engine,
    build_runner,
    random_ids,
    randomise,
    tiny_once,
    tokens,
)

DTYPES = (torch.bfloat16, torch.float32)
EVERY_MODEL = pytest.mark.parametrize("name", sorted(TINY))
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@contextmanager
def threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_differing(left: torch.Tensor, right: torch.Tensor) -> int:
    """Elements whose bits differ; NaN equals itself, 0.0 does not equal -0.0."""
    width = {2: torch.int16, 4: torch.int32}[left.element_size()]
    return int((left.view(width) != right.view(width)).sum())


class Fuzz:
    """One sequence computed in one pass, and again in the worst way one can think of.

    In the second way it comes in ragged chunks and single steps, beside other
    sequences, in scattered blocks full of other people's numbers, and moves into a
    copy of its last block now and then.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        seed: int,
        *,
        numerics: Numerics = EXACT,
        num_tokens: int = 150,
        vocab_size: int = 300,
        max_threads: int = 1,
        num_rows: int = 4,
    ) -> None:
        self.draw = random.Random(seed)
        self.block_size = self.draw.choice((1, 3, 8, 16, 24, 64))
        self.per_sequence = -(-num_tokens // self.block_size)
        # A target that moves, the plain one, and batch mates.
        num_blocks = 7 * self.per_sequence
        self.runner = build_runner(
            loaded,
            num_blocks=num_blocks,
            block_size=self.block_size,
            numerics=numerics,
        )
        self._fill_with_noise(seed)
        self.free = list(range(num_blocks))
        self.draw.shuffle(self.free)
        self.probe = Probe(self.runner)
        self.num_tokens = num_tokens
        self.vocab_size = vocab_size
        self.max_threads = max_threads
        self.num_rows = num_rows  # of logits to compare
        self.ids = self._random_ids(num_tokens)

    def run(self) -> dict[str, int]:
        """Elements that differ, in KV and in all logits that both ways sampled."""
        ragged = self._sequence("ragged", self.ids)
        mates = [
            self._sequence(f"mate{i}", self._random_ids(self.num_tokens))
            for i in range(3)
        ]
        while ragged.num_remaining:
            if self.draw.random() < 0.1:
                self._move_last_block(ragged)
            work = [(ragged, self._num_next(ragged))]
            for mate in mates[: self.draw.randint(0, 3)]:
                if mate.num_remaining:
                    size = min(mate.num_remaining, self.draw.choice((1, 2, 5, 34)))
                    work.append((mate, size))
            self.draw.shuffle(work)
            with threads(self.draw.randint(1, self.max_threads)):
                self.probe.run(work)
        return self._differing(ragged)

    def decode_alone(self, num_prefilled: int) -> dict[str, int]:
        """The second way is a prefill and then one token at a time, with no mates."""
        num_decoded = self.num_tokens - num_prefilled
        return self.in_chunks((num_prefilled, *(1,) * num_decoded))

    def in_chunks(self, sizes: Sequence[int]) -> dict[str, int]:
        """The second way is these chunks, with no mates."""
        ragged = self._sequence("ragged", self.ids)
        for size in sizes:
            self.probe.run([(ragged, size)])
        return self._differing(ragged)

    def _differing(self, ragged: ProbeSequence) -> dict[str, int]:
        return {
            "KV": self._differing_kv(ragged),
            "logits": self._differing_logits(ragged),
        }

    def _num_next(self, sequence: ProbeSequence) -> int:
        size = self.draw.choice((1, 1, 2, 3, 4, 17, 34, self.draw.randint(1, 98)))
        return min(size, sequence.num_remaining)

    def _differing_kv(self, ragged: ProbeSequence) -> int:
        whole = self._sequence("whole", self.ids)
        self.probe.run([(whole, self.num_tokens)])
        return num_differing(self.probe.kv(whole), self.probe.kv(ragged))

    def _differing_logits(self, ragged: ProbeSequence) -> int:
        """Compare with one-pass prefills that end where the rows were sampled."""
        total = 0
        for position, row in self.draw.sample(
            sorted(ragged.logits.items()), min(self.num_rows, len(ragged.logits))
        ):
            prefix = self._sequence("prefix", self.ids[: position + 1])
            self.probe.run([(prefix, position + 1)])
            total += num_differing(row, prefix.logits[position])
            self.free.extend(prefix.table.ids())
        return total

    def _move_last_block(self, sequence: ProbeSequence) -> None:
        """Copy-on-write: what is in the last, partly full block goes elsewhere."""
        index, used = divmod(sequence.num_computed, self.block_size)
        if not used or not self.free:
            return
        source, target = sequence.table[index], self.free.pop()
        sequence.table.replace(index, array("i", [target]))
        copy = BlockCopy(source, target, used)
        mate = self._sequence("other", self._random_ids(5))
        self.probe.run([(mate, 5)], copies=[copy])
        self.free.extend(mate.table.ids())
        self.free.append(source)

    def _sequence(self, name: str, ids: list[int]) -> ProbeSequence:
        num_blocks = -(-len(ids) // self.block_size)
        blocks = [self.free.pop() for _ in range(num_blocks)]
        return ProbeSequence(name, tokens(ids), BlockTable(array("i", blocks)))

    def _random_ids(self, num_tokens: int) -> list[int]:
        return [self.draw.randrange(self.vocab_size) for _ in range(num_tokens)]

    def _fill_with_noise(self, seed: int) -> None:
        kv = self.runner.kv
        generator = torch.Generator().manual_seed(seed)
        for memory in (*kv.keys, *kv.values):
            own = memory[: kv.num_blocks]
            own.copy_(torch.randn(own.shape, generator=generator) * 100)


NOTHING = {"KV": 0, "logits": 0}


# Nothing differs


@EVERY_MODEL
@EVERY_DTYPE
def test_chunks_mates_blocks_and_copies_change_no_bit(
    name: str, dtype: torch.dtype
) -> None:
    loaded = tiny_once(name, dtype)
    for seed in range(2):
        assert Fuzz(loaded, seed).run() == NOTHING, f"{seed=}"


@pytest.mark.slow
@EVERY_MODEL
@EVERY_DTYPE
def test_two_hundred_seeds_of_each_dtype_change_no_bit(
    name: str, dtype: torch.dtype
) -> None:
    loaded = tiny_once(name, dtype)
    for seed in range(1000, 1050):  # of each model
        fuzz = Fuzz(loaded, seed, num_tokens=200, max_threads=1 + seed % 2)
        assert fuzz.run() == NOTHING, f"{seed=}"


@EVERY_DTYPE
def test_two_threads_change_no_bit(dtype: torch.dtype) -> None:
    loaded = tiny_once("llama-group3-tied", dtype)
    fuzz = Fuzz(loaded, 0, num_tokens=100, max_threads=2, num_rows=2)
    assert fuzz.run() == NOTHING


@EVERY_MODEL
@EVERY_DTYPE
def test_decoding_alone_writes_the_bits_of_a_prefill(
    name: str, dtype: torch.dtype
) -> None:
    fuzz = Fuzz(tiny_once(name, dtype), 1, num_tokens=90)
    assert fuzz.decode_alone(num_prefilled=50) == NOTHING


@EVERY_DTYPE
def test_a_wide_model_changes_no_bit(dtype: torch.dtype) -> None:
    """Sums of 1,536 products and more are where thin matrices take another path."""
    loaded = wide(dtype)
    assert Fuzz(loaded, 0).run() == NOTHING
    assert Fuzz(loaded, 1, num_tokens=140).decode_alone(num_prefilled=100) == NOTHING


@EVERY_DTYPE
def test_many_long_contexts_decoded_in_one_step_change_no_bit(
    dtype: torch.dtype,
) -> None:
    """More than are read at once: some go into one call, some into the next."""
    loaded = tiny_once("llama-group3-tied", dtype)
    num_sequences, num_tokens = 10, 980
    runner = build_runner(loaded, num_blocks=620 + 62)
    probe = Probe(runner)

    def sequence(name: str, seed: int, first_block: int) -> ProbeSequence:
        table = BlockTable(array("i", range(first_block, first_block + 62)))
        return ProbeSequence(name, tokens(random_ids(num_tokens, seed=seed)), table)

    decoded = [sequence(f"d{i}", i, 62 * i) for i in range(num_sequences)]
    for each in decoded:
        probe.run([(each, num_tokens - 1)])
    probe.run([(each, 1) for each in decoded])

    for seed in (0, 7, 8, 9):
        whole = sequence("whole", seed, 620)
        probe.run([(whole, num_tokens)])
        assert num_differing(probe.kv(whole), probe.kv(decoded[seed])) == 0
        row = decoded[seed].logits[num_tokens - 1]
        assert num_differing(row, whole.logits[num_tokens - 1]) == 0


@pytest.mark.model
def test_the_real_model_changes_no_bit(smol: LoadedModel) -> None:
    fuzz = Fuzz(smol, 5, num_tokens=80, vocab_size=smol.vocab_size, num_rows=1)
    assert fuzz.run() == NOTHING


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["smol", "smol32"])
def test_the_real_model_changes_no_bit_in_ten_seeds(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    loaded: LoadedModel = request.getfixturevalue(fixture)
    for seed in range(10):
        fuzz = Fuzz(
            loaded, seed, vocab_size=loaded.vocab_size, max_threads=1 + seed % 2
        )
        assert fuzz.run() == NOTHING, f"{seed=}"


# Shapes that need more care than the usual ones


@pytest.mark.parametrize("head_dim", [96, 128, 256])
@EVERY_DTYPE
def test_large_heads_change_no_bit(dtype: torch.dtype, head_dim: int) -> None:
    """The float32 kernel has another path for blocks of few rows of large heads."""
    loaded = llama(dtype, num_key_value_heads=2, head_dim=head_dim)
    build_engine(loaded, runs_self_test=True)
    assert Fuzz(loaded, 0).run() == NOTHING


@EVERY_DTYPE
def test_a_model_of_odd_width_changes_no_bit_or_is_refused(dtype: torch.dtype) -> None:
    """Activations treat the last few numbers of a tensor apart.

    Where the width is no multiple of 32, whose numbers those are depends on how many
    rows there are.
    """
    loaded = llama(dtype, intermediate_size=112)
    try:
        build_engine(loaded, runs_self_test=True)
    except NumericsError:
        return
    assert Fuzz(loaded, 0).run() == NOTHING


@EVERY_DTYPE
def test_three_threads_change_no_bit(dtype: torch.dtype) -> None:
    """Threads share a tensor out by its size, so by the number of rows.

    Where a thread's share ends inside a row, the numbers before that end are computed
    apart. A machine of four cores takes three threads unless told otherwise.
    """
    loaded = llama(dtype, intermediate_size=4864)
    build_engine(loaded, runs_self_test=True, num_threads=3)
    fuzz = Fuzz(loaded, 0, num_tokens=100)
    with threads(3):
        assert fuzz.in_chunks((14, 16, 19, 22, 23, 6)) == NOTHING


def experts() -> torch.nn.Module:
    """An expert sees as many rows as choose it, so one row now and then."""
    config = MixtralConfig(
        vocab_size=307,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        sliding_window=None,
    )
    return MixtralForCausalLM(config)


def gpt2() -> torch.nn.Module:
    """Its projections are no `nn.Linear`."""
    config = GPT2Config(
        vocab_size=307,
        n_embd=768,
        n_layer=2,
        n_head=12,
        n_positions=512,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


@pytest.mark.parametrize("make", [experts, gpt2])
@EVERY_DTYPE
def test_matrices_that_are_no_linears_change_no_bit_or_are_refused(
    dtype: torch.dtype, make: Callable[[], torch.nn.Module]
) -> None:
    """The self-test is a sample: it lets some through that differ later."""
    try:
        loaded = wrap_model(randomise(make()).to(dtype), name=make.__name__)
        build_engine(loaded, runs_self_test=True)
    except (NumericsError, UnsupportedModel):
        return
    fuzz = Fuzz(loaded, 1, num_tokens=90)
    assert fuzz.decode_alone(num_prefilled=50) == NOTHING
    assert Fuzz(loaded, 3, num_tokens=200).run() == NOTHING


# These tests can fail


@EVERY_MODEL
@EVERY_DTYPE
def test_without_padding_bits_differ(name: str, dtype: torch.dtype) -> None:
    loaded = tiny_once(name, dtype)
    differing = Fuzz(loaded, 0, numerics=TOLERANT, num_tokens=100, num_rows=2).run()
    assert differing["KV"] > 0
    assert differing["logits"] > 0


@EVERY_DTYPE
def test_without_the_fixed_context_length_bits_differ(dtype: torch.dtype) -> None:
    numerics = replace(EXACT, pads_context=False)
    loaded = tiny_once("llama-group3-tied", dtype)
    assert Fuzz(loaded, 0, numerics=numerics).run()["KV"] > 0


def test_without_padded_query_rows_bits_differ() -> None:
    numerics = replace(EXACT, row_multiple=1)
    fuzz = Fuzz(tiny_once("llama-group1", torch.float32), 0, numerics=numerics)
    assert fuzz.in_chunks((34, 33, 1, 2, 3, 35, 42)) != NOTHING


def test_without_padded_linears_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_min_stable_rows", lambda *_: 1)
    fuzz = Fuzz(wide(torch.float32), 1, num_tokens=140)
    assert fuzz.decode_alone(num_prefilled=100)["KV"] > 0


# The self-test at start


@EVERY_MODEL
@EVERY_DTYPE
def test_the_self_test_accepts_what_is_exact(name: str, dtype: torch.dtype) -> None:
    build_engine(tiny_once(name, dtype), runs_self_test=True)


@pytest.mark.parametrize(
    "rule", [{"pads_context": False}, {"row_multiple": 1}], ids=str
)
def test_the_self_test_refuses_numerics_without_a_rule(rule: dict[str, Any]) -> None:
    runner = build_runner(
        tiny_once("llama-group1", torch.float32),
        num_blocks=4,
        numerics=replace(EXACT, **rule),
    )
    with pytest.raises(NumericsError, match="numerics class 'exact': KV .* differ"):
        check_exact(runner, vocab_size=300)


def test_the_self_test_leaves_the_kv_memory_alone() -> None:
    engine = build_engine(runs_self_test=True)
    assert not any(memory.any() for memory in (*engine.kv.keys, *engine.kv.values))


def test_the_self_test_fits_into_a_short_context() -> None:
    config = OPTConfig(
        vocab_size=307,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=100,  # a table of so many rows
    )
    model = randomise(OPTForCausalLM(config)).to(torch.bfloat16)
    build_engine(wrap_model(model, name="short"), runs_self_test=True)


def test_the_class_tolerant_serves_without_a_self_test_of_bits() -> None:
    loaded = llama(torch.float32, num_key_value_heads=2, head_dim=128)
    engine = build_engine(loaded, numerics="tolerant", runs_self_test=True)
    (completion,) = engine.generate([tokens(random_ids(70))])
    assert len(completion.token_ids) == 64


def llama(dtype: torch.dtype, **shape: Any) -> LoadedModel:
    usual = dict(
        vocab_size=307,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    config = LlamaConfig(**{**usual, **shape}, eos_token_id=None)
    return wrap_model(randomise(LlamaForCausalLM(config)).to(dtype), name="llama")


def wide(dtype: torch.dtype) -> LoadedModel:
    return llama(dtype, intermediate_size=2048)
