"""Who sits a step out for prompts: a step takes 10 ms + 1 ms a decode + 0.1 ms a token."""

from __future__ import annotations

import numpy as np
import pytest
from states import DECODE_S, NOW, STEP_S, TOKEN_S, StateBuilder, make_attain

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import StepPlan
from sola_sched.core.traffic import RecentTraffic
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


def test_prompts_share_a_step_that_ends_before_the_first_deadline() -> None:
    b = make_state(steps_ahead=3.0)
    b.waiting("first", waited_s=0.06, slo=TIGHT)  # 40 ms left: 300 tokens
    b.waiting("second", waited_s=0.05, slo=TIGHT)
    b.waiting("third", waited_s=0.04, slo=TIGHT)
    b.waiting("fourth", waited_s=0.03, slo=TIGHT)
    plan = plan_of(b)
    assert not runs_decodes(b, plan)
    assert b.names(plan.admit) == ["first", "second", "third", "fourth"]  # it if others hit a cache
    assert plan.token_budget == 300


def test_a_prompt_that_has_begun_ends_alone() -> None:
    b = make_state()
    b.prefill("p", waited_s=0.97, computed=900, slo=USUAL)
    plan = plan_of(b)
    assert b.names(plan.run) == ["p"]
    assert not len(plan.admit)


def test_decodes_without_a_tpot_target_never_wait_for_prompts_without_end() -> None:
    b = StateBuilder()
    for place in range(NUM_DECODES):
        b.decode(f"d{place}", first_ago_s=1.0, out=20, slo=SloTarget(10.0))
    b.waiting("w", waited_s=0.0, slo=TIGHT)
    assert runs_decodes(b, plan_of(b))


@pytest.mark.parametrize(
    "short", [{"max_num_running": NUM_DECODES}, {"num_blocks": 290, "num_free_blocks": 50}]
)
def test_nobody_starts_alone_without_a_slot_and_memory(short) -> None:
    b = make_state(**short)
    b.waiting("w", waited_s=0.0, slo=TIGHT)
    assert runs_decodes(b, plan_of(b))


# Some of the decodes ----------------------------------------------------------------------------


def make_busy(**options: object) -> StateBuilder:
    """20 decodes that are a step ahead, 10 that are half a second, and more prompts than fit."""
    b = StateBuilder(**options)
    for place in range(20):
        b.decode(f"d{place}", first_ago_s=1.9, out=20, slo=SloTarget(10.0, 0.1))
    for place in range(10):
        b.decode(f"ahead{place}", first_ago_s=1.5, out=20, slo=SloTarget(10.0, 0.1))
    b.waiting("w", waited_s=0.0, prompt=3000, slo=USUAL)
    return b


def held_of(b: StateBuilder, plan: StepPlan) -> set[str]:
    names = b.names(b.running)
    return set() if plan.run is None else set(names) - set(b.names(plan.run))


AHEAD = {f"ahead{place}" for place in range(10)}


def test_those_far_ahead_sit_out_while_a_prompt_wants_the_time() -> None:
    b = make_busy()
    plan = plan_of(b)
    assert held_of(b, plan) == AHEAD
    # 100 ms until the next tokens are due: 30 for 20 decodes, 70 for the prompt.
    assert plan.token_budget == 20 + 688
    assert plan.problem == "prompts"


def test_all_take_part_where_the_step_has_room_for_all_prompts() -> None:
    b = make_busy()
    b.table.prefill_target[b.table.row_of["w"]] = 500
    assert held_of(b, plan_of(b)) == set()


def test_those_without_a_tpot_target_are_not_held_without_end() -> None:
    b = make_busy()
    for place in range(3):
        b.decode(f"free{place}", first_ago_s=1.5, out=20, slo=SloTarget(10.0))
    assert held_of(b, plan_of(b)) == AHEAD


@pytest.mark.parametrize(
    "short", [{"max_num_running": 30}, {"num_blocks": 400, "num_free_blocks": 100}]
)
def test_nobody_is_held_while_others_would_wait_for_slots_or_memory(short) -> None:
    b = make_busy(**short)
    assert held_of(b, plan_of(b)) == set()


