"""The operator's settings file: who shares with whom, what is public, what is kept.

Owns the TOML (see `docs/sharing.md`) and every sentence about what is wrong with it.
Knows nothing of tokenizers: whoever serves turns public texts into tokens.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stemkv.cli.documents import (
    check_keys,
    checked,
    found_in,
    joined,
    parse_json,
    read_text,
    reason_of,
    type_name,
)
from stemkv.cli.memory import MemorySettings, read_memory
from stemkv.core.prefix.sharing import Sharing, SharingPolicy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.errors import ConfigError, TokenOutOfRange

__all__ = ["PublicPrefix", "Settings", "read_settings"]

_SOURCES: Final = ("text", "text_file", "messages", "tokens_file")
_OF_TENANTS: Final = (Sharing.PRIVATE, Sharing.NONE)


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
    memory: MemorySettings = field(default_factory=MemorySettings)

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
    with found_in(f"{path}: "):
        document = _parse(read_text(path))
        check_keys(document, "", ("sharing", "public", "eviction", "quotas"))
        sharing = _sharing(_table(document, "sharing", "sharing"))
        entries = document.get("public", [])
        if isinstance(entries, dict):
            raise ConfigError("public must be an array of tables; write [[public]]")
        public = [
            _public_prefix(checked(entry, dict, f"public[{i}]"), f"public[{i}]", path)
            for i, entry in enumerate(checked(entries, list, "public"))
        ]
        memory = read_memory(document, path.parent)
        if memory.quotas is not None:
            memory.quotas.check(sharing)
        return Settings(sharing=sharing, public=tuple(public), memory=memory)


def _sharing(table: dict[str, object]) -> SharingPolicy:
    check_keys(table, "sharing", ("default", "groups", "tenants", "classes"))
    groups = {
        name: frozenset(_texts(members, joined("sharing.groups", name)))
        for name, members in _table(table, "groups", "sharing.groups").items()
    }
    tenants = {
        name: _choice(value, joined("sharing.tenants", name), _OF_TENANTS)
        for name, value in _table(table, "tenants", "sharing.tenants").items()
    }
    classes = {
        name: _choice(value, joined("sharing.classes", name), tuple(Sharing))
        for name, value in _table(table, "classes", "sharing.classes").items()
    }
    default = table.get("default", Sharing.PRIVATE.value)
    with found_in("sharing."):
        return SharingPolicy(
            groups=groups,
            tenants=tenants,
            classes=classes,
            default=_choice(default, "default", _OF_TENANTS),
        )


def _public_prefix(entry: dict[str, object], where: str, path: Path) -> PublicPrefix:
    check_keys(entry, where, ("name", *_SOURCES))
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
    with found_in(f"{where}."):
        match source:
            case "text":
                return PublicPrefix(name=name, text=_text(value, source))
            case "messages":
                return PublicPrefix(name=name, messages=_messages(value, source))
    file = path.parent / _text(value, key)
    with found_in(f"{key}: {file}: "):
        text = read_text(file)
        if not text:
            raise ConfigError("the file is empty")
        if source == "text_file":
            return PublicPrefix(name=name, text=text)
        return PublicPrefix(name=name, token_ids=_token_ids(text))


def _messages(value: object, where: str) -> tuple[dict[str, str], ...]:
    messages = []
    for index, item in enumerate(checked(value, list, where)):
        key = f"{where}[{index}]"
        message = checked(item, dict, key)
        check_keys(message, key, ("role", "content"))
        for part in ("role", "content"):
            if part not in message:
                raise ConfigError(f"{key}.{part} is missing")
        messages.append({k: _text(v, f"{key}.{k}") for k, v in message.items()})
        if not messages[-1]["role"]:
            raise ConfigError(f"{key}.role must not be empty")
    return tuple(messages)


def _token_ids(text: str) -> TokenIds:
    values = parse_json(text)
    if not isinstance(values, list):
        raise ConfigError(
            f"must hold a JSON array of token ids, got {type_name(values)}"
        )
    if not values:
        raise ConfigError("holds no token ids")
    for position, token in enumerate(values):
        # To Python, true is 1.
        if not isinstance(token, int) or isinstance(token, bool):
            raise ConfigError(
                f"token id at position {position} must be an integer, "
                f"got {type_name(token)}"
            )
        if token < 0:
            raise ConfigError(
                f"token id at position {position} must be at least 0, got {token}"
            )
    try:
        return TokenIds.from_ids(values)
    except TokenOutOfRange as error:
        raise ConfigError(str(error)) from None


def _parse(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    # Not only its own error: an integer of too many digits, tables too deep.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid TOML: {reason_of(error)}") from None


def _table(parent: dict[str, object], key: str, where: str) -> dict[str, object]:
    """Return a table that may be left out."""
    table: dict[str, object] = checked(parent.get(key, {}), dict, where)
    return table


def _texts(value: object, where: str) -> list[str]:
    items = checked(value, list, where)
    return [_text(item, f"{where}[{index}]") for index, item in enumerate(items)]


def _text(value: object, where: str) -> str:
    return checked(value, str, where)


def _choice(value: object, where: str, allowed: Iterable[Sharing]) -> Sharing:
    words = {sharing.value: sharing for sharing in allowed}
    if not isinstance(value, str) or value not in words:
        got = repr(value) if isinstance(value, str) else type_name(value)
        names = " or ".join(f'"{word}"' for word in words)
        raise ConfigError(f"{where} must be {names}, got {got:.80}")
    return words[value]
