"""The planned queue against a plain list."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.core.queues import PlannedQueue


def test_it_is_first_come_first_served_without_a_plan() -> None:
    queue = PlannedQueue("abc")
    queue.add_request("d")
    queue.prepend_request("z")
    queue.prepend_requests(["y", "x"])  # as vLLM's: the last one given ends up first
    assert [queue.pop_request() for _ in range(len(queue))] == list("xyzabcd")
    assert not queue
    with pytest.raises(IndexError, match="empty queue"):
        queue.peek_request()


def test_a_plan_shows_its_requests_only_and_in_its_order() -> None:
    queue = PlannedQueue("abcd")
    queue.plan(["c", "a", "not there"])
    assert len(queue) == 4
    assert queue.pop_request() == "c"
    queue.prepend_request("preempted now")
    assert queue.pop_request() == "a"
    assert not queue
    with pytest.raises(IndexError, match="no visible"):
        queue.pop_request()
    queue.unplan()
    assert list(queue) == ["preempted now", "b", "d"]


def test_removal_works_in_and_out_of_the_plan() -> None:
    queue = PlannedQueue("abcd")
    queue.plan(["c", "b"])
    queue.remove_requests(["c", "d", "unknown"])
    assert queue.peek_request() == "b"
    assert list(queue) == ["a", "b"]
    with pytest.raises(KeyError):
        queue.remove_request("unknown")


def test_a_sorted_queue_has_no_front_to_put_requests_in() -> None:
    queue = PlannedQueue("bd", key=str)
    queue.prepend_requests("ca")
    assert queue.peek_request() == "a"
    queue.plan(["d", "b"])
    assert queue.pop_request() == "d"
    queue.unplan()
    assert [queue.pop_request() for _ in range(len(queue))] == list("abc")


@pytest.mark.parametrize("key", [None, lambda item: (item % 3, item)], ids=["fcfs", "sorted"])
@given(st.lists(st.tuples(st.sampled_from(["add", "front", "pop", "remove"]), st.integers(0, 9))))
def test_any_sequence_matches_a_list(key: Any, steps: list[tuple[str, int]]) -> None:
    queue: PlannedQueue[int] = PlannedQueue(key=key)
    model: list[int] = []
    for action, item in steps:
        if action == "pop":
            if model:
                assert queue.pop_request() == model.pop(0)
        elif action == "remove":
            queue.remove_requests([item])
            model = [other for other in model if other != item]
        elif item not in model:
            if action == "add":
                queue.add_request(item)
                model.append(item)
            else:
                queue.prepend_request(item)
                model.insert(0, item)
        if key is not None:
            model.sort(key=key)
    assert list(queue) == model
    assert len(queue) == len(model)
    assert bool(queue) == bool(model)
