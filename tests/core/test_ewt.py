"""Estimated waits: tables of a few requests, and properties that hold for any."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from states import DECODE_S, NOW, STEP_S, TOKEN_S, StateBuilder

from sola_sched.config.slo import SloTarget
from sola_sched.core.ewt import estimate_waits, mean_and_longest, queue_order, update_waits
from sola_sched.core.state import StepPlan
from sola_sched.cost.execution import ExecutionTime
from sola_sched.prediction.length import LengthPrediction

#: The cost model is a fit of exact times.
FIT = 1e-3


def decode(b: StateBuilder, name: str, left: int) -> int:
    row = b.decode(name, first_ago_s=1.0, out=1)
    b.table.predict(row, LengthPrediction.exactly(left + 1))
    return row


def waiting(b: StateBuilder, name: str, tokens: int, **options: object) -> int:
    row = b.waiting(name, waited_s=1.0, **options)  # type: ignore[arg-type]
    b.table.predict(row, LengthPrediction.exactly(tokens))
    return row


def waits_of(b: StateBuilder, num_in_step: int, **changes: object) -> list[float]:
    state = b.build(**changes)
    order = np.concatenate([state.running, state.waiting])
    in_step = np.arange(len(order)) < num_in_step
    return estimate_waits(state, order, in_step).tolist()


def test_t_gen_is_prefill_and_tokens_of_a_share_of_the_step():
    b = StateBuilder()
    time = ExecutionTime.of(b.build().cost, 10.0)

    assert time.beta_s == pytest.approx(STEP_S / 10 + DECODE_S, rel=FIT)
    assert time.alpha_s == pytest.approx(0.0, abs=1e-9)
    prefill_s = time.prefill_s(np.array([100.0]), np.array([0.0]))
    assert prefill_s == pytest.approx(100 * TOKEN_S, rel=FIT)
    assert time.decode_s(np.array([50]), np.array([20.0])) == pytest.approx(0.04, rel=FIT)


def test_the_shares_of_a_batch_add_up_to_its_steps():
    cost = StateBuilder().build().cost
    time = ExecutionTime.of(cost, 8.0)

    shares_s = time.decode_s(np.full(8, 300), np.ones(8)).sum()

    assert shares_s == pytest.approx(float(cost.decode_s(8.0, 8 * 300.5)), rel=FIT)


def test_who_takes_part_does_not_wait():
    b = StateBuilder()
    decode(b, "a", 10)
    waiting(b, "b", 10)

    assert waits_of(b, 2) == [0.0, 0.0]


def test_the_first_in_the_queue_waits_for_the_first_to_end():
    b = StateBuilder(max_num_running=2)
    decode(b, "long", 400)
    decode(b, "short", 50)
    waiting(b, "next", 10)

    step_s = STEP_S + 2 * DECODE_S
    assert waits_of(b, 2)[2] == pytest.approx(50 * step_s, rel=FIT)


def test_a_long_queue_waits_for_the_sum_over_the_slots():
    b = StateBuilder(max_num_running=2)
    for name in "ab":
        decode(b, name, 100)
    for i in range(20):
        waiting(b, f"w{i}", 100)

    waits_s = waits_of(b, 2)

    each_s = 100 * TOKEN_S + 100 * (STEP_S + 2 * DECODE_S)
    # Two slots: the k-th starts after about k / 2 others.
    assert waits_s[-1] == pytest.approx(each_s * 20 / 2, rel=0.15)
    assert waits_s == sorted(waits_s)


def test_blocks_can_be_what_is_short():
    b = StateBuilder(num_blocks=20, num_free_blocks=0)
    decode(b, "a", 60)
    decode(b, "b", 90)
    waiting(b, "needs one of them", 60)

    step_s = STEP_S + 2 * DECODE_S
    assert waits_of(b, 2)[2] == pytest.approx(60 * step_s, rel=FIT)


def test_with_room_for_all_a_prompt_waits_for_the_prompts_before_it():
    b = StateBuilder()
    waiting(b, "now", 10, prompt=1000)
    waiting(b, "next", 10, prompt=500)
    waiting(b, "last", 10, prompt=100)

    waits_s = waits_of(b, 1)

    assert waits_s == pytest.approx([0.0, 1000 * TOKEN_S, 1500 * TOKEN_S], rel=FIT)


def test_a_plan_fills_the_column_and_aging_bounds_it():
    b = StateBuilder(max_num_running=1)
    row = decode(b, "a", 400)
    held = waiting(b, "b", 100)
    state = b.build()

    update_waits(state, StepPlan(admit=state.waiting[:0]))
    unbounded = b.table.ewt_s[held]
    order, promote_s = np.array([row, held]), np.array([0.0, 0.5])
    update_waits(state, StepPlan(admit=state.waiting[:0], order=order, promote_s=promote_s))

    assert unbounded > 4.0
    assert b.table.ewt_s[row] == 0.0
    assert b.table.ewt_s[held] == 0.5
    assert mean_and_longest(b.table) == (0.5, 0.5)


def test_nobody_waits_where_all_take_part_and_no_length_is_asked_for():
    b = StateBuilder()
    row = decode(b, "held before", 100)
    b.table.ewt_s[row] = 5.0

    with patch.object(type(b.lengths), "remaining") as remaining:
        update_waits(b.build(), StepPlan())

    remaining.assert_not_called()
    assert b.table.ewt_s[row] == 0.0


def test_before_the_first_estimate_nothing_is_known():
    b = StateBuilder()
    row = waiting(b, "a", 10)

    assert math.isnan(b.table.ewt_s[row])
    assert mean_and_longest(b.table) == (0.0, 0.0)


def test_a_deadline_queue_serves_what_runs_then_by_deadline_then_the_late():
    b = StateBuilder()
    b.waiting("late", waited_s=9.0)
    b.waiting("later due", waited_s=0.1, slo=SloTarget(5.0, 0.1))
    b.waiting("due", waited_s=0.2)
    b.waiting("upper", waited_s=0.0, priority=-1)
    b.decode("runs", first_ago_s=1.0, out=3)
    state = b.build()

    assert b.names(queue_order(state)) == ["upper", "runs", "due", "later due", "late"]
    assert state.now_s == NOW


@given(
    st.lists(st.tuples(st.integers(1, 800), st.integers(1, 900)), min_size=1, max_size=40),
    st.integers(0, 10),
    st.integers(1, 12),
    st.integers(1, 400),
)
def test_waits_are_finite_and_grow_along_the_queue(requests, num_running, num_slots, num_free):
    b = StateBuilder(max_num_running=num_slots, num_blocks=400, num_free_blocks=num_free)
    num_running = min(num_running, num_slots, len(requests))
    for i, (prompt, tokens) in enumerate(requests):
        if i < num_running:
            row = b.decode(f"r{i}", first_ago_s=1.0, out=1, prompt=prompt)
        else:
            row = b.waiting(f"r{i}", waited_s=1.0, prompt=prompt)
        b.table.predict(row, LengthPrediction.exactly(tokens))

    waits_s = np.array(waits_of(b, num_running))

    assert np.isfinite(waits_s).all()
    assert (waits_s >= 0.0).all()
    assert (waits_s[:num_running] == 0.0).all()
    queue_s = waits_s[num_running:]
    assert (np.diff(queue_s) >= -1e-9).all()
