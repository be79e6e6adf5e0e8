"""The planned queue against a plain list."""

from __future__ import annotations

import pytest

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
    with pytest.raises(ValueError, match="must be in the queue"):
        queue.remove_request("unknown")


def test_a_sorted_queue_has_no_front_to_put_requests_in() -> None:
    queue = PlannedQueue("bd", key=str)
    queue.prepend_requests("ca")
    assert queue.peek_request() == "a"
    queue.plan(["d", "b"])
    assert queue.pop_request() == "d"
    queue.unplan()
    assert [queue.pop_request() for _ in range(len(queue))] == list("abc")


def test_an_item_keeps_the_place_that_it_was_sorted_into() -> None:
    places = {"a": 1, "b": 2, "c": 3}
    queue = PlannedQueue("abc", key=places.__getitem__)
    places["a"] = 9
    queue.remove_request("a")
    assert list(queue) == ["b", "c"]
    queue.add_request("a")
    assert [queue.pop_request() for _ in range(3)] == ["b", "c", "a"]


def test_an_item_that_is_there_twice_is_planned_once() -> None:
    queue = PlannedQueue("aba")
    queue.plan("aa")
    assert queue.pop_request() == "a"
    assert not queue
    queue.unplan()
    assert list(queue) == ["b", "a"]
