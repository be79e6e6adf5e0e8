"""How good predicted lengths are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

from sola_sched.prediction.length import LEVELS

FloatArray = NDArray[np.float64]

#: Equal ranges of length up to the 99th percentile; the last one has no end.
NUM_BUCKETS = 5
_LOW, _HIGH = LEVELS.index(0.15), LEVELS.index(0.85)


@dataclass(frozen=True)
class Score:
    """Figures over the prompts of a test set; tokens unless said otherwise.

    Attributes:
        num_prompts: How many.
        accuracy: Share of medians in the same of five equal buckets as the truth.
        mean_relative_error: Mean of |median - truth| / truth: short outputs rule it.
        relative_error: Sum of |median - truth| over the sum of truths.
        median_relative_error: Median of |median - truth| / truth.
        mean_absolute_error: Of the median.
        kendall_tau: Rank correlation of predicted mean and truth, 0 for a constant.
        coverage: Share of truths between the quantiles at 0.15 and 0.85; 0.7 is right. NaN for
            a predictor of single numbers.
        pinball: Mean pinball loss over the ten levels: one number for the whole distribution.
    """

    num_prompts: int
    accuracy: float
    mean_relative_error: float
    relative_error: float
    median_relative_error: float
    mean_absolute_error: float
    kendall_tau: float
    coverage: float
    pinball: float


def score(quantiles: FloatArray, lengths: NDArray[Any]) -> Score:
    """Compare quantiles [n, 10] with what was generated [n], n >= 1."""
    truth = np.asarray(lengths, dtype=np.float64)
    median = (quantiles[:, 4] + quantiles[:, 5]) / 2.0
    error = np.abs(median - truth)
    width = max(1.0, float(np.quantile(truth, 0.99)) / NUM_BUCKETS)
    same = _bucket(median, width) == _bucket(truth, width)
    tau = kendalltau(quantiles.mean(axis=1), truth).statistic
    # Half a token: lengths are whole, quantiles are not.
    inside = (truth >= quantiles[:, _LOW] - 0.5) & (truth <= quantiles[:, _HIGH] + 0.5)
    is_point = bool((quantiles[:, 0] == quantiles[:, -1]).all())
    levels = np.array(LEVELS)
    gap = truth[:, None] - quantiles
    return Score(
        num_prompts=len(truth),
        accuracy=float(same.mean()),
        mean_relative_error=float((error / truth).mean()),
        relative_error=float(error.sum() / truth.sum()),
        median_relative_error=float(np.median(error / truth)),
        mean_absolute_error=float(error.mean()),
        kendall_tau=0.0 if np.isnan(tau) else float(tau),
        coverage=float("nan") if is_point else float(inside.mean()),
        pinball=float(np.maximum(levels * gap, (levels - 1.0) * gap).mean()),
    )


def _bucket(lengths: FloatArray, width: float) -> NDArray[np.int64]:
    return np.minimum(lengths // width, NUM_BUCKETS - 1).astype(np.int64)
