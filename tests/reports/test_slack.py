"""Live requests by the time until their next deadline."""

from __future__ import annotations

import math

import pytest
from still_engine import StillEngine

from sola_sched.config.slo import SloTarget
from sola_sched.reports.slack import KINDS, counts_by_slack, slack_s
from sola_sched.reports.telemetry import Telemetry, TelemetryReport


@pytest.fixture
def engine() -> StillEngine:
    return StillEngine()


def test_it_is_the_first_token_then_the_next_and_the_last_one_besides(engine: StillEngine) -> None:
    table = engine.monitor.table
    row = engine.add("a", SloTarget(1.0, 0.1))

    assert slack_s(table, 0.25).tolist() == pytest.approx([0.75])
    assert slack_s(table, 1.5).tolist() == pytest.approx([-0.5])
    engine.now = 0.5
    engine.first_token(row)
    assert slack_s(table, 0.55).tolist() == pytest.approx([0.05])  # the second at 0.6 s
    assert slack_s(table, 0.75).tolist() == pytest.approx([-0.15])
    table.num_output[row] = 21
    assert slack_s(table, 0.75).tolist() == pytest.approx([1.85])
    table.e2e_due_s[row] = 2.0
    assert slack_s(table, 0.75).tolist() == pytest.approx([1.25])
    engine.monitor.finished("a")
    assert slack_s(table, 0.75).tolist() == []


def test_requests_are_counted_by_it(engine: StillEngine) -> None:
    table = engine.monitor.table
    assert counts_by_slack(table, 0.0) == [0] * len(KINDS)
    for name, ttft_s in enumerate((0.4, 0.55, 0.7, 1.4, 1.6, 9.0, 60.0, math.inf)):
        engine.add(str(name), SloTarget(ttft_s, 0.1))
    begun = engine.add("begun", SloTarget(1.0, math.inf))
    engine.first_token(begun)

    assert counts_by_slack(table, 0.5) == [1, 1, 2, 2, 1, 2]


def test_reports_carry_it(engine: StillEngine) -> None:
    engine.add("a", SloTarget(1.0, 0.1))

    report = Telemetry().report(engine.monitor, 0.5)

    assert report.slack == [0, 0, 1, 0, 0, 0]
    assert TelemetryReport.from_text(report.to_text()).slack == report.slack
