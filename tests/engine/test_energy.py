"""Energy is measured where there is a meter, and there is none where there is not."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from stemkv.engine.energy import open_meter


@dataclass
class Reading:
    cpu_mj: float
    dram_mj: float | None


class Processors(list[Reading]):
    """As zeus 0.16 hands them out: a reading for each package, millijoules."""

    def get_total_energy_consumption(self, index: int) -> Reading:
        return self[index]


def with_zeus(monkeypatch: pytest.MonkeyPatch, get_cpus: Any) -> None:
    device = ModuleType("zeus.device")
    device.get_cpus = get_cpus  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zeus", ModuleType("zeus"))
    monkeypatch.setitem(sys.modules, "zeus.device", device)


def test_packages_and_their_memory_are_counted_in_joules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processors = Processors([Reading(1500.0, 250.0), Reading(2000.0, None)])
    with_zeus(monkeypatch, lambda: processors)

    meter = open_meter()

    assert meter is not None
    assert meter.joules() == 3.75
    processors[1] = Reading(2600.0, None)
    assert meter.joules() == pytest.approx(4.35)
    assert "2 package(s)" in meter.source


def refuse() -> Any:
    raise RuntimeError("RAPL unavailable")


@pytest.mark.parametrize(
    "get_cpus", [refuse, lambda: Processors()], ids=["refused", "nothing to count"]
)
def test_there_is_no_meter_without_counters(
    monkeypatch: pytest.MonkeyPatch, get_cpus: Any
) -> None:
    with_zeus(monkeypatch, get_cpus)

    assert open_meter() is None


def test_there_is_no_meter_without_zeus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zeus.device", None)
    monkeypatch.setitem(sys.modules, "zeus", None)

    assert open_meter() is None
