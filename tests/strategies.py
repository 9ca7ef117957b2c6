"""Hypothesis strategies that several test modules draw from."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from stemkv.core.prefix.identity import ComputeIdentity

__all__ = ["VALUES_BY_TYPE", "field_values", "identities"]

# Few and awkward: empty, prefixes of each other, equal in Python but not in type.
VALUES_BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "bytes": st.sampled_from([b"", b"\0", b"a", b"ab", b"1"]) | st.binary(max_size=40),
    "str": st.sampled_from(["", "\0", "a", "ab", "1"]) | st.text(max_size=20),
    "int": st.integers(-2, 2) | st.integers(-(2**63), 2**63 - 1),
    "float": st.sampled_from([0.0, -0.0, 1.0, 2.0]) | st.floats(),
    "None": st.none(),
}


def field_values(declared: str) -> st.SearchStrategy[Any]:
    """Every known value that a field of this declared type may hold."""
    parts = [part.strip() for part in declared.split("|")]
    return st.one_of([VALUES_BY_TYPE[part] for part in parts if part != "Unknown"])


def identities() -> st.SearchStrategy[ComputeIdentity]:
    """Identities with every fact known."""
    return st.builds(
        ComputeIdentity,
        **{f.name: field_values(str(f.type)) for f in fields(ComputeIdentity)},
    )
