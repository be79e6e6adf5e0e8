"""Whose tokens a step has: decodes with drafts take none from the prompts of a higher class."""

from __future__ import annotations

import numpy as np
import pytest
from random_states import random_builder
from states import StateBuilder

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import DECODE, StepPlan, StepState
from sola_sched.planner import make_planner, pass_through

POLICIES = ["attain", "alise", "doubling"]
#: Tokens that a decode takes, and those of a step; 40 decodes would take 160.
PER_DECODE, TOKENS = 4, 128
NUM_DECODES = 40
LOOSE = SloTarget(10.0, 1.0)


def busy(num: int = NUM_DECODES, priority: int = 1, **options: int) -> StateBuilder:
    """Decodes that want more tokens than a step has, in the order in which they came."""
    b = StateBuilder(**options)
    for number in range(num):
        ago_s = 2.0 - 0.01 * number
        b.decode(f"d{number}", first_ago_s=ago_s, out=30, slo=LOOSE, priority=priority)
    return b


def planned(policy: str, b: StateBuilder, **changes: object) -> tuple[StepState, StepPlan]:
    state = b.build(**{"max_num_tokens": TOKENS, "tokens_per_decode": PER_DECODE, **changes})
    planner = make_planner(SolaConfig(policy=policy, safety=0.0, best_effort_share=0.0))
    return state, pass_through(state, planner.plan(state))


def decodes_of(state: StepState, plan: StepPlan) -> list[int]:
    run = state.running if plan.run is None else plan.run
    return run[state.table.phase[run] == DECODE].tolist()


def room_of(state: StepState, plan: StepPlan) -> int:
    """Tokens that the step leaves to prompts."""
    assert plan.token_budget is not None
    num_decodes = len(decodes_of(state, plan))
    return plan.token_budget - num_decodes * state.tokens_per_decode


@pytest.mark.parametrize("policy", POLICIES)
def test_decodes_of_a_lower_class_leave_a_waiting_prompt_its_tokens(policy: str) -> None:
    b = busy()
    b.waiting("high", waited_s=0.1, prompt=50)
    state, plan = planned(policy, b)
    assert b.names(plan.admit) == ["high"]
    assert room_of(state, plan) >= 50
    assert decodes_of(state, plan) == list(range(19)), "as many go on as 78 tokens are enough for"


@pytest.mark.parametrize("policy", POLICIES)
def test_decodes_of_a_lower_class_let_a_prompt_go_on_that_has_begun(policy: str) -> None:
    b = busy()
    row = b.prefill("high", waited_s=0.1, computed=64, prompt=114)
    state, plan = planned(policy, b)
    assert plan.run is not None
    assert row in plan.run
    assert room_of(state, plan) >= 50
    assert decodes_of(state, plan) == list(range(19))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_gets_what_it_would_take_without_them(policy: str) -> None:
    b = busy(num=256, max_num_running=300, num_blocks=20_000)
    b.waiting("high", waited_s=0.1, prompt=1500, slo=LOOSE)
    state, plan = planned(policy, b, max_num_tokens=2048, tokens_per_decode=9)
    assert b.names(plan.admit) == ["high"]
    if policy == "attain":  # the step has time for all of it
        assert 1500 <= room_of(state, plan) < 1509
    else:  # in three steps of 512 tokens, as without the decodes
        assert 500 <= room_of(state, plan) < 509


def test_no_more_sit_out_than_bring_the_prompt_a_step_forward() -> None:
    b = busy()
    b.waiting("high", waited_s=0.1, prompt=900, slo=LOOSE)
    state, plan = planned("attain", b, max_num_tokens=640)
    # 480 tokens are left, and two steps are needed with 640 as well.
    assert b.names(plan.admit) == ["high"]
    assert decodes_of(state, plan) == list(range(NUM_DECODES))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_lowest_class_sits_out_first_and_no_higher_one(policy: str) -> None:
    b = StateBuilder()
    for number in range(30):
        ago_s = 2.0 - 0.01 * number
        b.decode(f"d{number}", first_ago_s=ago_s, out=30, slo=LOOSE, priority=number % 3)
    b.waiting("middle", waited_s=0.1, prompt=48, slo=LOOSE, priority=1)
    state, plan = planned(policy, b)
    # 20 of the classes up to its own take 80 tokens, the lowest ten 40.
    assert sorted(decodes_of(state, plan)) == [row for row in range(30) if row % 3 < 2]
    assert b.names(plan.admit) == ["middle"]
    assert room_of(state, plan) == 48


