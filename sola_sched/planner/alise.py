"""`policy="alise"`: the shortest remaining time first, in preemptive priority levels; no SLOs.

Source: ALISE (Zhao and Wang, ICCAD 2024), section 3.1.
"""

from __future__ import annotations

import numpy as np

from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.ewt import estimate_waits
from sola_sched.core.state import DECODE, BoolArray, StepPlan, StepState
from sola_sched.planner.alise_step import AliseStep, Recompute
from sola_sched.planner.base import learning
from sola_sched.planner.kept import PlanCache
from sola_sched.planner.levels import PriorityLevels

#: Waits are estimated once in so many plans where they decide who is refused.
_REJECT_PLANS = 4
#: Weight of the newest step in the mean number of decodes.
_AVERAGING = 0.02


class AlisePlanner:
    """Serves the requests with the least remaining execution time first.

    Each step:

    1. *Remaining time* of every request, from its predicted length (`StepState.remaining`) and
       the step-time model (`ExecutionTime`); *levels* of doubling length from that, lifted by
       aging (`PriorityLevels`). Within a level what runs goes on, then the shorter goes first.
    2. *Who holds KV?* Requests are admitted in that order while slots and blocks last. One that
       finds none displaces running requests of lower levels, the last ones first, if that
       saves more than it costs to compute their KV again, even if they end as early as one in
       twenty does, and while no more than a tenth of the engine's time goes into that.
    3. *Who takes part?* All decodes: leaving one out of a batch saves little of its step. Prefills
       in order of level up to the length of the chunk; a started prefill beyond it is held.

    Departures from the paper, which has no chunked prefill and swaps every displaced KV: a chunk is
    kept short, since it delays all decodes, most of which have less to do than the request that
    starts; a running request gives up its KV only when somebody needs the room, and where no
    connector swaps it, it is computed again.

    Args:
        config: `levels`, `aging_s` and `overload` are used. With ``reject``, a request whose
            estimated wait exceeds its TTFT target is refused before it starts.
    """

    def __init__(self, config: SolaConfig) -> None:
        self.levels = PriorityLevels(config.levels, config.aging_seconds)
        self.rejects = config.overload == "reject"
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
        step = AliseStep(state, rows, self.levels, took_part, self._batch, self._again)
        plan = step.plan()
        if self.rejects:
            self._reject(state, plan)
        self._took_part[rows] = False
        self._took_part[state.running if plan.run is None else plan.run] = True
        if plan.admit is not None:
            self._took_part[plan.admit] = True
        if step.num_settled and not len(plan.reject):
            self.cache.keep(plan, state, step.num_settled)
        return plan

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
