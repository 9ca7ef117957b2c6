"""Every reader against every writer, under one key or on the real path.

Owns what is asked of each key, all of it the same for all keys, and the counting of
right and wrong answers. Knows nothing of tensors: what a wrong hit does is `states`'.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stemkv.audit.identity.contexts import (
    CONTEXTS,
    Case,
    Context,
    Prompt,
    find,
    make_cache,
    write,
)
from stemkv.audit.identity.keys import KeyContext, KeyFunction
from stemkv.audit.identity.scenarios import Expectation, Scenario
from stemkv.audit.identity.trial import KeyFault, number_keys
from stemkv.core.prefix.tokens import TOKEN_BYTES, TokenIds, common_prefix_bytes

__all__ = [
    "NUM_PROMPTS",
    "Arena",
    "Outcome",
    "attack_key",
    "attack_ours",
    "num_foreign_hits",
]

NUM_PROMPTS = 2000  # for collisions
_COLLISION_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Everything that a key is asked: pairs, scenarios, and many other prompts."""

    prompts: tuple[Prompt, ...]
    cases: dict[str, tuple[Case, ...]]  # by prompt, in the order of `CONTEXTS`
    scenarios: tuple[Scenario, ...]
    strangers: tuple[Case, ...]  # different prompts in one context
    # What key functions are called with, and which of it belongs to each case: those
    # of the prompts, then writer and reader of each scenario, then strangers.
    contexts: tuple[KeyContext, ...]
    copies: tuple[KeyContext, ...]  # equal, down to their texts, and other objects
    ranges: tuple[range, ...]

    @classmethod
    def of(
        cls,
        cases: dict[str, tuple[Case, ...]],
        scenarios: tuple[Scenario, ...],
        *,
        vocab_size: int,
        seed: int,
    ) -> Arena:
        """Add the prompts for collisions: seeded, all different in their first block."""
        prompts = tuple(each[0].prompt for each in cases.values())
        draw = random.Random(seed)
        blocks: dict[tuple[int, ...], None] = {}  # ordered, unlike a set
        while len(blocks) < NUM_PROMPTS:
            blocks[tuple(draw.choices(range(vocab_size), k=_COLLISION_BLOCK))] = None
        home = cases[prompts[-1].name][0]
        strangers = tuple(_stranger(home, block) for block in blocks)
        asked = [case for each in cases.values() for case in each]
        asked += [case for each in scenarios for case in (each.writer, each.reader)]
        contexts: list[KeyContext] = []
        ranges = []
        for case in (*asked, *strangers):
            start = len(contexts)
            contexts.extend(case.prefixes())
            ranges.append(range(start, len(contexts)))
        return cls(
            prompts=prompts,
            cases=cases,
            scenarios=scenarios,
            strangers=strangers,
            contexts=tuple(contexts),
            copies=pickle.loads(pickle.dumps(tuple(contexts))),
            ranges=tuple(ranges),
        )


