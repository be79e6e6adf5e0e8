"""The waiting queue beside vLLM's own, operation by operation, and what remains when it fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("vllm")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.request import Request

from sola_sched.core.queues import PlannedQueue
from sola_sched.vllm_adapter.steps.guarded_queue import GuardedQueue
from sola_sched.vllm_adapter.steps.steering import place_of

pytestmark = pytest.mark.vllm

POLICIES = list(SchedulingPolicy)
#: Every operation of vLLM's queues that takes no request, and those that take one or several.
ASKING = ("peek", "pop", "bool", "len", "list")
WITH_ONE, WITH_SEVERAL = ("add", "prepend", "remove"), ("prepend_all", "remove_all")
#: Requests in a run; two in three have the priority or the arrival of another.
NUM_REQUESTS = 8
#: Operations of all runs so far, by name: `pytest -rP` shows them.
num_run: Counter[str] = Counter()

Step = tuple[str, list[int]]


def steps(*further: str) -> st.SearchStrategy[list[Step]]:
    """Operations with the numbers of the requests they are given."""
    one = st.lists(st.integers(0, NUM_REQUESTS - 1), min_size=1, max_size=1)
    several = st.lists(st.integers(0, NUM_REQUESTS - 1), max_size=4)
    named = st.tuples(st.sampled_from(ASKING), st.just([]))
    # Mostly such that something is there to be taken out.
    with_one = st.tuples(st.sampled_from((*WITH_ONE, "add", "prepend")), one)
    with_several = st.tuples(st.sampled_from((*WITH_SEVERAL, *further)), several)
    return st.lists(named | with_one | with_several, max_size=40)


def make_requests() -> list[Request]:
    params = SamplingParams(max_tokens=1)
    return [
        Request(f"r{i}", [1], params, None, arrival_time=float(i % 4 // 2), priority=i % 2)
        for i in range(NUM_REQUESTS)
    ]


def make_guarded(
    policy: SchedulingPolicy,
    without_place: Callable[[], list[Request]] = list,
    failed: Callable[[str, BaseException], None] | None = None,
) -> GuardedQueue:
    def own_queue(requests: Any) -> Any:
        queue = create_request_queue(policy)
        for request in requests:
            queue.add_request(request)
        return queue

    def fail(doing: str, error: BaseException) -> None:
        raise AssertionError(doing) from error

    key = place_of if policy == SchedulingPolicy.PRIORITY else None
    return GuardedQueue(
        key=key, own_queue=own_queue, without_place=without_place, failed=failed or fail
    )


class Model:
    """vLLM's own queue, with the front that a plan shows kept beside it."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.queue = create_request_queue(policy)
        self.shown: list[Request] | None = None

    def __call__(self, name: str, requests: list[Request]) -> Any:
        if name == "plan":
            self.shown = [r for r in dict.fromkeys(requests) if r in list(self.queue)]
            return None
        if name == "unplan":
            self.shown = None
            return None
        if self.shown is not None and name in ("peek", "pop", "bool"):
            if name == "bool":
                return bool(self.shown)
            request = self.shown[0]  # IndexError as vLLM's
            if name == "pop":
                del self.shown[0]
                self.queue.remove_request(request)
            return request
        result = apply(self.queue, name, requests)
        if self.shown is not None and name.startswith("remove"):
            self.shown = [r for r in self.shown if r not in requests or r in list(self.queue)]
        return result


def apply(queue: Any, name: str, requests: list[Request]) -> Any:
    """Do one operation on a queue; returns what it gives."""
    if name in ("bool", "len", "list"):
        return {"bool": bool, "len": len, "list": list}[name](queue)
    method = {
        "peek": "peek_request",
        "pop": "pop_request",
        "add": "add_request",
        "prepend": "prepend_request",
        "remove": "remove_request",
        "prepend_all": "prepend_requests",
        "remove_all": "remove_requests",
    }.get(name, name)
    if name == "unplan":
        return queue.unplan()
    given = requests[:1] if name in WITH_ONE else [requests]
    return getattr(queue, method)(*given if name not in ASKING else ())


