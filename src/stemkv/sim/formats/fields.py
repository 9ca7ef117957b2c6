"""Records whose requests can be read field by field.

Owns what follows from the roles that fields play (`roles`: arrival, prompt, tenant, …).
Most formats are nothing but a mapping from roles to field names, and so is whatever a
user maps himself.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from ..units import ForeignUnits, UnitTable
from .draft import Draft, DraftRequest, check_unit_count
from .line import Line, unit_of
from .prompt import TextCut, cut_tokens, render_chat
from .roles import MappedFields, Place, place_of

__all__ = [
    "DEFAULT_UNIT_SIZE",
    "MAX_UNIT_SIZE",
    "NEVER",
    "FieldReader",
    "Layout",
    "identity_of",
]

DEFAULT_UNIT_SIZE = 16  # tokens; the block of most engines
MAX_UNIT_SIZE = 2**20  # tokens; what is larger is no size of a block
NEVER = "never"  # a declared next use that will not come
_MAX_TOKEN = 2**31
_DAY_NS = 86_400 * 10**9

_FAILURES = {"cancelled", "error", "failed", "failure", "timeout"}
_NO_PARENT = {"-1", "none", "null"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A format that is read field by field."""

    name: str
    description: str
    recognises: Callable[[Line], bool]
    # Role → where it may stand; the first that is there counts.
    fields: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unit_size: int = DEFAULT_UNIT_SIZE
    redacted: str | None = None  # a message text that stands for text left out
    notes: tuple[str, ...] = ()
    # Arrivals have a name under which others write seconds, with a point.
    is_time_doubtful: bool = False


