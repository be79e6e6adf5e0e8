"""A scheduler counts its steps and sends reports with vLLM's statistics; failures stay with it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from telling_scheduler import TellingScheduler
from virtual_model import TINY_MODEL

from sola_sched.simulator import StepTimeModel, StepTrace, VirtualEngine, VirtualRequest
from sola_sched.vllm_adapter.reports.telemetry_sender import TelemetrySender

pytestmark = pytest.mark.vllm

STEP_TIME = StepTimeModel(base_s=0.01, per_decode_s=2e-4, per_prefill_token_s=1e-4)


def make_engine(**sola: Any) -> VirtualEngine:
    return VirtualEngine(
        TellingScheduler,
        model=TINY_MODEL,
        num_blocks=2000,
        max_model_len=2048,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        step_time=STEP_TIME,
        additional_config={"sola_sched": sola},
    )


def workload(count: int, **options: Any) -> list[VirtualRequest]:
    return [
        VirtualRequest(f"r{i}", arrival_s=0.05 * i, prompt_len=200, output_len=20, **options)
        for i in range(count)
    ]


def test_reports_add_up_to_all_steps_and_all_ends() -> None:
    engine = make_engine(ttft_s=0.3, tpot_s=0.05, overload="reject")
    steps: list[StepTrace] = []
    engine.run(workload(60), on_step=steps.append)
    reports = engine.scheduler.received

    ends: Counter[str] = Counter()
    for report in reports:
        for counts in report.requests.values():
            names = ("attained", "missed", "rejected", "aborted")
            ends.update(dict(zip(names, counts, strict=True)))
    by_class = engine.scheduler.sola_stats()["by_class"]
    assert dict(ends) == by_class["default"]
    assert ends.total() == 60
    num_steps = sum(r.num_planned + sum(r.num_unplanned.values()) for r in reports)
    assert num_steps == sum(bool(trace.output.num_scheduled_tokens) for trace in steps)
    assert sum(len(r.plan_us) for r in reports) == sum(r.num_planned for r in reports) > 0
    reasons = {reason for r in reports for reason in r.num_unplanned}
    assert "learning" in reasons
    assert (reports[-1].num_held, reports[-1].num_lost) == (0, 0)
    assert reports[-1].step_model_error is not None


def test_held_and_lost_requests_show_while_they_are_there() -> None:
    engine = make_engine(ttft_s=0.05, tpot_s=0.012, best_effort_share=0.02)
    engine.run(workload(80))
    reports = engine.scheduler.received

    assert max(r.num_held for r in reports) > 0
    assert max(r.num_lost for r in reports) > 0


def test_without_targets_every_step_is_vllms_own_and_says_why() -> None:
    engine = make_engine(ttft_s=None, tpot_s=None)
    engine.run(workload(10))
    reports = engine.scheduler.received

    assert sum(r.num_planned for r in reports) == 0
    assert {reason for r in reports for reason in r.num_unplanned} <= {"learning", "no_targets"}


def test_a_failure_of_the_metrics_is_logged_once_and_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("metrics are broken")

    monkeypatch.setattr("sola_sched.reports.telemetry.num_lost", fail)
    monkeypatch.setattr("sola_sched.reports.telemetry.Telemetry.planned", fail)
    engine = make_engine(ttft_s=0.3, tpot_s=0.05)
    log = []
    monkeypatch.setattr(
        "sola_sched.vllm_adapter.reports.telemetry_sender.logger.exception", log.append
    )
    records = engine.run(workload(20))

    assert all(record.is_finished for record in records)
    assert engine.scheduler.received == []
    assert len(log) == 1


@pytest.mark.parametrize(
    ("plugins", "log_stats", "is_heard"),
    [
        (None, True, True),
        (["sola_sched", "other"], True, True),
        (["other"], True, False),
        (None, False, False),
    ],
)
def test_reports_are_made_only_where_a_front_end_takes_them(
    monkeypatch: pytest.MonkeyPatch, plugins: list[str] | None, log_stats: bool, is_heard: bool
) -> None:
    monkeypatch.setattr(
        "sola_sched.vllm_adapter.reports.telemetry_sender.envs",
        SimpleNamespace(VLLM_PLUGINS=plugins),
    )

    assert TelemetrySender(log_stats=log_stats)._counts.is_heard == is_heard
