"""A trace while it is being read.

Owns what is the same for every format once a record is understood: lines left out,
facts counted for the notes, unique ids, arrivals relative to the first, order, links
between turns. Knows no format, and never rewrites a time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from ...errors import TraceError
from ..trace import NO_TENANT, Trace, TraceProblem, TraceRequest
from .line import Line

__all__ = ["Draft", "DraftRequest", "check_unit_count"]

_GIVE_UP_AFTER = 1000  # lines that are all bad: this is another format
_MIN_FOR_RATE = 100  # requests; below, no rate is implausible
_MAX_RATE = 500.0  # requests per second: a time in s that was read as ms has more
_MIN_RATE = 1 / 300  # and one in ms that was read as s has less


@dataclass(slots=True, kw_only=True)
class DraftRequest:
    """What a record tells of a request; times as the file has them."""

    line: int
    input_length: int
    output_length: int
    units: array[int]
    request_id: str | None = None  # `None`: its number among the requests
    arrival_ns: int | None = None
    tenant: str | None = None
    identity: str = ""
    session: str | None = None
    parent_id: str | None = None  # the earlier turn, by its id in the file
    parent_index: int | None = None  # or by its number among the draft's requests
    think_ns: int | None = None  # `None`: what the arrivals leave of it
    service_ns: int | None = None  # arrival to end, as recorded
    is_opaque: bool = False
    ends_session: bool = False
    next_use_s: float | None = None
    ephemeral_from: int | None = None


class Draft:
    """Collects requests, problems and facts, and makes a `Trace` of them."""

    def __init__(
        self,
        *,
        file: str,
        name: str,
        format: str,
        is_strict: bool = False,
        limit: int | None = None,
    ) -> None:
        self.file = file
        self.requests: list[DraftRequest] = []
        self.unit_size: int | None = None  # set by the first record that knows
        self.is_exact = True
        self.notes: list[str] = []
        # Lines that are not in order are no news in a file of sessions.
        self.is_in_file_order = True
        self._name = name
        self._format = format
        self._is_strict = is_strict
        self._limit = limit
        self._problems: list[TraceProblem] = []
        self._facts: Counter[str] = Counter()
        self._first: dict[str, int] = {}  # fact → the first line it is true of

    @property
    def is_full(self) -> bool:
        """Whether as many requests are in it as were asked for."""
        return self._limit is not None and len(self.requests) >= self._limit

    def add(self, request: DraftRequest) -> int:
        """Take a request; return its number. Beyond the limit it is not kept."""
        if not self.is_full:
            self.requests.append(request)
        return len(self.requests) - 1

    def count(self, fact: str, line: Line) -> None:
        """Count a line of which something is true that readers should know."""
        self._facts[fact] += 1
        self._first.setdefault(fact, line.number)

    def reject(self, error: TraceError) -> None:
        """Leave a bad line out; with `is_strict`, raise instead.

        Gives up by itself when nothing else has come yet, as of a wrong format every
        line is bad.
        """
        if self._is_strict:
            raise error
        self._problems.append(
            TraceProblem(
                file=error.file,
                line=error.line,
                field=error.field,
                message=error.message,
            )
        )
        if len(self._problems) >= _GIVE_UP_AFTER and not self.requests:
            raise self._nothing()

    def finish(self, *, num_lines: int) -> Trace:
        """Return the trace; raises `TraceError` if no request is left."""
        has_arrivals = self._resolve_arrivals()
        if not self.requests:
            raise self._nothing()
        assert self.unit_size is not None, "a record that was taken has units"
        self._make_ids_unique()
        requests = self._sorted(has_arrivals=has_arrivals)
        trace = Trace(
            name=self._name,
            format=self._format,
            unit_size=self.unit_size,
            requests=requests,
            is_exact=self.is_exact,
            has_arrivals=has_arrivals,
            num_lines=num_lines,
            problems=self._problems,
        )
        self._judge_rate(trace)
        if self.is_full:
            self.notes.append(f"only the first {len(requests):,} requests were read")
        if self._problems:
            self.notes.append(
                f"{len(self._problems):,} lines left out, first: {self._problems[0]}"
            )
        trace.notes = [*self._counted(), *self.notes]
        return trace

    def _counted(self) -> list[str]:
        return [
            f"{fact} (lines: {count:,}; first: {self._first[fact]:,})"
            for fact, count in self._facts.items()
        ]

    def _nothing(self) -> TraceError:
        if not self._problems:
            why = "; ".join(self._counted()) or "it holds no record"
            return TraceError(f"no request to replay: {why}", file=self.file)
        first = self._problems[0]
        return TraceError(
            f"no line can be read as {self._format} ({len(self._problems):,} tried); "
            f"first: {first.message}",
            file=self.file,
            line=first.line,
            field=first.field,
        )

    def _resolve_arrivals(self) -> bool:
        """Drop requests without an arrival, unless all are; whether there are some."""
        if all(request.arrival_ns is None for request in self.requests):
            if self.requests:
                self.notes.append(
                    "no arrival times: requests are one second apart, in file order"
                )
            for i, request in enumerate(self.requests):
                request.arrival_ns = i * 10**9
            return False
        kept: list[int | None] = []
        requests: list[DraftRequest] = []
        for request in self.requests:
            parent = request.parent_index
            if parent is not None:
                # A turn may follow one that was left out: it then stands alone.
                request.parent_index = parent = kept[parent]
            if request.arrival_ns is None and parent is not None:
                before = requests[parent].arrival_ns
                assert before is not None, "only requests with an arrival are kept"
                request.arrival_ns = before + (request.think_ns or 0)
            if request.arrival_ns is None:
                kept.append(None)
                self.reject(
                    TraceError(
                        "no arrival time, while other lines have one",
                        file=self.file,
                        line=request.line,
                        field="arrival",
                    )
                )
                continue
            kept.append(len(requests))
            requests.append(request)
        self.requests = requests
        return True

    def _make_ids_unique(self) -> None:
        taken = {r.request_id for r in self.requests if r.request_id is not None}
        seen: set[str] = set()
        copies: Counter[str] = Counter()
        renamed = 0
        for i, request in enumerate(self.requests):
            name = request.request_id
            if name is None:
                name = str(i)
            elif name in seen:
                renamed += 1
            fresh = name
            while fresh in seen or (fresh != request.request_id and fresh in taken):
                copies[name] += 1
                fresh = f"{name}#{copies[name] + 1}"
            seen.add(fresh)
            request.request_id = fresh
        if renamed:
            self.notes.append(
                f"{renamed:,} requests have an id that an earlier one has; "
                f"a number was added to theirs"
            )

    def _sorted(self, *, has_arrivals: bool) -> list[TraceRequest]:
        drafts = self.requests
        times = [r.arrival_ns for r in drafts if r.arrival_ns is not None]
        assert len(times) == len(drafts), "arrivals were resolved"
        order = sorted(range(len(drafts)), key=lambda i: (times[i], i))
        late = sum(after < before for before, after in pairwise(times))
        if late and self.is_in_file_order:
            self.notes.append(
                f"arrivals were not in order: {late:,} requests stand behind a later "
                f"one; sorted by time, no time was changed"
            )
        start = times[order[0]]
        place = {index: at for at, index in enumerate(order)}
        # The first of that name, as later ones were renamed.
        by_id = {drafts[i].request_id: i for i in range(len(drafts))}
        nobody = self._nobody()
        requests: list[TraceRequest] = []
        orphans = 0
        for index in order:
            draft = drafts[index]
            assert draft.request_id is not None, "ids were given"
            parent = draft.parent_index
            if draft.parent_id is not None:
                parent = by_id.get(draft.parent_id)
            at = None if parent is None else place[parent]
            if at is not None and at >= len(requests):
                at = None  # itself, or a turn that arrives later
            orphans += (
                at is None and (draft.parent_id or draft.parent_index) is not None
            )
            request = TraceRequest(
                request_id=draft.request_id,
                input_length=draft.input_length,
                output_length=draft.output_length,
                units=draft.units,
                arrival_s=(times[index] - start) / 1e9,
                tenant=draft.tenant or nobody,
                identity=draft.identity,
                session=draft.session,
                line=draft.line,
                is_opaque=draft.is_opaque,
                ends_session=draft.ends_session,
                next_use_s=draft.next_use_s,
                ephemeral_from=draft.ephemeral_from,
            )
            if at is not None and parent is not None:
                think = draft.think_ns
                if think is None:
                    think = times[index] - times[parent]
                    think -= drafts[parent].service_ns or 0
                request.parent = at
                request.think_s = max(think, 0) / 1e9
                before = requests[at]
                if before.session is None:
                    # A conversation has its first turn's name.
                    before.session = before.request_id
                request.session = request.session or before.session
            if request.ends_session and request.session is None:
                request.session = request.request_id  # it stands alone: all of it
            requests.append(request)
        if orphans:
            self.notes.append(
                f"{orphans:,} requests continue one that is not here or arrives later; "
                f"they stand alone"
            )
        return requests

    def _nobody(self) -> str:
        """Return the name of whoever sent what names no tenant; no tenant has it."""
        names = {request.tenant for request in self.requests if request.tenant}
        if not names:
            return "default"
        nobody = NO_TENANT
        while nobody in names:
            nobody += "*"
        missing = sum(not request.tenant for request in self.requests)
        if missing:
            self.notes.append(
                f"{missing:,} of {len(self.requests):,} requests name no tenant; they "
                f"count as one of their own, {nobody!r}"
            )
        return nobody

    def _judge_rate(self, trace: Trace) -> None:
        num = len(trace.requests)
        if not trace.has_arrivals or num < _MIN_FOR_RATE or not self.is_in_file_order:
            return
        duration = trace.duration_s
        rate = num / duration if duration else float("inf")
        if rate > _MAX_RATE or rate < _MIN_RATE:
            self.notes.append(
                f"{num:,} requests in {duration:,.3f} s: if that cannot be, name the "
                f"unit of the times, as in fields={{'arrival': 'timestamp:s'}}"
            )


def check_unit_count(
    line: Line, field: str, *, num_units: int, unit_size: int, input_length: int
) -> None:
    """Raise if so many units cannot be the whole ones of a prompt, or those and an end.

    It happens when the file's unit size is not the assumed one, and then no figure
    that follows from it would be right.
    """
    whole = input_length // unit_size
    if num_units in (whole, -(-input_length // unit_size)):
        return
    fitting = [
        size
        for size in (2**power for power in range(17))
        if num_units in (input_length // size, -(-input_length // size))
    ]
    hint = f"; with unit_size={fitting[0]} they would" if len(fitting) == 1 else ""
    raise line.error(
        field,
        f"{num_units:,} units of {unit_size} tokens do not make input_length "
        f"{input_length:,}, which has {whole:,} whole ones{hint}",
    )
