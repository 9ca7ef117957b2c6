"""What the core's tests are arranged from: words as tokens, small caches, histories.

A token is a letter, so a test shows its prompts: `tokens("abcd")`; where spans are
needed a prompt has parts: `Prompt("ab", span("cat"), "cd")`. Nothing in here decides
anything; `snapshot`, `resident` and `count_calls` only look.
"""

from __future__ import annotations

import gc
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from types import FrameType
from typing import Any

from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.identity import PUBLIC, UNKNOWN, ComputeIdentity, Domain
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.table import Lease
from stemkv.core.prefix.tokens import TOKEN_BYTES, Span, TokenIds
from stemkv.core.prefix.tree import Node
from stemkv.core.retention.policy import EvictionPolicy, Lru
from stemkv.core.retention.retention import Retention
from tests.core.picture import picture

NAMESPACE = b"n" * 32
OTHER_NAMESPACE = b"o" * 32
ALICE = Domain.private("alice")
BOB = Domain.private("bob")
CREW = Domain.group("alice")  # the name is a principal's on purpose


def tokens(text: str) -> bytes:
    """One token per letter."""
    return TokenIds.from_ids([ord(letter) for letter in text]).buffer


def span(name: str, num_tokens: int = 16) -> Span:
    return Span(digest=sha256(name.encode()).digest(), num_tokens=num_tokens)


class Prompt:
    """Letters and spans: the ids that the cache sees, and the inputs they stand for.

    `num_alike` makes the ids of spans weak: so many leading ids are the same in every
    span, whatever its content. Then only `inputs` says what KV is really of.
    """

    def __init__(self, *parts: str | Span, num_alike: int = 0) -> None:
        self.parts = parts
        self.num_alike = num_alike
        texts = [TokenIds(tokens(p)) if isinstance(p, str) else p for p in parts]
        self.ids = weakened(TokenIds.from_parts(texts).buffer, num_alike)
        self.inputs = tuple(each for part in parts for each in inputs_of(part))

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        return f"Prompt{self.parts!r}"

    def prefix(self, num_tokens: int) -> bytes:
        return self.ids[: num_tokens * TOKEN_BYTES]

    @property
    def tokens(self) -> TokenIds:
        found = TokenIds(b"")
        found._buffer = self.ids  # the constructor refuses what only `from_parts` makes
        found.has_spans = any(isinstance(part, Span) for part in self.parts)
        return found


def inputs_of(part: str | Span) -> list[object]:
    if isinstance(part, str):
        return list(part)
    return [(part.digest, part.num_tokens, i) for i in range(part.num_tokens)]


def weakened(buffer: bytes, num_alike: int) -> bytes:
    """Overwrite the first ids of every span with what is the same in all of them."""
    ids = list(struct.unpack(f"<{len(buffer) // TOKEN_BYTES}i", buffer))
    starts = [i for i, each in enumerate(ids) if each < 0 and ~each >> 30]
    for start in starts:
        for offset in range(num_alike):
            ids[start + offset] = ~(offset | (offset == 0) << 30)
    return struct.pack(f"<{len(ids)}i", *ids)


def build_cache(
    *,
    num_blocks: int,
    block_size: int,
    make_policy: Callable[[], EvictionPolicy] = Lru,
) -> PrefixCache:
    config = CacheConfig(num_blocks=num_blocks, block_size=block_size)
    return PrefixCache(config, Retention(make_policy))


def policy_of(cache: PrefixCache) -> EvictionPolicy:
    """The policy of a cache without quotas."""
    return cache.keeper._common.policy


def acquire(
    cache: PrefixCache,
    text: str,
    *,
    domain: Domain = ALICE,
    namespace: bytes | None = NAMESPACE,
    num_slots: int | None = None,
    num_spare: int = 0,
    now: float = 0.0,
) -> Lease | None:
    """Ask for exactly the slots of the text, unless told otherwise."""
    return cache.acquire(
        namespace,
        domain,
        tokens(text),
        Demand(
            num_slots=len(text) if num_slots is None else num_slots, num_spare=num_spare
        ),
        now=now,
    )


def hold(
    cache: PrefixCache,
    text: str,
    *,
    domain: Domain = ALICE,
    namespace: bytes | None = NAMESPACE,
    now: float = 0.0,
) -> Lease:
    """Acquire, compute and publish a text; the lease stays alive."""
    lease = acquire(cache, text, domain=domain, namespace=namespace, now=now)
    assert lease is not None, "the test's cache is too small"
    cache.copied(lease, now)
    cache.publish(lease, tokens(text), len(text), now)
    return lease


def serve(
    cache: PrefixCache,
    text: str,
    *,
    domain: Domain = ALICE,
    namespace: bytes | None = NAMESPACE,
    now: float = 0.0,
) -> int:
    """Let a request come and go; return how many of its tokens were cached."""
    lease = hold(cache, text, domain=domain, namespace=namespace, now=now)
    cache.release(lease, now)
    return lease.num_matched_tokens


def cached(
    cache: PrefixCache,
    text: str,
    *,
    domain: Domain = ALICE,
    namespace: bytes | None = NAMESPACE,
) -> int:
    """How many tokens of the text a request would find now."""
    return cache.peek(namespace, domain, tokens(text)).num_tokens


