"""What became of requests: what they waited for, sat out and lost, against a plain count."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from states import FixedLengths, make_cost

from sola_sched.config.slo import SloTarget
from sola_sched.core.fates import ENDS, MEMORY, SLOTS, TIME, Fates
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.state import EngineLimits, StepPlan

NONE = np.empty(0, dtype=np.int64)
NUM_SLOTS = 2


class Engine:
    """A monitor with two slots and 100 blocks of 16 tokens, on a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.monitor = StateMonitor(make_cost(), FixedLengths(), lambda: self.now)
        self.running: list[int] = []
        self.num_free_blocks = 100

    @property
    def fates(self) -> Fates:
        return self.monitor.fates

    def add(self, name: str, num_prompt: int = 10, slo: SloTarget | None = None) -> int:
        return self.monitor.add(
            name,
            num_prompt_tokens=num_prompt,
            max_tokens=9,
            slo=slo or SloTarget(1.0, 1.0),
            arrival_s=self.now,
        )

    def plan(self, plan: StepPlan) -> None:
        limits = EngineLimits(100, NUM_SLOTS, num_blocks=100, block_size=16)
        state = self.monitor.state(self.running, limits, self.num_free_blocks)
        self.fates.planned(state, plan, self.now)

    def start(self, row: int) -> None:
        num_prompt = int(self.monitor.table.num_prompt[row])
        self.monitor.admitted(row, num_computed=0, prefill_target=num_prompt)
        self.running.append(row)

    def step(self, seconds: float, *prefills: int) -> None:
        table = self.monitor.table
        decodes = [row for row in self.running if row not in prefills]
        tokens = [int(table.prefill_target[row] - table.num_computed[row]) for row in prefills]
        self.monitor.scheduled(np.array(decodes, dtype=np.int64), prefills, tokens)
        self.now += seconds
        self.monitor.completed()

    def preempt(self, row: int) -> None:
        self.running.remove(row)
        self.monitor.requeued(row, num_tokens=10, at_front=True)

    def end(self, name: str, **how: bool) -> np.void:
        row = self.monitor.table.row_of[name]
        if row in self.running:
            self.running.remove(row)
        self.monitor.finished(name, **how)
        record: np.void = self.fates.since(self.fates.num_ended - 1, self.monitor.cost).records[0]
        return record


def admit(*rows: int) -> StepPlan:
    return StepPlan(admit=np.array(rows, dtype=np.int64))


def test_a_wait_is_for_what_the_engine_was_short_of() -> None:
    engine = Engine()
    first, second = engine.add("a"), engine.add("b")
    engine.plan(admit(first))
    engine.start(first)
    engine.step(0.5, first)  # a slot is free and so is memory: b waits for time in a step
    third = engine.add("c", num_prompt=1000)
    engine.num_free_blocks = 10
    engine.plan(admit(second))
    engine.start(second)
    engine.step(0.25, second)  # c waits for a slot
    engine.end("a")
    engine.plan(admit())
    engine.step(0.125)  # and now for memory
    engine.start(third)
    engine.step(1.0, third)
    b, c = engine.end("b"), engine.end("c")
    assert b["waited_s"].tolist() == [0.0, 0.0, 0.5]
    waited = dict.fromkeys((SLOTS, MEMORY, TIME), 0.0) | {SLOTS: 0.25, MEMORY: 0.125}
    assert c["waited_s"].tolist() == [waited[each] for each in (SLOTS, MEMORY, TIME)]
    assert (c["arrival_s"], c["started_s"], c["first_token_s"]) == (0.5, 0.875, 1.875)
    assert ENDS[b["end"]] == "attained"
    assert ENDS[c["end"]] == "missed"  # its first token came after 1.375 s
    assert (b["num_before"], b["num_running"]) == (1, 0)
    assert (c["num_before"], c["num_running"]) == (1, 1)


@pytest.mark.parametrize(
    "req_id", ["A" * 1_000_000, "two\nlines", "\x1b[2J", "\ud800", "x" * 300 + "\n"]
)
def test_an_id_of_a_client_is_kept_short_and_on_one_line(req_id: str) -> None:
    engine = Engine()
    for name in (req_id, req_id + "!"):
        engine.add(name)
        engine.end(name, by_itself=False)
    first, second = engine.fates.since(0, engine.monitor.cost).req_ids
    assert first != second
    for kept in (first, second):
        assert len(kept) <= 256
        assert kept.isprintable()


def test_other_ids_are_kept_as_they_are() -> None:
    engine = Engine()
    names = ["cmpl-1", "é 漢", "a" * 256]
    for name in names:
        engine.add(name)
        engine.end(name, by_itself=False)
    assert engine.fates.since(0, engine.monitor.cost).req_ids == names


def test_steps_that_are_sat_out_are_counted_with_their_time() -> None:
    engine = Engine()
    rows = [engine.add(name) for name in "ab"]
    engine.plan(admit(*rows))
    for row in rows:
        engine.start(row)
    engine.step(0.5, *rows)
    for _ in range(3):
        engine.plan(StepPlan(run=np.array(rows[:1])))
        engine.step(0.25)
    engine.plan(StepPlan())
    engine.step(0.25)
    a, b = engine.end("a"), engine.end("b")
    assert (a["num_held"], a["held_s"]) == (0, 0.0)
    assert (b["num_held"], b["held_s"]) == (3, 0.75)


