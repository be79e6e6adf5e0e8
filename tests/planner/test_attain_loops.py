"""Who is on time by Moore-Hodgson."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.planner.attain import pace
from sola_sched.planner.attain.records import NEAR, NUM_LISTS, PREFILL, STEP, Step

JOBS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=6)


def keep(
    service: object, deadline: object, weight: object = None, *, rank: object = None
) -> list[int]:
    """Numbers of the jobs kept, by (rank, deadline)."""
    service, deadline = (np.asarray(x, dtype=np.float64) for x in (service, deadline))
    rank = np.zeros(len(service), dtype=np.int64) if rank is None else np.asarray(rank)
    at, prefills = np.zeros(1, STEP).view(np.recarray)[0], np.zeros(len(service), PREFILL)
    prefills["service_s"], prefills["due_s"], prefills["rank"] = service, deadline, rank
    prefills["weight_s"] = service if weight is None else weight
    lists = np.zeros((NUM_LISTS, len(service)), dtype=np.int64)
    jobs = lists[NEAR] = np.lexsort((deadline, rank))
    at.num_near = len(jobs)
    none = np.empty(0, dtype=np.int64)
    jobs_of = prefills.view(np.recarray)
    step = Step(at, None, None, None, None, jobs_of, lists, none, none)
    kept = np.zeros(len(service), dtype=np.bool_)
    count = pace._keep.py_func(step, 1.0, 0.0, kept)
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


def test_no_jobs() -> None:
    assert keep([], []) == []
