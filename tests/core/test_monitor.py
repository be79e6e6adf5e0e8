"""Request and system states from events, on a clock that the test moves."""

from __future__ import annotations

import numpy as np
import pytest
from states import FixedLengths, make_cost

from sola_sched.config.slo import SloTarget
from sola_sched.core.live import LiveRequest
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import (
    DECODE,
    PARKED,
    PREFILL,
    WAITING,
    EngineLimits,
    RequestTable,
    StepState,
)
from sola_sched.core.table import RequestValues
from sola_sched.cost.model import CostModel
from sola_sched.prediction.length import LengthPrediction

SLO = SloTarget(1.0, 0.1)


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def make_monitor(cost: CostModel | None = None) -> tuple[StateMonitor, Clock]:
    clock = Clock()
    return StateMonitor(cost or make_cost(), FixedLengths(), clock), clock


def add(monitor: StateMonitor, name: str, prompt: int = 100, slo: SloTarget = SLO) -> int:
    return monitor.add(
        name,
        num_prompt_tokens=prompt,
        max_tokens=100,
        slo=slo,
        arrival_s=monitor.clock(),
    )


def rows(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def state_of(monitor: StateMonitor, *running: int) -> StepState:
    return monitor.state(running, EngineLimits(512, 8, num_blocks=100, block_size=16), 90)


def test_the_life_of_one_request() -> None:
    monitor, clock = make_monitor()
    table = monitor.table
    row = add(monitor, "a", prompt=100)
    assert table.phase[row] == WAITING
    clock.now = 50.2
    monitor.admitted(row, num_computed=20, prefill_target=100)
    monitor.scheduled(rows(), rows(row), rows(50))
    assert table.phase[row] == PREFILL
    clock.now = 50.3
    monitor.completed(rows(), rows())
    monitor.scheduled(rows(), rows(row), rows(30))
    assert table.phase[row] == DECODE
    clock.now = 50.4
    monitor.completed(rows(row), rows(1))
    assert table.first_token_s[row] == 50.4
    for _ in range(2):
        monitor.scheduled(rows(row), rows(), rows())
        clock.now += 0.05
        monitor.completed()
    assert table.num_output[row] == 3
    monitor.finished("a")
    stats = monitor.stats
    assert (stats.num_finished, stats.num_attained) == (1, 1)
    assert monitor.lengths.observed == [(0, 3)]  # type: ignore[attr-defined]
    table.check_integrity()


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "met"),
    [(0.4, 0.05, (1, 1, 1)), (0.3, 0.05, (0, 1, 0)), (0.4, 0.04, (1, 0, 0))],
)
def test_attainment_needs_both_targets(
    ttft_s: float, tpot_s: float, met: tuple[int, int, int]
) -> None:
    monitor, clock = make_monitor()
    row = add(monitor, "a", slo=SloTarget(ttft_s + 1e-9, tpot_s + 1e-9))
    monitor.admitted(row, num_computed=0, prefill_target=100)
    monitor.scheduled(rows(), rows(row), rows(100))
    clock.now += 0.4
    monitor.completed()
    for _ in range(4):
        monitor.scheduled(rows(row), rows(), rows())
        clock.now += 0.05
        monitor.completed()
    monitor.finished("a")
    stats = monitor.stats
    assert (stats.num_ttft_met, stats.num_tpot_met, stats.num_attained) == met


@pytest.mark.parametrize(("e2e_s", "is_met"), [(0.6, True), (0.59, False)])
def test_attainment_needs_the_last_token_in_time(e2e_s: float, is_met: bool) -> None:
    monitor, clock = make_monitor()
    row = add(monitor, "a", slo=SloTarget(e2e_s=e2e_s + 1e-9, weight=2.0))
    assert monitor.table.weight[row] == 2.0
    assert state_of(monitor).has_slo
    assert state_of(monitor).has_e2e
    monitor.admitted(row, num_computed=0, prefill_target=100)
    monitor.scheduled(rows(), rows(row), rows(100))
    clock.now += 0.5
    monitor.completed()
    for _ in range(2):
        monitor.scheduled(rows(row), rows(), rows())
        clock.now += 0.05
        monitor.completed()
    monitor.finished("a")
    stats = monitor.stats
    assert (stats.num_e2e, stats.num_e2e_met, stats.num_attained) == (1, is_met, is_met)
    assert not state_of(monitor).has_slo
    assert not state_of(monitor).has_e2e


