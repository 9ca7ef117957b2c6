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

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stemkv.cli.amounts import bytes_of, quota_of
from stemkv.cli.documents import (
    check_keys,
    found_in,
    joined,
    parse_json,
    read_text,
    type_name,
)
from stemkv.core.books.cost import CostModel
from stemkv.errors import ConfigError
from stemkv.sim.config import ReplayConfig
from stemkv.sim.quotas import TenantQuotas
from stemkv.sim.replay import check_quotas
from stemkv.sim.trace import Trace

__all__ = ["check_in", "read_quotas"]

_MAX_NAMES = 8  # that a note lists

_KEYS: Final = ("tenants", "default", "public")


def read_quotas(path: Path) -> TenantQuotas:
    """Read a file of quotas; raises `ConfigError` naming the file and the field."""
    with found_in(f"{path}: "):
        document = _object(parse_json(read_text(path)), "the file")
        check_keys(document, "", _KEYS)
        tenants = _object(document.get("tenants", {}), "tenants")
        quotas = {
            tenant: quota_of(
                _object(quota, joined("tenants", tenant)), joined("tenants", tenant)
            )
            for tenant, quota in tenants.items()
        }
        if "" in quotas:
            raise ConfigError('tenants."": a tenant must have a name')
        return TenantQuotas(
            tenants=quotas,
            default=quota_of(
                _object(document.get("default", {}), "default"), "default"
            ),
            public_bytes=bytes_of(document.get("public", 0), "public"),
        )


def check_in(
    path: Path, trace: Trace, configs: Sequence[ReplayConfig], costs: CostModel
) -> None:
    """Check a file's quotas, which configurations have, against a trace and memory.

    Raises `ConfigError` naming the file. Tenants who send nothing are noted with the
    trace: their names may be misspelt, and their floors are kept all the same.
    """
    with found_in(f"{path}: "):
        for config in configs:
            check_quotas(trace, config, costs)
    quotas = next((each.quotas for each in configs if each.quotas is not None), None)
    absent = [] if quotas is None else quotas.absent(trace)
    if absent:
        named = ", ".join(absent[:_MAX_NAMES])
        more = len(absent) - _MAX_NAMES
        trace.notes.append(
            f"{path} has quotas of {named}{f' and {more:,} more' if more > 0 else ''}, "
            f"who send nothing here; floors are kept for them all the same"
        )


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be an object, got {type_name(value)}")
    return value
