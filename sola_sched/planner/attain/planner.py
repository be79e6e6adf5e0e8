"""`AttainPlanner`: what a plan is made of, handed to the compiled pipeline."""

from __future__ import annotations

import math

import numpy as np

from sola_sched.compiled.functions import FloatArray, IntArray, Record, records_of
from sola_sched.config.policies import PolicyTraits
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import REQUEST, StepPlan, StepState
from sola_sched.cost.online import new_model
from sola_sched.planner.attain import course
from sola_sched.planner.attain.records import (
    ADMIT,
    LIMITS,
    PREEMPT,
    REJECT,
    RUN,
    STEP,
    Step,
    new_account,
    room_for,
    tuning_of,
)
from sola_sched.planner.attain.tuning import AttainTuning
from sola_sched.planner.base import (
    blocks_held,
    learning,
    priority_victims,
    with_memory_victims,
    with_useful_victims,
    without_targets,
)
from sola_sched.prediction.length import NO_LINES

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)
_NO_LEFT: FloatArray = np.empty(0)
_NO_LIKELY: FloatArray = np.empty((0, 5))
_NO_REQUESTS = records_of(REQUEST, 0)


class AttainPlanner:
    """As many requests as possible meet all of their targets; see the package's docstring.

    Args:
        config: `tile`, `safety`, `best_effort_share` and `overload` are used. A longest wait is in
            the record of each request, as `served_by_s`.
        tuning: The constants.
    """

    traits = PolicyTraits(
        options=("tile", "safety", "best_effort_share", "max_wait_s", "overload"),
        gives_shares=True,
        serves_lost_last=True,
    )

    def __init__(self, config: SolaConfig, tuning: AttainTuning | None = None) -> None:
        self._tuning, self._account = tuning_of(config, tuning), new_account()
        self._at = records_of(STEP, 1)
        self._found = self._at[["num_run", "num_admit", "num_preempt", "num_reject", "budget"]]
        self._limits: tuple[int, ...] = ()
        self._reserve(1)
        _warm_up(self)

    @property
    def account(self) -> Record:
        """What spans steps, an `ACCOUNT`; what is written there holds."""
        return self._account.view(np.recarray)[0]

    @property
    def step(self) -> Step:
        """What the last plan found, for reports and tests."""
        decodes, prefills = self._decodes.view(np.recarray), self._prefills.view(np.recarray)
        return Step(
            self._at.view(np.recarray)[0], self._tuning.view(np.recarray)[0], self.account,
            _NO_REQUESTS, decodes, prefills, self._lists, _NO_ROWS, _NO_LIKELY,
        )  # fmt: skip

    def plan(self, state: StepState) -> StepPlan:
        """Plan one step; see `Planner.plan`."""
        if not state.has_slo:
            return without_targets(state)
        if not state.cost.is_ready:
            return learning(state)
        if not state.has_classes:
            return self._plan(state, state.running[:0])
        earned = self._account.copy()

        def attempt(state: StepState, victims: IntArray) -> StepPlan:
            self._account[:] = earned
            return self._plan(state, victims)

        plan = with_useful_victims(state, priority_victims(state), attempt)
        spent, share = self._account.copy(), float(self._tuning[0]["planned_memory"])
        better = with_memory_victims(state, plan, attempt, state.likely_remaining, share)
        if better is None:
            self._account[:] = spent
        return better or plan

    def _plan(self, state: StepState, victims: IntArray) -> StepPlan:
        """Plan a step in which `victims` give way."""
        if state.table.capacity > len(self._decodes):
            self._reserve(state.table.capacity)
        self._note(state)
        lifts = _NO_ROWS if state.lifts is None else state.lifts
        num_victims, num_free = len(victims), state.num_free_soon
        if num_victims:
            self._lists[PREEMPT, :num_victims] = victims
            num_free += int(blocks_held(state, victims).sum())
        parts = (
            self._at, self._tuning, self._account, state.table.records, self._decodes,
            self._prefills, self._lists, lifts,
        )  # fmt: skip
        trusts = state.trusts_predictions and state.table.num_predicted > 0
        found = course.plan(
            *parts, state.running, state.waiting, num_victims, *state.lengths.lines(), trusts,
            float(state.now_s), float(state.elapsed_s), float(state.accepted_per_decode),
            float(state.prefill_share), num_free, state.has_e2e, state.has_ranks,
            state.reload_s_per_token != math.inf, state.cost.model, *state.traffic.means(),
        )  # fmt: skip
        if found < 0:
            wanted = -1 - found
            if wanted == course.SETTLED:
                is_settled = not len(state.waiting)
                return StepPlan(admit=victims, problem="decode", is_settled=is_settled)
            found = course.decide(*parts, *self._lengths(state, wanted), num_victims)
        return self._as_plan(course.PROBLEMS[found])

    def _note(self, state: StepState) -> None:
        """Fill in what seldom changes, where it has."""
        limits = (
            state.max_num_tokens, state.max_num_running, state.num_blocks, state.block_size,
            state.tokens_per_decode, state.max_chunk or 0, state.chunks_prefills,
        )  # fmt: skip
        if limits != self._limits:
            self._limits = limits
            self._at[LIMITS][0] = limits

    def _lengths(self, state: StepState, wanted: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Likely lengths of all, and expected ones of decodes and prefills, as far as wanted."""
        at = self._at[0]
        decodes, prefills = self._decodes[: at["num_decodes"]], self._prefills[: at["num_prefills"]]
        left = state.remaining(decodes["row"], decodes["ahead"])
        left_prefills, likely = state.remaining(prefills["row"]), _NO_LIKELY
        if wanted == course.WANTS_LIKELY:
            rows = np.concatenate([decodes["row"], prefills["row"]])
            ahead = np.zeros(len(rows), dtype=np.int64)
            ahead[: len(decodes)] = decodes["ahead"]
            likely = state.likely_remaining(rows, ahead)
        return likely, left, left_prefills

    def _as_plan(self, problem: str) -> StepPlan:
        lists = self._lists
        num_run, num_admit, num_preempt, num_reject, budget = self._found[0].item()
        reject = _taken(lists[REJECT], num_reject)
        if problem == "stalled":
            return StepPlan(reject=reject, problem=problem)
        return StepPlan(
            run=None if num_run < 0 else lists[RUN, :num_run].copy(),
            admit=_taken(lists[ADMIT], num_admit),
            token_budget=budget,
            preempt=_taken(lists[PREEMPT], num_preempt),
            reject=reject,
            problem=problem,
        )

    def _reserve(self, capacity: int) -> None:
        """Have room for so many requests."""
        self._decodes, self._prefills, self._lists = room_for(capacity)


def _taken(rows: IntArray, count: int) -> IntArray:
    """The first ones of a line that the next plan writes over."""
    return rows[:count].copy() if count else _NO_ROWS


def _warm_up(planner: AttainPlanner) -> None:
    """Compile what is not yet compiled: half a minute the first time on a machine."""
    none = _NO_ROWS
    planner._at["block_size"] = planner._at["per_step"] = 1
    parts = (
        planner._at, planner._tuning, planner._account.copy(), records_of(REQUEST, 1),
        planner._decodes, planner._prefills, planner._lists, none,
    )  # fmt: skip
    course.plan(
        *parts, none, none, 0, *NO_LINES, False, 0.0, 0.0, 1.0, 0.0, 0, False, False, False,
        new_model(0.1), 0, 0.0, 0.0, 0.0, 0.0,
    )  # fmt: skip
    course.decide(*parts, _NO_LIKELY, _NO_LEFT, _NO_LEFT, 0)
