"""Options that change while an engine runs, in virtual time: what holds, for whom, from when on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from virtual_runs import make_small_engine, make_workload, step_until

import sola_sched
from sola_sched.reports.fates import from_report, to_report
from sola_sched.simulator import VirtualEngine, VirtualRequest

pytestmark = pytest.mark.vllm

START = {"ttft_s": 0.4, "tpot_s": 0.05}


def make_engine(path: Path, sola: dict[str, Any] | None = None, **options: Any) -> VirtualEngine:
    return make_small_engine(
        sola_sched.Scheduler, {**START, **(sola or {}), "options_file": str(path)}, **options
    )


def fates(engine: VirtualEngine) -> dict[str, dict[str, Any]]:
    monitor = engine.scheduler.sola_monitor
    report = to_report(monitor.fates.since(0, monitor.cost))
    return {fate["request_id"]: fate for fate in from_report(report)}


def run_until(engine: VirtualEngine, now_s: float) -> None:
    step_until(engine, lambda: engine.clock.now >= now_s)


def test_requests_that_come_later_have_the_new_targets(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    engine = make_engine(path)
    requests = make_workload(160, 16.0)
    for request in requests:
        engine.add(request)
    run_until(engine, 4.0)
    changed_s = engine.clock.now

    path.write_text(json.dumps({"ttft_s": 0.9, "tpot_s": None}))
    engine.run()

    found = fates(engine)
    assert len(found) == 160
    for request in requests:
        fate = found[request.req_id]
        if request.arrival_s < changed_s - 0.1:
            assert (fate["ttft_s"], fate["tpot_s"]) == (0.4, 0.05)
        elif request.arrival_s > changed_s:
            assert (fate["ttft_s"], fate["tpot_s"]) == (0.9, None)
    assert engine.scheduler.sola_config.ttft_s == 0.9
    assert engine.scheduler.sola_stats()["failures"] == {}


def test_planning_goes_off_and_on(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    engine = make_engine(path)
    for request in make_workload(400, 20.0):
        engine.add(request)

    def interventions() -> int:
        stats = engine.scheduler.sola_stats()
        return stats["num_held"] + stats["num_preempted_by_policy"] + stats["num_reordered"]

    run_until(engine, 5.0)
    on = interventions()
    path.write_text('{"steer": false}')
    run_until(engine, 6.5)  # it is looked at once a second
    off = interventions()
    assert "not steered" in str(engine.scheduler.sola_support)
    run_until(engine, 11.0)
    assert interventions() == off
    path.write_text('{"steer": true}')
    engine.run()
    assert on > 0
    assert interventions() > off
    assert str(engine.scheduler.sola_support) == "steered"
    assert len(fates(engine)) == 400
    assert engine.scheduler.sola_stats()["failures"] == {}


def test_a_new_class_is_known_to_the_next_request(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    engine = make_engine(path)
    engine.add(VirtualRequest("before", arrival_s=0.0, prompt_len=40, output_len=400))
    run_until(engine, 0.5)
    path.write_text('{"classes": {"batch": {"ttft_s": 7, "weight": 3, "share": 0.4}}}')
    engine.add(
        VirtualRequest(
            "after", arrival_s=0.6, prompt_len=40, output_len=4, extra_args={"slo_class": "batch"}
        )
    )
    engine.run()
    found = fates(engine)
    assert (found["after"]["slo_class"], found["after"]["ttft_s"]) == ("batch", 7)
    assert found["before"]["ttft_s"] == 0.4
    services = engine.scheduler.sola_monitor.services
    assert services.share[services.index_of("batch")] == 0.4
    assert engine.scheduler.sola_stats()["num_invalid_slo"] == 0


def test_a_share_that_is_changed_holds(tmp_path: Path) -> None:
    path = tmp_path / "options.json"

    def batch_share(changes: dict[str, Any] | None) -> float:
        path.unlink(missing_ok=True)
        classes = {"chat": {"ttft_s": 0.4, "tpot_s": 0.05, "share": 0.1}, "batch": {}}
        engine = make_engine(path, {"classes": classes})
        for number, request in enumerate(make_workload(600, 60.0)):
            name = ("chat", "batch")[number % 2]
            engine.add(replace(request, extra_args={"slo_class": name}))
        run_until(engine, 2.0)
        services = engine.scheduler.sola_monitor.services
        before = services.served_s.copy()
        if changes is not None:
            path.write_text(json.dumps({"classes": {**classes, **changes}}))
        run_until(engine, 9.0)
        served = services.served_s - before
        return float(served[services.index_of("batch")] / served.sum())

    assert batch_share({"batch": {"share": 0.7}}) > batch_share(None) + 0.2


def test_what_is_refused_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "options.json"

    def times(changes: str | None) -> list[tuple[float | None, float | None]]:
        path.unlink(missing_ok=True)
        engine = make_engine(path)
        for request in make_workload(120, 16.0):
            engine.add(request)
        run_until(engine, 3.0)
        if changes is not None:
            path.write_text(changes)
        engine.run()
        return [(record.first_token_s, record.last_token_s) for record in engine.records]

    wrong = '{"ttft_s": 9, "policy": "alise"}'
    with caplog.at_level("ERROR", logger="vllm.sola_sched"):
        assert times(wrong) == times(None)


@pytest.mark.parametrize("policy", ["paper", "alise", "doubling"])
def test_every_policy_goes_on_with_changed_options(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    engine = make_engine(path, {"policy": policy})
    for request in make_workload(120, 16.0):
        engine.add(request)
    run_until(engine, 3.0)
    path.write_text('{"ttft_s": 1.5, "classes": {"batch": {}}, "plan_limit_s": null}')
    engine.run()
    assert len(fates(engine)) == 120
    assert engine.scheduler.sola_config.ttft_s == 1.5
    assert engine.scheduler.sola_stats()["failures"] == {}


def test_the_longest_wait_holds_for_who_comes_later(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    engine = make_engine(path)
    path.write_text('{"max_wait_s": 30}')
    engine.add(VirtualRequest("one", arrival_s=2.0, prompt_len=40, output_len=400))
    run_until(engine, 2.1)
    table = engine.scheduler.sola_monitor.table
    assert table.served_by_s[table.row_of["one"]] == pytest.approx(32.0)
