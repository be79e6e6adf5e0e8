"""Plans for an engine that does not split prompts."""

from __future__ import annotations

import numpy as np
import pytest
from random_states import random_builder
from states import StateBuilder, make_attain

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import DECODE, StepPlan, StepState
from sola_sched.planner import make_planner, pass_through

POLICIES = ["attain", "paper", "alise", "doubling"]


def check_whole(state: StepState, plan: StepPlan) -> None:
    """Walk through the step as vLLM does: no prompt that is let in finds too few tokens."""
    table = state.table
    if plan.admit is None:
        assert plan.token_budget is None, "the engine's own order, with its own budget"
        return
    budget = plan.token_budget or state.max_num_tokens
    assert budget <= state.max_num_tokens
    run = state.running if plan.run is None else plan.run
    left = np.maximum(table.prefill_target - table.num_computed, 1)
    for row in run.tolist():
        if table.phase[row] == DECODE:
            budget -= state.tokens_per_decode
        else:  # the engine splits those that have begun
            budget -= min(budget, int(left[row]))
    for row in plan.admit.tolist():
        assert left[row] <= budget, "vLLM would look at nobody behind this one"
        budget -= int(left[row])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(100))
def test_the_budget_covers_every_prompt_that_is_let_in(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    b = random_builder(rng, num_classes=1 + 2 * (seed % 2))
    state = b.build(
        max_num_tokens=3000,
        tokens_per_decode=int(rng.choice([1, 4])),
        chunks_prefills=False,
    )
    share = float(rng.choice([0.0, 0.1, 0.5]))
    planner = make_planner(SolaConfig(policy=policy, best_effort_share=share))
    for _ in range(3):
        plan = pass_through(state, planner.plan(state))
        check_whole(state, plan)
        assert plan.run is None or len(plan.run) or len(plan.admit), "nothing would run"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_beside_decodes_keeps_nobody_behind_it_waiting(policy: str) -> None:
    b = StateBuilder(max_num_tokens=4096, left=5.0)
    for i in range(40):
        b.decode(f"d{i}", first_ago_s=0.0, out=1)
    b.waiting("long", waited_s=9.0, prompt=4000, slo=SloTarget(10.0, 0.1))
    b.waiting("short", waited_s=9.0, prompt=20, slo=SloTarget(10.0, 0.1))
    state = b.build(chunks_prefills=False)
    plan = pass_through(state, make_planner(SolaConfig(policy=policy)).plan(state))
    check_whole(state, plan)
    assert len(plan.admit), "somebody starts"


def test_a_long_prompt_goes_as_soon_as_all_decodes_can_make_up_for_it() -> None:
    def starting(left: float) -> list[str]:
        b = StateBuilder(max_num_tokens=4096, left=left)
        for i in range(10):
            b.decode(f"d{i}", first_ago_s=0.0, out=1, slo=SloTarget(1.0, 0.05))
        b.waiting("long", waited_s=0.0, prompt=4000, slo=SloTarget(10.0, 0.1))
        b.waiting("short", waited_s=0.0, prompt=20, slo=SloTarget(10.0, 0.1))
        return b.names(make_attain().plan(b.build(chunks_prefills=False)).admit)

    assert starting(left=100.0) == ["long"]  # 420 ms, of which each of 99 steps pays back 30
    assert starting(left=5.0) == ["short"]


def test_a_lost_long_prompt_goes_whole_when_its_share_is_saved_up() -> None:
    b = StateBuilder(max_num_tokens=4096, left=5.0)
    for i in range(40):
        b.decode(f"d{i}", first_ago_s=0.0, out=1, slo=SloTarget(1.0, 0.055))
    b.waiting("long", waited_s=20.0, prompt=4000)
    planner = make_attain(best_effort_share=0.1)
    state = b.build(chunks_prefills=False, elapsed_s=0.1)
    num_steps = 0
    while not len(plan_admit := planner.plan(state).admit):
        num_steps += 1
        assert num_steps < 100
    assert b.names(plan_admit) == ["long"]
    assert num_steps > 10


def test_decodes_sit_out_for_a_prompt_that_fits_no_step_beside_them() -> None:
    b = StateBuilder(max_num_tokens=4096)
    for i in range(40):
        b.decode(f"d{i}", first_ago_s=0.0, out=1, slo=SloTarget(1.0, 1.0))
    b.waiting("long", waited_s=9.0, prompt=4090, slo=SloTarget(10.0, 1.0))
    for policy in POLICIES:
        state = b.build(chunks_prefills=False)
        plan = pass_through(state, make_planner(SolaConfig(policy=policy)).plan(state))
        check_whole(state, plan)
        assert b.names(plan.admit) == ["long"], policy
        assert len(plan.run) <= 6, policy


@pytest.mark.parametrize(("prompt_class", "run"), [(0, ["upper"]), (1, ["upper"]), (-1, [])])
def test_decodes_of_the_lowest_class_sit_out_for_a_prompt_and_none_of_a_higher_one(
    prompt_class: int, run: list[str]
) -> None:
    b = StateBuilder(max_num_tokens=1000)
    b.decode("lower", first_ago_s=0.1, out=2, priority=1)
    b.decode("upper", first_ago_s=0.1, out=2, priority=0)
    b.waiting("w", waited_s=0.1, prompt=999 if run else 1000, priority=prompt_class)
    state = b.build(chunks_prefills=False, has_classes=True)
    plan = StepPlan(run=state.running, admit=state.waiting, token_budget=1000)
    plan = pass_through(state, plan)
    check_whole(state, plan)
    assert b.names(plan.run) == run
    assert b.names(plan.admit) == ["w"]


def test_a_prompt_waits_where_decodes_of_a_higher_class_leave_too_little() -> None:
    b = StateBuilder(max_num_tokens=1000)
    b.decode("upper", first_ago_s=0.1, out=2, priority=0)
    b.waiting("w", waited_s=0.1, prompt=1000, priority=1)
    state = b.build(chunks_prefills=False, has_classes=True)
    plan = StepPlan(run=state.running, admit=state.waiting, token_budget=1000)
    plan = pass_through(state, plan)
    assert plan.run is None or b.names(plan.run) == ["upper"]
    assert not len(plan.admit)
