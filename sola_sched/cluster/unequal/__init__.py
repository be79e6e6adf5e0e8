"""Clusters of unequal GPUs: which tensor parallel degree on each machine, and who gets what."""

from __future__ import annotations

from sola_sched.cluster.unequal.deployment import (
    Deployment,
    Machine,
    ServedModel,
    estimate_refilled,
    estimate_throughput,
    kv_bytes_of,
    search_deployment,
)
from sola_sched.cluster.unequal.mapper import WorkloadMapper

__all__ = [
    "Deployment",
    "Machine",
    "ServedModel",
    "WorkloadMapper",
    "estimate_refilled",
    "estimate_throughput",
    "kv_bytes_of",
    "search_deployment",
]
