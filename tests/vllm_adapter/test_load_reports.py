"""A scheduler tells its load, and requests bring along what they waited."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from live_sessions import open_session
from telling_scheduler import TellingScheduler
from virtual_model import TINY_MODEL
from virtual_runs import step_until

from sola_sched.cluster.view import InstanceView
from sola_sched.reports.load_text import from_json
from sola_sched.simulator import StepTimeModel, StepTrace, VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

STEP_TIME = StepTimeModel(base_s=0.01, per_decode_s=2e-4, per_prefill_token_s=1e-4)
INTERVAL_S = 0.2


def make_engine(async_scheduling: bool = False, **sola: Any) -> VirtualEngine:
    return VirtualEngine(
        TellingScheduler,
        model=TINY_MODEL,
        num_blocks=2000,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        step_time=STEP_TIME,
        async_scheduling=async_scheduling,
        additional_config={"sola_sched": {"ttft_s": 0.5, "tpot_s": 0.05, **sola}},
    )


def workload(count: int) -> list[VirtualRequest]:
    return [
        VirtualRequest(f"r{i}", arrival_s=0.02 * i, prompt_len=200, output_len=40)
        for i in range(count)
    ]


def views_of(engine: VirtualEngine) -> list[InstanceView]:
    loads = [from_json(report.load) for report in engine.scheduler.received if report.load]
    return [InstanceView(**load) for load in loads if load["model"] is not None]


def test_each_report_is_a_view_that_can_be_true() -> None:
    engine = make_engine(load_interval_s=INTERVAL_S)
    engine.run(workload(60))
    views = views_of(engine)

    for view in views:
        view.check(now_s=0.0)
    assert max(view.num_running for view in views) == 8
    assert max(view.num_waiting for view in views) > 0
    assert max(view.num_lost for view in views) > 0
    busy = max(views, key=lambda view: view.num_running)
    assert (busy.max_num_seqs, busy.max_num_batched_tokens, busy.max_model_len) == (8, 1024, 2048)
    assert 0 < busy.kv_used_tokens <= busy.kv_capacity_tokens
    assert np.isfinite(busy.running_bank_s[busy.running_outputs > 0]).all()
    # The last one is made before the engine goes idle.
    assert (views[-1].num_requests, views[-1].kv_used_tokens) == (0, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_chunk_under_way_is_told_as_still_to_come(is_async: bool) -> None:
    """An asynchronous engine reports while its next step runs, which is booked as done."""
    engine = make_engine(load_interval_s=0.001, async_scheduling=is_async)
    engine.run([VirtualRequest("long", arrival_s=0.0, prompt_len=1900, output_len=3)])
    loads = [from_json(report.load) for report in engine.scheduler.received if report.load]

    told = [
        (float(load["running_ctx"].sum()), float(load["running_prefill"].sum())) for load in loads
    ]
    # After the chunk of 1,024 tokens, after the one of 876 with the first token, after the others.
    assert told[:2] == [(1024.0, 876.0), (1901.0, 0.0)]


def test_a_report_has_the_step_times_that_were_learned() -> None:
    engine = make_engine(load_interval_s=INTERVAL_S)
    engine.run(workload(60))
    view = views_of(engine)[-1]

    expected_s = STEP_TIME.base_s + 8 * STEP_TIME.per_decode_s
    assert view.model.decode_s(8, 8 * 220) == pytest.approx(expected_s, rel=0.1)


def test_reports_come_as_often_as_they_are_asked_for() -> None:
    engine = make_engine(load_interval_s=INTERVAL_S)
    steps: list[StepTrace] = []
    engine.run(workload(60), on_step=steps.append)

    took_s = steps[-1].start_s
    assert len(engine.scheduler.received) == pytest.approx(took_s / INTERVAL_S, rel=0.2)


def test_a_report_can_be_true_while_sessions_that_wait_have_all_slots() -> None:
    """Each of them keeps its slot until its client goes on, so none is left for plans."""
    engine = make_engine(load_interval_s=0.001)
    for i in range(8):
        open_session(engine, VirtualRequest(f"s{i}", 0.0, prompt_len=50, output_len=20))
    step_until(engine, lambda: engine.scheduler._seams.num_slots == 0)

    InstanceView(**from_json(engine.scheduler._reporting._load())).check(now_s=0.0)


def test_without_the_option_no_load_is_told() -> None:
    engine = make_engine()
    engine.run(workload(20))

    assert engine.scheduler.received
    assert all(report.load is None for report in engine.scheduler.received)


@pytest.mark.parametrize("value", [0, -1, "often", True])
def test_an_interval_that_is_no_time_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="'load_interval_s' must be a number in"):
        make_engine(load_interval_s=value)


def add(engine: VirtualEngine, **extra_args: Any) -> dict[str, float]:
    """The row that a request with these arguments gets, 10 s after the start."""
    request = VirtualRequest(
        "r", arrival_s=10.0, prompt_len=20, output_len=5, extra_args=extra_args
    )
    rows: list[dict[str, float]] = []

    def look(_: StepTrace) -> None:
        table = engine.scheduler.sola_monitor.table
        row = table.row_of.get("r")
        if row is not None:
            rows.append({"arrival_s": table.arrival_s[row], "due_s": table.due_s[row]})

    engine.run([request], on_step=look)
    return rows[0]


def test_a_request_that_is_sent_again_keeps_its_arrival() -> None:
    before, again = add(make_engine()), add(make_engine(), waited_ms=300.0)

    assert before["due_s"] - again["due_s"] == pytest.approx(0.3, abs=1e-6)
    assert before["arrival_s"] - again["arrival_s"] == pytest.approx(0.3, abs=1e-6)


def test_the_next_token_of_a_resumed_request_is_due_as_its_tpot_says() -> None:
    # Its first token was sent 300 ms ago, and 9 after it: the next is due after 10 x 50 ms.
    row = add(make_engine(), waited_ms=300.0, resumed_tokens=10)

    assert row["due_s"] - (row["arrival_s"] + 0.3) == pytest.approx(0.2, abs=1e-6)


def test_a_request_without_tpot_target_keeps_its_ttft_when_it_is_resumed() -> None:
    row = add(make_engine(tpot_s=None), waited_ms=0.0, resumed_tokens=10)

    assert row["due_s"] - row["arrival_s"] == pytest.approx(0.5)


def test_a_bank_without_target_survives_the_way() -> None:
    engine = make_engine(load_interval_s=INTERVAL_S, tpot_s=None)
    engine.run(workload(30))
    banks = np.concatenate([view.running_bank_s for view in views_of(engine)])

    assert len(banks) > 0
    assert (banks == math.inf).all()
