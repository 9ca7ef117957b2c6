"""News of requests on their way to those who listen.

Owns the order: what is put in first is told first, to whichever listener it is for, and
what a listener's own calls bring about comes after all that happened before them. So
nothing that is said of one request can overtake anything else. Knows nothing of what
the news mean.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from stemkv.core.books.entry import LedgerEntry
from stemkv.core.schedule.events import Event
from stemkv.engine.delta import Delta
from stemkv.errors import InvariantError

__all__ = ["Listeners", "Outbox"]

_log = logging.getLogger(__name__)

ListenerName = Literal["on_event", "on_delta", "on_entry"]


class Listeners(Protocol):
    """Who listens; looked up anew for every piece of news, so it may change."""

    on_event: Callable[[Event], None] | None
    on_delta: Callable[[Delta], None] | None
    on_entry: Callable[[LedgerEntry], None] | None


class Outbox:
    """First in, first out, for all listeners together."""

    def __init__(self, listeners: Listeners) -> None:
        self._listeners = listeners
        self._news: deque[tuple[ListenerName, Event | Delta | LedgerEntry]] = deque()
        self._is_telling = False

    @property
    def is_telling(self) -> bool:
        """Whether a listener is being called."""
        return self._is_telling

    def put(
        self, name: ListenerName, news: Iterable[Event | Delta | LedgerEntry]
    ) -> None:
        """Queue news for one listener."""
        self._news.extend((name, each) for each in news)

    def tell(self) -> None:
        """Tell all that is queued, also what comes up meanwhile.

        From within a listener it does nothing: the news wait until that one is done. A
        listener that fails misses what is queued for it, and harms nobody else. What
        is no `Exception` passes through; the rest is told next time.
        """
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._news:
                name, each = self._news.popleft()
                self._tell(name, each)
        finally:
            self._is_telling = False

    def _tell(self, name: ListenerName, each: Event | Delta | LedgerEntry) -> None:
        listener = getattr(self._listeners, name)
        if listener is None:
            return
        try:
            listener(each)
        except InvariantError:
            raise  # from a verb that it called: not the listener's fault
        except Exception:
            # Who only listens must not stop the engine, nor lose anybody's answer.
            _log.exception("%s failed; it misses what was queued for it", name)
            self._news = deque(news for news in self._news if news[0] != name)
