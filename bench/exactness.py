"""Does a hit return exactly the bits of a fresh prefill? Tried with random schedules.

`python -m bench.exactness --seeds 200 [--json FILE] [--check]`

Each seed takes random tokens and computes them twice on the embedded model: once in
one pass alone, once in random chunks of 1 to 98 tokens and single-token steps, with
0 to 3 batch mates, in scattered blocks of another size, through a fork with
copy-on-write, with one or two threads. Every bit of KV and of the last logits is
compared. Seeds alternate between bfloat16 and float32.
"""

from __future__ import annotations

import random
import sys
from array import array
from dataclasses import dataclass

import torch
from rich.progress import Progress

from bench.report import Bar, finish, parser
from stemkv.core.prefix.table import BlockCopy, BlockTable
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine import LoadedModel, load_model
from stemkv.engine.kv import KvMemory
from stemkv.engine.numerics import EXACT, Numerics
from stemkv.engine.probe import Probe, ProbeSequence
from stemkv.engine.runner import ModelRunner, prepare_model

__all__ = ["SeedResult", "load_for_seeds", "run_seed"]

_NUM_BLOCKS = 160
_MAX_CHUNK = 98


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    """What one seed compared and found."""

    seed: int
    num_bits: int
    num_differing_bits: int
    num_steps: int
    has_fork: bool


def load_for_seeds(dtype: torch.dtype) -> LoadedModel:
    """Load the embedded model with its modules replaced, as the engine does."""
    loaded = load_model(dtype=dtype)
    prepare_model(loaded.model, EXACT)
    return loaded


@torch.inference_mode()
def run_seed(loaded: LoadedModel, seed: int, numerics: Numerics = EXACT) -> SeedResult:
    """Compute one random sequence in both ways and count the bits that differ."""
    rng = random.Random(seed)
    ids = [rng.randrange(loaded.vocab_size) for _ in range(rng.randint(90, 200))]
    tokens = TokenIds.from_ids(ids)
    torch.set_num_threads(1)
    whole_probe = _probe(loaded, 16, numerics)
    whole = ProbeSequence("whole", tokens, BlockTable(array("i", range(_NUM_BLOCKS))))
    whole_probe.run([(whole, len(tokens))])
    torch.set_num_threads(rng.choice((1, 2)))
    lane = _Lane(loaded, rng, tokens, numerics)
    ragged = lane.run()
    torch.set_num_threads(1)
    last = len(tokens) - 1
    pairs = (
        (whole_probe.kv(whole), lane.probe.kv(ragged)),
        (whole.logits[last], ragged.logits[last]),
    )
    return SeedResult(
        seed=seed,
        num_bits=sum(8 * a.numel() * a.element_size() for a, _ in pairs),
        num_differing_bits=sum(_differing_bits(a, b) for a, b in pairs),
        num_steps=lane.num_steps,
        has_fork=lane.fork_at is not None,
    )


