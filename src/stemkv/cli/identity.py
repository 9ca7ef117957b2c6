"""Prints the identity under which a model's KV may be shared.

Owns how an identity is written for people and programs. The same model and settings
give the same text in every process, so two of them can be compared by eye or `diff`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stemkv.cli.outputs import STDOUT, write_text
from stemkv.core.core import CoreConfig
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.identity import FIELD_TAGS, SCHEMA_VERSION
from stemkv.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from stemkv.core.prefix.identity import ComputeIdentity

__all__ = ["IdentityOptions", "run_identity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityOptions:
    """What the identity is of, beside the model."""

    dtype: str = "auto"
    numerics: str = "exact"
    block_size: int = 16  # tokens
    start_position: int = 0
    adapter: Path | None = None  # a folder
    adapter_scale: float | None = None  # None: 1.0, if there is an adapter
    trusts_digest_record: bool = True

    def __post_init__(self) -> None:
        if self.start_position < 0:
            raise ConfigError(
                f"start_position must be at least 0, got {self.start_position}"
            )
        if self.adapter_scale is None:
            return
        if self.adapter is None:
            raise ConfigError("adapter_scale is of an adapter; name one with --adapter")


def run_identity(
    model: Path | None, options: IdentityOptions, json_file: Path | None
) -> None:
    """Print the identity on standard output; what happens meanwhile goes elsewhere.

    With `-` as `json_file` the JSON document is all there is on standard output.
    """
    identity = establish(model, options)
    unknown = identity.unknown_fields()
    if unknown:
        raise UnsupportedModel(
            f"this model has no identity to share under: {', '.join(unknown)} unknown"
        )
    document = describe(identity)
    text = json.dumps(document, separators=(",", ":")) + "\n"
    if json_file is not None:
        write_text(text, json_file)
    if json_file == STDOUT:
        return
    lines = [
        f"{json.dumps(name)}:{json.dumps(value)}"
        for name, value in document["identity"].items()
    ]
    print("{" + ",\n".join(lines) + "}")
    print(f"encoding: {document['encoding']}")
    print(f"namespace: {document['namespace']}")


def establish(model: Path | None, options: IdentityOptions) -> ComputeIdentity:
    """Load what is named and return the identity an engine computes under.

    By making that engine, so that what it would refuse is refused here.
    """
    # Here and not above: these take seconds.
    from stemkv.engine import Engine, EngineConfig
    from stemkv.engine.load import dtype_named, load_model

    # Checks its values, before anything is loaded.
    config = EngineConfig(
        core=CoreConfig(cache=CacheConfig(block_size=options.block_size)),
        numerics=options.numerics,
        runs_self_test=False,
    )
    dtype = dtype_named(options.dtype)
    loaded = load_model(
        model,
        dtype=dtype,
        progress=lambda stage: print(f"{stage} …", file=sys.stderr),
        trusts_digest_record=options.trusts_digest_record,
    )
    if options.start_position >= loaded.context_length:
        raise ConfigError(
            f"start_position must be below the context of {loaded.context_length} "
            f"tokens, got {options.start_position}"
        )
    block_bytes = loaded.kv_bytes_per_token * options.block_size
    engine = Engine(loaded, replace(config, kv_memory_bytes=block_bytes))
    adapter = None
    if options.adapter is not None:
        adapter = "adapter"
        scale = 1.0 if options.adapter_scale is None else options.adapter_scale
        engine.load_adapter(adapter, options.adapter, scale=scale)
    return engine.identity_of(adapter, start_position=options.start_position)


def describe(identity: ComputeIdentity) -> dict[str, Any]:
    """Return an identity as a JSON document: fields in order of tags, bytes as hex."""
    values = {name: getattr(identity, name) for name in FIELD_TAGS}
    namespace = identity.namespace()
    return {
        "schema_version": SCHEMA_VERSION,
        "identity": {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in values.items()
        },
        "encoding": identity.encode().hex(),
        "namespace": None if namespace is None else namespace.hex(),
    }
