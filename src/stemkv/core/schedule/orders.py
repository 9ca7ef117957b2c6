"""Orders by name, with the numbers that they are made with.

Owns the names people type, defaults and their reasons. The orders are in `order`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from stemkv.core.books.cost import CostModel
from stemkv.core.prefix.config import is_number
from stemkv.core.schedule.order import Dfs, Fair, Fcfs, Lpm, Order, Residual
from stemkv.core.schedule.order.keys import latest_start, work_left
from stemkv.errors import ConfigError

__all__ = ["ORDERS", "OrderConfig"]

ORDERS = ("fair", "fcfs", "lpm", "dfs", "residual", "deadline")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderConfig:
    """Which order, and its numbers; those besides `name` are of `fair` and `deadline`.

    Why these defaults: docs/orders.md, with what was measured.
    """

    name: str = "fair"
    # k: of each tenant's prefill tokens one in k goes to its oldest request. Larger: a
    # better middle and a longer worst wait.
    lane: int = 4
    # Weighted tokens that a tenant of weight 1 gets in a round. Smaller: a smaller gap
    # between tenants; larger: more in a row for a tenant with a working set of its own.
    quantum: int = 8192
    decode_weight: float = 2.0  # what a decoded token counts, in prefill tokens
    # Whether an unfinished prefill may wait while another request goes on. Shortens the
    # usual wait where computing is short, and lengthens it where memory is, as paused
    # prefills hold theirs. Of `residual` as well.
    pauses_prefills: bool = True
    weights: Mapping[str, float] = field(
        default_factory=dict
    )  # by tenant, 1 for others
    # Of `deadline`: by request class, seconds from arrival to the first token.
    slo_ttft_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in ORDERS:
            raise ConfigError(
                f"order must be one of {', '.join(ORDERS)}, got {self.name!r:.80}"
            )
        for name in ("lane", "quantum"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{name} must be an integer of at least 1, got {value!r:.80}"
                )
        weight = self.decode_weight
        if not is_number(weight) or not 0 <= weight < math.inf:
            raise ConfigError(
                f"decode_weight must be a number of at least 0, got {weight!r:.80}"
            )
        if not isinstance(self.pauses_prefills, bool):
            raise ConfigError(
                f"pauses_prefills must be true or false, got {self.pauses_prefills!r:.80}"
            )
        for field_name in ("weights", "slo_ttft_s"):
            for key, value in getattr(self, field_name).items():
                if not is_number(value) or not 0 < value < math.inf:
                    raise ConfigError(
                        f"{field_name} of {key!r:.80} must be a number above 0, "
                        f"got {value!r:.80}"
                    )
        if self.name == "deadline" and not self.slo_ttft_s:
            raise ConfigError(
                "order deadline needs slo_ttft_s: for each request class the seconds "
                "from arrival to first token, such as {'chat': 2.0}"
            )

    def make(self, costs: CostModel | None = None) -> Order:
        """Return a new order.

        `costs` predict what uncached tokens take; without them tokens are counted.
        Raises `ConfigError` where only seconds will do.
        """
        match self.name:
            case "fcfs":
                return Fcfs()
            case "lpm":
                return Lpm()
            case "dfs":
                return Dfs()
            case "residual":
                return Residual(costs, pauses_prefills=self.pauses_prefills)
        key = work_left(costs)
        if self.name == "deadline":
            if costs is None:
                raise ConfigError(
                    "order deadline needs a cost model, to know when a request must "
                    "start; give one, or choose another order"
                )
            key = latest_start(costs, self.slo_ttft_s)
        return Fair(
            key,
            lane=self.lane,
            quantum=self.quantum,
            decode_weight=self.decode_weight,
            pauses_prefills=self.pauses_prefills,
            weights=self.weights,
            lapses=self.name == "deadline",
        )
