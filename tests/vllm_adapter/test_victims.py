"""Requests that are preempted while their output is in flight, around a real vLLM scheduler."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, make_workload
from vllm.v1.request import Request, RequestStatus

import sola_sched
from sola_sched.core.state import StepPlan, StepState

pytestmark = pytest.mark.vllm


def is_draining(request: Request) -> bool:
    """Whether vLLM passes it over until the tokens in flight have come."""
    is_stale = bool(request.num_stale_output_tokens and not request.drop_stale_output)
    return is_stale and request.status == RequestStatus.PREEMPTED


class Watched(sola_sched.Scheduler):
    """Counts the victims with output in flight."""

    num_with_output_ahead = 0

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self.num_with_output_ahead += is_draining(request)


class Watching:
    """The planner of a scheduler, and who of those that it could start vLLM would pass over."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler, self._planner = scheduler, scheduler.sola_planner
        self.passed_over: list[str] = []

    def plan(self, state: StepState) -> StepPlan:
        requests = self._scheduler.requests
        waiting = (state.table.req_id[row] for row in state.waiting.tolist())
        self.passed_over += [name for name in waiting if is_draining(requests[name])]
        return self._planner.plan(state)


@pytest.mark.parametrize("policy", ["attain", "doubling"])
def test_nobody_is_planned_whose_last_output_is_in_flight(policy: str) -> None:
    """With two steps in flight at most it has come before the next plan is made."""
    sola = {"ttft_s": 0.5, "tpot_s": 0.03, "policy": policy}
    engine = make_small_engine(Watched, sola, num_blocks=130, async_scheduling=True)
    planner = engine.scheduler.sola_planner = Watching(engine.scheduler)
    records = engine.run(make_workload(40, 20.0))

    assert engine.scheduler.num_with_output_ahead > 2
    assert planner.passed_over == []
    assert all(record.finish_reason == "stop" for record in records)
    assert engine.num_free_blocks == 129
