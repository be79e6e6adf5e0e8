"""Step time over the GPUs of a worker, and the worker size with the most throughput per GPU.

Source: Aladdin, section 4.1. Over N GPUs in tensor parallel,

    t_compute = k4 / N + c4                                                     (Eq. 5)
    t_comm    = k_comm (N - 1) / N            (all-reduce; the text after Eq. 5)
    T_max     = min(M / (N m_r (t_compute + t_comm)), B / (N T_dec))            (Eq. 6)

with M the KV memory of the worker, m_r that of a mean request, B the batch that decodes in T_dec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from sola_sched.cluster.performance.fitting import FitError, fit_relative
from sola_sched.cluster.performance.model import (
    DecodeTime,
    PerformanceModel,
    PrefillTime,
)
from sola_sched.errors import ConfigError, InfeasibleError


@dataclass(frozen=True, slots=True)
class TensorParallelTime:
    """Eq. 5 for one amount of work.

    Attributes:
        per_share_s: k4, seconds that the GPUs share.
        fixed_s: c4, seconds that they do not.
        communication_s: k_comm.
    """

    per_share_s: float
    fixed_s: float
    communication_s: float = 0.0

    def seconds(self, num_gpus: int) -> float:
        """Compute and communication over so many GPUs."""
        shared = self.per_share_s / num_gpus + self.fixed_s
        return shared + self.communication_s * (num_gpus - 1) / num_gpus

    @classmethod
    def fit(
        cls,
        num_gpus: Sequence[int],
        compute_s: Sequence[float],
        communication_s: Sequence[float] | None = None,
    ) -> tuple[TensorParallelTime, dict[str, FitError]]:
        """Fit to times of the same work on different numbers of GPUs.

        Only the sum of the two can be told from whole steps; without `communication_s`, then,
        `compute_s` has both and `communication_s` of the result is 0.

        Raises:
            ProfileError: There are fewer than two numbers of GPUs.
        """
        gpus = np.asarray(num_gpus, dtype=np.float64)
        columns = np.stack([1.0 / gpus, np.ones_like(gpus)], axis=1)
        (k4, c4), error = fit_relative(columns, np.asarray(compute_s, dtype=np.float64), "Eq. 5")
        errors = {"compute": error}
        k_comm = 0.0
        if communication_s is not None:
            several = gpus > 1.0
            measured = np.asarray(communication_s, dtype=np.float64)[several]
            shares = ((gpus - 1.0) / gpus)[several, None]
            (found,), errors["communication"] = fit_relative(shares, measured, "communication")
            k_comm = float(found)
        return cls(float(k4), float(c4), k_comm), errors


def at_num_gpus(
    models: Mapping[int, PerformanceModel], num_gpus: int, kv_capacity_bytes: float
) -> PerformanceModel:
    """The model of a worker size that was not measured: Eq. 5 for each coefficient of Eq. 2 and 3.

    Args:
        models: At least two measured sizes of the same model and GPU, by number of GPUs.
        num_gpus: The size wanted.
        kv_capacity_bytes: M of the worker wanted.
    """
    if len(models) < 2:
        raise ConfigError(f"'models' must have two worker sizes or more (got {sorted(models)}).")
    sizes = np.array(sorted(models), dtype=np.float64)
    known = [models[int(size)] for size in sizes]
    columns = np.stack([1.0 / sizes, np.ones_like(sizes)], axis=1)

    def at(values: list[float]) -> float:
        (shared, fixed), _ = nnls(columns, np.array(values))
        return float(shared / num_gpus + fixed)

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


@dataclass(frozen=True, slots=True)
class WorkerThroughput:
    """Eq. 6 of one worker size.

    Attributes:
        num_gpus: N.
        tokens_per_gpu_s: T_max: output tokens per second and GPU.
        num_requests: The batch with which it is reached.
        limit: What keeps the batch from growing, ``"KV memory"`` or ``"TPOT"``.
    """

    num_gpus: int
    tokens_per_gpu_s: float
    num_requests: float
    limit: str


def worker_throughput(
    model: PerformanceModel, *, mean_context: float, tpot_s: float
) -> WorkerThroughput:
    """Eq. 6 for one kind of worker.

    Args:
        mean_context: Tokens of a request, prompt and output so far, averaged over its decode.
        tpot_s: T_dec, seconds.

    Raises:
        InfeasibleError: A request alone takes longer than `tpot_s` a token; the message has both.
    """
    if not (tpot_s > 0.0 and mean_context > 0.0):
        raise ConfigError(
            f"'tpot_s' and 'mean_context' must be > 0 (got {tpot_s!r}, {mean_context!r})."
        )
    alone_s = float(model.decode_s(1, mean_context))
    if alone_s > tpot_s:
        raise InfeasibleError(
            f"TPOT must be at least {1e3 * alone_s:.1f} ms, what one request alone takes on "
            f"{model.name} (got {1e3 * tpot_s:.1f} ms, {1e3 * (alone_s - tpot_s):.1f} ms too "
            "little); raise the target or take a faster instance."
        )
    in_memory = model.kv_capacity_bytes / float(model.kv.bytes_of(mean_context))
    in_time = model.decode.request_limit(mean_context, tpot_s)
    if math.isinf(min(in_memory, in_time)):
        raise ConfigError(
            f"'kv_capacity_bytes' of {model.name!r} must be finite where decoding costs nothing."
        )
    # The first term of Eq. 6 is the batch that fills the memory over its own step time, the second
    # the batch of the target over the target: the smaller batch is the one that can run.
    gpus = model.num_gpus
    if in_memory < in_time:
        step_s = float(model.decode_s(in_memory, in_memory * mean_context))
        return WorkerThroughput(gpus, in_memory / (gpus * step_s), in_memory, "KV memory")
    return WorkerThroughput(gpus, in_time / (gpus * tpot_s), in_time, "TPOT")


def best_worker(
    models: Sequence[PerformanceModel], *, mean_context: float, tpot_s: float
) -> WorkerThroughput:
    """The worker size with the largest T_max: N_opt of section 4.1; of equals the smallest.

    Raises:
        InfeasibleError: No size meets the target; the message is that of the one that comes
            nearest.
    """
    found, reasons = [], []
    for model in models:
        try:
            found.append(worker_throughput(model, mean_context=mean_context, tpot_s=tpot_s))
        except InfeasibleError as error:
            reasons.append((float(model.decode_s(1, mean_context)), str(error)))
    if not found:
        if not reasons:
            raise ConfigError("'models' must have a worker size (got none).")
        raise InfeasibleError(min(reasons)[1])
    return max(found, key=lambda worker: (worker.tokens_per_gpu_s, -worker.num_gpus))
