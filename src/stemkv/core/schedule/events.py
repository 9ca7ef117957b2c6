"""What happened to requests, as values; nobody in the core logs.

Events carry counts, ids and times; the only token in any is the one that `TokenSampled`
brings to the request's owner.
"""

from __future__ import annotations

from dataclasses import dataclass

from stemkv.core.prefix.events import CacheEvent
from stemkv.core.schedule.request import FinishReason, RequestId, TokenCounts

__all__ = [
    "Event",
    "PrefixAwaited",
    "RequestAborted",
    "RequestAdmitted",
    "RequestFinished",
    "RequestForked",
    "RequestPreempted",
    "RequestRestarted",
    "TokenSampled",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAdmitted:
    """A request started, or started again after a preemption."""

    now: float
    request_id: RequestId
    num_cached_tokens: int  # tokens it need not compute now
    num_copied_tokens: int  # of those, copied out of a partly matching block
    is_resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixAwaited:
    """A request waits for a prefix that another request is computing."""

    now: float
    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPreempted:
    """A running request lost its blocks; what it computed stays cached if it may."""

    now: float
    request_id: RequestId
    num_computed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRestarted:
    """A request begins again with its prompt; its output so far does not count."""

    now: float
    request_id: RequestId
    num_discarded_tokens: int  # output tokens taken back


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForked:
    """A request split into several samples after its prefill."""

    now: float
    request_id: RequestId
    child_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSampled:
    """A request got its next output token."""

    now: float
    request_id: RequestId
    token: int
    index: int  # 0 for the first output token


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request ended well."""

    now: float
    request_id: RequestId
    reason: FinishReason
    counts: TokenCounts  # final
    num_preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAborted:
    """A request ended by cancellation, a failed step or a rollout."""

    now: float
    request_id: RequestId
    reason: FinishReason
    counts: TokenCounts  # final
    num_preemptions: int


Event = (
    CacheEvent
    | RequestAdmitted
    | PrefixAwaited
    | RequestPreempted
    | RequestRestarted
    | RequestForked
    | TokenSampled
    | RequestFinished
    | RequestAborted
)
