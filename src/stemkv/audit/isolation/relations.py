"""Who hits whose KV, and can a name or an id talk the engine into more?

Owns the expectations about groups, classes, tenants that share nothing, crafted names,
request ids and refusals, written down by hand and not asked of the policy that is
audited.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stemkv.audit.isolation.probes import Stage
from stemkv.audit.isolation.worlds import (
    ATTACKER,
    BLOCK_SIZE,
    PRIVATE,
    VICTIM,
    Setting,
    World,
    random_ids,
)
from stemkv.core.prefix.sharing import Sharing, SharingPolicy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.request import RequestId
from stemkv.engine.sampling import SamplingParams
from stemkv.errors import DuplicateRequest, RequestError

__all__ = [
    "PARTIES",
    "Ids",
    "NameTrial",
    "Party",
    "Relations",
    "try_ids",
    "try_names",
    "try_relations",
]

_CREW = Setting(
    name="groups, classes, none",
    sharing=SharingPolicy(
        groups={"crew": {"ann", "bob"}},
        tenants={"carol": Sharing.NONE},
        classes={
            "confidential": Sharing.NONE,
            "drafts": Sharing.PRIVATE,
            "chat": Sharing.GROUP,
        },
    ),
    has_public_head=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """A tenant with a class of requests."""

    tenant: str
    request_class: str | None
    scope: str | None  # parties of one scope share; `None` shares with nobody

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.request_class is None:
            return self.tenant
        return f"{self.tenant}/{self.request_class}"


PARTIES = (
    Party(tenant="ann", request_class=None, scope="the crew"),
    Party(tenant="bob", request_class=None, scope="the crew"),
    Party(tenant="ann", request_class="drafts", scope="ann alone"),
    Party(tenant="bob", request_class="confidential", scope=None),
    Party(tenant="carol", request_class=None, scope=None),
    Party(tenant="dave", request_class=None, scope="dave"),
    Party(tenant="dave", request_class="chat", scope="dave"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relations:
    """Cached tokens that each party got of each other's prompt. Exact counts."""

    hits: dict[tuple[str, str], int]  # (owner, asker) → tokens
    public_hits: dict[str, int]  # asker → tokens of the public head
    num_retained: int  # blocks cached after all owners had come and gone
    num_retained_expected: int

    def leaks(self) -> list[str]:
        """Return who got more than its scope allows."""
        return self._unlike(lambda got, expected: got > expected)

    def misses(self) -> list[str]:
        """Return who got less than its scope gives: controls that failed."""
        return self._unlike(lambda got, expected: got < expected)

    def _unlike(self, is_wrong: Callable[[int, int], bool]) -> list[str]:
        wrong = [
            f"{asker.name} of {owner.name}"
            for owner in PARTIES
            for asker in PARTIES
            if is_wrong(self.hits[owner.name, asker.name], _expected(owner, asker))
        ]
        for asker in PARTIES:
            expected = BLOCK_SIZE if asker.scope is not None else 0
            if is_wrong(self.public_hits[asker.name], expected):
                wrong.append(f"{asker.name} of the public head")
        return wrong

    @property
    def num_expected_hits(self) -> int:
        """How many pairs should hit: the controls."""
        return sum(_expected(o, a) > 0 for o in PARTIES for a in PARTIES)


def try_relations(stage: Stage, progress: Callable[[str], None]) -> Relations:
    """Let each party ask for a prompt of each party."""
    progress("groups, classes and tenants that share nothing: who hits whom")
    pairs = [(owner, asker) for owner in PARTIES for asker in PARTIES]
    ids = stage.prompts(BLOCK_SIZE + 1, len(pairs) + 1)
    head, *prompts = [TokenIds.from_ids(each) for each in ids]
    # Owner and asker of each pair, a block and a running one.
    world = stage.world(_CREW, num_blocks=4 * len(pairs) + 16)
    for (owner, _), prompt in zip(pairs, prompts, strict=True):
        world.add(owner.tenant, prompt, request_class=owner.request_class)
    world.drain()
    num_retained = world.engine.usage().num_cached_blocks
    asked = [
        world.add(asker.tenant, prompt, request_class=asker.request_class)
        for (_, asker), prompt in zip(pairs, prompts, strict=True)
    ]
    ended = world.drain()
    world.engine.declare_public(head)
    world.ask("zoe", head)
    of_head = [
        world.add(party.tenant, head, request_class=party.request_class)
        for party in PARTIES
    ]
    ended |= world.drain()
    return Relations(
        hits={
            (owner.name, asker.name): ended[request_id].counts.reused
            for (owner, asker), request_id in zip(pairs, asked, strict=True)
        },
        public_hits={
            party.name: ended[request_id].counts.reused
            for party, request_id in zip(PARTIES, of_head, strict=True)
        },
        num_retained=num_retained,
        num_retained_expected=sum(owner.scope is not None for owner, _ in pairs),
    )


def _expected(owner: Party, asker: Party) -> int:
    shares = owner.scope is not None and owner.scope == asker.scope
    return BLOCK_SIZE if shares else 0


# Names

