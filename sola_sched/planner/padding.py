"""Budgets for an engine with draft tokens that starts requests as long as its decodes."""

from __future__ import annotations

import dataclasses

import numpy as np

from sola_sched.core.state import StepPlan, StepState


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
