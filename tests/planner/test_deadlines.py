"""Moore-Hodgson against brute force."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.planner.deadlines import _MAX_EXAMINED, Jobs, Slots, _first_by_deadline

JOBS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 60)),
    min_size=1,
    max_size=6,
)


def on_time_first(*jobs, **options) -> tuple[np.ndarray, int]:
    """All jobs, those on time first; how many these are."""
    all_jobs = Jobs(*jobs, **options)
    kept = all_jobs.on_time()
    return all_jobs.order(kept), len(kept)


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
    order, count = on_time_first(service, deadline, lambda index: service[index], None)
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
    all_jobs = Jobs(service, deadline, lambda index: service[index], rank)
    kept = all_jobs.on_time()
    high = [job for job in kept if rank[job] == 0]
    assert rank[all_jobs.order(kept)].tolist() == sorted(rank.tolist())
    alone, alone_count = on_time_first(
        service[rank == 0], deadline[rank == 0], lambda index: service[rank == 0][index], None
    )
    assert len(high) == alone_count
    assert len(alone) == int((rank == 0).sum())


def test_the_job_given_up_is_the_one_with_the_largest_weight() -> None:
    service = np.array([5.0, 5.0, 5.0])
    deadline = np.array([10.0, 10.0, 10.0])
    weight = np.array([1.0, 9.0, 2.0])
    order, count = on_time_first(service, deadline, lambda index: weight[index], None)
    assert count == 2
    assert order.tolist() == [0, 2, 1]


def test_those_late_come_by_weight_only_where_their_order_matters() -> None:
    service, deadline = np.array([5.0, 5.0, 5.0, 5.0]), np.array([1.0, 2.0, 3.0, 5.0])
    weight, asked = np.array([9.0, 3.0, 5.0, 1.0]), []

    def weigh(index: np.ndarray) -> np.ndarray:
        asked.append(len(index))
        return weight[index]

    jobs = Jobs(service, deadline, weigh)
    kept = jobs.on_time()
    assert kept == [3]
    assert asked == [4]
    assert jobs.order(kept).tolist() == [3, 1, 2, 0]
    assert asked == [4, 3]
    assert jobs.order(kept, all_count=False).tolist() == [3, 0, 1, 2]
    assert asked == [4, 3]


def test_a_job_that_gets_no_slot_in_time_makes_the_costliest_go() -> None:
    # One slot now and one every 4: the third comes at 8, after the last deadline.
    service = np.array([0.1, 0.1, 0.1])
    deadline = np.array([3.0, 5.0, 7.0])
    slots = Slots(np.ones(3, dtype=bool), num_free=1, interval_s=4.0)
    weight = np.array([1.0, 9.0, 2.0])
    order, count = on_time_first(service, deadline, lambda index: weight[index], None, slots)
    assert order[:count].tolist() == [0, 2]


def test_a_job_with_a_slot_of_its_own_is_not_late_for_want_of_others() -> None:
    service = np.array([0.1, 0.1])
    slots = Slots(np.array([False, True]), num_free=0, interval_s=4.0)
    order, count = on_time_first(
        service, np.array([1.0, 5.0]), lambda index: service[index], None, slots
    )
    assert order.tolist() == [0, 1]
    assert count == 2
    _, count = on_time_first(
        service, np.array([1.0, 3.0]), lambda index: service[index], None, slots
    )
    assert count == 1


@given(JOBS, st.integers(0, 3))
def test_slots_alone_are_shared_out_as_time_is(jobs: list[tuple[int, int]], free: int) -> None:
    deadline = np.array([d for _, d in jobs], dtype=float)
    nothing, weight = np.zeros(len(jobs)), np.arange(len(jobs), dtype=float)
    slots = Slots(np.ones(len(jobs), dtype=bool), num_free=free, interval_s=7.0)
    order, count = on_time_first(nothing, deadline, lambda index: weight[index], None, slots)
    for place, job in enumerate(order[:count]):
        assert (place + 1 - free) * 7.0 <= deadline[job]
    as_time = [(7, d + free * 7) for _, d in jobs]
    assert count == most_on_time(as_time)


def test_of_a_long_queue_the_first_deadlines_are_looked_at() -> None:
    rng = np.random.default_rng(0)
    service, deadline = rng.uniform(0.5, 1.5, 1000), rng.permutation(np.arange(1000.0)) / 20
    order, count = on_time_first(service, deadline, lambda index: service[index], None)
    first = np.argsort(deadline)[:64]
    kept = on_time_first(service[first], deadline[first], lambda index: service[first][index])
    assert order[:count].tolist() == first[kept[0][: kept[1]]].tolist()
    assert sorted(order.tolist()) == list(range(1000))
    assert (np.diff(service[order[count:]]) >= 0.0).all()


@given(JOBS, st.integers(0, 3), st.integers(0, 6))
def test_those_kept_are_on_time_on_the_machine_and_find_slots(
    jobs: list[tuple[int, int]], free: int, interval: int
) -> None:
    service = np.array([s for s, _ in jobs], dtype=float)
    deadline = np.array([d for _, d in jobs], dtype=float)
    needs = np.arange(len(jobs)) % 3 > 0
    slots = Slots(needs, num_free=free, interval_s=float(interval))
    order, count = on_time_first(service, deadline, lambda index: service[index], None, slots)
    assert sorted(order.tolist()) == list(range(len(jobs)))
    kept = order[:count]
    assert (np.cumsum(service[kept]) <= deadline[kept]).all()
    num_taken = np.cumsum(needs[kept])
    assert ((num_taken - free) * interval <= deadline[kept])[needs[kept]].all()


def test_where_not_all_are_on_time_those_that_are_have_the_lead() -> None:
    service = np.array([1.0, 1.0, 1.0, 10.0])
    deadline = np.array([1.5, 4.0, 4.0, 5.0])
    order, count = on_time_first(service, deadline, lambda index: service[index], None)
    assert order[:count].tolist() == [0, 1, 2]
    order, count = on_time_first(service, deadline, lambda index: service[index], None, lead_s=1.0)
    assert order[:count].tolist() == [1, 2]
    first = slice(3)  # all can be on time
    order, count = on_time_first(
        service[first], deadline[first], lambda: service[first], None, lead_s=1.0
    )
    assert order[:count].tolist() == [0, 1, 2]


def test_no_lead_is_asked_for_that_nobody_can_have() -> None:
    service, deadline = np.array([1.0, 1.0]), np.array([1.2, 1.3])
    _, count = on_time_first(service, deadline, lambda index: service[index], None, lead_s=1.0)
    assert count == 1


def test_no_jobs() -> None:
    order, count = on_time_first(np.empty(0), np.empty(0), lambda: np.empty(0), None)
    assert not len(order)
    assert count == 0


@given(st.lists(st.integers(1, 9), min_size=200, max_size=300))
def test_in_a_crowd_equal_deadlines_keep_their_order(deadlines: list[int]) -> None:
    """One that has begun comes before those who wait: it is not left for another halfway."""
    deadline = np.array(deadlines, dtype=float)
    order = _first_by_deadline(deadline)
    assert sorted(order.tolist()) == list(range(len(deadline)))
    assert (
        order[:_MAX_EXAMINED].tolist() == deadline.argsort(kind="stable")[:_MAX_EXAMINED].tolist()
    )
