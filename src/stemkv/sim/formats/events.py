"""Recordings of an engine's KV events (vLLM, SGLang): what was computed, not asked.

Owns the guess at requests from stored blocks. A batch is `[ts, events, rank]` or an
object with these; an event is an object with `type`, or an array that starts with it.
Fields behind the known ones are ignored. Of token ids and extra keys (which hold cache
salts in clear) nothing is kept.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ...errors import TraceError
from ..units import UnitTable
from .draft import Draft, DraftRequest
from .fields import MAX_UNIT_SIZE, identity_of
from .line import Line

__all__ = ["NAME", "DESCRIPTION", "EventReader", "recognises"]

NAME = "kv-events"
DESCRIPTION = "JSONL of KV event batches: [ts, [BlockStored …], rank]"

_SECOND = 10**9
_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
# Blocks behind a request's last one, so soon after it, are its next chunk or its
# output. A user's next turn takes longer.
_MAX_GAP_S = 2.0
_DEVICE = {"", "gpu"}  # other mediums hold copies

_Hash = int | str
_LIMITS = (
    "reconstructed from what was stored: prompts that hit wholly, ends of prompts below "
    "a block, tenants and true lengths are not in such a recording",
    f"blocks stored within {_MAX_GAP_S:g} s behind a request's last one count as its "
    f"next chunk, or, one at a time, as its output",
)


@dataclass(slots=True)
class _Open:
    """A request that may still store blocks."""

    number: int
    last_ns: int
    is_decoding: bool = False


def recognises(line: Line) -> bool:
    """Whether a record is a batch of events."""
    try:
        _, events, _ = _batch(line)
    except TraceError:
        return False
    return all(_tag(event) in _FIELDS for event in events)


class EventReader:
    """Reads batches of events into a draft."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._table = UnitTable()
        self._unit: dict[_Hash, int] = {}  # block hash → our id
        self._parent: dict[int, int | None] = {}  # our id → the one before it
        self._open: dict[tuple[object, _Hash], _Open] = {}  # (rank, last block)
        self._groups: dict[object, int] = {}  # group → events; the first one counts
        self._keys: dict[str, int] = {}

    def read(self, line: Line) -> None:
        """Add the requests that a batch of events tells of."""
        time, events, rank = _batch(line)
        for i, event in enumerate(events):
            where = f"events.{i}"
            fields = _fields(line, where, event)
            match _tag(event):
                case "BlockStored":
                    self._store(line, where, fields, time, rank)
                case "BlockRemoved":
                    self._draft.count("evictions of the engine, not replayed", line)
                case "AllBlocksCleared":
                    self._draft.count("the engine's cache was cleared", line)
                    self._open.clear()
                case _:
                    self._draft.count("events of unknown kinds, ignored", line)

    def finish(self) -> None:
        """Say what such a trace cannot tell."""
        self._draft.notes += _LIMITS

    def _store(
        self,
        line: Line,
        where: str,
        fields: dict[str, object],
        time: int,
        rank: object,
    ) -> None:
        if str(fields.get("medium") or "").lower() not in _DEVICE:
            self._draft.count("copies on other mediums, ignored", line)
            return
        group = fields.get("group_idx")
        if not isinstance(group, int | None):
            raise line.error(f"{where}.group_idx", "expected an integer")
        self._groups[group] = self._groups.get(group, 0) + 1
        if group != next(iter(self._groups)):
            self._draft.count("blocks of further cache groups, ignored", line)
            return
        hashes = fields.get("block_hashes")
        if not isinstance(hashes, list) or not hashes:
            raise line.error(f"{where}.block_hashes", "expected a list of hashes")
        size = fields.get("block_size")
        if (
            isinstance(size, bool)
            or not isinstance(size, int)
            or not 1 <= size <= MAX_UNIT_SIZE
        ):
            raise line.error(
                f"{where}.block_size", f"expected a size from 1 to {MAX_UNIT_SIZE:,}"
            )
        if self._draft.unit_size not in (None, size):
            raise line.error(
                f"{where}.block_size",
                f"{size} differs from the {self._draft.unit_size} before",
            )
        names = [_hash(line, f"{where}.block_hashes", value) for value in hashes]
        before = fields.get("parent_block_hash")
        parent = (
            None
            if before is None
            else _hash(line, f"{where}.parent_block_hash", before)
        )
        self._draft.unit_size = size
        above = None if parent is None else self._known(line, parent)
        for name in names:
            above = self._number(name, above)
        opened = None if parent is None else self._open.pop((rank, parent), None)
        if opened is not None and time - opened.last_ns <= _MAX_GAP_S * _SECOND:
            self._extend(opened, names, size)
            opened.last_ns = time
        elif self._draft.is_full:
            return
        else:
            opened = self._begin(line, fields, names[-1], size, time)
        self._open[rank, names[-1]] = opened

    def _begin(
        self, line: Line, fields: dict[str, object], last: _Hash, size: int, time: int
    ) -> _Open:
        units = self._path(self._unit[last])
        keys = fields.get("extra_keys")
        first = keys[0] if isinstance(keys, list) and keys else None
        known = None
        if first and fields.get("parent_block_hash") is None:
            known = str(self._keys.setdefault(repr(first), len(self._keys) + 1))
        adapter = fields.get("lora_name")
        if adapter is None and fields.get("lora_id") is not None:
            adapter = str(fields["lora_id"])
        number = self._draft.add(
            DraftRequest(
                line=line.number,
                arrival_ns=time,
                input_length=len(units) * size,
                output_length=1,
                units=units,
                identity=identity_of(
                    adapter=adapter if isinstance(adapter, str) else None, keys=known
                ),
            )
        )
        return _Open(number, time)

    def _extend(self, opened: _Open, names: list[_Hash], size: int) -> None:
        request = self._draft.requests[opened.number]
        if len(names) == 1:
            request.output_length += size if opened.is_decoding else size - 1
            opened.is_decoding = True
        elif not opened.is_decoding:
            request.units.extend(self._unit[name] for name in names)
            request.input_length = len(request.units) * size

    def _number(self, name: _Hash, above: int | None) -> int:
        known = self._unit.get(name)
        if known is None:
            known = self._unit[name] = self._table.take(1)
            self._parent[known] = above
        return known

    def _known(self, line: Line, name: _Hash) -> int:
        if name not in self._unit:
            self._draft.count(
                "behind blocks stored before the recording began; of those, one is "
                "counted",
                line,
            )
        return self._number(name, None)

    def _path(self, unit: int) -> array[int]:
        path = array("i")
        here: int | None = unit
        while here is not None:
            path.append(here)
            here = self._parent[here]
        path.reverse()
        return path