class _Lane:
    """The ragged way: random chunks, mates, blocks and a fork."""

    def __init__(
        self,
        loaded: LoadedModel,
        rng: random.Random,
        tokens: TokenIds,
        numerics: Numerics,
    ) -> None:
        self._rng = rng
        self._loaded = loaded
        self._block_size = rng.choice((8, 16, 24))
        self.probe = _probe(loaded, self._block_size, numerics)
        self._free = list(range(_NUM_BLOCKS))
        rng.shuffle(self._free)
        self.num_steps = 0
        self.fork_at = rng.randrange(1, len(tokens)) if rng.random() < 0.6 else None
        self._main = self._sequence("main", tokens)
        self._mates = [self._mate(i) for i in range(rng.randint(0, 3))]

    def run(self) -> ProbeSequence:
        """Compute all tokens; return the sequence that holds them in the end."""
        while self._main.num_remaining:
            copies: list[BlockCopy] = []
            if self.fork_at is not None and self._main.num_computed >= self.fork_at:
                copies = self._fork()
                self.fork_at = -1  # once; not None, so that it is reported
            work = [(self._main, self._chunk(self._main))]
            for mate in self._mates:
                if mate.num_remaining and self._rng.random() < 0.7:
                    work.append((mate, min(self._chunk(mate), 34)))
            self._rng.shuffle(work)
            self.probe.run(work, copies)
            self.num_steps += 1
            if self.fork_at == -1:
                self.fork_at = 1 << 30
        return self._main

    def _fork(self) -> list[BlockCopy]:
        """Continue in a copy; the original goes on with other tokens as a mate."""
        old = self._main
        done = old.num_computed
        num_shared, offset = divmod(done, self._block_size)
        num_total = -(-len(old.tokens) // self._block_size)
        shared = old.table.ids(0, num_shared)
        own = array("i", [self._free.pop() for _ in range(num_total - num_shared)])
        child = ProbeSequence("child", old.tokens, BlockTable(shared + own))
        child.num_computed = done
        copies = []
        if offset:
            copies.append(BlockCopy(old.table[num_shared], own[0], offset))
        # The original overwrites the slots behind the fork with other tokens' KV.
        ids = list(old.tokens)
        vocab = self._loaded.vocab_size
        ids[done:] = [self._rng.randrange(vocab) for _ in ids[done:]]
        other = ProbeSequence("other", TokenIds.from_ids(ids), old.table)
        other.num_computed = done
        self._mates.append(other)
        self._main = child
        return copies

    def _chunk(self, sequence: ProbeSequence) -> int:
        if self._rng.random() < 0.35:
            return 1
        return min(sequence.num_remaining, self._rng.randint(1, _MAX_CHUNK))

    def _mate(self, index: int) -> ProbeSequence:
        vocab = self._loaded.vocab_size
        ids = [self._rng.randrange(vocab) for _ in range(self._rng.randint(5, 120))]
        return self._sequence(f"mate-{index}", TokenIds.from_ids(ids))

    def _sequence(self, name: str, tokens: TokenIds) -> ProbeSequence:
        num_blocks = -(-len(tokens) // self._block_size)
        blocks = array("i", [self._free.pop() for _ in range(num_blocks)])
        return ProbeSequence(name, tokens, BlockTable(blocks))


def _probe(loaded: LoadedModel, block_size: int, numerics: Numerics) -> Probe:
    kv = KvMemory(
        num_layers=loaded.num_layers,
        num_blocks=_NUM_BLOCKS,
        block_size=block_size,
        num_kv_heads=loaded.num_kv_heads,
        head_dim=loaded.head_dim,
        dtype=loaded.dtype,
    )
    return Probe(
        ModelRunner(loaded.model, kv, numerics, num_query_heads=loaded.num_query_heads)
    )


def _differing_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    left = a.contiguous().view(torch.uint8)
    right = b.contiguous().view(torch.uint8)
    unequal = left != right
    mixed = left[unequal] ^ right[unequal]
    return sum(int(byte).bit_count() for byte in mixed.tolist())


def main() -> int:
    """Run all seeds, print what was found; the exit code is for `--check`."""
    arguments = parser("Bits of reused against freshly computed KV and logits.")
    arguments.add_argument("--seeds", type=int, default=200, metavar="N")
    options = arguments.parse_args()
    num_seeds = min(options.seeds, 6) if options.quick else options.seeds
    results: list[SeedResult] = []
    with Progress() as progress:
        task = progress.add_task("seeds", total=num_seeds)
        for parity, dtype in enumerate((torch.bfloat16, torch.float32)):
            loaded = load_for_seeds(dtype)
            for seed in range(parity, num_seeds, 2):
                results.append(run_seed(loaded, seed))
                progress.advance(task)
    bad = sorted(r.seed for r in results if r.num_differing_bits)
    bars = [
        Bar(
            name="differing bits in KV and logits",
            measured=sum(r.num_differing_bits for r in results),
            unit="bits",
            limit=0,
            basis="exact",
        ),
        _count("seeds with a difference", len(bad), "seeds"),
        _count("seeds", len(results), "seeds"),
        _count("seeds with a fork", sum(r.has_fork for r in results), "seeds"),
        _count("bits compared", sum(r.num_bits for r in results), "bits"),
        _count("steps", sum(r.num_steps for r in results), "steps"),
    ]
    facts = {"torch": torch.__version__, "dtypes": "bfloat16 and float32 in turn"}
    if bad:
        facts["seeds with a difference"] = ", ".join(map(str, bad))
    return finish("bench.exactness", bars, options, facts=facts)


def _count(name: str, value: int, unit: str) -> Bar:
    return Bar(name=name, measured=value, unit=unit, basis="exact")


if __name__ == "__main__":
    sys.exit(main())
