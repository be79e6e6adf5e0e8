"""What a real scheduler notes of its requests, tells its server, and writes into the log."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, make_workload, warm_up

import sola_sched
from sola_sched.explain.replay import Replay, Way
from sola_sched.explain.source import Window
from sola_sched.reports.fates import FateBook, from_report, to_report, tpot_s, ttft_s
from sola_sched.reports.reasons import remedies, story
from sola_sched.simulator import RequestRecord, VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

OPTIONS = {"ttft_s": 0.4, "tpot_s": 0.05}


def served(*requests: VirtualRequest, **options: Any) -> tuple[VirtualEngine, dict[str, Any]]:
    """An engine that has served these after its warm-up, and their fates by name."""
    engine = make_small_engine(sola_sched.Scheduler, OPTIONS, **options)
    warm_up(engine)
    for request in requests:
        engine.add(request)
    engine.run()
    return engine, fates_of(engine)


def fates_of(engine: VirtualEngine) -> dict[str, Any]:
    monitor = engine.scheduler.sola_monitor
    ended = monitor.fates.since(0, monitor.cost)
    return {fate["request_id"]: fate for fate in from_report(to_report(ended))}


def later(requests: list[VirtualRequest], by_s: float) -> list[VirtualRequest]:
    return [replace(request, arrival_s=request.arrival_s + by_s) for request in requests]


@pytest.mark.parametrize("is_async", [False, True])
def test_times_and_counts_are_those_of_the_engine(is_async: bool) -> None:
    load = later(make_workload(200, 18.0), 5.0)
    engine, fates = served(*load, async_scheduling=is_async)
    records: list[RequestRecord] = engine.records
    assert len(records) == len(fates) == 260
    for record in records:
        fate = fates[record.req_id]
        assert record.first_token_s is not None
        assert ttft_s(fate) == pytest.approx(record.first_token_s - record.arrival_s, abs=0.05)
        assert fate["num_output"] == record.num_output_tokens
        waited_s = sum(fate[f"waited_for_{what}_s"] for what in ("slot", "memory", "time"))
        assert fate["arrival_s"] <= fate["started_s"] <= fate["first_token_s"]
        assert waited_s <= fate["started_s"] - fate["arrival_s"] + 1e-6 or fate["num_preemptions"]
        if fate["end"] == "missed" and fate["missed"] == ["tpot"]:
            assert (tpot_s(fate) or 0.0) > 0.05
    assert sum(fate["end"] == "missed" for fate in fates.values()) > 20
    assert any(fate["lost_s"] is not None for fate in fates.values())
    assert any(fate["num_chunks"] > 1 for fate in fates.values())


def cause(fate: dict[str, Any]) -> str:
    assert fate["end"] == "missed", fate
    return " ".join([*story(fate), *remedies(fate)])


def test_a_prompt_that_is_too_long_is_called_so() -> None:
    long = VirtualRequest("long", arrival_s=10.0, prompt_len=4000, output_len=4)
    _, fates = served(long, max_model_len=4096)
    assert "even on an idle engine, longer than its TTFT target" in cause(fates["long"])


def test_one_that_waits_for_a_slot_is_told_so() -> None:
    first = [
        VirtualRequest(f"f{i}", arrival_s=10.0, prompt_len=20, output_len=200) for i in range(4)
    ]
    late = VirtualRequest("late", arrival_s=10.5, prompt_len=20, output_len=4)
    _, fates = served(*first, late, max_num_seqs=4)
    assert "for a free slot" in cause(fates["late"])
    assert fates["late"]["waited_for_slot_s"] > 1.0
    assert fates["late"]["num_running"] == 4


def test_one_that_waits_for_memory_is_told_so() -> None:
    first = VirtualRequest("first", arrival_s=10.0, prompt_len=1500, output_len=300)
    late = VirtualRequest("late", arrival_s=10.8, prompt_len=900, output_len=4)
    _, fates = served(first, late, num_blocks=131)
    assert fates["late"]["waited_for_memory_s"] > 1.0
    assert "KV memory" in cause(fates["late"])


def test_those_of_a_flood_that_were_late_waited_for_time() -> None:
    flood = [
        VirtualRequest(f"f{i:02}", arrival_s=10.0, prompt_len=1000, output_len=4) for i in range(20)
    ]
    _, fates = served(*flood)
    late = [fate for name, fate in fates.items() if name[0] == "f" and fate["end"] == "missed"]
    assert len(late) >= 10
    for fate in late:
        assert fate["waited_for_time_s"] > 0.2
        assert fate["waited_for_slot_s"] == fate["waited_for_memory_s"] == 0.0
        assert "compute time" in cause(fate)


def test_a_lost_request_says_when_and_by_what_reckoning() -> None:
    flood = [
        VirtualRequest(f"f{i}", arrival_s=10.0, prompt_len=1000, output_len=4) for i in range(20)
    ]
    _, fates = served(*flood)
    lost = [fate for fate in fates.values() if fate["lost_s"] is not None and fate["need_s"]]
    assert lost
    for fate in lost:
        left_s = fate["ttft_s"] - (fate["lost_s"] - fate["arrival_s"])
        assert fate["need_s"] > 0.9 * left_s  # else it could have been on time


def make_late(num_told: int) -> VirtualEngine:
    """An engine with more requests than it can serve in time, that tells of so many a minute."""
    engine = make_small_engine(sola_sched.Scheduler, {**OPTIONS, "log_missed": num_told})
    for request in make_workload(200, 16.0):
        engine.add(request)
    return engine


def told_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if ": It was late: " in r.getMessage()]


def run_and_change(engine: VirtualEngine, **options: Any) -> None:
    """Serve all, then one more under other options."""
    engine.run()
    engine.scheduler._reporting.change(replace(engine.scheduler.sola_config, **options))
    engine.add(VirtualRequest("last", arrival_s=30.0, prompt_len=20, output_len=4))
    engine.run()


def test_late_requests_are_told_in_the_log_so_many_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_late(3)
    with caplog.at_level(logging.INFO, logger="vllm.sola_sched"):
        engine.run()
    lines = told_in(caplog)
    assert len(lines) == 3  # the whole run is shorter than a minute
    assert all(line.startswith("sola_sched: r") and "It arrived with" in line for line in lines)


def test_late_requests_are_told_once_though_options_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_late(3)
    with caplog.at_level(logging.INFO, logger="vllm.sola_sched"):
        run_and_change(engine, ttft_s=1.0)
    assert len(told_in(caplog)) == 3  # all of it is within a minute


def test_those_that_were_late_while_none_were_told_are_not_told_afterwards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_late(0)
    with caplog.at_level(logging.INFO, logger="vllm.sola_sched"):
        run_and_change(engine, log_missed=3)
    assert told_in(caplog) == []


def test_engine_facts_are_enough_to_serve_the_same_again() -> None:
    engine, _ = served(*later(make_workload(100, 16.0), 5.0))
    book = FateBook()
    monitor = engine.scheduler.sola_monitor
    book.add(to_report(monitor.fates.since(0, monitor.cost)))
    facts = engine.scheduler._reporting._engine()
    assert facts is not None
    assert facts["options"] == OPTIONS
    replay = Replay(Window(json.loads(json.dumps(book.latest(999))), json.loads(json.dumps(facts))))
    assert len(replay.run(Way("ours", "sola"))) == 160
