"""Least squares on relative errors, and how far off a fit is.

Coefficients are >= 0, so that more work never takes less time (Aladdin, section 3: "all
coefficients are positive"). Relative errors, because a step of 10 ms counts as much as one of
1 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from sola_sched.cluster.performance.model import (
    DecodeTime,
    KvUse,
    PerformanceModel,
    PrefillTime,
)
from sola_sched.cluster.performance.samples import DecodeSamples, KvSamples, PrefillSamples
from sola_sched.errors import ProfileError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors of a fit at the points that it was fitted to.

    Each is |predicted - measured| over the measured value, but for the error under ``kv`` over the
    largest measured value (see `fit_kv`).

    Attributes:
        mean_ratio: Their mean.
        worst_ratio: The largest of them.
        num_points: How many.
    """

    mean_ratio: float
    worst_ratio: float
    num_points: int

    def __str__(self) -> str:
        return (
            f"{100 * self.mean_ratio:.1f} % mean, {100 * self.worst_ratio:.1f} % worst of "
            f"{self.num_points}"
        )


def fit_relative(
    columns: FloatArray, measured: FloatArray, what: str
) -> tuple[FloatArray, FitError]:
    """Coefficients >= 0 with the least mean squared relative error.

    Args:
        columns: What each coefficient is multiplied with [n, k].
        measured: Values > 0 [n].
        what: Named in the message when there are too few points.

    Raises:
        ProfileError: There are fewer points than coefficients.
    """
    num_points, num_coefficients = columns.shape
    if num_points < num_coefficients:
        raise ProfileError(
            f"A fit of {what} needs at least {num_coefficients} samples (got {num_points}); "
            "measure more."
        )
    solution, _ = nnls(columns / measured[:, None], np.ones(num_points))
    return solution, _error(np.abs(columns @ solution / measured - 1.0))


def _error(ratios: FloatArray) -> FitError:
    return FitError(float(ratios.mean()), float(ratios.max()), len(ratios))


def fit_prefill(samples: PrefillSamples) -> tuple[PrefillTime, FitError]:
    """Aladdin Eq. 2."""
    columns = np.stack([samples.total_tokens, np.ones_like(samples.seconds)], axis=1)
    (per_token_s, base_s), error = fit_relative(columns, samples.seconds, "prefill times")
    return PrefillTime(float(per_token_s), float(base_s)), error


def fit_decode(samples: DecodeSamples) -> tuple[DecodeTime, FitError]:
    """Aladdin Eq. 3."""
    ones = np.ones_like(samples.seconds)
    columns = np.stack([samples.total_tokens, samples.num_requests, ones], axis=1)
    (k2, c2, c3), error = fit_relative(columns, samples.seconds, "decode times")
    return DecodeTime(float(k2), float(c2), float(c3)), error


def fit_kv(samples: KvSamples) -> tuple[KvUse, dict[str, FitError]]:
    """Aladdin Eq. 1, by least squares of the bytes, not of relative errors.

    Requests take whole blocks, and what fills a memory is the sum of their bytes: half a block
    more or less counts as much for a short request as for a long one.

    Returns:
        The fit, and two errors: ``kv`` over the memory of the largest request, ``kv_each`` over
        that of each request itself. The second is large where a request has few blocks.
    """
    columns = np.stack([samples.num_tokens, np.ones_like(samples.num_tokens)], axis=1)
    (h, j), _ = nnls(columns, samples.num_bytes)
    off = np.abs(columns @ np.array([h, j]) - samples.num_bytes)
    errors = {
        "kv": _error(off / samples.num_bytes.max()),
        "kv_each": _error(off / samples.num_bytes),
    }
    return KvUse(float(h), float(j)), errors


def fit_performance(
    name: str,
    prefill: PrefillSamples,
    decode: DecodeSamples,
    kv: KvSamples | KvUse,
    *,
    kv_capacity_bytes: float = np.inf,
    num_gpus: int = 1,
) -> tuple[PerformanceModel, Mapping[str, FitError]]:
    """Fit Eq. 1 to 3 to the samples of one kind of instance.

    Returns:
        The model, and the errors under ``prefill`` and ``decode``; where `kv` is fitted too, under
        ``kv`` and ``kv_each`` (see `fit_kv`).

    Raises:
        ProfileError: There are too few samples of a kind.
    """
    errors: dict[str, FitError] = {}
    if isinstance(kv, KvSamples):
        kv, errors = fit_kv(kv)
    prefill_time, errors["prefill"] = fit_prefill(prefill)
    decode_time, errors["decode"] = fit_decode(decode)
    model = PerformanceModel(name, kv, prefill_time, decode_time, kv_capacity_bytes, num_gpus)
    return model, errors
