r"""What must be equal before two requests may share KV, and who may see it.

Owns the identity record, its canonical encoding and the sharing domain. Knows
nothing of trees, blocks or engines; it is filled by whoever loads the model.

Encoding (schema version 1), byte by byte, big-endian:

```
magic "stemkv-identity\0" · u16 schema version · u16 number of fields
then per field, in tag order: u16 tag · u8 type · u32 length · payload
types: 0 none (empty) · 1 bytes · 2 UTF-8 text · 3 signed integer (8 bytes)
       · 4 IEEE-754 binary64 (8 bytes)
```

Every field has its own tag and length, so moving a value between fields, joining two
values or leaving one out always changes the bytes: the encoding is injective.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from types import MappingProxyType
from typing import Any, Final

from stemkv.errors import ConfigError, InvariantError

__all__ = [
    "FIELD_TAGS",
    "PUBLIC",
    "SCHEMA_VERSION",
    "UNKNOWN",
    "ComputeIdentity",
    "Domain",
    "DomainKind",
    "Unknown",
]

SCHEMA_VERSION: Final = 1
_MAGIC: Final = b"stemkv-identity\0"
_INT64: Final = struct.Struct(">q")
_FLOAT64: Final = struct.Struct(">d")


class Unknown(Enum):
    """The one value that says a fact could not be established."""

    UNKNOWN = "unknown"


UNKNOWN: Final = Unknown.UNKNOWN

_Value = bytes | str | int | float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeIdentity:
    """Every fact besides the token ids that changes the bytes of a KV block.

    A field set to `UNKNOWN` makes requests under this identity uncacheable: they are
    served, but match nothing and publish nothing. `None` is a fact ("there is no
    adapter"), `UNKNOWN` is the lack of one. Digests are SHA-256 (32 bytes).
    """

    model_architecture: str | Unknown
    weights_digest: bytes | Unknown  # over the tensors as loaded
    weights_generation: int | Unknown  # advanced by every in-place mutation
    adapter_digest: bytes | None | Unknown  # adapter content; None: base model
    adapter_scale: float | None | Unknown
    adapter_generation: int | None | Unknown
    position_scheme: str | Unknown  # rope type and parameters, canonical JSON
    start_position: int | Unknown  # position of the first token
    mask_rule: str | Unknown  # "causal"
    attention_window: int | None | Unknown  # tokens; None: unlimited
    kv_dtype: str | Unknown
    kv_scales_digest: bytes | None | Unknown  # quantisation scales; None: unscaled
    kv_layout: str | Unknown  # order of a block's axes
    block_size: int | Unknown  # tokens
    parallel_layout: str | Unknown  # how heads and layers are spread over devices
    tokenizer_digest: bytes | None | Unknown  # None: keys come from final token ids
    chat_template_digest: bytes | None | Unknown  # as above
    tool_schema_version: str | None | Unknown  # as above
    media_preprocessing_version: str | None | Unknown  # as above
    numerics_class: str | Unknown  # "exact" or "tolerant"
    numerics_tile: int | Unknown  # tokens to which attention contexts are padded
    engine_build: str | Unknown  # kernels and libraries that fix the rounding

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name), str(field.type))

    @classmethod
    def of(
        cls,
        *,
        model_config: Mapping[str, object] | Unknown = UNKNOWN,
        weights_digest: bytes | Unknown = UNKNOWN,
        engine_config: Mapping[str, object] | Unknown = UNKNOWN,
        kv_dtype: str | Unknown = UNKNOWN,
        block_size: int | Unknown = UNKNOWN,
        adapter_digest: bytes | None | Unknown = UNKNOWN,
        adapter_scale: float | None | Unknown = UNKNOWN,
        **facts: bytes | str | float | None | Unknown,
    ) -> ComputeIdentity:
        """Return an identity from the facts that an engine's owner has at hand.

        `model_config` is everything the model was built from (positions, mask and
        window included), `engine_config` everything that shapes KV besides it: name and
        version, kernels, layout, parallelism, KV quantisation, numerics. Their digests
        stand in for the fields that they determine. What is not given stays `UNKNOWN`,
        and such requests share with nobody; "no adapter" must be said, as `None`. Any
        field by its name in `facts` goes before what is made up here, such as
        `start_position` (0) and `weights_generation` (0); tokenizer, template, tools
        and media are `None`, as keys are made from final token ids.

        Raises `ConfigError` for a config that is not JSON, and for unknown fields.
        """
        unknown = sorted(set(facts) - set(FIELD_TAGS))
        if unknown:
            raise ConfigError(f"ComputeIdentity has no field {', '.join(unknown)}")
        model = _digest_of("model_config", model_config)
        engine = _digest_of("engine_config", engine_config)
        has_no_adapter = adapter_digest is None
        derived: dict[str, Any] = {
            "model_architecture": model,
            "weights_digest": weights_digest,
            "weights_generation": 0,
            "adapter_digest": adapter_digest,
            "adapter_scale": None if has_no_adapter else adapter_scale,
            "adapter_generation": None if has_no_adapter else UNKNOWN,
            "position_scheme": model,
            "start_position": 0,
            "mask_rule": model,
            # Neither is a number that we know; what they are is in the digests.
            "attention_window": UNKNOWN if model is UNKNOWN else None,
            "kv_dtype": kv_dtype,
            "kv_scales_digest": UNKNOWN if engine is UNKNOWN else None,
            "kv_layout": engine,
            "block_size": block_size,
            "parallel_layout": engine,
            "tokenizer_digest": None,
            "chat_template_digest": None,
            "tool_schema_version": None,
            "media_preprocessing_version": None,
            "numerics_class": engine,
            "numerics_tile": UNKNOWN if engine is UNKNOWN else 1,
            "engine_build": engine,
        }
        return cls(**{**derived, **facts})

    def unknown_fields(self) -> tuple[str, ...]:
        """Return the names of the facts that could not be established."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is UNKNOWN)

    def encode(self) -> bytes:
        """Return the canonical bytes of this identity.

        Raises `InvariantError` when a field is `UNKNOWN`: such an identity names no
        namespace. Ask `namespace`, which answers `None` instead.
        """
        parts = [_MAGIC, struct.pack(">HH", SCHEMA_VERSION, len(FIELD_TAGS))]
        for name, tag in FIELD_TAGS.items():
            value = getattr(self, name)
            if value is UNKNOWN:
                raise InvariantError(f"identity field {name} is unknown: no encoding")
            kind, payload = _encode_value(value)
            parts.append(struct.pack(">HBI", tag, kind, len(payload)))
            parts.append(payload)
        return b"".join(parts)

    def namespace(self) -> bytes | None:
        """Return the SHA-256 of the encoding, or `None` if a fact is unknown."""
        if self.unknown_fields():
            return None
        return hashlib.sha256(self.encode()).digest()


# Tags are for ever: a removed field keeps its tag reserved, a new one takes the next.
FIELD_TAGS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "model_architecture": 1,
        "weights_digest": 2,
        "weights_generation": 3,
        "adapter_digest": 4,
        "adapter_scale": 5,
        "adapter_generation": 6,
        "position_scheme": 7,
        "start_position": 8,
        "mask_rule": 9,
        "attention_window": 10,
        "kv_dtype": 11,
        "kv_scales_digest": 12,
        "kv_layout": 13,
        "block_size": 14,
        "parallel_layout": 15,
        "tokenizer_digest": 16,
        "chat_template_digest": 17,
        "tool_schema_version": 18,
        "media_preprocessing_version": 19,
        "numerics_class": 20,
        "numerics_tile": 21,
        "engine_build": 22,
    }
)


