"""Amounts of memory and quotas, as people write them in files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stemkv.cli.documents import check_keys, found_in, type_name
from stemkv.core.retention.memory import MemoryQuota
from stemkv.errors import ConfigError

__all__ = ["bytes_of", "number_of", "quota_of"]

_OF_ONE: Final = ("floor", "cap", "weight")


def quota_of(table: Mapping[str, object], where: str) -> MemoryQuota:
    """Return a quota; raises `ConfigError` naming the key."""
    check_keys(table, where, _OF_ONE)
    cap = table.get("cap")
    with found_in(f"{where}."):
        return MemoryQuota(
            floor_bytes=bytes_of(table.get("floor", 0), "floor"),
            cap_bytes=None if cap is None else bytes_of(cap, "cap"),
            weight=number_of(table.get("weight", 1.0), "weight"),
        )


def bytes_of(value: object, where: str) -> int:
    """Return an amount of memory: text with a unit, or 0 for none at all."""
    if value == 0 and not isinstance(value, bool):
        return 0
    if not isinstance(value, str):
        raise ConfigError(
            f'{where} must be text such as "2GiB", or 0, got {type_name(value)}'
        )
    from stemkv.sim.pricing import parse_memory  # only they who name one need the extra

    with found_in(f"{where}: "):
        return parse_memory(value)


def number_of(value: object, where: str) -> float:
    """Return a number."""
    # To Python, true is 1.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where} must be a number, got {type_name(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{where} must be a number that is finite") from None
