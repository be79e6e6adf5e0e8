"""The linear program of the upper bound, and the rows that are added to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from sola_sched.simulator.bound.floors import StepFloor
from sola_sched.simulator.bound.grid import MAX_WINDOWS, TOLERANCE, Grid, pick
from sola_sched.simulator.bound.trace import FloatArray, Jobs, Trace

_MAX_ROUNDS = 60
# Rounds in a row that lower the value by less than this many requests end the search for rows.
_MIN_GAIN = 0.02
_MAX_IDLE_ROUNDS = 3
_BLOCK = 256  # start times examined at once


class Program:
    """The linear program; its rows grow.

    Variables are x, one per request, then the number of steps up to each point of the grid.
    """

    def __init__(self, trace: Trace, floors: Sequence[StepFloor]) -> None:
        self._n = trace.size
        kinds = ["slots", "kv", *(["tokens"] if "max_num_batched_tokens" in trace.limits else [])]
        self._exact = [Jobs(trace, floor, kind) for floor in floors for kind in (*kinds, "pace")]
        paced = [floor for floor in floors if floor.base_s > 0]
        self._grid = [Grid(trace, floor) for floor in paced]
        # One grid for all floors: the variables are shared.
        width_s = max((grid.natural_width_s for grid in self._grid), default=0.0)
        for grid in self._grid:
            grid.set_width(width_s)
        self._num_columns = self._n + (MAX_WINDOWS + 1 if self._grid else 0)
        self._rows: list[csr_array] = []
        self._right: list[FloatArray] = []
        self._kinds: list[str] = []
        self._binding: dict[str, int] = {}
        if self._grid:
            self._add_steps(trace, self._grid[0])

    def _add(self, rows: csr_array, right: FloatArray, kind: str) -> None:
        self._rows.append(rows)
        self._right.append(right)
        self._kinds += [kind] * rows.shape[0]

    def _add_steps(self, trace: Trace, grid: Grid) -> None:
        """Steps never decrease, and each request needs its own; the first point has none."""
        n, w = self._n, np.arange(MAX_WINDOWS)
        ones = np.ones(MAX_WINDOWS)
        columns = np.concatenate([n + w, n + w + 1])
        self._add(
            csr_array(
                (np.concatenate([ones, -ones]), (np.concatenate([w, w]), columns)),
                shape=(MAX_WINDOWS, self._num_columns),
            ),
            np.zeros(MAX_WINDOWS),
            "",
        )
        first, last = grid.outward(trace.arrival_s, trace.last_due_s)
        i = np.flatnonzero(last <= MAX_WINDOWS)
        rows = np.arange(len(i))
        values = np.concatenate([trace.decodes[i] + trace.chunks[i], 0 * i + 1.0, 0 * i - 1.0])
        columns = np.concatenate([i, n + first[i], n + last[i]])
        self._add(
            csr_array((values, (np.tile(rows, 3), columns)), shape=(len(i), self._num_columns)),
            np.zeros(len(i)),
            "pace",
        )

    def solve(self) -> tuple[float, bool]:
        """Value of the program, and whether no violated row is left."""
        value, num_idle = float(self._n), 0
        solution = np.concatenate([np.ones(self._n), np.zeros(self._num_columns - self._n)])
        for _ in range(_MAX_ROUNDS):
            if num_idle == _MAX_IDLE_ROUNDS or not self._add_violated(solution):
                return value, True
            matrix, right = vstack(self._rows, format="csr"), np.concatenate(self._right)
            cost = np.zeros(self._num_columns)
            cost[: self._n] = -1.0
            upper = np.full(self._num_columns, np.inf)
            upper[: self._n] = 1.0
            upper[self._n : self._n + 1] = 0.0
            result = linprog(
                cost,
                A_ub=matrix,
                b_ub=right,
                bounds=np.stack([np.zeros(self._num_columns), upper], axis=1),
                method="highs",
            )
            if result.status != 0:  # numerical trouble: the last value still holds
                return value, False
            num_idle = num_idle + 1 if value + float(result.fun) < _MIN_GAIN else 0
            solution, value = result.x, min(value, -float(result.fun))
            self._count_binding(result.slack, right)
        return value, False

    def _count_binding(self, slack: FloatArray, right: FloatArray) -> None:
        tight = slack <= 1e-6 * np.maximum(1.0, np.abs(right))
        self._binding = {}
        for kind, is_tight in zip(self._kinds, tight, strict=True):
            if is_tight and kind:
                self._binding[kind] = self._binding.get(kind, 0) + 1

    def num_binding(self) -> dict[str, int]:
        return dict(sorted(self._binding.items()))

    def _add_violated(self, solution: FloatArray) -> int:
        x = np.tile(solution[: self._n], 2)
        added = 0
        for jobs in self._exact:
            for s, t in _violated_intervals(jobs, x):
                inside = (jobs.start_s >= s) & (jobs.end_s <= t)
                row = self._row(jobs, inside, *jobs.longest(inside, x))
                self._add(row, np.array([t - s]), jobs.kind)
                added += 1
        for grid in self._grid:
            for a, b in grid.violated(x, solution[self._n :]):
                inside = (grid.first >= a) & (grid.last <= b)
                row = self._row(grid.jobs, inside, self._n + a, grid.step_costs(a, b))
                self._add(row, np.array([(b - a) * grid.width_s]), "pace")
                added += 1
        return added

    def _row(
        self,
        jobs: Jobs,
        inside: NDArray[np.bool_],
        column: int = 0,
        extra: FloatArray | None = None,
    ) -> csr_array:
        need = np.where(inside, jobs.need_s, 0.0)
        row = np.zeros(self._num_columns)
        row[: self._n] = need[: self._n] + need[self._n :]
        if extra is not None:
            row[column : column + len(extra)] += extra
        return csr_array(row[None, :])


def _violated_intervals(jobs: Jobs, x: FloatArray) -> list[tuple[float, float]]:
    """Intervals from an arrival to a deadline that are violated most, at most one per start."""
    finite = np.flatnonzero(np.isfinite(jobs.end_s))
    if not finite.size:
        return []
    order = finite[np.argsort(jobs.end_s[finite], kind="stable")]
    start_s, end_s, need_s = jobs.start_s[order], jobs.end_s[order], (jobs.need_s * x)[order]
    num_steps, saving_s = (jobs.num_steps * x)[order], jobs.saving_s[order]
    starts = np.unique(jobs.start_s[: len(jobs.start_s) // 2])
    found = []
    for low in range(0, len(starts), _BLOCK):
        s = starts[low : low + _BLOCK, None]
        is_after = start_s >= s
        demand = np.cumsum(np.where(is_after, need_s, 0.0), axis=1)
        if jobs.step_s > 0.0:
            step_s = jobs.step_s - np.cumsum(np.where(is_after, saving_s, 0.0), axis=1)
            most_steps = np.maximum.accumulate(np.where(is_after, num_steps, 0.0), axis=1)
            demand += np.maximum(step_s, 0.0) * most_steps
        excess = np.where(end_s > s, demand - (end_s - s), -np.inf)
        best = np.argmax(excess, axis=1)
        most = excess[np.arange(len(best)), best]
        found += [
            (float(m), float(s_[0]), float(end_s[b]))
            for m, s_, b in zip(most, s, best, strict=True)
        ]
    return pick([(m, a, b) for m, a, b in found if m > TOLERANCE * (b - a)])
