"""Steps counted on a time grid, for the upper bound."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.simulator.bound.floors import StepFloor
from sola_sched.simulator.bound.trace import FloatArray, Jobs, Trace, max_single_saving_s

IntArray = NDArray[np.int64]

MAX_WINDOWS = 800
#: Share of a row's right-hand side by which it must be violated to be added.
TOLERANCE = 1e-6
_MIN_WINDOW_STEPS = 5.0
_MAX_CUTS = 40  # added per kind and round


class Grid:
    """The steps of one floor on a time grid: rows (1) with counted steps.

    Attributes:
        jobs: Jobs without any share of `base_s`.
        width_s: Of a window.
        first, last: The smallest run of windows [first, last) around each job's window.
    """

    def __init__(self, trace: Trace, floor: StepFloor) -> None:
        self.jobs = Jobs(trace, floor, "pace")
        # Independent of the targets, so that looser targets never give a smaller bound.
        self.natural_width_s = max(
            _MIN_WINDOW_STEPS * floor.base_s, 2.0 * trace.span_s / MAX_WINDOWS
        )
        self._base_s = floor.base_s
        self._saving_s = max_single_saving_s(trace, floor)
        self.width_s = 0.0
        self.first = self.last = np.empty(0, dtype=np.int64)
        self._step_s = np.empty(0)

    def set_width(self, width_s: float) -> None:
        self.width_s = width_s
        self.first, self.last = self.outward(self.jobs.start_s, self.jobs.end_s)
        # A prompt has at most one piece of one token in each step of its prefill job; a step
        # thus saves at most the savings of all prompts whose job it may serve.
        saved = np.zeros(MAX_WINDOWS + 2)
        n = len(self._saving_s)
        np.add.at(saved, np.minimum(self.first[:n], MAX_WINDOWS), self._saving_s)
        np.add.at(saved, np.minimum(self.last[:n], MAX_WINDOWS + 1), -self._saving_s)
        self._step_s = self._base_s - np.cumsum(saved)[:MAX_WINDOWS]

    def outward(self, start_s: FloatArray, end_s: FloatArray) -> tuple[IntArray, IntArray]:
        """Windows [first, last) that cover each interval; beyond the grid for late ones."""
        first = np.floor(start_s / self.width_s)
        last = np.ceil(np.minimum(end_s / self.width_s, 2.0 * MAX_WINDOWS))
        return np.minimum(first, MAX_WINDOWS).astype(np.int64), last.astype(np.int64)

    def violated(self, x: FloatArray, steps: FloatArray) -> list[tuple[int, int]]:
        """Runs of windows [a, b) whose row (1) is violated."""
        inside = self.last <= MAX_WINDOWS
        demand = np.zeros((MAX_WINDOWS + 1, MAX_WINDOWS + 1))
        index = (self.first[inside], self.last[inside])
        np.add.at(demand, index, (self.jobs.need_s * x)[inside])
        demand = np.cumsum(np.cumsum(demand[::-1], axis=0)[::-1], axis=1)
        points = np.arange(MAX_WINDOWS + 1)
        base_s = np.concatenate([[0.0], np.cumsum(self._step_s * np.diff(steps))])
        room_s = points * self.width_s - base_s
        excess = demand - (room_s[None, :] - room_s[:, None])
        excess = np.where(points[None, :] > points[:, None], excess, -np.inf)
        best = np.argmax(excess, axis=1)
        most = excess[points, best]
        tolerance = TOLERANCE * (best - points) * self.width_s
        return pick(
            [(float(most[a]), int(a), int(best[a])) for a in np.flatnonzero(most > tolerance)]
        )

    def step_costs(self, a: int, b: int) -> FloatArray:
        """Coefficients of the step counts at the points a to b."""
        costs = np.zeros(b - a + 1)
        costs[1:] += self._step_s[a:b]
        costs[:-1] -= self._step_s[a:b]
        return costs


def pick(found: list[tuple[float, Any, Any]]) -> list[tuple[Any, Any]]:
    """The most violated, and of intervals that nearly agree only one per round."""
    chosen: list[tuple[Any, Any]] = []
    for _, a, b in sorted(found, reverse=True):
        near = 0.1 * (b - a)
        if all(abs(a - c) + abs(b - d) > near for c, d in chosen):
            chosen.append((a, b))
            if len(chosen) == _MAX_CUTS:
                break
    return chosen
