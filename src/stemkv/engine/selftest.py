"""Start-up self-test: does this build keep the promised bits?

Owns the verdict on the running combination of model, dtype, kernels and CPU. Compares
one prefill in a single pass with the same tokens in ragged chunks, single steps and
with batch mates, in other blocks; every bit of KV and logits must agree.
"""

from __future__ import annotations

from array import array

import torch

from stemkv.core.prefix.table import BlockTable
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine.kv import KvMemory
from stemkv.engine.linear import LinearFacts
from stemkv.engine.load import LoadedModel
from stemkv.engine.probe import Probe, ProbeSequence
from stemkv.engine.runner import ModelRunner
from stemkv.errors import NumericsError

__all__ = ["check_exact", "check_layers", "check_numerics"]

_NUM_TOKENS = 150  # crosses two tiles of 64 and ends inside the third
_CHUNKS = (17, 1, 1, 1, 2, 1, 1, 32, 2, 1, 38, 1, 1, 3, 48)  # sum to _NUM_TOKENS


def check_numerics(
    loaded: LoadedModel,
    linears: LinearFacts,
    runner: ModelRunner,
    *,
    runs_self_test: bool,
) -> None:
    """Raise `NumericsError` unless build and model keep the runner's class.

    Without `runs_self_test` only what was found about the linears is judged.
    """
    if not runner.numerics.pads_context:
        return  # class `tolerant` promises no bits
    if not linears.is_stable:
        raise NumericsError(
            f"this build does not keep numerics class 'exact': in {loaded.dtype} a "
            f"row of a linear depends on how many others there are; use another "
            f"dtype, or numerics 'tolerant'"
        )
    if linears.other_matrices:
        raise NumericsError(
            f"numerics class 'exact' does not hold for {loaded.name}: "
            f"{linears.other_matrices[0]} multiplies by a matrix outside a linear "
            f"layer, where rows may depend on each other; use 'tolerant'"
        )
    if runs_self_test:
        check_exact(runner, loaded.vocab_size, loaded.context_length)


def check_layers(runner: ModelRunner, vocab_size: int) -> None:
    """Run one token; raises `UnsupportedModel` if a layer bypasses the paged KV."""
    probe, kv_runner = _fresh(runner, num_tokens=1)
    probe.run([(_sequence("layers", 1, vocab_size, 0, kv_runner.kv), 1)])


def check_exact(
    runner: ModelRunner, vocab_size: int, context_length: int = _NUM_TOKENS
) -> None:
    """Compare bits; raises `NumericsError` with the largest difference found.

    Uses 150 tokens, or `context_length` if the model has no room for so many.
    """
    num_tokens = min(_NUM_TOKENS, context_length)
    probe, kv_runner = _fresh(runner, num_tokens=num_tokens)
    kv = kv_runner.kv
    whole = _sequence("whole", num_tokens, vocab_size, 0, kv)
    ragged = _sequence("ragged", num_tokens, vocab_size, 1, kv)
    mate = _sequence("mate", num_tokens, vocab_size, 2, kv, seed=1)
    probe.run([(whole, num_tokens)])
    for index, planned in enumerate(_CHUNKS):
        chunk = min(planned, ragged.num_remaining)
        if chunk == 0:
            break
        work = [(ragged, chunk)]
        if index % 3 == 1 and mate.num_remaining >= 5:
            work.insert(0, (mate, 5))
        elif index % 3 == 2 and mate.num_remaining:
            work.append((mate, 1))
        probe.run(work)
    last = num_tokens - 1
    pairs = {
        "KV": (probe.kv(whole), probe.kv(ragged)),
        "logits": (whole.logits[last], ragged.logits[last]),
    }
    for what, (expected, actual) in pairs.items():
        if not torch.equal(expected, actual):
            worst = (expected.float() - actual.float()).abs().max().item()
            raise NumericsError(
                f"this build does not keep numerics class 'exact': {what} of one "
                f"prefill and of the same tokens in chunks differ by up to {worst:.3g} "
                f"({kv.dtype}, {torch.get_num_threads()} threads); use another dtype, "
                f"or numerics 'tolerant', where a hit may change the last bits"
            )


def _fresh(runner: ModelRunner, *, num_tokens: int) -> tuple[Probe, ModelRunner]:
    """Return a probe over KV memory of its own: the engine's stays untouched."""
    kv = runner.kv
    own_runner = runner.over(kv.like(3 * (-(-num_tokens // kv.block_size) + 1)))
    return Probe(own_runner), own_runner


def _sequence(
    name: str, num_tokens: int, vocab_size: int, lane: int, kv: KvMemory, seed: int = 0
) -> ProbeSequence:
    """Return pseudo-random tokens with blocks of their own: every third, from `lane`."""
    ids = [(7919 * (i + 1) + 104729 * seed) % vocab_size for i in range(num_tokens)]
    blocks = array("i", range(lane, kv.num_blocks, 3))
    return ProbeSequence(name, TokenIds.from_ids(ids), BlockTable(blocks))
