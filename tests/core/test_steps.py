"""Steps in flight: they end in the order in which they began, whatever happens in between."""

from __future__ import annotations

import numpy as np
import pytest
from states import FixedLengths, make_cost

from sola_sched.config.slo import SloTarget
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import EngineLimits

NONE = np.empty(0, dtype=np.int64)
LIMITS = EngineLimits(512, 8, num_blocks=100, block_size=16)


class Engine:
    """One whose clock the test moves."""

    def __init__(self) -> None:
        self.now = 10.0
        self.monitor = StateMonitor(make_cost(), FixedLengths(), lambda: self.now)
        self.table = self.monitor.table

    def add(self, name: str) -> int:
        return self.monitor.add(
            name, num_prompt_tokens=100, max_tokens=99, slo=SloTarget(), arrival_s=self.now
        )

    def decode(self, name: str) -> int:
        """One that has had its first token."""
        row = self.add(name)
        self.monitor.admitted(row, num_computed=0, prefill_target=100)
        self.monitor.scheduled(NONE, [row], [100])
        self.monitor.completed()
        return row

    def step(self, *rows: int) -> None:
        self.monitor.scheduled(np.array(rows, dtype=np.int64), [], [])


def test_as_many_steps_as_there_are_may_be_in_flight() -> None:
    engine = Engine()
    rows = [engine.decode(name) for name in "abc"]
    for count in range(10):
        engine.step(*rows[: 1 + count % 3])

    expected = []
    for _ in range(10):
        expected.append(engine.monitor.num_expected)
        engine.now += 0.1
        engine.monitor.completed()

    assert expected == [1, 2, 3] * 3 + [1]
    assert engine.table.num_output[rows].tolist() == [11, 7, 4]
    assert not engine.table.num_in_flight[rows].any()


def test_the_table_may_grow_while_steps_are_in_flight() -> None:
    engine = Engine()
    first = engine.decode("first")
    engine.step(first)
    for number in range(600):
        engine.add(f"r{number}")
    engine.step(first)

    for _ in range(2):
        assert engine.monitor.num_expected == 1
        engine.monitor.completed()
    assert engine.table.num_output[first] == 3


def test_whoever_has_the_row_of_one_that_ended_gets_none_of_its_tokens() -> None:
    engine = Engine()
    old = engine.decode("old")
    engine.step(old)
    engine.step(old)
    engine.monitor.finished("old")
    new = engine.add("new")
    assert new == old
    engine.monitor.admitted(new, num_computed=0, prefill_target=100)
    engine.monitor.scheduled(NONE, [new], [100])

    for num_expected in (0, 0, 1):
        assert engine.table.num_output[new] == 0
        assert engine.monitor.num_expected == num_expected
        engine.monitor.completed()

    assert (engine.table.num_output[new], engine.table.num_in_flight[new]) == (1, 0)


def test_chunks_in_flight_are_those_of_requests_that_are_there() -> None:
    engine = Engine()
    rows = [engine.add(name) for name in "ab"]
    for row in rows:
        engine.monitor.admitted(row, num_computed=0, prefill_target=100)
    engine.monitor.scheduled(NONE, rows, [30, 40])
    engine.monitor.scheduled(NONE, rows[:1], [5])
    assert engine.monitor.chunks_in_flight()[rows].tolist() == [35, 40]

    engine.monitor.finished("b", by_itself=False)
    assert engine.monitor.chunks_in_flight()[rows].tolist() == [35, 0]
    engine.monitor.completed(NONE, NONE)
    assert engine.monitor.chunks_in_flight()[rows].tolist() == [5, 0]


def test_the_next_step_starts_when_all_before_are_expected_to_have_ended() -> None:
    engine = Engine()
    rows = [engine.decode(name) for name in "ab"]
    for _ in range(3):
        engine.step(*rows)

    state = engine.monitor.state(rows, LIMITS, 90)

    assert state.now_s == pytest.approx(engine.now + 3 * 0.012, rel=0.01)


def test_one_that_waits_cannot_prefill() -> None:
    engine = Engine()
    row = engine.add("a")

    with pytest.raises(ValueError, match="must have been admitted"):
        engine.monitor.scheduled(NONE, [row], [100])


def test_no_step_ends_that_did_not_begin() -> None:
    engine = Engine()
    row = engine.decode("a")
    with pytest.raises(IndexError):
        engine.monitor.completed()
    assert engine.table.num_output[row] == 1


def test_each_request_has_its_tokens() -> None:
    engine = Engine()
    row = engine.decode("a")

    with pytest.raises(ValueError, match="for each request that prefills"):
        engine.monitor.scheduled(NONE, [row], [1, 2])
    engine.step(row)
    with pytest.raises(ValueError, match="for each request that received some"):
        engine.monitor.completed(np.array([row]), NONE)
