"""Step tables for `policy="attain"`: deadlines for the whole answer, and what a request is worth.

Same cost model as in `test_attain`: 10 ms + 1 ms a decode + 0.1 ms a prompt token. Each request is
expected to make 50 more tokens.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from random_states import random_builder
from states import StateBuilder, as_lists, make_attain

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.planner import make_planner
from sola_sched.prediction.length import LengthPrediction


def ends_in(seconds: float, waited_s: float, ttft_s: float = np.inf) -> SloTarget:
    return SloTarget(ttft_s, e2e_s=waited_s + seconds)


@pytest.mark.parametrize(
    ("left_s", "budget"),
    [
        (5.0, 1 + 880),  # 100 ms a token: 890 prompt tokens beside it, in multiples of 16
        (2.0, 1 + 288),  # 40 ms
        (1e6, 1 + 2047),
    ],
)
def test_a_step_is_as_long_as_the_mean_that_brings_a_decode_to_its_end_in_time(
    left_s: float, budget: int
) -> None:
    b = StateBuilder()
    b.decode("due", first_ago_s=3.0, out=10, slo=ends_in(left_s, 3.0))
    b.waiting("long", waited_s=0.0, prompt=3000, slo=SloTarget(60.0))
    plan = make_attain().plan(b.build())
    assert plan.token_budget == min(budget, 2048)


def test_tokens_in_flight_are_no_tokens_left() -> None:
    b = StateBuilder()
    row = b.decode("due", first_ago_s=3.0, out=10, slo=ends_in(0.1, 3.0))
    b.waiting("long", waited_s=0.0, prompt=3000, slo=SloTarget(60.0))
    b.table.predict(row, LengthPrediction.exactly(12.0, "oracle"))
    assert make_attain().plan(b.build()).token_budget == 1 + 384  # two of 50 ms
    b.table.num_in_flight[row] = 1
    ahead = make_attain().plan(b.build())
    assert ahead.token_budget == 1 + 880  # one of 100 ms


@pytest.mark.parametrize(
    "left_s",
    [
        pytest.param(-0.1, id="its end is past"),
        pytest.param(0.4, id="50 tokens of 12 ms take longer"),
    ],
)
def test_a_decode_that_cannot_end_in_time_makes_way(left_s: float) -> None:
    b = StateBuilder(max_num_tokens=256)
    b.decode("lost", first_ago_s=3.0, out=10, slo=ends_in(left_s, 3.0))
    b.decode("fine", first_ago_s=0.05, out=1)
    for i in range(4):
        b.waiting(f"w{i}", waited_s=0.2, prompt=1000)
    plan = make_attain().plan(b.build())
    assert b.names(plan.run) == ["fine"]


def test_prompts_start_in_the_order_in_which_their_answers_need_it() -> None:
    b = StateBuilder(max_num_tokens=300)
    b.waiting("late end", waited_s=0.0, prompt=300, slo=ends_in(9.0, 0.0))
    b.waiting("first token due", waited_s=0.0, prompt=300, slo=SloTarget(4.0))
    short = b.waiting("short answer", waited_s=0.0, prompt=300, slo=ends_in(8.0, 0.0))
    b.waiting("early end", waited_s=0.0, prompt=300, slo=ends_in(3.0, 0.0))
    b.table.max_tokens[short] = 1
    planner, names = make_attain(), []
    for _ in range(4):
        plan = planner.plan(b.build())
        names += b.names(plan.admit[:1])
        b.table.remove(names[-1])
    # After 49 tokens of 10 ms; the short one needs none of them.
    assert names == ["early end", "first token due", "short answer", "late end"]


def test_a_prompt_whose_answer_is_due_is_no_best_effort() -> None:
    b = StateBuilder(max_num_tokens=300)
    b.waiting("oldest", waited_s=50.0, prompt=300, slo=SloTarget())
    b.waiting("due", waited_s=1.0, prompt=300, slo=ends_in(9.0, 1.0))
    b.waiting("lost", waited_s=9.0, prompt=300, slo=ends_in(0.3, 9.0))
    plan = make_attain().plan(b.build())
    assert b.names(plan.admit) == ["due"]


def test_one_whose_answer_cannot_end_in_time_is_refused_where_the_operator_says_so() -> None:
    b = StateBuilder()
    b.waiting("due", waited_s=1.0, slo=ends_in(9.0, 1.0))
    b.waiting("hopeless", waited_s=9.0, slo=ends_in(0.3, 9.0))
    plan = make_attain(overload="reject").plan(b.build())
    assert b.names(plan.reject) == ["hopeless"]


@pytest.mark.parametrize(
    ("weight", "kept"), [(1.0, "short"), (1.5, "short"), (3.0, "worth"), (0.1, "short")]
)
def test_of_two_the_one_that_costs_more_for_what_it_is_worth_is_given_up(
    weight: float, kept: str
) -> None:
    b = StateBuilder(max_num_tokens=400, max_num_running=2)
    # 60 ms by 100 ms from now and 30 ms by 110 ms, in 89 % of the time: one of them.
    b.waiting("worth", waited_s=0.90, prompt=600, slo=SloTarget(1.0, weight=weight))
    b.waiting("short", waited_s=0.89, prompt=300, slo=SloTarget(1.0))
    b.decode("d", first_ago_s=0.1, out=2)
    plan = make_attain().plan(b.build())
    assert b.names(plan.admit[:1]) == [kept]


@given(st.integers(0, 10_000))
@example(495)
@example(1701)
def test_an_end_that_is_far_away_changes_nothing(seed: int) -> None:
    plans = []
    for far in (False, True):
        state = random_builder(np.random.default_rng(seed), 1).build()
        if far:
            has_ttft = np.isfinite(state.table.ttft_s)
            state.table.e2e_due_s[has_ttft] = state.now_s + 1e9
            state.has_e2e = True
        plan = make_planner(SolaConfig()).plan(state)
        if plan.problem == "decode":  # all of them, with the tokens that they take
            plan.token_budget = len(state.running) * state.tokens_per_decode
        plans.append(as_lists(plan))
    assert plans[0] == plans[1]


def test_an_upper_class_whose_ends_are_past_sets_no_pace_for_the_others() -> None:
    """One is due at this very moment, one is overdue: they run all the same."""
    b = StateBuilder()
    by_end = SloTarget(1.0, 0.1, e2e_s=2.0)
    b.decode("due now", first_ago_s=2.0, out=10, slo=by_end, priority=-1)
    b.decode("overdue", first_ago_s=3.0, out=10, slo=by_end, priority=-1)
    b.decode("on course", first_ago_s=0.5, out=20, slo=SloTarget(1.0, 0.1))
    b.waiting("lost", waited_s=5.0, prompt=500, slo=SloTarget(1.0, 0.1))
    planner = make_attain()
    state = b.build()
    plan = planner.plan(state)
    assert plan.run is None or len(plan.run) == 3
    assert planner._at["pace_s"][0] == pytest.approx(0.1)
