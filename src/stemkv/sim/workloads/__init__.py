"""Made-up traffic with seeds: equal parameters and seed give an equal trace."""

from stemkv.sim.workloads.registry import WORKLOADS, Workload, workload_named

__all__ = ["WORKLOADS", "Workload", "workload_named"]
