"""Other people's traces and logs, read into one form.

Owns which formats there are and how one is told from another. A format is a module of
its own; what formats have in common is in `line` (typed fields), `source` (files),
`draft` (what becomes of records), `roles` and `fields` (what fields play) and `prompt`
(text).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

from ...errors import ConfigError, TraceError
from ..trace import Trace
from . import (
    bailian,
    chat,
    events,
    hashed,
    lengths,
    litellm,
    lmcache,
    mapped,
    mooncake,
    token_ids,
    weka,
)
from .draft import Draft
from .fields import MAX_UNIT_SIZE, FieldReader, Layout
from .line import Line
from .prompt import text_cut
from .roles import ROLES, check_fields
from .source import Progress, Source

__all__ = ["FORMATS", "ROLES", "read_trace"]

# In the order in which they are tried: what looks like two is the earlier one.
_LAYOUTS: tuple[Layout, ...] = (
    bailian.LAYOUT,
    hashed.LAYOUT,
    mooncake.LAYOUT,
    litellm.LAYOUT,
    chat.LAYOUT,
    token_ids.LAYOUT,
    lmcache.LAYOUT,
    lengths.AZURE,
    lengths.BURSTGPT,
    mapped.LAYOUT,
)
_RECOGNISERS: tuple[tuple[str, Callable[[Line], bool]], ...] = (
    (events.NAME, events.recognises),
    (weka.NAME, weka.recognises),
    *((layout.name, layout.recognises) for layout in _LAYOUTS),
)
# Name → what its records look like, for people.
FORMATS: Mapping[str, str] = {
    events.NAME: events.DESCRIPTION,
    weka.NAME: weka.DESCRIPTION,
    **{layout.name: layout.description for layout in _LAYOUTS},
}

_SAMPLE = 20  # records that detection looks at
_MAX_SPREAD_S = 1e9  # about 30 years
_CONTENT = {"units", "tokens", "messages", "prompt", "input_length"}


class _Reader(Protocol):
    def read(self, line: Line) -> None: ...
    def finish(self) -> None: ...


def read_trace(
    path: str | Path,
    *,
    format: str | None = None,
    fields: Mapping[str, str] | None = None,
    unit_size: int | None = None,
    tokens: str | None = None,
    is_strict: bool = False,
    limit: int | None = None,
    progress: Progress | None = None,
    session_spread_s: float = 86_400.0,
    seed: int = 0,
) -> Trace:
    """Read a trace; nothing of any text in it is kept.

    Args:
        path: A file, plain or compressed with gzip or zstd; "-" is standard input.
        format: A key of `FORMATS`; `None` tells it by the first records.
        fields: Role → dotted path, for what the format does not know or reads
            elsewhere. The roles are in `ROLES`. A time takes a unit: "meta.ts:ms".
        unit_size: Tokens per unit. Overrides the format's, not a record's own.
        tokens: How text becomes tokens: "chars4" (estimate, the default), "words", or
            the path of a tokenizer.json.
        is_strict: Raise at the first bad line, which is left out otherwise.
        limit: Read no more than so many requests.
        progress: Called with bytes read and the file's size (`None` for a pipe).
        session_spread_s: Sessions without a common clock start uniformly in so many
            seconds, drawn with `seed`.

    Raises:
        TraceError: The file cannot be read, its format not be told, or no request is
            left; a field that `fields` names is in no line; there are more units
            than ids. With `is_strict`, also any bad line.
        ConfigError: An argument is outside its range.
    """
    fields = dict(fields or {})
    _check(format, unit_size, limit, session_spread_s)
    check_fields(fields)
    source = Source(path, progress=progress)
    lines = source.lines()
    sample = list(islice(lines, _SAMPLE))
    name = format or _detected(source.file, sample, fields)
    draft = Draft(
        file=source.file,
        name=source.name,
        format=name,
        is_strict=is_strict,
        limit=limit,
    )
    reader: _Reader
    if name in (weka.NAME, events.NAME):
        _refuse(name, fields=fields or None, unit_size=unit_size, tokens=tokens)
        if name == weka.NAME:
            reader = weka.SessionReader(draft, spread_s=session_spread_s, seed=seed)
        else:
            reader = events.EventReader(draft)
    else:
        layout = next(layout for layout in _LAYOUTS if layout.name == name)
        reader = FieldReader(
            layout, draft, fields=fields, unit_size=unit_size, cut=text_cut(tokens)
        )
    _fill(draft, reader, chain(sample, lines))
    reader.finish()
    if source.is_document:
        draft.notes.append("one JSON document: line numbers are those of its items")
    return draft.finish(num_lines=source.num_lines)


def _fill(draft: Draft, reader: _Reader, lines: Iterator[Line]) -> None:
    for line in lines:
        if draft.is_full:
            return
        try:
            reader.read(line)
        except TraceError as error:
            draft.reject(error)
        except ConfigError as error:  # no more ids: nothing after this can be read
            raise TraceError(str(error), file=draft.file, line=line.number) from None


def _refuse(name: str, **given: object) -> None:
    for argument, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{argument} cannot be used with the format {name}, whose records say "
                f"all of that themselves"
            )


def _check(
    format: str | None,
    unit_size: int | None,
    limit: int | None,
    session_spread_s: float,
) -> None:
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if unit_size is not None and not 1 <= unit_size <= MAX_UNIT_SIZE:
        raise ConfigError(
            f"unit_size must be from 1 to {MAX_UNIT_SIZE:,} tokens, got {unit_size}"
        )
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}")
    if not 0 <= session_spread_s <= _MAX_SPREAD_S:
        raise ConfigError(
            f"session_spread_s must be from 0 to {_MAX_SPREAD_S:,.0f}, "
            f"got {session_spread_s}"
        )


def _detected(file: str, sample: list[Line], fields: Mapping[str, str]) -> str:
    """Return the first format that a record of the sample has.

    One record is enough, as the first may be broken or lack a field. If all are
    broken, the error is the first one's.
    """
    for line in sample:
        try:
            for name, recognises in _RECOGNISERS:
                if recognises(line):
                    return name
        except TraceError:
            continue
    faults = [fault for line in sample if (fault := line.fault()) is not None]
    if sample and len(faults) == len(sample):
        raise faults[0]
    if fields.keys() & _CONTENT:
        return mapped.LAYOUT.name
    listed = "\n".join(f"  {name}: {looks}" for name, looks in FORMATS.items())
    raise TraceError(
        f"the format cannot be told from the first {len(sample)} records; name it, or "
        f"map its fields, as in fields={{'prompt': 'request.text'}}. There are:\n{listed}",
        file=file,
        line=sample[0].number if sample else 0,
    )
