"""Plans that hold for more than a step: the one cache of plans."""

from __future__ import annotations

from dataclasses import dataclass

from sola_sched.core.state import StepPlan, StepState, are_equal
from sola_sched.planner.base import most_blocks


@dataclass(slots=True)
class KeptPlan:
    """A plan that the next steps would only repeat, and what must hold for that.

    Attributes:
        plan: The plan.
        made: The state that it was made for.
        epoch: `RequestTable.epoch` by then: nobody has come or gone or begun to decode since.
        most_steps: Steps for which it may be kept, at most.
        num_steps: Steps for which it has been kept.
    """

    plan: StepPlan
    made: StepState
    epoch: int
    most_steps: int
    num_steps: int = 0


class PlanCache:
    """Keeps the last plan as long as a new one would be the same.

    Attributes:
        kept: That plan; None where the next step needs a new one.
    """

    def __init__(self) -> None:
        self.kept: KeptPlan | None = None

    def keep(self, plan: StepPlan, state: StepState, most_steps: int) -> None:
        """Keep `plan`, which was made for `state`; the rest as in `KeptPlan`."""
        self.kept = KeptPlan(plan, state, state.table.epoch, most_steps)

    def again(self, state: StepState) -> StepPlan | None:
        """The kept plan if it holds for `state` too; otherwise it is forgotten.

        Blocks come free without an end where those of a displaced request were being copied.
        """
        kept = self.kept
        if kept is None:
            return None
        kept.num_steps += 1
        if (
            kept.epoch == state.table.epoch
            and kept.num_steps <= kept.most_steps
            and most_blocks(state, kept.plan) < state.num_free_blocks <= kept.made.num_free_blocks
            and are_equal(kept.made.running, state.running)
        ):
            return kept.plan
        self.kept = None
        return None
