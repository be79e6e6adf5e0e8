"""`AttainPlanner`: the pipeline of one plan."""

from __future__ import annotations

import dataclasses

import numpy as np

from sola_sched.config.policies import PolicyTraits
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import IntArray, StepPlan, StepState
from sola_sched.planner.attain import loops
from sola_sched.planner.attain.alone import find_prompts_alone
from sola_sched.planner.attain.best_effort import Account, Share, find_victims, serve_lost
from sola_sched.planner.attain.entry import Entry, let_in
from sola_sched.planner.attain.lost import Judged, judge
from sola_sched.planner.attain.pace import Pace, find_pace
from sola_sched.planner.attain.tuning import AttainTuning
from sola_sched.planner.base import learning, priority_victims, with_useful_victims


class AttainPlanner:
    """As many requests as possible meet both of their targets; see the package's docstring.

    Args:
        config: `tile`, `safety`, `best_effort_share` and `overload` are used.
        tuning: The constants.
    """

    traits = PolicyTraits(
        options=("tile", "safety", "best_effort_share", "overload"),
        gives_shares=True,
        serves_lost_last=True,
    )

    def __init__(self, config: SolaConfig, tuning: AttainTuning | None = None) -> None:
        loops.load()
        self.tile, self.keep = config.tile, 1.0 - config.safety
        self.tuning = tuning = tuning or AttainTuning()
        self.rejects = config.overload == "reject"
        self.account = Account(config.best_effort_share, tuning.most_credit_s)
        self._did_wait = False  # the decodes, in the step before
        self._num_refused = 0  # in a row, by predicted step times, while no prompt was computed
        self._spared: str | None = None  # one that is served all the same

    def plan(self, state: StepState) -> StepPlan:
        """Plan one step; see `Planner.plan`."""
        if not state.has_slo:
            return StepPlan()
        if not state.cost.is_ready:
            return learning(state)
        victims = priority_victims(state)
        if not len(victims):
            return self._plan(state, victims)
        earned = self.account

        def attempt(state: StepState, victims: IntArray) -> StepPlan:
            self.account = dataclasses.replace(earned)
            return self._plan(state, victims)

        return with_useful_victims(state, victims, attempt)

    def _plan(self, state: StepState, victims: IntArray) -> StepPlan:
        """Plan a step in which `victims` give way."""
        did_wait, self._did_wait = self._did_wait, False
        if state.are_decodes and not len(victims) and self._is_settled(state):
            if len(state.waiting):
                self.account.unseen_s += state.elapsed_s
            return StepPlan(admit=victims, problem="decode")
        rows, ahead = state.running, state.num_ahead
        if len(victims):
            stay = ~np.isin(rows, victims)
            rows, ahead = rows[stay], ahead[stay]
        judged = judge(state, rows, ahead, self.tuning, tile=self.tile, keep=self.keep)
        if self.rejects:
            self._spare_one(judged)
        pace = find_pace(judged, rejects=self.rejects)
        if not did_wait and not len(victims):
            alone = find_prompts_alone(judged, pace, is_blocked=self.account.is_blocked)
            if alone is not None:
                self._did_wait = True
                self.account.unseen_s += state.elapsed_s
                return _without_decodes(judged, alone)
        entry = let_in(judged, pace, is_blocked=self.account.is_blocked)
        share = serve_lost(judged, entry, pace.limit_s, self.account, rejects=self.rejects)
        return self._put_together(judged, pace, entry, share, victims)

    def _spare_one(self, judged: Judged) -> None:
        """After many refusals in a row serve one that would be refused, late if need be.

        Whoever is refused computes nothing, so if all are, step times that are wrong stay wrong.
        """
        prefills = judged.prefills
        (places,) = (prefills.hopeless & (prefills.deadline_s > 0.0)).nonzero()
        rows, table = prefills.rows[places], judged.state.table
        is_served = self._spared is not None and table.row_of.get(self._spared, -1) not in rows
        if prefills.num_feasible or prefills.num_started or is_served:
            self._num_refused, self._spared = 0, None
        if not len(places) or prefills.num_feasible or prefills.num_started:
            return
        if self._num_refused < self.tuning.refused_in_a_row:
            self._num_refused += len(places)
            return
        first = table.arrival_s[rows].argmin()
        prefills.hopeless[places[first]], self._spared = False, table.req_id[rows[first]]

    def _put_together(
        self, judged: Judged, pace: Pace, entry: Entry, lost: Share, victims: IntArray
    ) -> StepPlan:
        """The plan of a step with decodes."""
        state, decodes, prefills = judged.state, judged.decodes, judged.prefills
        served, offered, tokens = entry.served, entry.offered, entry.tokens
        if lost.is_alone:
            served, offered, tokens = served[:0], offered[:0], 0
        if len(lost.prefills):
            served, tokens = np.concatenate([served, lost.prefills]), tokens + lost.tokens
        is_waiting = served >= prefills.num_started
        starting, begun = prefills.rows[served[is_waiting]], prefills.rows[served[~is_waiting]]
        num_decodes = decodes.num_alive + len(lost.run)
        displaced = find_victims(judged, starting, lost, served, self.account.share)
        victims = np.concatenate([victims, displaced])
        run: IntArray | None = None  # all of them
        num_run = num_decodes + len(begun)
        if len(begun) or len(victims) or num_run < len(state.running):
            run = np.concatenate([decodes.rows[decodes.alive], decodes.rows[lost.run], begun])
            if len(displaced) and len(lost.run):
                run = run[~np.isin(run, displaced)]
            num_run = len(run)
        reject = prefills.rows[:0]
        if self.rejects:
            reject = prefills.rows[prefills.num_started :]
            reject = reject[prefills.hopeless[prefills.num_started :]]
        if not num_run and not len(starting) and not len(offered):
            return StepPlan(reject=reject, problem="stalled")
        if len(offered):
            starting = np.concatenate([starting, prefills.rows[offered]])
        return StepPlan(
            run=run,
            admit=starting,
            token_budget=max(
                1, min(num_decodes * state.tokens_per_decode + tokens, state.max_num_tokens)
            ),
            preempt=victims,
            reject=reject,
            problem="overload" if pace.num_on_time < len(pace.order) else "attain",
        )

    def _is_settled(self, state: StepState) -> bool:
        """Nothing can be decided: only decodes, all served within their targets, no free slot."""
        rows, table = state.running, state.table
        if state.has_e2e:
            return False
        if len(state.waiting):
            if self.rejects or len(rows) < state.max_num_running:
                return False
            # One that is late, or has no target, could give its slot to one that is still on time.
            due_s = table.due_s[rows]
            could = table.first_token_s[rows] > due_s
            if (table.due_s[state.waiting] < np.inf).any():
                could |= np.isinf(np.minimum(due_s, table.tpot_s[rows]))
            if could.any():
                return False
        tpot_s = table.shortest_tpot_s(rows)
        return state.decode_step_s(rows) <= self.keep * tpot_s * state.accepted_per_decode


def _without_decodes(judged: Judged, places: IntArray) -> StepPlan:
    """A step of these prefills and nothing else."""
    prefills = judged.prefills
    is_waiting = places >= prefills.num_started
    return StepPlan(
        run=prefills.rows[places[~is_waiting]],
        admit=prefills.rows[places[is_waiting]],
        token_budget=int(prefills.new[places].sum()),
        problem="prompts",
    )
