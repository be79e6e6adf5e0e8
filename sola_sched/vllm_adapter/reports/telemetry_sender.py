"""The scheduler's side of the metrics: counts each step, and sends reports with vLLM's statistics.

Nothing here may reach the engine: what is raised is logged once, and the step goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.metrics.stats import SchedulerStats

from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import StepPlan
from sola_sched.reports import carrier as telemetry_carrier
from sola_sched.reports.telemetry import REPORT_INTERVAL_S, Telemetry

logger = init_logger("vllm.sola_sched")

#: Name of the plug-in that brings the front end's part.
_PLUGIN = "sola_sched"


class TelemetrySender:
    """Counts for Prometheus.

    Args:
        log_stats: Whether vLLM sends statistics.
        load_interval_s: Seconds between two reports with the load in them; None for none.
    """

    def __init__(self, *, log_stats: bool, load_interval_s: float | None = None) -> None:
        reason, allowed = None, getattr(envs, "VLLM_PLUGINS", None)
        if not log_stats:
            reason = "vLLM's statistics are off"
        elif allowed is not None and _PLUGIN not in allowed:
            reason = f"VLLM_PLUGINS leaves out '{_PLUGIN}'"
        elif not telemetry_carrier.is_possible(SchedulerStats):
            reason = "this vLLM's SchedulerStats cannot carry them"
        if reason:
            logger.info("sola_sched: no metrics: %s", reason)
        self._sends_load = load_interval_s is not None
        interval_s = min(REPORT_INTERVAL_S, load_interval_s or REPORT_INTERVAL_S)
        self._counts = Telemetry(is_heard=reason is None, interval_s=interval_s)
        self._has_failed = False

    def count_step(
        self, plan: StepPlan, plan_s: float, num_held: int, why_unplanned: Callable[[StepPlan], str]
    ) -> None:
        """A step was scheduled.

        Args:
            plan: Its plan.
            plan_s: Time that this took.
            num_held: Requests with a slot that sit it out.
            why_unplanned: Gives the reason if a step with this plan is in vLLM's own order, an
                empty string if not.
        """
        try:
            self._counts.held(num_held)
            if reason := why_unplanned(plan):
                self._counts.unplanned(reason)
            else:
                self._counts.planned(plan_s)
        except Exception:
            self._failed()

    def send(
        self,
        outputs: Mapping[int, Any],
        monitor: StateMonitor,
        *,
        is_idle: bool,
        is_followed: bool,
        swapped_bytes: Callable[[], tuple[int, int]],
        load: Callable[[], str],
        engine: Callable[[], dict[str, Any] | None],
        refusal: Callable[[], dict[str, Any] | None],
    ) -> None:
        """Send what is new with a step's `outputs`, now and then.

        Args:
            outputs: vLLM's `EngineCoreOutputs` by client.
            monitor: Counts the ends of requests.
            is_idle: Whether no request is left.
            is_followed: Whether the monitor follows the engine.
            swapped_bytes: Gives those to the host and back, since start.
            load: Gives the load, for routers.
            engine: Gives what it is, as `fates.engine_facts`.
            refusal: Gives `LiveOptions.refusal`.
        """
        try:
            now_s = monitor.clock()
            if not self._counts.is_due(now_s, is_idle=is_idle, fates=monitor.fates):
                return
            carrier = telemetry_carrier.find_carrier(outputs)
            if carrier is not None:
                report = self._counts.report(monitor, now_s, swapped_bytes())
                report.refused = refusal()
                if not is_followed:  # nobody knows
                    report.num_held = report.num_lost = 0
                    report.slack = [0] * len(report.slack)
                elif self._sends_load:
                    report.load = load()
                if report.fates is not None:
                    report.engine = engine()
                telemetry_carrier.put(carrier, report.to_text())
        except Exception:
            self._failed()

    def _failed(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.exception("sola_sched: metrics are incomplete from now on")
