"""Streaming sessions: what waits for its next input, and what goes on with it."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

pytest.importorskip("vllm")

from live_sessions import (
    PARKED,
    assert_each_has_one_place,
    later_limit,
    open_session,
    send_next,
)
from loaded_engine import with_remote_kv
from needs import NEEDS_SWAPPING
from virtual_runs import make_small_engine, step_until, warm_up
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.request import RequestStatus

import sola_sched
from sola_sched.simulator import VirtualRequest
from sola_sched.vllm_adapter.steps.shortage import Shortage
from sola_sched.vllm_adapter.versions import Seams

pytestmark = pytest.mark.vllm


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
        open_session(engine, VirtualRequest(name, arrival_s=30.0, prompt_len=30, output_len=5))
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
    open_session(engine, VirtualRequest("session", arrival_s=3.0, prompt_len=30, output_len=5))
    step_until(engine, lambda: "session" in scheduler.requests and _status(scheduler) == PARKED)

    send_next(engine)
    sent_s, num_before = engine.clock.now, engine.record("session").num_output_tokens
    step_until(engine, lambda: engine.record("session").num_output_tokens > num_before)

    assert engine.clock.now - sent_s < 0.1
    assert scheduler.requests["decode0"].num_output_tokens < 1400  # they run on


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_early", [False, True], ids=["when-parked", "while-it-answers"])
def test_each_input_of_a_session_counts_from_its_own_arrival(
    is_early: bool, is_async: bool
) -> None:
    """The second comes when the targets of the first are long over, the end while it waits."""
    engine = make_small_engine(
        sola_sched.Scheduler, {"ttft_s": 1.0, "tpot_s": 0.05}, async_scheduling=is_async
    )
    scheduler, monitor = engine.scheduler, engine.scheduler.sola_monitor
    engine.add(VirtualRequest("other", arrival_s=0.0, prompt_len=20, output_len=1500))
    num_first = 200 if is_early else 50  # 2.2 s: the second waits longer than its target for it
    open_session(
        engine, VirtualRequest("session", arrival_s=1.0, prompt_len=30, output_len=num_first)
    )
    if is_early:
        step_until(engine, lambda: engine.record("session").num_output_tokens > 20)
    else:
        step_until(engine, lambda: engine.clock.now > 9.0)
        assert _status(scheduler) == PARKED
    send_next(engine)
    sent_s = engine.clock.now
    if is_early:
        step_until(engine, lambda: engine.record("session").num_output_tokens > num_first + 2)
    row = monitor.table.row_of["session"]
    assert monitor.table.arrival_s[row] == pytest.approx(sent_s, abs=0.02)
    assert monitor.table.num_prompt[row] == scheduler.requests["session"].num_prompt_tokens
    assert scheduler.sola_stats()["num_implausible_arrivals"] == 0
    step_until(engine, lambda: _status(scheduler) == PARKED)
    assert monitor.stats.num_finished == 1  # the first one, when the second began
    scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)

    stats = scheduler.sola_stats()
    assert (monitor.stats.num_finished, monitor.stats.num_aborted) == (2, 0)
    assert monitor.stats.num_ttft_met == (1 if is_early else 2)
    assert monitor.stats.num_tpot_met == 2
    assert stats["failures"] == {}
    step_until(engine, lambda: False)
    assert engine.record("other").num_output_tokens == 1500


class Predictions:
    """Stands for the client of a predictor; keeps what it is told of ends."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, int, bool]] = []

    def ended(self, req_id: str, num_output: int, *, is_cut: bool) -> None:
        self.ends.append((req_id, num_output, is_cut))

    def submit(self, *_: Any) -> None:
        pass

    def poll(self) -> list[Any]:
        return []

    def stats(self) -> dict[str, Any]:
        return {}

    def forget_but(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("by_client", [False, True], ids=["last-input", "aborted"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_each_answer_of_a_session_is_learned_from_also_the_last(
    is_async: bool, by_client: bool, is_cut: bool
) -> None:
    engine = make_small_engine(sola_sched.Scheduler, {}, async_scheduling=is_async)
    scheduler = engine.scheduler
    scheduler.sola_predictions = told = Predictions()
    limit = 12 if is_cut else 40
    open_session(
        engine,
        VirtualRequest("session", arrival_s=0.0, prompt_len=30, output_len=12, max_tokens=limit),
    )
    step_until(engine, lambda: "session" in scheduler.requests and _status(scheduler) == PARKED)
    send_next(engine, output_len=12, max_tokens=limit)
    step_until(engine, lambda: engine.record("session").num_output_tokens > 20)
    step_until(engine, lambda: _status(scheduler) == PARKED)

    if by_client:
        scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    else:
        send_next(engine, is_last=True)

    assert told.ends == [("session", 12, is_cut)] * 2
    assert scheduler.sola_stats()["failures"] == {}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_early", [False, True], ids=["when-parked", "while-it-answers"])
def test_a_session_that_its_client_ends_amid_an_answer_is_aborted(
    is_early: bool, is_async: bool
) -> None:
    engine = make_small_engine(sola_sched.Scheduler, {}, async_scheduling=is_async)
    scheduler, monitor = engine.scheduler, engine.scheduler.sola_monitor
    open_session(engine, VirtualRequest("session", arrival_s=0.0, prompt_len=30, output_len=20))
    if is_early:
        step_until(engine, lambda: engine.record("session").num_output_tokens > 5)
    else:
        step_until(engine, lambda: "session" in scheduler.requests and _status(scheduler) == PARKED)
    send_next(engine)
    step_until(engine, lambda: engine.record("session").num_output_tokens > 21)
    scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)

    assert (monitor.stats.num_finished, monitor.stats.num_aborted) == (1, 1)
    assert scheduler.sola_stats()["failures"] == {}


@pytest.mark.parametrize("is_async", [False, True])
def test_sessions_that_go_on_together_in_full_memory_are_answered(is_async: bool) -> None:
    """Each holds KV and lacks a little more; vLLM by itself waits for ever."""
    _, by_stock = _go_on_together(AsyncScheduler if is_async else StockScheduler, None, is_async)
    scheduler, by_ours = _go_on_together(sola_sched.Scheduler, {}, is_async)

    assert by_stock == [20, 20, 20, 0]
    assert min(by_ours[:3]) >= 25
    assert by_ours[3] == 5
    assert scheduler.sola_stats()["failures"] == {}
    assert 1 <= scheduler.sola_stats()["num_kv_given_back"] <= 3


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("has_copies", [False, pytest.param(True, marks=NEEDS_SWAPPING)])
def test_a_session_keeps_its_kv_where_another_has_just_left(
    has_copies: bool, is_async: bool
) -> None:
    """vLLM preempts the one that runs alone and looks at nobody who waits in that step."""
    options: dict[str, Any] = {"num_blocks": 40, "max_model_len": 512, "async_scheduling": is_async}
    sola: dict[str, Any] = {}
    if has_copies:
        from sola_sched.simulator.swap_link import LinkSpeed

        options["swap_link"] = LinkSpeed(100_000, 2e8)
        sola["swap"] = {"mode": "raw", "host_gib": 0.3, "always": True}
    engine = make_small_engine(sola_sched.Scheduler, sola, **options)
    scheduler = engine.scheduler
    open_session(engine, VirtualRequest("session", 0.0, 20, prompt_len=180))
    step_until(engine, lambda: scheduler.num_waiting_for_streaming_input == 1, 300)
    engine.add(VirtualRequest("alone", engine.clock.now, 390, prompt_len=100, max_tokens=390))
    step_until(engine, lambda: engine.record("alone").num_output_tokens > 100, 300)
    send_next(engine, "session", prompt_len=290)
    preempted: list[str] = []
    preempt = scheduler._preempt_request

    def noted(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = noted

    step_until(engine, lambda: engine.record("alone").finish_reason is not None, 2000)

    assert preempted == ["alone"]
    assert scheduler.sola_stats()["num_kv_given_back"] == 0
    assert engine.record("session").num_output_tokens > 20
    assert scheduler.sola_stats()["failures"] == {}


@pytest.mark.injects_failures
def test_a_failure_while_room_is_made_costs_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room, failed = Shortage._make_one_give_back, []

    def fail_once(shortage: Any) -> None:
        if not failed:
            failed.append(shortage)
            raise RuntimeError("injected")
        make_room(shortage)

    monkeypatch.setattr(Shortage, "_make_one_give_back", fail_once)
    scheduler, num_tokens = _go_on_together(sola_sched.Scheduler, {}, True)

    assert min(num_tokens[:3]) >= 25
    assert scheduler.sola_stats()["failures"] == {"making room among those that wait": 1}


def _go_on_together(
    scheduler_cls: type[Any], sola: dict[str, Any] | None, is_async: bool
) -> tuple[Any, list[int]]:
    """Output tokens of three sessions that together have no room to go on, and of a request."""
    names = ["first", "second", "third"]
    engine = make_small_engine(
        scheduler_cls, sola, num_blocks=40, max_model_len=512, async_scheduling=is_async
    )
    scheduler = engine.scheduler
    for name in names:
        open_session(engine, VirtualRequest(name, arrival_s=0.0, prompt_len=180, output_len=20))
    step_until(engine, lambda: scheduler.num_waiting_for_streaming_input == 3, 300)
    assert scheduler.num_waiting_for_streaming_input == 3
    for name in names:
        send_next(engine, name, prompt_len=120)
    engine.add(VirtualRequest("late", engine.clock.now, prompt_len=60, output_len=5))

    def end_those_answered() -> bool:
        for session in list(scheduler.requests.values()):
            if session.status.name == PARKED:
                scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
        return not scheduler.requests

    step_until(engine, end_those_answered, 500)
    return scheduler, [engine.record(name).num_output_tokens for name in (*names, "late")]


def _status(scheduler: Any) -> str:
    return str(scheduler.requests["session"].status.name)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
@pytest.mark.parametrize("order", list(permutations("ABC")), ids="".join)
def test_a_load_that_has_ended_behind_sessions_without_room_does_not_stop_the_engine(
    order: tuple[str, ...], scheduling_policy: str, is_async: bool
) -> None:
    """A and B hold KV and lack some; vLLM's scan may end at them, before the loaded C."""
    engine = with_remote_kv(
        sola_sched.Scheduler,
        num_blocks=130,
        max_num_seqs=8,
        async_scheduling=is_async,
        scheduling_policy=scheduling_policy,
        sola={"sola_sched": {"ttft_s": 5.0, "tpot_s": 0.1}},
    )
    scheduler = engine.scheduler
    priority = dict(zip(order, range(3), strict=True))
    for name in "AB":
        open_session(engine, VirtualRequest(name, 0.0, 5, 864, priority=priority[name]))
    step_until(engine, lambda: scheduler.num_waiting_for_streaming_input == 2, 300)
    engine.add(VirtualRequest("C", engine.clock.now, 5, 160, priority=priority["C"]))
    engine._requests["C"].kv_transfer_params = {"do_remote_prefill": True}
    step_until(engine, lambda: "C" in scheduler.connector.loading, 10)
    for name in "AB":
        send_next(engine, name, prompt_len=400, priority=priority[name])
    engine.add(VirtualRequest("D", engine.clock.now, 5, 50, priority=3))
    queue = Seams(scheduler).drained_first()
    held = sorted(queue, key=lambda request: order.index(request.request_id))
    assert len(held) == 3
    queue.remove_requests(held)
    for request in held:
        queue.add_request(request)

    for _ in range(500):
        engine.step()
        assert_each_has_one_place(scheduler)
        for session in list(scheduler.requests.values()):
            if session.status.name == PARKED:
                scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
        if not scheduler.requests:
            break

    num_tokens = [engine.record(name).num_output_tokens for name in "ABCD"]
    assert num_tokens == [5 + later_limit(5, 5), 5 + later_limit(5, 5), 5, 5]
    assert scheduler.sola_stats()["failures"] == {}
    assert scheduler.sola_stats()["num_kv_given_back"] <= 3
    assert engine.num_free_blocks == 129