def test_one_that_ends_while_it_sits_out_leaves_nothing_to_the_next_in_its_row() -> None:
    engine = Engine()
    rows = [engine.add(name) for name in "ab"]
    for row in rows:
        engine.start(row)
    engine.step(0.5, *rows)
    engine.plan(StepPlan(run=np.array(rows[:1])))
    engine.now += 0.25
    assert engine.end("b", by_itself=False)["held_s"] == 0.25
    engine.start(engine.add("c"))
    engine.plan(StepPlan())
    fate = engine.end("c", by_itself=False)
    assert (fate["num_held"], fate["held_s"]) == (0, 0.0)


def test_who_overtook_one_that_was_late() -> None:
    engine = Engine()
    late = engine.add("late")
    early = engine.add("first")
    for name in ("second", "third"):
        engine.now += 0.5
        row = engine.add(name)
        engine.start(row)
        engine.step(0.5, row)
        engine.end(name)
    engine.start(early)  # came at the same time: it did not come later
    engine.now += 1.0
    engine.start(late)
    engine.step(0.5, late)
    assert engine.end("late")["num_overtook"] == 2


def test_of_a_preempted_request_both_waits_count() -> None:
    engine = Engine()
    row, other = engine.add("a"), engine.add("b")
    engine.plan(admit())
    engine.now += 0.5
    engine.start(row)
    engine.start(other)
    engine.step(0.5, row, other)
    engine.preempt(row)
    engine.add("c")
    engine.plan(StepPlan(admit=NONE))
    engine.now += 0.25
    engine.start(row)
    engine.step(0.5, row)
    fate = engine.end("a")
    assert fate["waited_s"].tolist() == [0.0, 0.0, 0.75]
    assert (fate["num_preemptions"], fate["num_chunks"], fate["started_s"]) == (1, 2, 0.5)


def test_what_one_waits_for_alone_counts_as_no_shortage() -> None:
    engine = Engine()
    row, _ = engine.add("a"), engine.add("b")
    engine.plan(admit())
    engine.now += 0.5
    engine.monitor.parked([row])
    engine.plan(admit())
    engine.now += 1.0
    engine.monitor.parked([])
    engine.plan(admit())
    engine.now += 0.25
    engine.start(row)
    engine.step(0.25, row)
    assert engine.end("a")["waited_s"].sum() == 0.75


def test_how_each_ended() -> None:
    engine = Engine()
    for name in ("rejected", "failed", "aborted", "missed"):
        engine.add(name)
    ends = [
        engine.end("rejected", by_itself=False, rejected=True),
        engine.end("failed", by_itself=False, failed=True),
        engine.end("aborted", by_itself=False),
    ]
    engine.now += 2.0
    ends.append(engine.end("missed", by_itself=False))  # late when its client left
    assert [ENDS[fate["end"]] for fate in ends] == ["rejected", "failed", "aborted", "missed"]
    assert all(math.isnan(fate["started_s"]) for fate in ends)


def test_only_the_last_are_kept() -> None:
    fates = Fates(most=8)
    engine = Engine()
    engine.monitor.fates = fates
    for number in range(20):
        engine.add(f"r{number}")
        engine.monitor.finished(f"r{number}", by_itself=False)
    kept = fates.since(0, engine.monitor.cost)
    assert kept.req_ids == [f"r{number}" for number in range(12, 20)]
    assert len(fates.since(18, engine.monitor.cost).req_ids) == 2
    assert fates.since(20, engine.monitor.cost).req_ids == []


def test_the_table_may_grow() -> None:
    engine = Engine()
    engine.plan(admit())
    for number in range(600):
        engine.add(f"r{number}")
    engine.plan(admit())
    engine.now += 1.0
    engine.plan(admit())
    ends = [engine.end(f"r{number}", by_itself=False) for number in range(600)]
    assert {fate["waited_s"].sum() for fate in ends} == {1.0}


@given(st.data())
def test_totals_give_what_each_request_by_itself_would_count(data: st.DataObject) -> None:
    """Every wait is the sum of the seconds that passed while it waited, by what was short."""
    engine = Engine()
    waited: dict[str, list[float]] = {}
    shortage: int | None = None
    for number in range(data.draw(st.integers(1, 25))):
        move = data.draw(st.sampled_from(("add", "start", "preempt", "plan", "pass", "end")))
        table = engine.monitor.table
        live = sorted(table.row_of)
        waiting = [name for name in live if table.row_of[name] not in engine.running]
        if move == "add":
            name = f"r{number}"
            engine.add(name, data.draw(st.sampled_from((10, 5000))))
            waited[name] = [0.0, 0.0, 0.0]
        elif move == "start" and waiting:
            engine.start(table.row_of[data.draw(st.sampled_from(waiting))])
        elif move == "preempt" and engine.running:
            engine.preempt(data.draw(st.sampled_from(engine.running)))
        elif move == "plan":
            engine.plan(admit())
            if not waiting:
                shortage = None
            elif len(engine.running) >= NUM_SLOTS:
                shortage = SLOTS
            else:
                need = min(table.prefill_target[table.row_of[name]] for name in waiting)
                shortage = MEMORY if need > 1600 else TIME
        elif move == "pass":
            seconds = data.draw(st.sampled_from((0.25, 0.5, 2.0)))
            engine.now += seconds
            if shortage is not None:
                for name in waiting:
                    waited[name][shortage] += seconds
        elif move == "end" and live:
            name = data.draw(st.sampled_from(live))
            assert engine.end(name, by_itself=False)["waited_s"].tolist() == waited.pop(name)
    for name in sorted(waited):
        assert engine.end(name, by_itself=False)["waited_s"].tolist() == waited[name]
