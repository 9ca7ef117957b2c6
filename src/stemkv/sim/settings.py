"""What a result says of the trace and the settings it came from.

Owns their names in results. A setting of the core is named as its field is and is there
without a line here, unless two parts have one of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from stemkv.core.core import CoreConfig
from stemkv.core.prefix.config import CacheConfig
from stemkv.measure.results import GIB, TraceFacts
from stemkv.sim.config import ReplayConfig
from stemkv.sim.trace import Trace

__all__ = ["cannot_hit", "core_settings", "replay_settings", "trace_facts"]

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


def cannot_hit(trace: Trace, cache: CacheConfig | None = None) -> tuple[str, ...]:
    """Return why nothing of a trace can be reused in blocks of that size; usually empty.

    Without a cache the trace's units are the blocks.
    """
    longest = max((each.input_length for each in trace.requests), default=0)
    if not any(each.units for each in trace.requests):
        return (
            f"nothing can be reused: no prompt has a whole unit of {trace.unit_size:,} "
            f"tokens, the longest has {longest:,}; write the trace in smaller units",
        )
    if cache is None or any(
        cache.can_hit(each.input_length, each.output_length) for each in trace.requests
    ):
        return ()
    return (
        f"nothing can be reused: a block has {cache.block_size:,} tokens, and no prompt "
        f"fills one, even with its output; the longest has {longest:,}; take a smaller "
        f"block_size",
    )


def trace_facts(trace: Trace, cache: CacheConfig | None = None) -> TraceFacts:
    """Return what a report says of a trace, and of whether it can be reused at all."""
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
        warnings=cannot_hit(trace, cache),
    )


def _listed(values: Mapping[str, float]) -> str | None:
    """Return numbers by name as people type them; `None` if there are none."""
    pairs = (f"{name}={value:g}" for name, value in sorted(values.items()))
    return ", ".join(pairs) or None
