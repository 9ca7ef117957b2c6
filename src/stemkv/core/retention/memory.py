"""Quotas as people think of them, in bytes, and what they come to in blocks.

Owns one quota and its checks. Whose it is, and whether all of them add up, is said where
there are several: by an engine's tenants and groups, and by a replay's tenants.
"""

from __future__ import annotations

from dataclasses import dataclass

from stemkv.core.retention.quota import Quota
from stemkv.errors import ConfigError

__all__ = ["MemoryQuota", "check_bytes"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryQuota:
    """What one tenant or group may retain."""

    floor_bytes: int = 0  # never lost to another
    cap_bytes: int | None = None  # never retains more; None: no cap
    # What it has beyond its floor is compared with others' over their weights: the one
    # with most gives first.
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_bytes("floor_bytes", self.floor_bytes)
        if self.cap_bytes is not None:
            check_bytes("cap_bytes", self.cap_bytes)
            if self.cap_bytes < self.floor_bytes:
                raise ConfigError(
                    f"cap_bytes must not be below floor_bytes, got "
                    f"{self.cap_bytes:,} and {self.floor_bytes:,}"
                )
        Quota(weight=self.weight)  # says what is wrong with it

    def in_blocks(self, block_bytes: int) -> Quota:
        """Return the quota in whole blocks, rounded down, as the memory itself is."""
        cap = self.cap_bytes
        return Quota(
            floor_blocks=self.floor_bytes // block_bytes,
            cap_blocks=None if cap is None else cap // block_bytes,
            weight=self.weight,
        )

    def __str__(self) -> str:
        parts = [f"floor {self.floor_bytes / _GIB:.3g} GiB"] if self.floor_bytes else []
        if self.cap_bytes is not None:
            parts.append(f"cap {self.cap_bytes / _GIB:.3g} GiB")
        if self.weight != 1.0:
            parts.append(f"weight {self.weight:g}")
        return " ".join(parts) or "no limit"


def check_bytes(field_name: str, value: int) -> None:
    """Raise `ConfigError` unless a setting is an amount of memory."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(
            f"{field_name} must be a number of bytes of at least 0, got {value!r:.80}"
        )
