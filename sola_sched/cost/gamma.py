"""The online correction of the cost model: one factor per kind of step (SOLA Eq. 5).

Eq. 5 starts from 1. Here each kind's average starts from that of the kind nearest to it, and that
one's from the third, so the weight of the start, (1 - alpha)^n after n steps, is what a kind leans
on the others. A kind that has run once thus follows the others nearly as closely as one that has
never run, and is on its own after some fifty steps.

A factor that says that steps of its kind are long also keeps a planner from making any, and so from
learning better. So one whose kind does not run while others do is taken ever less at its word: see
`Correction.far`. The first step of the kind then decides whether it was right.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from sola_sched.cost.fit import DECODE, MIXED, PREFILL

# On whose average a kind leans, nearest first.
_NEIGHBOURS = {
    PREFILL: (MIXED, DECODE),
    DECODE: (MIXED, PREFILL),
    MIXED: (DECODE, PREFILL),
}
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


class Gamma(NamedTuple):
    """Correction factors by kind of step."""

    prefill: float
    decode: float
    mixed: float


class Correction:
    """Follows measured over predicted times, one exponential average per kind of step.

    Args:
        alpha: Confidence in one measured step, in (0, 1].

    Attributes:
        gamma: Factors [prefill, decode, mixed], each > 0; owned and changed by this object.
    """

    def __init__(self, alpha: float) -> None:
        if not 0.0 < alpha <= 1.0:
            raise ValueError(f"'alpha' must be in (0, 1] (got {alpha!r}).")
        self._alpha = alpha
        self.gamma = [1.0, 1.0, 1.0]
        # Steps of other kinds since the last one of each, and how many it bears: see `far`.
        self._age = [0, 0, 0]
        self._patience = [PATIENCE] * 3
        self._forget()

    def _forget(self) -> None:
        # A kind's average is `_own + _lean * start`.
        self._own = [0.0, 0.0, 0.0]
        self._lean = [1.0, 1.0, 1.0]
        # The latest ratios of a kind, as long as all of them are far off to the same side.
        self._off: list[list[float]] = [[], [], []]

    def update(self, kind: int, ratio: float) -> None:
        """gamma <- alpha ratio + (1 - alpha) gamma, with the ratio clipped around gamma.

        Args:
            kind: ``PREFILL``, ``DECODE`` or ``MIXED``.
            ratio: Measured time over C_0, > 0.
        """
        self._settle(kind, ratio)
        old = self.gamma[kind]
        clipped = min(max(ratio, old / _MAX_JUMP), old * _MAX_JUMP)
        self._own[kind] += self._alpha * (clipped - self._own[kind])
        self._lean[kind] *= 1.0 - self._alpha
        off = self._off[kind]
        if off and (off[-1] > old) != (ratio > old):
            off.clear()
        if ratio * _OFF < old or ratio > old * _OFF:
            off.append(ratio)
            if len(off) == _MANY:
                self._own[kind], self._lean[kind] = statistics.median(off), 0.0
                off.clear()
        elif off:
            off.clear()
        self.gamma[kind] = self._followed(kind)
        for each in range(3):
            if each != kind:
                self._age[each] += 1
                if self._lean[each] > _ALONE or self._age[each] > _RUNS:
                    self.gamma[each] = self._followed(each)
        self._bound()

    def at_most(self, kind: int, ratio: float) -> None:
        """A longer step had all of one of this kind in it, and took `ratio` times C_0 of that one.

        A factor that is above that by half is wrong, whether or not a step of its kind ever runs.
        One below may still be, so its kind counts as no younger for that.
        """
        if self.gamma[kind] > ratio * _OFF:
            ages = list(self._age)
            self.update(kind, ratio)
            self._age = ages
            self._bound()

    def far(self, kind: int) -> float:
        """How many times larger or smaller than those of the kinds that run a factor may be.

        1.05 + 2^(8 (1 - n / patience)) after n steps of others since the last one of its own kind.
        """
        return _CLOSE + math.pow(2.0, 8.0 * (1.0 - self._age[kind] / self._patience[kind]))

    def _bound(self) -> None:
        """Hold the factors of kinds that have not run for long against the others."""
        oldest = max(self._age)
        if oldest <= _RUNS:
            return
        fresh = [self.gamma[each] for each in range(3) if self._age[each] <= _RUNS]
        for each in range(3):
            if self._age[each] > _RUNS:
                far = self.far(each)
                least, most = min(fresh) / far, max(fresh) * far
                self.gamma[each] = min(max(self.gamma[each], least), most)

    def _settle(self, kind: int, ratio: float) -> None:
        """A kind runs again: what is remembered of it counts again as far as this step confirms it.

        By one step's worth at most: the first step of a kind for long is often a slow one.
        """
        age, self._age[kind] = self._age[kind], 0
        if age <= _RUNS:
            return
        now, before = self.gamma[kind], self._followed(kind)
        if max(now, before) <= _CLEAR * min(now, before):
            self.gamma[kind] = before
            return
        confirms = (ratio >= math.sqrt(now * before)) == (before >= now)
        if confirms:
            now = min(max(before, now / _MAX_JUMP), now * _MAX_JUMP)
        self._patience[kind] = (
            min(2 * self._patience[kind], MOST_PATIENCE) if confirms else PATIENCE
        )
        if now != before:
            self._own[kind], self._lean[kind] = now, 0.0
            self._off[kind].clear()
        self.gamma[kind] = now

    def _followed(self, kind: int) -> float:
        return min(max(self._average(kind), _MIN_GAMMA), _MAX_GAMMA)

    def _average(self, kind: int) -> float:
        own, lean = self._own, self._lean
        if lean[kind] <= _ALONE:
            return own[kind] + lean[kind]
        near, far = _NEIGHBOURS[kind]
        start = own[near] + lean[near] * (own[far] + lean[far])
        # What few steps said may be old: it counts as no further off than one step would.
        usual = (1.0 - lean[kind]) * start
        mine = min(max(own[kind], usual / _MAX_JUMP), usual * _MAX_JUMP)
        return mine + lean[kind] * start

    def replay(self, ratios_by_kind: Iterable[Iterable[float]]) -> None:
        """Start from 1 again and take in the newest ratios of each kind, oldest first.

        No step has run meanwhile: a kind that has not run for long stays one.
        """
        self.gamma[:] = 1.0, 1.0, 1.0
        self._forget()
        ages, patience = self._age, self._patience
        ratios = [list(each) for each in ratios_by_kind]
        # Kinds that run come last: they would lean on what is remembered of those that do not.
        for kind in sorted(range(3), key=lambda each: ages[each] <= _RUNS):
            for ratio in ratios[kind]:
                self._age, self._patience = [0, 0, 0], [PATIENCE] * 3
                self.update(kind, ratio)
        self._age, self._patience = ages, patience
        self._bound()
