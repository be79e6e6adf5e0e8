"""Published schedulers: what their papers say, a state in and the plan out.

A step of the builder takes 10 ms, 1 ms for each decode and 0.1 ms for each prompt token; targets
are 1 s and 0.1 s.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from states import NOW, StateBuilder

from rivals.base import Rival, Step, by_model
from rivals.fairbatching import FairBatching
from rivals.largest_set import largest_set
from rivals.proserve import SlideBatching
from rivals.qoserve import QoServe
from rivals.scorpio import Scorpio
from rivals.simple import Edf, PastFuture, TpotBudget
from rivals.slai import Slai
from rivals.slidingserve import SlidingServe
from rivals.slos_serve import SlosServe
from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import StepPlan
from sola_sched.cost.model import Coefficients, CostModel
from sola_sched.errors import ConfigError

pytestmark = pytest.mark.vllm

LOOSE = SloTarget(1.0, 0.2)


def make(rule: type[Rival], **options: Any) -> Rival:
    return rule(SolaConfig(policy_options=options))


def shown(builder: StateBuilder, plan: StepPlan) -> tuple[str, str, int | None]:
    """Who runs, who is admitted, both in order, and the tokens of the step."""
    run, admit = (" ".join(builder.names(rows)) for rows in (plan.run, plan.admit))
    return run, admit, plan.token_budget


def planned(
    builder: StateBuilder, rule: type[Rival], **options: Any
) -> tuple[str, str, int | None]:
    return shown(builder, make(rule, **options).plan(builder.build()))


def test_an_option_that_a_rule_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be of profile, scale, chunk \(got chunks\)"):
        make(Edf, chunks=1)


def test_the_room_of_a_prompt_is_what_the_step_time_leaves() -> None:
    b = StateBuilder()
    b.decode("d", first_ago_s=0.0, out=1)
    row = b.waiting("p", waited_s=0.0, prompt=2000)
    state = b.build()
    step = Step(state, by_model(state.cost))
    step.take_decodes(step.decodes)
    assert step.room(row, 0.1) == 890
    assert step.room(row, 1.0) == 2000
    assert step.room(row, 0.011) == 0


@pytest.mark.parametrize(
    ("new", "expected"),
    [(212, ("begun", "new", 512, 300)), (300, ("", "new", 300, None))],
    ids=["by a limit on chunks", "or it sits out"],
)
def test_a_begun_prompt_that_is_cut_takes_nothing_from_a_new_one_before_it(
    new: int, expected: tuple[str, str, int, int | None]
) -> None:
    """vLLM serves the begun one first. Of 512 tokens it is left 300, or 212, less than 300."""
    b = StateBuilder()
    b.prefill("begun", waited_s=0.1, computed=10)
    b.waiting("new", waited_s=0.5, prompt=new)
    plan = make(Edf, chunk=512).plan(b.build())
    assert (*shown(b, plan), plan.prefill_cap) == expected


def test_where_nothing_fits_the_decodes_run() -> None:
    b = StateBuilder()
    b.decode("d", first_ago_s=0.0, out=1)
    state = b.build()
    step = Step(state, by_model(state.cost))
    assert shown(b, step.plan("none")) == ("d", "", 1)


# QoServe ----------------------------------------------------------------------------------


def test_qoserve_fills_the_least_slack_and_counts_from_the_actual_first_token() -> None:
    """(100 - 11) ms of 0.1 ms; as published the early first token gives 1.1 s more."""
    b = StateBuilder()
    b.decode("d", first_ago_s=0.0, out=1, arrived_ago_s=0.0)
    b.decode("ahead", first_ago_s=0.1, out=9)
    b.waiting("p", waited_s=0.0, prompt=1500)
    assert planned(b, QoServe, margin=1.0) == ("d ahead", "p", 2 + 880)
    assert planned(b, QoServe, margin=1.0, clock="published") == ("d ahead", "p", 2 + 1500)


def test_qoserve_takes_sizes_from_its_list_and_128_tokens_at_least() -> None:
    """1.2 (11 + 0.1 (n - 1)) <= 100 ms up to n = 724."""
    b = StateBuilder()
    b.decode("d", first_ago_s=0.0, out=1)
    b.waiting("p", waited_s=0.0, prompt=1500)
    assert planned(b, QoServe, margin=1.2, grid=True) == ("d", "p", 512)
    b.decode("late", first_ago_s=1.0, out=1)
    for grid in (True, False):
        assert planned(b, QoServe, grid=grid) == ("d late", "p", 128)


@pytest.mark.parametrize(("alpha", "order"), [(0.0, "long short"), (0.002, "short long")])
def test_qoserve_orders_by_deadline_and_work_left(alpha: float, order: str) -> None:
    b = StateBuilder()
    b.waiting("long", waited_s=0.5, prompt=1000)
    b.waiting("short", waited_s=0.2, prompt=100)
    assert planned(b, QoServe, alpha=alpha) == ("", order, 1100)


def test_qoserve_puts_a_prompt_back_for_good_that_is_late_even_alone() -> None:
    """1,000 tokens at 8,500 a second take 118 ms; 50 are left. One that has KV stays."""
    b = StateBuilder()
    b.waiting("late", waited_s=0.95)
    b.table.prefill_target[b.table.row_of["late"]] = 1000
    b.waiting("fresh", waited_s=0.0)
    rule = make(QoServe)
    assert shown(b, rule.plan(b.build())) == ("", "fresh late", 1100)
    b.table.due_s[b.table.row_of["late"]] = NOW + 0.5
    assert shown(b, rule.plan(b.build())) == ("", "fresh late", 1100)
    assert planned(b, QoServe, alpha=0.0) == ("", "late fresh", 1100)
    b.table.due_s[b.table.row_of["late"]] = NOW + 0.05
    b.prefill("begun", waited_s=0.95, computed=10)
    assert planned(b, QoServe, alpha=0.0) == ("begun", "fresh late", 2048)


# FairBatching -----------------------------------------------------------------------------


def test_fairbatching_lets_early_decodes_pause_for_prompts() -> None:
    """Budget 100 ms; urgent below 200 ms of slack: the early one has 900."""
    b = StateBuilder()
    b.decode("early", first_ago_s=0.1, out=10)
    b.decode("urgent", first_ago_s=0.0, out=1)
    b.waiting("p", waited_s=0.0, prompt=2000)
    assert planned(b, FairBatching, margin=1.0) == ("urgent", "p", 891)
    b.table.prefill_target[b.table.row_of["p"]] = 500
    assert planned(b, FairBatching, margin=1.0) == ("urgent early", "p", 502)


def test_fairbatching_as_published_counts_from_the_deadline_of_the_first_token() -> None:
    b = StateBuilder()
    b.decode("d", first_ago_s=0.0, out=1, arrived_ago_s=0.0)
    b.waiting("p", waited_s=0.0, prompt=1500)
    assert planned(b, FairBatching, margin=1.0) == ("d", "p", 891)
    assert planned(b, FairBatching, margin=1.0, clock="published") == ("d", "p", 1501)


def test_fairbatching_serves_hopeless_prompts_first_or_last() -> None:
    b = StateBuilder()
    b.waiting("hopeless", waited_s=0.95, prompt=1000)
    b.waiting("fresh", waited_s=0.0, prompt=1000)
    assert planned(b, FairBatching) == ("", "fresh hopeless", 2000)
    assert planned(b, FairBatching, hopeless_last=False) == ("", "hopeless fresh", 2000)


def test_fairbatching_is_decode_first_under_pressure() -> None:
    """100 late decodes need 110 ms: of the 100 ms there are, prompts get nothing."""
    b = StateBuilder(max_num_running=200)
    for number in range(100):
        b.decode(f"d{number}", first_ago_s=0.2, out=1)
    b.waiting("p", waited_s=0.0)
    run, admit, budget = planned(b, FairBatching, margin=1.0)
    assert (len(run.split()), admit, budget) == (90, "", 90)


# SLAI -------------------------------------------------------------------------------------


def test_slai_defers_decodes_to_five_steps_before_their_next_token_is_due() -> None:
    """Steps of 10 ms: the last moment is 50 ms after the last token; memory full, at once."""
    b = StateBuilder(elapsed_s=0.01)
    row = b.decode("d", first_ago_s=0.2, out=3)
    b.waiting("p", waited_s=0.0, prompt=1000)
    assert planned(b, Slai) == ("", "p", 512)
    b.table.last_token_s[row] = NOW - 0.051
    assert planned(b, Slai) == ("d", "p", 512)
    b.table.last_token_s[row] = NOW
    assert shown(b, make(Slai).plan(b.build(num_free_blocks=300))) == ("d", "p", 512)


def test_slai_takes_begun_prompts_then_short_ones_then_other_decodes() -> None:
    b = StateBuilder(elapsed_s=0.01)
    b.decode("d", first_ago_s=0.2, out=3)
    b.prefill("begun", waited_s=0.1, computed=900)
    b.waiting("long", waited_s=0.9, prompt=300)
    b.waiting("short", waited_s=0.0, prompt=50)
    assert planned(b, Slai) == ("begun d", "short long", 451)
    assert planned(b, Slai, chunk=200) == ("begun", "short long", 200)


# SlidingServe -----------------------------------------------------------------------------


def test_slidingserve_gives_up_tokens_now_that_the_next_step_computes_in_less_time() -> None:
    """Squares dear: two steps of 125 ms compute more than one of 150 and one of 100."""
    b = StateBuilder(max_num_tokens=8192)
    b.decode("d", first_ago_s=0.05, out=2)
    b.waiting("p", waited_s=0.0, prompt=5000)
    dear = Coefficients(a0=0, b0=1e-7, c0=1e-7, d0=0.01, a1=1e-3, b1=0, c1=0.01, overlap=0.01)
    state = b.build(cost=CostModel.from_coefficients(dear))
    _, _, budget = shown(b, make(SlidingServe, margin=1.0).plan(state))
    greedy = Step(state, by_model(state.cost))
    greedy.take_decodes(greedy.decodes)
    assert greedy.most_tokens(0.15) == pytest.approx(1179, abs=3)
    assert budget == pytest.approx(1068, abs=40)


def test_slidingserve_leaves_out_the_longest_where_first_tokens_would_be_late() -> None:
    """10,000 tokens a second: 300 ms and 100 ms of work, due in 350 and 360 ms."""
    b = StateBuilder()
    b.waiting("long", waited_s=0.65, prompt=3000)
    b.waiting("short", waited_s=0.64, prompt=1000)
    assert planned(b, SlidingServe) == ("", "short long", 2048)
    b.table.due_s[b.table.row_of["short"]] = NOW + 0.6
    assert planned(b, SlidingServe) == ("", "long", 2048)


# SCORPIO ----------------------------------------------------------------------------------


def scorpio_queue() -> StateBuilder:
    """Prompts of 100 ms; due in 220, 230 and 1,000 ms: with 50 ms to spare two are in time."""
    b = StateBuilder()
    b.waiting("first", waited_s=0.78, prompt=1000)
    b.waiting("late", waited_s=0.77, prompt=1000)
    b.waiting("fresh", waited_s=0.0, prompt=1000)
    return b


def test_scorpio_refuses_who_cannot_be_reached_in_time() -> None:
    b = scorpio_queue()
    plan = make(Scorpio).plan(b.build())
    assert b.names(plan.reject) == ["late"]
    assert shown(b, plan) == ("", "first fresh", 2000)
    plan = make(Scorpio, refuse=False).plan(b.build())
    assert not len(plan.reject)
    assert shown(b, plan) == ("", "first fresh late", 2048)


@pytest.mark.parametrize(("gate", "admitted"), [(8.0, "a"), (9.0, "")])
def test_scorpio_admits_while_the_gate_holds(gate: float, admitted: str) -> None:
    """8 (10 + 2) < 99 ms, 8 (10 + 3) is not; prompts are alone in their step."""
    b = StateBuilder()
    b.decode("d", first_ago_s=0.0, out=1)
    b.waiting("a", waited_s=0.1)
    b.waiting("b", waited_s=0.0)
    run = "" if admitted else "d"
    assert planned(b, Scorpio, gate=gate) == (run, admitted, 100 if admitted else 1)
    assert planned(b, Scorpio, gate=gate, chunk=512)[:2] == ("d", admitted)


def test_scorpio_lets_loose_decodes_run_by_credits() -> None:
    b = StateBuilder()
    b.decode("tight", first_ago_s=0.0, out=1)
    b.decode("loose", first_ago_s=0.0, out=1, slo=LOOSE)
    rule = make(Scorpio)
    runs = [shown(b, rule.plan(b.build()))[0] for _ in range(4)]
    assert runs == ["tight", "tight loose", "tight", "tight loose"]


# SLOs-Serve -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_set_is_that_of_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 7
    gaps_s, need = rng.uniform(0.0, 1.0, count), rng.integers(1, 100, count)
    forced, speeds = rng.random(count) < 0.2, np.linspace(100.0, 30.0, count + 1)
    need[forced] //= 10

    def is_feasible(chosen: tuple[int, ...]) -> bool:
        spare, admitted = 0.0, 0
        for place in range(count):
            spare += gaps_s[place] * speeds[admitted]
            if place in chosen:
                spare, admitted = spare - need[place], admitted + 1
                if spare < 0.0:
                    return False
        return set(np.flatnonzero(forced)) <= set(chosen)

    sets = [c for n in range(count + 1) for c in itertools.combinations(range(count), n)]
    found = largest_set(gaps_s, need, forced, speeds.tolist())
    assert is_feasible(tuple(found))
    assert len(found) == max(len(chosen) for chosen in sets if is_feasible(chosen))


def test_what_is_guaranteed_stays_so_where_it_is_late() -> None:
    gaps_s, forced = np.array([1.0, 0.0]), np.array([True, False])
    assert largest_set(gaps_s, np.array([200, 10]), forced, [100.0] * 3) == [0]
    assert largest_set(gaps_s, np.array([90, 10]), forced, [100.0] * 3) == [0, 1]


def slos_queue() -> StateBuilder:
    """Steps of 35 ms with a decode have 240 tokens: 6,857 a second; 343 in 50 ms."""
    b = StateBuilder()
    b.decode("d", first_ago_s=0.0, out=1)
    b.waiting("long", waited_s=0.95, prompt=300)
    b.waiting("one", waited_s=0.95, prompt=150)
    b.waiting("two", waited_s=0.95, prompt=150)
    return b


def test_slos_serve_guarantees_two_short_prompts_in_place_of_a_long_one() -> None:
    b = slos_queue()
    rule = make(SlosServe, k=0.35)
    assert shown(b, rule.plan(b.build())) == ("", "one two", 250)
    b.table.due_s[b.table.row_of["long"]] = NOW + 1.0
    assert planned(b, SlosServe, k=0.35) == ("", "one two", 250)


def test_slos_serve_keeps_what_it_has_guaranteed() -> None:
    b = slos_queue()
    rule = make(SlosServe, k=0.35)
    rule.plan(b.build())
    b.waiting("shorter", waited_s=0.95, prompt=100)
    b.waiting("shortest", waited_s=0.95, prompt=60)
    assert shown(b, rule.plan(b.build())) == ("", "one two", 250)
    assert planned(b, SlosServe, k=0.35) == ("", "one shorter", 250)


def test_slos_serve_gives_best_effort_what_a_short_step_leaves() -> None:
    """The guaranteed decode is due in 100 ms, later than two steps of 35: prompts go first."""
    b = StateBuilder()
    b.waiting("lost", waited_s=2.0, prompt=1000)
    b.waiting("new", waited_s=0.0, prompt=100)
    assert planned(b, SlosServe, k=0.35) == ("", "new lost", 250)


def test_slos_serve_takes_slots_from_best_effort() -> None:
    b = StateBuilder(max_num_running=1)
    row = b.prefill("lost", waited_s=2.0, computed=10)
    b.waiting("new", waited_s=0.0, prompt=100)
    plan = make(SlosServe).plan(b.build())
    assert plan.preempt.tolist() == [row]
    assert shown(b, plan) == ("", "new", 100)


def test_slos_serve_guarantees_no_more_than_memory_is_expected_to_hold() -> None:
    b = StateBuilder(num_blocks=40)
    b.waiting("large", waited_s=0.5, prompt=500)
    b.waiting("small", waited_s=0.0, prompt=200)
    assert planned(b, SlosServe, k=0.35) == ("", "small large", 250)
    b.options["num_blocks"] = b.options["num_free_blocks"] = 100
    assert planned(b, SlosServe, k=0.35) == ("", "large", 250)


# ProServe ---------------------------------------------------------------------------------


def proserve_queue() -> StateBuilder:
    b = StateBuilder()
    b.waiting("long", waited_s=0.5, prompt=1500)
    b.waiting("short", waited_s=0.4, prompt=100)
    return b


def test_proserve_goes_by_deadline_at_low_load_and_by_cost_at_high_load() -> None:
    """150 + 10 ms of work, the first due in 500: load is 163 ms, which lam makes urgent."""
    assert planned(proserve_queue(), SlideBatching) == ("", "long short", 1600)
    assert planned(proserve_queue(), SlideBatching, lam=4.0) == ("", "short long", 1600)


def test_proserve_budget_is_the_least_time_that_can_still_be_kept() -> None:
    """The late decode does not shrink it; 0.65 TPOT is the least: 65 ms = 10 + 2 + 0.1 n."""
    b = StateBuilder()
    b.decode("late", first_ago_s=1.0, out=1)
    b.decode("close", first_ago_s=0.08, out=1)
    b.waiting("p", waited_s=0.0, prompt=5000)
    run, admit, budget = planned(b, SlideBatching)
    assert (set(run.split()), admit) == ({"late", "close"}, "p")
    assert budget == pytest.approx(2 + 530, abs=1)
    b.table.first_token_s[b.table.row_of["close"]] = NOW
    assert planned(b, SlideBatching)[2] == pytest.approx(2 + 880, abs=1)


def test_proserve_starts_no_chunk_of_fifty_tokens_or_fewer_unless_it_is_the_last() -> None:
    b = StateBuilder()
    for number in range(50):
        b.decode(f"d{number}", first_ago_s=0.2, out=1)
    b.decode("close", first_ago_s=0.04, out=1)
    b.waiting("p", waited_s=2.0, prompt=1000)
    assert planned(b, SlideBatching)[1:] == ("", 51)
    assert planned(b, SlideBatching, least=20)[1:] == ("p", pytest.approx(51 + 40, abs=1))


# Rules of a few lines ---------------------------------------------------------------------


def test_edf_has_begun_and_waiting_prompts_in_one_order() -> None:
    b = StateBuilder()
    b.decode("d", first_ago_s=0.0, out=1)
    b.prefill("begun", waited_s=0.1, computed=900)
    b.waiting("first", waited_s=0.5, prompt=100)
    b.waiting("last", waited_s=0.0, prompt=1000)
    assert planned(b, Edf, chunk=102) == ("d", "first", 101)
    assert planned(b, Edf, chunk=512) == ("d begun", "first last", 512)


def test_a_budget_by_tpot_knows_no_deadlines() -> None:
    """Half of 100 ms = 10 + 1 + 0.1 n; the queue is in its order."""
    b = StateBuilder()
    b.decode("d", first_ago_s=1.0, out=1)
    b.waiting("first", waited_s=0.0, prompt=1000)
    b.waiting("due", waited_s=0.9, prompt=1000)
    assert planned(b, TpotBudget, share=0.5001) == ("d", "first", 391)


def test_past_future_admits_while_the_predicted_peak_fits() -> None:
    """1,552 tokens: two of 600 and 50 to come fit, three do not."""
    b = StateBuilder(left=50.0, num_blocks=100)
    for name in ("a", "b", "c"):
        b.waiting(name, waited_s=0.0, prompt=600)
    assert planned(b, PastFuture, chunk=2048) == ("", "a b", 1200)
    b.lengths.left = 400.0
    assert planned(b, PastFuture, chunk=2048) == ("", "a", 600)
