"""The step log: every call on the core of one run, with what was planned and when.

Owns the records. Knows neither who made the calls (a recorder beside the engine), nor
their form on disk (`measure.steplog_lines`), nor how to repeat them (`sim.agreement`).
Times are seconds on the driver's clock.

Which blocks were evicted shows in digests of the free blocks, taken with every plan and
after every step: the order in which blocks became free, and who took them since, is what
a step log tells of eviction. A different victim is a different digest in that same step.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from stemkv.core.books.cost import FittedCost, RooflineCost
from stemkv.core.core import Core, CoreConfig
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.table import BlockCopy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.plan import Sample, StepPlan
from stemkv.core.schedule.request import FinishReason, RequestId, RequestSpec
from stemkv.core.schedule.scheduler import Scheduler
from stemkv.errors import InvariantError

__all__ = [
    "CALLS",
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
    "tell",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogHeader:
    """What the core was made of. Books decide nothing and are not written."""

    model: str  # for people
    core: CoreConfig
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


# By name on disk. Most have that of a verb of `core.Core`, and its arguments as fields.
CALLS: Final[dict[str, type[Call]]] = {
    "declare": Declared,
    "add": Added,
    "cancel": Cancelled,
    "restart": Restarted,
    "cut_off": CutOff,
    "fence": Fenced,
    "lift_fence": FenceLifted,
    "retire": NamespaceRetired,
    "reset": NamespaceReset,
    "end_session": SessionEnded,
    "keep": Kept,
    "plan": Planned,
    "commit": Committed,
    "abandon": Abandoned,
}


def tell(core: Core, call: Call) -> object:
    """Ask a core what a call asked, unless that began or ended a step."""
    asked = {f.name: getattr(call, f.name) for f in fields(call)}
    return getattr(core, _VERBS[type(call)])(**asked)


_VERBS: Final = {call: verb for verb, call in CALLS.items()}


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


def _num_reused(scheduler: Scheduler, request_id: RequestId) -> int:
    request = scheduler.request(request_id)
    if request is None:
        raise InvariantError(f"request {request_id} is planned but not in flight")
    return request.counts.reused


def _free_blocks(cache: PrefixCache) -> bytes:
    """Return the ids of the free blocks, int32 little-endian; O(free blocks)."""
    return _little_endian(memoryview(array("i", cache.pool.free_block_ids())))


def _little_endian(ids: memoryview) -> bytes:
    if sys.byteorder == "little":
        return ids.tobytes()
    swapped = array("i", ids)
    swapped.byteswap()
    return swapped.tobytes()
