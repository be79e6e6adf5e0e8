"""Intervals beside shares of requests and beside the difference of two shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Two-sided 95 % of the normal distribution.
_Z = 1.959964
#: Requests that arrive so close share a queue: correlation is looked for up to this distance.
_MAX_LAG = 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share, or a difference of shares, with its 95 % interval."""

    value: float
    low: float
    high: float

    def percent(self) -> str:
        """As in ``84.2 % (80.1 to 87.6)``."""
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


def share(flags: Sequence[bool]) -> Estimate:
    """The share that is true. Source: Wilson's score interval (1927)."""
    value = float(np.mean(flags))
    low, high = _wilson(value, len(flags))
    return Estimate(value, low, high)


def paired_difference(ours: Sequence[bool], others: Sequence[bool]) -> Estimate:
    """Share of `ours` minus share of `others`, of the same requests in order of arrival.

    Source: Newcombe, *Improved confidence intervals for the difference between binomial proportions
    based on paired data*, Statistics in Medicine 17 (1998), method 10. Departure: requests that
    wait in one queue are alike, so that as many count as are worth independent ones, estimated from
    the correlation of neighbours.
    """
    first, second = np.asarray(ours, dtype=float), np.asarray(others, dtype=float)
    assert len(first) == len(second) > 0, (len(first), len(second))
    p, q = float(first.mean()), float(second.mean())
    size = effective_size(first - second)
    (p_low, p_high), (q_low, q_high) = _wilson(p, size), _wilson(q, size)
    spread = math.sqrt(p * (1 - p) * q * (1 - q))
    phi = (float((first * second).mean()) - p * q) / spread if spread > 0 else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    return Estimate(
        p - q, p - q - reach(p - p_low, q_high - q), p - q + reach(p_high - p, q - q_low)
    )


def effective_size(values: Sequence[float] | np.ndarray) -> float:
    """Independent values that a series is worth for its mean, in [1, its length].

    Correlations count up to the first one that is not positive.
    """
    series = np.asarray(values, dtype=float)
    series = series - series.mean()
    power = float(series @ series)
    if power <= 0:
        return float(len(series))
    total = 0.0
    for lag in range(1, min(_MAX_LAG, len(series) - 1) + 1):
        correlation = float(series[:-lag] @ series[lag:]) / power
        if correlation <= 0:
            break
        total += correlation
    return max(1.0, len(series) / (1.0 + 2.0 * total))


def _wilson(value: float, size: float) -> tuple[float, float]:
    scale = 1.0 + _Z * _Z / size
    middle = (value + _Z * _Z / (2 * size)) / scale
    half = _Z / scale * math.sqrt(value * (1 - value) / size + _Z * _Z / (4 * size * size))
    return max(0.0, middle - half), min(1.0, middle + half)
