"""What the scheduler counts for Prometheus, in plain numbers, and the form in which it travels.

vLLM answers `/metrics` in another process than the one that schedules. What was counted since the
last report goes there as one short text; `sola_sched.front_end.stat_logger` turns it into
metrics. Each report is increments, so that it does not matter which of several front ends gets
which one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sola_sched.core.fates import Fates
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import FREE, IntArray, RequestTable
from sola_sched.reports import fates
from sola_sched.reports.slack import KINDS, counts_by_slack

#: Seconds between two reports while the engine works.
REPORT_INTERVAL_S = 1.0
#: Plans whose times one report may hold; times beyond that, at over 4,000 steps/s, are left out.
_MAX_TIMES = 4096

OUTCOMES = ("attained", "missed", "rejected", "aborted")
DIRECTIONS = ("out", "in")


@dataclass(slots=True)
class TelemetryReport:
    """What happened since the last report, and how it stands now.

    Attributes:
        requests: Ends by SLO class, in the order of `OUTCOMES`.
        num_planned: Steps that followed a plan.
        num_unplanned: Steps in vLLM's own order, by the reason.
        plan_us: Time of each plan, microseconds.
        swapped_bytes: KV copied, in the order of `DIRECTIONS`.
        num_held: Requests with a slot that sat out the latest step.
        num_lost: Unfinished requests that cannot meet their targets any more.
        slack: Unfinished requests by the time until their next deadline, in the order of
            `slack.KINDS`.
        step_model_error: Mean relative error of the step-time model; None before any.
        prediction_error: Mean abs(log(predicted / true length)); None without predictions.
        load: For routers, see `load_text.to_json`; None where it is not asked for or not known.
        fates: Requests that have ended, as `fates.to_report`; None without any.
        engine: On which they ran, as `fates.engine_facts`; None where that is not known.
        refused: Of the options file, as `LiveOptions.refusal`; None while the file holds.
    """

    requests: dict[str, list[int]] = field(default_factory=dict)
    num_planned: int = 0
    num_unplanned: dict[str, int] = field(default_factory=dict)
    plan_us: list[int] = field(default_factory=list)
    swapped_bytes: list[int] = field(default_factory=lambda: [0, 0])
    num_held: int = 0
    num_lost: int = 0
    slack: list[int] = field(default_factory=lambda: [0] * len(KINDS))
    step_model_error: float | None = None
    prediction_error: float | None = None
    load: str | None = None
    fates: dict[str, Any] | None = None
    engine: dict[str, Any] | None = None
    refused: dict[str, Any] | None = None

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_text(cls, text: str) -> TelemetryReport:
        """The report that `to_text` wrote."""
        return cls(**json.loads(text))


class Telemetry:
    """Counts steps, and makes a report of them and of what a monitor has counted.

    Args:
        is_heard: Whether anybody reads reports; without, times of plans are not kept.
        interval_s: Seconds between two reports while the engine works.
    """

    def __init__(self, *, is_heard: bool = True, interval_s: float = REPORT_INTERVAL_S) -> None:
        self.is_heard = is_heard
        self._interval_s = interval_s
        self._num_planned = 0
        self._num_unplanned: Counter[str] = Counter()
        self._plan_us: list[int] = []
        self._num_held = 0
        self._reported: dict[str, list[int]] = {}
        self._reported_bytes = (0, 0)
        self._next_report_s = -math.inf
        self._num_fates = 0

    def planned(self, seconds: float) -> None:
        """A step follows a plan that took so long."""
        self._num_planned += 1
        if self.is_heard and len(self._plan_us) < _MAX_TIMES:
            self._plan_us.append(round(1e6 * seconds))

    def unplanned(self, reason: str) -> None:
        """A step is in vLLM's own order; `reason` is one of a few."""
        self._num_unplanned[reason] += 1

    def held(self, num_requests: int) -> None:
        """So many requests with a slot sit out the step."""
        self._num_held = num_requests

    def is_due(self, now_s: float, *, is_idle: bool, fates: Fates | None = None) -> bool:
        """Whether it is time for a report: at intervals, and before the engine goes idle.

        Args:
            now_s: On the monitor's clock.
            is_idle: Whether no request is left.
            fates: It is time too when half of what these keep has not been reported.
        """
        num_new = 0 if fates is None else fates.num_ended - self._num_fates
        is_half_new = fates is not None and 2 * num_new >= fates.most
        return self.is_heard and (is_idle or is_half_new or now_s >= self._next_report_s)

    def report(
        self, monitor: StateMonitor, now_s: float, swapped_bytes: tuple[int, int] = (0, 0)
    ) -> TelemetryReport:
        """What happened since the last report; the next one starts from here.

        Args:
            now_s: On the monitor's clock.
            swapped_bytes: Since start, in the order of `DIRECTIONS`.
        """
        self._next_report_s = now_s + self._interval_s
        report = TelemetryReport(
            requests=self._new_ends(monitor),
            num_planned=self._num_planned,
            num_unplanned=dict(self._num_unplanned),
            plan_us=self._plan_us,
            swapped_bytes=[
                now - before
                for now, before in zip(swapped_bytes, self._reported_bytes, strict=True)
            ],
            num_held=self._num_held if len(monitor.table) else 0,
            num_lost=num_lost(monitor.table, now_s),
            slack=counts_by_slack(monitor.table, now_s),
            step_model_error=_finite(monitor.cost.mean_abs_error),
            prediction_error=_finite(monitor.trust.error),
        )
        if monitor.fates.num_ended > self._num_fates:
            report.fates = fates.to_report(monitor.fates.since(self._num_fates, monitor.cost))
            self._num_fates = monitor.fates.num_ended
        self._num_planned, self._plan_us = 0, []
        self._num_unplanned.clear()
        self._reported_bytes = swapped_bytes
        return report

    def _new_ends(self, monitor: StateMonitor) -> dict[str, list[int]]:
        new = {}
        for name, outcomes in monitor.stats.by_class.items():
            counts = [getattr(outcomes, outcome) for outcome in OUTCOMES]
            before = self._reported.get(name, [0] * len(OUTCOMES))
            if counts != before:
                new[name] = [now - then for now, then in zip(counts, before, strict=True)]
                self._reported[name] = counts
        return new


def num_lost(table: RequestTable, now_s: float) -> int:
    """Live requests that have lost a target; see `is_lost`."""
    (rows,) = (table.phase != FREE).nonzero()
    return int(np.count_nonzero(is_lost(table, rows, now_s)))


def is_lost(table: RequestTable, rows: IntArray, now_s: float) -> NDArray[np.bool_]:
    """Whether the first or last token of each row is late, or TPOT would be missed at full length.

    A lower bound of those that a planner gives up: it knows how long a step takes as well.
    """
    first_s = table.first_token_s[rows]
    has_begun = ~np.isnan(first_s)
    is_late = np.where(has_begun, first_s, now_s) > table.due_s[rows]
    is_late |= now_s > table.e2e_due_s[rows]
    allowed_s = table.tpot_s[rows] * np.maximum(1, table.max_tokens[rows] - 1)
    result: NDArray[np.bool_] = is_late | (has_begun & (now_s - first_s > allowed_s))
    return result


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
