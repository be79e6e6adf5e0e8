"""The rows of a report, from what an engine knows of its requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sola_sched.cluster.view import StepModel
from sola_sched.config.slo import SloTarget
from sola_sched.prediction.length import NUM_LEVELS, FloatArray, remaining_mean


class Row(NamedTuple):
    """One request on an engine.

    Attributes:
        num_prompt: Prompt tokens, with output that has to be computed again.
        num_computed: Tokens of it in KV.
        num_outputs: Tokens generated.
        quantiles: Its predicted output [10], as `LengthPrediction.quantiles`.
        slo: Its targets.
        arrival_s: When it reached the engine.
        first_s: When its first token came; NaN before.
    """

    num_prompt: int
    num_computed: int
    num_outputs: int
    quantiles: FloatArray
    slo: SloTarget
    arrival_s: float
    first_s: float


def waiting_columns(rows: Sequence[Row], now_s: float) -> dict[str, Any]:
    """The columns of `InstanceView` for those that wait."""
    if not rows:
        return {}
    return {
        "waiting_tokens": np.array([row.num_prompt for row in rows], dtype=np.float64),
        "waiting_outputs": _left(rows),
        "num_waiting_lost": sum(
            1 for row in rows if math.isnan(row.first_s) and now_s - row.arrival_s > row.slo.ttft_s
        ),
    }


def running_columns(rows: Sequence[Row], now_s: float, model: StepModel) -> dict[str, Any]:
    """The columns of `InstanceView` for those that run.

    A decode counts as lost if it missed its TTFT, or could not make up for its bank even if every
    step to its expected end were a decode step of now.
    """
    if not rows:
        return {}
    ctx, outputs, first_s, num_prompt, arrival_s, ttft_target_s, tpot_s = np.array(
        [
            (
                row.num_computed, row.num_outputs, row.first_s, row.num_prompt, row.arrival_s,
                row.slo.ttft_s, row.slo.tpot_s,
            )
            for row in rows
        ],
        dtype=np.float64,
    ).T.copy()  # fmt: skip
    started = outputs > 0.0
    # An endless target times no output is no number; without output nothing is due.
    owed_s = np.where(np.isinf(tpot_s), math.inf, tpot_s) * np.maximum(outputs, 1.0)
    bank_s = np.where(started, owed_s - (now_s - first_s), math.inf)
    left = _left(rows)
    step_s = float(model.decode_s(len(rows), ctx.sum()))
    ttft_s = np.where(started, first_s, now_s) - arrival_s
    is_late = ttft_s > ttft_target_s
    is_behind = bank_s + left * (tpot_s - step_s) < 0.0
    return {
        "running_ctx": ctx,
        "running_prefill": np.maximum(0.0, num_prompt - ctx),
        "running_outputs": outputs,
        "running_left": left,
        "running_bank_s": bank_s,
        "running_lost": (is_late | is_behind).astype(np.float64),
    }


def _left(rows: Sequence[Row]) -> FloatArray:
    quantiles = np.concatenate([row.quantiles for row in rows]).reshape(len(rows), NUM_LEVELS)
    outputs = np.array([row.num_outputs for row in rows], dtype=np.int64)
    return np.maximum(remaining_mean(quantiles, outputs, None), 1.0)
