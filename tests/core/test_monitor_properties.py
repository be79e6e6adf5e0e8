"""Whatever happens, in whatever order, a monitor tells what the events themselves say."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from states import FixedLengths, make_cost

from sola_sched.config.slo import SloTarget
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import DECODE, PARKED, PREFILL, WAITING, EngineLimits

_EVENTS = ("arrive", "step", "step", "step", "deliver", "deliver", "deliver", "part", "end",
           "displace", "park", "abort")  # fmt: skip


class Engine:
    """Does what it is told to, tells a monitor, and keeps accounts of its own by name."""

    def __init__(self) -> None:
        self.now = 100.0
        self.monitor = StateMonitor(make_cost(), FixedLengths(), lambda: self.now)
        self.table = self.monitor.table
        self.running: list[str] = []
        self.in_flight: deque[list[str]] = deque()
        self.waiting: set[str] = set()
        self.parked: set[str] = set()
        self.num_output: Counter[str] = Counter()
        self.first_token_s: dict[str, float] = {}
        self.num_arrived = 0

    def rows(self, names: list[str]) -> np.ndarray:
        return np.array([self.table.row_of[name] for name in names], dtype=np.int64)

    def arrive(self, number: int) -> None:
        self.num_arrived += 1
        name = f"r{self.num_arrived}"
        self.monitor.add(
            name,
            num_prompt_tokens=20 + number,
            max_tokens=100,
            slo=SloTarget(1.0, 0.05 + 0.01 * number),
            arrival_s=self.now,
        )
        self.waiting.add(name)

    def step(self, number: int) -> None:
        """A step of all that run, and of one more in two of three steps."""
        waiting = sorted(self.waiting - self.parked)
        if number % 3 and waiting:
            name = waiting[number % len(waiting)]
            self.running.append(name)
            self.waiting.discard(name)
            row = self.table.row_of[name]
            self.monitor.admitted(row, num_computed=0, prefill_target=20 + number)
        if not self.running:
            return
        rows = self.rows(self.running)
        is_prefill = self.table.phase[rows] == PREFILL
        prefills = rows[is_prefill]
        left = self.table.prefill_target[prefills] - self.table.num_computed[prefills]
        tokens = np.minimum(left, 15)
        samples = [*rows[~is_prefill], *prefills[tokens == left]]
        self.monitor.scheduled(rows[~is_prefill], prefills, tokens)
        self.in_flight.append([str(self.table.req_id[row]) for row in samples])

    def deliver(self, number: int) -> None:
        if self.in_flight:
            self.now += 0.01 * (1 + number)
            names = self._answered()
            assert self.monitor.num_expected == len(names)
            self.monitor.completed()
            self._count(names, 1)

    def part(self, number: int) -> None:
        """A step that brings tokens to some only, or several to each."""
        if self.in_flight:
            self.now += 0.01
            names, num_tokens = self._answered()[number // 2 :], 1 + number % 2
            self.monitor.completed(self.rows(names), np.full(len(names), num_tokens))
            self._count(names, num_tokens)

    def _answered(self) -> list[str]:
        return [name for name in self.in_flight.popleft() if name in self.table.row_of]

    def _count(self, names: list[str], num_tokens: int) -> None:
        for name in names:
            self.num_output[name] += num_tokens
            self.first_token_s.setdefault(name, self.now)

    def end(self, number: int) -> None:
        if self.running:
            name = self.running.pop(number % len(self.running))
            self.monitor.finished(name, by_itself=bool(number % 2))

    def abort(self, number: int) -> None:
        """One that waits, or is parked."""
        if self.waiting:
            name = sorted(self.waiting)[number % len(self.waiting)]
            self.waiting.discard(name)
            self.parked.discard(name)
            self.monitor.finished(name, by_itself=False)

    def displace(self, number: int) -> None:
        if self.running:
            name = self.running.pop(number % len(self.running))
            self.waiting.add(name)
            row = self.table.row_of[name]
            self.monitor.requeued(row, num_tokens=30, at_front=bool(number % 2))

    def park(self, number: int) -> None:
        self.parked = set(sorted(self.waiting)[: number % 3])
        self.monitor.parked(self.rows(sorted(self.parked)).tolist())

    def check(self) -> None:
        """The state is that of these accounts."""
        table, rows = self.table, self.rows(self.running)
        state = self.monitor.state(rows, EngineLimits(512, 8, num_blocks=100, block_size=16), 90)
        assert state.running.tolist() == rows.tolist()
        assert sorted(state.waiting) == sorted(self.rows(list(self.waiting - self.parked)))
        assert (table.phase[self.rows(list(self.parked))] == PARKED).all()
        in_flight = Counter(name for names in self.in_flight for name in names)
        assert state.num_ahead.tolist() == [in_flight[name] for name in self.running]
        assert state.are_decodes == (bool(self.running) and (table.phase[rows] == DECODE).all())
        for name, row in table.row_of.items():
            assert table.num_output[row] == self.num_output[name]
            first_s = self.first_token_s.get(name, np.nan)
            np.testing.assert_equal(float(table.first_token_s[row]), first_s)
        table.check_integrity()


@given(events=st.lists(st.tuples(st.sampled_from(_EVENTS), st.integers(0, 5)), max_size=60))
def test_a_monitor_tells_what_has_happened(events: list[tuple[str, int]]) -> None:
    engine = Engine()
    for name, number in events:
        before = engine.table.epoch, engine.table.phase.copy(), set(engine.table.row_of)
        getattr(engine, name)(number)
        epoch, phase, names = before
        has_changed = names != set(engine.table.row_of) or (phase != engine.table.phase).any()
        assert (engine.table.epoch != epoch) or not has_changed
        engine.check()


def test_a_first_token_that_came_late_is_noted() -> None:
    engine = Engine()
    for name in ("arrive", "step", "step"):
        engine.now += 0.01
        getattr(engine, name)(1)
    engine.deliver(0)
    engine.part(2)  # nothing of the step that ends the prefill
    engine.step(0)
    assert np.isnan(engine.table.first_token_s[engine.rows(engine.running)]).all()
    engine.deliver(0)
    engine.check()
    assert engine.first_token_s == {"r1": engine.now}


def test_while_the_same_requests_compute_and_deliver_the_epoch_stands() -> None:
    engine = Engine()
    for name in ("arrive", "arrive", "step", "step", "step", "step", *["deliver"] * 4):
        getattr(engine, name)(1)
    assert engine.monitor.table.num_in_phase[WAITING] == 0
    epoch = engine.table.epoch
    for _ in range(5):
        engine.step(0)
        engine.step(0)
        engine.deliver(0)
        engine.deliver(0)
        engine.check()
    assert engine.table.epoch == epoch


@given(events=st.lists(st.tuples(st.sampled_from(_EVENTS), st.integers(0, 5)), max_size=60))
def test_sums_over_a_batch_are_right_at_any_time(events: list[tuple[str, int]]) -> None:
    """Also when the same array is asked about again and again."""
    engine = Engine()
    table, rows, names = engine.table, np.empty(0, dtype=np.int64), [""]
    for name, number in events:
        getattr(engine, name)(number)
        if names != engine.running:
            rows, names = engine.rows(engine.running), list(engine.running)
        for _ in range(2):
            assert table.num_tokens(rows) == int((table.num_prompt + table.num_output)[rows].sum())
            assert table.shortest_tpot_s(rows) == table.tpot_s[rows].min(initial=np.inf)
