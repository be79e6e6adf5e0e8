"""Priority classes are strict under every policy."""

from __future__ import annotations

import numpy as np
import pytest
from random_states import random_builder
from states import StateBuilder

from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import DECODE, IntArray, StepPlan, StepState
from sola_sched.planner import make_planner, pass_through
from sola_sched.planner.passes import in_class_order


def tokens_of(state: StepState, rows: IntArray) -> IntArray:
    table = state.table
    left = np.maximum(table.prefill_target[rows] - table.num_computed[rows], 1)
    return np.where(table.phase[rows] == DECODE, state.tokens_per_decode, left)


def check_order(state: StepState, plan: StepPlan) -> None:
    """Who is served, and who loses its KV to the engine, goes by class."""
    table, priority = state.table, state.table.priority
    run, admit = plan.run, plan.admit
    assert admit is not None
    if run is None:  # the engine's own order: of no consequence where all are served
        run = state.running[priority[state.running].argsort()]
        assert (table.phase[run] == DECODE).all()
    assert (np.diff(priority[run]) >= 0).all(), "vLLM serves, and keeps, the first of these first"
    assert (np.diff(priority[admit]) >= 0).all()
    out = state.waiting[~np.isin(state.waiting, admit)]
    if len(out) and len(admit):
        assert priority[admit].max() <= priority[out].min(), "a slot goes to a lower class"
    held = state.running[~np.isin(state.running, [*run, *plan.preempt])]
    served = np.concatenate([run, admit])
    is_decode = table.phase[held] == DECODE
    if len(served):
        assert (priority[held[is_decode]] >= priority[served].max()).all(), "held for a lower one"
    prefills = served[table.phase[served] != DECODE]
    if len(prefills):
        assert (priority[held[~is_decode]] >= priority[prefills].max()).all()
    # vLLM gives out tokens in this order.
    ends = tokens_of(state, served).cumsum()
    is_short = ends > (plan.token_budget or state.max_num_tokens)
    if is_short.any():
        first_short = priority[served[is_short]].min()
        gets = served[: int(is_short.argmax()) + 1]
        gets = gets[table.phase[gets] != DECODE]
        assert (priority[gets] <= first_short).all(), "tokens go to a lower class"


def check_kv(state: StepState, plan: StepPlan) -> None:
    """Nobody leaves, or may have to, while a request of a lower class keeps its KV."""
    table, priority = state.table, state.table.priority
    stay = state.running[~np.isin(state.running, plan.preempt)]
    if len(plan.preempt) and len(stay):
        assert priority[plan.preempt].min() >= priority[stay].max(), "KV is lost to a lower class"
    run = stay if plan.run is None else plan.run
    held = stay[~np.isin(stay, run)]
    if not len(run) or not (priority[held] > priority[run].min()).any():
        return
    size = state.block_size
    tokens = np.where(
        table.phase[run] == DECODE,
        table.num_prompt[run] + table.num_output[run],
        table.num_computed[run],
    )
    new = tokens_of(state, run)
    left = (plan.token_budget or state.max_num_tokens) - np.concatenate([[0], new.cumsum()[:-1]])
    new = np.clip(new, 0, np.maximum(left, 0))
    need = (np.ceil((tokens + new) / size) - np.ceil((tokens - 1) / size)).sum()
    # The engine takes the last of `run` first.
    gone = np.concatenate([plan.preempt, run[priority[run] >= priority[held].max()]])
    freed = np.where(
        table.phase[gone] == DECODE,
        table.num_prompt[gone] + table.num_output[gone],
        table.num_computed[gone],
    )
    assert need <= state.num_free_blocks + (freed // size).sum(), "one that is held is in the way"


@pytest.mark.parametrize("policy", ["attain", "paper", "alise", "doubling"])
@pytest.mark.parametrize("seed", range(150))
def test_no_class_loses_kv_slot_or_step_to_a_lower_one(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    state = random_builder(rng, num_classes=3).build(has_classes=True)
    plan = pass_through(state, make_planner(SolaConfig(policy=policy)).plan(state))
    if plan.admit is None:  # the engine's own schedule
        assert plan.run is None
        assert plan.token_budget is None
    else:
        check_order(state, plan)
    check_kv(state, plan)
    running, waiting = set(state.running.tolist()), set(state.waiting.tolist())
    if running or waiting:
        assert plan.run is None or len(plan.run) or len(plan.admit), "nothing would run"


def test_a_begun_prompt_of_a_higher_class_takes_no_tokens_of_the_decodes_behind_it() -> None:
    b = StateBuilder()
    for number in range(20):
        b.decode(f"low{number}", first_ago_s=0.5, out=10, priority=1)
    b.prefill("high", waited_s=0.1, computed=100, prompt=900)
    state = b.build(max_num_tokens=512)
    decodes, high = state.running[:20], state.running[20:]

    plan = in_class_order(state, StepPlan(run=np.append(decodes, high), token_budget=320))

    assert plan.run is not None
    assert plan.run.tolist() == [*high, *decodes]
    assert (plan.token_budget, plan.prefill_cap) == (320, 300)


def test_prompts_behind_one_that_gets_a_part_sit_out() -> None:
    b = StateBuilder()
    for number in range(20):
        b.decode(f"low{number}", first_ago_s=0.5, out=10, priority=2)
    for name, priority in (("first", 0), ("second", 0), ("third", 1)):
        b.prefill(name, waited_s=0.1, computed=100, prompt=900, priority=priority)
    b.waiting("last", waited_s=0.1, priority=2)
    state = b.build(max_num_tokens=512)
    names = state.table.req_id

    plan = in_class_order(state, StepPlan(run=state.running, admit=state.waiting, token_budget=320))

    assert plan.run is not None
    assert plan.admit is not None
    assert [names[row] for row in plan.run][:2] == ["first", "low0"]
    assert len(plan.run) == 21
    assert plan.prefill_cap == 300
    assert not len(plan.admit), "nobody starts past a prompt of a higher class that sits out"
