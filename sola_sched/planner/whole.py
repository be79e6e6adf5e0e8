"""Plans for an engine that does not split prompts (``--no-enable-chunked-prefill``).

Such an engine starts a prompt only where the tokens that are left in the step are enough for all
of it, and otherwise looks at nobody behind it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from sola_sched.core.state import DECODE, StepPlan, StepState


def with_whole_prompts(state: StepState, plan: StepPlan) -> StepPlan:
    """The plan with a budget that covers every prompt that it lets in.

    The first one starts whatever its length. The others do where what is planned is enough for
    them too; one that is too long waits, and is in nobody's way. Where the tokens of a step would
    not do for the first one, the last decodes of the plan sit out.

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
    new = np.maximum(table.prefill_target[plan.admit] - table.num_computed[plan.admit], 1).tolist()
    is_decode = table.phase[run] == DECODE
    started = run[~is_decode]
    tokens = int(np.maximum(table.prefill_target[started] - table.num_computed[started], 1).sum())
    (decodes,) = is_decode.nonzero()
    num_fitting = max(0, most - tokens - new[0]) // state.tokens_per_decode
    if num_fitting < len(decodes) and tokens + new[0] <= most:
        run = np.delete(run, decodes[num_fitting:])
        decodes = decodes[:num_fitting]
    tokens += len(decodes) * state.tokens_per_decode
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