def test_aborts_teach_nothing_and_attain_nothing() -> None:
    monitor, _ = make_monitor()
    add(monitor, "a")
    monitor.finished("a", by_itself=False)
    assert monitor.stats.num_aborted == 1
    assert monitor.stats.num_finished == 0
    assert monitor.lengths.observed == []  # type: ignore[attr-defined]


def test_a_preempted_request_waits_in_front_and_recomputes_its_output() -> None:
    monitor, clock = make_monitor()
    first, second = add(monitor, "a"), add(monitor, "b")
    monitor.admitted(first, num_computed=0, prefill_target=100)
    monitor.scheduled(rows(), rows(first), rows(100))
    clock.now += 0.1
    monitor.completed()
    monitor.requeued(first, num_tokens=101, at_front=True)
    table = monitor.table
    assert table.phase[first] == WAITING
    assert table.prefill_target[first] == 101
    assert table.queue_pos[first] < table.queue_pos[second]
    assert table.num_preemptions[first] == 1


def test_steps_are_paired_first_in_first_out_and_idle_time_is_no_step_time() -> None:
    learning = CostModel()
    monitor, clock = make_monitor(learning)
    row = add(monitor, "a")
    monitor.admitted(row, num_computed=0, prefill_target=100)
    monitor.scheduled(rows(), rows(row), rows(100))
    clock.now += 0.01
    monitor.scheduled(rows(row), rows(), rows())  # asynchronous: before the first completes
    clock.now += 0.09
    monitor.completed()
    monitor.set_busy(True)
    assert state_of(monitor, row).elapsed_s == pytest.approx(0.10)
    clock.now += 0.05
    monitor.completed()
    monitor.set_busy(False)
    assert state_of(monitor, row).elapsed_s == pytest.approx(0.05)
    clock.now += 30.0  # nothing to do
    monitor.scheduled(rows(row), rows(), rows())
    clock.now += 0.02
    monitor.completed()
    assert state_of(monitor, row).elapsed_s == pytest.approx(0.02)


def test_tokens_in_flight_count_and_move_the_start_of_the_next_step() -> None:
    monitor, clock = make_monitor()
    row = add(monitor, "a")
    monitor.admitted(row, num_computed=0, prefill_target=100)
    monitor.scheduled(rows(), rows(row), rows(100))  # predicted: 20 ms
    state = state_of(monitor, row)
    assert state.num_ahead.tolist() == [1]
    assert state.now_s == pytest.approx(clock.now + 0.020, rel=1e-3)


def test_parked_requests_are_not_offered() -> None:
    monitor, _ = make_monitor()
    row, other = add(monitor, "a"), add(monitor, "b")
    monitor.parked([row])
    assert monitor.table.phase[row] == PARKED
    assert state_of(monitor).waiting.tolist() == [other]
    monitor.parked([])
    assert sorted(state_of(monitor).waiting.tolist()) == sorted([row, other])


def test_the_state_knows_whether_any_target_is_set() -> None:
    monitor, _ = make_monitor()
    add(monitor, "free", slo=SloTarget())
    assert not state_of(monitor).has_slo
    add(monitor, "bound")
    assert state_of(monitor).has_slo
    monitor.finished("bound", by_itself=False)
    assert not state_of(monitor).has_slo


