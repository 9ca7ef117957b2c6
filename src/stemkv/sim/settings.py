"""What a result says of the trace and the settings it came from.

Owns their names in results. A setting of the core is named as its field is and is there
without a line here, unless two parts have one of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from stemkv.core.core import CoreConfig
from stemkv.measure.results import GIB, TraceFacts
from stemkv.sim.config import ReplayConfig
from stemkv.sim.trace import Trace

__all__ = ["core_settings", "replay_settings", "trace_facts"]

Settings = dict[str, str | int | float | None]

_MAX_PROBLEMS = 20
_NAMES = {
    ("eviction", "name"): "eviction",
    ("order", "name"): "order",
    ("order", "slo_ttft_s"): "slo_ttft_s_by_class",
    ("sessions", "share"): "session_share",
}
_UNSAID = {"max_kept_share", "idle_s", "patience_s"}  # nothing of a replay changes them


def core_settings(core: CoreConfig) -> Settings:
    """Return the settings of a core by name, in the order of their fields."""
    found: Settings = {"session_share": None}
    for part in ("cache", "scheduler", "eviction", "order", "sessions"):
        config = getattr(core, part)
        for field in fields(config) if config is not None else ():
            if field.name not in _UNSAID:
                value = getattr(config, field.name)
                name = _NAMES.get((part, field.name), field.name)
                found[name] = _listed(value) if isinstance(value, Mapping) else value
    return found


def replay_settings(config: ReplayConfig, block_bytes: int) -> Settings:
    """Return all settings of a replay with a clock."""
    load, sharing = config.load, config.sharing
    return {
        **core_settings(config.core),
        "memory_gib": config.num_blocks * block_bytes / GIB,
        "num_replicas": config.num_replicas,
        "routing": config.routing,
        "hints": str(config.hints),
        "quotas": None if config.quotas is None else str(config.quotas),
        "sharing": sharing.name,
        "public_min_tenants": sharing.public_min_tenants,
        "loop": load.loop,
        "rate": load.rate,
        "spread_s": load.spread_s,
        "seed": load.seed,
    }


def trace_facts(trace: Trace) -> TraceFacts:
    """Return what a report says of a trace."""
    return TraceFacts(
        name=trace.name,
        format=trace.format,
        num_requests=len(trace.requests),
        num_tenants=len(trace.tenants()),
        duration_s=trace.duration_s,
        prompt_tokens=trace.num_input_tokens,
        output_tokens=trace.num_output_tokens,
        unit_size=trace.unit_size,
        is_exact=trace.is_exact,
        has_arrivals=trace.has_arrivals,
        num_skipped_lines=len(trace.problems),
        num_opaque=sum(request.is_opaque for request in trace.requests),
        problems=tuple(map(str, trace.problems[:_MAX_PROBLEMS])),
        notes=tuple(trace.notes),
    )


def _listed(values: Mapping[str, float]) -> str | None:
    """Return numbers by name as people type them; `None` if there are none."""
    pairs = (f"{name}={value:g}" for name, value in sorted(values.items()))
    return ", ".join(pairs) or None
