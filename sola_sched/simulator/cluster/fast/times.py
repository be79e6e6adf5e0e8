"""The step times of `BatchTime`, compiled.

One array of numbers holds a profile, so that it is one argument of compiled functions: its form,
the factor, whether prompts count as decodes, then the numbers of that form. A curve is the number
of its points, their values, their seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.cost.times import Times, linear_of
from sola_sched.cost.times import step_s as fitted_step_s
from sola_sched.errors import ConfigError
from sola_sched.prediction.length import FloatArray
from sola_sched.simulator.cluster.step_model import TYPICAL_CTX, BatchTime
from sola_sched.simulator.steps.tables import StepTables
from sola_sched.simulator.steps.time import DecodeOnly, MeasuredStepTime, StepTimeModel

#: Forms.
_ROOFLINE, _TABLES, _FITTED = range(3)
#: Places of what each has, and of what follows in it. Of tables these are numbers, then where the
#: curves and the grid of decodes begin.
_FORM, _FACTOR, _AS_DECODES = range(3)
_BASE, _PER_DECODE, _PER_CTX, _PER_PREFILL, _PER_PAIR, _WEIGHTS, _PER_ANY, _POWER = range(3, 11)
_HOST, _ATTENTION, _PER_TOKEN, _MAX_GRAPH, _TOKENS, _REQUESTS, _PAIRS, _GRID, _CURVES = range(3, 12)
_A0, _B0, _C0, _A1, _B1, _C1, _D0, _BOTH, _PREFILL, _DECODE, _MIXED = range(3, 14)


def pack(batch_time: BatchTime) -> FloatArray:
    """The array of a profile.

    Raises:
        ConfigError: The step time is of a class that has no compiled form.
    """
    step_time: Any = batch_time.step_time
    as_decodes = isinstance(step_time, DecodeOnly)
    if as_decodes:
        step_time = step_time.step_time
    for cls, form, numbers in _FORMS:
        if isinstance(step_time, cls):
            return np.array([form, batch_time.factor, as_decodes, *numbers(step_time)], float)
    known = ", ".join(cls.__name__ for cls, _, _ in _FORMS)
    raise ConfigError(
        f"The fast model needs a step time that is one of {known}, or DecodeOnly of one "
        f"(got {type(step_time).__name__}); serve with real schedulers, or give it by StepTables."
    )


def _roofline(model: StepTimeModel) -> Iterable[float]:
    return (
        model.base_s, model.per_decode_s, model.per_ctx_s, model.per_prefill_token_s,
        model.per_prefill_attn_s, model.weights_s, model.per_token_s, model.overlap_power,
    )  # fmt: skip


def _tables(tables: StepTables) -> Iterable[float]:
    parts: list[float] = []
    begins = []
    for points in (tables.tokens, tables.requests, tables.pairs):
        begins.append(_CURVES + len(parts))
        values, seconds = zip(*points, strict=True)
        parts += [len(points), *values, *seconds]
    begins.append(_CURVES + len(parts))
    parts += [len(tables.decode_requests), *tables.decode_requests]
    for row in tables.decode_s:
        parts += [len(row), *tables.decode_context, *row]
    numbers = (
        tables.host_s, tables.attention_s, tables.per_prompt_token_s, tables.max_graph_tokens,
    )  # fmt: skip
    return [*numbers, *begins, *parts]


def _fitted(measured: MeasuredStepTime) -> Iterable[float]:
    return (*linear_of(measured.cost.coefficients), *measured.cost.gamma)


_FORMS: tuple[tuple[type, int, Callable[[Any], Iterable[float]]], ...] = (
    (StepTimeModel, _ROOFLINE, _roofline),
    (StepTables, _TABLES, _tables),
    (MeasuredStepTime, _FITTED, _fitted),
)


@compiled
def decode_s(times, num_decodes, ctx_tokens):
    """See `BatchTime.decode_s`."""
    return step_s(times, num_decodes, ctx_tokens, 0.0, 0.0, 0.0, 0.0)


@compiled
def decode_line(times, num_decodes):
    """See `BatchTime.decode_line`."""
    constant_s = decode_s(times, num_decodes, 0.0)
    typical = TYPICAL_CTX * num_decodes
    return constant_s, (decode_s(times, num_decodes, typical) - constant_s) / typical


@compiled
def prefill_s(times, new_tokens):
    """See `BatchTime.prefill_s`."""
    tokens = max(new_tokens, 1e-9)
    return step_s(times, 0.0, 0.0, tokens, tokens * tokens, 0.0, 1.0)


@compiled
def step_s(times, num_decodes, ctx_tokens, prefill_tokens, prefill_sq, prefill_ctx, num_prefills):
    """See `BatchTime.step_s`."""
    decodes, ctx, tokens = float(num_decodes), float(ctx_tokens), float(prefill_tokens)
    squares, pairs, chunks = float(prefill_sq), float(prefill_ctx), float(num_prefills)
    if times[_AS_DECODES] > 0.0 and tokens > 0.0:
        decodes, ctx, tokens, squares, pairs = decodes + chunks, ctx + int(tokens), 0.0, 0.0, 0.0
    if times[_FORM] == _FITTED:
        seconds = _fitted_s(times, decodes, ctx, tokens, squares, pairs)
    elif decodes + tokens == 0.0:
        seconds = 0.0
    elif times[_FORM] == _ROOFLINE:
        seconds = _roofline_s(times, decodes, ctx, tokens, pairs + 0.5 * squares)
    else:
        seconds = _tables_s(times, decodes, ctx, tokens, pairs + 0.5 * squares, chunks)
    return times[_FACTOR] * seconds


@compiled
def _roofline_s(times, decodes, ctx, tokens, pairs):
    """See `StepTimeModel.seconds`."""
    weights_s, compute_s, power = (
        times[_WEIGHTS],
        times[_PER_ANY] * (decodes + tokens),
        times[_POWER],
    )
    products_s = max(weights_s, compute_s)
    if power > 0.0 and products_s > 0.0:
        share = min(weights_s, compute_s) / products_s
        products_s *= (1.0 + share**power) ** (1.0 / power)
    return (
        times[_BASE]
        + products_s
        + times[_PER_DECODE] * decodes
        + times[_PER_CTX] * ctx
        + times[_PER_PREFILL] * tokens
        + times[_PER_PAIR] * pairs
    )


@compiled
def _fitted_s(times, decodes, ctx, tokens, squares, pairs):
    """See `CostModel.step_s`."""
    of = Times(
        times[_A0], times[_B0], times[_C0], times[_A1], times[_B1], times[_C1], times[_D0],
        times[_BOTH], (times[_PREFILL], times[_DECODE], times[_MIXED]),
    )  # fmt: skip
    return fitted_step_s(of, decodes, ctx, tokens, squares, pairs)


@compiled
def _tables_s(times, decodes, ctx, tokens, pairs, num_prefills):
    """See `StepTables.seconds`."""
    chunks = num_prefills if tokens > 0.0 else 0.0
    return (
        times[_HOST]
        + times[_ATTENTION]
        + _curve_s(times, int(times[_TOKENS]), _graph_size(decodes + tokens, times[_MAX_GRAPH]))
        + _curve_s(times, int(times[_REQUESTS]), decodes + chunks)
        + (_grid_s(times, decodes, ctx) if decodes > 0.0 else 0.0)
        + (_curve_s(times, int(times[_PAIRS]), pairs) if chunks else 0.0)
        + times[_PER_TOKEN] * tokens
    )


@compiled
def _graph_size(tokens, most):
    """See `tables.graph_size`."""
    if tokens > most or tokens <= 2.0:
        return tokens
    unit = 4.0 if tokens <= 4.0 else 8.0 if tokens <= 256.0 else 16.0
    return min(most, -(-tokens // unit) * unit)


@compiled
def _above(times, first, count, value):
    """Place of the first of some numbers that is not below a value; the second at least."""
    low, high = 1, count - 1
    while low < high:
        middle = (low + high) // 2
        if times[first + middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _curve_s(times, begin, value):
    """A curve at a value; it goes on with its last slope, and not below its first point."""
    first, count = begin + 1, int(times[begin])
    place = first + _above(times, first, count, value)
    x0, x1 = times[place - 1], times[place]
    y0, y1 = times[place - 1 + count], times[place + count]
    return y0 + max(0.0, value - x0) * (y1 - y0) / (x1 - x0)


@compiled
def _row_s(times, begin, ctx):
    """A curve of the grid; as `_curve_s` but for the order in which it rounds."""
    first, count = begin + 1, int(times[begin])
    place = first + _above(times, first, count, ctx)
    x0, x1 = times[place - 1], times[place]
    slope = (times[place + count] - times[place - 1 + count]) / (x1 - x0)
    return times[place - 1 + count] + max(0.0, ctx - x0) * slope


@compiled
def _grid_s(times, decodes, ctx):
    """See `StepTables._decode`."""
    begin = int(times[_GRID])
    first, count = begin + 1, int(times[begin])
    above = _above(times, first, count, decodes)
    size = 1 + 2 * int(times[first + count])
    low, high = first + count + (above - 1) * size, first + count + above * size
    low_s, high_s = _row_s(times, low, ctx), _row_s(times, high, ctx)
    x0, x1 = times[first + above - 1], times[first + above]
    share = (decodes - x0) / (x1 - x0)
    num_context = int(times[low])
    more_s = times[high + 1 + num_context] - times[low + 1 + num_context]
    return low_s + min(max(0.0, share), 1.0) * (high_s - low_s) + max(0.0, share - 1.0) * more_s
