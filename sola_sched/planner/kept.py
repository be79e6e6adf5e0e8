"""Plans that hold for more than a step: the one cache of all planners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

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
        until_s: When it is to be reviewed at the latest, on the clock of the table.
        holds: What else the planner wants to see: the state and the steps since the plan was made.
        num_steps: Steps for which it has been kept.
    """

    plan: StepPlan
    made: StepState
    epoch: int
    most_steps: int
    until_s: float
    holds: Callable[[StepState, int], bool] | None
    num_steps: int = 0


class PlanCache:
    """Keeps the last plan as long as a new one would be the same.

    Attributes:
        kept: That plan; None where the next step needs a new one.
    """

    def __init__(self) -> None:
        self.kept: KeptPlan | None = None

    def keep(
        self,
        plan: StepPlan,
        state: StepState,
        most_steps: int,
        *,
        until_s: float = np.inf,
        holds: Callable[[StepState, int], bool] | None = None,
    ) -> None:
        """Keep `plan`, which was made for `state`; the rest as in `KeptPlan`."""
        epoch = state.table.epoch
        self.kept = KeptPlan(plan, state, epoch, most_steps, until_s, holds)

    def forget(self) -> None:
        """Have the next step planned anew."""
        self.kept = None

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
            and state.now_s <= kept.until_s
            and most_blocks(state, kept.plan) < state.num_free_blocks <= kept.made.num_free_blocks
            and are_equal(kept.made.running, state.running)
            and (kept.holds is None or kept.holds(state, kept.num_steps))
        ):
            return kept.plan
        self.kept = None
        return None
