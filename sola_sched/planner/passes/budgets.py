"""Budgets that hold for what the engine does by itself, whatever the plan is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from sola_sched.core.state import DECODE, IntArray, StepPlan, StepState


def with_whole_prompts(state: StepState, plan: StepPlan) -> StepPlan:
    """The plan with a budget that covers every prompt that it lets in.

    The first one starts whatever its length. The others do where what is planned is enough for
    them too; one that is too long waits, and is in nobody's way. Where the tokens of a step would
    not do for the first one, the last decodes of the lowest classes sit out, none of a higher one.

    Args:
        state: The step's state.
        plan: A planner's; not changed. One that leaves the order to the engine is returned as is.
    """
    if state.chunks_prefills or plan.admit is None or not len(plan.admit):
        return plan
    table, most = state.table, state.max_num_tokens
    run = state.running if plan.run is None else plan.run
    if plan.run is None and len(plan.preempt):
        run = run[~np.isin(run, plan.preempt)]
    new = chunks(state, plan.admit).tolist()
    is_decode = table.phase[run] == DECODE
    started = run[~is_decode]
    tokens = int(chunks(state, started).sum())
    (decodes,) = is_decode.nonzero()
    tokens += len(decodes) * state.tokens_per_decode
    num_over = -(-(tokens + new[0] - most) // state.tokens_per_decode)
    priority = table.priority[run[decodes]]
    order = priority.argsort(kind="stable")
    may_wait = decodes[order[priority[order] >= table.priority[plan.admit[0]]]]
    if 0 < num_over <= len(may_wait):
        run = np.delete(run, may_wait[-num_over:])
        tokens -= num_over * state.tokens_per_decode
    admit: list[int] = []
    budget = most if plan.token_budget is None else plan.token_budget
    for row, num_tokens in zip(plan.admit.tolist(), new, strict=True):
        if tokens + num_tokens <= (budget if admit else most):
            admit.append(row)
            tokens += num_tokens
    is_changed = plan.run is not None or len(run) < len(state.running)
    return dataclasses.replace(
        plan,
        run=run if is_changed else None,
        admit=np.array(admit, dtype=np.int64),
        token_budget=None if plan.token_budget is None else min(most, max(budget, tokens)),
    )


def chunks(state: StepState, rows: IntArray) -> IntArray:
    """Tokens that each of these prefills takes in a step that has room for all of them."""
    table = state.table
    left: IntArray = np.maximum(table.prefill_target[rows] - table.num_computed[rows], 1)
    return left if state.max_chunk is None else np.minimum(left, state.max_chunk)


def with_padding(state: StepState, plan: StepPlan) -> StepPlan:
    """The plan with tokens for those that start with a single one left to compute.

    The engine pads such a request, as one whose prompt is cached, to the length of a decode with
    its drafts, and starts nobody in a step that has no room for that.

    Args:
        state: The step's state.
        plan: Not changed.
    """
    if state.tokens_per_decode == 1 or plan.token_budget is None or plan.admit is None:
        return plan
    table = state.table
    is_one = table.prefill_target[plan.admit] - table.num_computed[plan.admit] <= 1
    more = int(np.count_nonzero(is_one)) * (state.tokens_per_decode - 1)
    if not more:
        return plan
    return dataclasses.replace(
        plan, token_budget=min(state.max_num_tokens, plan.token_budget + more)
    )


def with_room_to_resume(state: StepState, plan: StepPlan, needs: Sequence[int]) -> StepPlan:
    """The plan with tokens for requests whose KV has been loaded.

    The engine starts them before all others that wait, but after those that run, so what is added
    for them must not go into a longer chunk of a prefill that has begun. Where a step has not
    enough for all of them, each gets a part.

    Args:
        state: The step's state; these requests are in neither of its lists.
        plan: Not changed. One that leaves everything to the engine is returned as is.
        needs: Tokens that each takes in the step, in the order in which the engine starts them.
    """
    if plan.run is None and plan.admit is None and plan.token_budget is None:
        return plan
    slots = state.max_num_running - len(state.running) + len(plan.preempt)
    needs = needs[: max(0, slots)]
    if not needs:
        return plan
    table = state.table
    budget = state.max_num_tokens if plan.token_budget is None else plan.token_budget
    budget = min(state.max_num_tokens, budget + sum(needs))
    run, cap = plan.run, None
    rows = state.running[~np.isin(state.running, plan.preempt)] if run is None else run
    is_prefill = table.phase[rows] != DECODE
    begun = rows[is_prefill]
    room = budget - (len(rows) - len(begun)) * state.tokens_per_decode
    left = chunks(state, begun).tolist()
    if sum(left) + sum(needs) > room:
        if room < len(left) + len(needs):  # they would find nothing
            run, left = rows[~is_prefill], []
        cap = _largest_cap(sorted([*left, *needs]), room)
    if plan.prefill_cap is not None:
        cap = plan.prefill_cap if cap is None else min(cap, plan.prefill_cap)
    return dataclasses.replace(plan, run=run, token_budget=budget, prefill_cap=cap)


def _largest_cap(left: list[int], room: int) -> int:
    """The most tokens for each of `left`, ascending, with which they take no more than `room`."""
    for place, tokens in enumerate(left):
        share = room // (len(left) - place)
        if tokens > share:
            return max(1, share)
        room -= tokens
    return max(left)
