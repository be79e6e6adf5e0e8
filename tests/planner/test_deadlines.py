"""Moore-Hodgson against brute force."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.planner.deadlines import on_time_first

JOBS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 60)),
    min_size=1,
    max_size=6,
)


def most_on_time(jobs: list[tuple[int, int]]) -> int:
    best = 0
    for order in permutations(jobs):
        clock = count = 0
        for service, deadline in order:
            if clock + service <= deadline:
                clock += service
                count += 1
        best = max(best, count)
    return best


@given(JOBS)
def test_no_order_gets_more_jobs_done_in_time(jobs: list[tuple[int, int]]) -> None:
    service = np.array([s for s, _ in jobs], dtype=float)
    deadline = np.array([d for _, d in jobs], dtype=float)
    order, count = on_time_first(service, deadline, lambda: service, None)
    assert sorted(order.tolist()) == list(range(len(jobs)))
    assert count == most_on_time(jobs)
    clock = 0.0
    for job in order[:count]:
        clock += service[job]
        assert clock <= deadline[job]


@given(JOBS)
def test_a_higher_class_never_loses_a_job_to_a_lower_one(jobs: list[tuple[int, int]]) -> None:
    service = np.array([s for s, _ in jobs], dtype=float)
    deadline = np.array([d for _, d in jobs], dtype=float)
    rank = np.arange(len(jobs)) % 2
    order, count = on_time_first(service, deadline, lambda: service, rank)
    high = [job for job in order[:count].tolist() if rank[job] == 0]
    alone, alone_count = on_time_first(
        service[rank == 0], deadline[rank == 0], lambda: service[rank == 0], None
    )
    assert len(high) == alone_count
    assert len(alone) == int((rank == 0).sum())


def test_the_job_given_up_is_the_one_with_the_largest_weight() -> None:
    service = np.array([5.0, 5.0, 5.0])
    deadline = np.array([10.0, 10.0, 10.0])
    order, count = on_time_first(service, deadline, lambda: np.array([1.0, 9.0, 2.0]), None)
    assert count == 2
    assert order.tolist() == [0, 2, 1]


def test_no_jobs() -> None:
    order, count = on_time_first(np.empty(0), np.empty(0), lambda: np.empty(0), None)
    assert not len(order)
    assert count == 0
