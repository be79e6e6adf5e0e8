"""What the scheduler tells an operator: counters since start and the line in the log."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sola_sched.ewt import mean_and_longest
from sola_sched.monitor import StateMonitor
from sola_sched.state import StepState

#: Slots alone are short while so much of the KV memory is free and of the TPOT targets unused.
_FREE_KV = 0.25
_FREE_TPOT = 0.25
#: Share of the steps short of slots that the log line speaks of.
_OFTEN = 0.25


def engine_stats(policy: str, monitor: StateMonitor) -> dict[str, Any]:
    """Counters of requests and attainment since start, waits and the cost model's error now.

    `attainment` and `ttft_attainment` are shares of `num_counted`: a rejected or failed request
    has attained nothing, one that its client ended in time counts neither way. `tpot_attainment`
    is the share of those that finished.
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
        "num_counted": stats.num_counted,
        "num_attained": stats.num_attained,
        "num_ttft_met": stats.num_ttft_met,
        "num_tpot_met": stats.num_tpot_met,
        "attainment": stats.num_attained / counted,
        "ttft_attainment": stats.num_ttft_met / counted,
        "tpot_attainment": stats.num_tpot_met / max(1, stats.num_finished),
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
    }


def waits_for_slots_alone(state: StepState) -> bool:
    """Whether requests wait for a slot while KV memory and all TPOT targets have room for more."""
    rows = state.running
    if not len(state.waiting) or len(rows) < state.max_num_running:
        return False
    if state.num_free_blocks < _FREE_KV * state.num_blocks:
        return False
    step_s = state.decode_step_s(rows) / state.accepted_per_decode
    return step_s <= (1.0 - _FREE_TPOT) * float(state.table.tpot_s[rows].min())


def summary_line(stats: Mapping[str, Any], num_running: int, num_waiting: int) -> str:
    """One line of `SolaSchedulerMixin.sola_stats` for the log."""
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
    return (
        f"{stats['num_finished']} finished, attained {stats['attainment']:.1%} "
        f"(TTFT {stats['ttft_attainment']:.1%}, TPOT {stats['tpot_attainment']:.1%}), "
        f"{num_running} running, {num_waiting} waiting "
        f"(longest estimate {stats['longest_ewt_s']:.1f} s), {stats['num_held']} holds, "
        f"{stats['num_preempted_by_policy']} preemptions by policy, "
        f"{stats['num_rejected']} rejected, step model error {stats['cost_model_error']:.1%}"
        f"{swapped}{ignored}{slots}"
    )
