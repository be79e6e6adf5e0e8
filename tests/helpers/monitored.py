"""An engine that does what it is told to, and keeps accounts of its own beside a monitor's."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
from states import FixedLengths, make_cost

from sola_sched.config.slo import SloTarget
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import DECODE, PARKED, PREFILL, EngineLimits, StepState

#: Its methods that take a number.
KINDS_OF_EVENTS = ("arrive", "step", "step", "step", "deliver", "deliver", "deliver", "part", "end",
                   "displace", "park", "abort")  # fmt: skip


class Engine:
    """Does what it is told to; see the module."""

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

    def state(self) -> StepState:
        rows = self.rows(self.running)
        return self.monitor.state(rows, EngineLimits(512, 8, num_blocks=100, block_size=16), 90)

    def look(self) -> tuple[object, ...]:
        """What can be read of the state, to be printed."""
        state, table = self.state(), self.table
        rows = np.array(sorted(table.row_of.values()), dtype=np.int64)
        known = (table.phase, table.num_output, table.num_in_flight, table.first_token_s)
        times = (state.now_s, state.elapsed_s, state.prefill_share, state.accepted_per_decode)
        chunks = self.monitor.chunks_in_flight()[rows].tolist()
        return times, [column[rows].tolist() for column in known], chunks, self.monitor.stats

    def check(self) -> None:
        """The state is that of these accounts."""
        table, rows, state = self.table, self.rows(self.running), self.state()
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
