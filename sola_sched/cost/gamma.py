"""The online correction of the cost model: one factor per kind of step (SOLA Eq. 5).

Eq. 5 starts from 1. Here each kind's average starts from that of the kind nearest to it, and that
one's from the third, so the weight of the start, (1 - alpha)^n after n steps, is what a kind leans
on the others. A kind that has run once thus follows the others nearly as closely as one that has
never run, and is on its own after some fifty steps.
"""

from __future__ import annotations

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
        self.gamma[kind] = min(max(self._average(kind), _MIN_GAMMA), _MAX_GAMMA)
        for each in range(3):
            if self._lean[each] > _ALONE and each != kind:
                self.gamma[each] = min(max(self._average(each), _MIN_GAMMA), _MAX_GAMMA)

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
        """Start from 1 again and take in the newest ratios of each kind, oldest first."""
        self.gamma[:] = 1.0, 1.0, 1.0
        self._forget()
        for kind, ratios in enumerate(ratios_by_kind):
            for ratio in ratios:
                self.update(kind, ratio)
