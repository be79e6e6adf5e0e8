"""Priority levels: doubling quanta, aging, and the bound on starvation that it gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.core.state import DECODE, PREFILL, RequestTable
from sola_sched.planner.levels import PriorityLevels

QUANTUM_S = 1.0


class Clients:
    """Requests of a table on a clock that starts at 0."""

    def __init__(self, num_levels: int = 8, aging_s: float = 10.0) -> None:
        self.table = RequestTable()
        self.levels = PriorityLevels(num_levels, aging_s)

    def add(self, name: str, arrival_s: float) -> int:
        row = self.table.add(name)
        self.table.arrival_s[row] = arrival_s
        return row

    def ages(self, now_s: float, served: dict[int, bool], quantum_s: float = 4.0) -> list[float]:
        rows = np.array(list(served), dtype=np.int64)
        flags = np.array(list(served.values()))
        quanta = np.full(len(rows), quantum_s)
        return self.levels.age(self.table, rows, flags, quanta, now_s).tolist()


def test_a_level_holds_up_to_twice_the_time_of_the_one_before():
    levels = PriorityLevels(4, math.inf)

    found = levels.natural(np.array([0.0, 0.5, 1.0, 1.5, 2.0, 2.1, 4.0, 5.0, 1e9]), QUANTUM_S)

    assert found.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_waiting_counts_from_the_arrival_and_service_ends_it():
    clients = Clients()
    a, b = clients.add("a", 1.0), clients.add("b", 2.0)

    assert clients.ages(3.0, {a: False, b: False}) == [2.0, 1.0]
    assert clients.ages(5.0, {a: True, b: False}) == [0.0, 3.0]
    assert clients.ages(6.0, {a: False, b: False}) == [1.0, 4.0]


def test_a_lifted_request_keeps_its_lift_for_a_quantum_of_service():
    clients = Clients(aging_s=10.0)
    a = clients.add("a", 0.0)
    clients.table.phase[a] = DECODE
    clients.ages(0.0, {a: False})

    ages = [clients.ages(t, {a: t > 12.0})[0] for t in (12.0, 13.0, 14.0, 15.0, 16.0, 17.0)]

    assert ages == [12.0, 12.0, 12.0, 12.0, 0.0, 0.0]


def test_a_lifted_request_keeps_its_lift_until_it_has_a_further_token():
    """Else two that starve in turn would take the slot from each other before any token."""
    clients = Clients(aging_s=10.0)
    a = clients.add("a", 0.0)
    clients.table.phase[a] = PREFILL
    clients.ages(0.0, {a: False})
    clients.ages(12.0, {a: False})

    assert [clients.ages(t, {a: True})[0] for t in (13.0, 16.0, 30.0)] == [12.0, 12.0, 12.0]
    clients.table.phase[a] = DECODE
    assert clients.ages(31.0, {a: True}) == [0.0]


def test_a_new_request_in_a_used_row_starts_young():
    clients = Clients()
    row = clients.add("a", 0.0)
    clients.ages(0.0, {row: False})
    clients.ages(50.0, {row: False})
    clients.table.remove("a")

    again = clients.add("b", 49.0)

    assert again == row
    assert clients.ages(51.0, {again: False}) == [2.0]


def test_the_state_grows_with_the_table():
    clients = Clients()
    rows = [clients.add(f"r{i}", 0.0) for i in range(600)]

    assert clients.ages(1.0, dict.fromkeys(rows, False)) == [1.0] * 600


@pytest.mark.parametrize(
    ("age_s", "level", "lifted"), [(9.9, 3, False), (10.0, 2, True), (99.0, 0, True)]
)
def test_each_threshold_without_service_lifts_by_one_level(age_s, level, lifted):
    levels = PriorityLevels(8, 10.0)

    found, is_lifted = levels.lifted(np.array([3]), np.array([age_s]))

    assert (found[0], is_lifted[0]) == (level, lifted)


@given(st.integers(0, 7), st.floats(0, 200))
def test_the_time_to_promotion_is_when_aging_reaches_level_0(natural, age_s):
    levels = PriorityLevels(8, 10.0)

    wait_s = levels.promote_s(np.array([natural]), np.array([age_s]))[0]

    later, _ = levels.lifted(np.array([natural]), np.array([age_s + wait_s + 1e-6]))
    assert later[0] == 0
    if wait_s > 1e-3:
        sooner, _ = levels.lifted(np.array([natural]), np.array([age_s + wait_s - 1e-3]))
        assert sooner[0] > 0


def test_without_aging_nobody_is_lifted():
    levels = PriorityLevels(8, math.inf)

    found, is_lifted = levels.lifted(np.array([3, 0]), np.array([1e9, 1e9]))

    assert found.tolist() == [3, 0]
    assert not is_lifted.any()
    assert levels.promote_s(np.array([3, 0]), np.zeros(2)).tolist() == [math.inf, 0.0]


@given(
    st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.1, 60.0)), min_size=1, max_size=40),
    st.floats(0.5, 20.0),
)
def test_one_server_lets_nobody_pass_who_has_aged_through_all_levels(arrivals, aging_s):
    """One server, one job at a time by (level, lifted first, oldest, shortest), true lengths.

    Once a job has waited for `level` thresholds, only jobs that were there before may start.
    """
    clients = Clients(num_levels=5, aging_s=aging_s)
    left: dict[int, float] = {}
    pending = []
    at = 0.0
    for gap, service in arrivals:
        at += gap
        pending.append((at, service))
    now, step = 0.0, 0.25
    index = 0
    since: dict[int, float] = {}  # when a waiting row reached level 0 by aging
    arrival: dict[int, float] = {}
    current: int | None = None
    while pending or left:
        while pending and pending[0][0] <= now:
            arrived, service = pending.pop(0)
            row = clients.add(f"j{index}", arrived)
            index += 1
            left[row], arrival[row] = service, arrived
        if left:
            rows = np.array(list(left), dtype=np.int64)
            work = np.array([left[row] for row in rows.tolist()])
            natural = clients.levels.natural(work, QUANTUM_S)
            served = rows == (-1 if current is None else current)
            quanta = QUANTUM_S * np.exp2(natural)
            age = clients.levels.age(clients.table, rows, served, quanta, now)
            level, lifted = clients.levels.lifted(natural, age)
            key = np.where(lifted, -age, work)
            best = int(np.lexsort((key, ~lifted, level))[0])
            chosen = int(rows[best])
            for place, row in enumerate(rows.tolist()):
                if row == chosen:
                    continue
                if level[place] == 0 and lifted[place]:
                    since.setdefault(row, now)
                else:
                    since.pop(row, None)
            for row, reached in since.items():
                assert row == chosen or arrival[chosen] <= reached, "a newcomer passed"
            since.pop(chosen, None)
            current = chosen
            left[chosen] -= step
            if left[chosen] <= 0:
                clients.table.remove(f"j{_number(clients.table, chosen)}")
                del left[chosen]
                current = None
        now += step


def _number(table: RequestTable, row: int) -> int:
    return int(str(table.req_id[row])[1:])