def _batch(line: Line) -> tuple[int, list[object], object]:
    """Return a batch's time, its events and the rank they come from."""
    data = line.data
    if isinstance(data, list) and len(data) >= 2:
        places = ("0", "1", "2")
    elif isinstance(data, dict):
        places = ("ts", "events", "data_parallel_rank")
    else:
        raise line.error("", "expected a batch of events: [ts, events, rank]")
    time = line.nanoseconds(places[0], "")
    events = line.get(places[1])
    if time is None:
        raise line.error("ts", "missing")
    if not isinstance(events, list):
        raise line.error("events", "expected a list of events")
    rank = line.get(places[2])
    return time, events, rank if isinstance(rank, int) else None


def _tag(event: object) -> object:
    if isinstance(event, dict):
        return event.get("type")
    return event[0] if isinstance(event, list) and event else None


def _fields(line: Line, where: str, event: object) -> dict[str, object]:
    if isinstance(event, dict):
        return event
    if not isinstance(event, list) or not event:
        raise line.error(where, "expected an event: an object, or an array")
    names = _FIELDS.get(str(event[0]), ())
    # Newer engines have more fields, older ones fewer.
    return dict(zip(names, event[1:], strict=False))


def _hash(line: Line, where: str, value: object) -> _Hash:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise line.error(where, "expected hashes that are integers or text")
    return value
