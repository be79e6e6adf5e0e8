"""What the scheduler tells an operator: counters since start, and lines in the log for a while."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from sola_sched.core.ewt import mean_and_longest
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import StepState

#: Slots alone are short while so much of the KV memory is free and of the TPOT targets unused.
_FREE_KV = 0.25
_FREE_TPOT = 0.25
#: Share of the steps short of slots that the log line speaks of.
_OFTEN = 0.25
#: Of the figures in the log line those that count since start.
_COUNTERS = (
    "num_finished",
    "num_rejected",
    "num_failed",
    "num_aborted",
    "num_unseen",
    "num_counted",
    "num_attained",
    "num_ttft_met",
    "num_tpot_met",
    "num_e2e",
    "num_e2e_met",
    "num_held",
    "num_preempted_by_policy",
)
_SERVICE_COUNTERS = ("served_s", "num_counted", "num_attained")
_SWAP_COUNTERS = ("num_swapped_out", "num_swapped_in")


class IntervalLog:
    """When a line is due in the log, and what it says: all since the line before.

    One is due after each interval in which the engine works, and whenever it runs out of work
    after requests have ended. After a pause an interval begins with the first request.

    Args:
        interval_s: Time between two lines, seconds, > 0.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._started_s: float | None = None
        self._num_ended = 0
        self._before: Mapping[str, Any] = {}

    def begin(self, now_s: float) -> None:
        """A request has arrived."""
        if self._started_s is None:
            self._started_s = now_s

    def due_s(self, now_s: float, is_idle: bool, num_ended: int) -> float | None:
        """Ask after each step. Where a line is due, the next interval begins.

        Args:
            now_s: On any monotonic clock.
            is_idle: No requests are left.
            num_ended: Requests that have ended since start.

        Returns:
            The seconds that the line is about, None if none is due.
        """
        passed_s = 0.0 if self._started_s is None else now_s - self._started_s
        if is_idle:
            is_due, self._started_s = num_ended != self._num_ended, None
        else:
            is_due = passed_s >= self._interval_s
            self.begin(now_s)
        if not is_due:
            return None
        self._num_ended = num_ended
        self._started_s = None if is_idle else now_s
        return passed_s

    def line(
        self, passed_s: float, stats: Mapping[str, Any], *, num_running: int, num_waiting: int
    ) -> str:
        """The line that is due.

        Args:
            passed_s: From `due_s`.
            stats: `SolaSchedulerMixin.sola_stats`, since start.
            num_running, num_waiting: Requests now.
        """
        text = summary_line(since(stats, self._before), num_running, num_waiting)
        self._before = stats
        return f"last {passed_s:.1f} s: {text}"


