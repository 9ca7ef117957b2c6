"""What people say of admission orders, as settings of a replay.

Owns the words of the options and the messages about them. The orders are the core's.
"""

from __future__ import annotations

from dataclasses import dataclass

from stemkv.core.schedule.orders import OrderConfig
from stemkv.core.schedule.sessions import SessionConfig
from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace

__all__ = ["OrderOptions", "check_names", "pairs_listed", "sessions_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOptions:
    """An order as it was asked for."""

    lane: int = 4
    quantum: int = 8192
    decode_weight: float = 2.0
    pauses_prefills: bool = True
    weights: str | None = None  # "acme=2,globex=1"
    slo_classes: str | None = None  # "acme=2,globex=10", seconds

    def config(self, name: str) -> OrderConfig:
        """Return the settings of one order; raises `ConfigError`."""
        return OrderConfig(
            name=name,
            lane=self.lane,
            quantum=self.quantum,
            decode_weight=self.decode_weight,
            pauses_prefills=self.pauses_prefills,
            weights=pairs_listed("--weights", self.weights),
            slo_ttft_s=pairs_listed("--slo-class", self.slo_classes),
        )


def sessions_of(share: float | None) -> SessionConfig | None:
    """Return the limit on active sessions; `None`: there is none."""
    return None if share is None else SessionConfig(share=share)


def pairs_listed(option: str, text: str | None) -> dict[str, float]:
    """Return the numbers of a list such as `acme=2,globex=0.5`, by name."""
    pairs: dict[str, float] = {}
    for word in [] if text is None else text.split(","):
        name, sign, number = word.strip().rpartition("=")
        try:
            value = float(number)
        except ValueError:
            sign = ""
            value = 0.0
        if not sign or not name:
            raise ConfigError(
                f"{option} takes names and numbers as in acme=2,globex=0.5, "
                f"got {word!r:.60}"
            )
        if name in pairs:
            raise ConfigError(f"{option} has {name!r:.60} twice")
        pairs[name] = value
    return pairs


def check_names(order: OrderConfig, trace: Trace) -> None:
    """Raise `ConfigError` for a name in an order's settings that no tenant has."""
    known = trace.tenants()
    for option, named in (
        ("--weights", order.weights),
        ("--slo-class", order.slo_ttft_s),
    ):
        strange = sorted(set(named) - set(known))
        if strange:
            raise ConfigError(
                f"{option}: the trace has no tenant {strange[0]!r:.60}; it has "
                f"{', '.join(known[:5])}{' …' if len(known) > 5 else ''}"
            )
