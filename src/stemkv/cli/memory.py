"""`[eviction]` and `[quotas]` of the settings file: who may retain KV, and what goes.

Owns these two tables and every sentence about what is wrong with them; amounts of
memory are written as everywhere on the command line. What they mean is the engine's and
the core's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from stemkv.cli.amounts import bytes_of, number_of, quota_of
from stemkv.cli.documents import check_keys, checked, found_in, joined
from stemkv.core.books.cost import CostModel
from stemkv.core.core import CoreConfig
from stemkv.core.retention.policies import EvictionConfig
from stemkv.engine import MemoryQuotas
from stemkv.errors import ConfigError

__all__ = ["MemorySettings", "read_memory"]

_EVICTION: Final = ("policy", "objective", "cost_file", "lookahead", "max_kept_share")
_QUOTAS: Final = ("tenants", "groups", "default", "public")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """What a settings file says of retained memory."""

    core: CoreConfig = field(default_factory=CoreConfig)  # what is said of eviction
    quotas: MemoryQuotas | None = None
    costs: CostModel | None = None  # what the objective of seconds weighs blocks with


def read_memory(document: Mapping[str, object], folder: Path) -> MemorySettings:
    """Read the two tables of a settings file; paths are relative to `folder`."""
    eviction = checked(document.get("eviction", {}), dict, "eviction")
    check_keys(eviction, "eviction", _EVICTION)
    words = {
        name: checked(eviction[key], str, f"eviction.{key}")
        for key, name in (("policy", "name"), ("objective", "objective"))
        if key in eviction
    }
    core = CoreConfig()
    with found_in("eviction: "):
        core = replace(core, eviction=EvictionConfig(**words))
    costs = None
    if "cost_file" in eviction:
        from stemkv.sim.fit import read_cost  # only they who name one need the extra

        path = checked(eviction["cost_file"], str, "eviction.cost_file")
        costs = read_cost(folder / path)
    elif core.eviction.objective == "seconds":
        raise ConfigError(
            "eviction.cost_file is missing: the objective seconds weighs blocks by what "
            "they cost; make the file with `stemkv calibrate --out`"
        )
    if "lookahead" in eviction:
        lookahead = checked(eviction["lookahead"], int, "eviction.lookahead")
        core = replace(core, scheduler=replace(core.scheduler, lookahead=lookahead))
    if "max_kept_share" in eviction:
        share = number_of(eviction["max_kept_share"], "eviction.max_kept_share")
        core = replace(core, cache=replace(core.cache, max_kept_share=share))
    quotas = None
    if "quotas" in document:
        quotas = _quotas(checked(document["quotas"], dict, "quotas"))
    return MemorySettings(core=core, quotas=quotas, costs=costs)


def _quotas(table: dict[str, object]) -> MemoryQuotas:
    check_keys(table, "quotas", _QUOTAS)
    named = {
        kind: {
            name: quota_of(
                checked(quota, dict, joined(f"quotas.{kind}", name)),
                joined(f"quotas.{kind}", name),
            )
            for name, quota in checked(
                table.get(kind, {}), dict, f"quotas.{kind}"
            ).items()
        }
        for kind in ("tenants", "groups")
    }
    with found_in("quotas."):
        return MemoryQuotas(
            tenants=named["tenants"],
            groups=named["groups"],
            default=quota_of(
                checked(table.get("default", {}), dict, "quotas.default"),
                "quotas.default",
            ),
            public_bytes=bytes_of(table.get("public", 0), "public"),
        )