@pytest.mark.parametrize("policy", POLICIES)
def test_decodes_of_its_own_class_stay(policy: str) -> None:
    b = busy(priority=0)
    b.decode("lower", first_ago_s=1.0, out=2, slo=LOOSE, priority=2)
    b.waiting("equal", waited_s=0.1, prompt=50)
    state, plan = planned(policy, b)
    assert set(range(NUM_DECODES)) <= set(decodes_of(state, plan))


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_sits_out_for_a_prompt_that_finds_no_memory(policy: str) -> None:
    b = busy(num_blocks=2000, num_free_blocks=200)
    b.waiting("high", waited_s=0.1, prompt=60_000)
    state, plan = planned(policy, b)
    assert plan.admit is not None
    assert not len(plan.admit)
    assert len(decodes_of(state, plan)) == NUM_DECODES


def test_lost_decodes_of_a_lower_class_take_no_tokens_either() -> None:
    b = StateBuilder()
    for number in range(NUM_DECODES):
        ago_s = 2.0 - 0.01 * number
        slo = SloTarget(1.0, 0.01)  # a step of one takes 11 ms
        b.decode(f"d{number}", first_ago_s=ago_s, out=3, slo=slo, priority=1)
    b.waiting("high", waited_s=0.1, prompt=100)
    state = b.build(max_num_tokens=TOKENS, tokens_per_decode=PER_DECODE, elapsed_s=10.0)
    plan = pass_through(state, make_planner(SolaConfig(best_effort_share=0.5)).plan(state))
    assert b.names(plan.admit) == ["high"]
    assert room_of(state, plan) >= 100


def test_a_late_prompt_gets_its_tokens_within_half_of_the_time() -> None:
    b = StateBuilder()
    for number in range(NUM_DECODES):  # 50 ms a step, and they bear no more
        slo = SloTarget(1.0, 0.0515)
        b.decode(f"d{number}", first_ago_s=1.6, out=33, slo=slo, priority=1)
    b.waiting("high", waited_s=5.0, prompt=5000)
    state, plan = planned("attain", b, max_num_tokens=512, tokens_per_decode=9)
    assert b.names(plan.admit) == ["high"]
    assert 450 <= room_of(state, plan) <= 512


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(60))
def test_a_prompt_of_the_highest_class_is_computed_whatever_lower_ones_decode(
    policy: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    num, per_decode = int(rng.integers(1, 60)), int(rng.choice([1, 4, 9]))
    tokens = int(rng.choice([64, 128, 512]))
    b = busy(num, priority=1 + seed % 2)
    high = b.waiting("high", waited_s=0.1, prompt=int(rng.integers(1, 2000)))
    if seed % 3 == 0:
        b.waiting("low", waited_s=5.0, prompt=500, priority=1)
    state, plan = planned(policy, b, max_num_tokens=tokens, tokens_per_decode=per_decode)
    assert plan.admit is not None
    assert plan.admit[0] == high
    assert room_of(state, plan) >= 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(150))
def test_decodes_sit_out_for_tokens_of_a_higher_class_alone_and_no_more_than_it_takes(
    policy: str, seed: int
) -> None:
    b = random_builder(np.random.default_rng(seed), num_classes=3)
    slo, table = SloTarget(10.0, 10.0), b.table
    table.ttft_s[:], table.tpot_s[:], table.due_s[:] = slo.ttft_s, slo.tpot_s, np.inf
    state, plan = planned(policy, b, max_num_tokens=b.options["max_num_tokens"])
    taking = decodes_of(state, plan)
    stay = state.running[~np.isin(state.running, plan.preempt)]
    held = stay[(table.phase[stay] == DECODE) & ~np.isin(stay, taking)]
    if not len(held) or plan.admit is None:
        return
    begun = plan.run[table.phase[plan.run] != DECODE]
    prompts = np.concatenate([begun, plan.admit])
    uppers = prompts[table.priority[prompts] < table.priority[held].min()]
    assert len(uppers), "they sit out for a higher class"
    assert table.priority[held].min() >= table.priority[taking].max(initial=0)
    left = state.max_num_tokens - len(taking) * PER_DECODE
    wanted = np.maximum(table.prefill_target[uppers] - table.num_computed[uppers], 1).sum()
    assert left - PER_DECODE < wanted, "one more could go on"


@pytest.mark.parametrize("policy", POLICIES)
def test_classes_below_the_decodes_that_sit_out_do_not_bring_them_back(policy: str) -> None:
    b = busy()
    b.waiting("high", waited_s=0.1, prompt=50)
    for number in range(3):
        b.waiting(f"low{number}", waited_s=0.2, prompt=50, slo=LOOSE, priority=2)
    state, plan = planned(policy, b)
    assert plan.admit is not None
    assert b.names(plan.admit)[0] == "high"
    assert room_of(state, plan) >= 50
