"""As many sessions at once as fit: an opt-in limit for closed loops. An experiment.

Owns which sessions are active and how much memory each works with, measured: the largest
context it has had. Knows neither order nor cache. Agents that take turns evict each
other's contexts once all of them together exceed memory, whatever the order; here a
session that is not active waits as a whole, and one that has been served gives its place
back when it pauses or others have waited long enough.

What is known of a session comes from its callers (`Hints.session`); requests without one
are not limited.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stemkv.core.prefix.config import CacheConfig, is_number, knob
from stemkv.core.prefix.identity import Domain
from stemkv.core.schedule.request import Request, RequestId, RequestState
from stemkv.errors import ConfigError

__all__ = ["SessionConfig", "SessionGate"]

_Key = tuple[Domain, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """How much of the memory active sessions may work with, and when they give way."""

    share: float = knob(
        0.9,
        "Experiment: share of the memory that active sessions may work with; the others "
        "wait [default: no limit].",
    )
    idle_s: float = 10.0  # a pause after which a session gives way to one that waits
    patience_s: float = 60.0  # a wait after which an active session gives way, paused

    def __post_init__(self) -> None:
        if not is_number(self.share) or not 0 < self.share <= 1:
            raise ConfigError(
                f"sessions.share must be above 0 and at most 1, got {self.share!r:.80}"
            )
        for name in ("idle_s", "patience_s"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < float("inf"):
                raise ConfigError(
                    f"sessions.{name} must be a number of seconds of at least 0, "
                    f"got {value!r:.80}"
                )


class SessionGate:
    """Decides whose session may start requests now; without limits, everybody's."""

    def __init__(self, limits: SessionConfig | None, cache: CacheConfig) -> None:
        self.has_limits = limits is not None
        self._config = SessionConfig() if limits is None else limits
        self._most = max(1, int(self._config.share * cache.num_blocks))
        self._block_size = cache.block_size
        self._active: dict[_Key, _Session] = {}
        self._num_blocks = 0  # that active sessions work with
        self._waiting: dict[RequestId, Request] = {}  # held, the oldest first

    def __len__(self) -> int:
        """Return how many requests are held."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Sessions that may start requests."""
        return len(self._active)

    def admits(self, request: Request, now: float, *, is_alone: bool) -> bool:
        """Whether a request may start as far as sessions are concerned.

        Makes its session active if there is room, or if others give way. `is_alone`:
        nothing runs, so somebody has to.
        """
        key = self._key_of(request)
        if key is None:
            return True
        session = self._active.get(key)
        if session is None:
            num_blocks = self._blocks_of(request)
            if not self._make_room(num_blocks, request, now, is_alone=is_alone):
                return False
            session = self._active[key] = _Session(num_blocks, now)
            self._num_blocks += num_blocks
        return True

    def hold(self, request: Request) -> None:
        """Remember a request that was not admitted."""
        self._waiting[request.request_id] = request

    def forget(self, request: Request) -> None:
        """Forget a request that is held no longer."""
        self._waiting.pop(request.request_id, None)

    def started(self, request: Request) -> None:
        """Hear that a request runs."""
        session = self._session_of(request)
        if session is not None:
            session.num_running += 1

    def stopped(self, request: Request, now: float) -> None:
        """Hear that a request runs no more; its context is what the session needs."""
        session = self._session_of(request)
        if session is None:
            return
        session.num_running -= 1
        session.last_s = now
        grown = max(0, self._blocks_of(request) - session.num_blocks)
        session.num_blocks += grown
        self._num_blocks += grown

    def ended(self, domain: Domain, name: str) -> None:
        """Hear that a session is over."""
        self._drop((domain, name))

    def due(self, now: float, *, is_alone: bool) -> Iterator[Request]:
        """Yield held requests that may start now, the oldest first."""
        for request in tuple(self._waiting.values()):
            key = self._key_of(request)
            if key in self._active or self.admits(request, now, is_alone=is_alone):
                yield request
                is_alone = False
            elif request.state is not RequestState.PREEMPTED:
                # Who came later does not pass, or large contexts would wait for ever.
                return

    def _make_room(
        self, num_blocks: int, request: Request, now: float, *, is_alone: bool
    ) -> bool:
        """Let paused sessions give way, longest paused first, until there is room."""
        if self._num_blocks + num_blocks <= self._most or not self._active:
            return True
        waited = now - request.spec.arrival_s
        is_urgent = is_alone or waited > self._config.patience_s
        pause = 0.0 if is_urgent else self._config.idle_s
        paused = sorted(
            (
                (session.last_s, place, key)
                for place, (key, session) in enumerate(self._active.items())
                if not session.num_running and now - session.last_s >= pause
            ),
        )
        freed = 0
        leaving: list[_Key] = []
        for _, _, key in paused:
            if self._num_blocks - freed + num_blocks <= self._most:
                break
            freed += self._active[key].num_blocks
            leaving.append(key)
        if self._num_blocks - freed + num_blocks > self._most and not is_alone:
            return False
        for key in leaving:
            self._drop(key)
        return True

    def _drop(self, key: _Key) -> None:
        session = self._active.get(key)
        if session is not None and not session.num_running:
            self._num_blocks -= session.num_blocks
            del self._active[key]

    def _session_of(self, request: Request) -> _Session | None:
        key = self._key_of(request)
        return None if key is None else self._active.get(key)

    def _key_of(self, request: Request) -> _Key | None:
        name = request.spec.hints.session
        if name is None or not self.has_limits:
            return None
        return (request.spec.domain, name)

    def _blocks_of(self, request: Request) -> int:
        return -(-request.num_tokens // self._block_size)


@dataclass(slots=True)
class _Session:
    num_blocks: int  # largest context so far
    last_s: float  # when it was last served
    num_running: int = 0
