"""Ranks are strict in time too, under `attain`: by priority, and by what a service is owed."""

from __future__ import annotations

import numpy as np
import pytest
from states import StateBuilder, make_attain

from sola_sched.config.slo import SloTarget

NUM_DECODES = 20
#: The decodes alone take 30 ms, and bear no more.
TIGHT = SloTarget(1.0, 0.031)
HIGH = SloTarget(2.0, 0.5)


def busy(slo: SloTarget = TIGHT, out: int = 33) -> StateBuilder:
    """Decodes of a lower rank, with slots and memory for many more."""
    b = StateBuilder()
    for number in range(NUM_DECODES):
        b.decode(f"d{number}", first_ago_s=1.0, out=out, slo=slo, priority=1)
    return b


@pytest.mark.parametrize("waited_s", [1.95, 5.0], ids=["would be late", "is late"])
def test_decodes_of_a_lower_rank_keep_nobody_waiting(waited_s: float) -> None:
    b = busy()
    b.waiting("high", waited_s=waited_s, prompt=100, slo=HIGH)
    b.waiting("low", waited_s=0.1, prompt=300, slo=HIGH, priority=1)
    plan = make_attain().plan(b.build())
    assert plan.admit is not None
    assert b.names(plan.admit)[0] == "high"
    assert plan.run is None, "the decodes go on"
    assert plan.token_budget == NUM_DECODES + 100, "nobody of a lower rank profits by it"


def test_without_ranks_decodes_keep_their_pace() -> None:
    b = busy()
    b.table.priority[:] = 0
    b.waiting("equal", waited_s=1.95, prompt=100, slo=HIGH)
    plan = make_attain().plan(b.build())
    assert plan.admit is not None
    assert not len(plan.admit)


def test_a_prompt_that_is_on_time_in_short_steps_lengthens_none() -> None:
    b = busy(SloTarget(1.0, 0.1), out=10)
    b.waiting("high", waited_s=0.0, prompt=5000, slo=HIGH)
    plan = make_attain().plan(b.build(max_num_tokens=8192))
    assert plan.token_budget is not None
    assert NUM_DECODES + 100 < plan.token_budget < NUM_DECODES + 800  # 0.1 s: 700 tokens


def test_what_a_service_is_owed_it_gets_from_the_decodes_of_others() -> None:
    b = busy()
    b.table.priority[:] = 0
    owed = b.waiting("owed", waited_s=1.95, prompt=100, slo=HIGH)
    b.table.service[owed] = 1
    plan = make_attain().plan(b.build(lifts=np.array([0, 1])))
    assert plan.admit is not None
    assert plan.admit.tolist() == [owed]
    assert plan.token_budget == NUM_DECODES + 100


@pytest.mark.parametrize("waited_s", [0.6, 5.0], ids=["cannot be on time", "is late"])
def test_a_late_prompt_makes_no_other_of_its_rank_late(waited_s: float) -> None:
    b = busy(SloTarget(1.0, 0.1), out=10)
    b.waiting("on time", waited_s=0.8, prompt=100, slo=SloTarget(1.0, 0.5))
    b.waiting("late", waited_s=waited_s, prompt=5000, slo=SloTarget(1.0, 0.5))
    plan = make_attain().plan(b.build(max_num_tokens=8192))
    assert plan.admit is not None
    assert b.names(plan.admit) == ["on time", "late"]
    assert plan.token_budget is not None
    assert plan.token_budget <= NUM_DECODES + 700, "0.1 s, as the decodes bear"


def test_a_late_prompt_gets_half_of_the_time_of_decodes_of_a_lower_rank() -> None:
    b = busy()
    b.waiting("late", waited_s=5.0, prompt=5000, slo=HIGH)
    plan = make_attain().plan(b.build(max_num_tokens=8192))
    assert plan.token_budget is not None
    assert NUM_DECODES + 200 < plan.token_budget <= NUM_DECODES + 300  # 60 ms: 300 tokens


@pytest.mark.parametrize("tpot_s", [0.0300, 0.0305, 0.0310, 0.0315])
@pytest.mark.parametrize(
    "slo", [SloTarget(e2e_s=10.0), SloTarget()], ids=["late by e2e", "no target"]
)
def test_decodes_of_a_lower_rank_keep_none_out_by_what_they_leave(
    slo: SloTarget, tpot_s: float
) -> None:
    b = StateBuilder()
    for number in range(NUM_DECODES):
        tight = SloTarget(1.0, tpot_s)
        b.decode(f"d{number}", first_ago_s=32 * tpot_s, out=33, slo=tight, priority=1)
    b.waiting("high", waited_s=50.0, prompt=100, slo=slo)
    plan = make_attain().plan(b.build())
    assert plan.admit is not None
    assert b.names(plan.admit) == ["high"]


def test_all_of_a_rank_that_can_be_on_time_together_go_before_the_late() -> None:
    b = busy()
    b.waiting("late", waited_s=5.0, prompt=50, slo=HIGH)
    for number in range(3):
        b.waiting(f"on time {number}", waited_s=1.0 + 0.1 * number, prompt=1000, slo=HIGH)
    plan = make_attain().plan(b.build(max_num_tokens=8192))
    assert plan.admit is not None
    assert b.names(plan.admit)[:3] == ["on time 2", "on time 1", "on time 0"]
    assert plan.token_budget is not None
    assert plan.token_budget >= NUM_DECODES + 3000