# Names that should be strangers, and whose prompt each of them goes for.
_NAMES: tuple[tuple[str, str], ...] = (
    ("crew", "ann"),  # the name of the group itself
    ("group:crew", "ann"),
    ("private:ann", "ann"),
    ("ann,bob", "ann"),
    ("ANN", "ann"),
    ("ann ", "ann"),
    ("ann\0", "ann"),
    ("ann\0crew", "ann"),
    ("\u0430nn", "ann"),  # a Cyrillic a
    ("\uff41nn", "ann"),  # a full-width a, equal under NFKC
    ("ann\u200b", "ann"),  # a space of no width
    ("Jose\u0301", "Jos\u00e9"),  # equal under NFC
    ("dave/../ann", "ann"),
    ("*", "ann"),
    ("public", "ann"),
    ("None", "Jos\u00e9"),
    ("default", "Jos\u00e9"),
    ("\ud800", "ann"),  # half of a surrogate pair: it has no UTF-8 encoding
    ("a" * 65536, "ann"),
)
_REFUSED: tuple[Any, ...] = ("", b"ann", 7, ["ann"], ("ann",))
_UNDECLARED: tuple[Any, ...] = ("", "public", "crew", "CHAT", "chat ", 3, ["chat"])


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTrial:
    """What one crafted name got."""

    name: str  # escaped, so that it can be shown
    target: str  # escaped
    num_stolen: int  # cached tokens of the target's prompt
    num_own: int  # of the same prompt asked again, so its own by now


def try_names(
    stage: Stage, progress: Callable[[str], None]
) -> tuple[list[NameTrial], list[str], int]:
    """Ask in crafted names; return the trials, what was not refused, its number."""
    progress("crafted tenant names and classes")
    targets = ("ann", "Jos\u00e9")
    ids = stage.prompts(BLOCK_SIZE + 1, len(targets) + 1)
    prompts = {
        target: TokenIds.from_ids(each)
        for target, each in zip(targets, ids, strict=False)
    }
    world = stage.world(_CREW, num_blocks=2 * len(_NAMES) + 16)
    for target, prompt in prompts.items():
        world.ask(target, prompt)
    trials = [
        NameTrial(
            name=ascii(name[:20]),
            target=ascii(target),
            num_stolen=world.ask(name, prompts[target]).counts.reused,
            num_own=world.ask(name, prompts[target]).counts.reused,
        )
        for name, target in _NAMES
    ]
    prompt = prompts["ann"]
    accepted = [
        f"tenant {tenant!r}"
        for tenant in _REFUSED
        if not _is_refused(world, tenant, prompt, None)
    ]
    if not _shares_with_nobody(world, prompt):
        accepted.append("no tenant, and it reused what there was")
    accepted += [
        f"class {name!r}"
        for name in _UNDECLARED
        if not _is_refused(world, "dave", prompt, name)
    ]
    return trials, accepted, len(_REFUSED) + len(_UNDECLARED) + 1  # and none


def _is_refused(
    world: World, tenant: Any, prompt: TokenIds, request_class: Any
) -> bool:
    try:
        world.add(tenant, prompt, request_class=request_class)
    except RequestError:
        return not world.engine.has_work
    except Exception:  # whatever it is, a server could not tell whose fault it was
        return False
    world.drain()
    return False


def _shares_with_nobody(world: World, prompt: TokenIds) -> bool:
    """Whether a request of no tenant finds neither others' KV nor its own of before."""
    engine, params = world.engine, SamplingParams(max_new_tokens=1, ignore_eos=True)
    retained = engine.usage().num_cached_blocks
    for _ in range(2):
        request_id = engine.add(prompt, params)
        if world.drain()[request_id].counts.reused:
            return False
    return engine.usage().num_cached_blocks == retained


# Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Ids:
    """What request ids and cancellation give away."""

    ids_alone: tuple[
        RequestId, ...
    ]  # of the attacker's first requests, without a victim
    ids_beside: tuple[RequestId, ...]  # the same with the victim's requests in flight
    cancels_others: bool  # whether the attacker ended the victim's request
    cancels_own: bool  # whether the victim can: the control
    answer_live: bool  # what the attacker is told of a live request of the victim
    answer_unknown: bool  # and of one that never was
    victim_finished: bool
    names_taken: bool  # whether a chosen id is refused since the victim's has it


def try_ids(stage: Stage, progress: Callable[[str], None]) -> Ids:
    """Guess ids, cancel others' requests, choose ids that are taken."""
    progress("request ids and cancellation")
    rng = random.Random(stage.seed)
    prompts = [
        TokenIds.from_ids(random_ids(rng, stage.loaded, BLOCK_SIZE)) for _ in range(4)
    ]
    alone = stage.world(PRIVATE, num_blocks=32)
    ids_alone = tuple(alone.add(ATTACKER, prompt) for prompt in prompts[:2])
    for request_id in ids_alone:
        alone.engine.cancel(request_id, tenant=ATTACKER)
    world = stage.world(PRIVATE, num_blocks=32)
    first, second = (world.add(VICTIM, p, max_new_tokens=2) for p in prompts[2:])
    ids_beside = tuple(world.add(ATTACKER, prompt) for prompt in prompts[:2])
    world.step()
    answer_live = world.engine.cancel(first, tenant=ATTACKER)
    answer_unknown = world.engine.cancel(
        RequestId("request-of-nobody"), tenant=ATTACKER
    )
    names_taken = False
    try:
        world.engine.add(prompts[0], tenant=ATTACKER, request_id=first)
    except DuplicateRequest:
        names_taken = True
    cancels_own = world.engine.cancel(second, tenant=VICTIM)
    ended = world.drain()
    return Ids(
        ids_alone=ids_alone,
        ids_beside=ids_beside,
        cancels_others=len(ended[first].token_ids) < 2,
        cancels_own=cancels_own and len(ended[second].token_ids) < 2,
        answer_live=answer_live,
        answer_unknown=answer_unknown,
        victim_finished=len(ended[first].token_ids) == 2,
        names_taken=names_taken,
    )
