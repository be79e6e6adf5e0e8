"""Clusters of unequal GPUs: what a tensor parallel degree is worth, and who gets what."""

from __future__ import annotations

from sola_sched.cluster.unequal.mapper import WorkloadMapper
from sola_sched.cluster.unequal.throughput import estimate_refilled, estimate_throughput

__all__ = [
    "WorkloadMapper",
    "estimate_refilled",
    "estimate_throughput",
]
