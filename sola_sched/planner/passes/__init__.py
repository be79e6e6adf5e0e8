"""What every plan passes through, whichever planner made it: `pass_through`.

A planner decides by time, slots and memory. The passes make its plan hold on the engine: a prompt
that may not be split finds its tokens, KV that is swapped finds its room, no priority class loses
to a lower one, and what the engine starts by itself finds tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sola_sched.core.state import StepPlan, StepState
from sola_sched.planner.passes.budgets import (
    with_padding,
    with_room_to_resume,
    with_whole_prompts,
)
from sola_sched.planner.passes.classes import in_class_order

__all__ = [
    "in_class_order",
    "pass_through",
    "with_padding",
    "with_room_to_resume",
    "with_whole_prompts",
]


def pass_through(
    state: StepState,
    plan: StepPlan,
    *,
    with_swaps: Callable[[StepState, StepPlan], StepPlan] | None = None,
    resuming: Sequence[int] = (),
) -> StepPlan:
    """The plan as the engine is to carry it out.

    Args:
        state: The step's state.
        plan: A planner's; not changed. One that leaves everything to the engine stays as it is.
        with_swaps: Makes room where KV is swapped; None where it is not.
        resuming: Tokens that each request takes whose KV has been loaded; see
            `with_room_to_resume`.
    """
    plan = with_whole_prompts(state, plan)
    if with_swaps is not None:
        plan = with_swaps(state, plan)
    plan = in_class_order(state, plan)
    plan = with_padding(state, plan)
    return with_room_to_resume(state, plan, resuming)
