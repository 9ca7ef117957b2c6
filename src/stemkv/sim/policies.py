"""The words for policies, as people type them.

Owns which names a replay accepts: the core's policies, and the one that only a replay
can have. The policies are the core's and `clairvoyant`'s.
"""

from __future__ import annotations

from typing import Final

from stemkv.core.retention.policies import EVICTIONS as _ONLINE
from stemkv.core.retention.policies import OBJECTIVES
from stemkv.core.schedule.orders import ORDERS
from stemkv.errors import ConfigError

__all__ = [
    "CLAIRVOYANT",
    "EVICTIONS",
    "OBJECTIVES",
    "ONLINE_EVICTIONS",
    "ORDERS",
    "check_eviction",
    "check_online",
]

CLAIRVOYANT: Final = "clairvoyant"  # knows the trace: for replays without a clock
ONLINE_EVICTIONS: Final = _ONLINE  # what an engine can have
EVICTIONS: Final = (*ONLINE_EVICTIONS, CLAIRVOYANT)


def check_eviction(name: str) -> None:
    """Raise `ConfigError` for a name that no policy has."""
    if name not in EVICTIONS:
        raise ConfigError(
            f"eviction must be one of {', '.join(EVICTIONS)}, got {name!r:.80}"
        )


def check_online(name: str) -> None:
    """Raise `ConfigError` for a policy that needs to know the future."""
    check_eviction(name)
    if name == CLAIRVOYANT:
        raise ConfigError(
            f"eviction {CLAIRVOYANT} has to know which request comes next, which with a "
            f"clock depends on what it evicts; replay without a clock, or take one of "
            f"{', '.join(ONLINE_EVICTIONS)}"
        )
