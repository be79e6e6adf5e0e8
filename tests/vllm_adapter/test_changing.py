"""Options that change while an engine runs, in virtual time: what holds, for whom, from when on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from telling_scheduler import TellingScheduler
from virtual_runs import make_small_engine, make_workload, step_until, warm_up

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


@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
def test_without_steering_requests_are_served_in_the_order_in_which_they_got_their_slots(
    scheduling_policy: str, tmp_path: Path
) -> None:
    """A plan puts a long prompt before decodes; vLLM would go on with it alone until its end."""
    path = tmp_path / "options.json"
    engine = make_engine(
        path,
        {"ttft_s": None, "tpot_s": None, "classes": {"chat": {"ttft_s": 2.0, "tpot_s": 0.05}}},
        max_num_batched_tokens=128,
        max_model_len=4096,
        scheduling_policy=scheduling_policy,
    )
    warm_up(engine)
    step_until(engine, lambda: False)
    now_s = engine.clock.now
    chat = {"slo_class": "chat"}
    engine.add(VirtualRequest("chat", now_s, 900, prompt_len=50, extra_args=chat))
    for number in range(4):
        engine.add(VirtualRequest(f"low{number}", now_s, 2000, prompt_len=50, priority=1))
    for _ in range(10):
        engine.step()
    engine.add(VirtualRequest("long", engine.clock.now, 50, prompt_len=4000, priority=0))
    for _ in range(3):
        engine.step()
    scheduler = engine.scheduler

    path.write_text('{"steer": false}')
    scheduler._changing.look()
    engine.step()

    names = [request.request_id for request in scheduler.running]
    assert names[0] == "chat"
    assert names[-1] == "long"
    before = {name: scheduler.requests[name].num_output_tokens for name in names[:5]}
    for _ in range(10):
        engine.step()
    for name, num_output in before.items():
        assert scheduler.requests[name].num_output_tokens == num_output + 10


def test_options_that_a_policy_refuses_change_nothing(tmp_path: Path) -> None:
    class Choosy(sola_sched.Scheduler):
        def sola_new_planner(self) -> Any:
            if self.sola_config.ttft_s is None:
                raise ValueError("this policy needs a TTFT")
            return super().sola_new_planner()

    path = tmp_path / "options.json"
    sola = {**START, "options_file": str(path)}
    engine = make_small_engine(Choosy, sola)
    for request in make_workload(60, 16.0):
        engine.add(request)
    run_until(engine, 1.5)
    scheduler = engine.scheduler

    path.write_text('{"ttft_s": null, "steer": false}')
    engine.run()

    assert scheduler.sola_stats()["failures"] == {}
    assert scheduler.sola_config.ttft_s == 0.4
    assert scheduler.sola_support.steers
    assert "this policy needs a TTFT" in str(scheduler.sola_options.problem)
    path.write_text('{"ttft_s": 0.9}')
    scheduler._changing.look()
    assert scheduler.sola_config.ttft_s == 0.9


def test_what_an_engine_refuses_is_told_until_it_is_taken_back(tmp_path: Path) -> None:
    class Choosy(TellingScheduler):
        def sola_new_planner(self) -> Any:
            if self.sola_config.ttft_s is None:
                raise ValueError("this policy needs a TTFT")
            return super().sola_new_planner()

    path = tmp_path / "options.json"
    engine = make_small_engine(Choosy, {**START, "options_file": str(path)})
    scheduler = engine.scheduler
    for request in make_workload(160, 16.0):
        engine.add(request)
    run_until(engine, 2.0)
    assert {str(report.refused) for report in scheduler.received} == {"None"}

    path.write_text('{"ttft_s": null}')
    run_until(engine, 5.0)

    refused = scheduler.received[-1].refused
    assert refused is not None
    assert refused["options"] == START
    assert "this policy needs a TTFT" in refused["problem"]
    path.unlink()
    engine.run()
    assert scheduler.received[-1].refused is None
    assert scheduler.sola_stats()["failures"] == {}


@pytest.mark.parametrize(
    ("before", "rollback", "ttft_s"),
    [
        (None, '{"steer": false}', 0.4),
        ('{"ttft_s": 0.9}', '{"steer": false}', 0.4),
        ('{"ttft_s": 0.9}', '{"ttft_s": 0.9, "steer": false}', 0.9),
    ],
)
def test_a_rollback_holds_where_the_planner_cannot_be_made(
    before: str | None, rollback: str, ttft_s: float, tmp_path: Path
) -> None:
    class Breaking(sola_sched.Scheduler):
        is_broken = False

        def sola_new_planner(self) -> Any:
            if self.is_broken:
                raise OSError("no space left on device")
            return super().sola_new_planner()

    path = tmp_path / "options.json"
    engine = make_small_engine(Breaking, {**START, "options_file": str(path)})
    scheduler = engine.scheduler
    if before is not None:
        path.write_text(before)
        scheduler._changing.look()
    for request in make_workload(60, 16.0):
        engine.add(request)
    run_until(engine, 1.5)
    Breaking.is_broken, planner = True, scheduler.sola_planner

    path.write_text(rollback)
    run_until(engine, 3.0)

    assert "not steered" in str(scheduler.sola_support)
    assert (scheduler.sola_config.steer, scheduler.sola_config.ttft_s) == (False, ttft_s)
    assert scheduler.sola_options.problem is None
    assert scheduler.sola_planner is planner
    path.write_text('{"steer": true}')
    scheduler._changing.look()
    assert "no space left" in str(scheduler.sola_options.problem)
    assert not scheduler.sola_support.steers
    Breaking.is_broken = False
    path.write_text('{"ttft_s": 1.2}')
    engine.run()
    assert scheduler.sola_support.steers
    assert len(fates(engine)) == 60
    assert scheduler.sola_stats()["failures"] == {}


@pytest.mark.injects_failures
def test_a_request_keeps_its_targets_where_the_state_is_built_anew(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    classes = {"batch": {"ttft_s": 7, "tpot_s": 0.6, "weight": 3, "max_wait_s": 20}}
    engine = make_engine(path, {"classes": classes})
    engine.add(VirtualRequest("chat", arrival_s=0.0, prompt_len=40, output_len=400))
    batch = {"slo_class": "batch"}
    engine.add(VirtualRequest("batch", 0.0, 400, prompt_len=40, extra_args=batch))
    run_until(engine, 1.0)
    scheduler = engine.scheduler

    path.write_text('{"ttft_s": 9, "tpot_s": null, "classes": {"other": {"ttft_s": 3}}}')
    scheduler._changing.look()
    scheduler.sola_guard.failed("a test", ValueError())
    engine.step()

    table = scheduler.sola_monitor.table
    chat, batch_row = (table.values(table.row_of[name]) for name in ("chat", "batch"))
    assert (chat.ttft_s, chat.tpot_s) == (0.4, 0.05)
    assert (batch_row.ttft_s, batch_row.tpot_s, batch_row.weight) == (7, 0.6, 3)
    assert batch_row.served_by_s == pytest.approx(20)
    assert scheduler.sola_monitor.services.names[batch_row.service] == "batch"


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
