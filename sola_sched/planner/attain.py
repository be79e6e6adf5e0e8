"""`policy="attain"`: as many requests as possible meet both of their SLOs.

SOLA (Hong et al., MLSys 2025) minimizes the worst latency. Under overload "worst first" spends
the accelerator on requests that are lost already and loses others with them. This planner keeps
SOLA's means - order, chunk size, peak memory, a cost model corrected online - and changes the
objective to the number of requests that meet both targets.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import DECODE, IntArray, StepPlan, StepState
from sola_sched.planner.attain_kept import MAX_STEPS, Chunks
from sola_sched.planner.attain_state import BestEffort, Decodes, Prefills, StepView
from sola_sched.planner.attain_step import AttainStep
from sola_sched.planner.base import learning, priority_victims, with_useful_victims
from sola_sched.planner.kept import PlanCache
from sola_sched.planner.whole import with_whole_prompts

#: While slots are all that is short, the swap of a late decode for a waiting request is weighed
#: once in so many steps.
_SLOT_REVIEW_STEPS = 8


class AttainPlanner:
    """Feasible first, the lost held, cheapest first when not all fit, chunks to the slack.

    Each step:

    1. *Who is lost?* A decode that missed TTFT, or whose TPOT cannot be met any more even if
       every further step were a bare decode step; a waiting request whose deadline lies before
       the end of its own prefill. Lost decodes are held: they keep their KV and sit out.
    2. *How long may the step be?* The shortest time that keeps every other decode on course:
       the j-th token after the first is due at ``first + j * tpot``, so fast steps put time in
       the bank and a long prefill chunk may spend it (SOLA Eq. 1 with the bank of a request in
       place of its current mean). If that is too short for the prefills to be on time, time
       is borrowed that faster steps will pay back before 95 % of such requests end; then the
       few decodes in the way are weighed against the prefills they would cost. A step ends
       before the deadline of the first prefill in it: nobody gets a token earlier.
    3. *Which prefills?* Moore-Hodgson over the deadlines: the largest set that can be on time,
       the costliest given up first; where a step could hold several prompts, on time a step
       early, so that steps need not end for the sake of one. Admission stops where decode steps
       would outgrow the TPOT targets, where slots end (those that the lost hold count as free) or
       where the predicted peak memory does (SOLA 5.1, but of the expected need, not of the need
       of expected lengths, and a tenth beyond the memory while few are displaced). Where TTFT is
       short beside a step and all decodes can wait, prompts get a step of their own.
    4. *The lost* get what is left over, and a guaranteed `best_effort_share` of the engine time
       in which they wait; the one that arrived first is always next. Requests without a TTFT
       target count here.

    Args:
        config: `tile`, `safety`, `best_effort_share` and `overload` are used.
    """

    def __init__(self, config: SolaConfig) -> None:
        self.tile = config.tile
        self.keep = 1.0 - config.safety
        self.rejects = config.overload == "reject"
        self.best_effort = BestEffort(config.best_effort_share)
        self._num_settled = 0
        self._did_wait = False  # the decodes, in the step before
        self.cache = PlanCache()

    def plan(self, state: StepState) -> StepPlan:
        """Plan one step; see `Planner.plan`."""
        if not state.has_slo:
            return StepPlan()
        if not state.cost.is_ready:
            return learning(state)
        victims = priority_victims(state)
        if not len(victims):
            kept = self.cache.again(state)
            return self._plan(state, victims) if kept is None else kept
        earned = self.best_effort

        def attempt(state: StepState, victims: IntArray) -> StepPlan:
            self.best_effort = dataclasses.replace(earned)
            return self._plan(state, victims)

        return with_useful_victims(state, victims, attempt)

    def _plan(self, state: StepState, victims: IntArray) -> StepPlan:
        did_wait, self._did_wait = self._did_wait, False
        self.cache.forget()
        rows, ahead = state.running, state.num_ahead
        if len(victims):
            stay = ~np.isin(rows, victims)
            rows, ahead = rows[stay], ahead[stay]
        table = state.table
        if state.are_decodes and not len(victims) and self._is_settled(state):
            if len(state.waiting):
                self.best_effort.unseen_s += state.elapsed_s
            return StepPlan(admit=rows[:0], problem="decode")
        is_decode = table.phase[rows] == DECODE
        lowest = 0
        if state.has_classes and len(rows) + len(state.waiting):
            lowest = int(table.priority[np.concatenate([rows, state.waiting])].max())
        keep = self.keep
        decodes = Decodes(state, rows[is_decode], ahead[is_decode], keep=keep, lowest=lowest)
        prefills = Prefills(
            state,
            rows[~is_decode],
            decodes.decode_s,
            keep=keep,
            lowest=lowest,
            finds_hopeless=self.rejects,
        )
        view = StepView(state, decodes, prefills, self.tile, keep)
        step = AttainStep(view, self.best_effort, rejects=self.rejects, may_wait=not did_wait)
        decided = step.plan(victims)
        plan = with_whole_prompts(state, decided)
        if step.chunks is not None and plan is decided:
            self._keep(plan, state, step.chunks)
        self._did_wait = plan.problem == "prompts"
        return plan

    def _keep(self, plan: StepPlan, state: StepState, chunks: Chunks) -> None:
        self.cache.keep(
            plan,
            state,
            MAX_STEPS,
            until_s=chunks.until_s,
            holds=lambda state, num_steps: chunks.go_on(state, num_steps, self.best_effort),
        )

    def _is_settled(self, state: StepState) -> bool:
        """Nothing can be decided: only decodes, all served within their targets, no free slot."""
        rows, table = state.running, state.table
        if len(state.waiting):
            if self.rejects or len(rows) < state.max_num_running:
                return False
            # One that is late could give its slot to a request that is still on time.
            if np.count_nonzero(table.first_token_s[rows] > table.due_s[rows]):
                self._num_settled += 1
                if self._num_settled % _SLOT_REVIEW_STEPS == 1:
                    return False
        tpot_s = table.shortest_tpot_s(rows)
        return state.decode_step_s(rows) <= self.keep * tpot_s * state.accepted_per_decode
