"""Requests whose LoRA adapter waits until another one's slot comes free: no plan is made for them.

A plan that counts on them would keep time, slots and memory for requests that vLLM then passes
over, and displace others for nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from sola_sched.core.state import IntArray, StepPlan, StepState
from sola_sched.vllm_adapter.versions import Seams


def leave_out(
    state: StepState, requests: Mapping[str, Any], seams: Seams, active: set[int]
) -> IntArray:
    """Take them out of those that wait in `state`; their rows.

    Args:
        state: Of the step.
        requests: By name.
        seams: Of vLLM's scheduler.
        active: Adapters that have a slot or are kept one.
    """
    waiting, req_id = state.waiting, state.table.req_id
    if not len(waiting):
        return waiting
    asking = (requests[req_id[row]] for row in waiting.tolist())
    lacks = np.array(seams.lack_adapter_slots(asking, active))
    state.waiting = waiting[~lacks]
    rows: IntArray = waiting[lacks]
    return rows


def with_late_rejected(state: StepState, plan: StepPlan, rows: IntArray) -> StepPlan:
    """The plan that also rejects those of `rows` whose first token is overdue."""
    table = state.table
    is_late = (table.due_s[rows] <= state.now_s) & (table.num_output[rows] == 0)
    return dataclasses.replace(plan, reject=np.concatenate([plan.reject, rows[is_late]]))
