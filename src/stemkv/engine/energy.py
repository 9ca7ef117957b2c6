"""What the machine's own meters say about energy.

Owns one way to read them: zeus, which reads the RAPL counters of the processors that
tensors are computed on (`pip install 'stemkv[energy]'`). Where there is none, there is
no meter, and whoever prints joules says that they are estimated.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

__all__ = ["EnergyMeter", "ProcessorMeter", "open_meter"]

_log = logging.getLogger(__name__)


class EnergyMeter(Protocol):
    """Counts the energy that has been drawn; only differences mean anything."""

    @property
    def source(self) -> str:
        """What is counted, for people."""

    def joules(self) -> float:
        """Return the joules since some moment before; never goes back."""


class ProcessorMeter:
    """All processor packages and their memory, other programs' share included."""

    def __init__(self, processors: Any) -> None:  # of zeus, which has no types
        self._processors = processors

    @property
    def source(self) -> str:
        """What is counted, for people."""
        return f"RAPL, {len(self._processors)} package(s), all programs"

    def joules(self) -> float:
        """Return packages and memory together, as far as both are counted."""
        millijoules = 0.0
        for index in range(len(self._processors)):
            reading = self._processors.get_total_energy_consumption(index)
            millijoules += reading.cpu_mj + (reading.dram_mj or 0.0)
        return millijoules / 1000


def open_meter() -> EnergyMeter | None:
    """Return a meter, or `None` if zeus or the counters are not to be had here."""
    try:
        from zeus.device import get_cpus
    except ImportError:
        return None
    try:
        processors = get_cpus()
        meter = ProcessorMeter(processors)
        meter.joules()
    except Exception as error:
        # Counters that are not there, or not ours to read: zeus raises errors of its
        # own and of the system, and all of them mean that there is no meter.
        _log.warning("zeus is here, but reads no meter: %r", error)
        return None
    return meter if len(processors) else None
