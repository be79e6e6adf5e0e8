"""Step time over the GPUs of a worker whose size was not measured.

Source: Aladdin, section 4.1. Over N GPUs in tensor parallel,

    t_compute = k4 / N + c4                                                     (Eq. 5)
    t_comm    = k_comm (N - 1) / N            (all-reduce; the text after Eq. 5)

Whole steps tell the sum alone. It falls with N or grows, as computing or communication weighs more.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from sola_sched.cluster.performance.model import (
    DecodeTime,
    PerformanceModel,
    PrefillTime,
)
from sola_sched.errors import ConfigError

FloatArray = NDArray[np.float64]


def at_num_gpus(
    models: Mapping[int, PerformanceModel], num_gpus: int, kv_capacity_bytes: float
) -> PerformanceModel:
    """The model of a worker size that was not measured: Eq. 5 for each coefficient of Eq. 2 and 3.

    Args:
        models: At least two measured sizes of the same model and GPU, by number of GPUs.
        num_gpus: The size wanted, >= 1.
        kv_capacity_bytes: M of the worker wanted.

    Raises:
        ConfigError: There are fewer than two sizes, or none is wanted.
    """
    if len(models) < 2 or num_gpus < 1:
        raise ConfigError(
            "'models' must have two worker sizes or more, and 'num_gpus' be >= 1 (got "
            f"{sorted(models)}, {num_gpus!r})."
        )
    sizes = np.array(sorted(models), dtype=np.float64)
    known = [models[int(size)] for size in sizes]

    def at(values: list[float]) -> float:
        found, _ = nnls(_shares(sizes), np.array(values))
        return float(_shares(np.array([float(num_gpus)]))[0] @ found)

    return PerformanceModel(
        name=f"{known[0].name} on {num_gpus} GPUs",
        kv=known[0].kv,
        prefill=PrefillTime(
            at([m.prefill.per_token_s for m in known]), at([m.prefill.base_s for m in known])
        ),
        decode=DecodeTime(
            at([m.decode.per_ctx_s for m in known]),
            at([m.decode.per_request_s for m in known]),
            at([m.decode.base_s for m in known]),
        ),
        kv_capacity_bytes=kv_capacity_bytes,
        num_gpus=num_gpus,
    )


def _shares(sizes: FloatArray) -> FloatArray:
    """What k4, c4 and k_comm are multiplied with [n, 3]."""
    return np.stack([1.0 / sizes, np.ones_like(sizes), (sizes - 1.0) / sizes], axis=1)
