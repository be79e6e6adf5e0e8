"""Room in a step for requests that the engine starts by itself, whatever the plan is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from sola_sched.core.state import DECODE, StepPlan, StepState


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
    left = np.maximum(table.prefill_target[begun] - table.num_computed[begun], 1).tolist()
    if sum(left) + sum(needs) > room:
        if room < len(left) + len(needs):  # they would find nothing
            run, left = rows[~is_prefill], []
        cap = _largest_cap(sorted([*left, *needs]), room)
    return dataclasses.replace(plan, run=run, token_budget=budget, prefill_cap=cap)


def _largest_cap(left: list[int], room: int) -> int:
    """The most tokens for each of `left`, ascending, with which they take no more than `room`."""
    for place, tokens in enumerate(left):
        share = room // (len(left) - place)
        if tokens > share:
            return max(1, share)
        room -= tokens
    return max(left)
