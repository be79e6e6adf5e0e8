"""Corrects level and spread of predictions from what the latest requests really generated."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sola_sched.prediction.length import LEVELS

FloatArray = NDArray[np.float64]

# The quantiles nearest to the quartiles; their distance holds half of the mass if all is well.
_LOW, _HIGH = LEVELS.index(0.25), LEVELS.index(0.75)
_MAX_FACTOR = 4.0
# Requests without any error that are taken to have come before.
_SHIFT_PRIOR, _STRETCH_PRIOR = 16.0, 100.0


class Recalibration:
    """Shift and stretch of log-quantiles, learned from the last requests that finished.

    A model trained on another model's answers, or on another kind of prompt, is off by a factor
    and too sure of itself; the order of its predictions is worth more than their level. With n
    requests seen, `n / (n + 16)` of the measured shift is applied, and `n / (n + 100)` of the
    stretch (of its logarithm), which is known less well: after 200 requests to about 7 %.

    Args:
        memory: Requests that count, >= 1.
    """

    def __init__(self, *, memory: int = 512) -> None:
        self._errors = np.zeros(memory)
        self._widths = np.ones((memory, 2))  # from the median down and up to a quartile
        self._num_seen = 0
        self._shift = 0.0
        self._factor = 1.0
        self._is_fresh = True

    @property
    def shift(self) -> float:
        """What is added to log-quantiles."""
        self._refresh()
        return self._shift

    @property
    def factor(self) -> float:
        """What distances from the median are multiplied by."""
        self._refresh()
        return self._factor

    def apply(self, quantiles: FloatArray) -> FloatArray:
        """Corrected log-quantiles [n, 10]."""
        if not self._num_seen:
            return quantiles
        self._refresh()
        middle = _median(quantiles)[:, None]
        return middle + self._shift + self._factor * (quantiles - middle)

    def observe(self, quantiles: FloatArray, log_length: float) -> None:
        """Take in a finished request and the uncorrected log-quantiles [10] it was given."""
        place = self._num_seen % len(self._errors)
        middle = _median(quantiles[None])[0]
        self._errors[place] = log_length - middle
        self._widths[place] = middle - quantiles[_LOW], quantiles[_HIGH] - middle
        self._num_seen += 1
        self._is_fresh = False

    def to_array(self) -> FloatArray:
        """State as one array [n, 3], oldest first."""
        size = min(self._num_seen, len(self._errors))
        state: FloatArray = np.hstack([self._errors[:size, None], self._widths[:size]])
        return np.roll(state, -self._num_seen, axis=0) if size == len(self._errors) else state

    def restore(self, state: FloatArray) -> None:
        """Take over what ``to_array`` gave."""
        size = min(len(state), len(self._errors))
        self._errors[:size], self._widths[:size] = state[-size:, 0], state[-size:, 1:]
        self._num_seen = size
        self._is_fresh = False

    def _refresh(self) -> None:
        if self._is_fresh:
            return
        self._is_fresh = True
        size = min(self._num_seen, len(self._errors))
        errors = self._errors[:size]
        middle = float(np.median(errors))
        self._shift = size / (size + _SHIFT_PRIOR) * middle
        # Half of the errors should lie between the quartiles, which need not be symmetric.
        side = (errors > middle).astype(np.int64)
        widths = np.maximum(self._widths[np.arange(size), side], 1e-3)
        ratio = float(np.median(np.abs(errors - middle) / widths))
        ratio = min(_MAX_FACTOR, max(1.0 / _MAX_FACTOR, ratio))
        self._factor = ratio ** (size / (size + _STRETCH_PRIOR))


def _median(quantiles: FloatArray) -> FloatArray:
    middle: FloatArray = (quantiles[:, 4] + quantiles[:, 5]) / 2.0
    return middle
