"""The shape of a step that vLLM has scheduled, as step-time models see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sola_sched.cost.fit import StepShape


def shape_of(scheduler_output: Any, requests: Mapping[str, Any]) -> StepShape:
    """The shape of a scheduled step.

    Args:
        scheduler_output: vLLM's `SchedulerOutput`; its ``num_scheduled_tokens`` is read.
        requests: Live requests by id, right after the ``schedule()`` that made the output: their
            ``num_computed_tokens`` include the step, their ``num_tokens`` do not.

    Returns:
        A request whose next token is its last known one decodes, all others prefill: prompt
        chunks as well as tokens computed again after a preemption.
    """
    num_decodes = decode_ctx = prefill = prefill_sq = prefill_ctx = 0
    for req_id, count in scheduler_output.num_scheduled_tokens.items():
        request = requests[req_id]
        has = request.num_computed_tokens - count
        if has >= max(request.num_prompt_tokens, request.num_tokens - 1):
            num_decodes += 1
            decode_ctx += has + count
        else:
            prefill += count
            prefill_sq += count * count
            prefill_ctx += has * count
    return StepShape(num_decodes, decode_ctx, prefill, float(prefill_sq), float(prefill_ctx))
