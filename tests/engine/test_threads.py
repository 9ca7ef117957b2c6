"""How many threads there may be: affinity and cgroup quota, old and new."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from stemkv.engine import threads
from stemkv.engine.threads import _cgroup_quota, default_num_threads, usable_cores


@pytest.mark.parametrize(
    "content, cores",
    [
        ("200000 100000\n", 2.0),
        ("50000 100000", 0.5),
        ("150000 50000\n", 3.0),
        ("max 100000\n", math.inf),
    ],
)
def test_the_quota_of_the_new_hierarchy(
    tmp_path: Path, content: str, cores: float
) -> None:
    (tmp_path / "cpu.max").write_text(content)
    assert _cgroup_quota(tmp_path) == cores


@pytest.mark.parametrize(
    "quota, period, cores",
    [("400000", "100000", 4.0), ("25000", "100000", 0.25), ("-1", "100000", math.inf)],
)
def test_the_quota_of_the_old_hierarchy(
    tmp_path: Path, quota: str, period: str, cores: float
) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text(f"{period}\n")
    assert _cgroup_quota(tmp_path) == cores


def test_the_new_hierarchy_comes_first(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("900000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert _cgroup_quota(tmp_path) == 1.0


@pytest.mark.parametrize("content", ["", "nonsense", "1 2 3", "a b", "max"])
def test_a_file_nobody_understands_sets_no_quota(tmp_path: Path, content: str) -> None:
    (tmp_path / "cpu.max").write_text(content)
    assert _cgroup_quota(tmp_path) == math.inf


def test_without_cgroups_there_is_no_quota(tmp_path: Path) -> None:
    assert _cgroup_quota(tmp_path / "nowhere") == math.inf


@pytest.mark.parametrize(
    "affinity, quota, usable, default",
    [
        (8, math.inf, 8.0, 7),
        (8, 4.0, 4.0, 3),
        (2, 16.0, 2.0, 1),
        (8, 2.5, 2.5, 1),
        (8, 0.5, 0.5, 1),
        (1, math.inf, 1.0, 1),
    ],
)
def test_one_usable_core_is_left_to_the_rest_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
    affinity: int,
    quota: float,
    usable: float,
    default: int,
) -> None:
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False
    )
    monkeypatch.setattr(threads, "_cgroup_quota", lambda root: quota)
    assert usable_cores() == usable
    assert default_num_threads() == default


def test_where_affinity_is_unknown_all_cores_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(threads, "_cgroup_quota", lambda root: math.inf)
    assert usable_cores() == 6.0
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_num_threads() == 1


def test_this_machine_has_at_least_one_thread_and_not_more_than_cores() -> None:
    assert 1 <= default_num_threads() <= max(1, os.cpu_count() or 1)
