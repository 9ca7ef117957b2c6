"""Branches of one shared prefix: who holds which blocks, and that none is written to.

Owns the branching and the checksums over KV bytes before and after. Samples of one
request part inside a block; other requests part from the cached prefix at a block's
end and inside one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from stemkv.audit.exact.bits import Tally, checksum, num_differing
from stemkv.audit.exact.hits import Lab
from stemkv.audit.exact.witness import Ask, Seen, compare
from stemkv.core.prefix.table import BlockCopy
from stemkv.engine.kv import KvMemory

__all__ = ["Branch", "Branching", "branch_out"]

_NUM_SAMPLES = 3
_NUM_NEW = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One continuation and its blocks when it ended."""

    name: str
    num_tokens: int  # with KV
    shared_blocks: tuple[int, ...]  # held by others as well
    own_blocks: tuple[int, ...]
    copies: tuple[BlockCopy, ...]  # into its own blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """What came of all branches. Counts are exact."""

    branches: Sequence[Branch]
    before: Mapping[int, str]  # shared block → SHA-256 of its KV
    after: Mapping[int, str]
    num_blocks_owned_twice: int  # by two branches that ran at the same time
    num_prompt_values_changed: int  # between the first logits and the last
    tally: Tally  # against cold runs
    altered: int  # the control: a shared block in which one value was overwritten
    seen_after_altering: frozenset[int]  # blocks whose checksum changed then

    @property
    def changed_blocks(self) -> tuple[int, ...]:
        """Shared blocks whose bytes are not what they were."""
        return tuple(b for b in self.before if self.before[b] != self.after[b])

    @property
    def num_copies(self) -> int:
        """Copies that were made, each into a block of one branch."""
        return sum(len(branch.copies) for branch in self.branches)


def branch_out(lab: Lab) -> Branching | str:
    """Extend one cached prefix in six ways at once and look at all blocks.

    Returns why not, where the engine keeps no prefix.
    """
    witness = lab.witness(num_blocks=32)
    kv = witness.engine.kv
    size = lab.block
    stem = lab.ask(0, 4 * size + size // 4)
    writer = witness.serve(stem)
    shared = writer.block_ids[: len(writer.kv[0, 0]) // size]
    nodes = witness.engine.cache.tree.nodes()
    if not set(shared) <= {block for node in nodes for block in node.block_ids}:
        # Blocks that went back are anybody's to write.
        return "the prefix is not in the cache once its request has ended"
    before = _checksums(kv, shared)
    # Still inside that block, so that only what the stem has left is shared by all.
    forking = stem.followed_by(lab.text(1, size // 4))
    witness.add(forking, num_new=_NUM_NEW, num_samples=_NUM_SAMPLES, temperature=1.0)
    names = [f"sample {k} of one request" for k in range(_NUM_SAMPLES)]
    for index, end in enumerate((2 * size, 2 * size + size // 2, 4 * size - 1)):
        witness.add(_parting(lab, stem, end, index), num_new=_NUM_NEW)
        names.append(f"request that parts at {end}")
    seen = witness.drain()
    after = _checksums(kv, shared)
    tally = Tally()
    for each in seen:
        tally.add(compare(each, lab.cold))
    # The control, on an engine that nobody uses any more.
    altered = shared[1]
    kv.keys[-1][altered, 0, 0, 0] += 1
    seen_after = {
        block
        for block, digest in _checksums(kv, shared).items()
        if digest != after[block]
    }
    return Branching(
        branches=_branches(names, seen, shared),
        before=before,
        after=after,
        num_blocks_owned_twice=_owned_twice(seen, shared),
        num_prompt_values_changed=sum(
            num_differing(each.first_kv, each.kv[:, :, : each.first_kv.shape[2]])
            for each in seen
        ),
        tally=tally,
        altered=altered,
        seen_after_altering=frozenset(seen_after),
    )


def _parting(lab: Lab, stem: Ask, end: int, index: int) -> Ask:
    """Return the stem's tokens up to `end`, then others."""
    (whole,) = stem.parts
    assert isinstance(whole, tuple), "the stem is text"
    first = (whole[end] + 1) % lab.loaded.vocab_size
    return Ask(parts=(whole[:end], (first, *lab.text(index + 2, lab.block // 2))))


def _branches(
    names: Sequence[str], seen: Sequence[Seen], shared: Sequence[int]
) -> list[Branch]:
    branches = []
    for name, each in zip(names, seen, strict=True):
        own = tuple(b for b in each.block_ids if b not in shared)
        branches.append(
            Branch(
                name=name,
                num_tokens=each.kv.shape[2],
                shared_blocks=tuple(b for b in each.block_ids if b in shared),
                own_blocks=own,
                copies=tuple(copy for copy in each.copies if copy.target in own),
            )
        )
    return branches


def _owned_twice(seen: Sequence[Seen], shared: Sequence[int]) -> int:
    owned = [set(each.block_ids).difference(shared) for each in seen]
    return sum(len(a & b) for a, b in combinations(owned, 2))


def _checksums(kv: KvMemory, block_ids: Sequence[int]) -> dict[int, str]:
    return {b: checksum(kv.read([b], kv.block_size)) for b in block_ids}
