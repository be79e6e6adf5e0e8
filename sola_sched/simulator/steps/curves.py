"""Step time as a sum of monotone curves of the batch, where a linear form is too coarse.

On a CPU, and in small batches on a GPU, a token costs less the more run beside it: matrix products
get efficient with their size. With B requests and N tokens in a step,

    t = f(B) + g(N) + sum over LINEAR of coefficient * value

where f and g are piecewise linear, start at 0 and never fall. All slopes and coefficients are
>= 0, so that more work never takes less time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from sola_sched.cost.fit import StepShape
from sola_sched.errors import ProfileError
from sola_sched.vllm_adapter.steps.step_shape import shape_of

#: Terms beside the curves, with the unit of their coefficient.
LINEAR = {
    "is_step": "s",
    "has_prefill": "s",
    "is_mixed": "s",
    "num_prefills": "s/request",
    "num_new": "s/request",
    "prefill_tokens": "s/token",
    "decode_ctx_tokens": "s/token",
    "prefill_sq_tokens": "s/token^2",
    "prefill_ctx_tokens": "s/token^2",
}
CURVES = {"num_requests": "s", "num_tokens": "s"}
#: Key of the curves in the `meta` of a cost model's file.
META_KEY = "step_curves"

_FIRST_KNOT = {"num_requests": 2, "num_tokens": 16}
_NUM_REWEIGHTS = 5
_HUBER_SIGMAS = 3.0
_MIN_SIGMA = 0.01
# Rows of weak prior per coefficient, so that directions the steps do not show stay small.
_PRIOR_ROWS = 0.01

FloatArray = NDArray[np.float64]
Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step computes, in more detail than `StepShape`.

    Attributes:
        shape: The sums that the cost model knows.
        num_prefills: Requests with a chunk.
        num_new: Requests that run for the first time.
    """

    shape: StepShape
    num_prefills: int
    num_new: int

    @property
    def num_requests(self) -> int:
        """Requests in the step."""
        return self.shape.num_decodes + self.num_prefills

    @property
    def num_tokens(self) -> int:
        """Tokens computed."""
        return self.shape.num_decodes + self.shape.prefill_tokens

    def linear(self) -> tuple[float, ...]:
        """The values of `LINEAR`, in its order."""
        shape = self.shape
        has_prefill = shape.prefill_tokens > 0
        return (
            1.0,
            float(has_prefill),
            float(has_prefill and shape.num_decodes > 0),
            float(self.num_prefills),
            float(self.num_new),
            float(shape.prefill_tokens),
            float(shape.decode_ctx_tokens),
            shape.prefill_sq_tokens,
            shape.prefill_ctx_tokens,
        )


def batch_of(output: Any, requests: Mapping[str, Any]) -> Batch:
    """The batch of a scheduled step; arguments as for `profile.shape_of`."""
    shape = shape_of(output, requests)
    return Batch(
        shape=shape,
        num_prefills=len(output.num_scheduled_tokens) - shape.num_decodes,
        num_new=len(output.scheduled_new_reqs),
    )


