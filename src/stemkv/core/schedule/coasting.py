"""Decodes whose tokens the driver told ahead.

Owns who coasts, on which tokens and until which step, and the counts that a plan needs
of them all. A step costs only what changes in it: a request that coasts is looked at
when it begins and when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.schedule.request import Request, RequestId

__all__ = ["Coasting"]


@dataclass(frozen=True, slots=True, eq=False)
class _Coast:
    """What a request will sample, and since which step it does."""

    request: Request
    tokens: bytes  # int32 little-endian, one a step
    since: int  # steps committed when it began


class Coasting:
    """The requests that coast."""

    def __init__(self) -> None:
        self.context = 0  # sum of contexts in the next step, its tokens included
        self.tenants: dict[str, int] = {}  # how many requests of each
        self._coasts: dict[RequestId, _Coast] = {}
        # (first step in which it does not coast, order, since when it does, its coast):
        # one that began again may wake in the same step as it did before. The first one
        # is live.
        self._wakes: list[tuple[int, tuple[float, int, int], int, _Coast]] = []
        self._num_committed = 0
        self._cancelled: list[Request] = []  # while their step is in flight

    def __len__(self) -> int:
        """Return how many coast."""
        return len(self._coasts)

    def requests(self) -> list[Request]:
        """Return who coasts."""
        return [coast.request for coast in self._coasts.values()]

    def num_quiet(self, step: int) -> int:
        """Return for how many steps from this one on nobody wakes; 0 if nobody coasts."""
        return self._wakes[0][0] - step if self._wakes else 0

    def due(self, step: int) -> Iterator[Request]:
        """Yield who does not coast in this step any more; the caller wakes them."""
        while self._wakes and self._wakes[0][0] <= step:
            yield self._wakes[0][-1].request

    def begin(self, request: Request, tokens: bytes, step: int) -> None:
        """Let a request decode these tokens from a step on."""
        num_steps = len(tokens) // TOKEN_BYTES
        coast = _Coast(request, tokens, self._num_committed)
        request.is_coasting = True
        self._coasts[request.request_id] = coast
        self.context += request.num_tokens
        owner = request.spec.owner
        self.tenants[owner] = self.tenants.get(owner, 0) + 1
        heappush(self._wakes, (step + num_steps, request.order_key, coast.since, coast))

    def end(self, request: Request) -> None:
        """Bring a request up to date, which coasts no more."""
        coast = self._coasts.pop(request.request_id)
        num_steps = self._num_committed - coast.since
        self.context -= request.num_tokens + num_steps
        owner = request.spec.owner
        self.tenants[owner] -= 1
        if not self.tenants[owner]:
            del self.tenants[owner]
        request.count_computed(request.num_computed, request.num_computed + num_steps)
        request.num_computed += num_steps
        request.extend(coast.tokens[: num_steps * TOKEN_BYTES])
        request.is_coasting = False
        while self._wakes and not self._is_live(self._wakes[0][-1]):
            heappop(self._wakes)  # here, so that whoever asks changes nothing

    def cancel(self, request: Request) -> None:
        """Note that a request ends with the step that is in flight."""
        self._cancelled.append(request)

    def take_cancelled(self) -> list[Request]:
        """Return and forget who ends with this step."""
        cancelled = self._cancelled
        self._cancelled = []
        return cancelled

    def committed(self, num_steps: int) -> None:
        """Count steps in which everybody who coasts got a token."""
        self._num_committed += num_steps
        self.context += num_steps * len(self._coasts)

    def _is_live(self, coast: _Coast) -> bool:
        """Whether its request still coasts on it; it may have been woken early."""
        return self._coasts.get(coast.request.request_id) is coast
