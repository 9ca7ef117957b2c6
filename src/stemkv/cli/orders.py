"""What of an order's settings has to be in the trace."""

from __future__ import annotations

from stemkv.core.schedule.orders import OrderConfig
from stemkv.errors import ConfigError
from stemkv.sim.trace import Trace

__all__ = ["check_names"]


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