def since(stats: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """`stats` with the counters of the log line less what they were `before`."""
    less: dict[str, Any] = {name: stats[name] - before.get(name, 0) for name in _COUNTERS}
    if swap := stats.get("swap"):
        swap_before = before.get("swap") or {}
        swapped = {name: swap[name] - swap_before.get(name, 0) for name in _SWAP_COUNTERS}
        less["swap"] = {**swap, **swapped}
    less["services"] = {
        name: {**now, **{key: now[key] - then.get(key, 0) for key in _SERVICE_COUNTERS}}
        for name, now in stats["services"].items()
        for then in [before.get("services", {}).get(name, {})]
    }
    return {**stats, **less}


def engine_stats(policy: str, monitor: StateMonitor) -> dict[str, Any]:
    """Counters of requests and attainment since start, waits and the cost model's error now.

    `attainment` and `ttft_attainment` are shares of `num_counted`: a rejected or failed request
    has attained nothing, one that its client ended in time counts neither way. `tpot_attainment`
    is the share of those that finished, `e2e_attainment` of those of them that had such a target
    (NaN without any).
    """
    stats = monitor.stats
    counted = max(1, stats.num_counted)
    mean_ewt_s, longest_ewt_s = mean_and_longest(monitor.table)
    return {
        "policy": policy,
        "num_steps": stats.num_steps,
        "num_finished": stats.num_finished,
        "num_rejected": stats.num_rejected,
        "num_failed": stats.num_failed,
        "num_aborted": stats.num_aborted,
        "num_unseen": stats.num_unseen,
        "num_counted": stats.num_counted,
        "num_attained": stats.num_attained,
        "num_ttft_met": stats.num_ttft_met,
        "num_tpot_met": stats.num_tpot_met,
        "num_e2e": stats.num_e2e,
        "num_e2e_met": stats.num_e2e_met,
        "attainment": stats.num_attained / counted,
        "ttft_attainment": stats.num_ttft_met / counted,
        "tpot_attainment": stats.num_tpot_met / max(1, stats.num_finished),
        "e2e_attainment": stats.num_e2e_met / stats.num_e2e if stats.num_e2e else math.nan,
        "services": _services(monitor),
        "by_class": {name: dataclasses.asdict(ends) for name, ends in stats.by_class.items()},
        "max_wait_s": stats.max_wait_s,
        "mean_ewt_s": mean_ewt_s,
        "longest_ewt_s": longest_ewt_s,
        "num_predicted": stats.num_predicted,
        "num_late_predictions": stats.num_late_predictions,
        "prediction_error": monitor.trust.error,
        "histogram_error": monitor.trust.usual_error,
        "trusts_predictions": monitor.trust.is_trusted,
        "cost_model_error": monitor.cost.mean_abs_error,
        "cost_model_ready": monitor.cost.is_ready,
        "cost_model_relearned": monitor.cost.is_relearned,
    }


def _services(monitor: StateMonitor) -> dict[str, dict[str, float]]:
    """Of each service, where there are several: its share, its time, and what it attained."""
    services, by_class = monitor.services, monitor.stats.by_class
    if len(services) == 1:
        return {}
    return {
        name: {
            "share": float(services.share[index]),
            "served_s": float(services.served_s[index]),
            "owed_s": float(services.owed_s[index]),
            "num_counted": by_class[name].num_counted if name in by_class else 0,
            "num_attained": by_class[name].attained if name in by_class else 0,
        }
        for index, name in enumerate(services.names)
    }


def _by_service(services: Mapping[str, Mapping[str, float]]) -> str:
    """Of each service with ends or time: what it attained, and its part of the time."""
    total_s = sum(each["served_s"] for each in services.values())
    parts = [
        f"{name} "
        + (f"{each['num_attained'] / each['num_counted']:.1%}" if each["num_counted"] else "-")
        + (f" in {each['served_s'] / total_s:.0%} of the time" if total_s else "")
        for name, each in services.items()
        if each["num_counted"] or each["served_s"]
    ]
    return f"; {', '.join(parts)}" if parts else ""


def waits_for_slots_alone(state: StepState) -> bool:
    """Whether requests wait for a slot while KV memory and all TPOT targets have room for more."""
    rows = state.running
    if not len(state.waiting) or len(rows) < state.max_num_running:
        return False
    if state.num_free_blocks < _FREE_KV * state.num_blocks:
        return False
    step_s = state.decode_step_s(rows) / state.accepted_per_decode
    return step_s <= (1.0 - _FREE_TPOT) * state.table.shortest_tpot_s(rows)


def summary_line(stats: Mapping[str, Any], num_running: int, num_waiting: int) -> str:
    """One line for the log of what `SolaSchedulerMixin.sola_stats` gives, or `since` of it."""
    ignored = ""
    if not stats["trusts_predictions"]:
        ignored = (
            f", length predictions not used (error {stats['prediction_error']:.2f}, without a "
            f"predictor {stats['histogram_error']:.2f})"
        )
    slots = ""
    if stats["short_of_slots"] > _OFTEN:
        slots = (
            f"; in {stats['short_of_slots']:.0%} of the latest steps requests waited for a slot "
            "with KV memory and TPOT to spare: raise --max-num-seqs"
        )
    swapped = ""
    if swap := stats.get("swap"):
        crossover = swap["crossover_tokens"]
        swapped = (
            f", {swap['num_swapped_out']} KV tokens copied to the host and "
            f"{swap['num_swapped_in']} back"
        )
        if crossover is not None:
            swapped += f" (worth it from {crossover} on)"
    others = "".join(
        f", {stats[name]} {text}"
        for name, text in (("num_failed", "failed"), ("num_unseen", "with unknown outcome"))
        if stats[name]
    )
    error = stats["cost_model_error"]
    attained, ttft, tpot, e2e = (
        f"{stats[num] / stats[whole]:.1%}" if stats[whole] else "-"
        for num, whole in (
            ("num_attained", "num_counted"),
            ("num_ttft_met", "num_counted"),
            ("num_tpot_met", "num_finished"),
            ("num_e2e_met", "num_e2e"),
        )
    )
    last = f", last token {e2e}" if stats["num_e2e"] else ""
    return (
        f"{stats['num_finished']} finished, {stats['num_rejected']} rejected, "
        f"{stats['num_aborted']} aborted{others}, "
        f"attained {attained} (TTFT {ttft}, TPOT {tpot}{last}), "
        f"{num_running} running, {num_waiting} waiting "
        f"(longest estimate {stats['longest_ewt_s']:.1f} s), {stats['num_held']} holds, "
        f"{stats['num_preempted_by_policy']} preemptions by policy, "
        f"step model error {'-' if math.isnan(error) else f'{error:.1%}'}"
        f"{swapped}{ignored}{slots}{_by_service(stats['services'])}"
    )
