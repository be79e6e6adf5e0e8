"""Step times by their coefficients: Eq. 3 and 4 of the paper, with what joins them.

`at` is whatever has the coefficients and the correction factors: the record of a `CostModel`, that
of a plan, or `Times`. The functions of one line work on whole columns too, as plain Python.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from sola_sched.compiled.functions import compiled
from sola_sched.cost.file import Coefficients
from sola_sched.cost.fit import DECODE, MIXED, PREFILL, kind_by

#: Largest answer of `most_tokens`, also where prefill looks free.
MAX_TOKENS = 2.0**31

#: The coefficients of `Times`, in order.
LINEAR = ("a0", "b0", "c0", "a1", "b1", "c1", "d0", "mixed")


class Times(NamedTuple):
    """The coefficients of step times and their correction.

    Attributes:
        a0 ... d0: As in `Coefficients`.
        mixed: The constant of a mixed step: ``d0 + c1 - overlap``.
        gamma: Factors by kind of step.
    """

    a0: float
    b0: float
    c0: float
    a1: float
    b1: float
    c1: float
    d0: float
    mixed: float
    gamma: tuple[float, float, float]


def linear_of(model: Coefficients) -> tuple[float, ...]:
    """The `LINEAR` of coefficients."""
    mixed = model.d0 + model.c1 - model.overlap
    return model.a0, model.b0, model.c0, model.a1, model.b1, model.c1, model.d0, mixed


@compiled
def copy_times(to, of):
    """The coefficients and factors of a record into another's."""
    to.a0, to.b0, to.c0, to.d0 = of.a0, of.b0, of.c0, of.d0
    to.a1, to.b1, to.c1, to.mixed = of.a1, of.b1, of.c1, of.mixed
    for kind in range(3):
        to.gamma[kind] = of.gamma[kind]


@compiled
def decodes_base_s(at, num_decodes, ctx):
    """C_0 of decodes without the constant of a step, seconds."""
    return at.a1 * num_decodes + at.b1 * ctx


@compiled
def chunks_base_s(at, tokens, squares, products):
    """C_0 of chunks without the constant of a step, by their sums as in `StepShape`, seconds."""
    return at.a0 * products + at.b0 * squares + at.c0 * tokens


@compiled
def decode_s(at, num_decodes, ctx):
    """Time of a step of so many decodes with so many KV tokens in all, seconds."""
    return at.gamma[DECODE] * (at.a1 * num_decodes + at.b1 * ctx + at.c1)


@compiled
def chunk_s(at, new, has):
    """What a chunk adds to a step that runs anyway, seconds."""
    return at.gamma[MIXED] * (new * (at.a0 * has + at.b0 * new + at.c0))


@compiled
def chunks_s(at, new, has, most):
    """What chunks of at most `most` tokens add to steps that run anyway, in all, seconds."""
    return at.gamma[MIXED] * _chunks_of_one_s(at, new, has, most)


@compiled
def chunks_alone_s(at, new, has, most):
    """As `chunks_s`, to steps without decodes."""
    return at.gamma[PREFILL] * _chunks_of_one_s(at, new, has, most)


@compiled
def _chunks_of_one_s(at, new, has, most):
    """C_0 of the chunks of one prompt without the constants of steps, seconds."""
    chunk = min(new, most)
    ctx = has + 0.5 * (new - chunk)  # tokens computed before its chunk, for a token on average
    return new * (at.a0 * ctx + at.b0 * chunk + at.c0)


@compiled
def chunk_alone_s(at, new, has):
    """Time of a step of one chunk and nothing else, seconds."""
    return at.gamma[PREFILL] * (new * (at.a0 * has + at.b0 * new + at.c0) + at.d0)


@compiled
def prompts_constant_s(at):
    """What a step of prompts alone takes beside its chunks, seconds."""
    return at.gamma[PREFILL] * at.d0


@compiled
def chunk_overhead_s(at):
    """What a decode step costs more because it has a chunk at all, however short, seconds."""
    return max(0.0, at.gamma[MIXED] * at.mixed - at.gamma[DECODE] * at.c1)


@compiled
def most_tokens(at, limit_s, num_decodes, ctx, has):
    """The longest chunk beside these decodes for which `limit_s` is enough, tokens.

    The root of b0 n^2 + (a0 has + c0) n + constant = limit; see `CostModel.max_prefill_tokens`.
    """
    # A gamma is > 0, so each bound of `step_s` on gamma (chunk + rest) gives the chunk's time.
    room_s = limit_s / at.gamma[PREFILL] - at.d0
    if num_decodes > 0:
        decodes_s = at.a1 * num_decodes + at.b1 * ctx
        if at.gamma[DECODE] * (decodes_s + at.c1) > limit_s:
            return 0.0
        room_s = min(room_s, limit_s / at.gamma[MIXED] - decodes_s - at.mixed)
    # `not >` instead of `<=`: a NaN limit gives 0 as well.
    if not room_s > 0.0:
        return 0.0
    linear = at.a0 * has + at.c0
    divisor = linear + math.sqrt(linear * linear + 4.0 * at.b0 * room_s)
    if divisor * MAX_TOKENS <= 2.0 * room_s or math.isinf(room_s):
        return float(MAX_TOKENS)
    return 2.0 * room_s / divisor


@compiled
def bases_s(at, kind, num_decodes, ctx, tokens, squares, products):
    """C_0 of the prompts alone, of the decodes alone and of both: what the kind needs of it."""
    if kind == DECODE:
        return 0.0, decodes_base_s(at, num_decodes, ctx) + at.c1, 0.0
    chunks_s = chunks_base_s(at, tokens, squares, products)
    if kind == PREFILL:
        return chunks_s + at.d0, 0.0, 0.0
    decodes_s = decodes_base_s(at, num_decodes, ctx)
    return chunks_s + at.d0, decodes_s + at.c1, chunks_s + decodes_s + at.mixed


@compiled
def base_of(kind, bases):
    """C_0 of a step of a kind, of its `bases_s`."""
    prompts_s, decodes_s, together_s = bases
    if kind == MIXED:
        return together_s
    return decodes_s if kind == DECODE else prompts_s


@compiled
def corrected_s(at, kind, bases):
    """The time of a step of a kind, by its `bases_s`.

    A mixed step costs at least what its decodes or its prefill would cost alone: that keeps the
    prediction monotone when the factors of the kinds differ.
    """
    prompts_s, decodes_s, together_s = bases
    if kind == DECODE:
        return at.gamma[DECODE] * decodes_s
    if kind == PREFILL:
        return at.gamma[PREFILL] * prompts_s
    return max(
        at.gamma[MIXED] * together_s, at.gamma[DECODE] * decodes_s, at.gamma[PREFILL] * prompts_s
    )


@compiled
def step_s(at, num_decodes, ctx, tokens, squares, products):
    """Time of a step with these sums, as in `StepShape`, seconds; 0 for an empty one."""
    kind = kind_by(num_decodes, tokens)
    if kind < 0:
        return 0.0
    return corrected_s(at, kind, bases_s(at, kind, num_decodes, ctx, tokens, squares, products))
