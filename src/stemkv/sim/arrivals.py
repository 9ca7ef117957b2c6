"""When requests arrive and what they are made of, for a scheduler with real tokens.

Owns the expansion of unit ids to token ids, and who waits for whom in a closed loop.
Knows no replica. Token ids are made up: a unit's id, repeated. Chained ids differ
wherever prompts differ, so prompts share exactly the tokens of their common units.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import parse_qsl

import numpy as np

from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.request import RequestId, RequestSpec
from stemkv.errors import ConfigError
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace, TraceRequest

__all__ = ["LOOPS", "Arrivals", "LoadConfig", "identity_facts", "public_tokens"]

LOOPS = ("open", "closed")
_OWN = 1 << 30  # what no other request has: above all unit ids


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How a trace's times are turned into arrivals.

    Open loop: everybody arrives as recorded. Closed loop: a request with a parent
    arrives `think_s` after that ended, whenever it did; the others as recorded.
    """

    loop: str = "open"
    rate: float = 1.0  # arrivals per recorded arrival; 2: twice as fast
    # Seconds over which arrivals with one and the same time are spread, for traces
    # whose clock ticks coarsely; 0 leaves them.
    spread_s: float = 0.0
    seed: int = 0  # of the spreading

    def __post_init__(self) -> None:
        if self.loop not in LOOPS:
            raise ConfigError(f"loop must be open or closed, got {self.loop!r:.80}")
        for name, minimum in (("rate", 0.0), ("spread_s", -1.0)):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= minimum or value < 0:
                raise ConfigError(f"{name} must be a positive number, got {value!r}")


class Arrivals:
    """The requests of a trace, as specs, and the times of those that wait for nobody."""

    def __init__(self, trace: Trace, rule: SharingRule, load: LoadConfig) -> None:
        self._trace = trace
        self._rule = rule
        self._load = load
        self._children: dict[int, list[int]] = {}
        if load.loop == "closed":
            for index, request in enumerate(trace.requests):
                if request.parent is not None:
                    self._children.setdefault(request.parent, []).append(index)

    def first(self) -> list[tuple[float, int]]:
        """Return (arrival, index) of all requests that wait for nobody, by time."""
        is_closed = self._load.loop == "closed"
        times = [
            (self._arrival_s(request), index)
            for index, request in enumerate(self._trace.requests)
            if not (is_closed and request.parent is not None)
        ]
        if self._load.spread_s:
            times = list(self._spread(times))
        return sorted(times)

    def after(self, index: int, ended_s: float) -> Iterator[tuple[float, int]]:
        """Yield (arrival, index) of the requests that waited for this one to end."""
        for child in self._children.get(index, ()):
            yield ended_s + self._trace.requests[child].think_s, child

    def spec(self, index: int, arrival_s: float) -> RequestSpec:
        """Return what a scheduler is asked for request `index`."""
        request = self._trace.requests[index]
        namespace, domain = self._rule.of(request)
        return RequestSpec(
            request_id=RequestId(str(index)),
            prompt=TokenIds(_prompt(request, self._trace.unit_size, index)),
            max_new_tokens=max(1, request.output_length),
            arrival_s=arrival_s,
            domain=domain,
            namespace=None if request.is_opaque else namespace,
            tenant=request.tenant,
            request_class=request.tenant,  # traces tell no other
        )

    def output_token(self, index: int) -> int:
        """Return the token that request `index` samples: one that nobody else has.

        So what is written while decoding is never reused: traces do not tell which
        tokens of a later prompt an answer became.
        """
        return _OWN + index

    def _arrival_s(self, request: TraceRequest) -> float:
        return request.arrival_s / self._load.rate

    def _spread(self, times: list[tuple[float, int]]) -> Iterator[tuple[float, int]]:
        rng = random.Random(self._load.seed)
        counts: dict[float, int] = {}
        for arrival_s, _ in times:
            counts[arrival_s] = counts.get(arrival_s, 0) + 1
        offsets = {
            arrival_s: sorted(rng.random() * self._load.spread_s for _ in range(count))
            for arrival_s, count in counts.items()
            if count > 1
        }
        for arrival_s, index in times:
            later = offsets.get(arrival_s)
            yield (arrival_s + later.pop(0) if later else arrival_s), index


def public_tokens(trace: Trace, rule: SharingRule) -> list[tuple[bytes, TokenIds]]:
    """Return (namespace, prefix) of all that the rule declares public."""
    return [
        (namespace, TokenIds(_expand(np.asarray(units, np.int32), trace.unit_size)))
        for namespace, prefixes in sorted(rule.public_prefixes(trace).items())
        for units in prefixes
    ]


def identity_facts(identity: str) -> dict[str, str]:
    """Return what a trace's identity says, by name, to tell two of them apart."""
    facts = dict(parse_qsl(identity, keep_blank_values=True))
    return facts if facts or not identity else {"identity": identity}


def _prompt(request: TraceRequest, unit_size: int, index: int) -> bytes:
    units = np.frombuffer(request.units, np.int32)
    tokens = _expand(units, unit_size)[: 4 * request.input_length]
    num_missing = request.input_length - len(tokens) // 4
    # A tail that the trace does not describe is taken for the request's own.
    return tokens + (_OWN + index).to_bytes(4, "little") * num_missing


def _expand(units: np.ndarray[tuple[int], np.dtype[np.int32]], unit_size: int) -> bytes:
    return np.repeat(units, unit_size).astype("<i4", copy=False).tobytes()
