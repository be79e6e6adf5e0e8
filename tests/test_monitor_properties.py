"""What a monitor remembers from state to state changes nothing that it tells."""

from __future__ import annotations

from collections import deque
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from states import FixedLengths, make_cost

from sola_sched.monitor import StateMonitor
from sola_sched.slo import SloTarget
from sola_sched.state import DECODE, PREFILL, DecodeBatch, RequestTable, StepState

_EVENTS = ("arrive", "step", "step", "step", "deliver", "deliver", "deliver", "part", "end",
           "displace", "park", "abort")  # fmt: skip


class Forgetful(StateMonitor):
    """Finds out everything anew at every event: what the monitor would be without memory."""

    def __getattribute__(self, name: str) -> object:
        if name in ("state", "scheduled", "completed", "are_decodes"):
            self._batch = self._waiting = None
        return super().__getattribute__(name)


class Engine:
    """Serves what it is told to with two monitors, which must tell the same."""

    def __init__(self) -> None:
        self.now = 100.0
        kinds = (StateMonitor, Forgetful)
        self.monitors = [kind(make_cost(), FixedLengths(), lambda: self.now) for kind in kinds]
        self.running: list[int] = []
        self.in_flight: deque[list[int]] = deque()
        self.num_arrived = self.num_kept = 0

    @property
    def table(self) -> RequestTable:
        return self.monitors[0].table

    def names(self, rows: list[int]) -> list[str]:
        return [str(self.table.req_id[row]) for row in rows]

    def arrive(self, number: int) -> None:
        self.num_arrived += 1
        for monitor in self.monitors:
            monitor.add(
                f"r{self.num_arrived}",
                num_prompt_tokens=20 + number,
                max_tokens=100,
                slo=SloTarget(1.0, 0.05 + 0.01 * number),
                arrival_s=self.now,
            )

    def step(self, number: int) -> None:
        """A step of all that run, and of one more in two of three steps."""
        waiting = self.compare()
        if number % 3 and len(waiting):
            row = int(waiting[number % len(waiting)])
            self.running.append(row)
            for monitor in self.monitors:
                monitor.admitted(row, num_computed=0, prefill_target=20 + number)
        if not self.running:
            return
        is_prefill = self.table.phase[self.running] == PREFILL
        prefills = np.array(self.running)[is_prefill]
        left = self.table.prefill_target[prefills] - self.table.num_computed[prefills]
        tokens = np.minimum(left, 15)
        samples = np.array(self.running)[~is_prefill].tolist() + prefills[tokens == left].tolist()
        for monitor, state in zip(self.monitors, self.states, strict=True):
            rows = state.running
            if len(prefills) or len(rows) != len(self.running):
                rows = np.array(self.running)[~is_prefill]
            assert monitor.are_decodes(rows)
            monitor.scheduled(rows, prefills, tokens)
        self.in_flight.append(samples)

    def deliver(self, number: int) -> None:
        if not self.in_flight:
            return
        self.now += 0.01 * (1 + number)
        expected = {monitor.num_expected for monitor in self.monitors}
        assert len(expected) == 1
        if expected == {-1}:
            self.part(0)
            return
        self.in_flight.popleft()
        for monitor in self.monitors:
            monitor.completed()

    def part(self, number: int) -> None:
        """A step that brings tokens to some only, or several to each."""
        if not self.in_flight:
            return
        self.now += 0.01
        live = set(self.table.row_of.values())
        rows = [row for row in self.in_flight.popleft() if row in live][number // 2 :]
        for monitor in self.monitors:
            monitor.completed(
                np.array(rows, dtype=np.int64), np.full(len(rows), 1 + number % 2, dtype=np.int64)
            )

    def end(self, number: int) -> None:
        if self.running:
            row = self.running.pop(number % len(self.running))
            name = self.names([row])[0]
            for monitor in self.monitors:
                monitor.finished(name, by_itself=bool(number % 2))

    def abort(self, number: int) -> None:
        """One that waits, or is parked."""
        others = [row for row in self.table.row_of.values() if row not in self.running]
        if others:
            name = self.names([others[number % len(others)]])[0]
            for monitor in self.monitors:
                monitor.finished(name, by_itself=False)

    def displace(self, number: int) -> None:
        if self.running:
            row = self.running.pop(number % len(self.running))
            for monitor in self.monitors:
                monitor.requeued(row, num_tokens=30, at_front=bool(number % 2))

    def park(self, number: int) -> None:
        waiting = self.compare()
        for monitor in self.monitors:
            monitor.parked(waiting[: number % 3].tolist())

    def compare(self) -> np.ndarray:
        """The rows that wait, once both monitors have told the same state and table."""
        self.states = [
            monitor.state(
                self.running,
                max_num_tokens=512,
                max_num_running=8,
                num_free_blocks=90,
                num_blocks=100,
                block_size=16,
            )
            for monitor in self.monitors
        ]
        ours, other = self.states
        for field in fields(StepState):
            if field.name not in ("table", "lengths", "cost", "batch"):
                np.testing.assert_array_equal(
                    getattr(ours, field.name), getattr(other, field.name), err_msg=field.name
                )
        for name in ("phase", "num_output", "first_token_s", "last_token_s", "num_computed"):
            np.testing.assert_array_equal(
                getattr(ours.table, name), getattr(other.table, name), err_msg=name
            )
        self._compare_batches(ours, other)
        assert ours.decode_step_s(ours.running) == other.decode_step_s(other.running)
        assert self.monitors[0].prefill_share == self.monitors[1].prefill_share
        return ours.waiting

    def _compare_batches(self, ours: StepState, other: StepState) -> None:
        is_batch = bool(self.running) and bool((ours.table.phase[self.running] == DECODE).all())
        assert (ours.batch is not None) == (other.batch is not None) == is_batch
        if ours.batch is not None and other.batch is not None:
            assert ours.batch.rows is ours.running
            assert ours.batch.num_tokens == other.batch.num_tokens
            assert ours.batch.tpot_s == other.batch.tpot_s
            if ours.batch.have_begun:
                assert not np.isnan(ours.table.first_token_s[self.running]).any()
                self.num_kept += 1


@given(events=st.lists(st.tuples(st.sampled_from(_EVENTS), st.integers(0, 5)), max_size=60))
def test_a_monitor_without_memory_tells_the_same(events: list[tuple[str, int]]) -> None:
    engine = Engine()
    for name, number in events:
        getattr(engine, name)(number)
        engine.compare()


def test_decodes_that_run_on_are_remembered() -> None:
    engine = Engine()
    for name in ("arrive", "arrive", "step", "step", "step", "step", *["deliver"] * 4):
        getattr(engine, name)(1)
    arrays = set()
    for _ in range(5):
        engine.step(0)
        engine.step(0)
        arrays.add(id(engine.states[0].running))
        engine.deliver(0)
        engine.deliver(0)
    assert len(arrays) == 1
    assert engine.num_kept >= 5
    assert len(engine.running) == 2


def test_a_first_token_that_came_late_is_noted() -> None:
    engine = Engine()
    for name in ("arrive", "step", "step"):
        engine.now += 0.01
        getattr(engine, name)(1)
    engine.deliver(0)
    engine.part(2)  # nothing of the step that ends the prefill
    engine.step(0)
    assert np.isnan(engine.table.first_token_s[engine.running]).all()
    engine.deliver(0)
    engine.compare()
    assert engine.table.first_token_s[engine.running].tolist() == [engine.now]


def test_an_engine_may_use_its_array_again() -> None:
    engine = Engine()
    for name in ("arrive", "arrive", "arrive", "step", "step", "step", "step", "step", "step"):
        getattr(engine, name)(1)
    monitor, given_rows = engine.monitors[0], np.array(engine.running[::-1])
    sizes = {
        "max_num_tokens": 512, "max_num_running": 8, "num_free_blocks": 90, "num_blocks": 100,
        "block_size": 16,
    }  # fmt: skip
    first = monitor.state(given_rows, **sizes)
    before = first.running.tolist()
    given_rows[:] = given_rows[::-1]
    second = monitor.state(given_rows, **sizes)
    assert first.running.tolist() == before
    assert second.running.tolist() == before[::-1]
    assert second.num_ahead.tolist() == first.num_ahead.tolist()[::-1]


@pytest.mark.parametrize(("phase", "is_batch"), [(DECODE, True), (PREFILL, False)])
def test_a_batch_is_decodes_alone(phase: int, is_batch: bool) -> None:
    table = RequestTable()
    rows = np.array([table.add("a"), table.add("b")])
    table.phase[rows] = DECODE, phase
    table.num_prompt[rows], table.num_output[rows] = (10, 20), (1, 2)
    table.tpot_s[rows] = 0.2, 0.1
    batch = DecodeBatch.of(table, rows)
    assert (batch is not None) == is_batch
    if batch is not None:
        assert (batch.num_tokens, batch.tpot_s, batch.have_begun) == (33, 0.1, False)
    assert DecodeBatch.of(table, rows[:0]) is None
