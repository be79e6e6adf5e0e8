"""Several services on one group in virtual time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sola_sched.cluster.sharing.placement import Cluster, Group, Placement
from sola_sched.cluster.sharing.queue import Habits, SharedRequest, expected_left
from sola_sched.cluster.sharing.services import Service
from sola_sched.cluster.sharing.turns import (
    DoublingBudget,
    FirstCome,
    LeastSlack,
    RoundRobin,
    SkipJoin,
    TurnRule,
)
from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError, InfeasibleError
from sola_sched.prediction.length import LengthPrediction
from sola_sched.simulator.cluster.fast.instance import FastInstance
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.request import VirtualRequest
from sola_sched.simulator.sharing.cluster import Evaluator, Setting, SharedCluster
from sola_sched.simulator.sharing.engine import Served, SharedEngine
from sola_sched.simulator.sharing.hardware import Hardware
from sola_sched.simulator.sharing.profiling import alone_s
from sola_sched.simulator.steps.time import StepTimeModel

STEPS = BatchTime(StepTimeModel(0.01, 1e-4, 1e-7, 1e-4, 1e-9))
#: 0.1 s a step, whatever is in it.
PLAIN = BatchTime(StepTimeModel(0.1))
RULES = (FirstCome, RoundRobin, SkipJoin, DoublingBudget, LeastSlack)


def make_engine(
    rule: TurnRule, tokens: int, steps: BatchTime = STEPS, **means_s: float
) -> SharedEngine:
    """Services by name with their mean execution times; KV for `tokens`, a byte a token."""
    services = {
        name: Served(steps, 1.0, Habits(mean_s, 0.0, expected_left([20]), 1e-4))
        for name, mean_s in means_s.items()
    }
    return SharedEngine(services, rule, kv_bytes=tokens, max_num_batched_tokens=256)


def run(engine: SharedEngine, requests: list[SharedRequest]) -> None:
    for request in sorted(requests, key=lambda r: r.arrival_s):
        engine.run_until(request.arrival_s)
        engine.add(request, request.arrival_s)
    while engine.num_open:
        engine.advance()
        engine.check_integrity()


lengths = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.integers(1, 400), st.integers(1, 60)),
    min_size=1, max_size=25,
)  # fmt: skip


@given(lengths)
@settings(max_examples=25)
def test_one_service_is_the_fast_engine(shapes: list[tuple[float, int, int]]) -> None:
    """While there is memory for all: the shared engine leaves more of it free than the other."""
    shapes = sorted(shapes)
    alone = FastInstance(
        STEPS, kv_capacity_tokens=15_000, max_num_batched_tokens=256, is_async=False
    )
    ends = {}
    for number, (at_s, prompt, output) in enumerate(shapes):
        while alone.next_s <= at_s:
            ends |= {one.req_id: one.progress for one in alone.advance(alone.next_s)}
        request = VirtualRequest(str(number), at_s, output, prompt_len=prompt)
        alone.add(request, SloTarget(), LengthPrediction.exactly(1.0), at_s)
    while math.isfinite(alone.next_s):
        ends |= {one.req_id: one.progress for one in alone.advance(alone.next_s)}
    requests = [SharedRequest(i, "a", *shape) for i, shape in enumerate(shapes)]

    run(make_engine(FirstCome(), 15_000, a=1.0), requests)

    for request in requests:
        expected = ends[str(request.req_id)]
        assert request.first_s == pytest.approx(expected.first_s)
        assert request.last_s == pytest.approx(expected.last_s)


@pytest.mark.parametrize("rule", RULES)
@given(lengths, st.lists(st.sampled_from("abc"), min_size=25, max_size=25))
@settings(max_examples=12)
def test_every_request_ends_once_within_the_memory(
    rule: type[TurnRule], shapes: list[tuple[float, int, int]], names: list[str]
) -> None:
    requests = [
        SharedRequest(i, names[i], *shape, deadline_s=shape[0] + 2.0)
        for i, shape in enumerate(shapes)
    ]
    engine = make_engine(rule(), 700, a=1.0, b=0.1, c=5.0)

    run(engine, requests)

    assert all(r.num_done == r.output and r.arrival_s < r.first_s <= r.last_s for r in requests)
    span_s = max(r.last_s for r in requests) - min(r.arrival_s for r in requests)
    assert engine.busy_s <= span_s + 1e-9


def test_first_come_blocks_the_short_service_and_the_doubling_budget_does_not() -> None:
    # 0.1 s a step: a long request of 20 tokens from 0 s on, a short one of 2 tokens at 0.05 s.
    ends = {}
    for rule in (FirstCome, DoublingBudget, RoundRobin):
        long = SharedRequest(0, "long", 0.0, 10, 20)
        short = SharedRequest(1, "short", 0.05, 10, 2)
        run(make_engine(rule(), 1000, PLAIN, long=2.0, short=0.2), [long, short])
        ends[rule] = (round(long.last_s, 3), round(short.last_s, 3))

    assert ends[FirstCome] == (2.0, 2.2)
    assert ends[DoublingBudget] == (2.2, 0.3)
    assert ends[RoundRobin] == (2.2, 0.5)


def test_lost_request_waits_for_one_that_can_be_on_time() -> None:
    lost = SharedRequest(0, "a", 0.0, 10, 20, deadline_s=0.1)
    other = SharedRequest(1, "b", 0.0, 10, 20, deadline_s=2.5)

    run(make_engine(LeastSlack(), 1000, PLAIN, a=2.0, b=2.0), [lost, other])

    assert other.is_met
    assert not lost.is_met
    assert lost.last_s == pytest.approx(4.0)


def test_service_in_need_of_memory_displaces_one_behind_it_once() -> None:
    long = SharedRequest(0, "long", 0.0, 60, 30)
    short = SharedRequest(1, "short", 0.55, 60, 2)
    engine = make_engine(DoublingBudget(), 130, PLAIN, long=3.0, short=0.2)

    run(engine, [long, short])

    assert (long.num_displaced, short.num_displaced) == (1, 0)
    assert short.last_s < 1.0 < long.last_s


@given(lengths, st.floats(0.1, 2.0))
@settings(max_examples=25)
def test_withdrawn_requests_end_elsewhere(
    shapes: list[tuple[float, int, int]], stop_s: float
) -> None:
    requests = [SharedRequest(i, "ab"[i % 2], *shape) for i, shape in enumerate(sorted(shapes))]
    old = make_engine(RoundRobin(), 800, a=1.0, b=1.0)
    new = make_engine(RoundRobin(), 800, a=1.0, b=1.0)
    early = [request for request in requests if request.arrival_s <= stop_s]
    for request in early:
        old.run_until(request.arrival_s)
        old.add(request, request.arrival_s)
    old.run_until(stop_s)

    taken = old.withdraw(stop_s)

    assert old.num_open == 0
    assert {r.req_id for r in taken} == {r.req_id for r in early if math.isnan(r.last_s)}
    for request in taken:
        new.add(request, stop_s + 1.0)
    while new.num_open:
        new.advance()
        new.check_integrity()
    assert all(request.num_done == request.output for request in early)


def test_request_that_fits_nowhere_is_refused_with_numbers() -> None:
    with pytest.raises(InfeasibleError, match="300 prompt and 10 output tokens"):
        make_engine(FirstCome(), 200, a=1.0).add(SharedRequest(0, "a", 0.0, 300, 10), 0.0)


def test_time_alone_is_that_of_an_idle_engine() -> None:
    request = SharedRequest(0, "a", 0.0, 600, 40)
    run(make_engine(FirstCome(), 2000, a=1.0), [request])

    assert alone_s(STEPS, 600, 40, 256) == pytest.approx(request.last_s, rel=1e-3)


def make_setting(*services: Service, num_gpus: int = 4) -> Setting:
    return Setting.of(services, Hardware("a100"), Cluster.of(num_gpus), DoublingBudget)


CHAT = Service("chat", "llama-2-7b", 2.0, [(100, 200), (300, 400)], slo_scale=5.0)
SUMMARY = Service("summary", "opt-6.7b", 1.0, [(3000, 20)], slo_scale=5.0)


@pytest.mark.parametrize("longest", [400, 401, 415, 416])
def test_memory_of_a_longest_request_is_whole_blocks_and_the_one_that_vllm_keeps(
    longest: int,
) -> None:
    hardware, service = Hardware("a100"), Service("a", "llama-2-7b", 1.0, [(longest - 10, 10)])

    blocks = hardware._longest_bytes(1, service) / (16 * hardware.kv_bytes("llama-2-7b", 1))

    assert blocks == math.ceil(longest / 16) + 1


def test_large_model_needs_two_gpus() -> None:
    setting = make_setting(CHAT, Service("big", "llama-2-70b", 1.0, [(100, 100)]))

    assert setting.profiles["chat"].degree == 1
    assert setting.profiles["big"].degree == 2
    assert not Hardware("a100").fits(1, [setting.services["big"]])
    assert Hardware("a100").fits(1, [CHAT, SUMMARY])


def test_unknown_model_and_gpu_are_named() -> None:
    with pytest.raises(ConfigError, match=r"'model' must be one of .*llama-2-7b"):
        make_setting(Service("a", "gpt-5", 1.0, [(1, 1)]))
    with pytest.raises(ConfigError, match="'gpu' must be one of"):
        Hardware("tpu")


def test_dispatcher_sends_to_the_group_with_the_fewest_requests() -> None:
    setting = make_setting(CHAT)
    cluster = SharedCluster(setting, Placement((Group(1, ("chat",)), Group(1, ("chat",)))))

    for request in setting.requests([(0.0, "chat", 100, 200)] * 5):
        cluster.add(request, 0.0)

    assert [engine.num_open for engine in cluster.engines] == [3, 2]


def test_evaluator_counts_a_service_without_a_place_as_missed() -> None:
    arrivals = [(0.1 * i, name, 200, 50) for i in range(20) for name in ("chat", "summary")]
    evaluate = Evaluator(make_setting(CHAT, SUMMARY), arrivals)

    outcomes = evaluate(Placement((Group(1, ("chat",)),)))

    assert outcomes["summary"].num_missed == outcomes["summary"].num_requests == 20
    assert outcomes["chat"].num_missed == 0
    assert 0.1 < outcomes["chat"].latency / 20 < 1.0


def test_evaluator_agrees_with_serving_where_nothing_is_spread() -> None:
    setting = make_setting(CHAT, SUMMARY)
    arrivals = [(0.05 * i, ("chat", "summary")[i % 2], 500, 30 + i) for i in range(60)]
    placement = Placement((Group(1, ("chat", "summary")), Group(1)))

    served = SharedCluster(setting, placement).run(setting.requests(arrivals))

    assert Evaluator(setting, arrivals)(placement) == setting.outcomes(served)
