"""The operator's settings file: who shares with whom, and what is public.

Owns the TOML (see `docs/sharing.md`) and every sentence about what is wrong with it.
Knows nothing of tokenizers: whoever serves turns public texts into tokens.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, datetime, time
from difflib import get_close_matches
from pathlib import Path
from typing import Final, TypeVar

from stemkv.core.sharing import Sharing, SharingPolicy
from stemkv.core.tokens import TokenIds
from stemkv.errors import ConfigError, TokenOutOfRange

__all__ = ["PublicPrefix", "Settings", "read_settings"]

_T = TypeVar("_T")
_SOURCES: Final = ("text", "text_file", "messages", "tokens_file")
_OF_TENANTS: Final = (Sharing.PRIVATE, Sharing.NONE)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicPrefix:
    """What the operator lets everybody share, as text, messages or tokens."""

    name: str  # for people; shares nothing and matches nothing
    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None  # role and content
    token_ids: TokenIds | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("name must not be empty")
        values = {
            "text": self.text,
            "messages": self.messages,
            "token_ids": self.token_ids,
        }
        given = [key for key, value in values.items() if value is not None]
        if len(given) != 1:
            raise ConfigError(
                f"name {self.name!r:.80} needs exactly one of {', '.join(values)}; "
                f"got {' and '.join(given) or 'none'}"
            )
        if not values[given[0]]:
            raise ConfigError(f"{given[0]} must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that a settings file says."""

    sharing: SharingPolicy = field(default_factory=SharingPolicy)
    public: tuple[PublicPrefix, ...] = ()

    def __post_init__(self) -> None:
        first: dict[str, int] = {}
        for index, prefix in enumerate(self.public):
            if prefix.name in first:
                raise ConfigError(
                    f"public[{index}].name: {prefix.name!r:.80} is the name of "
                    f"public[{first[prefix.name]}] already; give each its own"
                )
            first[prefix.name] = index


def read_settings(path: Path) -> Settings:
    """Read a settings file and the files it names, relative to it.

    What the file leaves out has its default: an empty one shares nothing between
    tenants. Raises `ConfigError` naming the file and the line or key.
    """
    with _found_in(f"{path}: "):
        document = _parse(_read_text(path))
        _check_keys(document, "", ("sharing", "public"))
        sharing = _sharing(_table(document, "sharing", "sharing"))
        entries = document.get("public", [])
        if isinstance(entries, dict):
            raise ConfigError("public must be an array of tables; write [[public]]")
        public = [
            _public_prefix(_checked(entry, dict, f"public[{i}]"), f"public[{i}]", path)
            for i, entry in enumerate(_checked(entries, list, "public"))
        ]
        return Settings(sharing=sharing, public=tuple(public))


def _sharing(table: dict[str, object]) -> SharingPolicy:
    _check_keys(table, "sharing", ("default", "groups", "tenants", "classes"))
    groups = {
        name: frozenset(_texts(members, _join("sharing.groups", name)))
        for name, members in _table(table, "groups", "sharing.groups").items()
    }
    tenants = {
        name: _choice(value, _join("sharing.tenants", name), _OF_TENANTS)
        for name, value in _table(table, "tenants", "sharing.tenants").items()
    }
    classes = {
        name: _choice(value, _join("sharing.classes", name), tuple(Sharing))
        for name, value in _table(table, "classes", "sharing.classes").items()
    }
    default = table.get("default", Sharing.PRIVATE.value)
    with _found_in("sharing."):
        return SharingPolicy(
            groups=groups,
            tenants=tenants,
            classes=classes,
            default=_choice(default, "default", _OF_TENANTS),
        )


