"""One generation and the states it goes through.

Owns the request's tokens, state and counters. Knows nothing of text, tokenizers or
sampling parameters: those stay with the driver, which looks them up by request id.

```
waiting ──admit──▶ running ──▶ finished
   │  ▲               │  │
   │  └── preempted ◀─┘  └──▶ aborted
   └──────────────────────────▶ aborted
```
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import NewType

from stemkv.core.books.share import ShareOfWork
from stemkv.core.books.waits import Waits
from stemkv.core.prefix.door import check_domain, check_namespace
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.keeper import Waiting
from stemkv.core.prefix.table import Lease
from stemkv.core.prefix.tokens import TOKEN_BYTES, TokenBuffer, TokenIds
from stemkv.errors import (
    EmptyPrompt,
    InvalidLimit,
    InvariantError,
    RequestError,
    TokenOutOfRange,
)

__all__ = [
    "FinishReason",
    "Request",
    "RequestId",
    "RequestSpec",
    "RequestState",
    "TokenCounts",
    "child_id",
]

RequestId = NewType("RequestId", str)


class RequestState(Enum):
    """Where a request is; see the picture in the module's docstring."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    ABORTED = "aborted"


class FinishReason(Enum):
    """Why a request ended."""

    LENGTH = "length"  # its limit of new tokens
    STOP_TOKEN = "stop_token"  # an end-of-sequence token
    STOP_STRING = "stop_string"  # one of its stop strings
    CANCELLED = "cancelled"
    REPLACED = "replaced"  # its model or adapter was replaced while it was in flight
    FAILED = "failed"  # its step failed, or its logits were not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What a caller asks for, validated."""

    request_id: RequestId
    prompt: TokenIds
    max_new_tokens: int
    arrival_s: float  # seconds on the driver's clock
    domain: Domain
    namespace: bytes | None  # None: shares with nobody, in neither direction
    num_samples: int = 1  # independent continuations of the one prompt
    adapter: str | None = None  # opaque to the core: what the driver must apply
    start_position: int = 0  # position of the first token
    # On whose account its blocks are; `None`: the name of the domain.
    tenant: str | None = None
    # What the operator calls requests of this kind, for orders that tell them apart.
    request_class: str | None = None
    hints: Hints = NO_HINTS

    def __post_init__(self) -> None:
        if (
            not isinstance(self.request_id, str)
            or not self.request_id
            or "#" in self.request_id
        ):
            raise RequestError(
                f"request_id must be non-empty and free of '#', which marks the "
                f"samples of a request, got {self.request_id!r}",
                field="request_id",
            )
        if not isinstance(self.prompt, TokenIds):
            raise TokenOutOfRange(
                f"prompt must be TokenIds, got {type(self.prompt).__name__}; "
                f"TokenIds.from_ids and from_buffer convert",
                field="prompt",
            )
        if len(self.prompt) == 0:
            raise EmptyPrompt(
                "prompt has no tokens; give at least one token to continue from",
                field="prompt",
            )
        for field in ("max_new_tokens", "num_samples"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidLimit(
                    f"{field} must be an integer of at least 1, got {value!r}",
                    field=field,
                )
        if (
            not isinstance(self.start_position, int)
            or isinstance(self.start_position, bool)
            or not 0 <= self.start_position < 2**31
        ):
            raise InvalidLimit(
                f"start_position must be an integer in [0, 2**31), "
                f"got {self.start_position!r:.80}",
                field="start_position",
            )
        check_namespace(self.namespace)
        check_domain(self.domain)
        if self.domain == PUBLIC:
            raise RequestError(
                "domain must be the caller's own; what is public is declared by the "
                "operator (`declare_public`), never by a request",
                field="domain",
            )
        if self.tenant is not None and not self.tenant:
            raise RequestError(
                "tenant must be a name, or None for that of the domain, got ''",
                field="tenant",
            )
        if self.request_class is not None and not isinstance(self.request_class, str):
            raise RequestError(
                f"request_class must be a name or None, "
                f"got {type(self.request_class).__name__}",
                field="request_class",
            )
        if not isinstance(self.arrival_s, int | float) or not math.isfinite(
            self.arrival_s
        ):
            raise RequestError(
                f"arrival_s must be finite to have a place in an order, "
                f"got {self.arrival_s!r:.80}",
                field="arrival_s",
            )

    @property
    def owner(self) -> str:
        """The tenant on whose account the request is."""
        return self.domain.name if self.tenant is None else self.tenant


def child_id(request_id: RequestId, sample: int) -> RequestId:
    """Return the id of a request's sample; sample 0 is the request itself."""
    return request_id if sample == 0 else RequestId(f"{request_id}#{sample}")


@dataclass(slots=True)
class TokenCounts:
    """Where the KV of a request's tokens came from; every token counted once.

    `prompt tokens == reused + computed` once the prefill is done. What is computed
    again after a preemption is apart, so it can inflate neither.
    """

    reused: int = 0  # prompt tokens whose KV was in the cache when first needed
    computed: int = 0  # prompt tokens computed for the first time
    recomputed: int = 0  # tokens computed again because a preemption lost them
    copied: int = 0  # of `reused`, tokens copied out of partly matching blocks
    inherited: int = 0  # prompt tokens a sample got from the request it forked from
    discarded: int = 0  # tokens reused or computed before a restart, in vain


class Request:
    """A request in flight. Only `Scheduler` changes it."""

    __slots__ = (
        "_buffer",
        "_num_prompt",
        "_num_tokens",
        "counts",
        "epoch",
        "finish_reason",
        "first_scheduled_s",
        "is_cancelled",
        "is_coasting",
        "is_late",
        "is_unfinished",
        "lease",
        "namespace",
        "num_cached",
        "num_computed",
        "num_counted",
        "num_preemptions",
        "num_public",
        "num_steps_awaiting",
        "request_id",
        "sample",
        "sequence_number",
        "share",
        "spec",
        "state",
        "waits",
    )

    def __init__(self, spec: RequestSpec, sequence_number: int) -> None:
        self.spec = spec
        self.request_id = spec.request_id
        self.namespace = spec.namespace  # None once it was retired
        self.epoch = 0  # how many fences were set up when it was added
        self.sample = 0  # which of the prompt's continuations this is
        self.sequence_number = sequence_number  # order of `add`, breaks ties
        self.state = RequestState.WAITING
        self.lease: Lease | None = None
        # Leading tokens that are cached for it: while it waits, in whole blocks as of
        # now; from its start on, those that it found then.
        self.num_cached = 0
        self.num_public = 0  # of those, up to where what it matches is public
        self.num_computed = 0  # leading tokens whose KV is in the table
        self.num_counted = 0  # leading tokens that `counts` has seen
        self.counts = TokenCounts()
        self.num_preemptions = 0
        self.num_steps_awaiting = 0  # steps spent waiting for somebody's prefill
        self.is_cancelled = False  # cancelled while its step was in flight
        self.is_coasting = False  # decodes tokens that the driver told ahead
        self.is_unfinished = False  # started, and its prefill is not done
        self.is_late = False  # its time for starting has passed, where it has one
        self.share = ShareOfWork()
        self.waits = Waits(spec.arrival_s)
        self.first_scheduled_s: float | None = None
        self.finish_reason: FinishReason | None = None
        self._buffer: bytes | TokenBuffer = spec.prompt.buffer
        self._num_tokens = len(spec.prompt)
        self._num_prompt = len(spec.prompt)  # asked for at every step

    @property
    def order_key(self) -> tuple[float, int, int]:
        """Arrival order, total; samples of one prompt stand side by side."""
        return (self.spec.arrival_s, self.sequence_number, self.sample)

    @property
    def tokens(self) -> bytes:
        """Prompt and output so far, int32 little-endian; copied once there is output.

        O(tokens) then: for what happens once, not at every step.
        """
        return bytes(self._buffer)

    @property
    def growing_tokens(self) -> bytes | TokenBuffer:
        """The same, not copied: to be read at once and not kept."""
        return self._buffer

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return self._num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._num_prompt

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self._num_tokens - self._num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 when decoding."""
        return self.num_tokens - self.num_computed

    @property
    def num_ready(self) -> int:
        """Leading tokens that it need not compute any more."""
        if self.state is RequestState.RUNNING:
            return self.num_computed
        return self.num_cached

    @property
    def num_ready_in_public(self) -> int:
        """The same, if it had found nothing but what is public.

        So nothing of a private cache shows in it.
        """
        if self.state is RequestState.RUNNING:
            return self.num_public + max(0, self.num_computed - self.num_cached)
        return self.num_public

    @property
    def is_prefilling(self) -> bool:
        """Whether it waits, or has started and its prefill is not done."""
        return self.state is not RequestState.RUNNING or self.is_unfinished

    def as_waiting(self) -> Waiting:
        """What it will look up, for eviction to know."""
        return Waiting(self.namespace, self.spec.domain, self.tokens)

    @property
    def num_samples(self) -> int:
        """How many requests this one is, or will be once it forks."""
        if self.num_output_tokens or self.sample:
            return 1
        return self.spec.num_samples

    @property
    def held(self) -> Lease:
        """The lease of a running request."""
        if self.lease is None:
            raise InvariantError(f"request {self.request_id} holds no lease")
        return self.lease

    @property
    def max_tokens(self) -> int:
        """Tokens that will ever need a slot; the last output token never does."""
        return self.num_prompt_tokens + self.spec.max_new_tokens - 1

    def append(self, token: int) -> None:
        """Add an output token."""
        self.extend(token.to_bytes(TOKEN_BYTES, "little", signed=True))

    def extend(self, tokens: bytes) -> None:
        """Add output tokens, int32 little-endian."""
        if isinstance(self._buffer, bytes):
            self._buffer = TokenBuffer(self._buffer)
        self._buffer += tokens
        self._num_tokens += len(tokens) // TOKEN_BYTES

    def count_matched(self, num_matched: int, num_copied: int) -> None:
        """Count prompt tokens that need no first computation, each at most once."""
        num_prompt = self.num_prompt_tokens
        gained = min(num_matched, num_prompt) - min(self.num_counted, num_prompt)
        if gained > 0:
            self.counts.reused += gained
            self.counts.copied += min(gained, num_copied)
        self.num_counted = max(self.num_counted, num_matched)

    def count_computed(self, start: int, end: int) -> None:
        """Count computed tokens; those counted before were lost to a preemption."""
        fresh = max(start, self.num_counted)
        counts = self.counts
        counts.computed += max(0, min(end, self.num_prompt_tokens) - fresh)
        counts.recomputed += min(end, fresh) - start
        self.num_counted = max(self.num_counted, end)

    def start_over(
        self,
        namespace: bytes | None,
        adapter: str | None,
        num_samples: int,
        *,
        domain: Domain,
    ) -> None:
        """Forget everything but the prompt, to be computed again from its start."""
        counts = self.counts
        discarded = counts.reused + counts.computed + counts.recomputed
        self.spec = replace(
            self.spec,
            namespace=namespace,
            adapter=adapter,
            num_samples=num_samples,
            domain=domain,
        )
        self.namespace = namespace
        self.state = RequestState.WAITING
        self.num_computed = 0
        self.num_counted = 0
        self.num_steps_awaiting = 0
        self.counts = TokenCounts(discarded=counts.discarded + discarded)
        self._buffer = self.spec.prompt.buffer
        self._num_tokens = self._num_prompt

    def become_sample(self, parent: Request, sample: int) -> None:
        """Take over the progress of the request whose prefill this one shares."""
        if parent.num_output_tokens or sample < 1:
            raise InvariantError("a request forks once, before its first output token")
        self.sample = sample
        self.request_id = child_id(parent.request_id, sample)
        self.state = RequestState.RUNNING
        self.num_computed = parent.num_computed
        self.first_scheduled_s = parent.first_scheduled_s
        self.num_counted = parent.num_computed
        self.counts = TokenCounts(inherited=parent.num_computed)
