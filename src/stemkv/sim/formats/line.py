"""One record of a trace file: typed fields, and errors that say where they stand.

Owns what counts as a number, a time, a text, and how a field inside a record is named
(dotted paths). Knows no format.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

import msgspec

from ...errors import TraceError

__all__ = ["MAX_COUNT", "TIME_UNITS", "Line", "Value", "unit_of"]

# Decoded JSON, or a cell of a CSV file. Recursive; `object` says the same to mypy.
Value = object

TIME_UNITS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}  # nanoseconds

MAX_COUNT = 2**27  # tokens of a prompt or an answer; above any model's context
_MAX_TIME = 2**63  # nanoseconds; as an epoch in the year 2262

# A number without a unit is a count of seconds, unless it can only be an epoch: since
# 1973 an epoch in ms, us or ns is beyond these, and one in s is below for 3,000 years.
_EPOCHS = ((10**17, "ns"), (10**14, "us"), (10**11, "ms"))

_ISO_FRACTION = re.compile(r"(.*\d\d:\d\d:\d\d)[.,](\d+)(.*)", re.S)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Line:
    """One record, and the place in its file that errors name.

    `number` is the line, or the item when the file is one JSON document. Values of a
    CSV file have no types, so numbers are read out of their text.
    """

    __slots__ = ("_data", "_fault", "_is_decoded", "file", "is_csv", "number", "raw")

    def __init__(
        self,
        file: str,
        number: int,
        raw: bytes = b"",
        *,
        cells: dict[str, Value] | None = None,
        fault: str = "",
    ) -> None:
        self.file = file
        self.number = number
        self.raw = raw
        self.is_csv = cells is not None
        self._data: Value = cells
        self._fault = fault  # why it cannot be read, if that is known
        self._is_decoded = cells is not None

    @property
    def data(self) -> Value:
        """The record, decoded once."""
        if self._fault:
            raise self.error("", self._fault)
        if not self._is_decoded:
            try:
                self._data = msgspec.json.decode(self.raw)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise self.error("", f"not a JSON value: {error}") from None
            self._is_decoded = True
        return self._data

    def fault(self) -> TraceError | None:
        """Return why the record as a whole cannot be read; `None` if it can."""
        try:
            _ = self.data
        except TraceError as error:
            return error
        return None

    def error(self, field: str, message: str) -> TraceError:
        """Return the error for a field of this record; "" is the record as a whole."""
        return TraceError(message, file=self.file, line=self.number, field=field)

    def get(self, path: str) -> Value:
        """Return the value at a dotted path; `None` if absent, null or an empty cell.

        Steps are keys of objects and indices of arrays. A text that holds JSON, as
        gateways write into a column, is entered like the object in it.
        """
        here = self.data
        if isinstance(here, dict) and path in here:
            found = here[path]
            return None if found == "" and self.is_csv else found
        holder: Value = None
        step: str | int = ""
        for name in path.split("."):
            if isinstance(here, str) and here[:1] in ("{", "["):
                here = self.unpacked(path, here)
                if isinstance(holder, dict | list):
                    holder[step] = here  # type: ignore[index]  # step fits its holder
            holder = here
            if isinstance(here, dict):
                step = name
                here = here.get(name)
            elif isinstance(here, list) and _is_index(name, len(here)):
                step = int(name)
                here = here[step]
            else:
                return None
        return None if here == "" and self.is_csv else here

    def has(self, path: str) -> bool:
        """Whether there is something at a path, be it null or an empty cell."""
        if self.get(path) is not None:
            return True
        data = self.data
        above, _, name = path.rpartition(".")
        return (isinstance(data, dict) and path in data) or (
            self.level(path) == above and name in self.keys(above)
        )

    def level(self, path: str) -> str:
        """Return the path of the deepest object on the way to a path; "": the record."""
        level = path
        while level:
            level = level.rpartition(".")[0]
            if self.keys(level):
                break
        return level

    def keys(self, path: str) -> list[str]:
        """Return the keys of the object at a path; "" is the record itself."""
        value = self.get(path) if path else self.data
        if isinstance(value, str) and value[:1] == "{":
            value = self.unpacked(path, value)
        return list(value) if isinstance(value, dict) else []

    def unpacked(self, path: str, text: str) -> Value:
        """Return the JSON value that a text at a path holds."""
        try:
            return msgspec.json.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self.error(path, f"not a JSON value: {error}") from None

    def text(self, path: str) -> str | None:
        """Return a name: text that is not empty, or a number written out."""
        value = self.get(path)
        if value is None or value == "":
            return None
        if isinstance(value, str):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        raise self.error(path, f"expected text, got {_shown(value)}")

    def count(self, path: str) -> int | None:
        """Return a whole number from 0 to `MAX_COUNT`."""
        number = self._number(path)
        if number is None:
            return None
        if number < 0 or number != int(number):
            raise self.error(path, f"expected a count of at least 0, got {number}")
        if number > MAX_COUNT:
            raise self.error(
                path, f"expected a count of at most {MAX_COUNT:,}, got {number:,}"
            )
        return int(number)

    def integers(self, path: str) -> list[int] | None:
        """Return a list of integers of any size."""
        value = self.get(path)
        if self.is_csv and isinstance(value, str):
            value = self.unpacked(path, value)
        if value is None:
            return None
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            raise self.error(path, f"expected a list of integers, got {_shown(value)}")
        return value

    def nanoseconds(self, path: str, unit: str) -> int | None:
        """Return a time; `unit` is s, ms, us, ns, iso, or "" to tell by its look.

        Without a unit, text is ISO 8601 (UTC where it names no zone) and a number is
        in seconds unless only an epoch in ms, us or ns can be that large.
        """
        value = self.get(path)
        if value is None:
            return None
        number = value
        if isinstance(value, str):
            number = self._parsed(value)
            if number is None or unit == "iso":
                if unit in TIME_UNITS:
                    raise self.error(path, f"expected a number, got {_shown(value)}")
                return self._iso(path, value)
        if unit == "iso":
            raise self.error(path, f"expected an ISO 8601 time, got {_shown(value)}")
        number = self._checked(path, number)
        if number < 0:
            raise self.error(path, f"expected a time of at least 0, got {number}")
        time = round(number * TIME_UNITS[unit or unit_of(number)])
        if time >= _MAX_TIME:
            raise self.error(
                path, f"expected a time before the year 2262, got {number}"
            )
        return time

    def _iso(self, path: str, value: str) -> int:
        fraction = ""
        if found := _ISO_FRACTION.fullmatch(value):
            value, fraction = found[1] + found[3], found[2]
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            raise self.error(
                path, f"neither a number nor an ISO 8601 time: {_shown(value)}"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        # The ends of the calendar are what logs write for "never".
        since = moment - _EPOCH
        if not 0 <= since.days < _MAX_TIME // (86_400 * 10**9):
            raise self.error(
                path, f"expected a time from 1970 to 2262, got the year {moment.year}"
            )
        seconds = since.days * 86_400 + since.seconds
        return seconds * 10**9 + int(fraction[:9].ljust(9, "0"))

    def _number(self, path: str) -> int | float | None:
        value = self.get(path)
        if value is None:
            return None
        if self.is_csv and isinstance(value, str):
            value = self._parsed(value)
            if value is None:
                raise self.error(path, f"expected a number: {_shown(self.get(path))}")
        return self._checked(path, value)

    def _parsed(self, value: str) -> int | float | None:
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            return None

    def _checked(self, path: str, value: Value) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(path, f"expected a number, got {_shown(value)}")
        if not -_MAX_TIME < value < _MAX_TIME:  # nor is it NaN
            raise self.error(
                path, f"expected a number below 2**63, got {_shown(value)}"
            )
        return value


def unit_of(number: int | float) -> str:
    """Return the unit that a time without one is read in."""
    return next((unit for least, unit in _EPOCHS if number >= least), "s")


def _is_index(name: str, length: int) -> bool:
    return name.isdecimal() and len(name) < 10 and int(name) < length


def _shown(value: Value) -> str:
    # Never the value itself: it may be the text of a prompt.
    match value:
        case int() if abs(value) >= _MAX_TIME:
            return f"an integer of {value.bit_length()} bits"
        case bool() | int() | float() | None:
            return repr(value)
        case str():
            return f"text of {len(value)} characters"
        case list():
            return f"a list of {len(value)}"
        case _:
            return "an object"
