"""Plans of others: what an engine could not carry out is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from states import StateBuilder

from sola_sched.config.policies import PolicyTraits
from sola_sched.core.state import StepPlan, StepState
from sola_sched.errors import PlanError
from sola_sched.planner.checked import CheckedPlanner


class Fixed:
    """Gives the plan that it was made with."""

    traits = PolicyTraits()

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def plan(self, state: StepState) -> Any:
        return self._plan


def checked(plan: Any) -> StepPlan:
    """The plan after the check; rows 0 and 1 run, 2 and 3 wait."""
    b = StateBuilder()
    b.decode("a", first_ago_s=0.1, out=3)
    b.prefill("b", waited_s=0.1, computed=10, prompt=100)
    b.waiting("c", waited_s=0.1)
    b.waiting("d", waited_s=0.2)
    return CheckedPlanner(Fixed(plan), "edf").plan(b.build())


def test_a_plan_that_can_be_carried_out_passes_with_its_rows_as_arrays() -> None:
    plan: Any = StepPlan(
        run=[0],
        admit=(3,),
        preempt=np.array([1]),
        reject=[2],
        token_budget=5,
        prefill_cap=3,  # type: ignore[arg-type]
    )
    passed = checked(plan)
    assert passed.run is not None
    assert passed.admit is not None
    assert [passed.run.tolist(), passed.admit.tolist()] == [[0], [3]]
    assert [passed.preempt.tolist(), passed.reject.tolist()] == [[1], [2]]
    assert passed.run.dtype == passed.reject.dtype == np.int64
    assert (passed.token_budget, passed.prefill_cap) == (5, 3)
    assert checked(StepPlan()).run is None
    ordered: Any = StepPlan(order=[3, 0, 1, 2], promote_s=[0, 1, 2, 3])
    assert checked(ordered).order.tolist() == [3, 0, 1, 2]
    assert checked(ordered).promote_s.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert checked(StepPlan(run=[], admit=[])).run.tolist() == []  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan(order=[0, 1]), r"'order' must have all rows that run or wait \(got \[0, 1\]"),  # type: ignore[arg-type]
        (StepPlan(order=[0, 1, 2, 9]), r"'order' must have rows of requests that run or wait"),  # type: ignore[arg-type]
        (StepPlan(promote_s=np.zeros(4)), r"'promote_s' must come with an 'order'"),
        (
            StepPlan(order=np.arange(4), promote_s=np.zeros(3)),
            r"'promote_s' must have a number for each row of 'order'",
        ),
        (None, r"Plan of policy 'edf': what 'plan' returns must be a StepPlan \(got None\)"),
        (StepPlan(run=np.array([0, 0])), r"'run' must have each row once \(got \[0, 0\]\)"),
        (StepPlan(run=np.array([0, 2])), r"'run' must have rows of requests that run \(got \[2\]"),
        (StepPlan(admit=np.array([0])), r"'admit' must have rows of requests that wait"),
        (StepPlan(admit=np.array([2, 2])), r"'admit' must have each row once"),
        (StepPlan(run=np.array([0.5])), r"'run' must be a list of rows"),
        (StepPlan(run=np.array([True])), r"'run' must be a list of rows"),
        (StepPlan(run=np.array([[0]])), r"'run' must be a list of rows"),
        (StepPlan(run=["a"]), r"'run' must be a list of rows"),  # type: ignore[arg-type]
        (StepPlan(run=np.array([99])), r"requests that run \(got \[99\]\)"),
        (StepPlan(admit=np.array([-1])), r"requests that wait \(got \[-1\]\)"),
        (StepPlan(preempt=np.array([3])), r"'preempt' must have rows of requests that run"),
        (StepPlan(reject=np.array([1])), r"'reject' must have rows of requests that wait"),
        (
            StepPlan(run=np.array([0, 1]), preempt=np.array([1])),
            r"'run' and 'preempt' must not share rows \(got \[1\]\)",
        ),
        (
            StepPlan(admit=np.array([2]), reject=np.array([2, 3])),
            r"'admit' and 'reject' must not share rows \(got \[2\]\)",
        ),
        (StepPlan(token_budget=0), r"'token_budget' must be an integer >= 1 or None \(got 0\)"),
        (StepPlan(token_budget=True), r"'token_budget' must be an integer"),
        (StepPlan(prefill_cap=0.5), r"'prefill_cap' must be an integer"),  # type: ignore[arg-type]
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(plan: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        checked(plan)
