"""What is counted for `/metrics`, and that it survives the way to the front end."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from still_engine import StillEngine

from sola_sched.reports import carrier as telemetry_carrier
from sola_sched.reports.telemetry import REPORT_INTERVAL_S, Telemetry, TelemetryReport, num_lost


@pytest.fixture
def engine() -> StillEngine:
    return StillEngine()


def test_reports_hold_what_is_new_since_the_last_one(engine: StillEngine) -> None:
    telemetry = Telemetry()
    for name, slo_class in (("a", "chat"), ("b", "chat"), ("c", "default")):
        engine.first_token(engine.add(name, slo_class=slo_class))
    engine.monitor.finished("a")
    telemetry.planned(250e-6)
    telemetry.unplanned("learning")
    first = telemetry.report(engine.monitor, 0.0, (100, 10))
    engine.monitor.finished("b", by_itself=False)
    engine.monitor.finished("c", by_itself=False, rejected=True)
    telemetry.planned(1e-3)
    second = telemetry.report(engine.monitor, 1.0, (100, 30))
    third = telemetry.report(engine.monitor, 2.0, (100, 30))

    assert (first.requests, second.requests, third.requests) == (
        {"chat": [1, 0, 0, 0]},
        {"chat": [0, 0, 0, 1], "default": [0, 0, 1, 0]},
        {},
    )
    assert [r.num_planned for r in (first, second, third)] == [1, 1, 0]
    assert [r.num_unplanned for r in (first, second)] == [{"learning": 1}, {}]
    assert [r.plan_us for r in (first, second, third)] == [[250], [1000], []]
    assert [r.swapped_bytes for r in (first, second, third)] == [[100, 10], [0, 20], [0, 0]]


def test_a_report_is_due_before_ends_are_forgotten(engine: StillEngine) -> None:
    telemetry, monitor = Telemetry(), engine.monitor
    num_told = 0
    telemetry.report(monitor, 5.0)
    for number in range(3000):
        engine.add(f"r{number}")
        monitor.finished(f"r{number}", by_itself=False)
        if telemetry.is_due(5.0, is_idle=False, fates=monitor.fates):
            num_told += len((telemetry.report(monitor, 5.0).fates or {"ids": []})["ids"])
    assert num_told > 3000 - monitor.fates.most
    num_told += len((telemetry.report(monitor, 6.0).fates or {"ids": []})["ids"])
    assert num_told == 3000


def test_a_report_is_due_at_intervals_and_before_the_engine_goes_idle(engine: StillEngine) -> None:
    telemetry = Telemetry()
    assert telemetry.is_due(5.0, is_idle=False)
    telemetry.report(engine.monitor, 5.0)
    assert not telemetry.is_due(5.0 + 0.9 * REPORT_INTERVAL_S, is_idle=False)
    assert telemetry.is_due(5.0 + 0.9 * REPORT_INTERVAL_S, is_idle=True)
    assert telemetry.is_due(5.0 + REPORT_INTERVAL_S, is_idle=False)


def test_nothing_piles_up_where_nobody_reads_reports(engine: StillEngine) -> None:
    telemetry = Telemetry(is_heard=False)
    for _ in range(100):
        telemetry.planned(1e-3)
    assert not telemetry.is_due(1e9, is_idle=True)
    assert telemetry.report(engine.monitor, 0.0).plan_us == []


def test_the_times_of_a_long_interval_are_bounded(engine: StillEngine) -> None:
    telemetry = Telemetry()
    for _ in range(10_000):
        telemetry.planned(1e-3)
    report = telemetry.report(engine.monitor, 0.0)
    assert report.num_planned == 10_000
    assert len(report.plan_us) == 4096


def test_requests_are_lost_once_no_outcome_meets_their_targets(engine: StillEngine) -> None:
    waits, late, slow, fast = (engine.add(name) for name in ("waits", "late", "slow", "fast"))
    engine.add("patient")
    engine.monitor.table.due_s[waits + 4] = math.inf
    engine.now = 0.5
    engine.first_token(slow)
    assert num_lost(engine.monitor.table, 0.9) == 0  # 8 tokens at 0.1 s may take until 1.3 s
    engine.now = 1.1
    engine.first_token(late)
    engine.monitor.table.due_s[fast] = 2.0
    engine.first_token(fast)

    assert num_lost(engine.monitor.table, 1.2) == 2  # waits, late
    assert num_lost(engine.monitor.table, 1.4) == 3  # slow too
    engine.monitor.finished("late")
    assert num_lost(engine.monitor.table, 1.4) == 2
    engine.monitor.table.e2e_due_s[fast] = 1.3
    assert num_lost(engine.monitor.table, 1.2) == 1  # waits
    assert num_lost(engine.monitor.table, 1.4) == 3  # the last token of fast too


def test_a_report_arrives_as_it_was_sent_and_leaves_nothing_behind(engine: StillEngine) -> None:
    telemetry = Telemetry()
    engine.first_token(engine.add("a", slo_class='odd "name", with: signs'))
    engine.monitor.finished("a")
    telemetry.planned(1e-3)
    report = telemetry.report(engine.monitor, 0.0)
    adapters = {"an adapter": 1}
    stats = SimpleNamespace(waiting_lora_adapters=adapters)
    outputs = {0: SimpleNamespace(scheduler_stats=None), 1: SimpleNamespace(scheduler_stats=stats)}

    carrier = telemetry_carrier.find_carrier(outputs)
    assert carrier is adapters
    telemetry_carrier.put(carrier, report.to_text())

    assert [TelemetryReport.from_text(text) for text in telemetry_carrier.take(stats)] == [report]
    assert adapters == {"an adapter": 1}
    assert telemetry_carrier.take(stats) == []


def test_without_statistics_there_is_no_carrier() -> None:
    assert telemetry_carrier.find_carrier({}) is None
    assert telemetry_carrier.find_carrier({0: SimpleNamespace(scheduler_stats=None)}) is None
    without = SimpleNamespace(scheduler_stats=SimpleNamespace())
    assert telemetry_carrier.find_carrier({0: without}) is None
    assert telemetry_carrier.take(SimpleNamespace()) == []
