"""Room for requests that the engine starts by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from states import StateBuilder

from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import DECODE, StepPlan
from sola_sched.planner import make_planner
from sola_sched.planner.passes import with_room_to_resume


@pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])
@given(
    num_decodes=st.integers(0, 40),
    begun=st.lists(st.integers(1, 3000), max_size=4),
    waiting=st.lists(st.integers(1, 3000), max_size=4),
    needs=st.lists(st.integers(1, 600), min_size=1, max_size=20),
    budget=st.sampled_from([64, 512, 2048]),
)
def test_all_find_tokens_behind_those_that_run(
    policy, num_decodes, begun, waiting, needs, budget
) -> None:
    b = StateBuilder(max_num_tokens=budget)
    for i in range(num_decodes):
        b.decode(f"d{i}", first_ago_s=0.1, out=2)
    for i, prompt in enumerate(begun):
        b.prefill(f"p{i}", waited_s=0.1, computed=0, prompt=prompt)
    for i, prompt in enumerate(waiting):
        b.waiting(f"w{i}", waited_s=0.1, prompt=prompt)
    state = b.build(max_num_running=64)
    plan = with_room_to_resume(state, make_planner(SolaConfig(policy=policy)).plan(state), needs)
    if plan.run is None and plan.admit is None:  # the engine's own step
        return
    left = plan.token_budget or budget
    assert left <= budget
    table = state.table
    cap = plan.prefill_cap or budget
    for row in (state.running if plan.run is None else plan.run).tolist():
        if table.phase[row] == DECODE:
            left -= 1
        else:
            left -= min(left, cap, int(table.prefill_target[row]))
    for place, need in enumerate(needs):
        assert left > 0 or num_decodes + place >= budget, "vLLM stops here"
        left -= min(left, cap, need)


def test_what_the_plan_gives_others_stays_theirs() -> None:
    b = StateBuilder(max_num_tokens=512)
    b.decode("d", first_ago_s=0.1, out=2)
    row = b.prefill("begun", waited_s=0.1, computed=0, prompt=1000)
    state = b.build()
    plan = with_room_to_resume(state, StepPlan(run=state.running, token_budget=201), [1, 1, 60])
    assert plan.token_budget == 263
    assert plan.prefill_cap == 200
    assert row in plan.run
    full = with_room_to_resume(state, StepPlan(run=state.running, token_budget=512), [1, 1])
    assert (full.token_budget, full.prefill_cap) == (512, 509)


def test_without_a_slot_nobody_resumes() -> None:
    b = StateBuilder(max_num_running=1)
    b.decode("d", first_ago_s=0.1, out=2)
    plan = StepPlan(admit=b.build().waiting, token_budget=1)
    assert with_room_to_resume(b.build(), plan, [1]) is plan