def spelled(node: Node) -> bytes:
    """The tokens from the root to the end of this node."""
    return b"".join(step.edge for step in node.path())


@dataclass(frozen=True, order=True)
class ResidentBlock:
    """Which tokens a published block ends, and through which chain of domains."""

    namespace: bytes
    domain_name: str  # "" is public
    domain_kind: str
    num_public: int  # leading public blocks on its path, itself included
    prefix: bytes  # all tokens up to the end of the block


def resident_block(
    namespace: bytes, domain: Domain, num_public: int, prefix: bytes
) -> ResidentBlock:
    return ResidentBlock(namespace, domain.name, domain.kind.value, num_public, prefix)


def resident(cache: PrefixCache) -> dict[ResidentBlock, int]:
    """All matchable blocks, found by walking the whole tree."""
    block_bytes = cache.config.block_size * TOKEN_BYTES
    found: dict[ResidentBlock, int] = {}
    for namespace, root in cache.tree.roots().items():
        stack = [(child, b"", 0) for child in _children(root)]
        while stack:
            node, prefix, num_public = stack.pop()
            for index, block_id in enumerate(node.block_ids):
                prefix += node.edge[index * block_bytes : (index + 1) * block_bytes]
                num_public += node.domain == PUBLIC
                key = resident_block(namespace, node.domain, num_public, prefix)
                assert key not in found, "a chain is resident twice"
                found[key] = block_id
            stack += [(child, prefix, num_public) for child in _children(node)]
    return found


def _children(node: Node) -> Iterator[Node]:
    for children in node.children.values():
        yield from children


def snapshot(cache: PrefixCache) -> dict[str, Any]:
    """Every bit of state of cache, pool, tree and policy, comparable with `==`."""
    tree, pool = cache.tree, cache.pool
    roots = [*tree.roots().values(), *tree.retired_roots()]
    return {
        "free": pool.free_block_ids(),
        "references": tuple(pool._ref_counts),
        "published": bytes(pool._published),
        "num_published": pool.num_published,
        "roots": {name: root.id for name, root in tree.roots().items()},
        "retired": [root.id for root in tree.retired_roots()],
        "nodes": [_picture(node) for node in [*roots, *tree.nodes()]],
        "next_node_id": tree._next_id,
        "num_tree_blocks": (tree.num_blocks, tree.num_pinned_blocks),
        "retention": picture(cache.keeper),
        "tick": cache.residency._tick,
        "key_spaces": repr(cache.residency._keys._spaces),
        "standing": picture(cache.residency.standing),
        "leases": len(cache._leases),
        "usage": cache.usage(),
    }


def _picture(node: Node) -> tuple[Any, ...]:
    return (
        node.id,
        node.parent.id if node.parent else None,
        node.domain,
        node.edge,
        tuple(node.block_ids),
        node.ref_count,
        node.is_retired,
        {
            domain: ([(key, child.id) for key, child in c.items()], c.sorted_keys())
            for domain, c in node.children.items()
        },
    )


def count_calls(act: Callable[[], object]) -> int:
    """How many calls, of Python and of C functions, an act makes: cost, not time."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # who collects garbage, and when, is no part of the act
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
        gc.enable()
    return num_calls


def build_identity(**changes: Any) -> ComputeIdentity:
    """An identity with every fact known, and all of them different."""
    facts: dict[str, Any] = {
        "model_architecture": "llama",
        "weights_digest": bytes(range(32)),
        "weights_generation": 7,
        "adapter_digest": bytes(range(32, 64)),
        "adapter_scale": 0.5,
        "adapter_generation": 3,
        "position_scheme": '{"base":100000.0,"type":"rope"}',
        "start_position": 0,
        "mask_rule": "causal",
        "attention_window": 4096,
        "kv_dtype": "bfloat16",
        "kv_scales_digest": bytes(range(64, 96)),
        "kv_layout": "layer,kv,block,slot,head,dim",
        "block_size": 16,
        "parallel_layout": "tp1",
        "tokenizer_digest": bytes(range(96, 128)),
        "chat_template_digest": bytes(range(128, 160)),
        "tool_schema_version": "tools-1",
        "media_preprocessing_version": "media-1",
        "numerics_class": "exact",
        "numerics_tile": 64,
        "engine_build": "torch-2.13.0+cpu",
    }
    return ComputeIdentity(**(facts | changes))


@dataclass
class Sink:
    """Remembers events."""

    events: list[object] = field(default_factory=list)

    def __call__(self, event: object) -> None:
        self.events.append(event)

    def total(self, kind: type) -> int:
        """Sum of `num_blocks` over the events of one kind, which are forgotten."""
        hits = [event for event in self.events if isinstance(event, kind)]
        self.events = [event for event in self.events if not isinstance(event, kind)]
        return sum(event.num_blocks for event in hits)


__all__ = [
    "ALICE",
    "BOB",
    "CREW",
    "NAMESPACE",
    "OTHER_NAMESPACE",
    "PUBLIC",
    "Prompt",
    "UNKNOWN",
    "ResidentBlock",
    "Sink",
    "acquire",
    "build_cache",
    "build_identity",
    "cached",
    "count_calls",
    "hold",
    "policy_of",
    "resident",
    "resident_block",
    "serve",
    "snapshot",
    "span",
    "spelled",
    "tokens",
]
