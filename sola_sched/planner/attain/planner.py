"""`AttainPlanner`: what a plan is made of, handed to the compiled pipeline."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from sola_sched.config.policies import PolicyTraits
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.compiled import FloatArray, IntArray, Record, records_of
from sola_sched.core.state import REQUEST, StepPlan, StepState
from sola_sched.planner.attain import course
from sola_sched.planner.attain.records import (
    ACCOUNT,
    ADMIT,
    DECODE,
    GIVEN,
    NUM_LISTS,
    PREEMPT,
    PREFILL,
    REJECT,
    RUN,
    STEP,
    TUNING,
    Step,
)
from sola_sched.planner.attain.tuning import AttainTuning
from sola_sched.planner.base import (
    blocks_held,
    learning,
    priority_victims,
    with_memory_victims,
    with_useful_victims,
)

_NO_LIFTS: IntArray = np.empty(0, dtype=np.int64)
_NO_LEFT: FloatArray = np.empty(0)
_NO_LIKELY: FloatArray = np.empty((0, 5))
_NO_REQUESTS = records_of(REQUEST, 0)


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
        self._tuning = records_of(TUNING, 1)
        self._tuning[0] = (
            config.tile,
            1.0 - config.safety,
            config.best_effort_share,
            config.overload == "reject",
            *dataclasses.astuple(tuning or AttainTuning()),
        )
        self._account = records_of(ACCOUNT, 1)
        self._account["spared"] = -1
        self._at = records_of(STEP, 1)
        self._given = self._at[GIVEN]
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
            _NO_REQUESTS, decodes, prefills, self._lists, _NO_LIFTS, _NO_LIKELY,
        )  # fmt: skip

    def plan(self, state: StepState) -> StepPlan:
        """Plan one step; see `Planner.plan`."""
        if not state.has_slo:
            return StepPlan()
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
        self._fill_in(state, victims)
        lifts = _NO_LIFTS if state.lifts is None else state.lifts
        num_victims = len(victims)
        self._lists[PREEMPT, :num_victims] = victims
        parts = (
            self._at, self._tuning, self._account, state.table.records, self._decodes,
            self._prefills, self._lists, lifts,
        )  # fmt: skip
        wanted = course.look(*parts, state.running, state.num_ahead, state.waiting, num_victims)
        if wanted == course.SETTLED:
            return StepPlan(admit=victims, problem="decode")
        problem = course.decide(*parts, *self._lengths(state, wanted), num_victims)
        return self._as_plan(course.PROBLEMS[problem])

    def _lengths(self, state: StepState, wanted: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Likely lengths of all, and expected ones of decodes and prefills, as far as wanted."""
        at = self._at[0]
        decodes, prefills = self._decodes[: at["num_decodes"]], self._prefills[: at["num_prefills"]]
        left = state.remaining(decodes["row"], decodes["ahead"])
        left_prefills, likely = _NO_LEFT, _NO_LIKELY
        if wanted & course.WANTS_PREFILLS:
            left_prefills = state.remaining(prefills["row"])
        if wanted & course.WANTS_LIKELY:
            rows = np.concatenate([decodes["row"], prefills["row"]])
            ahead = np.zeros(len(rows), dtype=np.int64)
            ahead[: len(decodes)] = decodes["ahead"]
            likely = state.likely_remaining(rows, ahead)
        return likely, left, left_prefills

    def _fill_in(self, state: StepState, victims: IntArray) -> None:
        """What is given of a step in which `victims` give back what they hold."""
        cost, num_free = state.cost, state.num_free_blocks
        if len(victims):
            num_free += int(blocks_held(state, victims).sum())
        linear, gamma = cost.coefficients, cost.gamma
        self._given[0] = (
            state.now_s, state.elapsed_s, state.accepted_per_decode, state.prefill_share,
            state.max_num_tokens, state.max_num_running, num_free, state.num_blocks,
            state.block_size, state.tokens_per_decode, state.max_chunk or 0,
            state.chunks_prefills, state.has_e2e, state.has_ranks,
            state.reload_s_per_token != math.inf,
            linear.a0, linear.b0, linear.c0, linear.a1, linear.b1, linear.c1, linear.d0,
            linear.d0 + linear.c1 - linear.overlap, gamma.prefill, gamma.decode, gamma.mixed,
            *state.traffic.means(),
        )  # fmt: skip

    def _as_plan(self, problem: str) -> StepPlan:
        at, lists = self._at[0], self._lists
        if problem == "stalled":
            return StepPlan(reject=lists[REJECT, : at["num_reject"]].copy(), problem=problem)
        num_run = at["num_run"]
        return StepPlan(
            run=None if num_run < 0 else lists[RUN, :num_run].copy(),
            admit=lists[ADMIT, : at["num_admit"]].copy(),
            token_budget=int(at["budget"]),
            preempt=lists[PREEMPT, : at["num_preempt"]].copy(),
            reject=lists[REJECT, : at["num_reject"]].copy(),
            problem=problem,
        )

    def _reserve(self, capacity: int) -> None:
        """Have room for so many requests."""
        self._decodes = records_of(DECODE, capacity)
        self._prefills = records_of(PREFILL, capacity)
        self._lists = np.zeros((NUM_LISTS, capacity), dtype=np.int64)


def _warm_up(planner: AttainPlanner) -> None:
    """Compile what is not yet compiled: half a minute the first time on a machine."""
    none = _NO_LIFTS
    planner._at["block_size"] = planner._at["per_step"] = 1
    parts = (
        planner._at, planner._tuning, planner._account.copy(), records_of(REQUEST, 1),
        planner._decodes, planner._prefills, planner._lists, none,
    )  # fmt: skip
    course.look(*parts, none, none, none, 0)
    course.decide(*parts, _NO_LIKELY, _NO_LEFT, _NO_LEFT, 0)
