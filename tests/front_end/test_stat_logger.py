"""Reports of the engine's process become metrics on `/metrics`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from fates import ended, record_of
from prometheus_client import REGISTRY
from vllm.v1.metrics.stats import SchedulerStats

from sola_sched.config.live_options import LiveOptions
from sola_sched.config.sola_config import SolaConfig
from sola_sched.front_end import options_http, stat_logger
from sola_sched.front_end.fates_http import answer
from sola_sched.front_end.stat_logger import SolaStatLogger
from sola_sched.reports import carrier as telemetry_carrier
from sola_sched.reports.fates import FateBook, to_report
from sola_sched.reports.telemetry import TelemetryReport

pytestmark = pytest.mark.vllm


def make_logger(name: str, **sola: Any) -> SolaStatLogger:
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name=name),
        additional_config={"sola_sched": sola},
    )
    return SolaStatLogger(config, [0, 1])


def send(logger: SolaStatLogger, engine: int, text: str) -> SchedulerStats:
    stats = SchedulerStats()
    telemetry_carrier.put(stats.waiting_lora_adapters, text)
    logger.record(stats, None, mm_cache_stats=None, engine_idx=engine)
    return stats


def value(name: str, model_name: str, engine: int, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(
        name, {"model_name": model_name, "engine": str(engine), **labels}
    )


def test_reports_of_several_engines_become_metrics_of_their_own() -> None:
    logger = make_logger("several", classes={"chat": {"ttft_s": 0.5}})
    report = TelemetryReport(
        requests={"chat": [3, 1, 0, 2]},
        num_planned=2,
        num_unplanned={"learning": 4},
        plan_us=[40, 150],
        swapped_bytes=[100, 10],
        num_held=5,
        num_lost=6,
        slack=[1, 0, 2, 3, 0, 4],
        step_model_error=0.07,
    )
    stats = [send(logger, engine, report.to_text()) for engine in (0, 1, 1)]

    assert all(s.waiting_lora_adapters == {} for s in stats)

    def requests(engine: int, outcome: str) -> float | None:
        labels = {"slo_class": "chat", "outcome": outcome}
        return value("sola_requests_total", "several", engine, **labels)

    assert [requests(0, o) for o in ("attained", "missed", "rejected", "aborted")] == [3, 1, 0, 2]
    assert requests(1, "attained") == 6
    assert value("sola_steps_planned_total", "several", 1) == 4
    assert value("sola_steps_unplanned_total", "several", 1, reason="learning") == 8
    assert value("sola_planner_seconds_bucket", "several", 0, le="5e-05") == 1
    assert value("sola_planner_seconds_sum", "several", 0) == pytest.approx(190e-6)
    assert value("sola_swapped_bytes_total", "several", 1, direction="out") == 200
    assert value("sola_requests_held", "several", 1) == 5
    assert value("sola_requests_lost", "several", 1) == 6
    assert value("sola_requests_by_slack", "several", 1, slack="late") == 1
    assert value("sola_requests_by_slack", "several", 1, slack="none") == 4
    assert value("sola_step_model_error", "several", 0) == 0.07
    assert value("sola_prediction_error", "several", 0) is None


def test_each_request_is_known_by_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    book = FateBook()
    monkeypatch.setattr(stat_logger, "BOOK", book)
    logger = make_logger("ranks")

    for rank in (1, 0):
        fates = to_report(ended(record_of(), first=rank))
        report = TelemetryReport(fates=fates, engine={"options": {"ttft_s": 1.0 + rank}})
        send(logger, rank, report.to_text())
    send(logger, 1, TelemetryReport(fates=to_report(ended(record_of(), first=2))).to_text())

    status, told = answer("/sola/requests", "", book)
    assert status == 200
    assert [(fate["request_id"], fate["engine"]) for fate in told["requests"]] == [
        ("r2", 1), ("r0", 0), ("r1", 1),
    ]  # fmt: skip
    assert told["engine"] == {"options": {"ttft_s": 1.0}}
    assert told["engines"] == {"0": told["engine"], "1": {"options": {"ttft_s": 2.0}}}


def test_each_class_is_there_before_its_first_request() -> None:
    make_logger("early", classes={"chat": {"ttft_s": 0.5}})

    for slo_class in ("default", "chat"):
        labels = {"slo_class": slo_class, "outcome": "attained"}
        assert value("sola_requests_total", "early", 1, **labels) == 0


def test_a_report_that_cannot_be_read_ends_the_metrics_and_nothing_else() -> None:
    logger = make_logger("broken")

    stats = [send(logger, 0, text) for text in ("no report", TelemetryReport().to_text())]

    assert all(s.waiting_lora_adapters == {} for s in stats)
    logger.record(None, None)
    assert value("sola_steps_planned_total", "broken", 0) == 0


def test_a_wrong_options_file_is_told_while_the_server_idles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    file = tmp_path / "options.json"
    file.write_text("{}")
    make_logger("idle", options_file=str(file))

    assert value("sola_options_refused", "idle", 0) == 0.0
    file.write_text("{wrong")
    assert value("sola_options_refused", "idle", 0) == 1.0
    file.write_text('{"ttft_s": 1}')
    assert value("sola_options_refused", "idle", 0) == 0.0


def test_options_that_the_engine_refuses_hold_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(options_http, "_in_force", {})
    file = tmp_path / "options.json"
    sola = {"ttft_s": 1.0, "options_file": str(file)}
    logger, engine = make_logger("refused", **sola), LiveOptions({"sola_sched": sola})

    def refuse(config: SolaConfig) -> None:
        raise ValueError("this policy needs a TTFT")

    def told() -> dict[str, Any]:
        (options,) = options_http._in_force.values()
        return options_http.answer(options)

    file.write_text('{"ttft_s": null, "classes": {"new": {}}}')
    engine.look(refuse)
    assert told()["problem"] is None
    for _ in range(2):
        send(logger, 0, TelemetryReport(refused=engine.refusal()).to_text())
        send(logger, 1, TelemetryReport().to_text())

        assert value("sola_options_refused", "refused", 0) == 1.0
        assert told()["options"] == {"ttft_s": 1.0}
        assert "this policy needs a TTFT" in told()["problem"]
    refusal = engine.refusal()
    file.write_text('{"ttft_s": 2.0}')
    send(logger, 0, TelemetryReport(refused=refusal).to_text())
    assert value("sola_options_refused", "refused", 0) == 0.0
    assert told()["options"] == {"ttft_s": 2.0}
