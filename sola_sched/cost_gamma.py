"""The online correction of the cost model: one factor per kind of step (SOLA Eq. 5)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sola_sched.cost_fit import DECODE, MIXED, PREFILL

# Whose gamma a kind without own steps takes, nearest first.
_STAND_INS = {
    PREFILL: (MIXED, DECODE),
    DECODE: (MIXED, PREFILL),
    MIXED: (DECODE, PREFILL),
}
# One step counts as at most this factor away from what was expected.
_MAX_JUMP = 2.0
_MIN_GAMMA = 1e-6
_MAX_GAMMA = 1e6


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
        self._is_seen = [False, False, False]

    def update(self, kind: int, ratio: float) -> None:
        """gamma <- alpha ratio + (1 - alpha) gamma, with the ratio clipped around gamma.

        Args:
            kind: ``PREFILL``, ``DECODE`` or ``MIXED``.
            ratio: Measured time over C_0, > 0.
        """
        old = self.gamma[kind]
        ratio = min(max(ratio, old / _MAX_JUMP), old * _MAX_JUMP)
        self.gamma[kind] = min(max(old + self._alpha * (ratio - old), _MIN_GAMMA), _MAX_GAMMA)
        self._is_seen[kind] = True
        if not all(self._is_seen):
            self._follow()

    def replay(self, ratios_by_kind: Iterable[Iterable[float]]) -> None:
        """Start from 1 again and take in the newest ratios of each kind, oldest first."""
        self._is_seen = [False, False, False]
        for kind, ratios in enumerate(ratios_by_kind):
            self.gamma[kind] = 1.0
            for ratio in ratios:
                self.update(kind, ratio)
        self._follow()

    def _follow(self) -> None:
        for kind, stand_ins in _STAND_INS.items():
            if not self._is_seen[kind]:
                seen = [other for other in stand_ins if self._is_seen[other]]
                self.gamma[kind] = self.gamma[seen[0]] if seen else 1.0
