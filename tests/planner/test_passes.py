"""What every plan passes through, in one row."""

from __future__ import annotations

import dataclasses

import numpy as np
from states import StateBuilder

from sola_sched.core.state import StepPlan, StepState
from sola_sched.planner import pass_through


def test_a_plan_that_leaves_everything_to_the_engine_passes_through_as_it_is() -> None:
    b = StateBuilder()
    b.decode("d", first_ago_s=0.1, out=2, priority=1)
    b.waiting("w", waited_s=0.1)
    plan = StepPlan()
    for chunks_prefills in (True, False):
        state = b.build(chunks_prefills=chunks_prefills, tokens_per_decode=4)
        assert pass_through(state, plan, with_swaps=lambda _, plan: plan, resuming=[5]) is plan


def test_swaps_see_whole_prompts_and_classes_see_who_gives_way_to_swaps() -> None:
    b = StateBuilder(max_num_tokens=512, num_blocks=60, num_free_blocks=0)
    lower = b.decode("lower", first_ago_s=0.1, out=2, priority=1)
    upper = b.decode("upper", first_ago_s=0.1, out=2)
    waiting = b.waiting("w", waited_s=0.1, prompt=300)
    seen: list[StepPlan] = []

    def with_swaps(state: StepState, plan: StepPlan) -> StepPlan:
        seen.append(plan)
        return dataclasses.replace(plan, preempt=np.array([lower]), run=np.array([upper]))

    plan = StepPlan(run=np.array([upper, lower]), admit=np.array([waiting]), token_budget=100)
    passed = pass_through(b.build(chunks_prefills=False), plan, with_swaps=with_swaps)
    assert seen[0].token_budget == 302
    assert passed.preempt.tolist() == [lower]
    assert passed.run is not None
    assert passed.run.tolist() == [upper]


def test_the_limit_of_a_plan_for_chunks_holds_beside_those_that_resume() -> None:
    b = StateBuilder()
    begun = b.prefill("begun", waited_s=0.1, computed=100, prompt=1000)
    state = b.build()
    plan = StepPlan(run=np.array([begun]), admit=np.array([], dtype=np.int64), token_budget=900)
    for cap, expected in ((None, None), (512, 512)):
        limited = dataclasses.replace(plan, prefill_cap=cap)
        assert pass_through(state, limited, resuming=[1000]).prefill_cap == expected
    scarce = dataclasses.replace(plan, token_budget=100, prefill_cap=80)
    assert pass_through(state, scarce, resuming=[3000]).prefill_cap == 80


def test_those_that_resume_come_on_top_of_padding() -> None:
    b = StateBuilder()
    b.decode("d", first_ago_s=0.1, out=2)
    cached = b.waiting("cached", waited_s=0.1, prompt=100)
    b.table.num_computed[cached] = 99
    state = b.build(tokens_per_decode=4)
    plan = StepPlan(run=state.running, admit=np.array([cached]), token_budget=5)
    assert pass_through(state, plan, resuming=[50]).token_budget == 5 + 3 + 50
