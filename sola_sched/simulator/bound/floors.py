"""Linear functions of the batch that a step time never falls below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sola_sched.simulator.steps.curves import StepCurves
from sola_sched.simulator.steps.tables import Points, StepTables
from sola_sched.simulator.steps.time import MeasuredStepTime, StepTimeModel


@dataclass(frozen=True, slots=True)
class StepFloor:
    """A step with n tokens for each request that has c tokens computed takes no less than

        base_s + per_decode_s * num_decodes + per_ctx_s * sum(c over decodes)
          + per_prefill_token_s * sum(n over prefills)
          + per_prefill_attn_s * sum(n * (c + n / 2) over prefills)

    where a piece of one token counts as a decode or as a prefill, whichever is less. All
    coefficients are >= 0.
    """

    base_s: float
    per_decode_s: float = 0.0
    per_ctx_s: float = 0.0
    per_prefill_token_s: float = 0.0
    per_prefill_attn_s: float = 0.0


class HasFloors(Protocol):
    """A step time of another kind that names its floors."""

    def floors(self) -> Sequence[StepFloor]:
        """One or more, each valid for every batch."""
        ...


def floors_of(step_time: Any) -> Sequence[StepFloor]:
    """The floors of a step time; their maximum is as near as linear functions come.

    - `StepTimeModel`: max(weights, per token) is at least either of the two. Over many steps the
      larger of the two sums is what evenly filled steps take, so nothing between them is needed.
    - `StepTables`: few tokens, and many, under the curve of tokens; of attention the steepest lines
      from the origin, with half of the shortest kernel under each of its two kinds.
    - `MeasuredStepTime` with curves: their constant and the steepest lines from the origin below
      them. Otherwise the smallest of the constants of its three kinds of step. A chunk's
      a0 c n + b0 n^2 is at least min(a0, 2 b0) n (c + n / 2), however the prompt is cut.
    - `StepFloor`: itself; anything else must have a method `floors()`.

    Raises:
        TypeError: The step time is none of these.
    """
    if isinstance(step_time, StepFloor):
        return [step_time]
    if isinstance(step_time, StepTimeModel):
        return _roofline_floors(step_time)
    if isinstance(step_time, StepTables):
        return _table_floors(step_time)
    if isinstance(step_time, MeasuredStepTime):
        if step_time.curves is not None:
            return [_curved_floor(step_time.curves)]
        return [_measured_floor(step_time)]
    floors = getattr(step_time, "floors", None)
    if floors is None:
        raise TypeError(
            f"'step_time' must be a StepTimeModel, StepTables, a MeasuredStepTime, a StepFloor or "
            f"have a method floors() (got {type(step_time).__name__})."
        )
    named: Sequence[StepFloor] = floors()
    return named


def _roofline_floors(model: StepTimeModel) -> list[StepFloor]:
    def floor(weights_s: float, per_token_s: float) -> StepFloor:
        return StepFloor(
            base_s=model.base_s + weights_s,
            per_decode_s=model.per_decode_s + per_token_s,
            per_ctx_s=model.per_ctx_s,
            per_prefill_token_s=model.per_prefill_token_s + per_token_s,
            per_prefill_attn_s=model.per_prefill_attn_s,
        )

    if not model.per_token_s or not model.weights_s:
        return [floor(model.weights_s, model.per_token_s)]
    return [floor(0.0, model.per_token_s), floor(model.weights_s, 0.0)]


def _table_floors(tables: StepTables) -> list[StepFloor]:
    allowance_s = 0.5 * tables.attention_s
    rows = [tuple(zip(tables.decode_context, row, strict=True)) for row in tables.decode_s]
    per_ctx_s = min(_least_slope(row, allowance_s) for row in rows)
    per_pair_s = _least_slope(tables.pairs, allowance_s)
    base_s = tables.host_s + tables.requests[0][1]

    def floor(per_token_s: float) -> StepFloor:
        return StepFloor(
            base_s=base_s + min(y - per_token_s * x for x, y in tables.tokens),
            per_decode_s=per_token_s,
            per_ctx_s=per_ctx_s,
            per_prefill_token_s=per_token_s + tables.per_prompt_token_s,
            per_prefill_attn_s=per_pair_s,
        )

    return [floor(0.0), floor(_least_slope(tables.tokens, 0.0))]


def _least_slope(points: Points, allowance_s: float) -> float:
    """Largest s with allowance + curve(x) >= s x for every x >= 0."""
    (x0, y0), (x1, y1) = points[-2:]
    chords = [(allowance_s + y) / x for x, y in points if x > 0]
    return max(0.0, min([*chords, (y1 - y0) / (x1 - x0)]))


def _measured_floor(step_time: MeasuredStepTime) -> StepFloor:
    c, gamma = step_time.cost.coefficients, step_time.cost.gamma
    mixed_s = gamma.mixed * (c.d0 + c.c1 - c.overlap)
    factor = min(gamma.prefill, gamma.decode, gamma.mixed)
    return StepFloor(
        base_s=min(gamma.prefill * c.d0, gamma.decode * c.c1, mixed_s),
        per_decode_s=factor * c.a1,
        per_ctx_s=factor * c.b1,
        per_prefill_token_s=factor * c.c0,
        per_prefill_attn_s=factor * min(c.a0, 2.0 * c.b0),
    )


def _curved_floor(curves: StepCurves) -> StepFloor:
    linear = curves.linear
    per_token_s = curves.least_slope("num_tokens")
    return StepFloor(
        base_s=linear["is_step"],
        per_decode_s=curves.least_slope("num_requests") + per_token_s,
        per_ctx_s=linear["decode_ctx_tokens"],
        per_prefill_token_s=linear["prefill_tokens"] + per_token_s,
        per_prefill_attn_s=min(linear["prefill_ctx_tokens"], 2.0 * linear["prefill_sq_tokens"]),
    )
