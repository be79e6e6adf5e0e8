"""A policy of one's own: earliest deadline first.

Prompts go in the order in which their first tokens are due, in chunks of a fixed size, beside all
decodes. In virtual time, and on the engine, from the folder of this file:

    PYTHONPATH=. python -m sola_sched.bench --backend sim \
        --schedulers stock sola:policy=edf_policy:EarliestDeadlineFirst
    PYTHONPATH=. vllm serve MODEL --scheduler-cls sola_sched.Scheduler --additional-config \
        '{"sola_sched": {"policy": "edf_policy:EarliestDeadlineFirst"}}'
"""

from __future__ import annotations

import numpy as np

from sola_sched import PolicyTraits, SolaConfig, StepPlan, StepState
from sola_sched.core.state import DECODE


class EarliestDeadlineFirst:
    """Serves the prompt whose first token is due first.

    Args:
        config: `policy_options` may have ``"chunk"``, the prompt tokens of a step (512).
    """

    traits = PolicyTraits(options=("policy_options",))

    def __init__(self, config: SolaConfig) -> None:
        self.chunk = int(config.policy_options.get("chunk", 512))

    def plan(self, state: StepState) -> StepPlan:
        """All decodes, and the prompts by deadline: those that have begun, then new ones."""
        due_s = state.table.due_s
        is_decode = state.table.phase[state.running] == DECODE
        decodes, begun = state.running[is_decode], state.running[~is_decode]
        begun = begun[np.argsort(due_s[begun], kind="stable")]
        new = state.waiting[np.argsort(due_s[state.waiting], kind="stable")]
        return StepPlan(
            run=np.concatenate([decodes, begun]),
            admit=new[: max(0, state.max_num_running - len(state.running))],
            token_budget=len(decodes) * state.tokens_per_decode + self.chunk,
            problem="edf",
        )
