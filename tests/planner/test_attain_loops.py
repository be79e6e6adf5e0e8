"""The loops of a plan of `attain`: who is on time by Moore-Hodgson, compiled or not."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.planner.attain import loops

JOBS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=6)


def keep(
    service: object,
    deadline: object,
    weight: object = None,
    *,
    rank: object = None,
    num_with_slot: int | None = None,
    slot_s: float = 0.0,
    num_free: int = 0,
    loop: object = None,
) -> list[int]:
    """Numbers of the jobs kept, by (rank, deadline); the first ones have a slot."""
    service, deadline = (np.asarray(x, dtype=np.float64) for x in (service, deadline))
    weight = service if weight is None else np.asarray(weight, dtype=np.float64)
    rank = np.zeros(len(service), dtype=np.int64) if rank is None else np.asarray(rank)
    jobs = np.lexsort((deadline, rank))
    kept = np.zeros(len(service), dtype=np.bool_)
    count = (loop or loops.load().keep_on_time)(
        jobs, service, deadline, weight, rank, 1.0, 0.0,
        len(service) if num_with_slot is None else num_with_slot, slot_s, -num_free * slot_s, kept,
    )  # fmt: skip
    assert count == int(kept.sum())
    return [int(job) for job in jobs[kept]]


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
    service, deadline = zip(*jobs, strict=True)
    kept = keep(service, deadline)
    assert len(kept) == most_on_time(jobs)
    assert (np.cumsum(np.take(service, kept)) <= np.take(deadline, kept)).all()


@given(JOBS)
def test_a_higher_class_never_loses_a_job_to_a_lower_one(jobs: list[tuple[int, int]]) -> None:
    service, deadline = (np.array(x) for x in zip(*jobs, strict=True))
    rank = np.arange(len(jobs)) % 2
    high = [job for job in keep(service, deadline, rank=rank) if rank[job] == 0]
    assert len(high) == len(keep(service[rank == 0], deadline[rank == 0]))


def test_the_job_given_up_is_the_one_with_the_largest_weight() -> None:
    assert keep([5, 5, 5], [10, 10, 10], [1, 9, 2]) == [0, 2]


def test_a_job_that_gets_no_slot_in_time_makes_the_costliest_go() -> None:
    # One slot now and one every 4: the third comes at 8, after the last deadline.
    kept = keep([0.1] * 3, [3, 5, 7], [1, 9, 2], num_with_slot=0, slot_s=4.0, num_free=1)
    assert kept == [0, 2]


@pytest.mark.parametrize(("deadline", "num_kept"), [(5.0, 2), (3.0, 1)])
def test_a_job_with_a_slot_of_its_own_is_not_late_for_want_of_others(
    deadline: float, num_kept: int
) -> None:
    assert len(keep([0.1, 0.1], [1.0, deadline], num_with_slot=1, slot_s=4.0)) == num_kept


@given(JOBS, st.integers(0, 3))
def test_slots_alone_are_shared_out_as_time_is(jobs: list[tuple[int, int]], free: int) -> None:
    deadline = [d for _, d in jobs]
    nothing, weight = np.zeros(len(jobs)), np.arange(len(jobs))
    kept = keep(nothing, deadline, weight, num_with_slot=0, slot_s=7.0, num_free=free)
    assert len(kept) == most_on_time([(7, d + free * 7) for d in deadline])


@given(JOBS, st.integers(0, 3), st.integers(0, 6), st.integers(0, 6))
def test_compiled_and_not_those_kept_are_on_time_and_find_slots(
    jobs: list[tuple[int, int]], free: int, interval: int, num_with_slot: int
) -> None:
    service, deadline = (np.array(x) for x in zip(*jobs, strict=True))
    kept, plain = (
        keep(
            service,
            deadline,
            num_with_slot=num_with_slot,
            slot_s=float(interval),
            num_free=free,
            loop=loop,
        )
        for loop in (None, loops.keep_on_time)
    )
    assert kept == plain
    needs = np.array(kept, dtype=np.int64) >= num_with_slot
    assert (np.cumsum(service[kept]) <= deadline[kept]).all()
    num_taken = np.cumsum(needs)
    assert ((num_taken - free) * interval <= deadline[kept])[needs].all() or not interval


def test_no_jobs() -> None:
    assert keep([], []) == []
