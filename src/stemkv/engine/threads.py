"""How many threads tensors may use.

Owns the count only. More threads than free cores is catastrophic: with one busy
neighbour, two threads took 24 times as long for a small matrix product.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["default_num_threads", "usable_cores"]


def usable_cores() -> float:
    """Return the cores this process may use, from its affinity and cgroup quota."""
    cores = float(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    return min(cores, _cgroup_quota(Path("/sys/fs/cgroup")))


def default_num_threads() -> int:
    """Return the usable cores less one, which the rest of the process needs."""
    return max(1, int(usable_cores()) - 1)


def _cgroup_quota(root: Path) -> float:
    """Return the cgroup's CPU quota in cores, infinity if there is none."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        if quota != "max":
            return float(quota) / float(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = float((root / "cpu/cpu.cfs_quota_us").read_text())
        period_us = float((root / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return float("inf")
    return quota_us / period_us if quota_us > 0 else float("inf")
