"""The online correction of the cost model: one factor per kind of step (SOLA Eq. 5).

Eq. 5 starts from 1. Here each kind's average starts from that of the kind nearest to it, and that
one's from the third, so the weight of the start, (1 - alpha)^n after n steps, is what a kind leans
on the others. A kind that has run once thus follows the others nearly as closely as one that has
never run, and is on its own after some fifty steps.

A factor that says that steps of its kind are long also keeps a planner from making any, and so from
learning better. So one whose kind does not run while others do is taken ever less at its word: see
`far`. The first step of the kind then decides whether it was right.

`at` is a record with `CORRECTION`. Ratios are measured times over C_0, > 0.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sola_sched.compiled.functions import compiled
from sola_sched.cost.fit import DECODE, MIXED, PREFILL

# On whose average a kind leans, nearest first.
_NEIGHBOURS = ((MIXED, DECODE), (MIXED, PREFILL), (DECODE, PREFILL))
# One step counts as at most this factor away from what was expected,
_MAX_JUMP = 2.0
# but so many of a kind in a row that are this factor off, all to the same side, are no outliers.
_MANY = 8
_OFF = 1.5
_MIN_GAMMA = 1e-6
_MAX_GAMMA = 1e6
# A kind that leans less on the others than this follows its own steps alone.
_ALONE = 1e-3
#: Steps of other kinds after which a factor may be only about twice theirs; after twice as many it
#: may be `_CLOSE` times theirs. Doubled each time that the next step of the kind confirms it.
PATIENCE, MOST_PATIENCE = 256, 4096
_CLOSE = 1.05
# Steps of others for which a kind counts as one that runs.
_RUNS = 64
# Smaller steps back to what is remembered say nothing about who was right.
_CLEAR = 1.1

#: What a correction is, by kind of step:
#:
#: - alpha: Confidence in one measured step, in (0, 1].
#: - gamma: Factors, each > 0.
#: - own, lean: A kind's average is ``own + lean * start``.
#: - age, patience: Steps of other kinds since the last one of each, and how many it bears; see
#:   `far`.
#: - off, num_off: The latest ratios, as long as all of them are far off to the same side.
CORRECTION = [
    ("alpha", "f8"), ("gamma", "f8", (3,)), ("own", "f8", (3,)), ("lean", "f8", (3,)),
    ("age", "i8", (3,)), ("patience", "i8", (3,)), ("off", "f8", (3, _MANY)),
    ("num_off", "i8", (3,)),
]  # fmt: skip


class Gamma(NamedTuple):
    """Correction factors by kind of step."""

    prefill: float
    decode: float
    mixed: float


@compiled
def forget(at):
    """Start from 1, with no step taken in; how long each kind has not run stays known."""
    for kind in range(3):
        at.gamma[kind], at.own[kind], at.lean[kind], at.num_off[kind] = 1.0, 0.0, 1.0, 0


@compiled
def update(at, kind, ratio):
    """gamma <- alpha ratio + (1 - alpha) gamma, with the ratio clipped around gamma."""
    _settle(at, kind, ratio)
    old = at.gamma[kind]
    clipped = min(max(ratio, old / _MAX_JUMP), old * _MAX_JUMP)
    at.own[kind] += at.alpha * (clipped - at.own[kind])
    at.lean[kind] *= 1.0 - at.alpha
    _follow_many(at, kind, ratio, old)
    at.gamma[kind] = _followed(at, kind)
    for each in range(3):
        if each != kind:
            at.age[each] += 1
            if at.lean[each] > _ALONE or at.age[each] > _RUNS:
                at.gamma[each] = _followed(at, each)
    _bound(at)


@compiled
def at_most(at, kind, ratio):
    """A longer step had all of one of this kind in it, and took `ratio` times C_0 of that one.

    A factor that is above that by half is wrong, whether or not a step of its kind ever runs.
    One below may still be, so its kind counts as no younger for that.
    """
    if at.gamma[kind] > ratio * _OFF:
        prefill, decode, mixed = at.age[PREFILL], at.age[DECODE], at.age[MIXED]
        update(at, kind, ratio)
        at.age[PREFILL], at.age[DECODE], at.age[MIXED] = prefill, decode, mixed
        _bound(at)


@compiled
def replay(at, ratios, counts):
    """Start from 1 again and take in the newest ratios of each kind, oldest first.

    No step has run meanwhile: a kind that has not run for long stays one.

    Args:
        ratios: [kinds, most].
        counts: So many of each kind.
    """
    forget(at)
    age = at.age[PREFILL], at.age[DECODE], at.age[MIXED]
    patience = at.patience[PREFILL], at.patience[DECODE], at.patience[MIXED]
    # Kinds that run come last: they would lean on what is remembered of those that do not.
    for runs in range(2):
        for kind in range(3):
            if (age[kind] <= _RUNS) == (runs == 1):
                for place in range(counts[kind]):
                    for each in range(3):
                        at.age[each], at.patience[each] = 0, PATIENCE
                    update(at, kind, ratios[kind, place])
    for kind in range(3):
        at.age[kind], at.patience[kind] = age[kind], patience[kind]
    _bound(at)


@compiled
def far(at, kind):
    """How many times larger or smaller than those of the kinds that run a factor may be.

    1.05 + 2^(8 (1 - n / patience)) after n steps of others since the last one of its own kind.
    """
    return _CLOSE + math.pow(2.0, 8.0 * (1.0 - at.age[kind] / at.patience[kind]))


@compiled
def _follow_many(at, kind, ratio, old):
    """So many steps in a row that are far off to the same side are right: their median is."""
    count = at.num_off[kind]
    if count and (at.off[kind, count - 1] > old) != (ratio > old):
        count = 0
    if ratio * _OFF < old or ratio > old * _OFF:
        at.off[kind, count] = ratio
        count += 1
        if count == _MANY:
            at.own[kind], at.lean[kind] = _median(at.off[kind]), 0.0
            count = 0
    else:
        count = 0
    at.num_off[kind] = count


@compiled
def _median(values):
    """Of an even number of values, which it sorts."""
    for place in range(1, len(values)):
        value = values[place]
        while place > 0 and value < values[place - 1]:
            values[place] = values[place - 1]
            place -= 1
        values[place] = value
    middle = len(values) // 2
    return (values[middle - 1] + values[middle]) / 2.0


@compiled
def _bound(at):
    """Hold the factors of kinds that have not run for long against the others."""
    if max(at.age[PREFILL], at.age[DECODE], at.age[MIXED]) <= _RUNS:
        return
    least, most = np.inf, 0.0
    for kind in range(3):
        if at.age[kind] <= _RUNS:
            least, most = min(least, at.gamma[kind]), max(most, at.gamma[kind])
    for kind in range(3):
        if at.age[kind] > _RUNS:
            times = far(at, kind)
            at.gamma[kind] = min(max(at.gamma[kind], least / times), most * times)


@compiled
def _settle(at, kind, ratio):
    """A kind runs again: what is remembered of it counts again as far as this step confirms it.

    By one step's worth at most: the first step of a kind for long is often a slow one.
    """
    age, at.age[kind] = at.age[kind], 0
    if age <= _RUNS:
        return
    now, before = at.gamma[kind], _followed(at, kind)
    if max(now, before) <= _CLEAR * min(now, before):
        at.gamma[kind] = before
        return
    confirms = (ratio >= math.sqrt(now * before)) == (before >= now)
    if confirms:
        now = min(max(before, now / _MAX_JUMP), now * _MAX_JUMP)
        at.patience[kind] = min(2 * at.patience[kind], MOST_PATIENCE)
    else:
        at.patience[kind] = PATIENCE
    if now != before:
        at.own[kind], at.lean[kind], at.num_off[kind] = now, 0.0, 0
    at.gamma[kind] = now


@compiled
def _followed(at, kind):
    """The average of a kind, within what a factor may be."""
    own, lean = at.own[kind], at.lean[kind]
    if lean <= _ALONE:
        average = own + lean
    else:
        near, far_off = _NEIGHBOURS[kind]
        start = at.own[near] + at.lean[near] * (at.own[far_off] + at.lean[far_off])
        # What few steps said may be old: it counts as no further off than one step would.
        usual = (1.0 - lean) * start
        average = min(max(own, usual / _MAX_JUMP), usual * _MAX_JUMP) + lean * start
    return min(max(average, _MIN_GAMMA), _MAX_GAMMA)