def test_several_tokens_per_step_are_learned() -> None:
    monitor, clock = make_monitor()
    row = add(monitor, "a")
    monitor.admitted(row, num_computed=0, prefill_target=100)
    monitor.scheduled(rows(), rows(row), rows(100))
    monitor.completed()
    for _ in range(200):
        monitor.scheduled(rows(row), rows(), rows())
        clock.now += 0.01
        monitor.completed(rows(row), rows(3))
    assert state_of(monitor).accepted_per_decode == pytest.approx(3.0, rel=0.01)


def test_a_request_that_ended_in_flight_is_not_expected_to_answer() -> None:
    monitor, _ = make_monitor()
    row, other = add(monitor, "a"), add(monitor, "b")
    monitor.scheduled(rows(row, other), rows(), rows())
    assert monitor.num_expected == 2
    monitor.finished("b", by_itself=False)
    assert monitor.num_expected == 1
    monitor.completed()
    assert monitor.table.num_output[[row, other]].tolist() == [1, 0]


def test_the_table_reuses_rows_and_grows() -> None:
    table = RequestTable(capacity=2)
    first = table.add("a")
    assert table.phase[first] == WAITING
    with pytest.raises(ValueError, match="'a' must be new"):
        table.add("a")
    table.remove("a")
    names = [f"r{i}" for i in range(9)]
    for name in names:
        table.add(name)
    assert table.capacity == 16
    assert len({table.row_of[name] for name in names}) == 9
    table.check_integrity()


def test_a_row_that_is_used_again_keeps_nothing() -> None:
    table = RequestTable(capacity=1)
    row = table.add("old")
    for name in RequestValues._fields:
        getattr(table, name)[row] = 7
    table.phase[row] = WAITING
    table.remove("old")

    times = {"arrival_s": 2.0, "ttft_s": 0.5, "e2e_s": 9.0}
    assert table.add("new", **times, max_wait_s=4.0, num_prompt=3) == row

    expected = RequestValues(
        **times, phase=WAITING, serial=1, due_s=2.5, e2e_due_s=11.0, served_by_s=6.0,
        num_prompt=3, prefill_target=3, predicted=None,
    )  # fmt: skip
    assert repr(table.values(row)._replace(predicted=None)) == repr(expected)
    assert np.isnan(table.predicted[row]).all()


def test_a_prediction_counts_for_its_request_and_is_dropped_after_its_end() -> None:
    monitor, _ = make_monitor()
    row = add(monitor, "a")

    assert monitor.predicted("a", LengthPrediction.exactly(20))
    assert state_of(monitor).remaining(rows(row)).tolist() == [20.0]
    assert monitor.predicted("a", LengthPrediction.exactly(30, "neighbours"))
    assert state_of(monitor).remaining(rows(row)).tolist() == [30.0]
    monitor.finished("a")
    assert not monitor.predicted("a", LengthPrediction.exactly(30))
    assert (monitor.stats.num_predicted, monitor.stats.num_late_predictions) == (2, 1)
    monitor.table.check_integrity()


def test_a_prediction_outlives_a_rebuild_but_not_the_input_of_a_session_that_it_is_for() -> None:
    monitor, clock = make_monitor()
    for name in ("a", "b", "session"):
        row = add(monitor, name)
        monitor.table.num_output[row] = 5
    monitor.predicted("a", LengthPrediction.exactly(20))
    monitor.predicted("session", LengthPrediction.exactly(30))
    live = [
        LiveRequest(
            req_id=name, num_prompt_tokens=100, max_tokens=100, slo=SLO, slo_class="default",
            arrival_s=clock.now, priority=0, holds_slot=False, num_computed=0,
            num_tokens=100 + num_output, num_output=num_output, num_in_flight=0,
            num_preemptions=0,
        )
        for name, num_output in (("a", 5), ("b", 5), ("session", 0))
    ]  # fmt: skip

    monitor.rebuild(live, 0)

    table = monitor.table
    assert table.predicted[table.row_of["a"], 0] == 20.0
    assert np.isnan(table.predicted[[table.row_of["b"], table.row_of["session"]], 0]).all()
    table.check_integrity()
