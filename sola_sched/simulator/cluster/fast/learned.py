"""The step times that the planner of a fast engine goes by: learned, as a real engine learns them.

As in `cost.model`: coefficients are fitted to steps that were done, and one factor for each kind of
step follows them in between (SOLA Eq. 5). The first fit is to the profile over steps of all sizes,
where a real engine schedules its first steps in vLLM's order.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.cost.fit import (
    DECODE,
    MIXED,
    PREFILL,
    StepShape,
    features_of,
    fit_coefficients,
    kind_by,
)
from sola_sched.cost.memory import all_steps, remember
from sola_sched.cost.times import base_of, bases_s, decode_s
from sola_sched.prediction.length import FloatArray
from sola_sched.simulator.cluster.fast.state import RUNNING, rows_in
from sola_sched.simulator.cluster.step_model import BatchTime

#: Steps that are remembered of each kind, and steps until the first fit to them. The next one is
#: after twice as many, at most `_FIT_EVERY` later: a fit takes as long as 50 steps.
NUM_REMEMBERED, FIRST_FIT, _FIT_EVERY = 128, 32, 2048
#: Confidence in one step, as `SolaConfig.alpha`; weight of one in `prefill_share`, as in `monitor`.
_ALPHA, _AVERAGING = 0.1, 0.05
#: Steps of the first fit: decodes, the KV of each; prompt tokens, those computed before.
_DECODES, _CONTEXTS = (0, 1, 4, 16, 48, 96, 160, 256), (128, 512, 1024, 2048)
_TOKENS, _COMPUTED = (0, 32, 128, 256, 512, 1024, 2048), (0, 512)


@lru_cache(maxsize=64)
def first_fit(batch_time: BatchTime) -> FloatArray:
    """Coefficients by the profile, as `fit_coefficients` gives them."""
    features, times_s = [], []
    for num, ctx, tokens, has in itertools.product(_DECODES, _CONTEXTS, _TOKENS, _COMPUTED):
        if num + tokens:
            squares, pairs = float(tokens * tokens), float(tokens * has)
            features.append(features_of(StepShape(num, num * (ctx + 1), tokens, squares, pairs)))
            times_s.append(batch_time.step_s(num, num * ctx, tokens, squares, pairs))
    return fit_coefficients(np.array(features, dtype=float), np.array(times_s))


def fit_again(memory: FloatArray, num_done: Any, before: FloatArray) -> FloatArray:
    """Coefficients by the steps that are remembered, of which so many were done of each kind."""
    return fit_coefficients(*all_steps(memory, num_done), before)


@compiled
def note_steps(e, took_s):
    """Remember the steps that are done, which took so long; follow their times."""
    at, plan = e.at, e.plan[0]
    num = at.num_decodes + at.num_ending
    # Of k steps: those of the one in the middle.
    ctx = at.ctx + at.kv_ending + 0.5 * num * (at.k + 1.0)
    kind, step_s, share = kind_by(num, at.tokens), took_s / at.k, 0.0
    bases = bases_s(plan, kind, num, ctx, at.tokens, at.squares, at.pairs)
    # Eq. 5 for so many equal steps.
    ratio, keep = step_s / base_of(kind, bases), (1.0 - _ALPHA) ** at.k
    plan.gamma[kind] = ratio + keep * (plan.gamma[kind] - ratio)
    if kind == PREFILL:
        share = 1.0
    elif kind == MIXED:
        share = max(0.0, 1.0 - decode_s(plan, num, ctx) / step_s)
    keep = (1.0 - _AVERAGING) ** at.k
    plan.prefill_share = share + keep * (plan.prefill_share - share)
    remember(e.memory, at.num_done, kind, num, ctx, at.tokens, at.squares, at.pairs, step_s)
    at.num_steps += at.k
    if at.num_steps >= at.next_fit:
        at.is_fit_due = True
        at.next_fit = at.num_steps + min(at.num_steps, _FIT_EVERY)


@compiled
def settled_steps(e):
    """So many steps of decodes alone are within all of their targets, >= 1."""
    at, plan, requests, shortest_s = e.at, e.plan[0], e.requests, np.inf
    for row in rows_in(e.lists[RUNNING]):
        shortest_s = min(shortest_s, requests[row].tpot_s)
    step_s = decode_s(plan, at.num_decodes, at.ctx + at.num_decodes)
    left_s = e.tuning[0].keep * shortest_s - step_s
    more_s = plan.gamma[DECODE] * plan.b1 * at.num_decodes
    if not left_s < more_s * 2.0**30:
        return 1 << 30
    return 1 + max(0, int(left_s / more_s))
