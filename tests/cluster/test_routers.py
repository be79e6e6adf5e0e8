"""Each simple router follows its sentence, and all of them the rules of the protocol."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from cluster_views import LinearSteps, make_routed, make_view
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.cluster.all_routers import ALL_ROUTERS
from sola_sched.cluster.reports import Reports
from sola_sched.cluster.routers import (
    ROUTERS,
    CandidateRouter,
    JoinShortestQueue,
    LeastPredictedTtft,
    MemoryBased,
    PowerOfTwo,
    RoundRobin,
    SingleInstance,
    WeightedRoundRobin,
)
from sola_sched.cluster.ttft import predicted_ttft_s
from sola_sched.cluster.view import InstanceView, Refusal, RoutedRequest, Router, Views


def choices(router: CandidateRouter, views: Sequence[InstanceView], count: int) -> list[int]:
    chosen = [router.choose(make_routed(f"r{i}"), views, 0.0) for i in range(count)]
    assert all(isinstance(choice, int) for choice in chosen)
    return [int(choice) for choice in chosen if isinstance(choice, int)]


def test_round_robin_takes_turns_and_skips_the_dead() -> None:
    views = [make_view(), make_view(is_alive=False), make_view()]

    assert choices(RoundRobin(), views, 5) == [0, 2, 0, 2, 0]


def test_weighted_round_robin_keeps_its_proportion_in_every_stretch() -> None:
    chosen = choices(WeightedRoundRobin([4, 1]), [make_view(), make_view()], 20)

    assert Counter(chosen) == {0: 16, 1: 4}
    assert all(chosen[i : i + 5].count(1) == 1 for i in range(0, 20, 5))


def test_weighted_round_robin_goes_by_gpus_when_no_weights_are_given() -> None:
    views = [make_view(num_gpus=1), make_view(num_gpus=3)]

    assert Counter(choices(WeightedRoundRobin(), views, 8)) == {0: 2, 1: 6}


@pytest.mark.parametrize("weights", [[1.0, 0.0], [float("nan")], [-1.0]])
def test_weights_must_be_positive(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        WeightedRoundRobin(weights)


def test_single_instance_moves_on_only_when_its_instance_is_gone() -> None:
    views = [make_view(), make_view(), make_view()]

    assert set(choices(SingleInstance(1), views, 4)) == {1}
    views[1] = make_view(is_alive=False)
    assert set(choices(SingleInstance(1), views, 4)) == {2}


def test_shortest_queue_counts_waiting_and_running() -> None:
    views = [make_view(waiting=[1, 1]), make_view(running=[5]), make_view(waiting=[1], running=[1])]

    assert set(choices(JoinShortestQueue(), views, 5)) == {1}


def test_shortest_queue_breaks_ties_at_random_and_equally_for_a_seed() -> None:
    views = [make_view(), make_view(), make_view()]

    first = choices(JoinShortestQueue(3), views, 60)

    assert first == choices(JoinShortestQueue(3), views, 60)
    assert min(Counter(first).values()) > 10
    assert len(Counter(first)) == 3


def test_power_of_two_never_takes_the_longest_and_not_always_the_shortest() -> None:
    views = [make_view(waiting=[1] * n) for n in (0, 1, 2)]

    chosen = Counter(choices(PowerOfTwo(0), views, 90))

    assert set(chosen) == {0, 1}
    assert 40 <= chosen[0] <= 80  # two of the three pairs have it


def test_power_of_two_with_one_instance_takes_it() -> None:
    assert choices(PowerOfTwo(), [make_view()], 2) == [0, 0]


def test_memory_based_sends_in_proportion_to_memory() -> None:
    views = [make_view(kv_capacity_tokens=40_000), make_view(kv_capacity_tokens=10_000)]
    router = MemoryBased()

    chosen = Counter(choices(router, views, 300))

    assert chosen[0] > 2 * chosen[1] > 0


def test_memory_based_forgets_what_has_ended() -> None:
    views = [make_view(), make_view()]
    router = MemoryBased()
    first = router.choose(make_routed("a", prompt_tokens=5000), views, 0.0)
    assert isinstance(first, int)
    other = 1 - first
    assert set(choices(router, views, 1)) == {other}

    router.ended("a", first)
    router.ended("a", first)  # told twice: still once

    assert router.choose(make_routed("b"), views, 0.0) == first


def test_no_load_is_so_large_that_others_are_lost_beside_it() -> None:
    views = [make_view(kv_capacity_tokens=10_000), make_view(kv_capacity_tokens=10_000)]
    router = MemoryBased(theta=1000.0)
    small = choices(router, views, 2)
    huge = make_routed("huge", prompt_tokens=8000)
    where = router.choose(huge, views, 0.0)
    again = router.choose(make_routed("again", prompt_tokens=8000), views, 0.0)
    assert isinstance(where, int)
    assert isinstance(again, int)

    router.ended("huge", where)
    router.ended("again", again)

    assert small == [0, 1]
    assert router._loads == {0: 1.0, 1: 1.0}
    router.ended("r0", 0)
    assert router.choose(make_routed("b"), views, 0.0) == 0


def test_memory_based_survives_any_overload() -> None:
    views = [make_view(kv_capacity_tokens=200)]
    router = MemoryBased(theta=1e6)

    assert set(choices(router, views, 50)) == {0}


def test_theta_must_be_positive() -> None:
    with pytest.raises(ValueError, match="theta"):
        MemoryBased(0.0)


def test_least_ttft_prefers_the_faster_of_two_idle_ones() -> None:
    slow = make_view(model=LinearSteps(per_prompt_token_s=4e-4))

    assert choices(LeastPredictedTtft(), [slow, make_view()], 1) == [1]


def test_least_ttft_prefers_a_longer_queue_of_short_prompts_to_one_long_prompt() -> None:
    views = [make_view(waiting=[5000]), make_view(waiting=[50] * 20)]

    assert choices(LeastPredictedTtft(), views, 1) == [1]


@pytest.mark.parametrize("name", ["least-ttft", "combined"])
def test_of_many_instances_few_are_looked_at_and_a_good_one_is_chosen(name: str) -> None:
    queues = np.random.default_rng(0).permutation(1000)
    views = [make_view(waiting=[int(tokens)]) for tokens in queues]
    router = ALL_ROUTERS[name](0)
    looked_at = []

    def pick(request: RoutedRequest, views: Views, able: Sequence[int], now_s: float) -> int:
        looked_at.append(len(able))
        return int(type(router).pick(router, request, views, able, now_s))  # type: ignore[attr-defined]

    router.pick = pick  # type: ignore[attr-defined]
    chosen = [router.choose(make_routed(f"r{i}"), views, 0.0) for i in range(50)]

    assert set(looked_at) == {40}  # 4 log2(1000)
    assert np.mean(queues[chosen]) < 50  # of 40 drawn the best is one of the best 40th


@pytest.mark.parametrize("name", ["least-ttft", "combined"])
def test_the_only_one_of_many_instances_that_can_serve_is_found(name: str) -> None:
    views = [make_view(is_alive=i == 137) for i in range(500)]
    router = ALL_ROUTERS[name](0)

    assert {router.choose(make_routed(f"r{i}"), views, 0.0) for i in range(20)} == {137}


@pytest.mark.parametrize("name", ["least-ttft", "combined"])
def test_of_many_that_have_left_none_keeps_a_request_from_the_best(name: str) -> None:
    gone = [make_view(is_alive=False) for _ in range(60)]
    views = [*gone, *(make_view(waiting=[5000]) for _ in range(3)), make_view()]
    router = ALL_ROUTERS[name](0)

    assert {router.choose(make_routed(f"r{i}"), views, 0.0) for i in range(20)} == {63}


def test_an_idle_instance_delivers_after_its_own_prefill() -> None:
    assert predicted_ttft_s(make_view(), 100, 0.0) == pytest.approx(0.01 + 100 * 1e-4)


def test_prompts_ahead_are_computed_first_and_chunks_pay_the_decodes() -> None:
    view = make_view(waiting=[2000], running=[100] * 48, model=LinearSteps(per_decode_s=1e-3))

    # Two steps of 2048 - 48 tokens, each with 48 decodes of 1 ms.
    assert predicted_ttft_s(view, 2000, 0.0) == pytest.approx(4000 * 1e-4 + 2 * (0.01 + 0.048))


def test_without_a_slot_the_first_end_comes_before_the_prompt() -> None:
    view = make_view(running=[100, 100], max_num_seqs=2, running_left=np.array([30.0, 5.0]))

    assert predicted_ttft_s(view, 100, 0.0) == pytest.approx(5 * 0.01 + 0.01 + 100 * 1e-4)


def test_who_waits_takes_the_free_slots_and_holds_them_before_the_prompt() -> None:
    # Two slots, both free: the third that waits begins when the first has run, 100 steps.
    waits = [predicted_ttft_s(make_view(waiting=[1.0] * num, max_num_seqs=2), 100, 0.0)
             for num in range(5)]  # fmt: skip

    assert np.array(waits) // 0.5 == pytest.approx([0, 0, 2, 2, 4])


def test_a_burst_goes_to_unequal_instances_by_their_speed_whatever_runs_there() -> None:
    reports = Reports()
    fast = make_view(model=LinearSteps(0.02), max_num_seqs=4, running=[50.0])
    for view in (fast, make_view(model=LinearSteps(0.05), max_num_seqs=4)):
        reports.join(view, 0.0)
    router = LeastPredictedTtft()
    chosen: Counter[int] = Counter()

    for i in range(70):
        request = make_routed(f"r{i}")
        instance = router.choose(request, reports.views, 0.0)
        assert isinstance(instance, int)
        reports.sent(instance, request, 0.0)
        chosen[instance] += 1

    assert chosen[0] == pytest.approx(50, abs=4)


def test_without_memory_as_many_ends_as_the_queue_needs_come_first() -> None:
    view = make_view(
        waiting=[150],
        running=[100, 100, 100],
        kv_capacity_tokens=300,
        running_left=np.array([30.0, 5.0, 10.0]),
    )

    # 150 tokens need the first two ends; the prompt ahead takes its time after that.
    own_s = 0.01 + 100 * 1e-4
    assert predicted_ttft_s(view, 100, 0.0) == pytest.approx(10 * 0.01 + 150 * 1e-4 + own_s)


def test_reported_work_has_gone_on_since_and_unreported_work_has_not() -> None:
    view = make_view(waiting=[2000])
    fresh = predicted_ttft_s(view, 100, 0.0)

    assert predicted_ttft_s(view, 100, 0.1) == pytest.approx(fresh - 0.1)
    idle = make_view()
    sent = idle.with_requests([make_routed("s", prompt_tokens=1000)])
    assert predicted_ttft_s(sent, 100, 9.0) == pytest.approx(0.01 + 1100 * 1e-4)


def test_lost_requests_that_wait_to_the_last_are_in_nobodys_way() -> None:
    some = {"waiting": [5000.0, 300.0], "num_waiting_lost": 1}

    in_order = predicted_ttft_s(make_view(**some), 100, 0.0)  # type: ignore[arg-type]
    last = predicted_ttft_s(make_view(**some, serves_lost_last=True), 100, 0.0)  # type: ignore[arg-type]

    assert last == predicted_ttft_s(make_view(waiting=[300.0]), 100, 0.0)
    assert in_order > last + 0.5


@given(
    waiting=st.lists(st.floats(1, 8000), max_size=20),
    running=st.lists(st.floats(1, 4000), max_size=20),
    prompt=st.integers(1, 8000),
)
def test_more_ahead_never_means_an_earlier_first_token(
    waiting: list[float], running: list[float], prompt: int
) -> None:
    view = make_view(waiting=waiting, running=running, kv_capacity_tokens=300_000)
    longer = make_view(waiting=[*waiting, 500.0], running=running, kv_capacity_tokens=300_000)

    assert predicted_ttft_s(longer, prompt, 0.0) >= predicted_ttft_s(view, prompt, 0.0)
    assert predicted_ttft_s(view, prompt + 1, 0.0) >= predicted_ttft_s(view, prompt, 0.0)


@pytest.mark.parametrize("name", sorted(ROUTERS))
@given(
    alive=st.lists(st.booleans(), min_size=1, max_size=6),
    waiting=st.lists(st.integers(0, 5), min_size=6, max_size=6),
)
def test_every_router_sends_to_the_living_or_says_why_not(
    name: str, alive: list[bool], waiting: list[int]
) -> None:
    views = [
        make_view(waiting=[10.0] * count, is_alive=lives)
        for lives, count in zip(alive, waiting, strict=False)
    ]
    router = ROUTERS[name](0)

    choice = router.choose(make_routed(), views, 0.0)

    if any(alive):
        assert isinstance(choice, int)
        assert alive[choice]
    else:
        assert isinstance(choice, Refusal)
        assert "alive" in choice.reason


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_every_router_avoids_the_instance_that_failed_and_uses_one_that_joined(name: str) -> None:
    reports = Reports()
    reports.join(make_view(), 0.0)
    router = ROUTERS[name](0)
    assert router.choose(make_routed("a"), reports.views, 0.0) == 0

    reports.join(make_view(), 1.0)

    assert router.choose(make_routed("a", avoid=[0]), reports.views, 1.0) == 1


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_every_router_repeats_itself_for_the_same_seed(name: str) -> None:
    views = [make_view(waiting=[1] * (i % 3)) for i in range(6)]

    assert choices(ROUTERS[name](5), views, 30) == choices(ROUTERS[name](5), views, 30)


def test_what_was_sent_spreads_a_burst_between_two_reports() -> None:
    reports = Reports()
    for _ in range(4):
        reports.join(make_view(), 0.0)
    router = LeastPredictedTtft()

    chosen = []
    for i in range(40):
        request = replace(make_routed(f"r{i}"), arrival_s=0.0)
        instance = router.choose(request, reports.views, 0.0)
        assert isinstance(instance, int)
        reports.sent(instance, request, 0.0)
        chosen.append(instance)

    assert Counter(chosen) == {0: 10, 1: 10, 2: 10, 3: 10}


#: Routers that have equals in turn, and those that draw one of them.
IN_TURN = sorted(set(ALL_ROUTERS) - {"single", "shortest-queue", "power-of-two"})


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", IN_TURN)
def test_idle_instances_get_requests_in_turn(name: str, number: int) -> None:
    router, reports = ALL_ROUTERS[name](0), Reports()
    for _ in range(number):
        reports.join(make_view(), 0.0)

    chosen = [_served_alone(router, reports, f"r{i}") for i in range(12)]

    assert chosen == [i % number for i in range(12)]


@pytest.mark.parametrize("name", ["shortest-queue", "power-of-two"])
def test_idle_instances_are_drawn_at_random(name: str) -> None:
    router, reports = ALL_ROUTERS[name](0), Reports()
    for _ in range(2):
        reports.join(make_view(), 0.0)

    chosen = Counter(_served_alone(router, reports, f"r{i}") for i in range(40))

    assert min(chosen[0], chosen[1]) >= 10


@pytest.mark.parametrize("name", ["least-ttft", "combined", "spreading", "workload"])
def test_idle_instances_whose_learned_step_times_differ_a_little_get_requests_in_turn(
    name: str,
) -> None:
    router, reports = ALL_ROUTERS[name](0), Reports()
    for factor in (1.0, 0.97, 1.02):
        steps = LinearSteps(step_s=0.01 * factor, per_prompt_token_s=1e-4 * factor)
        reports.join(make_view(model=steps), 0.0)

    chosen = Counter(_served_alone(router, reports, f"r{i}") for i in range(12))

    assert chosen == {0: 4, 1: 4, 2: 4}


@pytest.mark.parametrize("name", ["least-ttft", "combined", "spreading", "workload"])
def test_of_two_idle_instances_the_much_faster_one_gets_all(name: str) -> None:
    router, reports = ALL_ROUTERS[name](0), Reports()
    for factor in (3.0, 1.0):
        steps = LinearSteps(step_s=0.01 * factor, per_prompt_token_s=1e-3 * factor)
        reports.join(make_view(model=steps), 0.0)

    assert {_served_alone(router, reports, f"r{i}") for i in range(6)} == {1}


def _served_alone(router: Router, reports: Reports, req_id: str) -> int:
    """Where a request goes that ends before the next one comes."""
    request = make_routed(req_id)
    where = router.choose(request, reports.views, 0.0)
    assert isinstance(where, int)
    reports.sent(where, request, 0.0)
    reports.ended(where, req_id)
    router.ended(req_id, where)
    return where


@pytest.mark.parametrize("name", sorted(ALL_ROUTERS))
def test_an_instance_that_takes_the_place_of_one_that_left_is_a_new_one(name: str) -> None:
    router, reports = ALL_ROUTERS[name](0), Reports()
    for _ in range(3):
        reports.join(make_view(), 0.0)
    request = make_routed("old")
    where = router.choose(request, reports.views, 0.0)
    assert isinstance(where, int)
    router.ended("old", where)
    reports.forget(1)

    assert reports.join(make_view(), 1.0) == 1

    others = [make_view(is_alive=False), reports.views[1], make_view(is_alive=False)]
    assert router.choose(make_routed("new"), others, 1.0) == 1
    assert router.choose(make_routed("newer"), others[:2], 1.0) == 1


@pytest.mark.parametrize("name", ALL_ROUTERS)
def test_a_view_ends_with_the_next_report(name: str) -> None:
    """A long queue makes a large view, and there are ten a second of each instance."""
    router, views = ALL_ROUTERS[name](0), [make_view(waiting=[10.0] * 5, running=[9.0])] * 2
    last = weakref.ref(views[0])
    router.choose(make_routed("r"), views, 0.0)
    router.ended("r", 0)

    views.clear()
    router.choose(make_routed("s"), [make_view(), make_view()], 0.1)
    gc.collect()

    assert last() is None
