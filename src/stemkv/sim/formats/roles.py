"""The roles that fields play, and the fields that a user names for them.

Owns which roles there are, how a field is named on a command line, and whether what was
named is in the file at all. Knows no format, and shows keys of a record, never values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import ConfigError, TraceError
from .line import TIME_UNITS, Line

__all__ = ["ROLES", "MappedFields", "Place", "check_fields", "place_of"]

_NUM_KEYS = 8  # that a message lists

# What a field can be. Times take a unit: `ts:ms`.
ROLES: dict[str, str] = {
    "request_id": "name of the request",
    "arrival": "when it arrived (time)",
    "end": "when its last token was sent (time)",
    "delay": "pause after the session's earlier turn (time)",
    "think": "pause after its parent's end (time)",
    "parent": "request id of the earlier turn that it continues",
    "ends_session": "true if it said that nothing will continue its session",
    "next_use": "said: from its end until its prompt is used again (time), or never",
    "ephemeral_from": "said: the prompt token from which on it is used only once",
    "session": "conversation or agent run",
    "tenant": "who must not see other tenants' KV",
    "identity": "whatever else must be equal to share KV",
    "model": "model, part of the identity",
    "adapter": "adapter, part of the identity",
    "salt": "cache salt, part of the identity; not kept",
    "input_length": "prompt tokens",
    "output_length": "tokens generated",
    "output_limit": "most tokens to generate, where the number is not told",
    "output": "generated text, to be counted, where the number is not told",
    "units": "ids of the prompt's blocks",
    "unit_size": "tokens of such a block",
    "is_estimate": "true if lengths and block ids are estimates",
    "is_opaque": "true if nothing but the prompt's length is known",
    "tokens": "token ids of the prompt",
    "messages": "the prompt as chat messages",
    "tools": "tool schemas in front of the messages",
    "prompt": "the prompt as text, or as token ids",
    "status": "HTTP status, or a word for success or failure",
    "error": "what went wrong, if something did",
    "is_cached": "true if a cache of answers replied, so that no model ran",
    "routing_key": "a hint for routing only; counted, not used",
}
_TIMES = {"arrival", "end", "delay", "think", "next_use"}
_MAY_BE_ABSENT = {"error", "is_cached"}  # a log need not have a case of it


@dataclass(frozen=True, slots=True)
class Place:
    """Where a role's value may stand in a record."""

    path: str
    unit: str  # of a time; "": told by its look


def check_fields(fields: Mapping[str, str]) -> None:
    """Raise `ConfigError` if a role or a path of a mapping cannot be one."""
    for role, spec in fields.items():
        if role not in ROLES:
            raise ConfigError(
                f"fields: {role!r:.80} is no role of a field; there are "
                f"{', '.join(ROLES)}"
            )
        place_of(role, spec)


def place_of(role: str, spec: str) -> Place:
    """Return the place that a text names: a path, and for times `path:unit`."""
    path, colon, unit = spec.rpartition(":")
    if role not in _TIMES or not colon or "." in unit:
        path, unit = spec, ""
    elif unit not in (*TIME_UNITS, "iso"):
        raise ConfigError(
            f"fields: {role}={spec!r:.80}: the unit of a time is one of "
            f"{', '.join([*TIME_UNITS, 'iso'])}"
        )
    if not path:
        raise ConfigError(f"fields: {role}={spec!r:.80} names no field")
    return Place(path, unit)


class MappedFields:
    """Counts the lines in which the fields are that a user named."""

    def __init__(self, paths: Mapping[str, str]) -> None:
        self._paths = paths  # by role
        self._num_lines = 0
        self._present: Counter[str] = Counter()  # role → lines with the field
        self._told: Counter[str] = Counter()  # role → those in which it is not empty
        self._beside: dict[str, dict[str, None]] = {role: {} for role in paths}

    def look(self, line: Line) -> None:
        """Count one line."""
        self._num_lines += 1
        for role, path in self._paths.items():
            try:
                if line.get(path) not in (None, ""):
                    self._told[role] += 1
                elif not line.has(path):
                    self._remember_keys(line, role, path)
                    continue
            except TraceError:
                pass  # broken JSON on the way: told when the field is read
            self._present[role] += 1

    def notes(self, file: str) -> list[str]:
        """Return what is in some lines only.

        Raises `TraceError` for what is in none: whatever it was meant to tell apart
        would be thrown together.
        """
        notes = []
        for role, path in self._paths.items():
            if not self._num_lines or self._told[role] == self._num_lines:
                continue
            if self._present[role]:
                notes.append(
                    f"{role}: {path!r:.80} tells something in {self._told[role]:,} of "
                    f"{self._num_lines:,} lines"
                )
                continue
            missing = f"{path!r:.80} is in none of {self._num_lines:,} lines"
            if role not in _MAY_BE_ABSENT:
                there = ", ".join(self._beside[role]) or "nothing"
                raise TraceError(
                    f"{missing}; beside it there is {there}", file=file, field=role
                )
            notes.append(f"{role}: {missing}")
        return notes

    def _remember_keys(self, line: Line, role: str, path: str) -> None:
        beside = self._beside[role]
        level = line.level(path)
        for key in line.keys(level):
            if len(beside) >= _NUM_KEYS:
                return
            beside[f"{level}.{key}"[:80] if level else key[:80]] = None