def outcome(action: Callable[..., Any], *args: Any) -> Any:
    """What it returns, or the type of what it raises."""
    try:
        return action(*args)
    except (IndexError, ValueError, KeyError) as error:
        return type(error)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["planned", "guarded"])
@given(done=steps("plan", "unplan"))
@settings(max_examples=120)
def test_it_does_what_vllms_own_queue_does(
    kind: str, policy: SchedulingPolicy, done: list[Step]
) -> None:
    """Requests in it twice, taken out twice, not in it at all: the same result, or error."""
    requests, model = make_requests(), Model(policy)
    key = place_of if policy == SchedulingPolicy.PRIORITY else None
    ours: Any = PlannedQueue(key=key) if kind == "planned" else make_guarded(policy)
    for name, numbers in done:
        chosen = [requests[number] for number in numbers]
        expected = outcome(model, name, chosen)
        assert outcome(apply, ours, name, chosen) == expected, name
        assert list(ours) == list(model.queue)
        assert all((r in ours) == (r in list(model.queue)) for r in requests)
        num_run[name] += 1


def test_the_model_has_run_every_operation() -> None:
    for name in (*ASKING, *WITH_ONE, *WITH_SEVERAL, "plan", "unplan"):
        assert num_run[name] > 40, name
    print(f"{num_run.total()} operations: {dict(num_run)}")


@given(done=steps("plan", "unplan", "change"))
@settings(max_examples=120)
def test_a_request_whose_place_in_the_order_changes_is_neither_lost_nor_doubled(
    done: list[Step],
) -> None:
    """vLLM's own heap is no longer in order then; what is there must agree all the same."""
    requests = make_requests()
    ours, there = make_guarded(SchedulingPolicy.PRIORITY), Counter[Request]()
    for name, numbers in done:
        chosen = [requests[number] for number in numbers]
        if name == "change":
            for request in chosen:
                request.arrival_time += 1.5
                request.priority = -request.priority
            continue
        result = outcome(apply, ours, name, chosen)
        if name in ("add", "prepend", "prepend_all"):
            there.update(chosen)
        elif name == "remove":
            assert (result is ValueError) == (not there[chosen[0]])
            there[chosen[0]] -= bool(there[chosen[0]])
        elif name == "remove_all":
            for request in chosen:
                there[request] = 0
        elif name == "pop" and isinstance(result, Request):
            there[result] -= 1
        assert Counter(ours) == +there
    ours.unplan()
    assert Counter(ours.pop_request() for _ in range(len(ours))) == +there


class _InjectedError(Exception):
    pass


#: Methods of ours that vLLM's calls come to.
FALLIBLE = (
    "add_request", "prepend_request", "peek_request", "pop_request", "remove_request",
    "remove_requests", "unplan", "__bool__", "__len__", "__iter__", "__contains__",
)  # fmt: skip