@dataclass(frozen=True)
class StepCurves:
    """A fitted step time.

    Attributes:
        curves: Points (value, seconds) of each of `CURVES`, from (0, 0) on, ascending; the last
            slope goes on.
        linear: Coefficients of `LINEAR`.
    """

    curves: Mapping[str, Curve]
    linear: Mapping[str, float]

    def step_s(self, batch: Batch) -> float:
        """Seconds of a step; 0 for an empty one."""
        if not batch.num_tokens:
            return 0.0
        total = math.fsum(
            self.linear[name] * value for name, value in zip(LINEAR, batch.linear(), strict=True)
        )
        return total + sum(_interpolate(self.curves[name], getattr(batch, name)) for name in CURVES)

    @classmethod
    def fit(cls, batches: Sequence[Batch], times_s: Sequence[float]) -> StepCurves:
        """Fit to measured steps, by least squares of the relative error with outliers cut.

        Args:
            batches: What the steps computed, none empty.
            times_s: What they took, finite and > 0.

        Raises:
            ProfileError: There is no step.
        """
        if not batches:
            raise ProfileError("A fit needs measured steps (got none).")
        times = np.asarray(times_s, dtype=np.float64)
        columns = [np.array([batch.linear() for batch in batches])]
        knots = {}
        for name in CURVES:
            values = np.array([getattr(batch, name) for batch in batches], dtype=np.float64)
            knots[name] = _knots(_FIRST_KNOT[name], float(values.max()))
            columns.append(_ramps(values, knots[name]))
        table = np.hstack(columns)
        slopes = _fit_nonnegative(table, times)
        linear = dict(zip(LINEAR, slopes[: len(LINEAR)].tolist(), strict=True))
        curves, used = {}, len(LINEAR)
        for name in CURVES:
            ends = knots[name]
            rises = slopes[used : used + len(ends)] * np.diff([0.0, *ends])
            heights = np.cumsum(rises).tolist()
            curves[name] = ((0.0, 0.0), *zip(ends, heights, strict=True))
            used += len(ends)
        return cls(curves, linear)

    def to_json(self) -> dict[str, Any]:
        """Plain data with units."""
        return {
            "curves": {
                name: {"points": [list(point) for point in self.curves[name]], "unit": unit}
                for name, unit in CURVES.items()
            },
            "linear": {
                name: {"value": self.linear[name], "unit": unit} for name, unit in LINEAR.items()
            },
        }

    @classmethod
    def from_json(cls, stored: Any) -> StepCurves:
        """Read what `to_json` gave.

        Raises:
            ProfileError: Something is missing, or would let a step get faster with more work.
        """
        try:
            linear = {name: float(stored["linear"][name]["value"]) for name in LINEAR}
            curves: dict[str, Curve] = {
                name: tuple((float(x), float(y)) for x, y in stored["curves"][name]["points"])
                for name in CURVES
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(
                f"'{META_KEY}' must hold curves and coefficients as written by "
                f"`python benchmarks/run.py fidelity` ({type(error).__name__}: {error})."
            ) from error
        for name, value in linear.items():
            if not 0.0 <= value < math.inf:
                raise ProfileError(f"'{META_KEY}.linear.{name}' must be >= 0 (got {value!r}).")
        for name, curve in curves.items():
            steps = np.diff(np.array(curve), axis=0)
            rises = bool((steps[:, 0] > 0).all() and (steps[:, 1] >= 0).all())
            if len(curve) < 2 or curve[0] != (0.0, 0.0) or not rises:
                raise ProfileError(
                    f"'{META_KEY}.curves.{name}' must start at (0, 0) and never fall "
                    f"(got {curve!r})."
                )
        return cls(curves, linear)

    def least_slope(self, name: str) -> float:
        """Largest s with curve(x) >= s x for every x >= 0."""
        curve = self.curves[name]
        (x0, y0), (x1, y1) = curve[-2:]
        chords = [y / x for x, y in curve[1:]]
        return max(0.0, min([*chords, (y1 - y0) / (x1 - x0)]))


def _interpolate(curve: Curve, value: float) -> float:
    last = next((i for i, (x, _) in enumerate(curve) if x >= value), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[max(0, last - 1)], curve[max(1, last)]
    return y0 + (y1 - y0) * (value - x0) / (x1 - x0)


def _knots(first: int, largest: float) -> list[float]:
    """Powers of two from ``first``, the last below ``largest`` where there is one."""
    knots = [float(first)]
    while knots[-1] * 2 < largest:
        knots.append(knots[-1] * 2)
    return knots


def _ramps(values: FloatArray, knots: Sequence[float]) -> FloatArray:
    starts = np.array([0.0, *knots[:-1]])
    ends = np.array([*knots[:-1], np.inf])
    ramps: FloatArray = np.clip(values[:, None], starts, ends) - starts
    return ramps


def _fit_nonnegative(table: FloatArray, times_s: FloatArray) -> FloatArray:
    # Columns are scaled to the step time that they could explain, for the prior's sake.
    scale = np.sqrt(np.mean((table / times_s[:, None]) ** 2, axis=0))
    scale = np.where(scale > 0.0, scale, 1.0)
    prior = np.sqrt(_PRIOR_ROWS) * np.eye(table.shape[1])
    target = np.concatenate([np.ones(len(times_s)), np.zeros(table.shape[1])])
    relative = table / times_s[:, None] / scale
    weights = np.ones(len(times_s))
    for _ in range(1 + _NUM_REWEIGHTS):
        rows = np.vstack([relative * weights[:, None], prior])
        target[: len(times_s)] = weights
        solution, _ = nnls(rows, target)
        residual = np.abs(relative @ solution - 1.0)
        cut = _HUBER_SIGMAS * max(1.4826 * float(np.median(residual)), _MIN_SIGMA)
        weights = np.sqrt(np.minimum(1.0, cut / np.maximum(residual, cut)))
    result: FloatArray = solution / scale
    return result
