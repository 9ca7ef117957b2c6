"""Settings of a core said flat, as tests change one or two of them.

In the library each stands in the part it belongs to.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from stemkv.core.core import CoreConfig
from stemkv.core.retention.policies import EvictionConfig
from stemkv.sim.config import ReplayConfig
from stemkv.sim.presets import LARGE

if TYPE_CHECKING:
    from stemkv.engine import EngineConfig  # which takes a while to import

__all__ = ["core_knobs", "engine_config", "replay_config"]


def core_knobs(
    settings: dict[str, Any], base: CoreConfig, *, keep: set[str]
) -> CoreConfig:
    """Take what a core knows out of `settings`, except what is to be kept there."""
    parts: dict[str, Any] = {}
    for part in ("cache", "scheduler"):
        config = getattr(base, part)
        names = {f.name for f in fields(config)} & settings.keys() - keep
        parts[part] = replace(config, **{name: settings.pop(name) for name in names})
    for part in {f.name for f in fields(CoreConfig)} & settings.keys() - keep:
        parts[part] = settings.pop(part)
    return replace(base, **parts)


def engine_config(**settings: Any) -> EngineConfig:
    """An `EngineConfig`; quotas are its own, as they are bytes."""
    from stemkv.engine import EngineConfig

    core = core_knobs(settings, CoreConfig(), keep={"quotas"})
    return EngineConfig(core=core, **settings)


def replay_config(**settings: Any) -> ReplayConfig:
    """A `ReplayConfig`, on the core of a large GPU unless told otherwise."""
    eviction = settings.pop("eviction", LARGE.eviction.name)
    objective = settings.pop("objective", LARGE.eviction.objective)
    lookahead = settings.pop("lookahead", None)
    if lookahead is not None:
        settings |= {"untimed_lookahead": lookahead, "lookahead": lookahead}
    core = core_knobs(settings, LARGE, keep={"quotas"})
    core = replace(core, eviction=EvictionConfig(objective=objective))
    return ReplayConfig(core=core, **settings).evicting(eviction)
