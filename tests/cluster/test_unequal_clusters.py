"""The heterogeneous paper: throughput (Algorithm 1) and the mapper (Eq. 5-8)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cluster_views import make_routed, make_view
from placements import make_model

from sola_sched.cluster.performance import StaticBatchTime
from sola_sched.cluster.unequal import WorkloadMapper, estimate_refilled, estimate_throughput
from sola_sched.cluster.unequal.throughput import Estimate
from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError, InfeasibleError
from sola_sched.prediction.length import LengthPrediction
from sola_sched.simulator.cluster.fast.instance import FastInstance
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.request import VirtualRequest
from sola_sched.simulator.steps.time import StepTimeModel

TIMES = StaticBatchTime((1e-4, 0.0, 0.0, 0.01), (1e-7, 1e-5, 0.0, 0.02))


def test_estimate_takes_batches_as_large_as_memory_allows() -> None:
    # 100 tokens hold (10 + 20) and (20 + 20) together: 30 + 2 x 20 = 70; a third makes 120.
    requests = [(10, 20), (20, 20), (30, 20)]
    expected_s = TIMES.batch_s(2, 20, 20) + TIMES.batch_s(1, 30, 20)

    found = estimate_throughput(TIMES, 100.0, 1.0, requests, num_instances=4)

    assert found == pytest.approx(4 * 120 / expected_s)


def test_slots_limit_the_batches_of_the_estimate() -> None:
    alone_s = sum(TIMES.batch_s(1, i, 20) for i in (10, 20, 30))

    found = estimate_throughput(TIMES, 1e9, 1.0, [(10, 20), (20, 20), (30, 20)], max_requests=1)

    assert found == pytest.approx(120 / alone_s)


def test_refilled_batches_have_a_prompt_and_an_end_for_each_request_and_output() -> None:
    turn_s = 4 * 20 * 1e-4 + TIMES.batch_decode_s(4, 20, 10)

    found = estimate_refilled(TIMES, 1e3, 1.0, [(20, 10)] * 8, num_instances=3, max_requests=4)

    assert found == pytest.approx(3 * 4 * 30 / turn_s)


def test_a_slot_is_filled_again_as_soon_as_it_is_free() -> None:
    decode_s = TIMES.batch_decode_s(1, 10, 1) + TIMES.batch_decode_s(1, 10, 99)

    found = estimate_refilled(TIMES, 1e3, 1.0, [(10, 1), (10, 99)], max_requests=1)

    assert found == pytest.approx(120 / (2 * 10 * 1e-4 + decode_s))


def test_memory_limits_refilled_batches_and_the_youngest_is_computed_again() -> None:
    in_slots = {
        slots: estimate_refilled(TIMES, 1e3, 1.0, [(20, 10)], max_requests=slots)
        for slots in (1, 2)
    }

    # 30 tokens hold one; 49 hold two until the older has 25; 60 hold two to the end.
    assert estimate_refilled(TIMES, 30.0, 1.0, [(20, 10)]) == pytest.approx(in_slots[1])
    assert in_slots[1] < estimate_refilled(TIMES, 49.0, 1.0, [(20, 10)]) < in_slots[2]
    both = estimate_refilled(TIMES, 60.0, 1.0, [(20, 10)], max_requests=2)
    assert both == pytest.approx(in_slots[2])


@pytest.mark.parametrize("capacity", [4_000, 40_000])
def test_refilled_batches_are_those_of_the_fast_engine_model(capacity: int) -> None:
    """With memory for few, so that some are preempted, and for all slots."""
    steps = StepTimeModel(
        base_s=0.02, per_decode_s=1e-5, per_ctx_s=1e-7, per_prefill_token_s=1e-4,
        per_prefill_attn_s=0.0, weights_s=0.0, per_token_s=0.0,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    lengths = [(int(i), int(o)) for i, o in rng.integers(1, 400, (1000, 2))]
    engine = FastInstance(
        BatchTime(steps), kv_capacity_tokens=capacity, max_num_seqs=32, block_size=1
    )
    target = SloTarget(ttft_s=math.inf, tpot_s=math.inf)
    for number, (prompt_len, output_len) in enumerate(lengths):
        request = VirtualRequest(f"r{number}", 0.0, output_len, prompt_len=prompt_len)
        engine.add(request, target, LengthPrediction.exactly(output_len), 0.0)
    ended_s = 0.0
    while engine.next_s < math.inf:
        ended_s = engine.next_s
        engine.advance(ended_s)
    simulated = sum(map(sum, lengths)) / ended_s

    found = estimate_refilled(TIMES, float(capacity), 1.0, lengths, max_requests=32)

    assert found == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize("estimate", [estimate_throughput, estimate_refilled])
def test_a_request_larger_than_the_memory_is_said_with_numbers(estimate: Estimate) -> None:
    with pytest.raises(InfeasibleError, match=r"100 \+ 50 tokens.*needs 0\.15 GB of 0\.10 GB"):
        estimate(TIMES, 1e8, 1e6, [(10, 5), (100, 50)])


@pytest.mark.parametrize("estimate", [estimate_throughput, estimate_refilled])
def test_an_estimate_needs_requests(estimate: Estimate) -> None:
    with pytest.raises(ConfigError, match="'requests' must hold lengths"):
        estimate(TIMES, 1e9, 1.0, [])


def test_work_is_the_share_of_a_full_batch() -> None:
    # Eq. 5: 3000 / (100 + 200) = 10 requests; Eq. 6: their batch over 10.
    view = make_view(model=TIMES, kv_capacity_tokens=3000)
    request = make_routed(prompt_tokens=100, output_tokens=200.0)

    work_s = WorkloadMapper().work_s(request, view)

    assert work_s == pytest.approx(TIMES.batch_s(10, 100, 200) / 10)


def test_step_models_give_the_work_of_the_same_batches() -> None:
    model = make_model()
    request = make_routed(prompt_tokens=100, output_tokens=200.0)
    by_steps = make_view(model=model, kv_capacity_tokens=3000)
    by_batches = make_view(model=StaticBatchTime.of_model(model), kv_capacity_tokens=3000)

    mapper = WorkloadMapper()

    assert mapper.work_s(request, by_steps) == pytest.approx(mapper.work_s(request, by_batches))


def test_a_batch_is_no_larger_than_the_slots_and_no_smaller_than_the_request() -> None:
    mapper = WorkloadMapper()
    request = make_routed(prompt_tokens=100, output_tokens=200.0)

    few = mapper.work_s(request, make_view(model=TIMES, kv_capacity_tokens=3000, max_num_seqs=2))
    none = mapper.work_s(request, make_view(model=TIMES, kv_capacity_tokens=200))

    assert few == pytest.approx(TIMES.batch_s(2, 100, 200) / 2)
    assert none == pytest.approx(TIMES.batch_s(1, 100, 200))


def test_the_mapper_gives_unequal_instances_shares_of_their_speed() -> None:
    # As the paper's pair t = 4 and t = 1: one instance four times as fast, with more memory.
    fast = StaticBatchTime((2.5e-5, 0.0, 0.0, 0.0025), (2.5e-8, 2.5e-6, 0.0, 0.005))
    views = [
        make_view(model=fast, kv_capacity_tokens=600_000),
        make_view(model=TIMES, kv_capacity_tokens=80_000),
    ]
    mapper = WorkloadMapper()

    chosen = [mapper.choose(make_routed(f"r{k}"), views, 0.0) for k in range(200)]

    assert 0.7 <= chosen.count(0) / 200 <= 0.95


def test_ended_requests_take_their_load_along() -> None:
    views = [make_view(model=TIMES), make_view(model=TIMES)]
    mapper = WorkloadMapper()
    first = mapper.choose(make_routed("a", output_tokens=1000.0), views, 0.0)
    assert first == 0
    assert mapper.choose(make_routed("b"), views, 0.0) == 1

    mapper.ended("a", 0)

    assert mapper.choose(make_routed("c"), views, 0.0) == 0
