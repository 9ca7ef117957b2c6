"""The sixteen contexts: who asks for what, under which facts.

Owns prompts, contexts and what is true of each, twice: as the facts a key function is
given, and as the namespace and domain of the real path. The two are made from different
sources, so that a fact that the real path loses is not lost on both sides. Owns also
the question that everything is about: does this reader find that writer's prefix.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from stemkv.audit.identity.keys import KeyContext
from stemkv.core import core
from stemkv.core.prefix.cache import Peek, PrefixCache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.identities import Identities
from stemkv.core.prefix.identity import ComputeIdentity, Domain
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.sharing import SharingPolicy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine.load import LoadedModel
from stemkv.errors import ConfigError

__all__ = [
    "ADAPTERS",
    "CONTEXTS",
    "START_POSITIONS",
    "TENANTS",
    "Case",
    "Context",
    "Prompt",
    "World",
    "find",
    "make_cache",
    "make_case",
    "make_prompts",
    "separating_fields",
    "write",
]

# "team1" + "beta" == "team" + "1beta": a key that joins the two texts without marking
# where one ends gives these two contexts of two tenants one name.
TENANTS = ("team1", "team")
ADAPTERS = ("beta", "1beta")
START_POSITIONS = (0, 128)

_SHORT_IDS = (101, 42, 77, 9)
_NUM_REALISTIC = 200
_TEXT = """\
You are the assistant of a public library with four branches. Answer in plain words,
in at most six sentences, and say which branch has what the reader is looking for.
Opening hours: the main branch is open from nine to eight on weekdays and from ten to
four on Saturdays; the branches at the harbour and at the old mill close at six and stay
closed on Mondays; the children's branch opens at noon while schools are open and at
nine during holidays. A reader may borrow twelve items at a time for four weeks, and may
renew each of them twice unless somebody else has asked for it. Reservations cost
nothing. Whatever is damaged must be reported when it comes back, so that the next
reader does not find torn pages. If you do not know an answer, say so and give the
number of the information desk. Never promise that a book will be there at a certain
hour. Reader: I live near the old mill and would like to read something about tides,
sailing and the weather at sea with my daughter, who is nine. What should we borrow,
and where do we have to go on a Monday afternoon to get it?
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Under which facts somebody asks for a prompt."""

    revision: int  # of the model's weights, 1 or 2
    adapter: str
    tenant: str
    start_position: int

    def differing(self, other: Context) -> tuple[str, ...]:
        """Return the names of the facts in which two contexts differ."""
        names = {
            "weights": self.revision != other.revision,
            "adapter": self.adapter != other.adapter,
            "tenant": self.tenant != other.tenant,
            "start position": self.start_position != other.start_position,
        }
        return tuple(name for name, differs in names.items() if differs)

    def __str__(self) -> str:
        return (
            f"revision {self.revision}, {self.adapter}, {self.tenant}, "
            f"from {self.start_position}"
        )


CONTEXTS: tuple[Context, ...] = tuple(
    Context(revision=r, adapter=a, tenant=t, start_position=s)
    for r, a, t, s in itertools.product((1, 2), ADAPTERS, TENANTS, START_POSITIONS)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt and the block size it is cached with."""

    name: str
    tokens: TokenIds
    block_size: int
    media: tuple[str, ...] = ()  # hex digests of its spans
    media_positions: tuple[tuple[int, int], ...] = ()


