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


class Columns(NamedTuple):
    """Rows as arrays, one of each attribute of `Row`: [n] of float64; the quantiles are [n, 10]."""

    num_prompt: FloatArray
    num_computed: FloatArray
    num_outputs: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    arrival_s: FloatArray
    first_s: FloatArray
    quantiles: FloatArray

    @classmethod
    def of_arrays(cls, numbers: FloatArray, quantiles: FloatArray) -> Columns:
        """Of all but the quantiles, [7, n], and those."""
        return cls._make([*numbers, quantiles])

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Columns:
        """Of rows."""
        numbers = np.empty((7, len(rows)))
        quantiles = np.empty((len(rows), NUM_LEVELS))
        for i, row in enumerate(rows):
            numbers[:, i] = (
                row.num_prompt, row.num_computed, row.num_outputs, row.slo.ttft_s, row.slo.tpot_s,
                row.arrival_s, row.first_s,
            )  # fmt: skip
            quantiles[i] = row.quantiles
        return cls.of_arrays(numbers, quantiles)


def waiting_columns(waiting: Columns, now_s: float) -> dict[str, Any]:
    """The columns of `InstanceView` for those that wait."""
    if not len(waiting.num_prompt):
        return {}
    has_missed = np.isnan(waiting.first_s) & (now_s - waiting.arrival_s > waiting.ttft_s)
    return {
        "waiting_tokens": waiting.num_prompt,
        "waiting_outputs": _left(waiting),
        "num_waiting_lost": int(np.count_nonzero(has_missed)),
    }


def running_columns(running: Columns, now_s: float, model: StepModel) -> dict[str, Any]:
    """The columns of `InstanceView` for those that run.

    A decode counts as lost if it missed its TTFT, or could not make up for its bank even if every
    step to its expected end were a decode step of now.
    """
    ctx, outputs = running.num_computed, running.num_outputs
    if not len(ctx):
        return {}
    started = outputs > 0.0
    owed_s = running.tpot_s * np.maximum(outputs, 1.0)  # without output nothing is due
    bank_s = np.where(started, owed_s - (now_s - running.first_s), math.inf)
    left = _left(running)
    step_s = float(model.decode_s(len(ctx), ctx.sum()))
    ttft_s = np.where(started, running.first_s, now_s) - running.arrival_s
    is_late = ttft_s > running.ttft_s
    is_behind = bank_s + left * (running.tpot_s - step_s) < 0.0
    return {
        "running_ctx": ctx,
        "running_prefill": np.maximum(0.0, running.num_prompt - ctx),
        "running_outputs": outputs,
        "running_left": left,
        "running_bank_s": bank_s,
        "running_lost": (is_late | is_behind).astype(np.float64),
    }


def _left(columns: Columns) -> FloatArray:
    outputs = columns.num_outputs.astype(np.int64)
    return np.maximum(remaining_mean(columns.quantiles, outputs, None), 1.0)
