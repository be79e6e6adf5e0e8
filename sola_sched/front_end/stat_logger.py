"""Prometheus metrics on vLLM's own `/metrics`, from the reports of the engine cores.

Runs in the front end, beside vLLM's loggers; see `docs/metrics.md` for the names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from sola_sched.config.slo import DEFAULT_CLASS
from sola_sched.front_end.fates_http import BOOK
from sola_sched.front_end.load_feed import FEED
from sola_sched.front_end.options_http import look, options_in_force
from sola_sched.reports import carrier as telemetry_carrier
from sola_sched.reports.fates import tpot_s, ttft_s
from sola_sched.reports.slack import KINDS
from sola_sched.reports.telemetry import DIRECTIONS, OUTCOMES, TelemetryReport

logger = init_logger("vllm.sola_sched")

#: Seconds.
_PLAN_BUCKETS = (50e-6, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_TTFT_BUCKETS = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0),
)
_TPOT_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
#: Reasons that operators are alerted to: their counts are there before they first grow.
_ALERTED = ("failed", "slow", "aside")
#: As vLLM labels its own.
_LABELS = ("model_name", "engine")

#: A process may have several engines one after another, but each name only once.
_registered: dict[str, Any] = {}


class SolaStatLogger(AggregateStatLoggerBase):  # type: ignore[misc, unused-ignore]
    """Adds each report of a scheduler of ours to the metrics; never raises.

    Args:
        vllm_config: vLLM's configuration.
        engine_indexes: Engines that report to this front end.
    """

    def __init__(self, vllm_config: Any, engine_indexes: Sequence[int] = (0,), **_: Any) -> None:
        self._model_name = vllm_config.model_config.served_model_name
        self._is_broken = False
        self._is_alone = len(engine_indexes) == 1  # a feed is of one engine
        try:
            self._start(vllm_config, engine_indexes)
        except Exception:
            self._is_broken = True
            logger.exception("sola_sched: no metrics, they could not be registered")

    def _start(self, vllm_config: Any, engine_indexes: Sequence[int]) -> None:
        self._requests = _metric(
            Counter, "sola_requests", "Requests that have ended.", "slo_class", "outcome"
        )
        self._held = _metric(
            Gauge, "sola_requests_held", "Requests with a slot that sat out the latest step."
        )
        self._lost = _metric(
            Gauge, "sola_requests_lost", "Unfinished requests that cannot meet their targets."
        )
        self._by_slack = _metric(
            Gauge, "sola_requests_by_slack", "Unfinished requests by the time until their next "
            "deadline.", "slack",
        )  # fmt: skip
        self._planned = _metric(Counter, "sola_steps_planned", "Steps that followed a plan.")
        self._unplanned = _metric(
            Counter, "sola_steps_unplanned", "Steps in vLLM's own order.", "reason"
        )
        self._planner_s = _metric(
            Histogram, "sola_planner_seconds", "Time that a plan took.", buckets=_PLAN_BUCKETS
        )
        self._step_model_error = _metric(
            Gauge, "sola_step_model_error", "Mean relative error of predicted step times."
        )
        self._prediction_error = _metric(
            Gauge, "sola_prediction_error", "Mean |log(predicted / true output length)|."
        )
        self._swapped = _metric(
            Counter, "sola_swapped_bytes", "KV copied to the host and back.", "direction"
        )
        self._ttft_s = _metric(
            Histogram, "sola_ttft_seconds", "From arrival to the first token.", "slo_class",
            buckets=_TTFT_BUCKETS,
        )  # fmt: skip
        self._tpot_s = _metric(
            Histogram, "sola_tpot_seconds", "Mean time of each further token.", "slo_class",
            buckets=_TPOT_BUCKETS,
        )  # fmt: skip
        self._is_refused = _metric(
            Gauge, "sola_options_refused", "Whether the options file says something wrong."
        )
        self._options = options_in_force(vllm_config.additional_config)
        classes = (DEFAULT_CLASS, *self._options.config.classes)
        for index in engine_indexes:  # so that a rate is there from the first request on
            at = (self._model_name, str(index))
            for name, outcome in product(classes, OUTCOMES):
                self._requests.labels(*at, name, outcome)
            for metric, name in product((self._ttft_s, self._tpot_s), classes):
                metric.labels(*at, name)
            for kind in KINDS:
                self._by_slack.labels(*at, kind)
            for reason in _ALERTED:
                self._unplanned.labels(*at, reason)
            for direction in DIRECTIONS:
                self._swapped.labels(*at, direction)
            for metric in (
                self._held,
                self._lost,
                self._planned,
                self._planner_s,
                self._is_refused,
            ):
                metric.labels(*at)
            if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):  # files hold values alone
                self._is_refused.labels(*at).set_function(self._refused_now)

    def _refused_now(self) -> float:
        """Asked for at each scrape: an idle server's file changes too."""
        try:
            look(self._options)
        except Exception:
            logger.debug("sola_sched: the options file could not be looked at", exc_info=True)
        return float(self._options.problem is not None)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **_: Any,
    ) -> None:
        """Take the reports out of `scheduler_stats` and add them up."""
        if scheduler_stats is None:
            return
        texts = telemetry_carrier.take(scheduler_stats)
        if self._is_broken:
            return
        try:
            look(self._options)  # as often as the engine does, so that both see the same files
        except Exception:  # the engine says so too, and goes on with those it has
            logger.exception("sola_sched: the options file could not be looked at")
        try:
            for text in texts:
                self._add(TelemetryReport.from_text(text), engine_idx)
        except Exception:
            self._is_broken = True
            logger.exception("sola_sched: no more metrics, a report could not be read")

    def log_engine_initialized(self) -> None:
        """Nothing to say: the scheduler has said it."""

    def _add(self, report: TelemetryReport, rank: int) -> None:
        engine = str(rank)
        if self._is_alone:
            FEED.publish(report.load)
        if report.fates is not None:
            self._observe(BOOK.add(report.fates, rank), engine)
            if report.engine is not None:
                BOOK.engines[rank] = report.engine
        if report.refused is not None:
            self._options.follow(report.refused)
        at = (self._model_name, engine)
        self._is_refused.labels(*at).set(self._options.problem is not None)
        for name, counts in report.requests.items():
            for outcome, count in zip(OUTCOMES, counts, strict=True):
                self._requests.labels(*at, name, outcome).inc(count)
        self._planned.labels(*at).inc(report.num_planned)
        for reason, count in report.num_unplanned.items():
            self._unplanned.labels(*at, reason).inc(count)
        observe = self._planner_s.labels(*at).observe
        for microseconds in report.plan_us:
            observe(1e-6 * microseconds)
        for direction, count in zip(DIRECTIONS, report.swapped_bytes, strict=True):
            self._swapped.labels(*at, direction).inc(count)
        self._held.labels(*at).set(report.num_held)
        self._lost.labels(*at).set(report.num_lost)
        for kind, count in zip(KINDS, report.slack, strict=True):
            self._by_slack.labels(*at, kind).set(count)
        for gauge, error in (
            (self._step_model_error, report.step_model_error),
            (self._prediction_error, report.prediction_error),
        ):
            if error is not None:
                gauge.labels(*at).set(error)

    def _observe(self, fates: Iterable[Mapping[str, Any]], engine: str) -> None:
        for fate in fates:
            at = self._model_name, engine, fate["slo_class"]
            for metric, seconds in ((self._ttft_s, ttft_s(fate)), (self._tpot_s, tpot_s(fate))):
                if seconds is not None:
                    metric.labels(*at).observe(seconds)


def _metric(
    kind: Callable[..., Any],
    name: str,
    documentation: str,
    *labels: str,
    **options: Any,
) -> Any:
    if kind is Gauge:  # with several API servers, whichever was told last
        options["multiprocess_mode"] = "mostrecent"
    if name not in _registered:
        _registered[name] = kind(name, documentation, (*_LABELS, *labels), **options)
    return _registered[name]
