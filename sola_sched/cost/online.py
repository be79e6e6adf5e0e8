"""What a measured step does to a cost model: all of it that is done at each step, compiled."""

from __future__ import annotations

from typing import Any

import numpy as np

from sola_sched.compiled.functions import FloatArray, Records, compiled, entry, records_of
from sola_sched.cost import gamma, times
from sola_sched.cost.fit import DECODE, MIXED, PREFILL, kind_by
from sola_sched.cost.gamma import CORRECTION
from sola_sched.cost.memory import NUM_KINDS, new_memory, remember
from sola_sched.cost.review import REVIEW, note_error

#: What is due after a step, beside nothing: what is known of prompts is doubted; the coefficients
#: that were given are compared with a fit; they are fitted again.
NOTHING, DOUBT, COMPARE, REFIT = range(4)

_ERROR_WEIGHT = 0.01
FIRST_REFIT = 8
# A fit whose errors keep exceeding the usual one is renewed sooner.
_USUAL_ERROR = 0.2
_MAX_SURPRISE = 3.0
# After so many decode steps in a row, steps with prompts are forgotten if a short prompt would take
# so many times as long as the decodes.
_DOUBTED_STEPS, _DOUBTED_TOKENS, _DOUBTED_TIMES = 512, 128.0, 10.0
_MIN_STEPS = 16
_MIN_STEPS_PER_PHASE = 4
# After so many steps without a decode there are none here: answers have one token, as of those that
# only compute prompts for others. What decodes would take is guessed, until the first one runs. The
# prompts of the longest step must have so many tokens, and so many times those of the shortest, or
# nobody knows what a token takes and what a step.
_MIN_PREFILLS_ALONE, _MIN_LONGEST, _MIN_SPREAD = 64, 256.0, 8.0

#: A cost model, but for the steps that it remembers: coefficients, correction, review and
#:
#: - is_fitted: It has coefficients. is_ready: they rest on enough steps.
#: - is_given: They were given, and live steps only correct them.
#: - num_steps: Live steps. num_added: those remembered, of each kind, as of `remember`.
#: - num_errors, error: Steps that were predicted, and the running mean of the errors.
#: - surprise: Sum of errors above the usual one, >= 0.
#: - num_decodes_alone: Steps since the last one with a prompt.
#: - least_tokens, most_tokens: Prompt tokens of steps without decodes.
#: - next_refit, next_early_refit: After so many steps the coefficients are fitted again; after so
#:   many, if they surprise.
MODEL = np.dtype([
    *((name, "f8") for name in times.LINEAR), *CORRECTION, *REVIEW,
    ("is_fitted", "?"), ("is_ready", "?"), ("is_given", "?"),
    ("num_steps", "i8"), ("num_added", "i8", (3,)), ("num_errors", "i8"), ("error", "f8"),
    ("surprise", "f8"), ("num_decodes_alone", "i8"), ("least_tokens", "f8"),
    ("most_tokens", "f8"), ("next_refit", "i8"),
    ("next_early_refit", "i8"),
], align=True)  # fmt: skip


def new_model(alpha: float) -> Records:
    """One `MODEL` that has seen nothing.

    Raises:
        ValueError: `alpha` is not in (0, 1].
    """
    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"'alpha' must be in (0, 1] (got {alpha!r}).")
    model: Any = records_of(MODEL, 1)
    model["alpha"], model["next_refit"] = alpha, FIRST_REFIT
    model["gamma"] = model["lean"] = 1.0
    model["patience"] = gamma.PATIENCE
    model["least_tokens"] = np.inf
    return model


@entry
def observe(
    model: Records,
    memory: FloatArray,
    num_decodes: float,
    ctx: float,
    tokens: float,
    squares: float,
    products: float,
    measured_s: float,
) -> int:
    """As `take_in` of the one model; sums as in `StepShape`."""
    due: int = take_in(model[0], memory, num_decodes, ctx, tokens, squares, products, measured_s)
    return due


@entry
def step_s(
    model: Records, num_decodes: float, ctx: float, tokens: float, squares: float, products: float
) -> float:
    """As `times.step_s` of the one model."""
    seconds: float = times.step_s(model[0], num_decodes, ctx, tokens, squares, products)
    return seconds


@entry
def replay(model: Records, ratios: FloatArray, counts: Any) -> None:
    """As `gamma.replay` of the one model."""
    gamma.replay(model[0], ratios, counts)


