"""`--quotas FILE`: who may retain how much, as an operator writes it.

Owns the JSON and every sentence about what is wrong with it:

    {
      "tenants": {
        "acme": {"floor": "2GiB", "cap": "8GiB", "weight": 2},
        "globex": {"floor": "512MiB"}
      },
      "default": {"cap": "4GiB"},
      "public": "1GiB"
    }

What quotas mean is `sim.quotas`' and the core's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stemkv.cli.documents import (
    check_keys,
    found_in,
    joined,
    parse_json,
    read_text,
    type_name,
)
from stemkv.errors import ConfigError
from stemkv.sim.pricing import parse_memory
from stemkv.sim.quotas import MemoryQuota, TenantQuotas

__all__ = ["read_quotas"]

_KEYS: Final = ("tenants", "default", "public")
_OF_TENANT: Final = ("floor", "cap", "weight")


def read_quotas(path: Path) -> TenantQuotas:
    """Read a file of quotas; raises `ConfigError` naming the file and the field."""
    with found_in(f"{path}: "):
        document = _object(parse_json(read_text(path)), "the file")
        check_keys(document, "", _KEYS)
        tenants = _object(document.get("tenants", {}), "tenants")
        quotas = {
            tenant: _quota(quota, joined("tenants", tenant))
            for tenant, quota in tenants.items()
        }
        if "" in quotas:
            raise ConfigError('tenants."": a tenant must have a name')
        return TenantQuotas(
            tenants=quotas,
            default=_quota(document.get("default", {}), "default"),
            public_bytes=_bytes(document.get("public", 0), "public"),
        )


def _quota(value: object, where: str) -> MemoryQuota:
    quota = _object(value, where)
    check_keys(quota, where, _OF_TENANT)
    cap = quota.get("cap")
    with found_in(f"{where}."):
        return MemoryQuota(
            floor_bytes=_bytes(quota.get("floor", 0), "floor"),
            cap_bytes=None if cap is None else _bytes(cap, "cap"),
            weight=_weight(quota.get("weight", 1.0)),
        )


def _bytes(value: object, where: str) -> int:
    """Return an amount of memory: text with a unit, or 0 for none at all."""
    if value == 0 and not isinstance(value, bool):
        return 0
    if not isinstance(value, str):
        raise ConfigError(
            f'{where} must be text such as "2GiB", or 0, got {type_name(value)}'
        )
    with found_in(f"{where}: "):
        return parse_memory(value)


def _weight(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"weight must be a number above 0, got {type_name(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ConfigError("weight must be a number that is finite") from None


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be an object, got {type_name(value)}")
    return value
