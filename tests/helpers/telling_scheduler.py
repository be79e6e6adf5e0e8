"""A scheduler whose reports a test reads."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.stats import SchedulerStats

import sola_sched
from sola_sched.reports import carrier
from sola_sched.reports.telemetry import TelemetryReport
from sola_sched.vllm_adapter.reports.telemetry_sender import TelemetrySender


class TellingScheduler(sola_sched.Scheduler):
    """Its reports are kept; the virtual engine itself has no statistics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reporting.telemetry = TelemetrySender(
            log_stats=True, load_interval_s=self.sola_config.load_interval_s
        )
        self.received: list[TelemetryReport] = []

    def update_from_output(self, *args: Any) -> Any:
        outputs = super().update_from_output(*args)
        for group in outputs.values():
            reports = carrier.take(group.scheduler_stats)
            self.received += map(TelemetryReport.from_text, reports)
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats:
        return SchedulerStats()