def _public_prefix(entry: dict[str, object], where: str, path: Path) -> PublicPrefix:
    _check_keys(entry, where, ("name", *_SOURCES))
    if "name" not in entry:
        raise ConfigError(f"{where}.name is missing; messages call the prefix by it")
    name = _text(entry["name"], f"{where}.name")
    given = [key for key in _SOURCES if key in entry]
    if len(given) != 1:
        raise ConfigError(
            f"{where} ({name!r:.80}) needs exactly one of {', '.join(_SOURCES)}; "
            f"got {' and '.join(given) or 'none'}"
        )
    source = given[0]
    value, key = entry[source], f"{where}.{source}"
    with _found_in(f"{where}."):
        match source:
            case "text":
                return PublicPrefix(name=name, text=_text(value, source))
            case "messages":
                return PublicPrefix(name=name, messages=_messages(value, source))
    file = path.parent / _text(value, key)
    with _found_in(f"{key}: {file}: "):
        text = _read_text(file)
        if not text:
            raise ConfigError("the file is empty")
        if source == "text_file":
            return PublicPrefix(name=name, text=text)
        return PublicPrefix(name=name, token_ids=_token_ids(text))


def _messages(value: object, where: str) -> tuple[dict[str, str], ...]:
    messages = []
    for index, item in enumerate(_checked(value, list, where)):
        key = f"{where}[{index}]"
        message = _checked(item, dict, key)
        _check_keys(message, key, ("role", "content"))
        for part in ("role", "content"):
            if part not in message:
                raise ConfigError(f"{key}.{part} is missing")
        messages.append({k: _text(v, f"{key}.{k}") for k, v in message.items()})
        if not messages[-1]["role"]:
            raise ConfigError(f"{key}.role must not be empty")
    return tuple(messages)


def _token_ids(text: str) -> TokenIds:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not valid JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid JSON: {_reason(error)}") from None
    if not isinstance(values, list):
        raise ConfigError(
            f"must hold a JSON array of token ids, got {_type_name(values)}"
        )
    if not values:
        raise ConfigError("holds no token ids")
    for position, token in enumerate(values):
        # To Python, true is 1.
        if not isinstance(token, int) or isinstance(token, bool):
            raise ConfigError(
                f"token id at position {position} must be an integer, "
                f"got {_type_name(token)}"
            )
        if token < 0:
            raise ConfigError(
                f"token id at position {position} must be at least 0, got {token}"
            )
    try:
        return TokenIds.from_ids(values)
    except TokenOutOfRange as error:
        raise ConfigError(str(error)) from None


# Reading


def _read_text(path: Path) -> str:
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


def _parse(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    # Not only its own error: an integer of too many digits, tables too deep.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid TOML: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


@contextmanager
def _found_in(place: str) -> Iterator[None]:
    """Put the place before the message of a `ConfigError`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}{error}") from None


# Checking


def _check_keys(table: dict[str, object], where: str, allowed: tuple[str, ...]) -> None:
    for key in table:
        if key not in allowed:
            close = get_close_matches(key.lower(), allowed, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(
                f"{_join(where, key)} is not a setting; {hint}"
                f"allowed: {', '.join(allowed)}"
            )


def _table(parent: dict[str, object], key: str, where: str) -> dict[str, object]:
    """Return a table that may be left out."""
    table: dict[str, object] = _checked(parent.get(key, {}), dict, where)
    return table


def _texts(value: object, where: str) -> list[str]:
    items = _checked(value, list, where)
    return [_text(item, f"{where}[{index}]") for index, item in enumerate(items)]


def _text(value: object, where: str) -> str:
    return _checked(value, str, where)


def _choice(value: object, where: str, allowed: Iterable[Sharing]) -> Sharing:
    words = {sharing.value: sharing for sharing in allowed}
    if not isinstance(value, str) or value not in words:
        got = repr(value) if isinstance(value, str) else _type_name(value)
        names = " or ".join(f'"{word}"' for word in words)
        raise ConfigError(f"{where} must be {names}, got {got:.80}")
    return words[value]


def _checked(value: object, expected: type[_T], where: str) -> _T:
    if not isinstance(value, expected):
        raise ConfigError(
            f"{where} must be {_TYPE_NAMES[expected]}, got {_type_name(value)}"
        )
    return value


def _type_name(value: object) -> str:
    return _TYPE_NAMES.get(type(value), type(value).__name__)


def _join(where: str, key: str) -> str:
    """Return a dotted key as TOML would have it, quoted where it must be."""
    shown = key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else f"{json.dumps(key):.80}"
    return f"{where}.{shown}" if where else shown
