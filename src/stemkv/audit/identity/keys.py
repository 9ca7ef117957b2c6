"""Cache keys under attack: what they are made of, and the ones seen in the field.

Owns the facts that a key function is given, and key functions modelled on public
reports: each is the *key* of a project at the time of the report, never its code. Knows
nothing of tensors, and imports the standard library only, so that a key function can be
tried in a fresh process at once.

A key names KV in a store. Projects whose key leaves a fact out are right as long as the
store never holds two values of that fact, as with one model for each process; they are
wrong in a store that outlives a change or has several writers. The attack is on a store
of the second kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields

__all__ = ["FIELD_KEYS", "FieldKey", "KeyContext", "KeyFunction", "everything"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyContext:
    """What is true of one prefix of one request: all that a key may be made of.

    A key function `KeyContext -> Hashable` is called for every whole-block prefix of
    a prompt, as an engine does that looks blocks up one by one. Two prefixes with equal
    keys share KV. Digests are in hex.
    """

    tokens: tuple[int, ...]  # from the first one to the end of the block; 0 for media
    # The model. Names, paths and labels stay what they are when the weights change.
    model_name: str
    model_path: str
    model_revision: str  # a label, "revision 1" or "revision 2"
    weights_digest: str  # of the tensors as loaded
    weights_generation: int  # changes in place since the server started
    architecture: str
    # The adapter; all `None` without one.
    adapter_name: str | None
    adapter_path: str | None
    adapter_digest: str | None  # of matrices and scaling as read
    adapter_scale: float | None
    adapter_generation: int | None  # how many times this name was loaded before
    # The caller.
    tenant: str  # the authenticated principal
    cache_salt: str | None  # what the client sent; by convention, its tenant's name
    # How KV is computed and kept.
    start_position: int  # position of the first token
    position_scheme: str  # rope type and parameters
    kv_dtype: str
    block_size: int  # tokens
    numerics_class: str
    engine_build: str  # kernels and libraries that fix the rounding
    tokenizer_digest: str | None
    # Images and supplied embeddings in the prefix, in order: what they are, and which
    # positions they take (first, one past the last).
    media: tuple[str, ...] = ()
    media_positions: tuple[tuple[int, int], ...] = ()


KeyFunction = Callable[[KeyContext], Hashable]

# Not in it: names, paths and labels, which say nothing of content; the salt, which
# clients choose; and the tokenizer, as keys are made of final token ids.
_FACTS = (
    "tokens",
    "weights_digest",
    "weights_generation",
    "architecture",
    "adapter_digest",
    "adapter_scale",
    "adapter_generation",
    "tenant",
    "start_position",
    "position_scheme",
    "kv_dtype",
    "block_size",
    "numerics_class",
    "engine_build",
    "media",
    "media_positions",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldKey:
    """A key function, who was seen with one like it, and where it must fail."""

    name: str
    function: KeyFunction
    source: str  # "owner/project#number" of the public report, or what else it is
    confuses: frozenset[str] = frozenset()  # facts that it can't tell apart, alone
    fails: tuple[str, ...] = ()  # scenarios in which it shares what it must not
    collides: bool = False  # takes some of a few thousand prompts for one another
    is_unstable: bool = False  # other keys in another process


def everything(context: KeyContext) -> Hashable:
    """Return every fact that changes KV or says who may see it."""
    return tuple(getattr(context, name) for name in _FACTS)


def _without(*names: str) -> KeyFunction:
    known = {field.name for field in fields(KeyContext)}
    assert set(names) <= known, names
    kept = tuple(name for name in _FACTS if name not in names)

    def key(context: KeyContext) -> Hashable:
        return tuple(getattr(context, name) for name in kept)

    return key


def _token_ids(context: KeyContext) -> Hashable:
    return context.tokens


def _model_name(context: KeyContext) -> Hashable:
    return context.model_name, context.tokens


def _model_and_salt(context: KeyContext) -> Hashable:
    return context.model_name, context.cache_salt, context.tokens


def _adapter_name(context: KeyContext) -> Hashable:
    return context.model_name, context.adapter_name, context.tokens


def _adapter_path(context: KeyContext) -> Hashable:
    adapter = (context.adapter_name, context.adapter_path)
    return context.model_name, adapter, ("salt", context.cache_salt), context.tokens


def _joined(context: KeyContext) -> Hashable:
    # Nothing marks where one ends and the other begins: "team1" + "beta" and
    # "team" + "1beta" are the same text.
    return (context.cache_salt or "") + (context.adapter_name or ""), context.tokens


def _untyped(context: KeyContext) -> Hashable:
    # What is absent leaves no gap, and a text says not which fact it is.
    extras = (context.adapter_name, context.cache_salt)
    return context.model_name, *filter(None, extras), context.tokens


def _salt_for_tenant(context: KeyContext) -> Hashable:
    return _without("tenant")(context), context.cache_salt


def _last_block(context: KeyContext) -> Hashable:
    last = context.tokens[-context.block_size :]
    return last, len(context.tokens), _without("tokens")(context)


def builtin_hash(context: KeyContext) -> Hashable:
    """Return Python's own hash: texts in it have a salt that each process draws."""
    return hash(everything(context))