def _stranger(home: Case, block: tuple[int, ...]) -> Case:
    ids = (*block, 0)  # one more, as the last token of a prompt is never reused
    prompt = Prompt(
        name="stranger", tokens=TokenIds.from_ids(ids), block_size=_COLLISION_BLOCK
    )
    facts = replace(home.facts, tokens=ids, block_size=_COLLISION_BLOCK)
    return replace(home, facts=facts, prompt=prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one key answered."""

    hits: dict[str, tuple[tuple[bool, ...], ...]]  # by prompt: [writer][reader]
    scenario_hits: dict[str, bool]
    num_collisions: int
    overlong: tuple[str, ...] = ()  # where more was reused than is common

    @property
    def num_pairs(self) -> int:
        """Ordered pairs that were tried, over all prompts."""
        return len(CONTEXTS) ** 2 * len(self.hits)

    @property
    def num_must_hit(self) -> int:
        """Pairs that differ in nothing."""
        return len(CONTEXTS) * len(self.hits)

    def wrong_pairs(self, prompt: str) -> list[tuple[Context, Context]]:
        """Return (writer, reader) pairs that share and must not."""
        return [
            (writer, reader)
            for writer, row in zip(CONTEXTS, self.hits[prompt], strict=True)
            for reader, hit in zip(CONTEXTS, row, strict=True)
            if hit and writer != reader
        ]

    @property
    def num_wrong(self) -> int:
        """Pairs that share and must not, over all prompts."""
        return sum(len(self.wrong_pairs(prompt)) for prompt in self.hits)

    @property
    def num_missed(self) -> int:
        """Pairs that may share and don't, over all prompts."""
        return sum(
            not rows[index][index]
            for rows in self.hits.values()
            for index in range(len(CONTEXTS))
        )

    def confused(self) -> tuple[str, ...]:
        """Return the facts the key can't tell apart, and combinations of facts.

        "adapter + tenant": it notices either alone, and not both at once.
        """
        pairs = [
            writer.differing(reader)
            for prompt in self.hits
            for writer, reader in self.wrong_pairs(prompt)
        ]
        alone = {names[0] for names in pairs if len(names) == 1}
        joint = {
            " + ".join(name for name in names if name not in alone)
            for names in pairs
            if not alone.issuperset(names)
        }
        return (*sorted(alone), *sorted(joint))

    def wrong_scenarios(self, scenarios: Sequence[Scenario]) -> list[str]:
        """Return the names of the scenarios in which it shares and must not."""
        return [
            each.name
            for each in scenarios
            if each.expectation is Expectation.MISS and self.scenario_hits[each.name]
        ]

    def missed_scenarios(self, scenarios: Sequence[Scenario]) -> list[str]:
        """Return the names of the scenarios in which it should share and doesn't."""
        return [
            each.name
            for each in scenarios
            if each.expectation is Expectation.HIT and not self.scenario_hits[each.name]
        ]


def attack_key(function: KeyFunction, arena: Arena) -> Outcome | KeyFault:
    """Ask a key function everything.

    A reader hits if any of its prefixes has a key that one of the writer's has.
    """
    numbers = number_keys(function, arena.contexts, arena.copies)
    if isinstance(numbers, KeyFault):
        return numbers
    keys = [frozenset(numbers[index] for index in each) for each in arena.ranges]
    rest = iter(keys)
    hits = {}
    for name, cases in arena.cases.items():
        own = [next(rest) for _ in cases]
        hits[name] = tuple(tuple(bool(w & r) for r in own) for w in own)
    scenario_hits = {
        each.name: not next(rest).isdisjoint(next(rest)) for each in arena.scenarios
    }
    strangers = list(rest)
    return Outcome(
        hits=hits,
        scenario_hits=scenario_hits,
        num_collisions=len(strangers) - len(set(strangers)),
    )


def attack_ours(arena: Arena) -> Outcome:
    """Let the real cache decide: writers publish, readers look."""
    overlong: list[str] = []
    hits = {}
    for prompt in arena.prompts:
        cases = arena.cases[prompt.name]
        hits[prompt.name] = tuple(
            tuple(num > 0 for num in _row(writer, cases, overlong)) for writer in cases
        )
    scenario_hits = {
        each.name: _row(each.writer, [each.reader], overlong)[0] > 0
        for each in arena.scenarios
    }
    return Outcome(
        hits=hits,
        scenario_hits=scenario_hits,
        num_collisions=_num_collisions(arena.strangers),
        overlong=tuple(overlong),
    )


def num_foreign_hits(arena: Arena) -> tuple[int, int]:
    """Put all writers but one into one cache; ask for that one, then add it, ask again.

    Returns how many readers found something before, and how many after.
    """
    before = after = 0
    for prompt in arena.prompts:
        cases = arena.cases[prompt.name]
        for reader in cases:
            cache = make_cache(
                block_size=prompt.block_size,
                num_tokens=len(cases) * (len(prompt.tokens) + prompt.block_size),
            )
            for case in cases:
                if case is not reader:
                    write(cache, case)
            before += find(cache, reader).num_tokens > 0
            write(cache, reader)
            after += find(cache, reader).num_tokens > 0
    return before, after


def _row(writer: Case, readers: Sequence[Case], overlong: list[str]) -> list[int]:
    """Return how many tokens each reader finds of one writer; note those too many."""
    # The reader's cache has the reader's block size; what must keep the two apart is
    # the namespace.
    found = []
    for reader in readers:
        cache = make_cache(
            block_size=reader.facts.block_size, num_tokens=len(writer.prompt.tokens)
        )
        write(cache, writer)
        num_tokens = find(cache, reader).num_tokens
        if num_tokens > _num_common(writer.prompt.tokens, reader.prompt.tokens):
            overlong.append(f"{writer.prompt.name} for {reader.prompt.name}")
        found.append(num_tokens)
    return found


def _num_common(one: TokenIds, other: TokenIds) -> int:
    limit = min(len(one.buffer), len(other.buffer))
    same = common_prefix_bytes(one.buffer, 0, other.buffer, 0, limit)
    return same // TOKEN_BYTES


def _num_collisions(strangers: Sequence[Case]) -> int:
    cache = make_cache(
        block_size=_COLLISION_BLOCK,
        num_tokens=len(strangers) * 2 * _COLLISION_BLOCK,
    )
    num_found = 0
    for case in strangers:
        num_found += find(cache, case).num_whole_blocks > 0
        write(cache, case)
    return num_found