class DomainKind(Enum):
    """How far a domain reaches."""

    PUBLIC = "public"  # operator-declared prefixes, visible to everybody
    PRIVATE = "private"  # one principal
    GROUP = "group"  # a named set of principals


@dataclass(frozen=True, slots=True)
class Domain:
    """Who may see a cached block.

    Derived from the authenticated principal by the caller, never from request text.
    A request sees `PUBLIC` and its own domain, nothing else.
    """

    kind: DomainKind
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.kind, DomainKind):
            raise ConfigError(
                f"domain kind must be a DomainKind, got {self.kind!r:.80}; "
                f"Domain.private and Domain.group make domains"
            )
        if not isinstance(self.name, str):
            raise ConfigError(
                f"domain name must be text, got {type(self.name).__name__}"
            )
        if (self.kind is DomainKind.PUBLIC) != (self.name == ""):
            raise ConfigError(
                f"domain name must be empty for public and non-empty otherwise, "
                f"got {self.kind.value} {self.name!r}"
            )

    def __hash__(self) -> int:
        # A dict key at every node of every match; a string remembers its own hash.
        return hash(self.name)

    @classmethod
    def private(cls, principal: str) -> Domain:
        """Return the domain only `principal` sees."""
        return cls(DomainKind.PRIVATE, principal)

    @classmethod
    def group(cls, name: str) -> Domain:
        """Return the domain shared by the members of a named group."""
        return cls(DomainKind.GROUP, name)


PUBLIC: Final = Domain(DomainKind.PUBLIC, "")


def _digest_of(name: str, config: Mapping[str, object] | Unknown) -> str | Unknown:
    """Return a name for all that a config says, equal only for equal configs."""
    if config is UNKNOWN:
        return UNKNOWN
    if not isinstance(config, Mapping) or not config:
        raise ConfigError(
            f"{name} must be a non-empty mapping of everything that shapes KV, or "
            f"UNKNOWN, got {config!r:.80}"
        )
    _check_names(name, config)
    try:
        text = json.dumps(dict(config), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name} must be JSON, so that equal configs have equal digests: {error}"
        ) from None
    return f"{name}:{hashlib.sha256(text.encode()).hexdigest()}"


def _check_names(name: str, value: object) -> None:
    """Refuse names that are not text: JSON would write 1 and "1" alike."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ConfigError(f"{name} has a name that is not text: {key!r:.80}")
            _check_names(name, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_names(name, inner)


def _encode_value(value: _Value) -> tuple[int, bytes]:
    match value:
        case None:
            return 0, b""
        case bytes():
            return 1, value
        case str():
            return 2, value.encode("utf-8")
        case int():
            return 3, _INT64.pack(value)
        case float():
            return 4, _FLOAT64.pack(value)


def _check(name: str, value: object, declared: str) -> None:
    """Refuse a value whose type is not the declared one.

    Types are part of the encoding, so `1`, `1.0`, `True` and `"1"` must not be
    interchangeable by accident of the caller.
    """
    if value is UNKNOWN:
        return
    accepted = {part.strip() for part in declared.split("|")}
    actual = "None" if value is None else type(value).__name__
    if actual not in accepted:
        raise ConfigError(f"identity field {name} must be {declared}, got {actual}")
    if isinstance(value, str) and not _has_utf8(value):
        raise ConfigError(f"identity field {name} has no UTF-8 encoding: {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"identity field {name} does not fit 64 bits: {value}")


def _has_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