def _digest(context: KeyContext) -> bytes:
    # `repr` keeps the types of these fields apart and quotes texts.
    return hashlib.sha256(repr(everything(context)).encode()).digest()


def _first_16_bits(context: KeyContext) -> Hashable:
    return _digest(context)[:2]


def _first_64_bits(context: KeyContext) -> Hashable:
    return _digest(context)[:8]


_ALL = frozenset({"weights", "adapter", "tenant", "start position"})

FIELD_KEYS: tuple[FieldKey, ...] = (
    FieldKey(
        name="token ids only",
        function=_token_ids,
        source="transformers 5.24 (continuous batching)",
        confuses=_ALL,
        fails=("media of another content", "adapter or none"),
    ),
    FieldKey(
        name="model name",
        function=_model_name,
        source="LMCache/LMCache#2961",
        confuses=_ALL,
        fails=("adapter or none",),
    ),
    FieldKey(
        name="model name, salt",
        function=_model_and_salt,
        source="vllm-project/vllm#44250",
        confuses=_ALL - {"tenant"},
        fails=("adapter or none", "weights updated in place"),
    ),
    FieldKey(
        name="model, adapter name",
        function=_adapter_name,
        source="vllm-project/vllm#30931",
        confuses=_ALL - {"adapter"},
        fails=("adapter reloaded",),
    ),
    FieldKey(
        name="model, adapter name + path, salt",
        function=_adapter_path,
        source="vllm-project/vllm#42125",
        confuses=frozenset({"weights", "start position"}),
        fails=("adapter reloaded", "weights updated in place"),
    ),
    FieldKey(
        name="salt and adapter joined",
        function=_joined,
        source="SGLang 0.5.23, tinfoilsh/confidential-model-router#386",
        # Ambiguous in principle there: most of its adapter ids are random.
        confuses=frozenset({"weights", "start position", "adapter + tenant"}),
        fails=("adapter reloaded", "salt equal to an adapter's name"),
    ),
    FieldKey(
        name="adapter and salt untyped",
        function=_untyped,
        source="vllm-project/vllm#44701",
        confuses=frozenset({"weights", "start position"}),
        fails=("salt equal to an adapter's name",),
    ),
    FieldKey(
        name="all but the weights",
        function=_without("weights_digest", "weights_generation"),
        source="vllm-project/vllm#46125, NVIDIA-NeMo/RL#4018",
        confuses=frozenset({"weights"}),
        fails=("weights updated in place", "restarted on other weights"),
    ),
    FieldKey(
        name="all but the start position",
        function=_without("start_position"),
        source="no public report",
        confuses=frozenset({"start position"}),
    ),
    FieldKey(
        name="all but the tenant",
        function=_without("tenant"),
        source="vllm-project/vllm#17045",
        confuses=frozenset({"tenant"}),
        fails=("salt sent by another tenant",),
    ),
    FieldKey(
        name="salt for the tenant",
        function=_salt_for_tenant,
        source="vllm-project/vllm#53347",
        fails=("salt sent by another tenant",),
    ),
    FieldKey(
        name="all but the adapter's scale",
        function=_without("adapter_scale"),
        source="ggml-org/llama.cpp#26207",
        fails=("adapter at another scale",),
    ),
    FieldKey(
        name="all but rope parameters",
        function=_without("position_scheme", "architecture"),
        source="vllm-project/vllm#56311",
        fails=("other rope parameters",),
    ),
    FieldKey(
        name="all but the KV dtype",
        function=_without("kv_dtype"),
        source="vllm-project/vllm#49438",
        fails=("other KV dtype",),
    ),
    FieldKey(
        name="all but the mask",
        function=_without("media_positions"),
        source="vllm-project/vllm#56655",
        fails=("only the mask differs",),
    ),
    FieldKey(
        name="last block only",
        function=_last_block,
        source="vllm-project/aibrix#2329",
        fails=("same last block",),
    ),
    FieldKey(
        name="16 bits of a digest",
        function=_first_16_bits,
        source="LMCache/LMCache#4086",
        collides=True,
    ),
    FieldKey(
        name="64 bits of a digest",
        function=_first_64_bits,
        source="vllm-project/vllm#15297",
    ),
    FieldKey(
        name="Python's hash()",
        function=builtin_hash,
        source="LMCache/LMCache#2136",
        is_unstable=True,
    ),
    FieldKey(
        name="every fact",
        function=everything,
        source="none: shows that not everything fails here",
    ),
)