def make_prompts(loaded: LoadedModel, *, seed: int) -> tuple[Prompt, Prompt]:
    """Return four tokens, and two hundred of real text if there is a tokenizer."""
    longest = _NUM_REALISTIC + max(START_POSITIONS)
    if loaded.context_length < longest:
        raise ConfigError(
            f"the audit needs a context of {longest} tokens, model {loaded.name} has "
            f"{loaded.context_length}; audit another model"
        )
    short = [token % loaded.vocab_size for token in _SHORT_IDS]
    if loaded.tokenizer is None:
        draw = random.Random(seed)
        long = [draw.randrange(loaded.vocab_size) for _ in range(_NUM_REALISTIC)]
    else:
        ids = [int(token) for token in loaded.tokenizer(_TEXT)["input_ids"]]
        long = (ids * (1 + _NUM_REALISTIC // len(ids)))[:_NUM_REALISTIC]
    return (
        Prompt(name="4 tokens", tokens=TokenIds.from_ids(short), block_size=1),
        Prompt(name="200 tokens", tokens=TokenIds.from_ids(long), block_size=16),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request: what is true of it, and what the real path makes of it."""

    facts: KeyContext  # of the whole prompt
    namespace: bytes | None
    domain: Domain
    prompt: Prompt

    def prefixes(self) -> tuple[KeyContext, ...]:
        """Return the facts of every whole-block prefix, shortest first."""
        size = self.facts.block_size
        ends = range(size, len(self.facts.tokens) + 1, size)
        return tuple(self._prefix(end) for end in ends)

    def _prefix(self, end: int) -> KeyContext:
        count = sum(start < end for start, _ in self.facts.media_positions)
        return replace(
            self.facts,
            tokens=self.facts.tokens[:end],
            media=self.facts.media[:count],
            media_positions=self.facts.media_positions[:count],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What is loaded and served: the facts of all sixteen contexts.

    `bases` are the identities as the engine states them; everything else was looked up
    where it is made, and not read from an identity.
    """

    model_name: str
    bases: Mapping[int, ComputeIdentity]  # by revision
    weights_digests: Mapping[int, bytes]  # by revision, over the tensors in place
    adapter_digests: Mapping[str, bytes]  # by name, as read

    def facts(self, context: Context, prompt: Prompt) -> KeyContext:
        """Return what is true of a prompt in a context."""
        base = self.bases[1]
        return KeyContext(
            tokens=tuple(max(0, token) for token in prompt.tokens),
            model_name=self.model_name,
            model_path=f"models/{self.model_name}",
            model_revision=f"revision {context.revision}",
            weights_digest=self.weights_digests[context.revision].hex(),
            weights_generation=context.revision - 1,
            architecture=str(base.model_architecture),
            adapter_name=context.adapter,
            adapter_path=f"adapters/{context.adapter}",
            adapter_digest=self.adapter_digests[context.adapter].hex(),
            adapter_scale=1.0,
            adapter_generation=0,
            tenant=context.tenant,
            cache_salt=context.tenant,
            start_position=context.start_position,
            position_scheme=str(base.position_scheme),
            kv_dtype=str(base.kv_dtype),
            block_size=prompt.block_size,
            numerics_class=str(base.numerics_class),
            engine_build=str(base.engine_build),
            tokenizer_digest=(
                base.tokenizer_digest.hex()
                if isinstance(base.tokenizer_digest, bytes)
                else None
            ),
            media=prompt.media,
            media_positions=prompt.media_positions,
        )

    def case(self, context: Context, prompt: Prompt) -> Case:
        """Return a prompt in a context, by both descriptions."""
        base = replace(self.bases[context.revision], block_size=prompt.block_size)
        return make_case(base, self.facts(context, prompt), prompt)


def make_case(base: ComputeIdentity, facts: KeyContext, prompt: Prompt) -> Case:
    """Take a request through the real path: identities, then sharing.

    `base` is the identity of the model without adapter. An adapter that was loaded
    before is loaded as often here.
    """
    identities = Identities(base)
    if facts.adapter_name is not None:
        assert facts.adapter_digest is not None, "an adapter has content"
        assert facts.adapter_scale is not None, "an adapter has a scale"
        for _ in range(1 + (facts.adapter_generation or 0)):
            identities.load(
                facts.adapter_name,
                bytes.fromhex(facts.adapter_digest),
                facts.adapter_scale,
            )
    domain = SharingPolicy().domain(facts.tenant)
    assert domain is not None, "the default policy lets a tenant share with itself"
    return Case(
        facts=facts,
        namespace=identities.namespace(
            facts.adapter_name, start_position=facts.start_position
        ),
        domain=domain,
        prompt=prompt,
    )


def make_cache(*, block_size: int, num_tokens: int) -> PrefixCache:
    """Return an empty cache for that many tokens of several requests."""
    num_blocks = -(-num_tokens // block_size)
    config = CacheConfig(num_blocks=num_blocks, block_size=block_size)
    return core.make_cache(core.CoreConfig(cache=config))


def write(cache: PrefixCache, case: Case) -> None:
    """Publish all whole blocks of a case, as a request that has ended."""
    tokens = case.prompt.tokens.buffer
    num_tokens = len(case.prompt.tokens)
    lease = cache.acquire(
        case.namespace, case.domain, tokens, Demand(num_slots=num_tokens), now=0.0
    )
    assert lease is not None, "the cache was made large enough"
    cache.copied(lease, 0.0)
    cache.publish(lease, tokens, num_tokens, 0.0)
    cache.release(lease, 0.0)


def find(cache: PrefixCache, case: Case) -> Peek:
    """Return what a case would reuse."""
    return cache.peek(case.namespace, case.domain, case.prompt.tokens.buffer)


def separating_fields(base: ComputeIdentity, prompt: Prompt) -> dict[str, bool]:
    """Return for each field of the identity whether it alone keeps prefixes apart."""
    base = replace(base, block_size=prompt.block_size)
    domain = Domain.private(TENANTS[0])
    tokens = prompt.tokens.buffer
    num_tokens = len(prompt.tokens)
    cache = make_cache(block_size=prompt.block_size, num_tokens=num_tokens)
    lease = cache.acquire(
        base.namespace(), domain, tokens, Demand(num_slots=num_tokens), now=0.0
    )
    assert lease is not None, "the cache was made large enough"
    cache.publish(lease, tokens, num_tokens, 0.0)
    cache.release(lease, 0.0)
    separates = {}
    for field in fields(ComputeIdentity):
        other = _another(getattr(base, field.name), str(field.type))
        namespace = replace(base, **{field.name: other}).namespace()
        separates[field.name] = cache.peek(namespace, domain, tokens).num_tokens == 0
    return separates


def _another(value: Any, declared: str) -> Any:
    """Return another value of a field's type; `Any`, as fields have many types."""
    match value:
        case bytes():
            return bytes(byte ^ 1 for byte in value)
        case str():
            return value + "'"
        case int():
            return value + 1
        case float():
            return value / 2
    samples = {"bytes": bytes(32), "float": 1.0, "int": 1, "str": "1"}
    return next(v for kind, v in samples.items() if kind in declared)
