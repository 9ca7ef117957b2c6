"""Agent sessions of kv-cache-tester (AIPerf: `weka_trace`): block ids, closed loop.

The format of callanjfox/kv-cache-tester: one session a JSON object, its requests in
turn, subagents between them. There is no clock across sessions, so their starts are
drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec

from ..units import ForeignUnits, UnitTable
from .draft import Draft, DraftRequest, check_unit_count
from .fields import MAX_UNIT_SIZE, identity_of
from .line import MAX_COUNT, Line

__all__ = ["NAME", "DESCRIPTION", "SessionReader", "recognises"]

NAME = "weka"
DESCRIPTION = "JSON or JSONL of kv-cache-tester sessions with their requests"
_SECOND = 10**9
_MAX_S = 10**9  # of a time within a session; about 30 years


class _Entry(msgspec.Struct, gc=False):
    """A request of a session, or a subagent with requests of its own."""

    t: float
    type: str = ""
    model: str | None = None
    input_length: int = msgspec.field(name="in", default=0)
    output_length: int = msgspec.field(name="out", default=0)
    hash_ids: list[int] = []
    api_time: float | None = None
    think_time: float | None = None
    agent_id: str | None = None
    requests: list[_Entry] = []


class _Session(msgspec.Struct):
    id: str
    requests: list[_Entry]
    block_size: int = 64
    hash_id_scope: str = "local"


_DECODER = msgspec.json.Decoder(_Session)


def recognises(line: Line) -> bool:
    """Whether a record is a session."""
    return isinstance(line.get("requests"), list) and (
        line.get("hash_id_scope") is not None or line.get("block_size") is not None
    )


class SessionReader:
    """Reads sessions into a draft; starts are uniform over `spread_s` seconds."""

    def __init__(self, draft: Draft, *, spread_s: float, seed: int) -> None:
        self._draft = draft
        self._spread_s = spread_s
        self._seed = seed
        self._random = Random(seed)
        self._table = UnitTable()
        self._shared = ForeignUnits(self._table)  # ids whose scope is the file
        self._num_sessions = 0
        self._num_agents = 0
        self._num_rechained = 0
        draft.is_in_file_order = False

    def read(self, line: Line) -> None:
        """Add a session's requests; raises `TraceError` if one of them is bad.

        All or nothing: a session that misses a request is another session.
        """
        try:
            session = _DECODER.decode(line.raw)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise line.error("", f"not a session: {error}") from None
        self._check(line, session)
        is_local = session.hash_id_scope != "global"
        units = ForeignUnits(self._table) if is_local else self._shared
        # To the millisecond, which is what the sessions' own times are given in.
        start = round(self._random.uniform(0, self._spread_s) * 1000) * 10**6
        self._draft.unit_size = session.block_size
        self._add(
            line,
            session.requests,
            units=units,
            start=start,
            session=session.id,
            prefix=session.id,
            before=None,
        )
        self._num_sessions += 1
        if is_local:
            self._num_rechained += units.num_rechained

    def finish(self) -> None:
        """Say what was drawn and assumed."""
        self._draft.notes.append(
            f"{self._num_sessions:,} sessions have no common clock: their starts are "
            f"drawn uniformly over {self._spread_s:,.0f} s (seed {self._seed})"
        )
        if self._num_agents:
            self._draft.notes.append(
                f"{self._num_agents:,} subagents run beside their session, behind the "
                f"request before them"
            )
        rechained = self._num_rechained + self._shared.num_rechained
        if rechained:
            self._draft.notes.append(
                f"units do not chain: {rechained:,} times an id stands behind another "
                f"one than before; such a unit counts as different"
            )

    def _check(self, line: Line, session: _Session) -> None:
        size = session.block_size
        if not 1 <= size <= MAX_UNIT_SIZE:
            raise line.error(
                "block_size", f"must be from 1 to {MAX_UNIT_SIZE:,}, got {size:,}"
            )
        before = self._draft.unit_size
        if before is not None and size != before:
            raise line.error(
                "block_size",
                f"{size} differs from the {before} before; a trace has one unit size",
            )
        for where, entry in _entries("requests", session.requests):
            times = (entry.t, entry.api_time, entry.think_time)
            if any(time is not None and not 0 <= time <= _MAX_S for time in times):
                raise line.error(where, f"expected times from 0 to {_MAX_S:,} s")
            if entry.type == "subagent":
                continue
            if not (1 <= entry.input_length <= MAX_COUNT) or not (
                0 <= entry.output_length <= MAX_COUNT
            ):
                raise line.error(
                    where,
                    f"expected in ≥ 1 and out ≥ 0, both at most {MAX_COUNT:,}, got "
                    f"{entry.input_length:,} and {entry.output_length:,}",
                )
            check_unit_count(
                line,
                f"{where}.hash_ids",
                num_units=len(entry.hash_ids),
                unit_size=size,
                input_length=entry.input_length,
            )

    def _add(
        self,
        line: Line,
        entries: list[_Entry],
        *,
        units: ForeignUnits,
        start: int,
        session: str,
        prefix: str,
        before: tuple[int, int] | None,
    ) -> None:
        """Add requests one behind the other, the first behind `before`.

        `before` is a request's number and when it ended, as recorded.
        """
        for number, entry in enumerate(entries):
            if self._draft.is_full:
                return
            arrival = start + round(entry.t * _SECOND)
            if entry.type == "subagent":
                agent = f"{prefix}/{entry.agent_id or number}"
                self._num_agents += 1
                self._add(
                    line,
                    entry.requests,
                    units=units,
                    start=arrival,
                    session=session,
                    prefix=agent,
                    before=before,
                )
                continue
            if entry.think_time is not None:
                think = round(entry.think_time * _SECOND)
            else:
                think = 0 if before is None else max(arrival - before[1], 0)
            index = self._draft.add(
                DraftRequest(
                    line=line.number,
                    request_id=f"{prefix}/{number}",
                    arrival_ns=arrival,
                    input_length=entry.input_length,
                    output_length=entry.output_length,
                    units=units.chain(entry.hash_ids),
                    identity=identity_of(model=entry.model),
                    session=session,
                    parent_index=None if before is None else before[0],
                    think_ns=None if before is None else think,
                )
            )
            before = (index, arrival + round((entry.api_time or 0.0) * _SECOND))


def _entries(where: str, entries: list[_Entry]) -> Iterator[tuple[str, _Entry]]:
    """Yield everything in a session with its place, subagents' requests behind them."""
    for i, entry in enumerate(entries):
        yield f"{where}.{i}", entry
        if entry.type == "subagent":
            yield from _entries(f"{where}.{i}.requests", entry.requests)
