"""The step log: every call on the core of one run, with what was planned and when.

Owns the records and their form on disk. Knows neither who made the calls (a recorder
beside the engine) nor how to repeat them (see `sim.agreement`).

The form is JSON lines: a header, then one record a line in the order of the calls, so
that making the same calls again makes the same decisions. Times are seconds on the
driver's clock. **A step log contains the token ids of every prompt and every output**,
as base64 of int32 little-endian: whoever may not read the prompts may not read it.

Virtual ids of media are read back as spans of as many positions with a digest of their
own, because the content's digest cannot be had from its ids. Prefixes are equal after
that exactly where they were before.

Which blocks were evicted shows in digests of the free blocks, taken with every plan and
after every step: the order in which blocks became free, and who took them since, is what
a step log tells of eviction. A different victim is a different digest in that same step.

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
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, TextIO

from stemkv.core.books.cost import FittedCost, RooflineCost
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.identity import Domain, DomainKind
from stemkv.core.prefix.table import BlockCopy
from stemkv.core.prefix.tokens import TOKEN_BYTES, Span, TokenIds
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.retention.quota import Quota, QuotaConfig
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.orders import OrderConfig
from stemkv.core.schedule.plan import Sample, StepPlan
from stemkv.core.schedule.request import FinishReason, RequestId, RequestSpec
from stemkv.core.schedule.scheduler import Scheduler
from stemkv.errors import InvariantError, StemKVError, StepLogError

__all__ = [
    "Abandoned",
    "Added",
    "Call",
    "Cancelled",
    "Committed",
    "CoreState",
    "CutOff",
    "Declared",
    "FenceLifted",
    "Fenced",
    "Kept",
    "NamespaceReset",
    "NamespaceRetired",
    "PlanRecord",
    "PlannedChunk",
    "Planned",
    "Restarted",
    "SessionEnded",
    "StepLog",
    "StepLogHeader",
    "StepLogWriter",
    "read_step_log",
]

_SCHEMA: Final = "stemkv.steplog/3"
_OLD_SCHEMAS: Final = ("stemkv.steplog/1", "stemkv.steplog/2")
_CONTENT: Final = "token ids of prompts and outputs"
_SPAN_START: Final = 1 << 30  # bit of ~id at the first position of a span
_NEVER: Final = "never"  # JSON has no infinity


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogHeader:
    """What the core was made of."""

    model: str  # for people
    cache: CacheConfig
    scheduler: SchedulerConfig
    eviction: EvictionConfig
    order: OrderConfig
    quotas: QuotaConfig | None = None
    # What eviction weighs blocks with, and orders and steps predict time with.
    costs: FittedCost | RooflineCost | None = None


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """One chunk of a plan, and how much its request has reused until then."""

    request_id: RequestId
    start: int
    end: int
    num_samples: int
    num_reused: int  # prompt tokens of the request that were in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """A plan without tokens, which follow from the calls, and with a digest of tables."""

    step: int
    now: float
    copies: tuple[BlockCopy, ...]
    chunks: tuple[PlannedChunk, ...]
    # Hex, over ids and block ids of all chunks, in order, and the free blocks in theirs.
    digest: str

    @classmethod
    def of(cls, plan: StepPlan, scheduler: Scheduler) -> PlanRecord:
        """Return the record of a plan that is pending in `scheduler`."""
        digest = hashlib.blake2b(digest_size=16)
        for chunk in plan.chunks:
            for part in (
                chunk.request_id.encode("utf-8", "surrogatepass"),
                _little_endian(chunk.block_ids),
            ):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        digest.update(_free_blocks(scheduler.cache))
        return cls(
            step=plan.step,
            now=plan.now,
            copies=plan.copies,
            chunks=tuple(
                PlannedChunk(
                    chunk.request_id,
                    chunk.start,
                    chunk.end,
                    chunk.num_samples,
                    _num_reused(scheduler, chunk.request_id),
                )
                for chunk in plan.chunks
            ),
            digest=digest.hexdigest(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreState:
    """What the core has after a step: counts, and which blocks are free."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_active_blocks: int
    num_cached_blocks: int
    num_evicted_blocks: int  # since the start, like the next
    num_published_blocks: int
    digest: str  # hex, over the free blocks in their order

    @classmethod
    def of(cls, scheduler: Scheduler) -> CoreState:
        """Return the state as it is now."""
        usage = scheduler.cache.usage()
        free = _free_blocks(scheduler.cache)
        return cls(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_free_blocks=usage.num_free_blocks,
            num_active_blocks=usage.num_active_blocks,
            num_cached_blocks=usage.num_cached_blocks,
            num_evicted_blocks=usage.num_evicted_blocks,
            num_published_blocks=usage.num_published_blocks,
            digest=hashlib.blake2b(free, digest_size=16).hexdigest(),
        )


