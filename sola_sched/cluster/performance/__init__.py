"""How long an instance's steps take and how much memory a request needs, from few measurements."""

from __future__ import annotations

from sola_sched.cluster.performance.files import (
    FittedModel,
    load_performance,
    performance_names,
    save_performance,
)
from sola_sched.cluster.performance.fitting import FitError, fit_performance
from sola_sched.cluster.performance.from_bench import samples_of_bench
from sola_sched.cluster.performance.from_profile import samples_of_profile
from sola_sched.cluster.performance.model import (
    DecodeTime,
    KvUse,
    PerformanceModel,
    PrefillTime,
)
from sola_sched.cluster.performance.samples import DecodeSamples, KvSamples, PrefillSamples
from sola_sched.cluster.performance.static_batch_time import StaticBatchTime

__all__ = [
    "DecodeSamples",
    "DecodeTime",
    "FitError",
    "FittedModel",
    "KvSamples",
    "KvUse",
    "PerformanceModel",
    "PrefillSamples",
    "PrefillTime",
    "StaticBatchTime",
    "fit_performance",
    "load_performance",
    "performance_names",
    "samples_of_bench",
    "samples_of_profile",
    "save_performance",
]
