"""Whether coefficients from a profile still hold, or live steps know better.

The online correction repairs a profile that is wrong by a factor. One that is wrong in the price of
a token or of a decode alone stays wrong, however small the error is on the steps that a planner
then chooses. So the errors of the corrected profile are held against those of coefficients that
are fitted to the same live steps. Noise is part of both and cancels out.
"""

from __future__ import annotations

import numpy as np

from sola_sched.cost.fit import FloatArray, StepMemory, fit_coefficients

# Steps of one comparison.
_WINDOW = 64
# Errors below this are good enough, whatever a fit could do.
_GOOD_ERROR = 0.05
# A fit has to be so many times better, so many comparisons in a row.
_BETTER, _IN_A_ROW = 1.3, 2
# After a comparison that the profile has stood, the next one waits for up to so many windows.
_LONGEST_REST = 64
_NUM_KINDS = 3


class ProfileReview:
    """Compares a profile with coefficients fitted to live steps, every now and then.

    Attributes:
        error: Mean error of the corrected profile in the last comparison; NaN before.
        fitted_error: The same of the fitted coefficients.
    """

    def __init__(self) -> None:
        self.error = self.fitted_error = float("nan")
        self._sum = 0.0
        self._num_steps = 0
        self._num = [0] * _NUM_KINDS
        self._num_lost = 0
        self._rest = self._next_rest = 0

    def add(self, kind: int, error: float) -> bool:
        """Note the error of one step; returns whether it is time for a comparison."""
        self._sum += min(error, 1.0)
        self._num[kind] += 1
        self._num_steps += 1
        if self._num_steps < _WINDOW:
            return False
        if self._rest or self._sum <= _GOOD_ERROR * _WINDOW:
            self._rest -= self._rest > 0
            self._num_lost = 0
            self._restart()
            return False
        return True

    def has_failed(self, memory: StepMemory, previous: FloatArray) -> bool:
        """Compare over the window that is complete.

        Args:
            memory: The latest steps, those of the window included.
            previous: Coefficients [NUM_FEATURES] of the profile, corrected.
        """
        self.error = self._sum / _WINDOW
        rows = fit_coefficients(*memory.all_steps(), previous)
        errors = [
            np.minimum(np.abs(features @ rows - times_s) / times_s, 1.0)
            for features, times_s in map(memory.last_steps, range(_NUM_KINDS), self._num)
        ]
        self.fitted_error = float(np.concatenate(errors).mean())
        self._restart()
        if self.error < _BETTER * self.fitted_error:
            self._num_lost = 0
            self._rest = self._next_rest
            self._next_rest = min(_LONGEST_REST, 2 * self._next_rest + 1)
            return False
        self._num_lost += 1
        return self._num_lost >= _IN_A_ROW

    def _restart(self) -> None:
        self._sum = 0.0
        self._num_steps = 0
        self._num = [0] * _NUM_KINDS
