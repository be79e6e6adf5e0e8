"""Streaming sessions: what waits for its next input, and what goes on with it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, step_until, warm_up

import sola_sched
from sola_sched.simulator import VirtualRequest
from sola_sched.simulator.host import make_request

pytestmark = pytest.mark.vllm

_PARKED = "WAITING_FOR_STREAMING_REQ"


@pytest.mark.parametrize(
    ("options", "policy"),
    [({}, "fcfs"), ({}, "priority"), ({"policy": "alise"}, "fcfs"), ({"policy": "paper"}, "fcfs")],
)
def test_sessions_that_hold_every_slot_between_inputs_are_no_failure(
    options: dict[str, Any], policy: str
) -> None:
    engine = make_small_engine(
        sola_sched.Scheduler, options, max_num_seqs=2, scheduling_policy=policy
    )
    warm_up(engine)
    for name in ("first", "second"):
        engine.add(VirtualRequest(name, arrival_s=30.0, prompt_len=30, output_len=5))
        engine._requests[name].resumable = True
    for number in range(5):
        engine.add(
            VirtualRequest(
                f"late{number}", arrival_s=31.0, prompt_len=30, output_len=5, priority=number
            )
        )

    step_until(engine, lambda: engine.clock.now >= 33.0, 5000)

    scheduler = engine.scheduler
    assert scheduler.num_waiting_for_streaming_input == 2
    assert len(scheduler.waiting) == 5
    assert scheduler.sola_stats()["failures"] == {}
    assert not scheduler.sola_guard.is_aside


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "options", [{"ttft_s": None, "tpot_s": None, "e2e_s": 60.0}, {"ttft_s": 2.0, "tpot_s": 0.008}]
)
def test_a_session_that_goes_on_does_not_wait_for_decodes_to_end(
    options: dict[str, Any], is_async: bool
) -> None:
    engine = make_small_engine(sola_sched.Scheduler, options, async_scheduling=is_async)
    scheduler = engine.scheduler
    for number in range(4):
        engine.add(VirtualRequest(f"decode{number}", arrival_s=0.0, prompt_len=20, output_len=1500))
    warm_up(engine)
    engine.add(VirtualRequest("session", arrival_s=3.0, prompt_len=30, output_len=5))
    engine._requests["session"].resumable = True
    step_until(engine, lambda: "session" in scheduler.requests and _status(scheduler) == _PARKED)

    following = VirtualRequest("session", arrival_s=engine.clock.now, prompt_len=30, output_len=5)
    request = make_request(following, engine.vllm_config, engine._block_hasher)
    request.resumable = True
    scheduler.add_request(request)
    sent_s, num_before = engine.clock.now, engine.record("session").num_output_tokens
    step_until(engine, lambda: engine.record("session").num_output_tokens > num_before)

    assert engine.clock.now - sent_s < 0.1
    assert scheduler.requests["decode0"].num_output_tokens < 1400  # they run on


def _status(scheduler: Any) -> str:
    return str(scheduler.requests["session"].status.name)
