"""Counters and the log line, from the events of two requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from states import FixedLengths, StateBuilder, make_cost

from sola_sched.config.slo import SloTarget
from sola_sched.core.monitor import StateMonitor
from sola_sched.reports.log import IntervalLog, engine_stats, summary_line, waits_for_slots_alone

COUNTS = {
    "num_held": 3,
    "num_preempted_by_policy": 1,
    "short_of_slots": 0.0,
}


def test_the_log_line_tells_how_many_met_their_targets() -> None:
    now = [0.0]
    monitor = StateMonitor(make_cost(), FixedLengths(), lambda: now[0])
    nothing = np.empty(0, dtype=np.int64)
    for name, ttft_s in (("met", 2.0), ("missed", 0.5)):
        row = monitor.add(
            name, num_prompt_tokens=10, max_tokens=9, slo=SloTarget(ttft_s, 1.0), arrival_s=now[0]
        )
        monitor.admitted(row, num_computed=0, prefill_target=10)
        monitor.scheduled(nothing, np.array([row]), np.array([10]))
        now[0] += 1.0
        monitor.completed()
        monitor.finished(name)
    stats = engine_stats("attain", monitor)
    assert (stats["num_finished"], stats["attainment"], stats["max_wait_s"]) == (2, 0.5, 1.0)
    line = summary_line(stats | COUNTS, num_running=4, num_waiting=7)
    assert line.startswith(
        "2 finished, 0 rejected, 0 aborted, attained 50.0% (TTFT 50.0%, TPOT 100.0%), 4 running, 7 "
    )
    assert "3 holds, 1 preemptions by policy, step model error" in line


def test_the_log_line_tells_from_which_length_on_swapping_is_worth_it() -> None:
    stats = engine_stats("attain", StateMonitor(make_cost(), FixedLengths(), lambda: 0.0)) | COUNTS
    swap = {"num_swapped_out": 900, "num_swapped_in": 700, "crossover_tokens": 120}
    line = summary_line(stats | {"swap": swap}, num_running=4, num_waiting=7)
    assert "900 KV tokens copied to the host and 700 back (worth it from 120 on)" in line
    unknown = summary_line(stats | {"swap": swap | {"crossover_tokens": None}}, 4, 7)
    assert "700 back" in unknown
    assert "worth it" not in unknown


def test_nothing_has_happened_yet() -> None:
    monitor = StateMonitor(make_cost(), FixedLengths(), lambda: 0.0)
    line = summary_line(engine_stats("paper", monitor) | COUNTS, 0, 0)
    assert "0 finished, 0 rejected, 0 aborted, attained - (TTFT -, TPOT -)" in line
    assert line.endswith("step model error -")


@pytest.mark.parametrize(
    ("change", "is_short"),
    [
        ({}, True),
        ({"max_num_running": 5}, False),  # a slot is free
        ({"num_free_blocks": 20}, False),  # of 100: memory is short as well
        ({"tpot_s": 0.018}, False),  # four decodes take 14 ms
        ({"num_waiting": 0}, False),
    ],
)
def test_slots_alone_are_short(change: dict[str, Any], is_short: bool) -> None:
    given = {"max_num_running": 4, "num_free_blocks": 50, "tpot_s": 0.1, "num_waiting": 1} | change
    tpot_s, num_waiting = given.pop("tpot_s"), given.pop("num_waiting")
    b = StateBuilder(num_blocks=100, **given)
    for i in range(4):
        b.decode(f"d{i}", first_ago_s=1.0, out=10, slo=SloTarget(1.0, tpot_s))
    for i in range(num_waiting):
        b.waiting(f"w{i}", waited_s=0.0)
    assert waits_for_slots_alone(b.build()) == is_short


def test_the_log_line_says_what_to_do_where_slots_are_often_short() -> None:
    stats = engine_stats("attain", StateMonitor(make_cost(), FixedLengths(), lambda: 0.0)) | COUNTS
    line = summary_line(stats | {"short_of_slots": 0.6}, num_running=4, num_waiting=7)
    assert line.endswith(
        "in 60% of the latest steps requests waited for a slot with KV memory and TPOT to spare: "
        "raise --max-num-seqs"
    )
    assert "max-num-seqs" not in summary_line(stats | {"short_of_slots": 0.1}, 4, 7)


def test_a_line_tells_of_its_interval_and_leaves_the_counters_since_start_as_they_are() -> None:
    monitor = StateMonitor(make_cost(), FixedLengths(), lambda: 0.0)
    log = IntervalLog(10.0)

    def line(passed_s: float, num_held: int, **ended: int) -> str:
        for name, value in ended.items():
            setattr(monitor.stats, name, getattr(monitor.stats, name) + value)
        ends = monitor.stats.by_class["default"]
        ends.attained, ends.rejected = monitor.stats.num_attained, monitor.stats.num_rejected
        stats = engine_stats("attain", monitor) | COUNTS | {"num_held": num_held}
        return log.line(passed_s, stats, num_running=1, num_waiting=2)

    met = {"num_finished": 40, "num_attained": 40, "num_ttft_met": 40, "num_tpot_met": 40}
    first = line(10.0, 7, **met)
    assert first.startswith("last 10.0 s: 40 finished, 0 rejected, 0 aborted, attained 100.0% ")
    assert "7 holds" in first
    second = line(12.5, 9, **met, num_rejected=60, num_aborted=2, num_failed=3)
    assert second.startswith(
        "last 12.5 s: 40 finished, 60 rejected, 2 aborted, 3 failed, attained 40.0% (TTFT 40.0%, "
        "TPOT 100.0%), 1 running, 2 waiting"
    )
    assert "2 holds" in second
    assert "0 finished, 0 rejected, 0 aborted, attained - " in line(10.0, 9)
    assert engine_stats("attain", monitor)["num_finished"] == 80


def test_what_was_swapped_is_told_of_the_interval_too() -> None:
    stats = engine_stats("attain", StateMonitor(make_cost(), FixedLengths(), lambda: 0.0)) | COUNTS
    log = IntervalLog(1.0)
    swaps = [{"num_swapped_out": n, "num_swapped_in": 0, "crossover_tokens": 9} for n in (100, 130)]
    lines = [log.line(1.0, stats | {"swap": n}, num_running=1, num_waiting=0) for n in swaps]
    assert "100 KV tokens copied to the host" in lines[0]
    assert "30 KV tokens copied to the host" in lines[1]


def ask(log: IntervalLog, *steps: tuple[float, bool, int]) -> list[tuple[float, float]]:
    """When a line was due and for how long, of steps (time, whether idle after it, ends so far)."""
    passed = [(step[0], log.due_s(*step)) for step in steps]
    return [(now_s, passed_s) for now_s, passed_s in passed if passed_s is not None]


def test_a_line_is_due_after_each_interval_the_first_one_too() -> None:
    log = IntervalLog(10.0)
    log.begin(100.0)
    steps = [(100.0 + 0.5 * i, False, i) for i in range(80)]
    assert ask(log, *steps) == [(110.0, 10.0), (120.0, 10.0), (130.0, 10.0)]


def test_a_line_is_due_before_idling_if_anything_has_ended_since_the_last_one() -> None:
    log = IntervalLog(10.0)
    log.begin(0.0)
    assert ask(log, (1.0, False, 0), (2.0, True, 3)) == [(2.0, 2.0)]
    assert ask(log, (2.1, True, 3), (500.0, True, 3)) == []  # such as a step without requests


def test_idle_time_is_no_part_of_an_interval() -> None:
    log = IntervalLog(10.0)
    log.begin(0.0)
    assert ask(log, (2.0, True, 3)) == [(2.0, 2.0)]
    log.begin(3600.0)
    assert ask(log, (3601.0, False, 3), (3609.9, False, 4), (3610.0, False, 4)) == [(3610.0, 10.0)]
    assert ask(log, (3611.0, True, 4)) == []
    log.begin(9000.0)
    assert ask(log, (9001.0, False, 4), (9010.0, False, 5)) == [(9010.0, 10.0)]


def test_the_line_tells_what_each_service_attained_and_its_part_of_the_time() -> None:
    """Since the line before, and only of those that had anything."""
    monitor = StateMonitor(make_cost(), FixedLengths(), lambda: 0.0, {"chat": 0.3, "idle": 0.2})
    log = IntervalLog(10.0)

    def line() -> str:
        stats = engine_stats("attain", monitor) | COUNTS
        return log.line(10.0, stats, num_running=0, num_waiting=0)

    monitor.services.served_s[:] = 3.0, 1.0, 0.0
    monitor.stats.of_class("chat").attained = 3
    monitor.stats.of_class("chat").missed = 1
    assert line().endswith("; default - in 75% of the time, chat 75.0% in 25% of the time")
    monitor.services.served_s[1] += 1.0
    assert line().endswith("; chat - in 100% of the time")
    assert "of the time" not in line()


def test_without_classes_nothing_is_told_of_services() -> None:
    monitor = StateMonitor(make_cost(), FixedLengths(), lambda: 0.0)

    assert engine_stats("attain", monitor)["services"] == {}
