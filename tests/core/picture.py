"""Everything that an object is made of, as plain values that `==` compares.

For claims like "leaves the state as it was, bit for bit": whatever a class remembers
now or will remember tomorrow is in its picture, lazy heaps and caches included. Objects
are followed through attributes and slots; functions are not part of a state.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

__all__ = ["picture"]

_PLAIN = (int, float, str, bytes, bytearray, bool, type(None))
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, type)


def picture(thing: object) -> Any:
    """Return nested tuples; an object that is met again is only its number."""
    return _picture(thing, {})


def _picture(thing: object, seen: dict[int, int]) -> Any:
    if isinstance(thing, Enum):
        return thing.name
    if isinstance(thing, _PLAIN):
        return thing
    if isinstance(thing, _FUNCTIONS):
        return "function"
    if isinstance(thing, array | memoryview):
        return thing.tolist()
    if isinstance(thing, set | frozenset):
        return ("set", sorted(repr(_picture(each, seen)) for each in thing))
    if id(thing) in seen:
        return ("seen", seen[id(thing)])
    seen[id(thing)] = len(seen)
    if isinstance(thing, Mapping):
        return [(_picture(k, seen), _picture(v, seen)) for k, v in thing.items()]
    if isinstance(thing, list | tuple | deque):
        return [_picture(each, seen) for each in thing]
    return (
        type(thing).__name__,
        [(name, _picture(value, seen)) for name, value in _attributes(thing)],
    )


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    for kind in type(thing).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(thing, name):
                yield name, getattr(thing, name)
    yield from getattr(thing, "__dict__", {}).items()
