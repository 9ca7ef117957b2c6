"""How a declared next use becomes a digit that an eviction policy can learn from.

Owns the digits. Knows neither policies nor whether what was declared comes true.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from stemkv.core.prefix.hints import Hints

__all__ = ["HintDigits"]

_NEXT_USE_EDGES = (15.0, 60.0, 300.0)  # seconds
_NUM_BUCKETS = len(_NEXT_USE_EDGES) + 2  # the last one: never
_MAX_GROUPS = 8


class HintDigits:
    """Gives each declared next use a digit: by how soon, and by who says so.

    A policy that learns digit by digit finds out how true each tenant's words are, so
    that one who lies makes its own hint worthless and nobody else's. Only the first
    seven tenants that declare anything have digits of their own; all others share one
    group. 0 is the digit of those who say nothing.
    """

    def __init__(self) -> None:
        self._groups: dict[str, int] = {}

    def of(self, tenant: str, hints: Hints) -> int:
        """Return the digit of a request."""
        seconds = hints.next_use_s
        if seconds is None:
            return 0
        group = self._groups.get(tenant)
        if group is None:
            group = len(self._groups)
            if group >= _MAX_GROUPS - 1:
                group = _MAX_GROUPS - 1
            else:
                self._groups[tenant] = group
        if seconds == math.inf:
            bucket = _NUM_BUCKETS - 1
        else:
            bucket = bisect_right(_NEXT_USE_EDGES, seconds)
        return 1 + group * _NUM_BUCKETS + bucket
