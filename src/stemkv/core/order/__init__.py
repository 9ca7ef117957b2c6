"""Who starts next: one admission order per file."""

from stemkv.core.order.base import AdmissionOrder
from stemkv.core.order.fcfs import Fcfs

__all__ = ["AdmissionOrder", "Fcfs"]
