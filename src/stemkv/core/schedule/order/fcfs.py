"""First come, first served: a preempted request returns to the place it had."""

from __future__ import annotations

from stemkv.core.schedule.order.keys import by_arrival
from stemkv.core.schedule.order.ranked import Ranked

__all__ = ["Fcfs"]


class Fcfs(Ranked):
    """By arrival; ties by the order of `add`. Blind to what is cached."""

    def __init__(self) -> None:
        super().__init__(by_arrival)
