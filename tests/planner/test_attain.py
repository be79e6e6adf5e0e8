"""Step tables for `policy="attain"`: what runs, what is held, who starts, how many tokens.

The builder's cost model: a step takes 10 ms + 1 ms per decode + 0.1 ms per prefill token.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from random_states import random_builder
from states import StateBuilder, make_attain, make_cost

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.traffic import NUM_REMEMBERED
from sola_sched.cost.model import CostModel
from sola_sched.planner import make_planner
from sola_sched.planner.attain.lost import most_lent_s
from sola_sched.planner.attain.records import LOST, MAY, ORDER
from sola_sched.planner.base import peak_tokens
from sola_sched.prediction.length import LengthPrediction

LOOSE = SloTarget(10.0, 0.1)


def test_without_any_target_the_plan_is_the_engines_own() -> None:
    b = StateBuilder()
    b.decode("a", first_ago_s=5.0, out=2, slo=SloTarget())
    b.waiting("w", waited_s=50.0, slo=SloTarget())
    plan = make_attain().plan(b.build(has_slo=False))
    assert plan.run is None
    assert plan.admit is None
    assert plan.token_budget is None


def test_a_cost_model_that_is_not_ready_changes_nothing() -> None:
    b = StateBuilder()
    b.decode("a", first_ago_s=5.0, out=2)
    b.waiting("w", waited_s=0.0)
    plan = make_attain().plan(b.build(cost=CostModel()))
    assert plan.run is None
    assert plan.admit is None


def test_the_worked_step_of_the_docstring_comes_out_as_it_says() -> None:
    b = StateBuilder(elapsed_s=0.1)
    b.decode("A", first_ago_s=0.1, out=3)
    b.decode("B", first_ago_s=0.5, out=6)
    b.decode("C", first_ago_s=0.1, out=3, arrived_ago_s=5.1)
    b.waiting("P", waited_s=0.85, prompt=600)
    b.waiting("Q", waited_s=0.80, prompt=1000)
    b.waiting("R", waited_s=0.78, prompt=500)
    planner = make_attain(best_effort_share=0.05)

    plan = planner.plan(b.build())
    step = planner.step
    decodes, prefills = step.decodes[: step.at.num_decodes], step.prefills[: step.at.num_prefills]
    assert decodes.bank_s.tolist() == pytest.approx([0.2, 0.1, 0.2])
    assert decodes.is_lost.tolist() == [False, False, True]
    assert step.at.decode_s == pytest.approx(0.012, rel=1e-3)
    assert step.at.limit_s == pytest.approx(0.1)
    order = step.lists[ORDER, : step.at.num_order]
    assert b.names(prefills.row[order]) == ["P", "R", "Q"]
    assert step.at.num_on_time == 2
    may = step.lists[MAY]
    assert b.names(prefills.row[may[: step.at.num_served]]) == ["P", "R"]
    assert b.names(prefills.row[may[2 : 2 + step.at.num_offered]]) == ["Q"]
    assert step.at.chunk == 880
    assert b.names(decodes.row[step.lists[LOST, : step.at.lost_run]]) == ["C"]
    assert planner.account.credit_s == pytest.approx(0.004, rel=1e-3)

    assert plan.run is not None
    assert b.names(plan.run) == ["B", "C"]
    assert b.names(plan.admit) == ["P", "R", "Q"]
    assert plan.token_budget == 882


def test_waiting_requests_start_by_deadline_not_by_arrival() -> None:
    b = StateBuilder()
    b.waiting("early, loose", waited_s=0.5, slo=SloTarget(10.0, 0.1))
    b.waiting("late, tight", waited_s=0.1, slo=SloTarget(1.0, 0.1))
    plan = make_attain().plan(b.build())
    assert b.names(plan.admit) == ["late, tight", "early, loose"]
    assert plan.token_budget == 200


def test_a_request_past_its_deadline_goes_behind_those_that_can_make_it() -> None:
    b = StateBuilder(max_num_tokens=128)
    b.waiting("lost", waited_s=3.0)
    b.waiting("feasible", waited_s=0.5, prompt=2000)
    plan = make_attain().plan(b.build())
    assert b.names(plan.admit)[0] == "feasible"
    assert "lost" not in b.names(plan.admit)


def test_a_prefill_goes_on_while_one_that_is_due_before_it_finds_no_slot() -> None:
    b = StateBuilder(max_num_tokens=128, max_num_running=2)
    b.decode("d", first_ago_s=0.5, out=10)
    b.prefill("begun", waited_s=0.0, computed=100, prompt=1000)
    b.waiting("due first", waited_s=0.4, prompt=500)
    plan = make_attain().plan(b.build())
    assert b.names(plan.run) == ["d", "begun"]
    assert b.names(plan.admit) == []
    assert plan.token_budget == 128


def test_nobody_is_offered_what_a_prefill_that_goes_on_cannot_leave_over() -> None:
    """A prefix-cache hit of one that starts may leave budget over; one that has begun has none."""
    for has_begun in (True, False):
        b = StateBuilder(max_num_tokens=128)
        if has_begun:
            b.prefill("first", waited_s=0.5, computed=100, prompt=1000)
        else:
            b.waiting("first", waited_s=0.5, prompt=1000)
        b.waiting("second", waited_s=0.0, prompt=100)
        plan = make_attain().plan(b.build())
        assert plan.token_budget == 128
        assert b.names(plan.admit) == ([] if has_begun else ["first", "second"])


def test_a_deadline_within_the_own_prefill_time_counts_as_lost() -> None:
    b = StateBuilder(max_num_tokens=64)
    b.waiting("too long", waited_s=0.95, prompt=1000)  # needs 100 ms, has 50
    b.waiting("short", waited_s=0.0, prompt=1000)
    plan = make_attain().plan(b.build())
    assert b.names(plan.admit) == ["short"]


def test_when_not_all_fit_the_costliest_is_given_up() -> None:
    b = StateBuilder(max_num_tokens=4096)
    b.waiting("long", waited_s=0.5, prompt=4000)  # 400 ms of 500 left
    for i in range(3):
        b.waiting(f"short {i}", waited_s=0.49, prompt=1000)  # 100 ms each of 510 left
    plan = make_attain().plan(b.build())
    assert b.names(plan.admit)[:3] == ["short 0", "short 1", "short 2"]
    assert plan.problem == "overload"
    assert plan.token_budget == 3 * 1000  # none of those that the step has left are for it


def test_a_long_prompt_takes_as_long_as_its_chunks() -> None:
    """The model has learned from short chunks: by it 6,000 tokens at once take 1,320 ms."""
    b = StateBuilder(max_num_tokens=8192)
    b.decode("a", first_ago_s=0.0, out=1)
    b.waiting("long", waited_s=0.1, prompt=6000)
    cost = CostModel.from_coefficients(replace(make_cost().coefficients, b0=2e-8))
    planner = make_attain()
    plan = planner.plan(b.build(cost=cost))
    assert b.names(plan.admit) == ["long"]
    service_s = planner.step.prefills[0].service_s
    assert service_s == pytest.approx(0.6 + 2e-8 * 6000 * 770, rel=0.02)  # 770 in 100 ms
    planner.plan(b.build(cost=cost, chunks_prefills=False))
    assert planner.step.prefills[0].service_s == pytest.approx(0.6 + 2e-8 * 6000**2, rel=0.02)


def test_the_chunk_is_the_largest_that_keeps_every_decode_on_course() -> None:
    b = StateBuilder()
    b.decode("a", first_ago_s=0.0, out=1)  # its next token is due in 100 ms
    b.waiting("w", waited_s=0.0, prompt=2000)
    plan = make_attain(tile=128).plan(b.build())
    # 10 ms + 1 ms + 0.1 ms x tokens <= 100 ms: 890 tokens, 55 x 16, and 1 decode
    assert plan.token_budget == 55 * 16 + 1


def test_time_in_the_bank_may_be_spent_on_a_longer_chunk() -> None:
    b = StateBuilder()
    b.decode("fast so far", first_ago_s=0.1, out=2)  # due at 0.2 s after the first: 100 ms left
    quick = make_attain().plan(_with_waiting(b)).token_budget
    b = StateBuilder()
    b.decode("much faster", first_ago_s=0.1, out=3)  # due at 0.3 s: 200 ms left
    longer = make_attain().plan(_with_waiting(b)).token_budget
    assert quick == 55 * 16 + 1
    assert longer == 14 * 128 + 1  # 10 + 1 + 0.1 x 1890 ms; whole tiles where there are many


def _with_waiting(b: StateBuilder) -> object:
    b.waiting("w", waited_s=0.0, prompt=5000)
    return b.build()


def test_a_step_ends_before_the_deadline_of_the_first_it_prefills() -> None:
    b = StateBuilder()
    b.waiting("first", waited_s=0.93, prompt=500)  # 60 ms of 70 left
    b.waiting("second", waited_s=0.5, prompt=3000)
    plan = make_attain().plan(b.build())
    assert b.names(plan.admit)[:2] == ["first", "second"]
    assert plan.token_budget == 592  # 10 + 59.2 ms, not the whole budget of 2048 tokens


def test_a_prompt_whose_deadline_is_next_is_not_cut_short_by_rounding() -> None:
    """18 tokens need 12.8 ms beside the decode, 14 ms are left: 16 would be late by 2 tokens."""
    b = StateBuilder()
    b.decode("a", first_ago_s=5.0, out=100, slo=LOOSE)
    b.waiting("short", waited_s=0.986, prompt=18)
    b.waiting("next", waited_s=0.5, prompt=18)
    plan = make_attain().plan(b.build())
    assert b.names(plan.admit)[0] == "short"
    assert plan.token_budget is not None
    assert plan.token_budget >= 1 + 18


def test_where_steps_could_hold_many_prompts_none_is_cut_short_for_the_first() -> None:
    """The first has 14 ms left, room for one prompt of 2 ms beside the decode."""
    b = StateBuilder(max_num_running=61)
    b.decode("a", first_ago_s=5.0, out=100, slo=LOOSE)
    b.waiting("first", waited_s=0.986, prompt=19)
    for i in range(60):
        b.waiting(f"w{i:02}", waited_s=0.986 - 0.001 * i, prompt=20)
    plan = make_attain().plan(b.build())
    assert plan.token_budget is not None
    assert plan.token_budget >= 1 + 5 * 20


def test_reject_ends_the_hopeless_and_only_them() -> None:
    b = StateBuilder()
    lost = b.waiting("lost", waited_s=3.0)
    b.waiting("fine", waited_s=0.3)
    b.waiting("no target", waited_s=300.0, slo=SloTarget(math.inf, math.inf))
    plan = make_attain(overload="reject").plan(b.build())
    assert plan.reject.tolist() == [lost]


def test_reject_ends_the_hopeless_on_an_idle_engine_too() -> None:
    b = StateBuilder()
    lost = b.waiting("lost", waited_s=3.0)
    assert make_attain(overload="reject").plan(b.build()).reject.tolist() == [lost]


def test_decodes_lend_of_their_later_time_where_then_everybody_is_on_time() -> None:
    """300 ms of prompt by 489 ms from now; the next token is due in 20 ms, bare steps take 11."""
    b = StateBuilder()
    b.decode("lends", first_ago_s=0.0, out=1, slo=SloTarget(1.0, 0.02))
    b.waiting("long", waited_s=0.5, prompt=3000)
    plan = make_attain().plan(b.build())
    # 61 % of the time for it: steps of 28.5 ms, no longer, so that the decode goes on meanwhile.
    assert plan.token_budget == 160 + 1
    assert plan.problem == "attain"


@pytest.mark.parametrize(
    ("rate_per_s", "tpot_s", "is_lent"),
    [(2.0, 0.02, True), (40.0, 0.02, False), (2.0, 0.05, False)],
    ids=["can be served", "too much comes", "TPOT is loose"],
)
def test_where_somebody_is_lost_time_is_lent_if_all_that_comes_can_be_served(
    rate_per_s: float, tpot_s: float, is_lent: bool
) -> None:
    b = StateBuilder()
    slo = SloTarget(1.0, tpot_s)
    b.decode("lends", first_ago_s=0.0, out=1, slo=slo)
    b.decode("lost", first_ago_s=0.1, out=2, slo=slo, arrived_ago_s=5.0)
    b.waiting("long", waited_s=0.5, prompt=3000 if tpot_s < 0.05 else 4000)
    state = b.build()
    for number in reversed(range(NUM_REMEMBERED)):
        state.traffic.came(state.now_s - number / rate_per_s, 100)
        state.traffic.ended(16)
    plan = make_attain().plan(state)
    assert (plan.problem == "attain") is is_lent


def test_a_decode_lends_only_what_half_of_what_steps_may_last_longer_brings_back() -> None:
    """Each later token brings 4.5 ms back: eight of them are too few."""
    budgets = []
    for left in (8.0, 16.0):
        b = StateBuilder(left=left)
        b.decode("lends", first_ago_s=0.03, out=1, slo=SloTarget(1.0, 0.02))
        b.waiting("long", waited_s=0.5, prompt=3000)
        budgets.append(make_attain().plan(b.build()).token_budget)
    assert budgets[1] == 160 + 1
    assert budgets[0] < budgets[1]


def test_a_decode_without_tpot_target_lends_as_much_as_there_is_at_its_last_token_too() -> None:
    b = StateBuilder(left=1.0)
    b.decode("free", first_ago_s=0.0, out=1, slo=SloTarget(1.0, math.inf))
    b.waiting("w", waited_s=0.0)
    planner = make_attain()
    planner.plan(b.build())
    assert planner.step.decodes[:1].left.tolist() == [1.0]
    assert most_lent_s.py_func(planner.step) == math.inf


def test_nothing_is_lent_for_a_prompt_that_is_late_all_the_same() -> None:
    b = StateBuilder()
    b.decode("d", first_ago_s=0.0, out=1, slo=SloTarget(1.0, 0.02))
    b.waiting("long", waited_s=0.5, prompt=3000)
    b.waiting("longer", waited_s=0.5, prompt=4000)
    assert make_attain().plan(b.build()).token_budget == 80 + 1  # 20 ms


def test_who_starts_is_bounded_by_the_time_that_decodes_have_and_not_by_their_number() -> None:
    """Bare steps of more than ten decodes outgrow TPOT; what is in the bank bears them."""
    b = StateBuilder()
    slo = SloTarget(10.0, 0.0205)
    for i in range(6):
        b.decode(f"d{i}", first_ago_s=0.1, out=40, slo=slo)
    for i in range(10):
        b.waiting(f"w{i}", waited_s=0.0, prompt=16, slo=slo)
    assert len(make_attain().plan(b.build()).admit) == 10


@pytest.mark.parametrize(("prefill_share", "is_back"), [(0.0, True), (0.5, True), (0.8, False)])
def test_a_displaced_decode_comes_back_if_it_can_be_on_course_beside_prefills(
    prefill_share: float, is_back: bool
) -> None:
    """It is 2 s behind; 50 tokens of 22 ms and 44 ms catch up, of 110 ms do not."""
    b = StateBuilder(left=50.0, max_num_tokens=64)
    for i in range(12):
        b.decode(f"d{i}", first_ago_s=0.5, out=10)
    row = b.waiting("displaced", waited_s=4.0, prompt=100)
    b.table.first_token_s[row], b.table.num_output[row] = b.table.arrival_s[row] + 1.0, 10
    b.waiting("new", waited_s=0.0, prompt=100)
    plan = make_attain().plan(b.build(prefill_share=prefill_share))
    assert ("displaced" in b.names(plan.admit)) is is_back


def test_admission_stops_where_the_predicted_peak_outgrows_the_cache() -> None:
    """100 blocks x 16 tokens x 1.1."""
    b, spread = (StateBuilder(left=160.0, num_blocks=100, num_free_blocks=100) for _ in range(2))
    for i in range(10):
        b.waiting(f"w{i}", waited_s=0.0, prompt=160, slo=LOOSE)
        row = spread.waiting(f"w{i}", waited_s=0.0, prompt=160, slo=LOOSE)
        spread.table.predict(row, LengthPrediction(np.repeat([1.0, 319.0], 5), "histogram"))
    assert len(make_attain().plan(b.build()).admit) == 5  # each peaks at 320 tokens
    # Half of them end with the first token, the others after 319. Most is needed when three in
    # five are left: 3/5 x 320 tokens each.
    assert len(make_attain().plan(spread.build()).admit) == 9


@pytest.mark.parametrize("seed", range(20))
def test_where_memory_would_hold_all_at_their_longest_the_predicted_peak_fits_too(
    seed: int,
) -> None:
    """What saves the prediction of the peak must not let in more than that does."""
    rng = np.random.default_rng(seed)
    b = StateBuilder(left=float(rng.integers(1, 300)))
    for i in range(12):
        row = b.decode(f"d{i}", first_ago_s=1.0, out=int(rng.integers(1, 300)))
        if rng.random() < 0.7:
            lengths = np.sort(rng.integers(1, 1000, 10).astype(float))
            b.table.predict(row, LengthPrediction(lengths, "neighbours"))
    state = b.build()
    rows = state.running
    left = state.likely_remaining(rows)
    most = left.max(axis=1)
    used = state.table.num_prompt[rows] + state.table.num_output[rows]
    assert peak_tokens(used, left) <= float((used + most).sum())


def test_a_higher_priority_class_displaces_a_running_lower_one_when_slots_are_full() -> None:
    b = StateBuilder(max_num_running=2)
    b.decode("first", first_ago_s=0.1, out=2, priority=1)
    last = b.decode("last", first_ago_s=0.05, out=2, priority=1)
    b.waiting("urgent", waited_s=0.0, priority=0)
    for policy in ("attain", "paper"):
        plan = make_planner(SolaConfig(policy=policy)).plan(b.build())
        assert plan.preempt.tolist() == [last], policy
        assert b.names(plan.admit) == ["urgent"], policy


def test_settled_decodes_are_left_alone() -> None:
    b = StateBuilder()
    for i in range(8):
        b.decode(f"d{i}", first_ago_s=0.1, out=5)
    plan = make_attain().plan(b.build())
    assert plan.run is None
    assert plan.problem == "decode"


@pytest.mark.parametrize("policy", ["attain", "paper"])
@pytest.mark.parametrize("seed", range(80))
def test_any_plan_is_well_formed(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    b = random_builder(rng, num_classes=1 + 2 * (seed % 2))
    state = b.build()
    overload = "reject" if seed % 5 == 0 else "defer"
    plan = make_planner(SolaConfig(policy=policy, overload=overload)).plan(state)
    running, waiting = set(state.running.tolist()), set(state.waiting.tolist())
    run = running if plan.run is None else set(plan.run.tolist())
    admit = waiting if plan.admit is None else set(plan.admit.tolist())
    assert plan.run is None or len(run) == len(plan.run), "a row runs twice"
    assert plan.admit is None or len(admit) == len(plan.admit), "a row starts twice"
    assert run <= running
    assert admit <= waiting
    assert set(plan.preempt.tolist()) <= running - (run if plan.run is not None else set())
    assert set(plan.reject.tolist()) <= waiting - (admit if plan.admit is not None else set())
    assert plan.token_budget is None or 1 <= plan.token_budget <= state.max_num_tokens
    if running or waiting:
        assert run or admit, "nothing would run"
