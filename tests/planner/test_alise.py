"""Step tables for `policy="alise"`: who runs, who is held, who is displaced, who starts.

The builder's cost model: a step takes 10 ms + 1 ms per decode + 0.1 ms per prefill token. With few
decodes a token costs about 10 ms of engine time, so level 0 is up to about 16 tokens.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from states import StateBuilder

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import PREFILL
from sola_sched.cost.model import CostModel
from sola_sched.planner import make_planner
from sola_sched.planner.alise import AlisePlanner
from sola_sched.prediction.length import LengthPrediction


def make_alise(**options: object) -> AlisePlanner:
    planner = make_planner(SolaConfig(**{"policy": "alise", **options}))
    assert isinstance(planner, AlisePlanner)
    return planner


def predict(b: StateBuilder, row: int, tokens: float) -> int:
    b.table.predict(row, LengthPrediction.exactly(tokens))
    return row


def waiting(b: StateBuilder, name: str, tokens: float, **options: object) -> int:
    return predict(b, b.waiting(name, **{"waited_s": 1.0, **options}), tokens)  # type: ignore[arg-type]


def decode(b: StateBuilder, name: str, tokens: float, out: int = 1, **options: object) -> int:
    row = b.decode(name, **{"first_ago_s": 1.0, "out": out, **options})  # type: ignore[arg-type]
    return predict(b, row, tokens)


def test_a_cost_model_that_is_not_ready_changes_nothing() -> None:
    b = StateBuilder()
    decode(b, "a", 10)
    waiting(b, "w", 10)
    plan = make_alise().plan(b.build(cost=CostModel()))
    assert plan.run is None
    assert plan.admit is None


def test_the_shortest_remaining_time_starts_first() -> None:
    b = StateBuilder()
    waiting(b, "long", 800, waited_s=2.0)
    waiting(b, "short", 10)
    waiting(b, "middle", 100)
    plan = make_alise().plan(b.build())
    assert b.names(plan.admit) == ["short", "middle", "long"]
    assert plan.token_budget == 300


def test_a_long_prompt_counts_like_a_long_answer() -> None:
    b = StateBuilder()
    waiting(b, "long prompt", 10, prompt=2000)
    waiting(b, "longer answer", 20)
    plan = make_alise().plan(b.build())
    assert b.names(plan.admit) == ["longer answer", "long prompt"]


def test_one_that_has_recomputed_nothing_yet_pays_for_its_whole_context() -> None:
    b = StateBuilder()
    back = waiting(b, "preempted", 50)
    b.table.num_output[back], b.table.prefill_target[back] = 40, 4000
    waiting(b, "new", 30)
    plan = make_alise().plan(b.build())
    assert b.names(plan.admit) == ["new", "preempted"]


def test_a_request_without_prediction_goes_by_the_length_model() -> None:
    b = StateBuilder(left=50.0)
    waiting(b, "longer", 80)
    b.waiting("unknown", waited_s=1.0)
    waiting(b, "shorter", 20)
    plan = make_alise().plan(b.build())
    assert b.names(plan.admit) == ["shorter", "unknown", "longer"]


def test_no_slot_is_taken_from_a_request_of_the_same_level() -> None:
    b = StateBuilder(max_num_running=1)
    decode(b, "runs", 31)
    waiting(b, "a little shorter", 20, prompt=1)
    plan = make_alise().plan(b.build())
    assert b.names(plan.preempt) == []
    assert b.names(plan.admit) == []


def test_a_slot_is_taken_from_the_longest_of_a_lower_level() -> None:
    b = StateBuilder(max_num_running=2)
    decode(b, "longest", 900)
    decode(b, "long", 500)
    waiting(b, "short", 10)
    plan = make_alise().plan(b.build())
    assert b.names(plan.preempt) == ["longest"]
    assert b.names(plan.run) == ["long"]
    assert b.names(plan.admit) == ["short"]


def test_nobody_is_displaced_where_computing_again_costs_more_than_it_saves() -> None:
    b = StateBuilder(max_num_running=1)
    decode(b, "long context", 200, prompt=9900)
    waiting(b, "short", 30)
    plan = make_alise().plan(b.build())
    assert b.names(plan.preempt) == []
    assert b.names(plan.run) == ["long context"]


def test_displacing_pauses_while_computing_again_takes_more_than_its_share() -> None:
    planner, displaced = make_alise(), 0
    for _ in range(40):  # each costs 0.5 s of prefill, and 1 s of engine time has passed
        b = StateBuilder(max_num_running=1, elapsed_s=1.0)
        decode(b, "long", 900, prompt=5000)
        waiting(b, "short", 10)
        displaced += len(planner.plan(b.build()).preempt)
    assert 3 <= displaced <= 40 * 0.1 / 0.5 + 1  # plans that displace nobody are kept a while


def test_blocks_are_taken_from_the_last_in_order_only_as_far_as_needed() -> None:
    b = StateBuilder(num_blocks=60, num_free_blocks=1)
    for name, tokens in (("a", 900), ("b", 700), ("c", 40)):
        decode(b, name, tokens, prompt=300)
    waiting(b, "short", 10, prompt=200)
    plan = make_alise().plan(b.build())
    assert b.names(plan.preempt) == ["a"]
    assert sorted(b.names(plan.run)) == ["b", "c"]
    assert b.names(plan.admit) == ["short"]


def test_nobody_is_displaced_if_that_frees_too_little() -> None:
    b = StateBuilder(num_blocks=60, num_free_blocks=1)
    decode(b, "long", 900, prompt=100)
    decode(b, "short", 12, prompt=700)
    waiting(b, "big", 10, prompt=800)
    plan = make_alise().plan(b.build())
    assert b.names(plan.preempt) == []
    assert b.names(plan.admit) == []


def test_the_steps_own_growth_displaces_the_last_in_order() -> None:
    b = StateBuilder(num_blocks=40, num_free_blocks=0)
    for name, tokens in (("a", 900), ("b", 30)):
        decode(b, name, tokens, prompt=318, out=2)  # 320 tokens: the next needs a block
    plan = make_alise().plan(b.build())
    assert b.names(plan.preempt) == ["a"]
    assert b.names(plan.run) == ["b"]


def test_a_started_prefill_is_held_for_a_shorter_request() -> None:
    b = StateBuilder(max_num_tokens=256)
    row = b.prefill("long", waited_s=2.0, computed=256, prompt=4000)
    predict(b, row, 500)
    waiting(b, "short", 5, prompt=256)
    plan = make_alise().plan(b.build())
    assert b.names(plan.run) == []
    assert b.names(plan.admit) == ["short"]
    assert plan.preempt.tolist() == []


def test_decodes_are_never_left_out_and_chunks_are_short_beside_them() -> None:
    b = StateBuilder(max_num_tokens=8192)
    for i in range(4):
        decode(b, f"d{i}", 500)
    waiting(b, "short", 5, prompt=3000)
    plan = make_alise().plan(b.build())
    assert len(plan.run) == 4
    assert b.names(plan.admit) == ["short"]
    assert plan.token_budget == 4 + 512


def test_alone_a_prompt_takes_the_whole_budget() -> None:
    b = StateBuilder(max_num_tokens=8192)
    waiting(b, "short", 5, prompt=3000)
    assert make_alise().plan(b.build()).token_budget == 3000


def test_aging_lets_a_long_request_pass_a_short_one() -> None:
    b = StateBuilder(max_num_running=1)
    waiting(b, "long", 300, waited_s=100.0)
    waiting(b, "short", 5)
    assert b.names(make_alise(aging_s=60.0).plan(b.build()).admit) == ["short"]
    assert b.names(make_alise(aging_s=20.0).plan(b.build()).admit) == ["long"]
    assert b.names(make_alise(aging_s=None).plan(b.build()).admit) == ["short"]


def test_an_overrun_request_is_demoted() -> None:
    for out, order in ((399, ["overruns", "other", "w"]), (401, ["other", "overruns", "w"])):
        b = StateBuilder()
        decode(b, "overruns", 400, out=out, first_ago_s=1.0)
        decode(b, "other", 61)
        waiting(b, "w", 5000)
        plan = make_alise().plan(b.build())
        assert plan.order is not None
        assert b.names(plan.order) == order


def test_a_higher_class_displaces_whatever_is_left() -> None:
    b = StateBuilder(max_num_running=1)
    decode(b, "almost done", 5, out=3, priority=1)
    waiting(b, "upper", 900, priority=0)
    plan = make_alise().plan(b.build())
    assert b.names(plan.preempt) == ["almost done"]
    assert b.names(plan.admit) == ["upper"]


def test_a_plan_that_decided_nothing_is_kept_until_somebody_comes() -> None:
    b = StateBuilder(max_num_running=2)
    decode(b, "a", 50)
    decode(b, "b", 50)
    waiting(b, "w", 200)
    planner, state = make_alise(), b.build()
    first = planner.plan(state)
    assert planner.plan(b.build()) is first
    waiting(b, "new", 2)
    assert planner.plan(b.build()) is not first


def test_blocks_that_come_free_by_themselves_end_a_kept_plan() -> None:
    """Those of a displaced request, once they have been copied."""
    b = StateBuilder(num_blocks=100, num_free_blocks=5)
    decode(b, "a", 50)
    waiting(b, "w", 200)
    planner = make_alise()
    first = planner.plan(b.build())
    assert not b.names(first.admit)
    assert planner.plan(b.build(num_free_blocks=4)) is first
    assert b.names(planner.plan(b.build(num_free_blocks=90)).admit) == ["w"]


def test_what_a_host_copy_holds_whole_still_takes_a_token_of_the_step() -> None:
    """vLLM admits nobody in a step without tokens for it."""
    b = StateBuilder()
    decode(b, "a", 50)
    row = waiting(b, "swapped", 200)
    b.table.num_computed[row] = b.table.prefill_target[row]
    plan = make_alise().plan(b.build())
    assert b.names(plan.admit) == ["swapped"]
    assert plan.token_budget == 2


def test_a_plan_is_kept_while_a_prefill_fills_the_chunks() -> None:
    b = StateBuilder()
    decode(b, "a", 50)
    row = predict(b, b.prefill("p", prompt=2000, waited_s=1.0, computed=0), 50)
    waiting(b, "w", 200)
    planner = make_alise()
    first = planner.plan(b.build(max_num_tokens=513))
    assert b.names(first.run) == ["a", "p"]
    kept = []
    for done in (512, 1024, 1536):
        b.table.num_computed[row] = done
        kept.append(planner.plan(b.build(max_num_tokens=513)) is first)
    # 2000 tokens are 4 chunks; the last one leaves room for "w", whose plan is a new one.
    assert kept == [True, True, False]


def test_a_new_prediction_ends_a_kept_plan() -> None:
    b = StateBuilder(max_num_running=1)
    decode(b, "a", 300)
    row = waiting(b, "w", 400)
    planner = make_alise()
    first = planner.plan(b.build())
    predict(b, row, 5)
    plan = planner.plan(b.build())
    assert plan is not first
    assert b.names(plan.preempt) == ["a"]


def test_rejects_who_would_wait_longer_than_its_target() -> None:
    b = StateBuilder(max_num_running=1)
    decode(b, "runs", 200)
    waiting(b, "tight", 300, slo=SloTarget(1.5, 1.0))
    waiting(b, "loose", 301, slo=SloTarget(100.0, 1.0))
    waiting(b, "none", 302, slo=SloTarget())
    planner = make_alise(overload="reject")
    rejected = set()
    for _ in range(40):  # reviewed every few plans
        rejected |= set(b.names(planner.plan(b.build()).reject))
    assert rejected == {"tight"}


#: A holder without KV yet, where swapped KV is never loaded: 0 tokens x no speed.
@example([("decode", 1, 1, 0.0, 0), ("decode", 1, 1, 0.0, 0), ("prefill", 1, 1, 0.0, 0)], 0, 3, 64)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["decode", "prefill", "waiting"]),
            st.integers(1, 2000),  # prompt
            st.integers(1, 1500),  # predicted tokens
            st.floats(0.0, 500.0),  # wait
            st.integers(0, 2),  # class
        ),
        max_size=30,
    ),
    st.integers(0, 400),
    st.integers(1, 32),
    st.integers(64, 4096),
)
def test_every_plan_names_a_feasible_set(requests, num_free, num_slots, budget) -> None:
    b = StateBuilder(num_blocks=400 + num_free, num_free_blocks=num_free, max_num_tokens=budget)
    for i, (kind, prompt, tokens, wait, priority) in enumerate(requests):
        if kind == "waiting" or len(b.running) == num_slots:
            row = b.waiting(f"r{i}", waited_s=wait, prompt=prompt, priority=priority)
        elif kind == "decode":
            row = b.decode(f"r{i}", first_ago_s=wait, out=1 + i, prompt=prompt, priority=priority)
        else:
            row = b.prefill(f"r{i}", waited_s=wait, computed=prompt // 2, prompt=prompt)
        predict(b, row, tokens)
    state = b.build(max_num_running=num_slots)
    plan = make_alise(aging_s=30.0).plan(state)

    running, waits = set(state.running.tolist()), set(state.waiting.tolist())
    run = set(state.running.tolist() if plan.run is None else plan.run.tolist())
    admit = [] if plan.admit is None else plan.admit.tolist()
    victims = set(plan.preempt.tolist())
    assert run <= running
    assert set(admit) <= waits
    assert victims <= running
    assert not run & victims
    assert len(set(admit)) == len(admit)
    if plan.problem == "alise":
        assert len(running) - len(victims) + len(admit) <= num_slots
        assert plan.order is not None
        assert sorted(plan.order.tolist()) == sorted(running | waits)
        held = running - run - victims
        assert all(b.table.phase[row] == PREFILL for row in held), "decodes are never held"
    if requests:
        assert run or admit, "somebody runs"


@pytest.mark.parametrize("num_levels", [1, 8])
def test_with_one_level_and_no_prediction_nobody_is_displaced(num_levels) -> None:
    b = StateBuilder(max_num_running=1, left=500.0)
    b.decode("a", first_ago_s=1.0, out=5)
    waiting(b, "short", 5)
    plan = make_alise(levels=num_levels).plan(b.build())
    assert len(plan.preempt) == (num_levels == 8)


def test_a_vague_prediction_is_no_reason_to_give_up_kv() -> None:
    b = StateBuilder(max_num_running=1)
    row = b.decode("vague", first_ago_s=1.0, out=1)
    quantiles = np.array([4.0, 10, 50, 100, 200, 400, 800, 1600, 2000, 3000])
    b.table.predict(row, LengthPrediction(quantiles, "lexical"))
    waiting(b, "short", 10)
    assert b.names(make_alise().plan(b.build()).preempt) == []
    b.table.predict(row, LengthPrediction(np.maximum(quantiles, 700), "lexical"))
    assert b.names(make_alise().plan(b.build()).preempt) == ["vague"]
