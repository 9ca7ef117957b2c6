"""Identity: an injective, stable encoding, and no field that can be forgotten."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import stemkv
from stemkv.core.prefix.identity import (
    FIELD_TAGS,
    PUBLIC,
    SCHEMA_VERSION,
    UNKNOWN,
    ComputeIdentity,
    Domain,
    DomainKind,
)
from stemkv.errors import ConfigError, InvariantError
from tests.core.builders import build_cache, build_identity, cached, serve
from tests.strategies import field_values, identities

FIELDS = {field.name: str(field.type) for field in fields(ComputeIdentity)}
OPTIONAL = [name for name, declared in FIELDS.items() if "None" in declared]
PAIRS_OF_ONE_TYPE = [
    (left, right)
    for left, right in itertools.combinations(FIELDS, 2)
    if FIELDS[left] == FIELDS[right]
]

# For every field, another value than `build_identity` gives it. A field without one
# fails `test_every_field_has_a_mutation`, so it cannot go without a must-miss test.
MUTATIONS: dict[str, Any] = {
    "model_architecture": "qwen3",
    "weights_digest": bytes(32),
    "weights_generation": 8,
    "adapter_digest": bytes(32),
    "adapter_scale": 0.25,
    "adapter_generation": 4,
    "position_scheme": '{"base":10000.0,"type":"rope"}',
    "start_position": 1,
    "mask_rule": "bidirectional",
    "attention_window": 2048,
    "kv_dtype": "float16",
    "kv_scales_digest": bytes(32),
    "kv_layout": "kv,layer,block,slot,head,dim",
    "block_size": 32,
    "parallel_layout": "tp2",
    "tokenizer_digest": bytes(32),
    "chat_template_digest": bytes(32),
    "tool_schema_version": "tools-2",
    "media_preprocessing_version": "media-2",
    "numerics_class": "tolerant",
    "numerics_tile": 128,
    "engine_build": "torch-2.13.1+cpu",
}

# sha256 of `build_identity().encode()`. It changes only with SCHEMA_VERSION: whoever
# has to touch it silently disowns every key that was ever exported.
GOLDEN_DIGEST = "8578e605949e89829124d94d76d7b259231211ca1593b408e1a43dcf10ac04f5"


TESTS = Path(__file__).parents[1]
VECTORS = json.loads(
    (TESTS / "core" / "golden_identities.json").read_text(encoding="utf-8")
)
PAGE = (TESTS.parent / "docs" / "identity.md").read_text(encoding="utf-8")

# How the page and the file of vectors call the types of Python.
TYPE_WORDS = {
    "None": "none",
    "bytes": "bytes",
    "str": "text",
    "int": "integer",
    "float": "float",
}


def known(value: object) -> tuple[str, object]:
    """A value with its type, and floats by their bits: what must be told apart."""
    if isinstance(value, float):
        return "float", struct.pack(">d", value)
    return type(value).__name__, value


def facts(identity: ComputeIdentity) -> list[tuple[str, object]]:
    return [known(getattr(identity, name)) for name in FIELDS]


def decode(encoded: bytes) -> tuple[int, dict[int, object]]:
    """Read the documented encoding back, written from its documentation alone."""
    magic, encoded = encoded[:16], encoded[16:]
    assert magic == b"stemkv-identity\0"
    version, num_fields = struct.unpack(">HH", encoded[:4])
    encoded = encoded[4:]
    values: dict[int, object] = {}
    for _ in range(num_fields):
        tag, kind, length = struct.unpack(">HBI", encoded[:7])
        payload, encoded = encoded[7 : 7 + length], encoded[7 + length :]
        assert len(payload) == length
        assert not values or tag > max(values), "tags are not in order"
        match kind:
            case 0:
                assert payload == b""
                values[tag] = None
            case 1:
                values[tag] = payload
            case 2:
                values[tag] = payload.decode("utf-8")
            case 3:
                values[tag] = int.from_bytes(payload, "big", signed=True)
            case 4:
                values[tag] = struct.unpack(">d", payload)[0]
            case _:
                raise AssertionError(f"type {kind} is not documented")
    assert encoded == b"", "bytes are left over"
    return version, values


# The encoding


def test_the_encoding_begins_as_documented_byte_by_byte() -> None:
    first_field = struct.pack(">HBI", 1, 2, 5) + b"llama"
    second_field = struct.pack(">HBI", 2, 1, 32) + bytes(range(32))
    third_field = struct.pack(">HBI", 3, 3, 8) + (7).to_bytes(8, "big")

    start = b"stemkv-identity\0" + struct.pack(">HH", 1, 22)

    encoded = build_identity().encode()
    assert encoded.startswith(start + first_field + second_field + third_field)


def test_the_golden_vector_has_not_moved() -> None:
    encoded = build_identity().encode()

    assert SCHEMA_VERSION == 1
    assert hashlib.sha256(encoded).hexdigest() == GOLDEN_DIGEST
    assert build_identity().namespace() == bytes.fromhex(GOLDEN_DIGEST)


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242", "random"])
def test_every_process_gives_the_same_namespace(hash_seed: str) -> None:
    source = Path(stemkv.__file__).parents[1]
    tests = Path(__file__).parents[2]
    path = os.pathsep.join([str(source), str(tests)])
    printed = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.core.builders import build_identity;"
            "print(build_identity().namespace().hex())",
        ],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )

    assert printed.stdout.strip() == GOLDEN_DIGEST


def typed(fact: dict[str, Any]) -> object:
    """A value of a golden vector."""
    match fact["type"]:
        case "none":
            return None
        case "bytes":
            return bytes.fromhex(fact["value"])
        case "text" | "integer" | "float" as word:
            assert TYPE_WORDS[type(fact["value"]).__name__] == word
            return fact["value"]
    raise AssertionError(f"{fact['type']} is no type")


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda v: v["name"])
def test_code_page_and_file_agree_on_the_golden_vectors(vector: dict[str, Any]) -> None:
    values = {name: typed(fact) for name, fact in vector["fields"].items()}
    identity = ComputeIdentity(**values)
    encoded = bytes.fromhex(vector["encoding"])

    assert VECTORS["schema_version"] == SCHEMA_VERSION
    assert list(values) == list(FIELD_TAGS)
    assert identity.encode() == encoded
    assert identity.namespace() == bytes.fromhex(vector["sha256"])
    assert hashlib.sha256(encoded).hexdigest() == vector["sha256"]
    version, read = decode(encoded)
    assert version == SCHEMA_VERSION
    assert {tag: known(value) for tag, value in read.items()} == {
        FIELD_TAGS[name]: known(value) for name, value in values.items()
    }

    title = vector["name"][0].upper() + vector["name"][1:]
    _, _, rest = PAGE.partition(f"\n### {title}\n")
    shown = re.match(
        r"\s*(\d+) bytes, SHA-256 `([0-9a-f]+)`\.\s*```hex\n([0-9a-f\n]+)```", rest
    )
    assert shown is not None, f"the page has no vector {title}"
    num_bytes, digest, lines = shown.groups()
    assert (int(num_bytes), digest) == (len(encoded), vector["sha256"])
    assert lines.replace("\n", "") == vector["encoding"]


def test_the_golden_vectors_cover_what_can_be_got_wrong() -> None:
    vectors = [v["fields"] for v in VECTORS["vectors"]]
    everything = [fact for fields in vectors for fact in fields.values()]

    assert {fact["type"] for fact in everything} == set(TYPE_WORDS.values())
    assert "none" not in {fact["type"] for fact in vectors[0].values()}
    nones = {name for name, fact in vectors[1].items() if fact["type"] == "none"}
    assert nones == set(OPTIONAL)
    assert any(not str(fact.get("value", "")).isascii() for fact in vectors[2].values())
    assert len(re.findall("^### ", PAGE, re.M)) == len(vectors)
    assert vectors[0] == {
        name: {
            "type": TYPE_WORDS[type(value).__name__],
            "value": value.hex() if isinstance(value, bytes) else value,
        }
        for name in FIELDS
        for value in [getattr(build_identity(), name)]
    }


@given(identities())
def test_the_encoding_can_be_read_back_so_it_is_injective(
    identity: ComputeIdentity,
) -> None:
    version, values = decode(identity.encode())

    assert version == SCHEMA_VERSION
    assert {tag: known(value) for tag, value in values.items()} == {
        FIELD_TAGS[name]: known(getattr(identity, name)) for name in FIELDS
    }


@given(identities(), st.data())
def test_identities_encode_alike_exactly_if_all_facts_are_alike(
    identity: ComputeIdentity, data: st.DataObject
) -> None:
    changed = data.draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3))
    changes = {name: data.draw(field_values(FIELDS[name])) for name in changed}
    other = replace(identity, **changes)

    is_same = facts(identity) == facts(other)
    assert (identity.encode() == other.encode()) == is_same
    assert (identity.namespace() == other.namespace()) == is_same


@given(identities(), st.sampled_from(PAIRS_OF_ONE_TYPE))
def test_moving_a_value_to_another_field_changes_the_bytes(
    identity: ComputeIdentity, pair: tuple[str, str]
) -> None:
    left, right = pair
    swapped = replace(
        identity,
        **{left: getattr(identity, right), right: getattr(identity, left)},
    )
    assume(facts(swapped) != facts(identity))

    assert swapped.encode() != identity.encode()


@pytest.mark.parametrize(
    "left, right",
    [
        (dict(model_architecture="ab", mask_rule="c"), dict(mask_rule="bc")),
        (dict(model_architecture="a", mask_rule=""), dict(mask_rule="a")),
        (dict(tokenizer_digest=None), dict(tokenizer_digest=b"")),
        (dict(tool_schema_version=None), dict(tool_schema_version="")),
        (dict(tool_schema_version="None"), dict(tool_schema_version=None)),
        (dict(adapter_scale=0.0), dict(adapter_scale=None)),
        (dict(adapter_generation=0), dict(adapter_generation=None)),
        (dict(attention_window=0), dict(attention_window=None)),
        (dict(adapter_scale=0.0), dict(adapter_scale=-0.0)),
        (
            dict(adapter_digest=b"x", kv_scales_digest=None),
            dict(adapter_digest=None, kv_scales_digest=b"x"),
        ),
    ],
)
def test_values_that_are_easily_confused_encode_differently(
    left: dict[str, Any], right: dict[str, Any]
) -> None:
    neutral = {"model_architecture": "a"}
    one = build_identity(**(neutral | left))
    other = build_identity(**(neutral | right))
    assert one.encode() != other.encode()


def test_whatever_can_be_built_can_be_encoded() -> None:
    """A string that has no UTF-8 is refused when the identity is made, not later."""
    with pytest.raises(ConfigError, match="engine_build"):
        build_identity(engine_build="\ud800")


# Completeness: no field without a tag, a mutation and a miss


def test_every_field_has_a_tag() -> None:
    assert list(FIELD_TAGS) == list(FIELDS)
    assert list(FIELD_TAGS.values()) == sorted(set(FIELD_TAGS.values()))


def test_tags_are_never_given_to_another_field() -> None:
    released = ["model_architecture", "weights_digest", "weights_generation"]
    released += ["adapter_digest", "adapter_scale", "adapter_generation"]
    released += ["position_scheme", "start_position", "mask_rule", "attention_window"]
    released += ["kv_dtype", "kv_scales_digest", "kv_layout", "block_size"]
    released += ["parallel_layout", "tokenizer_digest", "chat_template_digest"]
    released += ["tool_schema_version", "media_preprocessing_version"]
    released += ["numerics_class", "numerics_tile", "engine_build"]

    holders = {tag: name for name, tag in FIELD_TAGS.items()}
    for tag, name in enumerate(released, start=1):
        assert holders.get(tag, name) == name


def test_every_field_has_a_mutation() -> None:
    base = build_identity()

    assert set(MUTATIONS) == set(FIELDS) == set(FIELD_TAGS)
    for name, value in MUTATIONS.items():
        assert known(getattr(base, name)) != known(value)


def test_every_field_has_a_row_on_the_page() -> None:
    """Tag, name and type, and with what the engine fills it and why."""
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| ([^|]+) \|(.*)\|$", PAGE, re.M)
    expected = []
    for name, tag in FIELD_TAGS.items():
        parts = [part.strip() for part in FIELDS[name].split("|")]
        words = [TYPE_WORDS[part] for part in parts if part != "Unknown"]
        expected.append((str(tag), name, " or ".join(words)))

    assert [row[:3] for row in rows] == expected
    for _, name, _, rest in rows:
        source, reason = (cell.strip() for cell in rest.split(" | "))
        assert len(source) > 5, name
        assert len(reason) > 20, name


def test_the_page_describes_this_version() -> None:
    assert f"Schema version {SCHEMA_VERSION}, integers big-endian:" in PAGE


def assert_a_miss(changes: dict[str, Any]) -> None:
    """KV under one identity is invisible under another, but not under its own."""
    base, changed = build_identity(), build_identity(**changes)
    cache = build_cache(num_blocks=8, block_size=2)
    serve(cache, "abcdef", namespace=base.namespace())

    assert cached(cache, "abcdef", namespace=build_identity().namespace()) == 5
    assert cached(cache, "abcdef", namespace=changed.namespace()) == 0


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_changing_only_this_field_misses(name: str) -> None:
    assert_a_miss({name: MUTATIONS[name]})


@pytest.mark.parametrize("name", sorted(OPTIONAL))
def test_leaving_only_this_fact_out_misses(name: str) -> None:
    assert_a_miss({name: None})


# Facts that are not known


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_one_unknown_fact_leaves_no_namespace_to_share_in(name: str) -> None:
    identity = build_identity(**{name: UNKNOWN})

    assert identity.unknown_fields() == (name,)
    assert identity.namespace() is None
    with pytest.raises(InvariantError, match=name):
        identity.encode()


def test_all_unknown_facts_are_named_in_the_order_of_the_fields() -> None:
    identity = build_identity(engine_build=UNKNOWN, weights_digest=UNKNOWN)
    assert identity.unknown_fields() == ("weights_digest", "engine_build")
    assert build_identity().unknown_fields() == ()


def test_no_fact_can_be_left_out() -> None:
    for name in FIELDS:
        given_facts = {n: getattr(build_identity(), n) for n in FIELDS if n != name}
        with pytest.raises(TypeError, match=name):
            ComputeIdentity(**given_facts)


# Types


def wrong_values(declared: str) -> list[object]:
    """Values of every type that the field is not declared to hold."""
    accepted = {part.strip() for part in declared.split("|")}
    candidates: dict[str, list[object]] = {
        "bytes": [b"x"],
        "str": ["x", "unknown"],
        "int": [1],
        "float": [1.0],
        "None": [None],
        "bool": [True, False],
        "bytearray": [bytearray(b"x")],
        "tuple": [(1,)],
        "list": [[1]],
    }
    return [
        value
        for name, values in candidates.items()
        if name not in accepted
        for value in values
    ]


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_values_of_another_type_are_refused(name: str) -> None:
    for value in wrong_values(FIELDS[name]):
        with pytest.raises(ConfigError, match=f"{name} must be "):
            build_identity(**{name: value})


def test_a_bool_is_no_integer_and_an_integer_no_float() -> None:
    with pytest.raises(ConfigError, match="block_size must be int .* got bool"):
        build_identity(block_size=True)
    with pytest.raises(ConfigError, match="adapter_scale must be float .* got int"):
        build_identity(adapter_scale=1)


def test_subclasses_are_refused_since_their_equality_is_their_own() -> None:
    class Sly(str):
        __slots__ = ()

    class SlyInt(int):
        __slots__ = ()

    for changes in (dict(kv_dtype=Sly("bfloat16")), dict(block_size=SlyInt(16))):
        with pytest.raises(ConfigError, match="got Sly"):
            build_identity(**changes)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**100])
def test_integers_beyond_64_bits_are_refused(value: int) -> None:
    with pytest.raises(ConfigError, match=f"64 bits: {value}"):
        build_identity(weights_generation=value)


def test_the_largest_and_smallest_integers_are_kept_apart() -> None:
    edges = [2**63 - 1, -(2**63), 0, -1]
    encodings = {build_identity(weights_generation=e).encode() for e in edges}
    assert len(encodings) == len(edges)


def test_an_identity_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        build_identity().block_size = 32  # type: ignore[misc]


# Domains


def test_domains_of_the_same_name_but_another_kind_differ() -> None:
    assert Domain.private("x") != Domain.group("x")
    assert Domain.private("x") == Domain.private("x")
    assert len({Domain.private("x"), Domain.group("x"), PUBLIC}) == 3


@pytest.mark.parametrize("kind", [DomainKind.PRIVATE, DomainKind.GROUP])
def test_a_domain_with_an_owner_has_a_name(kind: DomainKind) -> None:
    with pytest.raises(ConfigError, match="non-empty otherwise"):
        Domain(kind, "")


def test_nobody_owns_the_public_domain() -> None:
    assert Domain(DomainKind.PUBLIC, "") == PUBLIC
    with pytest.raises(ConfigError, match="must be empty for public"):
        Domain(DomainKind.PUBLIC, "alice")


# Built from few facts

FACTS: dict[str, Any] = {
    "model_config": {"hidden_size": 64, "rope": {"theta": 10_000.0}},
    "weights_digest": bytes(32),
    "engine_config": {"name": "mine", "version": "1.0", "tensor_parallel": 1},
    "kv_dtype": "bfloat16",
    "block_size": 16,
    "adapter_digest": None,
}


def test_six_facts_name_a_namespace_and_each_of_them_decides_it() -> None:
    changed = {
        "model_config": {"hidden_size": 64, "rope": {"theta": 500_000.0}},
        "weights_digest": bytes([1]) * 32,
        "engine_config": {"name": "mine", "version": "1.1", "tensor_parallel": 1},
        "kv_dtype": "float16",
        "block_size": 32,
    }
    namespaces = [ComputeIdentity.of(**FACTS).namespace()]
    for name, value in changed.items():
        namespaces.append(ComputeIdentity.of(**{**FACTS, name: value}).namespace())
    for generation in (0, 1):
        adapted = {
            "adapter_digest": bytes([2]) * 32,
            "adapter_scale": 1.0,
            "adapter_generation": generation,
        }
        namespaces.append(ComputeIdentity.of(**{**FACTS, **adapted}).namespace())
    namespaces.append(ComputeIdentity.of(**FACTS, start_position=5).namespace())

    assert None not in namespaces
    assert len(set(namespaces)) == len(namespaces)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_a_fact_that_nobody_gave_stays_unknown_and_shares_with_nobody(
    name: str,
) -> None:
    facts = {key: value for key, value in FACTS.items() if key != name}

    assert ComputeIdentity.of(**facts).namespace() is None


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"model_config": {1: "a"}}, "model_config has a name that is not text: 1"),
        ({"model_config": {"x": [{2: "a"}]}}, "not text: 2"),
        ({"model_config": {"x": float("nan")}}, "model_config must be JSON"),
        ({"engine_config": {"x": object()}}, "engine_config must be JSON"),
        ({"engine_config": {}}, "engine_config must be a non-empty mapping"),
        ({"engine_config": "vllm 1.0"}, "engine_config must be a non-empty mapping"),
        ({"kv_dtyp": "bfloat16"}, "no field kv_dtyp"),
        ({"block_size": 16.0}, "block_size"),
    ],
)
def test_facts_that_would_not_tell_configs_apart_are_refused(
    facts: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        ComputeIdentity.of(**{**FACTS, **facts})
