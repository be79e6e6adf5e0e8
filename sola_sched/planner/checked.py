"""Plans of policies from elsewhere, checked before the engine sees them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from sola_sched.config.policies import PolicyTraits
from sola_sched.core.state import FloatArray, IntArray, StepPlan, StepState
from sola_sched.errors import PlanError
from sola_sched.planner.base import Planner


class CheckedPlanner:
    """A planner whose plans are refused where an engine could not carry them out.

    An engine that serves a request twice in a step, or preempts one that does not run, would end
    or give wrong tokens. So such a plan raises; under vLLM the step then runs in vLLM's own order,
    with a line in the log. Lists of rows are accepted in place of arrays.

    Args:
        planner: Whose plans are checked.
        name: Of its policy, for messages.
    """

    def __init__(self, planner: Planner, name: str) -> None:
        self._planner, self._name = planner, name

    @property
    def traits(self) -> PolicyTraits:
        """Those of the planner."""
        return self._planner.traits

    def plan(self, state: StepState) -> StepPlan:
        """Plan one step; see `Planner.plan`.

        Raises:
            PlanError: What must hold, and what the plan has.
        """
        plan = self._planner.plan(state)
        if not isinstance(plan, StepPlan):
            raise self._error("what 'plan' returns must be a StepPlan", plan)
        running, waiting = state.running, state.waiting
        run = None if plan.run is None else self._rows("run", plan.run, running, "run")
        admit = None if plan.admit is None else self._rows("admit", plan.admit, waiting, "wait")
        preempt = self._rows("preempt", plan.preempt, running, "run")
        reject = self._rows("reject", plan.reject, waiting, "wait")
        for first, second, rows, others in (
            ("run", "preempt", run, preempt),
            ("admit", "reject", admit, reject),
        ):
            both = np.intersect1d(rows, others) if rows is not None else others[:0]
            if len(both):
                raise self._error(f"'{first}' and '{second}' must not share rows", both.tolist())
        for name in ("token_budget", "prefill_cap"):
            value = getattr(plan, name)
            is_count = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if value is not None and not (is_count and value >= 1):
                raise self._error(f"'{name}' must be an integer >= 1 or None", value)
        order, promote_s = self._order(plan, state)
        return dataclasses.replace(
            plan, run=run, admit=admit, preempt=preempt, reject=reject, order=order,
            promote_s=promote_s,
        )  # fmt: skip

    def _order(self, plan: StepPlan, state: StepState) -> tuple[IntArray | None, FloatArray | None]:
        """`order` and `promote_s` as arrays."""
        if plan.order is None:
            if plan.promote_s is not None:
                raise self._error("'promote_s' must come with an 'order'", plan.promote_s)
            return None, None
        everybody = np.concatenate([state.running, state.waiting])
        order = self._rows("order", plan.order, everybody, "run or wait")
        if len(order) != len(everybody):
            raise self._error("'order' must have all rows that run or wait", order.tolist())
        if plan.promote_s is None:
            return order, None
        promote_s = np.asarray(plan.promote_s)
        if promote_s.shape != order.shape or promote_s.dtype.kind not in "iuf":
            raise self._error("'promote_s' must have a number for each row of 'order'", promote_s)
        return order, promote_s.astype(np.float64, copy=False)

    def _rows(self, name: str, value: Any, allowed: IntArray, what: str) -> IntArray:
        rows = np.asarray(value)
        if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
            raise self._error(f"'{name}' must be a list of rows of the table", value)
        rows = rows.astype(np.int64, copy=False)
        if len(np.unique(rows)) != len(rows):
            raise self._error(f"'{name}' must have each row once", rows.tolist())
        strangers = rows[~np.isin(rows, allowed)]
        if len(strangers):
            raise self._error(
                f"'{name}' must have rows of requests that {what}", strangers.tolist()
            )
        return rows

    def _error(self, rule: str, value: Any) -> PlanError:
        return PlanError(f"Plan of policy {self._name!r}: {rule} (got {value!r:.200}).")
