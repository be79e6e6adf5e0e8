"""Whether coefficients from a profile still hold, or live steps know better.

The online correction repairs a profile that is wrong by a factor. One that is wrong in the price of
a token or of a decode alone stays wrong, however small the error is on the steps that a planner
then chooses. So the errors of the corrected profile are held against those of coefficients that
are fitted to the same live steps. Noise is part of both and cancels out.

`at` is a record with `REVIEW`.
"""

from __future__ import annotations

import numpy as np

from sola_sched.compiled.functions import FloatArray, Record, as_it_stands, compiled
from sola_sched.cost.fit import fit_coefficients
from sola_sched.cost.memory import NUM_KINDS, all_steps, last_steps

# Steps of one comparison.
_WINDOW = 64
# Errors below this are good enough, whatever a fit could do.
_GOOD_ERROR = 0.05
# A fit has to be so many times better, so many comparisons in a row.
_BETTER, _IN_A_ROW = 1.3, 2
# After a comparison that the profile has stood, the next one waits for up to so many windows.
_LONGEST_REST = 64

#: Where a review stands:
#:
#: - sum_errors, num_in_window, num_of_kind: Of the window under way: errors, steps, steps of each
#:   kind.
#: - rest, next_rest: Windows until the next comparison; how many after the one that comes.
#: - num_lost: Comparisons in a row that a fit was better in.
REVIEW = [
    ("sum_errors", "f8"), ("num_in_window", "i8"), ("num_of_kind", "i8", (3,)), ("rest", "i8"),
    ("next_rest", "i8"), ("num_lost", "i8"),
]  # fmt: skip


@compiled
def note_error(at, kind, error):
    """Note the error of one step; whether it is time for a comparison."""
    at.sum_errors += min(error, 1.0)
    at.num_of_kind[kind] += 1
    at.num_in_window += 1
    if at.num_in_window < _WINDOW:
        return False
    if at.rest or at.sum_errors <= _GOOD_ERROR * _WINDOW:
        at.rest = max(0, at.rest - 1)
        at.num_lost = 0
        _restart(at)
        return False
    return True


@compiled
def _restart(at):
    at.sum_errors, at.num_in_window = 0.0, 0
    for kind in range(3):
        at.num_of_kind[kind] = 0


class ProfileReview:
    """Compares a profile with coefficients fitted to live steps, every now and then.

    Attributes:
        error: Mean error of the corrected profile in the last comparison; NaN before.
        fitted_error: The same of the fitted coefficients.
    """

    def __init__(self) -> None:
        self.error = self.fitted_error = float("nan")

    def has_failed(self, at: Record, memory: FloatArray, previous: FloatArray) -> bool:
        """Compare over the window that is complete.

        Args:
            at: Where the review stands, and how many steps are remembered.
            memory: The latest steps, those of the window included.
            previous: Coefficients [NUM_FEATURES] of the profile, corrected.
        """
        num_added, num = at.num_added, at.num_of_kind.tolist()
        self.error = float(at.sum_errors) / _WINDOW
        rows = fit_coefficients(*all_steps(memory, num_added), previous)
        errors = [
            np.minimum(np.abs(features @ rows - times_s) / times_s, 1.0)
            for features, times_s in (
                last_steps(memory, num_added, kind, num[kind]) for kind in range(NUM_KINDS)
            )
        ]
        self.fitted_error = float(np.concatenate(errors).mean())
        as_it_stands(_restart)(at)
        if self.error < _BETTER * self.fitted_error:
            at.num_lost, at.rest = 0, at.next_rest
            at.next_rest = min(_LONGEST_REST, 2 * at.next_rest + 1)
            return False
        at.num_lost += 1
        return bool(at.num_lost >= _IN_A_ROW)
