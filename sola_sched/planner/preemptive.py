"""What planners of a preemptive order share: the plan of a step, and what is kept between steps."""

from __future__ import annotations

import numpy as np

from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.ewt import estimate_waits
from sola_sched.core.state import DECODE, BoolArray, IntArray, StepPlan, StepState
from sola_sched.planner.base import learning
from sola_sched.planner.kept import PlanCache
from sola_sched.planner.preemptive_step import PreemptiveStep, Recompute

#: Waits are estimated once in so many plans where they decide who is refused.
_REJECT_PLANS = 4
#: Weight of the newest step in the mean number of decodes.
_AVERAGING = 0.02


class PreemptivePlanner:
    """Serves requests in an order that may change at every step.

    Args:
        config: `overload` and `policy`, the name under which plans are counted, are used.
    """

    def __init__(self, config: SolaConfig) -> None:
        self.rejects = config.overload == "reject"
        self._name = config.policy
        self._batch = 1.0
        self._again = Recompute()
        self._took_part: BoolArray = np.zeros(0, dtype=np.bool_)
        self.cache = PlanCache()
        self._num_plans = 0

    def plan(self, state: StepState) -> StepPlan:
        """Plan one step; see `Planner.plan`."""
        if not state.cost.is_ready:
            return learning(state)
        self._again.earn(state.elapsed_s)
        kept = self.cache.again(state)
        if kept is not None:
            return kept
        table, rows = state.table, np.concatenate([state.running, state.waiting])
        if len(self._took_part) < table.capacity:
            self._took_part = np.append(
                self._took_part, np.zeros(table.capacity - len(self._took_part), dtype=np.bool_)
            )
        took_part = self._took_part[rows]
        took_part[len(state.running) :] = False
        num_decodes = int(np.count_nonzero(table.phase[state.running] == DECODE))
        self._batch += _AVERAGING * (max(1, num_decodes) - self._batch)
        step = self._step(state, rows, took_part)
        plan = step.plan()
        plan.problem = plan.problem if plan.problem == "stalled" else self._name
        if self.rejects:
            self._reject(state, plan)
        self._took_part[rows] = False
        self._took_part[state.running if plan.run is None else plan.run] = True
        if plan.admit is not None:
            self._took_part[plan.admit] = True
        if step.num_settled and not len(plan.reject):
            self.cache.keep(plan, state, step.num_settled)
        return plan

    def _step(self, state: StepState, rows: IntArray, took_part: BoolArray) -> PreemptiveStep:
        """The step with its order.

        Args:
            state: The step's state.
            rows: All running rows, then all waiting ones.
            took_part: Which rows took part in the step before.
        """
        raise NotImplementedError

    def _reject(self, state: StepState, plan: StepPlan) -> None:
        """Refuse waiting requests without a token whose wait exceeds what is left of their TTFT."""
        self._num_plans += 1
        if self._num_plans % _REJECT_PLANS or plan.order is None or plan.admit is None:
            return
        table, order = state.table, plan.order
        in_step = np.isin(order, plan.admit)
        if plan.run is not None:
            in_step |= np.isin(order, plan.run)
        waits_s = estimate_waits(state, order, in_step)
        if plan.promote_s is not None:
            waits_s = np.minimum(waits_s, plan.promote_s)
        due_s = table.due_s[order] - state.now_s
        fresh = np.isin(order, state.waiting) & (table.num_output[order] == 0)
        plan.reject = order[fresh & ~in_step & (waits_s > due_s)]