class FieldReader:
    """Reads one file's records into a draft."""

    def __init__(
        self,
        layout: Layout,
        draft: Draft,
        *,
        fields: Mapping[str, str],
        unit_size: int | None,
        cut: TextCut,
    ) -> None:
        self._layout = layout
        self._draft = draft
        self._places = _places(layout, fields)
        self._mapped = MappedFields(
            {role: self._places[role][0].path for role in fields}
        )
        self._doubtful_span: tuple[int, int] | None = None  # of times with a point, ns
        self._is_in_doubt = layout.is_time_doubtful and "arrival" not in fields
        self._given_unit_size = unit_size
        self._cut = cut
        self._table = UnitTable()
        self._foreign = ForeignUnits(self._table)
        self._salts: dict[str, int] = {}
        self._last_turn: dict[str, int] = {}  # session → its last request
        self._routing_keys: set[str] = set()
        self._counts = [0, 0, 0]  # requests, our tokens, the log's, where they differ

    def read(self, line: Line) -> None:
        """Add the record's request; raises `TraceError` if it is a bad line."""
        if not isinstance(line.data, dict):
            raise line.error("", "expected an object with fields")
        self._mapped.look(line)
        if self._was_not_computed(line):
            return
        # Names before lengths, so that a line that is left out uses up no ids.
        session = self._text(line, "session")
        arrival = self._time(line, "arrival")
        parent, think = self._turn(line, session=session, arrival=arrival)
        end = self._time(line, "end")
        request = DraftRequest(
            line=line.number,
            request_id=self._text(line, "request_id"),
            arrival_ns=arrival,
            tenant=self._text(line, "tenant"),
            identity=self._identity(line),
            session=session,
            parent_id=self._parent_id(line),
            parent_index=parent,
            think_ns=think,
            service_ns=end - arrival if end and arrival and end > arrival else None,
            output_length=self._output_length(line),
            input_length=0,
            units=array("i"),
            ends_session=self._is_true(line, "ends_session"),
            next_use_s=self._next_use(line),
            ephemeral_from=self._count(line, "ephemeral_from")[0],
        )
        unit_size = self._unit_size(line)
        self._fill(request, line, unit_size)
        self._draft.unit_size = unit_size
        self._doubt(line, arrival)
        if self._is_true(line, "is_estimate"):
            self._draft.is_exact = False
        if key := self._text(line, "routing_key"):
            self._routing_keys.add(key)
        number = self._draft.add(request)
        if session is not None:
            self._last_turn[session] = number

    def finish(self) -> None:
        """Say what was seen in the file as a whole.

        Raises `TraceError` if a field that the user named is in no line: what it was
        meant to tell apart would be thrown together.
        """
        notes = self._draft.notes
        notes += self._mapped.notes(self._draft.file)
        if self._is_in_doubt and self._doubtful_span is not None:
            first, last = self._doubtful_span
            if first < last and (last - first) * 1000 < _DAY_NS:
                notes.append(
                    f"times with a point, read as milliseconds: all arrivals are within "
                    f"{(last - first) / 1e9:,.3f} s; if they are in seconds, say so with "
                    f"--map arrival=timestamp:s"
                )
        notes += self._layout.notes
        if self._foreign.num_rechained:
            notes.append(
                f"units do not chain: {self._foreign.num_rechained:,} times an id "
                f"stands behind another one than before; such a unit counts as "
                f"different, as KV depends on all tokens before it"
            )
        num, ours, logged = self._counts
        if num:
            notes.append(
                f"{num:,} requests have {logged:,} prompt tokens by the log and "
                f"{ours:,} by our count of {self._cut.name}; shares here are of ours"
            )
        if self._routing_keys:
            notes.append(
                f"{len(self._routing_keys):,} routing keys (prompt_cache_key) seen; "
                f"they steer where a request goes, not what it may share"
            )

    # What happened to the request

    def _was_not_computed(self, line: Line) -> bool:
        status, path = self._find(line, "status")
        if isinstance(status, str) and len(status) == 3 and status.isdecimal():
            status = int(status)
        failed = (isinstance(status, int) and status >= 400) or (
            isinstance(status, str) and status.lower() in _FAILURES
        )
        error, _ = self._find(line, "error")
        if failed or error not in (None, "", {}, [], False):
            self._draft.count("failed requests, left out", line)
            return True
        if self._is_true(line, "is_cached"):
            _, path = self._find(line, "is_cached")
            self._draft.count(
                f"answered by a cache of answers ({path}), left out: no model ran", line
            )
            return True
        return False

    # Where it belongs

    def _identity(self, line: Line) -> str:
        if (whole := self._text(line, "identity")) is not None:
            return whole
        salt = self._text(line, "salt")
        if salt is not None:
            # Salts are secrets: what remains of one is when it was first seen.
            salt = str(self._salts.setdefault(salt, len(self._salts) + 1))
        return identity_of(
            model=self._text(line, "model"),
            adapter=self._text(line, "adapter"),
            salt=salt,
        )

    def _parent_id(self, line: Line) -> str | None:
        parent = self._text(line, "parent")
        return None if parent is None or parent.lower() in _NO_PARENT else parent

    def _turn(
        self, line: Line, *, session: str | None, arrival: int | None
    ) -> tuple[int | None, int | None]:
        """Return the earlier turn's number and the pause after it, where told."""
        think = self._time(line, "think")
        if "delay" not in self._places or session is None:
            return None, think
        before = self._last_turn.get(session)
        delay = self._time(line, "delay")
        if before is None or (delay is None and arrival is not None):
            return None, think
        return before, delay or 0

    def _next_use(self, line: Line) -> float | None:
        """Return the pause that was declared, in seconds; inf where it says never."""
        value, _ = self._find(line, "next_use")
        if value == NEVER:
            return math.inf
        told = self._time(line, "next_use")
        return None if told is None else told / 1e9

    # Lengths and content

    def _unit_size(self, line: Line) -> int:
        own, path = self._count(line, "unit_size")
        if own is not None and not 1 <= own <= MAX_UNIT_SIZE:
            raise line.error(path, f"must be from 1 to {MAX_UNIT_SIZE:,}, got {own:,}")
        size = own or self._given_unit_size or self._layout.unit_size
        before = self._draft.unit_size
        if before is not None and size != before:
            raise line.error(
                path or "unit_size",
                f"{size} differs from the {before} before; a trace has one unit size",
            )
        if own is not None and self._given_unit_size not in (None, own):
            self._draft.count(
                f"the file says unit_size {own}, which overrides the one given", line
            )
        return size

    def _fill(self, request: DraftRequest, line: Line, unit_size: int) -> None:
        """Say how long the prompt is and what is known of it."""
        logged, where = self._count(line, "input_length")
        ours, units = None, None
        if not self._is_true(line, "is_opaque"):
            ours, units = self._units(line, unit_size, logged=logged)
        if ours is None:
            if logged is None:
                raise line.error(
                    "", f"none of its fields tells the prompt{self._hint()}"
                )
            if logged == 0:
                raise line.error(where, "a prompt has at least 1 token, got 0")
            self._draft.count(
                "only lengths are known: such a request counts as sharing nothing, so "
                "hit rates are lower bounds",
                line,
            )
            request.is_opaque = True
            request.input_length = logged
            request.units = self._table.fresh(logged // unit_size)
            return
        if ours == 0:
            raise line.error(where, "the prompt is empty")
        if logged is not None and logged != ours:
            self._counts[0] += 1
            self._counts[1] += ours
            self._counts[2] += logged
        assert units is not None, "a counted prompt has units"
        request.input_length, request.units = ours, units

    def _units(
        self, line: Line, unit_size: int, *, logged: int | None
    ) -> tuple[int | None, array[int] | None]:
        value, path = self._find(line, "units")
        if value is not None:
            if logged is None:
                raise line.error("input_length", "missing, while units are listed")
            if isinstance(value, list) and value and isinstance(value[0], str):
                return logged, self._named_units(line, path, value, unit_size, logged)
            ids = line.integers(path) or []
            check_unit_count(
                line,
                path,
                num_units=len(ids),
                unit_size=unit_size,
                input_length=logged,
            )
            return logged, self._foreign.chain(ids)
        value, path = self._find(line, "tokens")
        if value is not None:
            return self._of_tokens(line, path, unit_size)
        value, path = self._find(line, "messages")
        if value is not None:
            return self._of_messages(line, path, value, unit_size)
        value, path = self._find(line, "prompt")
        if value is None:
            return None, None
        if isinstance(value, list):
            if len(value) == 1 and isinstance(value[0], str):
                return self._of_text(line, value[0], unit_size)
            return self._of_tokens(line, path, unit_size)
        if not isinstance(value, str):
            raise line.error(path, "expected text or token ids")
        return self._of_text(line, value, unit_size)

    def _named_units(
        self, line: Line, path: str, names: list[object], unit_size: int, logged: int
    ) -> array[int]:
        check_unit_count(
            line,
            path,
            num_units=len(names),
            unit_size=unit_size,
            input_length=logged,
        )
        contents = []
        for name in names:
            if not isinstance(name, str):
                raise line.error(path, "expected ids that are all text")
            contents.append(name.encode())
        return self._table.chain(contents)

    def _of_tokens(
        self, line: Line, path: str, unit_size: int
    ) -> tuple[int, array[int]]:
        ids = line.integers(path) or []
        if ids and not 0 <= min(ids) <= max(ids) < _MAX_TOKEN:
            raise line.error(path, f"token ids must be in [0, {_MAX_TOKEN})")
        return len(ids), self._table.chain(cut_tokens(ids, unit_size))

    def _of_messages(
        self, line: Line, path: str, value: object, unit_size: int
    ) -> tuple[int | None, array[int] | None]:
        if line.is_csv and isinstance(value, str) and value[:1] == "[":
            value = line.unpacked(path, value)
        if isinstance(value, str) and self._layout.redacted is not None:
            # A gateway logs the text of a completion under the same name.
            if value == self._layout.redacted:
                return None, None
            return self._of_text(line, value, unit_size)
        if not isinstance(value, list) or not value:
            raise line.error(path, "expected a list of messages")
        for i, message in enumerate(value):
            if not isinstance(message, dict) or not isinstance(
                message.get("role"), str
            ):
                raise line.error(f"{path}.{i}", "expected a message with a role")
            redacted = self._layout.redacted
            if redacted is not None and message.get("content") == redacted:
                self._draft.count("the gateway left the prompt's text out", line)
                return None, None
        tools, _ = self._find(line, "tools")
        text, num_other = render_chat(value, tools=tools)
        if num_other:
            self._draft.count(
                "with images, audio or files, which count as few tokens", line
            )
        if self._cut.needs_template:
            self._draft.is_exact = False
        return self._of_text(line, text, unit_size)

    def _of_text(self, line: Line, text: str, unit_size: int) -> tuple[int, array[int]]:
        if not self._cut.is_exact:
            self._draft.is_exact = False
        self._draft.count(f"prompts of text, in tokens of {self._cut.name}", line)
        num_tokens, contents = self._cut.cut(text, unit_size)
        return num_tokens, self._table.chain(contents)

    def _output_length(self, line: Line) -> int:
        told, _ = self._count(line, "output_length")
        if told is not None:
            return told
        text, _ = self._find(line, "output")
        if isinstance(text, str):
            return self._cut.cut(text, self._layout.unit_size)[0]
        limit, path = self._count(line, "output_limit")
        if limit is not None:
            self._draft.count(f"output length taken from its limit ({path})", line)
            return limit
        self._draft.count("output length not told, taken as 1", line)
        return 1

    def _hint(self) -> str:
        roles = ("units", "tokens", "messages", "prompt", "input_length")
        looked = [place.path for role in roles for place in self._places.get(role, ())]
        return f"; looked for {', '.join(looked[:8])}" if looked else ""

    def _doubt(self, line: Line, arrival: int | None) -> None:
        """Watch whether all arrivals could as well be seconds."""
        if not self._is_in_doubt or arrival is None:
            return
        value, _ = self._find(line, "arrival")
        if not isinstance(value, float):
            self._is_in_doubt = False
            return
        first, last = self._doubtful_span or (arrival, arrival)
        self._doubtful_span = min(first, arrival), max(last, arrival)

    # Looking things up

    def _find(self, line: Line, role: str) -> tuple[object, str]:
        """Return the first value there is for a role, and its path."""
        path = ""
        for place in self._places.get(role, ()):
            path = path or place.path
            value = line.get(place.path)
            if value is not None:
                return value, place.path
        return None, path or role

    def _is_true(self, line: Line, role: str) -> bool:
        value, _ = self._find(line, role)
        return value is True or (line.is_csv and str(value).lower() == "true")

    def _text(self, line: Line, role: str) -> str | None:
        for place in self._places.get(role, ()):
            value = line.text(place.path)
            if value is not None:
                return value
        return None

    def _count(self, line: Line, role: str) -> tuple[int | None, str]:
        for place in self._places.get(role, ()):
            value = line.count(place.path)
            if value is not None:
                return value, place.path
        return None, self._find(line, role)[1]

    def _time(self, line: Line, role: str) -> int | None:
        for place in self._places.get(role, ()):
            value = line.nanoseconds(place.path, place.unit)
            if value is None:
                continue
            if role == "arrival" and not place.unit:
                number = line.get(place.path)
                if isinstance(number, int | float):
                    unit = unit_of(number)
                    self._draft.count(
                        f"{place.path} names no unit, read as {unit}", line
                    )
            return value
        return None


def identity_of(**parts: str | None) -> str:
    """Return what must be equal to share KV as one text; different parts, different text."""
    return "&".join(
        f"{name}={quote(value, safe='/:.@+ ')}"
        for name, value in parts.items()
        if value is not None
    )


def _places(layout: Layout, fields: Mapping[str, str]) -> dict[str, tuple[Place, ...]]:
    places = {
        role: tuple(place_of(role, spec) for spec in specs)
        for role, specs in layout.fields.items()
    }
    places.update((role, (place_of(role, spec),)) for role, spec in fields.items())
    return places
