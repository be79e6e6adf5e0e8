"""Which decodes are judged lost, and how long a step the others bear."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from states import NOW, SLO, StateBuilder, make_attain, make_cost

from sola_sched.config.slo import SloTarget
from sola_sched.planner.attain import AttainTuning
from sola_sched.planner.attain.records import Step

#: TPOT, seconds; tokens since the first; steps ahead of its schedule; wait for the first, seconds.
DECODES = st.lists(
    st.tuples(
        st.sampled_from([0.012, 0.05, 0.1]),
        st.integers(4, 200),
        st.sampled_from([-0.5, 0.5, 1.0, 1.5, 3.0]),
        st.sampled_from([0.5, 2.0]),
    ),
    min_size=1,
    max_size=12,
)


def judge(builder: StateBuilder) -> Step:
    """What a plan finds of the decodes; a prompt without a target waits, so that one is made."""
    builder.waiting("w", waited_s=0.0, slo=SloTarget(math.inf, math.inf))
    planner = make_attain()
    planner.plan(builder.build())
    return planner.step


@given(DECODES, st.sampled_from([1.0, 3.0, 500.0]))
def test_as_many_are_alive_as_bear_the_steps_of_all_of_them(decodes, left) -> None:
    b = StateBuilder(left=left)
    for place, (tpot_s, out, num_ahead, waited_s) in enumerate(decodes):
        first_ago_s = tpot_s * (out - num_ahead)
        b.decode(
            str(place),
            first_ago_s=first_ago_s,
            arrived_ago_s=first_ago_s + waited_s,
            out=out,
            slo=SloTarget(SLO.ttft_s, tpot_s),
        )
    step, table, margin = judge(b), b.table, AttainTuning().decode_margin
    at, judged = step.at, step.decodes[: step.at.num_decodes]

    rows = judged.row
    due_s = table.first_token_s[rows] + table.tpot_s[rows] * (table.num_output[rows] + left - 1)
    bears_s = (due_s - NOW) / left  # the longest mean step that ends in time
    on_time = table.first_token_s[rows] <= table.due_s[rows]
    alive = ~judged.is_lost
    assert not (alive & ~on_time).any()
    assert at.num_alive == alive.sum()
    if alive.any():
        assert at.bear_s == np.float64(judged.sustain_s[alive].min())
        np.testing.assert_allclose(at.bear_s, bears_s[alive].min(), rtol=1e-6, atol=1e-6)
        assert margin * at.decode_s <= at.bear_s + 1e-9
        least_s = np.minimum(judged.bank_s, judged.token_s)[alive].min()
        assert at.slack_s >= min(least_s, at.decode_s)
    given_up = on_time & judged.is_lost
    if given_up.any():  # with the best of them one more is a step too long for it
        step_s = make_cost().decode_s(at.num_alive + 1.0, at.ctx_alive)
        assert bears_s[given_up].max() < margin * float(step_s) + 1e-6


def test_lengths_decide_whether_one_behind_its_schedule_is_lost() -> None:
    for left, is_lost in ((2.0, True), (500.0, False)):
        builder = StateBuilder(left=left)
        builder.decode("behind", first_ago_s=2.0, out=19)  # the 20th token was due at 1.9 s
        assert judge(builder).decodes[:1].is_lost.tolist() == [is_lost], left


#: Steps of one decode alone take 11 ms.
IMPOSSIBLE = SloTarget(2.0, 0.005)


@pytest.mark.parametrize(("max_tokens", "is_on_time"), [(100, False), (1, True)])
def test_a_prompt_whose_tokens_would_be_late_on_an_idle_engine_displaces_nobody(
    max_tokens: int, is_on_time: bool
) -> None:
    """But for one that has a single token to come, whatever its TPOT target."""
    b = StateBuilder(max_num_running=1)
    b.decode("lost", first_ago_s=9.0, out=3)
    new = b.waiting("new", waited_s=0.1, slo=IMPOSSIBLE)
    b.table.max_tokens[new] = max_tokens
    state = b.build()
    assert b.names(make_attain().plan(state).preempt) == (["lost"] if is_on_time else [])
    # Its first token comes in time: a target that is too short must not refuse all of a service.
    assert not len(make_attain(overload="reject").plan(state).reject)


def test_after_refusals_in_a_row_one_of_any_rank_is_served() -> None:
    """Requests of two ranks that come together, all refused by what step times are said to be."""
    b = StateBuilder()
    planner = make_attain(overload="reject")
    for number in range(20):
        pair = [
            b.waiting(f"{name}{number}", waited_s=0.0, prompt=50_000, priority=priority)
            for name, priority in (("high", 0), ("low", 1))
        ]
        plan = planner.plan(b.build(max_num_tokens=100_000))
        if plan.admit is not None and len(plan.admit):
            break
        assert sorted(plan.reject.tolist()) == sorted(pair)
        for row in pair:
            b.table.remove(str(b.table.req_id[row]))
    assert number == AttainTuning().refused_in_a_row // 2


@pytest.mark.parametrize(
    ("prompt", "slo"),
    [
        pytest.param(50_000, SLO, id="its prompt takes 5 s"),
        pytest.param(100, SloTarget(e2e_s=0.4), id="50 tokens take 0.5 s"),
    ],
)
@pytest.mark.parametrize("has_others", [False, True])
def test_refusals_of_a_kind_are_in_a_row_whatever_others_are_served(
    prompt: int, slo: SloTarget, has_others: bool
) -> None:
    b, planner = StateBuilder(), make_attain(overload="reject")
    for _ in range(AttainTuning().refused_in_a_row):
        b.waiting("refused", waited_s=0.0, prompt=prompt, slo=slo)
        if has_others:
            b.waiting("served", waited_s=0.5)
            b.table.length_class[b.waiting("ends", waited_s=0.5, slo=SloTarget(e2e_s=9.0))] = 1
        plan = planner.plan(b.build(max_num_tokens=100_000))
        assert b.names(plan.reject) == ["refused"]
        b.table.remove("refused")
        if has_others:
            assert sorted(b.names(plan.admit)) == ["ends", "served"]
            b.table.remove("served")
            b.table.remove("ends")
    b.waiting("spared", waited_s=0.0, prompt=prompt, slo=slo)
    plan = planner.plan(b.build(max_num_tokens=100_000))
    assert b.names(plan.admit) == ["spared"]
    assert not len(plan.reject)


def test_one_of_a_kind_that_begins_ends_the_row() -> None:
    b, planner = StateBuilder(), make_attain(overload="reject")
    for number in range(20):
        b.waiting("refused", waited_s=0.995)  # its prompt takes 10 ms
        if number % 5 == 4:
            b.waiting("served", waited_s=0.5)
        plan = planner.plan(b.build())
        assert b.names(plan.reject) == ["refused"]
        b.table.remove("refused")
        if number % 5 == 4:
            b.table.remove("served")


def test_who_is_late_by_the_clock_is_no_refusal_by_a_prediction() -> None:
    b, planner = StateBuilder(), make_attain(overload="reject")
    for _ in range(20):
        b.waiting("late", waited_s=1.5)
        b.waiting("end is past", waited_s=1.5, slo=SloTarget(e2e_s=1.4))
        assert sorted(b.names(planner.plan(b.build()).reject)) == ["end is past", "late"]
        b.table.remove("late")
        b.table.remove("end is past")


def test_who_is_spared_stays_until_it_is_served_and_no_other_of_its_kind_is() -> None:
    """With a share of the time for those who are late."""
    b = StateBuilder(max_num_running=1)
    planner = make_attain(overload="reject", best_effort_share=0.05)
    b.decode("runs", first_ago_s=0.05, out=1)
    for number in range(30):
        row = b.waiting(f"w{number}", waited_s=0.0, prompt=50_000)
        rejected = b.names(planner.plan(b.build(max_num_tokens=100_000)).reject)
        assert rejected == ([] if number == 8 else [f"w{number}"])
        for name in rejected:
            b.table.remove(name)
        if number == 8:
            spared = row
        if number == 15:  # it is late by the clock as well now
            b.table.due_s[spared] = NOW - 1.0


def test_without_a_share_for_the_late_who_is_spared_is_refused_once_it_is_late() -> None:
    """It might wait for ever, and keep others of its kind from being spared."""
    b = StateBuilder(max_num_running=1)
    planner = make_attain(overload="reject", best_effort_share=0.0)
    b.decode("runs", first_ago_s=0.05, out=1)
    rejected: list[list[str]] = []
    for number in range(22):
        row = b.waiting(f"w{number}", waited_s=0.0, prompt=50_000)
        if number == 8:
            spared = row
        if number == 12:
            b.table.due_s[spared] = NOW - 1.0
        rejected.append(b.names(planner.plan(b.build(max_num_tokens=100_000)).reject))
        for name in rejected[-1]:
            b.table.remove(name)

    assert rejected[8] == []
    assert rejected[12] == ["w8", "w12"]
    assert sum(not names for names in rejected) == 2, "another one is spared after it"
