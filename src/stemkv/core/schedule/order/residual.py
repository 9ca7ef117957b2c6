"""Least work left first: what is cheap because it is short or because it is cached.

A baseline: best in the middle and without bound at the end, as large cold requests wait
as long as smaller ones arrive. `fair` is this, with a bound.
"""

from __future__ import annotations

from stemkv.core.books.cost import CostModel
from stemkv.core.schedule.order.keys import work_left
from stemkv.core.schedule.order.ranked import Ranked

__all__ = ["Residual"]


class Residual(Ranked):
    """The fewest predicted prefill seconds for uncached tokens first."""

    def __init__(
        self, costs: CostModel | None = None, *, pauses_prefills: bool = False
    ) -> None:
        super().__init__(work_left(costs), pauses=pauses_prefills)
