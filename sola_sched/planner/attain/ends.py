"""Deadlines for the whole answer, as limits for what comes before its end.

What is left of the time, by the predicted tokens left, is the longest mean time per token that a
request still bears. Of a decode that is a target per token like TPOT; a prefill has to end early
enough for its tokens to come at a pace that is usual now.
"""

from __future__ import annotations

import numpy as np

from sola_sched.core.state import FloatArray, IntArray, StepState

#: Share of the longest mean time per token at which a prefill plans for its tokens at most: one
#: that cannot have the usual pace is to start soon, not to be given up.
_PROMPT = 0.8


def bear_s(state: StepState, rows: IntArray, keep: float, ahead: IntArray | int = 0) -> FloatArray:
    """Longest mean time per token with which each ends in time, seconds; inf where no end is due.

    Args:
        state: The step's state.
        rows: Rows of the table, and their tokens in flight in `ahead`.
        keep: Share of the time left that is planned for.
    """
    left_s: FloatArray = keep * (state.table.e2e_due_s[rows] - state.now_s)
    (places,) = (left_s < np.inf).nonzero()
    if len(places):
        num_ahead = ahead if isinstance(ahead, int) else ahead[places]
        left_s[places] /= state.remaining(rows[places], num_ahead)
    return left_s


def start_by_s(
    state: StepState, rows: IntArray, keep: float, least_s: float, usual_s: float
) -> FloatArray:
    """Time until the prefill of each has to end for its last token to be in time, seconds.

    Args:
        state, rows, keep: As in `bear_s`.
        least_s, usual_s: Time per token without prefills, and as it is now.
    """
    left_s: FloatArray = keep * (state.table.e2e_due_s[rows] - state.now_s)
    (places,) = (left_s < np.inf).nonzero()
    if len(places):
        left = state.remaining(rows[places])
        token_s = np.minimum(usual_s, np.maximum(least_s, _PROMPT * left_s[places] / left))
        left_s[places] -= (left - 1.0) * token_s
    return left_s