@compiled
def take_in(at, memory, num_decodes, ctx, tokens, squares, products, measured_s):
    """Take in one measured step: gamma (Eq. 5), running error, memory; what is due then.

    Args:
        at: A `MODEL`.
        memory: Of `remember`.
        The rest: sums as in `StepShape`, and the time in seconds.
    """
    kind = kind_by(num_decodes, tokens)
    if kind < 0 or not (measured_s > 0.0 and measured_s < np.inf):
        return NOTHING
    at.num_steps += 1
    is_review_due = False
    if at.is_fitted:
        bases = times.bases_s(at, kind, num_decodes, ctx, tokens, squares, products)
        if at.is_ready:
            error = abs(times.corrected_s(at, kind, bases) - measured_s) / measured_s
            _count_error(at, error)
            if at.is_given:
                is_review_due = note_error(at, kind, error)
        _correct(at, kind, bases, measured_s)
    remember(memory, at.num_added, kind, num_decodes, ctx, tokens, squares, products, measured_s)
    at.num_decodes_alone = at.num_decodes_alone + 1 if kind == DECODE else 0
    if kind == PREFILL:
        at.least_tokens = min(at.least_tokens, tokens)
        at.most_tokens = max(at.most_tokens, tokens)
    elif at.num_added[DECODE] + at.num_added[MIXED] == 1 and not at.is_given:
        at.is_ready = False  # what decodes take was a guess
    if _are_prompts_doubted(at, measured_s):
        return DOUBT
    return what_is_due(at, is_review_due)


@compiled
def _count_error(at, error):
    """Follow the error of a prediction."""
    at.num_errors += 1
    at.error += max(1.0 / at.num_errors, _ERROR_WEIGHT) * (error - at.error)
    at.surprise = max(0.0, at.surprise + min(error, 1.0) - _USUAL_ERROR)


@compiled
def _correct(at, kind, bases, measured_s):
    """Move gamma by a step of so many seconds.

    A mixed step took no less than its decodes or its prefill would alone; see `corrected_s`.
    """
    base_s = times.base_of(kind, bases)
    if not base_s > 0.0:
        return
    gamma.update(at, kind, measured_s / base_s)
    if kind == MIXED:
        prompts_s, decodes_s, _ = bases
        if prompts_s > 0.0:
            gamma.at_most(at, PREFILL, measured_s / prompts_s)
        if decodes_s > 0.0:
            gamma.at_most(at, DECODE, measured_s / decodes_s)


@compiled
def _are_prompts_doubted(at, decodes_s):
    """Whether what is known of prompts keeps them from being let in, and none have run for long."""
    if at.is_given or at.num_decodes_alone != _DOUBTED_STEPS or not at.is_ready:
        return False
    tokens = _DOUBTED_TOKENS
    return times.step_s(at, 0.0, 0.0, tokens, tokens * tokens, 0.0) > _DOUBTED_TIMES * decodes_s


@compiled
def has_enough_steps(at):
    """Whether coefficients can rest on what is remembered."""
    if at.num_added[DECODE] + at.num_added[MIXED] == 0:
        is_told = at.most_tokens >= max(_MIN_LONGEST, _MIN_SPREAD * at.least_tokens)
        return at.num_added[PREFILL] >= _MIN_PREFILLS_ALONE and is_told
    return _has_both_phases(at)


@compiled
def _has_both_phases(at):
    """Whether prefills and decodes are both known from enough steps."""
    prefill, decode, mixed = at.num_added[PREFILL], at.num_added[DECODE], at.num_added[MIXED]
    return (
        at.num_steps >= _MIN_STEPS
        and prefill + mixed >= _MIN_STEPS_PER_PHASE
        and decode + mixed >= _MIN_STEPS_PER_PHASE
    )


@compiled
def what_is_due(at, is_review_due):
    """After a step: `COMPARE`, `REFIT` or `NOTHING`."""
    if at.is_given:
        return COMPARE if is_review_due and _has_both_phases(at) else NOTHING
    if at.num_steps >= at.next_refit or (not at.is_ready and has_enough_steps(at)):
        return REFIT
    if at.surprise > _MAX_SURPRISE and at.num_steps >= at.next_early_refit:
        return REFIT
    return NOTHING


def warm_up() -> None:
    """Compile what is not yet compiled."""
    model = new_model(1.0)
    observe(model, new_memory(1), 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    step_s(model, 1.0, 1.0, 1.0, 1.0, 1.0)
    replay(model, np.zeros((NUM_KINDS, 1)), np.zeros(NUM_KINDS, dtype=np.int64))