def test_nobody_is_held_where_bare_steps_take_most_of_tpot() -> None:
    b = StateBuilder()
    for place in range(20):
        b.decode(f"d{place}", first_ago_s=0.92, out=20, slo=SloTarget(10.0, 0.05))
    for place in range(10):
        b.decode(f"ahead{place}", first_ago_s=0.5, out=20, slo=SloTarget(10.0, 0.05))
    b.waiting("w", waited_s=0.0, prompt=3000, slo=USUAL)
    assert held_of(b, plan_of(b)) == set()


def test_who_was_held_runs_before_its_token_is_late() -> None:
    """Served by its plans, no decode falls behind its schedule."""
    b, planner = make_busy(), make_attain()
    rows, table, now_s = np.array(b.running), b.table, NOW
    for _ in range(40):
        plan = planner.plan(b.build(now_s=now_s))
        run = rows if plan.run is None else np.intersect1d(plan.run, rows)
        tokens = (plan.token_budget or len(run)) - len(run)
        now_s += STEP_S + DECODE_S * len(run) + TOKEN_S * tokens
        table.num_output[run] += 1
        due_s = table.first_token_s[rows] + 0.1 * table.num_output[rows]
        assert (now_s <= due_s + 1e-9).all()
        table.due_s[table.row_of["w"]] = now_s + 1.0  # a new prompt each time


# What the lost get meanwhile --------------------------------------------------------------------


def chunk_of_lost(tpot_s: float = 0.1, quiet_s: float = 0.0, **options: object) -> int:
    """Tokens of a lost prompt beside 10 decodes that are 4 tokens ahead of their schedules.

    Requests have come every 100 ms, but not for `quiet_s`.
    """
    b = StateBuilder(**options)
    traffic = RecentTraffic()
    for place in range(100, 0, -1):
        traffic.came(NOW - quiet_s - 0.1 * place, 1000)
    for place in range(10):
        b.decode(f"d{place}", first_ago_s=16 * tpot_s, out=20, slo=SloTarget(10.0, tpot_s))
    b.waiting("lost", waited_s=9.0, prompt=3000)
    b.waiting("lost too", waited_s=9.0, prompt=3000)
    state = b.build()
    state.traffic = traffic
    return int(make_attain().plan(state).token_budget or 0) - 10


def test_work_of_the_lost_lengthens_a_step_by_a_tenth_of_what_tpot_leaves() -> None:
    # 20 of 100 ms are the decodes', a tenth of the others is 8 ms.
    assert chunk_of_lost() == 64


def test_where_slots_are_short_the_lost_get_no_more() -> None:
    """Else they would get the more of the time the more of them wait."""
    assert chunk_of_lost(max_num_running=11) == 64


def test_once_nobody_comes_any_more_the_lost_get_all_that_tpot_leaves() -> None:
    """Short steps are for those who come meanwhile."""
    assert chunk_of_lost(quiet_s=0.5) == 64
    assert chunk_of_lost(quiet_s=1.5) > 500


def test_where_decodes_take_most_of_the_time_the_lost_get_all_that_is_left_over() -> None:
    """20 of 35 ms: a tenth of what is left would be less than a millisecond."""
    assert chunk_of_lost(tpot_s=0.035) > 1000


def test_a_tight_prompt_is_on_time_where_decodes_with_loose_targets_can_sit_out() -> None:
    """Steps of 100 ms: all 30 decodes take 40 of them; where 20 run in one of ten, they take 22."""
    b = StateBuilder(left=1.0)  # nothing later to lend of
    for place in range(10):
        b.decode(f"d{place}", first_ago_s=1.9, out=20, slo=SloTarget(10.0, 0.1))
    for place in range(20):
        b.decode(f"slow{place}", first_ago_s=15.0, out=20, slo=SloTarget(10.0, 1.0))
    b.waiting("loose", waited_s=0.0, prompt=1000, slo=SloTarget(20.0, 1.0))
    b.waiting("tight", waited_s=0.0, prompt=6500, slo=USUAL)
    plan = plan_of(b)
    assert b.names(plan.admit)[0] == "tight"
    assert held_of(b, plan) == {f"slow{place}" for place in range(20)}