# The calls, each by what it did


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A prefix was declared public."""

    namespace: bytes
    prefix: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A request was queued."""

    spec: RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """A request was told to end."""

    now: float
    request_id: RequestId
    reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """A request began again."""

    now: float
    request_id: RequestId
    namespace: bytes | None
    adapter: str | None
    domain: Domain | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOff:
    """A request shares nothing any more."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """Requests added from here on wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceLifted:
    """The requests of an epoch may start."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceRetired:
    """A namespace ended, for requests in flight too."""

    now: float
    namespace: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceReset:
    """What a namespace had cached was given up; requests go on in it."""

    now: float
    namespace: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """Nothing will continue a session, somebody said between requests."""

    now: float
    domain: Domain
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The operator wants a prefix kept until a time, or no longer."""

    now: float
    namespace: bytes
    domain: Domain
    prefix: TokenIds
    until: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A step was scheduled."""

    plan: PlanRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The step planned last was executed."""

    now: float
    samples: Mapping[RequestId, tuple[Sample, ...]]
    state: CoreState
    failed: frozenset[RequestId] = frozenset()  # whose chunks could not be computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """The step planned last failed."""

    now: float
    state: CoreState


Call = (
    Declared
    | Added
    | Cancelled
    | Restarted
    | CutOff
    | Fenced
    | FenceLifted
    | NamespaceRetired
    | NamespaceReset
    | SessionEnded
    | Kept
    | Planned
    | Committed
    | Abandoned
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """A log that was read."""

    header: StepLogHeader
    calls: tuple[Call, ...]

    @property
    def specs(self) -> tuple[RequestSpec, ...]:
        """All requests, in the order they were added."""
        return tuple(call.spec for call in self.calls if isinstance(call, Added))

    def steps(self) -> tuple[tuple[PlanRecord, Committed], ...]:
        """Return every committed step: its plan and what came of it."""
        found: list[tuple[PlanRecord, Committed]] = []
        plan: PlanRecord | None = None
        for call in self.calls:
            if isinstance(call, Planned):
                plan = call.plan
            elif isinstance(call, Committed) and plan is not None:
                found.append((plan, call))
        return tuple(found)


class StepLogWriter:
    """Writes a log to a text file that somebody else opened and will close."""

    def __init__(self, file: TextIO, header: StepLogHeader) -> None:
        self._file = file
        self._write({"schema": _SCHEMA, "contains": _CONTENT, **_HEADER.encode(header)})

    def write(self, call: Call) -> None:
        """Append one call."""
        kind = _KIND_OF[type(call)]
        self._write({"kind": kind, **_FORMS[kind].encode(call)})

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
    header = _read_header(_parse(first[1], file, 1), f"{file}:1")
    calls: list[Call] = []
    is_pending = False
    for number, line in numbered:
        document = _parse(line, file, number)
        kind = document.pop("kind", None)
        where = f"{file}:{number}"
        if not isinstance(kind, str) or kind not in _FORMS:
            known = ", ".join(_FORMS)
            raise StepLogError(f"{where}: kind: must be one of {known}, got {kind!r}")
        call = _decoded(_FORMS[kind], document, where)
        if isinstance(call, Planned | Committed | Abandoned):
            if is_pending == isinstance(call, Planned):
                expected = "its commit" if is_pending else "a plan"
                raise StepLogError(f"{where}: kind: {expected} must come before {kind}")
            is_pending = not is_pending
        calls.append(call)
    return StepLog(header=header, calls=tuple(calls))


def _num_reused(scheduler: Scheduler, request_id: RequestId) -> int:
    request = scheduler.request(request_id)
    if request is None:
        raise InvariantError(f"request {request_id} is planned but not in flight")
    return request.counts.reused


def _free_blocks(cache: PrefixCache) -> bytes:
    """Return the ids of the free blocks, int32 little-endian; O(free blocks)."""
    return _little_endian(memoryview(array("i", cache.pool.free_block_ids())))


# The form of each record


@dataclass(frozen=True, slots=True)
class _Codec:
    """How one value is written and read; `decode` raises `ValueError`."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class _BadField(ValueError):
    """What is wrong with a field, and which one it is."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


@dataclass(frozen=True, slots=True)
class _Form:
    """A record: what to make of its fields."""

    make: Callable[..., Any]
    codecs: dict[str, _Codec]
    seldom: frozenset[str] = frozenset()  # fields that are left out where empty

    def encode(self, value: Any) -> dict[str, Any]:
        document = {n: c.encode(getattr(value, n)) for n, c in self.codecs.items()}
        return {n: v for n, v in document.items() if v or n not in self.seldom}

    def decode(self, document: Any) -> Any:
        if not isinstance(document, dict):
            raise _BadField("", f"must be an object, got {document!r:.60}")
        for name in sorted((document.keys() ^ self.codecs.keys()) - self.seldom):
            problem = "missing" if name in self.codecs else f"not a field of {_SCHEMA}"
            raise _BadField(name, problem)
        values = {}
        for name, codec in self.codecs.items():
            if name in self.seldom and name not in document:
                continue
            try:
                values[name] = codec.decode(document[name])
            except _BadField as error:  # of a record within
                path = f"{name}.{error.path}" if error.path else name
                raise _BadField(path, error.problem) from None
            except (ValueError, StemKVError) as error:
                raise _BadField(name, f"{error}, got {document[name]!r:.60}") from None
        try:
            return self.make(**values)
        except StemKVError as error:
            raise _BadField("", str(error)) from None

    def codec(self) -> _Codec:
        """Return the codec of such a record inside another."""
        return _Codec(self.encode, self.decode)


def _parse(line: str, file: str, number: int) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StepLogError(f"{file}:{number}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise StepLogError(f"{file}:{number}: must be an object, got {line!r:.40}")
    return document


def _read_header(document: dict[str, Any], where: str) -> StepLogHeader:
    schema = document.pop("schema", None)
    if schema != _SCHEMA:
        why = ""
        if schema in _OLD_SCHEMAS:
            why = ", which does not say in which order requests were served"
        raise StepLogError(
            f"{where}: schema: must be {_SCHEMA!r}, got {schema!r:.60}{why}; record the "
            f"log with this version"
        )
    document.pop("contains", None)
    header: StepLogHeader = _decoded(_HEADER, document, where)
    return header


def _decoded(form: _Form, document: dict[str, Any], where: str) -> Any:
    try:
        return form.decode(document)
    except _BadField as error:
        raise StepLogError(f"{where}: {error}") from None


def _typed(kind: type, what: str) -> _Codec:
    def decode(value: Any) -> Any:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"must be {what}")
        return value

    return _Codec(lambda value: value, decode)


def _optional(codec: _Codec) -> _Codec:
    return _Codec(
        lambda value: None if value is None else codec.encode(value),
        lambda value: None if value is None else codec.decode(value),
    )


def _list_of(codec: _Codec) -> _Codec:
    def decode(value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError("must be a list")
        return tuple(codec.decode(item) for item in value)

    return _Codec(lambda value: [codec.encode(item) for item in value], decode)


def _row(make: Callable[..., Any], *columns: tuple[str, _Codec]) -> _Codec:
    """A value written as the list of its fields, for those that come in thousands."""

    def decode(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(columns):
            names = ", ".join(name for name, _ in columns)
            raise ValueError(f"must be a list of {names}")
        pairs = zip(columns, value, strict=True)
        return make(*(codec.decode(item) for (_, codec), item in pairs))

    def encode(value: Any) -> Any:
        return [codec.encode(getattr(value, name)) for name, codec in columns]

    return _Codec(encode, decode)


def _pair(first: _Codec, second: _Codec) -> _Codec:
    """Two values, written as a list of both."""

    def decode(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError("must be a list of two")
        return first.decode(value[0]), second.decode(value[1])

    def encode(value: Any) -> Any:
        return [first.encode(value[0]), second.encode(value[1])]

    return _Codec(encode, decode)


def _decode_seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number of seconds")
    if not math.isfinite(value):
        raise ValueError("must be finite")
    return float(value)


def _decode_count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("must be an integer of at least 0")
    return value


def _decode_share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("must be a number")
    return value


def _decode_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _decode_next_use(value: Any) -> float:
    return math.inf if value == _NEVER else _decode_seconds(value)


def _decode_hex(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError("must be hexadecimal text")
    return bytes.fromhex(value)


def _encode_tokens(value: TokenIds) -> str:
    return base64.b64encode(value.buffer).decode("ascii")


def _decode_tokens(value: Any) -> TokenIds:
    if not isinstance(value, str):
        raise ValueError("must be base64 of int32 token ids")
    try:
        data = base64.b64decode(value, validate=True)
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


def _decode_domain(value: Any) -> Domain:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("must be a list of kind and name")
    return Domain(DomainKind(value[0]), value[1])


def _decode_quotas(value: Any) -> dict[Domain, Quota]:
    pairs = _QUOTA_PAIRS.decode(value)
    quotas = dict(pairs)
    if len(quotas) < len(pairs):
        raise ValueError("must name a domain once")
    return quotas


def _decode_numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object from names to numbers")
    return {name: _decode_share(number) for name, number in value.items()}


def _encode_costs(costs: FittedCost | RooflineCost) -> dict[str, Any]:
    return {"kind": type(costs).__name__, **asdict(costs)}


def _decode_costs(value: Any) -> FittedCost | RooflineCost:
    """Return a cost model; floats are written so that they come back to the last bit."""
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    document = dict(value)
    kind = document.pop("kind", None)
    make = {each.__name__: each for each in (FittedCost, RooflineCost)}.get(kind)
    if make is None:
        raise _BadField("kind", f"must be FittedCost or RooflineCost, got {kind!r:.60}")
    known = {f.name: f for f in fields(make)}
    for name in sorted(document.keys() ^ known.keys()):
        problem = "missing" if name in known else f"not a field of {kind}"
        raise _BadField(name, problem)
    for name, number in document.items():
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if name == "source":
            is_right = isinstance(number, str)
        else:
            is_right = is_number or (number is None and "None" in str(known[name].type))
        if not is_right:
            raise _BadField(name, f"is of the wrong kind, got {number!r:.60}")
    return make(**document)


def _decode_samples(value: Any) -> dict[RequestId, tuple[Sample, ...]]:
    if not isinstance(value, dict):
        raise ValueError("must be an object from request id to samples")
    return {RequestId(name): _SAMPLES.decode(rows) for name, rows in value.items()}


def _little_endian(ids: memoryview) -> bytes:
    if sys.byteorder == "little":
        return ids.tobytes()
    swapped = array("i", ids)
    swapped.byteswap()
    return swapped.tobytes()


_TEXT = _typed(str, "text")
_INTEGER = _typed(int, "an integer")
_COUNT = _Codec(lambda value: value, _decode_count)
_SECONDS = _Codec(lambda value: value, _decode_seconds)
_HEX = _Codec(lambda value: value.hex(), _decode_hex)
_TOKENS = _Codec(_encode_tokens, _decode_tokens)
_DOMAIN = _Codec(lambda value: [value.kind.value, value.name], _decode_domain)
_REASON = _Codec(lambda value: value.value, FinishReason)
_SHARE = _Codec(lambda value: value, _decode_share)
_FLAG = _Codec(lambda value: value, _decode_flag)
_SAMPLES = _list_of(_row(Sample, ("token", _INTEGER), ("stop", _optional(_REASON))))
_IDS = _list_of(_TEXT)
_NOW_AND_NAMESPACE = {"now": _SECONDS, "namespace": _HEX}

_CACHE = _Form(
    CacheConfig,
    {"num_blocks": _COUNT, "block_size": _COUNT, "max_kept_share": _SHARE},
)
_SCHEDULER = _Form(
    SchedulerConfig,
    {
        "token_budget": _COUNT,
        "max_num_running": _COUNT,
        "max_request_tokens": _optional(_COUNT),
        "max_steps_awaiting": _COUNT,
        "watermark": _SHARE,
        "lookahead": _COUNT,
        "step_time_s": _optional(_SECONDS),
        "retained_floor_blocks": _COUNT,
    },
)
_EVICTION = _Form(EvictionConfig, {"name": _TEXT, "objective": _TEXT})
_NUMBERS = _Codec(dict, _decode_numbers)
_ORDER = _Form(
    OrderConfig,
    {
        "name": _TEXT,
        "lane": _COUNT,
        "quantum": _COUNT,
        "decode_weight": _SHARE,
        "pauses_prefills": _FLAG,
        "weights": _NUMBERS,
        "slo_ttft_s": _NUMBERS,
    },
)
_QUOTA = _Form(
    Quota,
    {"floor_blocks": _COUNT, "cap_blocks": _optional(_COUNT), "weight": _SHARE},
)
_QUOTA_PAIRS = _list_of(_pair(_DOMAIN, _QUOTA.codec()))
_QUOTAS = _Form(
    QuotaConfig,
    {
        "quotas": _Codec(lambda q: _QUOTA_PAIRS.encode(q.items()), _decode_quotas),
        "default": _QUOTA.codec(),
        "public_blocks": _COUNT,
    },
)
_HEADER = _Form(
    StepLogHeader,
    {
        "model": _TEXT,
        "cache": _CACHE.codec(),
        "scheduler": _SCHEDULER.codec(),
        "eviction": _EVICTION.codec(),
        "order": _ORDER.codec(),
        "quotas": _optional(_QUOTAS.codec()),
        "costs": _optional(_Codec(_encode_costs, _decode_costs)),
    },
)
_HINTS = _Form(
    Hints,
    {
        "session": _optional(_TEXT),
        "ends_session": _FLAG,
        "next_use_s": _optional(
            _Codec(lambda s: _NEVER if s == math.inf else s, _decode_next_use)
        ),
        "ephemeral_from": _optional(_COUNT),
    },
)
_SPEC = _Form(
    RequestSpec,
    {
        "request_id": _TEXT,
        "prompt": _TOKENS,
        "max_new_tokens": _COUNT,
        "arrival_s": _SECONDS,
        "domain": _DOMAIN,
        "namespace": _optional(_HEX),
        "num_samples": _COUNT,
        "adapter": _optional(_TEXT),
        "start_position": _COUNT,
        "tenant": _optional(_TEXT),
        "request_class": _optional(_TEXT),
        # Most requests have none.
        "hints": _Codec(
            lambda hints: None if hints == NO_HINTS else _HINTS.encode(hints),
            lambda value: NO_HINTS if value is None else _HINTS.decode(value),
        ),
    },
)
_PLAN = _Form(
    PlanRecord,
    {
        "step": _COUNT,
        "now": _SECONDS,
        "copies": _list_of(
            _row(
                BlockCopy,
                ("source", _COUNT),
                ("target", _COUNT),
                ("num_tokens", _COUNT),
            )
        ),
        "chunks": _list_of(
            _row(
                PlannedChunk,
                ("request_id", _TEXT),
                ("start", _COUNT),
                ("end", _COUNT),
                ("num_samples", _COUNT),
                ("num_reused", _COUNT),
            )
        ),
        "digest": _TEXT,
    },
)
_STATE = _Form(
    CoreState,
    {f.name: _TEXT if f.name == "digest" else _COUNT for f in fields(CoreState)},
)
_FORMS: Final[dict[str, _Form]] = {
    "declare": _Form(Declared, {"namespace": _HEX, "prefix": _TOKENS}),
    "add": _Form(Added, {"spec": _SPEC.codec()}),
    "cancel": _Form(
        Cancelled, {"now": _SECONDS, "request_id": _TEXT, "reason": _REASON}
    ),
    "restart": _Form(
        Restarted,
        {
            "now": _SECONDS,
            "request_id": _TEXT,
            "namespace": _optional(_HEX),
            "adapter": _optional(_TEXT),
            "domain": _optional(_DOMAIN),
        },
    ),
    "cut_off": _Form(CutOff, {"request_id": _TEXT}),
    "fence": _Form(Fenced, {}),
    "lift_fence": _Form(FenceLifted, {"epoch": _COUNT}),
    "retire": _Form(NamespaceRetired, _NOW_AND_NAMESPACE),
    "reset": _Form(NamespaceReset, _NOW_AND_NAMESPACE),
    "end_session": _Form(
        SessionEnded, {"now": _SECONDS, "domain": _DOMAIN, "session": _TEXT}
    ),
    "keep": _Form(
        Kept,
        {
            **_NOW_AND_NAMESPACE,
            "domain": _DOMAIN,
            "prefix": _TOKENS,
            "until": _SECONDS,
        },
    ),
    "plan": _Form(Planned, {"plan": _PLAN.codec()}),
    "commit": _Form(
        Committed,
        {
            "now": _SECONDS,
            "samples": _Codec(
                lambda value: {k: _SAMPLES.encode(v) for k, v in value.items()},
                _decode_samples,
            ),
            "state": _STATE.codec(),
            "failed": _Codec(sorted, lambda value: frozenset(_IDS.decode(value))),
        },
        seldom=frozenset({"failed"}),
    ),
    "abandon": _Form(Abandoned, {"now": _SECONDS, "state": _STATE.codec()}),
}
_KIND_OF: Final[dict[type, str]] = {
    form.make: kind for kind, form in _FORMS.items() if isinstance(form.make, type)
}
