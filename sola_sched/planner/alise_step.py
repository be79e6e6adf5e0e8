"""One step of `policy="alise"`: the shortest remaining time first, in levels."""

from __future__ import annotations

import numpy as np

from sola_sched.core.state import BoolArray, FloatArray, IntArray, StepState
from sola_sched.planner.levels import PriorityLevels
from sola_sched.planner.preemptive_step import MIN_GAIN, PreemptiveStep, Recompute

#: Output tokens of the quantum of level 0.
_QUANTUM_TOKENS = 16.0


class AliseStep(PreemptiveStep):
    """One step's decision, in the order of levels.

    Args:
        state, rows, batch, again: As in `PreemptiveStep`.
        levels: Levels with the ages of all requests; called once.
        took_part: Which rows took part in the step before.
    """

    def __init__(
        self,
        state: StepState,
        rows: IntArray,
        levels: PriorityLevels,
        took_part: BoolArray,
        batch: float,
        again: Recompute,
    ) -> None:
        super().__init__(state, rows, batch, again)
        table, time = state.table, self.time
        prefill_s = time.prefill_s(self.new, table.num_computed[rows].astype(np.float64))
        self.work_s = prefill_s + time.decode_s(self.ctx, self.left)
        quantum_s = _QUANTUM_TOKENS * time.beta_s
        natural = levels.natural(self.work_s, quantum_s)
        quanta_s = quantum_s * np.exp2(natural)
        age_s = levels.age(table, rows, took_part, quanta_s, state.now_s)
        self.level, self.lifted = levels.lifted(natural, age_s)
        self.promote_s = levels.promote_s(natural, age_s)
        self.order = self._order(age_s)

    def _order(self, age_s: FloatArray) -> IntArray:
        """Places in `rows` by rank and level; lifted first, then what runs, then the shortest."""
        group = np.where(self.lifted, 0, np.where(self.holds, 1, 2))
        keys = [np.where(self.lifted, -age_s, self.work_s), 3 * self.level + group]
        if self.state.has_ranks:
            keys.append(self.state.rank_of(self.rows))
        order: IntArray = np.lexsort(keys)
        return order

    def _gains(self, holder: int, other: int) -> bool:
        if self.level[other] >= self.level[holder]:
            return False
        if self.lifted[other]:
            return True
        # What is certain to be saved: a vague prediction is no reason to give up KV.
        row = self.rows[[holder]]
        surely = float(self.state.surely_remaining(row)[0]) / float(self.left[holder])
        saved_s = min(1.0, surely) * self.work_s[holder] - self.work_s[other]
        return bool(saved_s > MIN_GAIN * self._again_s(np.array([holder])))
