"""A step log on disk: JSON lines, a header and then one record a line.

Owns the form of every value, made of the dataclasses themselves, and what is said of a
line that is none. What the records mean is `measure.steplog`'s. The only module of this
layer that needs msgspec.

**A step log contains the token ids of every prompt and every output**, as base64 of int32
little-endian: whoever may not read the prompts may not read it.

Virtual ids of media are read back as spans of as many positions with a digest of their
own, because the content's digest cannot be had from its ids. Prefixes are equal after
that exactly where they were before.

Version 3 says in which order the core serves and with which costs. Earlier versions knew
one order, and version 1 one eviction policy; both decide otherwise by now, so their logs
are not read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    TextIO,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import NODEFAULT

from stemkv.core.books.cost import FittedCost, RooflineCost
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.table import BlockCopy
from stemkv.core.prefix.tokens import TOKEN_BYTES, Span, TokenIds
from stemkv.core.retention.quota import Quota, QuotaConfig
from stemkv.core.schedule.plan import Sample
from stemkv.core.schedule.request import RequestSpec
from stemkv.errors import StepLogError
from stemkv.measure.steplog import (
    CALLS,
    Abandoned,
    Call,
    Committed,
    Planned,
    PlannedChunk,
    StepLog,
    StepLogHeader,
)

__all__ = ["StepLogWriter", "read_step_log"]

_SCHEMA: Final = "stemkv.steplog/3"
_OLD_SCHEMAS: Final = ("stemkv.steplog/1", "stemkv.steplog/2")
_CONTENT: Final = "token ids of prompts and outputs"
_SPAN_START: Final = 1 << 30  # bit of ~id at the first position of a span
_NEVER: Final = "never"  # JSON has no infinity


class StepLogWriter:
    """Writes a log to a text file that somebody else opened and will close."""

    def __init__(self, file: TextIO, header: StepLogHeader) -> None:
        self._file = file
        core = _written(header.core)
        del core["books"]  # they decide nothing
        if header.core.sessions is None:
            del core["sessions"]
        document = {"schema": _SCHEMA, "contains": _CONTENT, "model": header.model}
        self._write({**document, **core, "costs": _written(header.costs)})

    def write(self, call: Call) -> None:
        """Append one call."""
        self._write(_written(call))

    def _write(self, document: dict[str, Any]) -> None:
        text = json.dumps(document, separators=(",", ":"), allow_nan=False)
        self._file.write(text + "\n")


def read_step_log(lines: Iterable[str], *, file: str) -> StepLog:
    """Read a log; `file` is what messages call it.

    Raises `StepLogError` naming file, line and field at the first line that is not
    what a writer writes. A last line that was cut short is such a line.
    """
    numbered = enumerate(lines, start=1)
    first = next(numbered, None)
    if first is None:
        raise StepLogError(f"{file}: empty; a step log begins with a header")
    header = _read_header(_parse(first[1], f"{file}:1"), f"{file}:1")
    calls: list[Call] = []
    is_pending = False
    for number, line in numbered:
        where = f"{file}:{number}"
        call = _read(_parse(line, where), _CALL, where)
        if isinstance(call, Planned | Committed | Abandoned):
            if is_pending == isinstance(call, Planned):
                expected = "its commit" if is_pending else "a plan"
                raise StepLogError(
                    f"{where}: kind: {expected} must come before {_KINDS[type(call)]}"
                )
            is_pending = not is_pending
        calls.append(call)
    return StepLog(header=header, calls=tuple(calls))


def _parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StepLogError(f"{where}: not JSON: {error}") from None


def _read_header(document: Any, where: str) -> StepLogHeader:
    schema = document.pop("schema", None) if isinstance(document, dict) else None
    if schema != _SCHEMA:
        why = ""
        if schema in _OLD_SCHEMAS:
            why = ", which does not say in which order requests were served"
        raise StepLogError(
            f"{where}: schema: must be {_SCHEMA!r}, got {schema!r:.60}{why}; record the "
            f"log with this version"
        )
    document.pop("contains", None)
    own = {name: document.pop(name) for name in ("model", "costs") if name in document}
    own["core"] = {"sessions": None, "books": None, **document}
    header: StepLogHeader = _read(own, _form(StepLogHeader), where)
    return header


# The form of values: structs made of the core's own dataclasses, field by field, so that
# a new field is in the log without a line here.

_CALLS: Final = frozenset(CALLS.values())
_KINDS: Final[dict[type, str]] = {
    **{call: kind for kind, call in CALLS.items()},
    FittedCost: "FittedCost",
    RooflineCost: "RooflineCost",
}
# Written as the list of their fields, as they come in thousands.
_ROWS: Final = {Domain, BlockCopy, PlannedChunk, Sample}


class _Hex(bytes):
    """Bytes whose form is hexadecimal text."""


class _Form(msgspec.Struct, dict=True):
    """What a line says, checked; `made` is the value of ours that it is."""

    if TYPE_CHECKING:
        made: Any
        make: Callable[..., Any]

    def __post_init__(self) -> None:
        fields = {name: _made(getattr(self, name)) for name in self.__struct_fields__}
        self.made = self.make(**fields)


def _written(value: Any) -> Any:
    """Return what JSON can hold of a value."""
    kind = type(value)
    if kind in _ROWS:
        return [_written(getattr(value, f.name)) for f in fields(kind)]
    if value == NO_HINTS:
        return None  # as of most requests
    if is_dataclass(value):
        tag = {"kind": _KINDS[kind]} if kind in _KINDS else {}
        own = {
            f.name: _written(getattr(value, f.name))
            for f in fields(value)
            # What has a default in a call is seldom there.
            if kind not in _CALLS or getattr(value, f.name) != f.default
        }
        if own.get("next_use_s") == math.inf:
            own["next_use_s"] = _NEVER
        return tag | own
    match value:
        case Enum():
            return value.value
        case bytes():
            return value.hex()
        case TokenIds():
            return base64.b64encode(value.buffer).decode("ascii")
        case tuple():
            return [_written(each) for each in value]
        case frozenset():
            return sorted(value)
        case Mapping() if all(isinstance(key, str) for key in value):
            return {key: _written(each) for key, each in value.items()}
        case Mapping():
            return [[_written(key), _written(each)] for key, each in value.items()]
    return value


def _read(document: Any, form: Any, where: str) -> Any:
    try:
        return _made(msgspec.convert(document, form, dec_hook=_leaf))
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        field = path.strip(".`").removeprefix("core.")  # which no line has
        what = f"{field}: {problem}" if field else problem
        raise StepLogError(f"{where}: {what}") from None


def _made(value: Any) -> Any:
    """Return the value of ours in place of its form."""
    match value:
        case _Form():
            return value.made
        case tuple():
            return tuple(map(_made, value))
        case dict():
            return {key: _made(each) for key, each in value.items()}
    return value


@cache
def _form(kind: Any) -> Any:
    """Return the type that is read where a value of `kind` is wanted."""
    if kind in _LEAVES:
        return _LEAVES[kind]
    if is_dataclass(kind):
        assert isinstance(kind, type), "no instance of one"
        return _form_of(kind)
    parts = get_args(kind)
    origin = get_origin(kind)
    if origin is Mapping and parts[0] is Domain:
        pair: Any = tuple[_form(Domain), _form(parts[1])]  # type: ignore[misc]
        return tuple[pair, ...]
    if origin is UnionType:
        return reduce(or_, map(_form, parts))
    return origin[tuple(map(_form, parts))] if origin else kind


def _form_of(kind: type) -> Any:
    hints = get_type_hints(kind)
    form = msgspec.defstruct(
        kind.__name__,
        [
            (
                f.name,
                _FIELDS.get((kind, f.name)) or _form(hints[f.name]),
                f.default if kind in _CALLS and f.default is not MISSING else NODEFAULT,
            )
            for f in fields(kind)
        ],
        bases=(_Form,),
        namespace={"make": staticmethod(_MAKERS.get(kind, kind))},
        tag=_KINDS.get(kind),
        tag_field="kind" if kind in _KINDS else None,
        array_like=kind in _ROWS,
        forbid_unknown_fields=True,
    )
    return form | None if kind is Hints else form


def _leaf(kind: type, value: Any) -> Any:
    """Return a value of a type that only we know."""
    if not isinstance(value, str):
        raise ValueError(f"must be text, got {value!r:.60}")
    if kind is _Hex:
        return _Hex(bytes.fromhex(value))
    assert kind is TokenIds, "there are two"
    return _tokens(value)


def _tokens(text: str) -> TokenIds:
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"must be base64 of int32 token ids ({error})") from None
    if len(data) % TOKEN_BYTES or data[3::TOKEN_BYTES].isascii():
        return TokenIds(data)  # text only; or it says what is wrong
    return TokenIds.from_parts(_parts(data))


def _parts(data: bytes) -> Iterable[TokenIds | Span]:
    """Cut a buffer with virtual ids into runs of text and spans."""
    ids = array("i", data)
    if sys.byteorder == "big":
        ids.byteswap()
    start = 0
    for end in range(1, len(ids) + 1):
        is_inside = end < len(ids) and (ids[end] < 0) == (ids[start] < 0)
        if is_inside and not (ids[end] < 0 and ~ids[end] & _SPAN_START):
            continue
        run = data[start * TOKEN_BYTES : end * TOKEN_BYTES]
        if ids[start] < 0:
            yield Span(digest=hashlib.sha256(run).digest(), num_tokens=end - start)
        else:
            yield TokenIds(run)
        start = end


def _spec(*, hints: Hints | None, **others: Any) -> RequestSpec:
    return RequestSpec(hints=hints or NO_HINTS, **others)


def _hints(*, next_use_s: float | str | None, **others: Any) -> Hints:
    never = next_use_s == _NEVER
    return Hints(next_use_s=math.inf if never else next_use_s, **others)  # type: ignore[arg-type]


def _quotas(*, quotas: tuple[tuple[Domain, Quota], ...], **others: Any) -> QuotaConfig:
    by_domain = dict(quotas)
    if len(by_domain) < len(quotas):
        raise ValueError("quotas: must name a domain once")
    return QuotaConfig(quotas=by_domain, **others)


_FINITE: Final = Annotated[
    float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)
]
_LEAVES: Final[dict[Any, Any]] = {
    bytes: _Hex,
    float: _FINITE,
    int: Annotated[int, msgspec.Meta(ge=0)],
}
# Where the form is not what the type says: a sampled token may be anything, and JSON has
# no infinity.
_FIELDS: Final[dict[tuple[type, str], Any]] = {
    (Sample, "token"): int,
    (Hints, "next_use_s"): _FINITE | Literal["never"] | None,
}
_MAKERS: Final[dict[type, Callable[..., Any]]] = {
    RequestSpec: _spec,
    Hints: _hints,
    QuotaConfig: _quotas,
}
_CALL: Final = reduce(or_, map(_form, get_args(Call)))
