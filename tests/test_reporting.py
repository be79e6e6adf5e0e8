"""Counters and the log line, from the events of two requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from states import FixedLengths, StateBuilder, make_cost

from sola_sched.monitor import StateMonitor
from sola_sched.reporting import engine_stats, summary_line, waits_for_slots_alone
from sola_sched.slo import SloTarget

COUNTS = {
    "num_held": 3,
    "num_preempted_by_policy": 1,
    "num_rejected": 0,
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
    assert line.startswith("2 finished, attained 50.0% (TTFT 50.0%, TPOT 100.0%), 4 running, 7 wa")
    assert "3 holds, 1 preemptions by policy, 0 rejected" in line


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
    assert "0 finished, attained 0.0%" in summary_line(
        engine_stats("paper", monitor) | COUNTS, 0, 0
    )


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
