"""Turn rules between services, as tables."""

from __future__ import annotations

import math

import pytest

from sola_sched.cluster.sharing.queue import Habits, ServiceQueue, SharedRequest, expected_left
from sola_sched.cluster.sharing.turns import (
    DoublingBudget,
    FirstCome,
    LeastSlack,
    SkipJoin,
    TurnRule,
    budget_left,
)


def make_queue(
    name: str = "a",
    *,
    mean_s: float = 1.0,
    waiting: tuple[float, ...] = (),
    running: tuple[tuple[float, float], ...] = (),
    served_s: float = 0.0,
    deadline_s: float = math.inf,
) -> ServiceQueue:
    """Waiting requests by arrival, running ones by arrival and seconds executed; no deviation."""
    queue = ServiceQueue(name, Habits(mean_s, 0.0, (10.0,), 0.001), served_s=served_s, pace_s=0.1)
    for number, arrival_s in enumerate(waiting):
        queue.waiting.append(
            SharedRequest(number, name, arrival_s, 100, 10, deadline_s, num_prompt=100)
        )
    for number, (arrival_s, executed_s) in enumerate(running, start=100):
        queue.running[number] = SharedRequest(
            number, name, arrival_s, 100, 10, deadline_s, num_prompt=100, num_computed=100,
            executed_s=executed_s, is_decoding=True, num_done=1,
        )  # fmt: skip
    return queue


def first(rule: TurnRule, now_s: float, *queues: ServiceQueue) -> str:
    return min(queues, key=lambda queue: rule.rank(queue, now_s)).name


@pytest.mark.parametrize(
    ("executed_s", "left_s"),
    [(0.0, 2.0), (1.5, 0.5), (2.0, 4.0), (5.0, 1.0), (6.0, 8.0), (14.0, 16.0)],
)
def test_budget_doubles_when_it_is_spent(executed_s: float, left_s: float) -> None:
    assert budget_left(executed_s, 2.0) == pytest.approx(left_s)


def test_first_come_serves_the_service_of_the_oldest_request() -> None:
    long, short = make_queue("long", running=((0.0, 9.0),)), make_queue("short", waiting=(1.0,))

    assert first(FirstCome(), 2.0, long, short) == "long"


def test_doubling_budget_serves_the_short_service_first() -> None:
    long = make_queue("long", mean_s=10.0, running=((0.0, 1.0),))
    short = make_queue("short", mean_s=1.0, waiting=(1.0,))

    assert first(DoublingBudget(), 2.0, long, short) == "short"


def test_request_that_overruns_its_budget_falls_back() -> None:
    # 1.5 s executed of 1 s: the budget is doubled, 1.5 s are left; the other has 1 s left.
    overrun = make_queue("overrun", mean_s=1.0, running=((0.0, 1.5),))
    fresh = make_queue("fresh", mean_s=1.0, waiting=(5.0,))

    assert first(DoublingBudget(), 5.0, overrun, fresh) == "fresh"
    assert DoublingBudget().until_s(overrun) == pytest.approx(1.5)


def test_starved_service_comes_before_all() -> None:
    long = make_queue("long", mean_s=10.0, waiting=(0.0,), served_s=0.0)
    short = make_queue("short", mean_s=0.1, waiting=(1.0,), served_s=300.0)

    assert first(DoublingBudget(starved_after=20.0), 199.0, long, short) == "short"
    assert first(DoublingBudget(starved_after=20.0), 201.0, long, short) == "long"


def test_skip_join_sends_a_long_prompt_to_a_lower_queue() -> None:
    rule = SkipJoin(quantum_s=0.1)
    long, short = make_queue("long", waiting=(0.0,)), make_queue("short", waiting=(1.0,))
    long.waiting[0].prompt = 1000  # 1 s of prefill; quanta are 0.1, 0.2, 0.4, ...

    assert first(rule, 2.0, long, short) == "short"
    assert rule.until_s(make_queue(running=((0.0, 0.25),))) == pytest.approx(0.05)


def test_least_slack_serves_what_must_start_soonest_and_the_lost_last() -> None:
    rule = LeastSlack()
    soon = make_queue("soon", waiting=(1.0,), deadline_s=4.0)
    late = make_queue("late", waiting=(0.0,), deadline_s=20.0)
    lost = make_queue("lost", waiting=(0.0,), deadline_s=2.5)

    assert first(rule, 2.0, late, soon, lost) == "soon"
    rule.sort_out(lost, 2.0)
    rule.sort_out(soon, 2.0)
    assert (len(lost.waiting), len(lost.late)) == (0, 1)
    assert (len(soon.waiting), len(soon.late)) == (1, 0)


@pytest.mark.parametrize(
    ("first_s", "num_done", "now_s", "starts_s"),
    [
        # 100 prompt tokens take 0.1 s, a decode 0.1 s; 10 more tokens are expected after any.
        (math.nan, 0, 0.0, 1.0 - 0.1 - 0.1),  # TTFT 1 s
        (1.0, 3, 1.2, 1.0 + 3 * 0.2 - 0.1),  # ahead: the next token's time
        (1.0, 3, 1.6, 1.5 + 9 * (0.2 - 0.1)),  # behind: what the rest can still make up
        (1.5, 3, 1.6, -math.inf),  # its first token was late
    ],
)
def test_latest_start_follows_the_target_that_is_next(
    first_s: float, num_done: int, now_s: float, starts_s: float
) -> None:
    queue = make_queue()
    request = SharedRequest(
        0, "a", 0.0, 100, 10, ttft_s=1.0, tpot_s=0.2, num_prompt=100, num_done=num_done,
        first_s=first_s, is_decoding=num_done > 0, num_computed=100 if num_done else 0,
    )  # fmt: skip

    assert queue.latest_start_s(request, now_s) == pytest.approx(starts_s)


def test_least_slack_gives_the_turn_to_the_token_that_is_due_first() -> None:
    slow, fast = make_queue("slow", running=((0.0, 1.0),)), make_queue("fast", waiting=(1.0,))
    for request in (*slow.running.values(), *fast.waiting):
        request.ttft_s, request.tpot_s = 2.0, 0.5
    next(iter(slow.running.values())).first_s = 1.9  # its next token is due at 2.4 s

    assert first(LeastSlack(), 2.0, slow, fast) == "slow"  # 2.3 s against 3 - 0.2 s
    next(iter(slow.running.values())).num_done = 4
    assert first(LeastSlack(), 2.0, slow, fast) == "fast"


def test_expected_left_is_the_mean_of_longer_outputs() -> None:
    left = expected_left([1, 3, 5])

    assert left == pytest.approx((3.0, 3.0, 2.0, 2.0, 1.0, 1.0))
