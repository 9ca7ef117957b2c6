"""Files that users write: how they are read, and what is said of what is wrong in them.

Owns the words for keys, types and places. Every error is a `ConfigError`. Knows nothing
of what a file means (see `settings` and `quotas`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime, time
from difflib import get_close_matches
from pathlib import Path
from typing import Final, TypeVar

from stemkv.errors import ConfigError

__all__ = [
    "check_keys",
    "checked",
    "found_in",
    "joined",
    "parse_json",
    "read_text",
    "reason_of",
    "type_name",
]

_T = TypeVar("_T")
_TYPE_NAMES: Final[dict[type, str]] = {
    str: "text",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    list: "an array",
    dict: "a table",
    datetime: "a date with time",
    date: "a date",
    time: "a time",
    type(None): "null",  # these words serve JSON, too
}


@contextmanager
def found_in(place: str) -> Iterator[None]:
    """Put the place before the message of a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}{error}") from None


def read_text(path: Path) -> str:
    """Return a file's text, UTF-8."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError("the file does not exist") from None
    except IsADirectoryError:
        raise ConfigError("is a folder, not a file") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"cannot be read: {error}") from None
    try:
        # A byte order mark is an editor's, not a part of the text.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"not UTF-8: byte 0x{data[error.start]:02x} in line {line}; "
            f"save the file as UTF-8"
        ) from None


def parse_json(text: str) -> object:
    """Return the JSON value that a text is."""
    try:
        return json.loads(text)
    # Not only its own error: an integer of too many digits, nested too deeply.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid JSON: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    """Return why a parser gave up, in words."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def check_keys(
    table: Mapping[str, object], where: str, allowed: tuple[str, ...]
) -> None:
    """Raise for a key that is none of `allowed`; `where` is the table, dotted."""
    for key in table:
        if key not in allowed:
            close = get_close_matches(key.lower(), allowed, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(
                f"{joined(where, key)} is not a setting; {hint}"
                f"allowed: {', '.join(allowed)}"
            )


def checked(value: object, expected: type[_T], where: str) -> _T:
    """Return the value, which stands at `where`, if it is of a type."""
    if not isinstance(value, expected):
        raise ConfigError(
            f"{where} must be {_TYPE_NAMES[expected]}, got {type_name(value)}"
        )
    return value


def type_name(value: object) -> str:
    """Return what a value is, for messages; never the value itself."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)


def joined(where: str, key: str) -> str:
    """Return a dotted key as TOML would have it, quoted where it must be."""
    shown = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else f"{json.dumps(key):.80}"
    return f"{where}.{shown}" if where else shown
