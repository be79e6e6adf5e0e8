"""The blocks that a plan expects decodes to take are those that vLLM takes, step by step."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, make_workload

import sola_sched
from sola_sched.core.state import StepState, blocks_of_step

pytestmark = pytest.mark.vllm


class Counting(sola_sched.Scheduler):
    """Notes for each step of decodes alone: blocks that are expected, and blocks that are taken."""

    steps: list[tuple[int, int]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = []
        self._seen: tuple[StepState, Any] | None = None
        plan = self.sola_planner.plan

        def seen(state: StepState) -> Any:
            if state.are_decodes and not len(state.waiting):
                rows, table = state.running, state.table
                tokens = table.num_prompt[rows] + table.num_output[rows] + state.num_ahead
                self._seen = state, tokens
            return plan(state)

        self.sola_planner.plan = seen  # type: ignore[method-assign]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        pool = self.kv_cache_manager.block_pool
        before, self._seen = pool.get_num_free_blocks(), None
        output = super().schedule(*args, **kwargs)
        if self._seen is not None:
            state, tokens = self._seen
            names = [state.table.req_id[row] for row in state.running.tolist()]
            is_in = [name in output.num_scheduled_tokens for name in names]
            expected = int(blocks_of_step(tokens[is_in], 1, self.block_size).sum())
            self.steps.append((expected, before - pool.get_num_free_blocks()))
        return output


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_decodes_take_the_blocks_that_are_expected(is_async: bool) -> None:
    engine = make_small_engine(Counting, {}, async_scheduling=is_async, max_num_seqs=16)
    engine.run(make_workload(80, 6.0))
    steps = engine.scheduler.steps
    assert len(steps) > 200
    assert sum(taken for _, taken in steps) > 20
    assert all(expected == taken for expected, taken in steps), [
        pair for pair in steps if pair[0] != pair[1]
    ][:5]
