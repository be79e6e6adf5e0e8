"""Builders for planner tests: a cost model with round numbers and requests on one line each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import (
    DECODE,
    PREFILL,
    WAITING,
    RequestTable,
    StepPlan,
    StepState,
)
from sola_sched.cost.model import CostModel, StepShape
from sola_sched.planner import make_planner
from sola_sched.planner.attain import AttainPlanner
from sola_sched.prediction.length import NO_LINES, LengthLines

NOW = 100.0
#: Targets unless a test says otherwise.
SLO = SloTarget(1.0, 0.1)
#: Seconds of the builder's cost model.
STEP_S, DECODE_S, TOKEN_S = 0.010, 0.001, 0.0001


class FixedLengths:
    """A length model that always expects `left` more tokens, within the request's limit."""

    def __init__(self, left: float = 50.0) -> None:
        self.left = left
        self.observed: list[tuple[int, int]] = []

    def lines(self) -> LengthLines:
        return NO_LINES

    def class_of(self, num_prompt_tokens: int, max_tokens: int, service: int = 0) -> int:
        return 0

    def observe(self, class_id: int, num_output_tokens: int) -> None:
        self.observed.append((class_id, num_output_tokens))

    def remaining(
        self,
        class_ids: NDArray[np.int32],
        num_output: NDArray[np.int64],
        max_tokens: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        return np.clip(np.full(len(class_ids), self.left), 1.0, np.maximum(1, max_tokens))

    def remaining_quantile(
        self,
        q: float,
        class_ids: NDArray[np.int32],
        num_output: NDArray[np.int64],
        max_tokens: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        return self.remaining(class_ids, num_output, max_tokens)


def make_cost() -> CostModel:
    """Mixed step: 10 ms + 1 ms per decode + 0.1 ms per prefill token, nothing else."""
    steps = []
    for decodes in (0, 1, 4, 16, 64):
        for tokens in (0, 64, 256, 1024):
            if decodes or tokens:
                shape = StepShape(decodes, 0, tokens, 0.0, 0.0)
                steps.append((shape, STEP_S + DECODE_S * decodes + TOKEN_S * tokens))
    return CostModel.fit(steps)


def make_attain(**options: object) -> AttainPlanner:
    """The planner of `attain`, without margin and best-effort share unless `options` have them."""
    planner = make_planner(SolaConfig(**{"safety": 0.0, "best_effort_share": 0.0, **options}))
    assert isinstance(planner, AttainPlanner)
    return planner


class StateBuilder:
    """Collects requests and builds a `StepState`; times are relative to NOW.

    Args:
        left: Output tokens that the length model expects of every request.
        The rest: as in `StepState`.
    """

    def __init__(
        self,
        *,
        left: float = 50.0,
        max_num_tokens: int = 2048,
        max_num_running: int = 64,
        num_blocks: int = 10_000,
        num_free_blocks: int | None = None,
        elapsed_s: float = 0.0,
    ) -> None:
        self.table = RequestTable()
        self.running: list[int] = []
        self.lengths = FixedLengths(left)
        self.options = {
            "max_num_tokens": max_num_tokens,
            "max_num_running": max_num_running,
            "num_blocks": num_blocks,
            "num_free_blocks": num_blocks if num_free_blocks is None else num_free_blocks,
            "elapsed_s": elapsed_s,
        }

    def decode(
        self,
        name: str,
        *,
        first_ago_s: float,
        out: int,
        slo: SloTarget = SLO,
        arrived_ago_s: float | None = None,
        prompt: int = 100,
        priority: int = 0,
    ) -> int:
        """A decoding request: `out` tokens delivered, the first `first_ago_s` ago."""
        arrived = first_ago_s if arrived_ago_s is None else arrived_ago_s
        row = self._add(name, arrived, slo, prompt, priority)
        self.table.move(row, DECODE)
        self.table.num_computed[row] = prompt
        self.table.num_output[row] = out
        self.table.first_token_s[row] = NOW - first_ago_s
        self.table.last_token_s[row] = NOW
        self.running.append(row)
        return row

    def prefill(
        self,
        name: str,
        *,
        waited_s: float,
        computed: int,
        prompt: int = 1000,
        slo: SloTarget = SLO,
        priority: int = 0,
    ) -> int:
        """A request in the middle of its prefill."""
        row = self._add(name, waited_s, slo, prompt, priority)
        self.table.move(row, PREFILL)
        self.table.num_computed[row] = computed
        self.running.append(row)
        return row

    def waiting(
        self,
        name: str,
        *,
        waited_s: float,
        prompt: int = 100,
        slo: SloTarget = SLO,
        priority: int = 0,
    ) -> int:
        """A request that has not started."""
        return self._add(name, waited_s, slo, prompt, priority)

    def _add(
        self, name: str, arrived_ago_s: float, slo: SloTarget, prompt: int, priority: int
    ) -> int:
        row = self.table.add(name)
        self.table.arrival_s[row] = NOW - arrived_ago_s
        self.table.ttft_s[row] = slo.ttft_s
        self.table.due_s[row] = NOW - arrived_ago_s + slo.ttft_s
        self.table.tpot_s[row] = slo.tpot_s
        self.table.e2e_s[row] = slo.e2e_s
        self.table.e2e_due_s[row] = NOW - arrived_ago_s + slo.e2e_s
        self.table.weight[row] = slo.weight
        self.table.served_by_s[row] = NOW - arrived_ago_s + slo.max_wait_s
        self.table.num_prompt[row] = prompt
        self.table.prefill_target[row] = prompt
        self.table.max_tokens[row] = 10_000
        self.table.priority[row] = priority
        self.table.queue_pos[row] = row
        return row

    def build(self, **changes: object) -> StepState:
        """The state; `changes` replace single fields."""
        rows = np.asarray(self.running, dtype=np.int64)
        fields = {
            "now_s": NOW,
            "table": self.table,
            "running": rows,
            "waiting": np.flatnonzero(self.table.phase == WAITING),
            "lengths": self.lengths,
            "cost": make_cost(),
            "block_size": 16,
            "has_classes": bool(self.table.priority.any()),
            "has_e2e": bool(np.isfinite(self.table.e2e_s).any()),
            **self.options,
            **changes,
        }
        return StepState(**fields)  # type: ignore[arg-type]

    def names(self, rows: object) -> list[str]:
        """Names of table rows, for readable assertions."""
        return [str(self.table.req_id[int(row)]) for row in np.asarray(rows)]


def as_lists(plan: StepPlan) -> tuple[object, ...]:
    """What a plan tells the engine to do, for comparisons."""
    rows = (plan.run, plan.admit, plan.preempt, plan.reject)
    return (*(None if r is None else r.tolist() for r in rows), plan.token_budget)
