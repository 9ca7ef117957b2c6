"""Orders by name, with the numbers that they are made with.

Owns the names people type, defaults and their reasons. The orders are in `order`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stemkv.core.books.cost import CostModel
from stemkv.core.prefix.config import is_number, knob, knob_of
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
    # Larger: a better middle and a longer worst wait.
    lane: int = knob(
        4,
        "fair: one in so many of a tenant's prefill tokens goes to its oldest request; "
        "bounds everybody's wait.",
    )
    # Smaller: a smaller gap between tenants; larger: more in a row for a tenant with a
    # working set of its own.
    quantum: int = knob(
        8192, "fair: tokens a tenant gets in a round, times its weight."
    )
    decode_weight: float = knob(
        2.0, "fair: what a decoded token counts, in prefill tokens."
    )
    # Shortens the usual wait where computing is short, and lengthens it where memory is,
    # as paused prefills hold theirs.
    pauses_prefills: bool = knob(
        True,
        "fair, residual: an unfinished prefill may wait while others go on; better where "
        "computing is short, worse where memory is.",
    )
    weights: Mapping[str, float] = knob_of(
        dict, "fair: of tenants, as in acme=2,globex=0.5."
    )
    slo_ttft_s: Mapping[str, float] = knob_of(
        dict,
        "deadline: seconds to the first token by class, as in acme=2,globex=10; in a "
        "replay the class of a request is its tenant.",
    )

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
