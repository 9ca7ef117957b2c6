"""What has come of requests, on its way to those who wait for it.

Owns the order: what is put in first is told first, to whichever listener it is for, and
what a listener's own calls bring about comes after all that happened before them. So
nothing that is said of one request can overtake anything else. Completions wait until
somebody takes them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterable
from typing import Literal, Protocol

import torch

from stemkv.core.books.entry import LedgerEntry
from stemkv.core.books.ledger import Ledger
from stemkv.core.schedule.events import Event
from stemkv.core.schedule.request import RequestId
from stemkv.engine.delta import Delta
from stemkv.engine.samples import Completion, LiveSamples
from stemkv.errors import InvariantError

__all__ = ["Listeners", "Outbox"]

_log = logging.getLogger(__name__)

ListenerName = Literal["on_event", "on_delta", "on_entry"]
News = Event | Delta | LedgerEntry


class Listeners(Protocol):
    """Who listens; looked up anew for every piece of news, so it may change."""

    on_logits: Callable[[RequestId, int, torch.Tensor], None] | None
    on_event: Callable[[Event], None] | None
    on_delta: Callable[[Delta], None] | None
    on_entry: Callable[[LedgerEntry], None] | None


class Outbox:
    """First in, first out, for all listeners together."""

    def __init__(
        self, listeners: Listeners, samples: LiveSamples, ledger: Ledger | None
    ) -> None:
        self._listeners = listeners
        self._samples = samples
        self._ledger = ledger
        self._news: deque[tuple[ListenerName, News]] = deque()
        self._ended: list[Completion] = []
        self._is_telling = False

    @property
    def is_telling(self) -> bool:
        """Whether a listener is being called."""
        return self._is_telling

    @property
    def num_ended(self) -> int:
        """Completions that nobody has taken yet."""
        return len(self._ended)

    def settle(self, events: Iterable[Event]) -> None:
        """Carry over what happened: to completions, and to news of it."""
        for event in events:
            deltas, completions = self._samples.settle(event)
            self._news.append(("on_event", event))
            self._news.extend(("on_delta", delta) for delta in deltas)
            self._ended.extend(completions)
        if self._ledger is not None:
            entries = self._ledger.take_entries()
            self._news.extend(("on_entry", entry) for entry in entries)

    def take_ended(self, of: Container[RequestId] | None = None) -> list[Completion]:
        """Hand out the completions of some requests, or of all."""
        taken: list[Completion] = []
        left: list[Completion] = []
        for each in self._ended:
            (taken if of is None or each.request_id in of else left).append(each)
        self._ended = left
        return taken

    def put_back(self, completions: list[Completion]) -> None:
        """Keep completions that were taken for whoever asks next."""
        self._ended[:0] = completions

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

    def _tell(self, name: ListenerName, each: News) -> None:
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
