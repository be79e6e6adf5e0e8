"""When a plan of `policy="attain"` holds for the next step too: a long prefill goes on, or none."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sola_sched.core.state import IntArray, StepPlan, StepState
from sola_sched.planner.attain_lost import LostStep
from sola_sched.planner.attain_state import BestEffort, StepView

#: A plan is kept for so many steps, at most.
MAX_STEPS = 8
#: Nor longer than this share of the time that is left to a prefill that could still be on time.
_SLACK_SHARE = 0.1


@dataclass(slots=True)
class Chunks:
    """What must hold for the next step to be the same.

    All decodes take part, and either the chunk of one prefill fills the step to its last token or
    nobody may start. As long as nobody comes or goes, the prefill needs a further such chunk after
    the next, and the decodes have the slack for it, a new plan would be the same one.

    Attributes:
        made: The state that the plan was made for.
        prefill: Row of the prefill; -1 without one.
        tokens: Tokens of its chunk.
        beside_s: What the lost decodes add to the step, seconds.
        serves_lost: Whether the prefill is the next of the lost, on what others leave over.
        price_s: Credit for which they would get more, seconds; inf where nobody is lost.
        tightest: Of the decodes on course the one with the least slack, as its place in
            `made.running`; -1 without any.
        num_output: Its output tokens, those in flight included.
        slack_s: The longest next step that keeps it on course, seconds.
        num_alive, ctx_alive: How many decodes are on course, and their KV tokens.
        fastest_s, slowest_s: The shortest and the longest of their targets for a step, seconds.
        until_s: When the plan is to be reviewed at the latest, on the clock of the table.
        tile: Multiple in which chunks come, tokens.
    """

    made: StepState
    prefill: int
    tokens: int
    beside_s: float
    serves_lost: bool
    price_s: float
    tightest: int
    num_output: int
    slack_s: float
    num_alive: int
    ctx_alive: float
    fastest_s: float
    slowest_s: float
    until_s: float
    tile: int

    def go_on(self, state: StepState, num_steps: int, credit: BestEffort) -> bool:
        """Whether a new plan for `state` would be the same; if so, books what the lost get.

        Args:
            state: The next step, with the same requests.
            num_steps: Steps since the plan was made.
            credit: Account of the lost.
        """
        if not self._is_in_time(state, num_steps):
            return False
        if math.isinf(self.price_s):
            credit.forget()
            return True
        if not self.serves_lost and credit.earned_s(state.elapsed_s) >= self.price_s:
            return False
        credit.earn(state.elapsed_s)
        if self.serves_lost:
            has = float(state.table.num_computed[self.prefill])
            chunk_s = float(state.cost.prefill_marginal_s(float(self.tokens), has))
            credit.received(self.beside_s + chunk_s)
        return True

    def _is_in_time(self, state: StepState, num_steps: int) -> bool:
        """Whether the decodes still have the slack for the whole chunk, and it is not the last."""
        made, table, cost = self.made, state.table, state.cost
        slack_s, ctx = self.slack_s, self.ctx_alive + num_steps * self.num_alive
        if self.tightest >= 0:
            # Each has had a token in each step since, so its next one is due a target later.
            row = made.running[self.tightest]
            out = table.num_output[row] + state.num_ahead[self.tightest]
            slack_s += num_steps * self.fastest_s - (state.now_s - made.now_s)
            decode_s = float(cost.decode_s(self.num_alive, ctx))
            if out < self.num_output + num_steps:
                return False
            if decode_s > self.fastest_s or slack_s < self.slowest_s:
                return False
        if self.prefill < 0:
            return True
        has = float(table.num_computed[self.prefill])
        if table.prefill_target[self.prefill] - has <= self.tokens:
            return False
        most = cost.max_prefill_tokens(slack_s - self.beside_s, self.num_alive, ctx, has)
        return most >= self.tokens + self.tile


def chunks_going_on(
    view: StepView,
    plan: StepPlan,
    on_time: IntArray,
    served: IntArray,
    tokens: int,
    lost_run: IntArray,
    lost: LostStep,
) -> Chunks | None:
    """What must hold for the next step to repeat `plan`, None where it may need another one.

    Args:
        view: What it was made of.
        plan: The plan of a step within the slack of its decodes.
        on_time: Places of the prefills that are to be on time.
        served: Places of the prefills in it.
        tokens: Tokens of their chunk.
        lost_run: Lost decodes in it, as indices.
        lost: What was done for the lost.
    """
    state, decodes, prefills, table = view.state, view.decodes, view.prefills, view.state.table
    if (
        len(served) > 1
        or not decodes.are_ahead
        or state.tokens_per_decode > 1
        or decodes.num_alive + len(lost_run) < len(decodes.rows)
        or any(len(rows) for rows in (plan.admit, plan.preempt, plan.reject) if rows is not None)
    ):
        return None
    prefill, is_lost = -1, False
    if len(served):
        prefill = int(prefills.rows[served[0]])
        is_lost = not bool(prefills.feasible[served[0]])
        left = table.prefill_target[prefill] - table.num_computed[prefill]
        if tokens < view.token_room - len(lost_run) or left <= 2 * tokens:
            return None
    if (is_lost or len(lost_run)) and not lost.received_s:  # one that is not next, or on credit
        return None
    beside_s = 0.0
    if len(lost_run):
        cost = state.cost
        added_s = cost.decode_s(2.0, decodes.ctx[lost_run]) - cost.decode_s(1.0, 0.0)
        beside_s = float(added_s.sum())
    until_s = np.inf
    hopeful = on_time if is_lost else np.concatenate([on_time, served])
    if len(hopeful):
        left_s = prefills.deadline_s[hopeful] - decodes.decode_s - prefills.service_s[hopeful]
        until_s = state.now_s + _SLACK_SHARE * float(left_s.min())
    tightest, num_output, slack_s, fastest_s, slowest_s = -1, 0, np.inf, np.inf, 0.0
    if decodes.num_alive:
        (alive,) = decodes.alive.nonzero()
        index = alive[decodes.allowed_s[alive].argmin()]
        tightest = int((state.running == decodes.rows[index]).argmax())
        num_output = int(table.num_output[decodes.rows[index]] + decodes.ahead[index])
        slack_s = float(decodes.allowed_s[index])
        token_s = decodes.token_s[alive]
        fastest_s, slowest_s = float(token_s.min()), float(token_s.max())
    return Chunks(
        made=state,
        prefill=prefill,
        tokens=tokens,
        beside_s=beside_s,
        serves_lost=is_lost,
        price_s=lost.price_s(),
        tightest=tightest,
        num_output=num_output,
        slack_s=slack_s,
        num_alive=decodes.num_alive,
        ctx_alive=decodes.ctx_alive,
        fastest_s=fastest_s,
        slowest_s=slowest_s,
        until_s=until_s,
        tile=view.tile,
    )
