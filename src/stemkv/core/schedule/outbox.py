"""News in the order in which it happened.

Owns the order. Whoever hears of something may cause more news while he listens: that
comes after all that happened before it, and nothing is heard twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

__all__ = ["Outbox"]

T = TypeVar("T")


class Outbox(Generic[T]):
    """A queue of news that is either taken or delivered."""

    def __init__(self) -> None:
        self._news: deque[T] = deque()
        self._is_delivering = False

    def __len__(self) -> int:
        """Return how much nobody has heard yet."""
        return len(self._news)

    def put(self, news: T) -> None:
        """Add what just happened."""
        self._news.append(news)

    def extend(self, news: Iterable[T]) -> None:
        """Add what happened, in its order."""
        self._news.extend(news)

    def take(self) -> tuple[T, ...]:
        """Return and forget what nobody has heard yet."""
        taken = tuple(self._news)
        self._news.clear()
        return taken

    def deliver(self, listener: Callable[[T], None]) -> None:
        """Tell a listener one thing after another, those included that it causes.

        Inside a delivery this returns at once: the one that runs tells the rest, so
        what a listener causes cannot overtake what it has not heard yet. If a listener
        raises, what it was told counts as heard and the rest stays.
        """
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._news:
                listener(self._news.popleft())
        finally:
            self._is_delivering = False