@pytest.mark.injects_failures
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("method", FALLIBLE)
@given(done=steps("plan", "unplan"), fails_at=st.integers(0, 20))
@settings(max_examples=15)
def test_after_a_failure_at_any_call_the_same_requests_wait_in_vllms_own_queue(
    method: str, is_after: bool, policy: SchedulingPolicy, done: list[Step], fails_at: int
) -> None:
    """Whether the call had its effect or not. vLLM takes out only what it has looked at."""
    requests, there, failures = make_requests(), dict[Request, None](), list[str]()
    original, num_calls = getattr(PlannedQueue, method), 0

    def failing(queue: Any, *args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == fails_at + 1 and not is_after:
            raise _InjectedError
        result = original(queue, *args)
        if num_calls == fails_at + 1:
            raise _InjectedError
        return result

    queue = make_guarded(
        policy, without_place=lambda: list(there), failed=lambda doing, _: failures.append(doing)
    )
    with mock.patch.object(PlannedQueue, method, failing):
        for name, numbers in done:
            chosen = [requests[number] for number in numbers]
            if name in ("add", "prepend"):
                if chosen[0] in there:
                    continue  # the engine has each of its requests once
                there[chosen[0]] = None
            elif name in ("prepend_all", "peek", "list"):
                continue
            elif name == "pop":
                if not queue:
                    continue
                looked_at = queue.peek_request()
                assert queue.pop_request() is looked_at
                del there[looked_at]
                queue.begin_step()
                continue
            elif name.startswith("remove"):
                chosen = [r for r in chosen if r in there]
                if not chosen:
                    continue
            apply(queue, name, chosen)
            for request in chosen if name.startswith("remove") else ():
                there.pop(request, None)
                if name == "remove":
                    break
            assert len(queue) == len(there)
    queue.unplan()
    assert Counter(queue) == Counter(list(there))
    assert bool(queue) == bool(there)
    assert len(failures) <= 1
    if failures:
        queue.renew()
        assert Counter(queue) == Counter(list(there))
        first = next(iter(queue), None)
        queue.plan([r for r in there if r is not first])
        assert not there or bool(queue) == (len(there) > 1)


@pytest.mark.injects_failures
@pytest.mark.parametrize("policy", POLICIES)
def test_a_queue_that_fails_under_a_plan_shows_nobody_else_until_the_step_has_ended(
    policy: SchedulingPolicy,
) -> None:
    requests = make_requests()
    queue = make_guarded(policy, lambda: list(requests), lambda *_: None)
    for request in requests:
        queue.add_request(request)
    queue.plan(requests[3:5])
    looked_at = queue.peek_request()
    with mock.patch.object(PlannedQueue, "pop_request", side_effect=_InjectedError):
        assert queue.pop_request() is looked_at is requests[3]
    assert not queue
    assert len(queue) == NUM_REQUESTS - 1
    queue.unplan()
    assert queue
    assert requests[3] not in queue


@pytest.mark.injects_failures
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_gone", [False, True], ids=["there", "gone"])
@pytest.mark.parametrize("has_told", [False, True], ids=["not asked", "told"])
def test_who_was_said_to_wait_under_a_plan_does_so_after_a_failure(
    has_told: bool, is_gone: bool, policy: SchedulingPolicy
) -> None:
    """Up to 0.30 vLLM asks twice before it looks, and relies on what it was told first."""
    requests = make_requests()
    there = dict.fromkeys(requests)
    queue = make_guarded(policy, lambda: list(there), lambda *_: None)
    for request in requests:
        queue.add_request(request)
    queue.plan(requests[3:5])
    if has_told:
        assert queue
    if is_gone:
        queue.remove_requests(requests[3:5])
        for request in requests[3:5]:
            del there[request]
    with mock.patch.object(PlannedQueue, "__bool__", side_effect=_InjectedError):
        assert bool(queue) == (has_told and not is_gone)
    if queue:
        assert queue.peek_request() is queue.pop_request() is requests[3]
    assert not queue, "nobody else until the step has ended"
    queue.unplan()
    assert queue


@pytest.mark.injects_failures
@pytest.mark.parametrize("policy", POLICIES)
def test_steps_after_a_failure_hide_nobody(policy: SchedulingPolicy) -> None:
    """What a plan shows, as for adapters, is for our queue: vLLM's own may go on without it."""
    requests = make_requests()
    queue = make_guarded(policy, lambda: list(requests), lambda *_: None)
    for request in requests:
        queue.add_request(request)
    with mock.patch.object(PlannedQueue, "__len__", side_effect=_InjectedError):
        assert len(queue) == NUM_REQUESTS
    order = list(queue)
    queue.plan(order[3:5])

    assert queue
    assert list(queue) == order
    assert queue.peek_request() is queue.pop_request() is order[0]
    assert queue, "the others wait"
    queue.unplan()
    assert len(queue) == NUM_REQUESTS - 1
