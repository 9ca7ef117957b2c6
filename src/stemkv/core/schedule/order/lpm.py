"""Longest cached prefix first, as SGLang's default (`schedule_policy.py`, "lpm").

A baseline: it has no bound on waiting, and with one hot prefix it knows two classes.
"""

from __future__ import annotations

from stemkv.core.schedule.order.keys import by_cached
from stemkv.core.schedule.order.ranked import Ranked

__all__ = ["Lpm"]


class Lpm(Ranked):
    """The most cached tokens first; ties by arrival."""

    def __init__(self) -> None:
        super().__init__(by_cached)
