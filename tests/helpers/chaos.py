"""A scheduler that decides at random: it exercises every seam, whatever a policy would do."""

from __future__ import annotations

import random

import numpy as np

import sola_sched
from sola_sched.core.state import IntArray, StepPlan, StepState


class ChaosPlanner:
    """Random order, holds, admissions, budgets and preemptions; sometimes the neutral plan.

    Args:
        seed: The same seed and states give the same plans.
        rejects: Whether waiting requests without output are rejected now and then.
    """

    def __init__(self, seed: int, rejects: bool = False) -> None:
        self._rng = random.Random(seed)
        self._rejects = rejects

    def plan(self, state: StepState) -> StepPlan:
        """Plan one step at random, within the contract of `StepPlan`."""
        rng = self._rng
        plan = StepPlan(problem="chaos")
        if rng.random() < 0.2:
            return plan
        if rng.random() < 0.1:
            plan.preempt = self._some(state.running, 0.2)
        if rng.random() < 0.7:
            staying = state.running[~np.isin(state.running, plan.preempt)]
            plan.run = self._some(staying, rng.choice((0.4, 0.8, 1.0)))
        if rng.random() < 0.7:
            plan.admit = self._some(state.waiting, rng.choice((0.0, 0.5, 1.0)))
        plan.token_budget = rng.choice((None, None, 7, 16, 64))
        if self._rejects and rng.random() < 0.05:
            fresh = state.waiting[state.table.num_output[state.waiting] == 0]
            plan.reject = self._some(fresh, 0.2)
        return plan

    def _some(self, rows: IntArray, share: float) -> IntArray:
        chosen = [row for row in rows.tolist() if self._rng.random() < share]
        self._rng.shuffle(chosen)
        return np.asarray(chosen, dtype=np.int64)


class ChaosScheduler(sola_sched.Scheduler):
    """`sola_sched.Scheduler` with a `ChaosPlanner`; the seed is ``additional_config["chaos"]``."""

    def sola_new_planner(self) -> ChaosPlanner:
        return ChaosPlanner(
            int(self.vllm_config.additional_config.get("chaos", 0)),
            rejects=self.sola_config.overload == "reject",
        )
