"""Plans that are kept: the same as new ones, and given up with what they rest on.

The builder's cost model: a step takes 10 ms + 1 ms per decode + 0.1 ms per prefill token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from states import DECODE_S, NOW, STEP_S, TOKEN_S, StateBuilder, as_lists, make_attain

from sola_sched.config.slo import SloTarget
from sola_sched.core.state import PARKED, PREFILL, WAITING, StepPlan
from sola_sched.prediction.length import LengthPrediction

NUM_DECODES, ROOM = 10, 100
LOOSE = SloTarget(10.0, 0.1)


class Run:
    """Steps of an engine that does what is planned.

    Args:
        b: What runs and waits at first.
        share: `best_effort_share`.
    """

    def __init__(self, b: StateBuilder, share: float = 0.0) -> None:
        self.b = b
        self.planner = make_attain(best_effort_share=share)
        self.now_s, self.elapsed_s = NOW, 0.0
        self.changes: dict[str, object] = {}

    def step(self, slower: float = 1.0) -> tuple[StepPlan, StepPlan, bool]:
        """One step, so many times as long as predicted.

        Returns:
            Its plan; what a planner would decide that keeps none; whether the plan was kept.
        """
        state = self.b.build(now_s=self.now_s, elapsed_s=self.elapsed_s, **self.changes)
        other = copy.deepcopy(self.planner)
        other.cache.forget()
        fresh = other.plan(state)
        before = self.planner.cache.kept
        plan = self.planner.plan(state)
        table, rows = self.b.table, state.running if plan.run is None else plan.run
        decodes = rows[table.phase[rows] != PREFILL]
        left = (plan.token_budget or state.max_num_tokens) - len(decodes)
        self.elapsed_s = STEP_S + DECODE_S * len(decodes)
        for row in [
            *rows[table.phase[rows] == PREFILL],
            *([] if plan.admit is None else plan.admit),
        ]:
            if table.phase[row] == WAITING and left > 0:
                table.move(row, PREFILL)
                self.b.running.append(int(row))
            tokens = min(left, int(table.prefill_target[row] - table.num_computed[row]))
            table.num_computed[row] += tokens
            left -= tokens
            self.elapsed_s += TOKEN_S * tokens
        self.elapsed_s *= slower
        self.now_s += self.elapsed_s
        table.num_output[decodes] += 1
        kept = self.planner.cache.kept
        return plan, fresh, kept is not None and kept is before

    def steps(self, count: int) -> list[bool]:
        """So many steps, each with the plan that a new one would be; whether it was kept."""
        kept = []
        for _ in range(count):
            plan, fresh, is_kept = self.step()
            assert as_lists(plan) == as_lists(fresh)
            kept.append(is_kept)
        return kept


def make_state(
    prompt: int = 2000, waited_s: float = 20.0, tpot_s: float = 0.1, ahead_s: float = 1.0
) -> StateBuilder:
    """Decodes ahead of their schedules and a prefill, lost by default; steps of 100 tokens."""
    b = StateBuilder(max_num_tokens=NUM_DECODES + ROOM)
    for place in range(NUM_DECODES):
        slo, first_ago_s = SloTarget(10.0, tpot_s), 100 * tpot_s - ahead_s
        b.decode(f"d{place}", first_ago_s=first_ago_s, out=100, slo=slo)
    b.prefill("p", waited_s=waited_s, computed=0, prompt=prompt, slo=LOOSE)
    return b


@pytest.mark.parametrize("waited_s", [20.0, 0.0])
def test_within_a_long_prefill_a_plan_is_kept_for_eight_steps(waited_s: float) -> None:
    kept = Run(make_state(waited_s=waited_s)).steps(12)
    assert kept == [False, *[True] * 8, False, *[True] * 2]


def test_the_last_chunk_but_one_is_the_last_that_is_kept() -> None:
    run = Run(make_state(prompt=450))
    assert run.steps(5) == [False, True, True, True, False]
    assert run.b.table.num_computed[run.b.table.row_of["p"]] == 450


def test_while_nobody_may_start_the_plan_is_kept() -> None:
    b = StateBuilder()
    for place in range(70):  # with 18 more their steps would take the 100 ms of their target
        b.decode(f"d{place}", first_ago_s=1.0, out=20, slo=SloTarget(10.0, 0.081))
    for place in range(2):
        b.waiting(f"w{place}", waited_s=0.0, prompt=400, slo=SloTarget(10.0, 0.08))
    run = Run(b)
    run.changes["max_num_running"] = 80
    assert run.steps(6) == [False, *[True] * 5]


def test_blocks_that_come_free_by_themselves_end_it() -> None:
    """Those of a displaced request, once they have been copied."""
    run = Run(make_state())
    run.changes["num_free_blocks"] = 500
    assert run.steps(3) == [False, True, True]
    run.changes["num_free_blocks"] = 600
    assert run.steps(2) == [False, True]


def new_arrival(b: StateBuilder) -> None:
    b.waiting("new", waited_s=0.0, slo=LOOSE)


def waiting_in_the_place_of_another(b: StateBuilder) -> None:
    b.table.remove("w")
    b.waiting("new", waited_s=0.0, slo=LOOSE)


def one_that_need_not_wait_for_its_grammar_any_more(b: StateBuilder) -> None:
    b.table.move(b.table.row_of["g"], WAITING)


def end_of_a_decode(b: StateBuilder) -> None:
    b.table.remove("d3")
    del b.running[3]


def prediction(b: StateBuilder) -> None:
    b.table.predict(b.table.row_of["d0"], LengthPrediction.exactly(300.0))


def no_memory(b: StateBuilder) -> None:
    b.options["num_free_blocks"] = NUM_DECODES + ROOM // 16


def tokens_that_did_not_come(b: StateBuilder) -> None:
    b.table.num_output[b.running[:NUM_DECODES]] -= 1


@pytest.mark.parametrize(
    "event",
    [
        new_arrival,
        waiting_in_the_place_of_another,
        one_that_need_not_wait_for_its_grammar_any_more,
        end_of_a_decode,
        prediction,
        no_memory,
        tokens_that_did_not_come,
    ],
)
def test_a_plan_is_given_up_with_what_it_rests_on(event: Callable[[StateBuilder], None]) -> None:
    b = make_state()
    b.waiting("w", waited_s=30.0, slo=SloTarget(25.0, 0.1))  # lost, and not before the prefill
    b.table.arrival_s[b.table.row_of["w"]] += 20.0
    b.table.move(b.waiting("g", waited_s=0.0, slo=LOOSE), PARKED)
    run = Run(b)
    assert run.steps(3) == [False, True, True]
    event(b)
    plan, fresh, is_kept = run.step()
    assert not is_kept
    assert as_lists(plan) == as_lists(fresh)


def test_a_plan_is_given_up_when_the_slack_of_the_decodes_ends() -> None:
    # A bare step takes 20 ms, a step with the chunk 30, and each token is due 25 after the last.
    run = Run(make_state(tpot_s=0.025, ahead_s=0.1))
    assert run.steps(3) == [False, True, True]
    run.step(slower=3.0)  # 25 ms left
    plan, fresh, is_kept = run.step()
    assert not is_kept
    assert plan.token_budget == fresh.token_budget
    assert plan.token_budget < NUM_DECODES + ROOM


def test_a_plan_is_reviewed_before_one_that_waits_has_lost_a_tenth_of_its_slack() -> None:
    b = make_state(prompt=4000, waited_s=5.0)
    b.waiting("w", waited_s=0.0, prompt=200, slo=SloTarget(0.64, 0.1))  # 600 ms to spare
    run = Run(b)
    run.changes["max_num_running"] = NUM_DECODES + 1  # no slot: it stays
    assert run.steps(6) == [False, True, True, False, True, False]
    assert run.now_s - NOW == pytest.approx(6 * 0.030)


def test_a_plan_is_reviewed_before_its_own_prefill_has_lost_a_tenth_of_its_slack() -> None:
    run = Run(make_state(prompt=1000, waited_s=9.2))  # 680 ms to spare, and steps of 30 ms
    assert run.steps(4) == [False, True, True, False]


def test_the_lost_get_the_same_share_while_plans_are_kept() -> None:
    """Credit is earned and what is left over is booked as with a new plan at each step."""
    run, other = Run(make_state(), 0.1), Run(make_state(), 0.1)
    for _ in range(8):
        run.step()
        other.planner.cache.forget()
        other.step()
    assert run.planner.cache.kept is not None
    assert run.planner.cache.kept.num_steps == 7
    earned, expected = run.planner.best_effort, other.planner.best_effort
    assert earned.credit_s == pytest.approx(expected.credit_s)


def test_a_plan_is_given_up_when_the_lost_have_earned_a_step() -> None:
    b = make_state(prompt=4000, waited_s=0.0)
    b.waiting("lost", waited_s=20.0, prompt=1000, slo=LOOSE)
    run = Run(b, 0.1)
    kept = run.steps(30)
    assert b.table.num_computed[b.table.row_of["lost"]] == 8 * ROOM  # 3 ms of 30, 10 for a chunk
    assert kept.count(True) >= 12


@st.composite
def builders(draw: st.DrawFn) -> StateBuilder:
    """Decodes more or less ahead of their schedules, some lost; one long prefill; some wait."""
    num_decodes = draw(st.integers(0, 24))
    step_s = STEP_S + DECODE_S * num_decodes
    b = StateBuilder(max_num_tokens=num_decodes + draw(st.sampled_from([40, 100, 200])))
    targets = [SloTarget(10.0, draw(st.floats(0.9, 3.0)) * step_s), LOOSE, SloTarget(10.0)]
    usual = draw(st.sampled_from(targets[:2]))
    for place in range(num_decodes):
        slo = draw(st.sampled_from(targets)) if place < 2 else usual
        tpot_s = min(slo.tpot_s, 0.1)
        ahead_s = tpot_s * draw(st.floats(1.0, 1.5) if place % 4 else st.floats(0.5, 8.0))
        arrived_ago_s = 100 * tpot_s - ahead_s + (20.0 if draw(st.integers(0, 9)) == 9 else 0.0)
        b.decode(
            f"d{place}",
            first_ago_s=100 * tpot_s - ahead_s,
            out=100,
            slo=slo,
            arrived_ago_s=arrived_ago_s,
        )
    waited_s = draw(st.sampled_from([0.0, 9.0, 15.0]))
    prompt, computed = draw(st.integers(300, 3000)), draw(st.integers(0, 200))
    b.prefill("p", waited_s=waited_s, computed=computed, prompt=prompt, slo=LOOSE)
    for place in range(draw(st.integers(0, 3))):
        waited_s = draw(st.sampled_from([0.0, 8.0, 9.5, 14.0, 16.0]))
        slo, prompt = draw(st.sampled_from(targets)), draw(st.integers(1, 1000))
        b.waiting(f"w{place}", waited_s=waited_s, prompt=prompt, slo=slo)
    b.options["max_num_running"] = num_decodes + draw(st.sampled_from([1, 2, 40]))
    return b


@settings(max_examples=300)
@given(builders(), st.sampled_from([0.0, 0.02, 0.2]), st.sampled_from([1.0, 0.9, 1.1, 1.3]))
def test_a_kept_plan_is_the_plan_that_would_be_made(
    b: StateBuilder, share: float, slower: float
) -> None:
    """But for one case: where nobody might start, somebody may with the decodes further ahead."""
    run = Run(b, share)
    for _ in range(10):
        plan, fresh, is_kept = run.step(slower)
        if is_kept:
            table, rows = b.table, b.running
            has_prefill = bool((table.phase[rows] == PREFILL).any()) and plan.run is not None
            may_start_now = not has_prefill and fresh.admit is not None and len(fresh.admit) > 0
            assert may_start_now or as_lists(plan) == as_lists(fresh)
