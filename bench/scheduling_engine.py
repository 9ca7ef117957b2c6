"""The engine's part of `bench.scheduling`: a backlog on the embedded model."""

from __future__ import annotations

from bench.report import Bar

__all__ = ["engine_backlog"]


def engine_backlog(is_quick: bool) -> list[Bar]:
    """Nothing yet."""
    return []
