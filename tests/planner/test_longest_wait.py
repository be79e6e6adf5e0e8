"""`max_wait_s`: who misses its targets anyway is served next, or refused, after so long a wait."""

from __future__ import annotations

import math

import pytest
from states import NOW, SLO, StateBuilder, make_attain

from sola_sched.config.slo import SloTarget

PATIENT = SloTarget(1.0, 0.1, max_wait_s=60.0)
IMPATIENT = SloTarget(1.0, 0.1, max_wait_s=5.0)


def busy(**options: int) -> StateBuilder:
    """Prompts that are on time take all the time and tokens of the next steps."""
    b = StateBuilder(max_num_tokens=256, **options)
    b.decode("fine", first_ago_s=0.05, out=1)
    for i in range(4):
        b.waiting(f"w{i}", waited_s=0.2, prompt=1000)
    return b


@pytest.mark.parametrize(("waited_s", "is_next"), [(4.9, False), (5.0, True), (500.0, True)])
def test_the_wait_ends_when_it_is_due(waited_s: float, is_next: bool) -> None:
    b = busy()
    b.waiting("late", waited_s=waited_s, slo=IMPATIENT)
    plan = make_attain().plan(b.build())
    admitted = b.names(plan.admit)
    assert ("late" in admitted) is is_next
    if is_next:
        assert admitted[0] == "late"


def test_without_a_bound_nobody_is_served_for_having_waited() -> None:
    b = busy()
    b.waiting("late", waited_s=1e6)
    assert "late" not in b.names(make_attain().plan(b.build()).admit)


def test_those_whose_wait_has_ended_go_before_older_ones_the_first_to_end_first() -> None:
    b = busy()
    b.waiting("older", waited_s=50.0, slo=PATIENT)
    b.waiting("second", waited_s=6.0, slo=IMPATIENT)
    b.waiting("first", waited_s=7.0, slo=IMPATIENT)
    admitted = b.names(make_attain().plan(b.build()).admit)
    assert admitted[:1] == ["first"]
    assert "older" not in admitted


def test_one_that_is_on_time_waits_for_nothing_but_its_targets() -> None:
    b = busy()
    b.waiting("in time", waited_s=20.0, slo=SloTarget(100.0, 0.1, max_wait_s=5.0))
    assert b.names(make_attain().plan(b.build()).admit)[0] != "in time"


def test_without_a_free_slot_nobody_else_gets_the_next_one() -> None:
    b = StateBuilder(max_num_running=4)
    for i in range(4):
        b.decode(f"d{i}", first_ago_s=0.05, out=1)
    b.waiting("late", waited_s=6.0, slo=IMPATIENT)
    planner = make_attain()
    planner.plan(b.build())
    b.running.remove(b.table.row_of["d0"])
    b.table.remove("d0")
    b.waiting("new", waited_s=0.1)
    assert b.names(planner.plan(b.build()).admit)[:1] == ["late"]


def test_one_that_has_waited_is_served_to_its_end() -> None:
    """Else each that has waited would take the slot and the KV of the one before it."""
    b = busy(max_num_running=3)
    for i in range(2):
        b.decode(f"late{i}", first_ago_s=3.0, out=2, arrived_ago_s=9.0 + i, slo=IMPATIENT)
    b.waiting("next", waited_s=6.0, slo=IMPATIENT)
    plan = make_attain(best_effort_share=0.0).plan(b.build())

    assert b.names(plan.preempt) == []
    assert plan.run is None or set(b.names(plan.run)) == {"fine", "late0", "late1"}


def test_one_that_was_displaced_after_its_first_token_does_not_go_first_again() -> None:
    b = busy()
    row = b.waiting("displaced", waited_s=9.0, slo=IMPATIENT)
    b.table.num_output[row], b.table.first_token_s[row] = 4, NOW - 1.0
    b.table.prefill_target[row] = 104
    assert "displaced" not in b.names(make_attain(best_effort_share=0.0).plan(b.build()).admit)


def test_where_late_requests_are_refused_so_are_those_that_have_none_to_miss() -> None:
    b = busy()
    b.waiting("no targets", waited_s=6.0, slo=SloTarget(max_wait_s=5.0))
    b.waiting("no targets, patient", waited_s=6.0, slo=SloTarget(max_wait_s=60.0))
    plan = make_attain(overload="reject").plan(b.build())
    assert b.names(plan.reject) == ["no targets"]


def test_when_and_why_one_was_given_up_is_noted_once() -> None:
    b = busy()
    row = b.waiting("late", waited_s=0.99, prompt=2000)
    table, planner = b.table, make_attain()
    planner.plan(b.build())
    assert table.lost_s[row] == NOW
    assert table.need_s[row] == pytest.approx(
        0.2 + 0.011, rel=0.01
    )  # its prompt and a step of the decode
    planner.plan(b.build(now_s=NOW + 1.0))
    assert table.lost_s[row] == NOW
    assert math.isnan(table.lost_s[table.row_of["fine"]])


def test_a_decode_is_given_up_without_a_reckoning_and_one_without_targets_never() -> None:
    b = StateBuilder(left=5.0, max_num_tokens=256)
    late = b.decode("late", first_ago_s=3.0, out=10)
    free = b.decode("free", first_ago_s=3.0, out=10, slo=SloTarget())
    b.waiting("w", waited_s=0.2, prompt=5000)
    make_attain().plan(b.build())
    assert b.table.lost_s[late] == NOW
    assert math.isnan(b.table.need_s[late])
    assert math.isnan(b.table.lost_s[free])
    assert SLO.max_wait_s == math.inf
