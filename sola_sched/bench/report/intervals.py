"""Intervals beside shares of requests and beside the difference of two shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

#: Two-sided 95 % of the normal distribution.
_Z = 1.959964
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


@dataclass(frozen=True, slots=True)
class Worth:
    """What values that depend on each other are worth for their mean.

    Attributes:
        size: As many independent ones.
        freedom: Degrees of freedom with which that is known; infinite where none depend on others.
    """

    size: float
    freedom: float = math.inf

    @property
    def reach(self) -> float:
        """How many standard errors hold 95 %: Student's t."""
        return _Z if math.isinf(self.freedom) else float(stdtrit(self.freedom, 0.975))


def share(*runs: Sequence[bool]) -> Estimate:
    """The share that is true. Source: Wilson's score interval (1927).

    Args:
        runs: Each with its requests in order of arrival, which wait in one queue: as many count
            as are worth independent ones.
    """
    value = float(np.mean(np.concatenate([np.asarray(run, dtype=float) for run in runs])))
    return Estimate(value, *wilson(value, pooled(runs)))


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
    all_worth = pooled([mine - theirs for mine, theirs in pairs])
    first, second = np.concatenate(pairs, axis=1)
    p, q = float(first.mean()), float(second.mean())
    (p_low, p_high), (q_low, q_high) = wilson(p, all_worth), wilson(q, all_worth)
    spread = math.sqrt(p * (1 - p) * q * (1 - q))
    phi = (float((first * second).mean()) - p * q) / spread if spread > 0 else 0.0

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    return Estimate(
        p - q, p - q - reach(p - p_low, q_high - q), p - q + reach(p_high - p, q - q_low)
    )


def pooled(runs: Sequence[Sequence[float] | np.ndarray]) -> Worth:
    """What several runs are worth together for the mean of all their values."""
    found = [worth(run) for run in runs]
    parts = [len(run) ** 2 / each.size for run, each in zip(runs, found, strict=True)]
    total = sum(parts)
    # Source: Satterthwaite, Biometrics Bulletin 2 (1946).
    doubt = sum(part**2 / each.freedom for part, each in zip(parts, found, strict=True))
    return Worth(sum(map(len, runs)) ** 2 / total, total**2 / doubt if doubt else math.inf)


def effective_size(values: Sequence[float] | np.ndarray) -> float:
    """Independent values that a series is worth for its mean, in [1, its length]."""
    return worth(values).size


def worth(values: Sequence[float] | np.ndarray, *, has_trend: bool = True) -> Worth:
    """What the values of a series are worth for its mean, by how alike near ones are.

    Correlations of neighbours count up to the first one that is not positive, at whatever distance
    that is: in a busy queue it is some hundred requests. Their number says how well the sum is
    known. Source: Madras and Sokal, Journal of Statistical Physics 50 (1988), appendix C.

    Args:
        values: In order of arrival.
        has_trend: Whether only what is left of a straight line is looked at: the queue that grows
            in a run past the capacity is no chance.
    """
    series = np.asarray(values, dtype=float)
    count = len(series)
    if count < _MIN_SERIES:
        return Worth(float(count))
    series = series - series.mean()
    if has_trend:
        place = np.linspace(-1.0, 1.0, count)
        series = series - place * float(place @ series) / float(place @ place)
    power = float(series @ series)
    if power <= _TINY * count:
        return Worth(float(count))
    spectrum = np.fft.rfft(series, 2 * count)
    correlations = np.fft.irfft(np.abs(spectrum) ** 2)[:count] / power
    lags = int(np.argmax(correlations <= 0.0)) - 1
    if lags < 1:
        return Worth(float(count))
    total = 1.0 + 2.0 * float(correlations[1 : lags + 1].sum())
    return Worth(max(1.0, count / total), max(1.0, count / (2.0 * lags)))


def wilson(value: float, known: Worth) -> tuple[float, float]:
    """The interval of a share that is worth so much. Source: Wilson's score interval (1927)."""
    size, z = known.size, known.reach
    scale = 1.0 + z * z / size
    middle = (value + z * z / (2 * size)) / scale
    half = z / scale * math.sqrt(value * (1 - value) / size + z * z / (4 * size * size))
    return max(0.0, middle - half), min(1.0, middle + half)
