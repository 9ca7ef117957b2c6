"""Block by block: what a node is must not show in which blocks go.

A real cache runs beside a plain dict of its blocks, where every block stands alone. The
policy sees nodes that are cut, joined, lengthened and trimmed; the dict sees none, and
the blocks that go are the same ones.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.check import check_cache
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.table import Lease
from stemkv.core.prefix.tokens import TOKEN_BYTES
from tests.core.builders import ALICE, NAMESPACE, build_cache, resident, tokens
from tests.core.eviction.cases import CASES, Case

Act = tuple[str, str, int]  # what, a prompt, a pick

ACTS = ["acquire"] * 6 + ["release"] * 6 + ["evict"] * 2
# So few different blocks that all can be remembered: what is forgotten goes by runs.
MAX_LENGTH = 5
prompts = st.text("ab", min_size=1, max_size=MAX_LENGTH)
acts = st.lists(
    st.tuples(st.sampled_from(ACTS), prompts, st.integers(0, 9)), max_size=60
)

# The learner of the reuse index makes rates anew between two nodes, so what it learns
# depends on where nodes end; and a queue of S3-FIFO is one of nodes.
each_case = pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.name in ("lru", "lfu_da", "gdsf")],
    ids=lambda case: case.name,
)


class Blocks:
    """All resident blocks by path, driven by requests; each one is a node of a twin."""

    def __init__(self, case: Case, num_blocks: int) -> None:
        self.twin = case.twin(num_blocks)
        self.ids: dict[str, int] = {}  # by path
        self.held: Counter[str] = Counter()
        self.num_private = 0
        self._num_blocks = num_blocks
        self._num_ids = 0
        self._tick = 0
        self._keys: dict[str, int] = {}

    def acquire(self, text: str) -> int:
        """Take what is there and make room for the rest; return what is missing."""
        self._tick += 1
        found = [path for path in prefixes(text) if path in self.ids]
        for path in found:
            if self.held[path] == 0 and self.is_leaf(path):
                self.twin.became_pinned(self.ids[path])
            self.held[path] += 1
            self.twin.used(self.ids[path], hint=0, tick=self._tick, now=0.0)
        num_needed = len(text) + 1 - len(found)  # one more, which is never published
        while len(self.ids) + self.num_private + num_needed > self._num_blocks:
            self.evict()
        self.num_private += 1
        return len(text) - len(found)

    def publish(self, text: str) -> None:
        """Bring in what is missing."""
        self._tick += 1
        for path in prefixes(text):
            if path in self.ids:
                continue
            self._num_ids += 1
            self.ids[path] = self._num_ids
            self.held[path] += 1
            self.twin.published(
                self._num_ids,
                start=len(path) - 1,
                num_blocks=1,
                keys=[self._keys.setdefault(path, len(self._keys))],
                hint=0,
                tick=self._tick,
                now=0.0,
            )

    def release(self, text: str) -> None:
        self._tick += 1
        self.num_private -= 1
        self.held.subtract(prefixes(text))
        free = [path for path in prefixes(text) if self.held[path] == 0]
        for path in free:
            self.twin.released(self.ids[path], tick=self._tick, now=0.0)
        for path in free:
            if self.is_leaf(path):
                self.twin.became_evictable(self.ids[path], now=0.0)

    def evict(self) -> str:
        """Let one block go; return its path."""
        victim = self.twin.victim(0.0)
        assert victim is not None
        (path,) = [path for path, each in self.ids.items() if each == victim]
        del self.ids[path]
        self.twin.dropped(victim, 0, may_return=True)
        above = path[:-1]
        if above and self.held[above] == 0 and self.is_leaf(above):
            self.twin.became_evictable(self.ids[above], now=0.0)
        return path

    def is_leaf(self, path: str) -> bool:
        return not any(path + letter in self.ids for letter in "ab")


def prefixes(text: str) -> list[str]:
    return [text[: end + 1] for end in range(len(text))]


def compare(case: Case, num_blocks: int, acts: list[Act]) -> int:
    """Run both, and return how many blocks were evicted."""
    cache = build_cache(
        num_blocks=num_blocks,
        block_size=1,
        make_policy=lambda: case.make(num_blocks),
    )
    blocks = Blocks(case, num_blocks)
    leases: list[tuple[str, Lease]] = []

    def paths() -> set[str]:
        return {text_of(block.prefix) for block in resident(cache)}

    for name, text, pick in acts:
        if name == "acquire":
            prompt = tokens(text + "!")
            lease = cache.acquire(
                NAMESPACE, ALICE, prompt, Demand(num_slots=len(text) + 1), now=0.0
            )
            if lease is None:
                continue
            assert blocks.acquire(text) == len(text) - lease.num_matched_tokens
            assert paths() == blocks.ids.keys()
            cache.publish(lease, prompt, len(text), 0.0)
            blocks.publish(text)
            leases.append((text, lease))
        elif name == "release" and leases:
            text, lease = leases.pop(pick % len(leases))
            cache.release(lease, 0.0)
            blocks.release(text)
        elif name == "evict":
            for _ in range(min(pick, cache.usage().num_cached_blocks)):
                before = paths()
                assert cache.evict(1, 0.0) == 1
                assert before - paths() == {blocks.evict()}
        assert paths() == blocks.ids.keys()
    check_cache(cache, [lease for _, lease in leases])
    return cache.usage().num_evicted_blocks


def text_of(prefix: bytes) -> str:
    return prefix[::TOKEN_BYTES].decode()


@each_case
@settings(max_examples=100, deadline=None)
@given(acts=acts, num_blocks=st.integers(8, 24))
def test_a_cache_evicts_the_blocks_that_a_dict_of_blocks_does(
    case: Case, acts: list[Act], num_blocks: int
) -> None:
    compare(case, num_blocks, acts)


@each_case
@pytest.mark.parametrize("seed", range(10))
def test_a_cache_evicts_the_blocks_that_a_dict_of_blocks_does_for_long(
    case: Case, seed: int
) -> None:
    rng = random.Random(seed)
    long: list[Act] = [
        (
            rng.choice(ACTS),
            "".join(rng.choices("ab", k=rng.randrange(1, MAX_LENGTH + 1))),
            rng.randrange(9),
        )
        for _ in range(400)
    ]

    assert compare(case, rng.randrange(8, 20), long) > 50
