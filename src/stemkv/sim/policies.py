"""The words for policies, as people type them.

Owns which names a replay accepts. The policies are the core's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final, TypeVar

from stemkv.core.eviction import EvictionPolicy, Lru
from stemkv.core.order import AdmissionOrder, Fcfs
from stemkv.errors import ConfigError

__all__ = ["EVICTIONS", "ORDERS", "eviction_named", "order_named"]

EVICTIONS: Final = MappingProxyType[str, Callable[[], EvictionPolicy]]({"lru": Lru})
ORDERS: Final = MappingProxyType[str, Callable[[], AdmissionOrder]]({"fcfs": Fcfs})

T = TypeVar("T")


def eviction_named(name: str) -> EvictionPolicy:
    """Return a new eviction policy; `ConfigError` lists the names."""
    return _named("eviction", EVICTIONS, name)


def order_named(name: str) -> AdmissionOrder:
    """Return a new admission order; `ConfigError` lists the names."""
    return _named("order", ORDERS, name)


def _named(what: str, known: MappingProxyType[str, Callable[[], T]], name: str) -> T:
    make = known.get(name)
    if make is None:
        raise ConfigError(f"{what} must be one of {', '.join(known)}, got {name!r:.80}")
    return make()
