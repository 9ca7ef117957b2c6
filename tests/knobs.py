"""Settings of a core said flat, as tests change one or two of them.

In the library each stands in the part it belongs to.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from stemkv.core.core import CoreConfig
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.schedule.config import SchedulerConfig

__all__ = ["core_knobs", "engine_config"]

_PARTS = {"cache": CacheConfig, "scheduler": SchedulerConfig}


def core_knobs(settings: dict[str, Any], *, keep: set[str] = frozenset()) -> CoreConfig:  # type: ignore[assignment]
    """Take what a core knows out of `settings`, except what is to be kept there."""
    parts: dict[str, Any] = {}
    for part, kind in _PARTS.items():
        names = {f.name for f in fields(kind)} & settings.keys() - keep
        parts[part] = kind(**{name: settings.pop(name) for name in sorted(names)})
    for part in {f.name for f in fields(CoreConfig)} & settings.keys() - keep:
        parts[part] = settings.pop(part)
    return CoreConfig(**parts)


def engine_config(**settings: Any) -> Any:
    """An `EngineConfig`; quotas are its own, as they are bytes."""
    from stemkv.engine import EngineConfig

    core = core_knobs(settings, keep={"quotas"})
    return EngineConfig(core=core, **settings)
