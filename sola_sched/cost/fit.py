"""The fit behind the cost model: shapes and times of steps in, coefficients out.

Robust non-negative least squares. The fit minimizes the *relative* error, because a step of 5 ms
that is 1 ms off hurts a 50 ms TPOT objective as much as one of 50 ms that is 10 ms off.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sola_sched.compiled.functions import FloatArray, as_it_stands, compiled

#: Kinds of steps.
PREFILL, DECODE, MIXED = range(3)
#: Columns of a feature row. The last three are 0/1: the step runs at all, has prefill, has decode.
FEATURES = (
    "prefill_ctx",
    "prefill_sq",
    "prefill_tokens",
    "num_decodes",
    "decode_ctx",
    "is_step",
    "has_prefill",
    "has_decode",
)
NUM_FEATURES = len(FEATURES)
#: Columns of the prompt's part of a step.
PROMPT_FEATURES = (0, 1, 2, 6)

# Prior precision per feature, in rows. A coefficient is scaled to the share of the step time that
# it explains, so sigma^2 / spread^2 = 0.05^2 / 0.5^2 = 0.01 is a weak prior at 5 % noise. Where
# the data cannot tell features apart, the lighter one explains more: constants before terms per
# token before quadratic terms, one shared constant before one per phase.
_PRIOR_ROWS = np.array([0.1, 0.1, 0.01, 0.02, 0.02, 0.01, 0.1, 0.1])
# Weight of the previous coefficients once old steps have been forgotten, in rows.
_MEMORY_ROWS = 1.0
_LONG_CONTEXT = 2048
_NUM_REWEIGHTS = 3
_HUBER_SIGMAS = 1.5
_MIN_SIGMA = 0.01


class StepShape(NamedTuple):
    """What one step computes; the sums of Eq. 3 and 4.

    Attributes:
        num_decodes: Requests that compute one decode token.
        decode_ctx_tokens: Sum of KV lengths of the decodes.
        prefill_tokens: Sum of new tokens over the prefill chunks.
        prefill_sq_tokens: Sum of squared chunk lengths.
        prefill_ctx_tokens: Sum over chunks of tokens already computed times chunk length.
    """

    num_decodes: int
    decode_ctx_tokens: int
    prefill_tokens: int
    prefill_sq_tokens: float
    prefill_ctx_tokens: float


@compiled
def kind_by(num_decodes: float, prefill_tokens: float) -> int:
    """``PREFILL``, ``DECODE`` or ``MIXED``; -1 for a step that computes nothing."""
    if num_decodes > 0:
        return MIXED if prefill_tokens > 0 else DECODE
    return PREFILL if prefill_tokens > 0 else -1


def kind_of(shape: StepShape) -> int | None:
    """``PREFILL``, ``DECODE`` or ``MIXED``; None for a step that computes nothing."""
    kind = as_it_stands(kind_by)(shape.num_decodes, shape.prefill_tokens)
    return None if kind < 0 else kind


def features_of(shape: StepShape) -> tuple[float, ...]:
    """The feature row of a step, in the order of ``FEATURES``."""
    return (
        shape.prefill_ctx_tokens,
        shape.prefill_sq_tokens,
        shape.prefill_tokens,
        shape.num_decodes,
        shape.decode_ctx_tokens,
        1.0,
        1.0 if shape.prefill_tokens > 0 else 0.0,
        1.0 if shape.num_decodes > 0 else 0.0,
    )


def fit_coefficients(
    rows: FloatArray, times_s: FloatArray, previous: FloatArray | None = None
) -> FloatArray:
    """Fit non-negative coefficients of ``times_s ~ rows @ coefficients``.

    Huber-reweighted least squares on the relative residual (t - prediction) / prediction, with a
    weak ridge so that steps of one single shape still give one answer.

    Args:
        rows: Features [num_steps, NUM_FEATURES], >= 0, ``num_steps`` >= 1.
        times_s: Measured times [num_steps], seconds, finite and > 0.
        previous: Coefficients [NUM_FEATURES] that unidentified directions stay close to, or None.

    Returns:
        Coefficients [NUM_FEATURES], finite and >= 0; for features that never occur the previous
        ones, or 0.
    """
    # Very short outliers must not get the leverage of 1 / t.
    floor_s = 0.25 * float(np.median(times_s))
    weights = 1.0 / np.maximum(times_s, floor_s)
    scale = np.sqrt(np.mean((rows * weights[:, None]) ** 2, axis=0))
    is_used = scale > 0.0
    scale = np.where(is_used, np.maximum(scale, _reference_scale(rows, times_s)), 1.0)
    scaled = rows / scale
    prior_rows = _PRIOR_ROWS.copy()
    centre = np.zeros(NUM_FEATURES)
    if previous is not None:
        prior_rows += _MEMORY_ROWS
        centre = previous * scale * (_MEMORY_ROWS / prior_rows)
    solution = np.zeros(NUM_FEATURES)
    for _ in range(1 + _NUM_REWEIGHTS):
        weighted = scaled * weights[:, None]
        gram = weighted.T @ weighted + np.diag(prior_rows)
        target = weighted.T @ (times_s * weights) + prior_rows * centre
        solution = solve_nonnegative(gram, target, solution)
        predicted = scaled @ solution
        denominator = np.maximum(predicted, floor_s)
        residual = np.abs(times_s - predicted) / denominator
        cut = _HUBER_SIGMAS * max(1.4826 * float(np.median(residual)), _MIN_SIGMA)
        weights = np.sqrt(np.minimum(1.0, cut / np.maximum(residual, cut))) / denominator
    result: FloatArray = solution / scale
    result[~is_used] = 0.0 if previous is None else previous[~is_used]
    return result


def _reference_scale(rows: FloatArray, times_s: FloatArray) -> FloatArray:
    """Features per second of steps with long contexts, extrapolated from the steps at hand.

    The prior on terms that grow with the context counts their share of such a step: otherwise
    one late step with 10 tokens of context would price 10,000 tokens at a thousand steps.
    """
    scale = np.zeros(NUM_FEATURES)
    has_prefill, has_decode = rows[:, 6] > 0.0, rows[:, 7] > 0.0
    if has_prefill.any():
        token_s = float(np.median(times_s[has_prefill] / rows[has_prefill, 2]))
        scale[:2] = _LONG_CONTEXT / token_s
    if has_decode.any():
        decode_s = float(np.median(times_s[has_decode] / rows[has_decode, 3]))
        scale[4] = _LONG_CONTEXT / decode_s
    return scale


def solve_nonnegative(gram: FloatArray, target: FloatArray, start: FloatArray) -> FloatArray:
    """Minimize x' gram x / 2 - target' x over x >= 0 (Lawson and Hanson's active set).

    Args:
        gram: Positive definite matrix [n, n].
        target: Right-hand side [n].
        start: Feasible start [n], >= 0; its support is the first guess of the solution's.

    Returns:
        The minimizer [n], >= 0.
    """
    solution = start.copy()
    passive = solution > 0.0
    tolerance = 1e-10 * float(np.max(np.abs(target), initial=0.0))
    # Each pass adds one variable; the bound only stops cycling by rounding.
    for attempt in range(3 * len(target) + 1):
        if attempt or not passive.any():
            gradient = target - gram @ solution
            gradient[passive] = -np.inf
            entering = int(np.argmax(gradient))
            if gradient[entering] <= tolerance:
                break
            passive[entering] = True
        while passive.any():
            index = np.flatnonzero(passive)
            trial = np.linalg.solve(gram[np.ix_(index, index)], target[index])
            blocked = trial <= 0.0
            if not blocked.any():
                solution[index] = trial
                break
            current = solution[index]
            step = float(np.min(current[blocked] / (current[blocked] - trial[blocked])))
            moved = current + step * (trial - current)
            moved[blocked & (moved <= 1e-14 * np.max(moved))] = 0.0
            if not (moved[blocked] == 0.0).any():
                moved[np.flatnonzero(blocked)[0]] = 0.0
            solution[index] = np.maximum(moved, 0.0)
            passive = solution > 0.0
    return solution
