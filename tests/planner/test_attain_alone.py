"""Step tables for steps without decodes: a step takes 10 ms + 1 ms a decode + 0.1 ms a token."""

from __future__ import annotations

import pytest
from states import StateBuilder, make_attain

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import StepPlan
from sola_sched.planner import make_planner

#: A step of 30 decodes and 100 tokens takes 50 ms, one of 100 tokens alone 20 ms.
NUM_DECODES = 30
TIGHT, USUAL = SloTarget(0.1, 0.1), SloTarget(1.0, 0.1)


def make_state(*, steps_ahead: float = 2.0, tpot_s: float = 0.1, **options: object) -> StateBuilder:
    """Decodes that are so many steps of their TPOT ahead of their schedules."""
    b = StateBuilder(**options)
    for place in range(NUM_DECODES):
        first_ago_s = tpot_s * (20 - steps_ahead)
        b.decode(f"d{place}", first_ago_s=first_ago_s, out=20, slo=SloTarget(10.0, tpot_s))
    return b


def plan_of(b: StateBuilder, **changes: object) -> StepPlan:
    config = SolaConfig(safety=0.0, best_effort_share=0.0)
    return make_planner(config).plan(b.build(**changes))


def runs_decodes(b: StateBuilder, plan: StepPlan) -> bool:
    return plan.run is None or any(name.startswith("d") for name in b.names(plan.run))


def test_a_prompt_that_would_be_late_with_the_decodes_goes_alone() -> None:
    b = make_state()
    b.waiting("w", waited_s=0.97, slo=USUAL)  # 30 ms left
    plan = plan_of(b)
    assert b.names(plan.admit) == ["w"]
    assert not runs_decodes(b, plan)
    assert plan.token_budget == 100


def test_a_prompt_goes_alone_where_its_target_is_short_beside_a_step() -> None:
    b = make_state()
    b.waiting("w", waited_s=0.0, slo=TIGHT)
    assert not runs_decodes(b, plan_of(b))
    b = make_state()
    b.waiting("w", waited_s=0.0, slo=USUAL)
    assert runs_decodes(b, plan_of(b))


def test_decodes_that_cannot_wait_take_part() -> None:
    # 50 ms until the next tokens are due, 40 for a step of the decodes.
    b = make_state(steps_ahead=1.0, tpot_s=0.05)
    b.waiting("w", waited_s=0.0, slo=TIGHT)
    assert runs_decodes(b, plan_of(b))


def test_a_prompt_that_is_late_even_alone_changes_nothing() -> None:
    b = make_state()
    b.waiting("w", waited_s=0.985, slo=USUAL)
    assert runs_decodes(b, plan_of(b))


def test_decodes_do_not_wait_twice_in_a_row() -> None:
    b = make_state()
    b.waiting("w", waited_s=0.0, slo=TIGHT)
    planner = make_attain()
    state = b.build()
    assert [runs_decodes(b, planner.plan(state)) for _ in range(4)] == [False, True, False, True]


def test_a_step_in_which_nothing_is_decided_ends_the_pause() -> None:
    planner = make_attain()
    b = make_state()
    idle = b.build()
    b.waiting("w", waited_s=0.0, slo=TIGHT)
    state = b.build()
    waits = []
    for planned in (state, idle, state):
        waits.append(not runs_decodes(b, planner.plan(planned)))
    assert waits == [True, False, True]


def test_prompts_share_a_step_that_ends_before_the_first_deadline() -> None:
    b = make_state(steps_ahead=3.0)
    b.waiting("first", waited_s=0.06, slo=TIGHT)  # 40 ms left: 300 tokens
    b.waiting("second", waited_s=0.05, slo=TIGHT)
    b.waiting("third", waited_s=0.04, slo=TIGHT)
    b.waiting("fourth", waited_s=0.03, slo=TIGHT)
    plan = plan_of(b)
    assert not runs_decodes(b, plan)
    assert b.names(plan.admit) == ["first", "second", "third"]
    assert plan.token_budget == 300


def test_a_prompt_that_has_begun_ends_alone() -> None:
    b = make_state()
    b.prefill("p", waited_s=0.97, computed=900, slo=USUAL)
    plan = plan_of(b)
    assert b.names(plan.run) == ["p"]
    assert not len(plan.admit)


@pytest.mark.parametrize(
    "short", [{"max_num_running": NUM_DECODES}, {"num_blocks": 290, "num_free_blocks": 50}]
)
def test_nobody_starts_alone_without_a_slot_and_memory(short) -> None:
    b = make_state(**short)
    b.waiting("w", waited_s=0.0, slo=TIGHT)
    assert runs_decodes(b, plan_of(b))


@pytest.mark.parametrize(("waited_s", "alone"), [(0.69, True), (0.86, False)])
def test_a_prompt_goes_alone_only_if_that_costs_no_other_its_target(waited_s, alone) -> None:
    b = make_state(steps_ahead=1.2)
    b.waiting("urgent", waited_s=0.955, slo=USUAL)  # 45 ms left, 50 with the decodes
    for place in range(3):
        b.waiting(f"w{place}", waited_s=waited_s, prompt=490, slo=USUAL)
    plan = plan_of(b)
    assert runs_decodes(b, plan) != alone
    if alone:
        assert b.names(plan.admit) == ["urgent"]
