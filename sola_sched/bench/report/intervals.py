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
#: Shorter series tell of no correlation.
_MIN_SERIES = 4
_TINY = 1e-12


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


def paired_difference(ours: Sequence[Sequence[bool]], others: Sequence[Sequence[bool]]) -> Estimate:
    """Share of `ours` minus share of `others`, of the same requests.

    Source: Newcombe, *Improved confidence intervals for the difference between binomial proportions
    based on paired data*, Statistics in Medicine 17 (1998), method 10. Departure: requests that
    wait in one queue are alike, so that as many count as are worth independent ones.

    Args:
        ours, others: For each run, its requests in order of arrival.
    """
    assert [len(run) for run in ours] == [len(run) for run in others] != []
    pairs = [np.array(pair, dtype=float) for pair in zip(ours, others, strict=True)]
    size = sum(effective_size(mine - theirs) for mine, theirs in pairs)
    first, second = np.concatenate(pairs, axis=1)
    p, q = float(first.mean()), float(second.mean())
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

    What is left of a straight line is looked at: the queue that grows in a run past the capacity
    is no chance. Correlations of neighbours count up to the first one that is not positive.
    """
    series = np.asarray(values, dtype=float)
    if len(series) < _MIN_SERIES:
        return float(len(series))
    place = np.linspace(-1.0, 1.0, len(series))
    series = series - series.mean()
    series = series - place * float(place @ series) / float(place @ place)
    power = float(series @ series)
    if power <= _TINY * len(series):
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
