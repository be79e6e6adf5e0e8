"""The heterogeneous paper: memory (Eq. 1, 2), Algorithm 1, the search, and the mapper (Eq. 5-8)."""

from __future__ import annotations

import math

import pytest
from cluster_views import make_routed, make_view
from placements import make_model

from sola_sched.cluster.performance import StaticBatchTime
from sola_sched.cluster.unequal import (
    Machine,
    ServedModel,
    WorkloadMapper,
    estimate_refilled,
    estimate_throughput,
    kv_bytes_of,
    search_deployment,
)
from sola_sched.cluster.unequal.deployment import Estimate, machine_deployments
from sola_sched.errors import ConfigError, InfeasibleError

#: Llama-3-8B in 16 bit, 128 KiB of KV a token.
LLAMA = ServedModel(weight_bytes=16e9, kv_bytes_per_token=131072.0, longest_tokens=8192)
TIMES = StaticBatchTime((1e-4, 0.0, 0.0, 0.01), (1e-7, 1e-5, 0.0, 0.02))


def test_kv_memory_is_eq_1() -> None:
    # The paper's machine: V100 of 32 GB at 0.9 and 2 GB of engine, t = 2: 2 x 26.8 - 16 GB.
    machine = Machine("v100", 8, 32e9)

    assert kv_bytes_of(machine, 2, LLAMA) == pytest.approx(37.6e9)


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
    # A slot holds 20 + 11 / 2 tokens in 10 steps: in these four end, four prompts are computed.
    turn_s = 4 * 20 * 1e-4 + TIMES.batch_decode_s(4, 20, 10)

    found = estimate_refilled(TIMES, 102.0, 1.0, [(10, 10), (30, 10)], num_instances=3)
    in_two_slots = estimate_refilled(TIMES, 102.0, 1.0, [(20, 10)], max_requests=2)

    assert found == pytest.approx(3 * 4 * 30 / turn_s)
    turn_s = 2 * 20 * 1e-4 + TIMES.batch_decode_s(2, 20, 10)
    assert in_two_slots == pytest.approx(2 * 30 / turn_s)


def test_refilled_batches_hold_long_outputs_for_longer() -> None:
    # One slot has outputs of 1 and of 99 tokens in turns: 100 steps, 50 a request.
    decode_s = TIMES.batch_decode_s(1, 10, 1) + TIMES.batch_decode_s(1, 10, 99)

    found = estimate_refilled(TIMES, 1e3, 1.0, [(10, 1), (10, 99)], max_requests=1)

    assert found == pytest.approx(120 / (2 * 10 * 1e-4 + decode_s))
    # Memory for two by the mean, 10 + 50 / 2, is memory for few more than one.
    held = (11 * 1 + 60 * 99) / 100
    in_memory = estimate_refilled(TIMES, 110.0, 1.0, [(10, 1), (10, 99)])
    batch = 110 / held
    step_s = TIMES.decode_s(batch, 110.0)
    assert in_memory == pytest.approx(batch * 60 / (batch * 10 * 1e-4 + 50 * step_s))


@pytest.mark.parametrize("estimate", [estimate_throughput, estimate_refilled])
def test_a_request_larger_than_the_memory_is_said_with_numbers(estimate: Estimate) -> None:
    with pytest.raises(InfeasibleError, match=r"100 \+ 50 tokens.*needs 0\.15 GB of 0\.10 GB"):
        estimate(TIMES, 1e8, 1e6, [(10, 5), (100, 50)])


def _scaled(shares: dict[int, float]) -> dict[int, StaticBatchTime]:
    return {
        t: StaticBatchTime(
            tuple(p / share for p in TIMES.prefill),  # type: ignore[arg-type]
            tuple(p / share for p in TIMES.decode),  # type: ignore[arg-type]
        )
        for t, share in shares.items()
    }


def test_search_leaves_out_degrees_without_memory_and_takes_the_fastest_of_the_rest() -> None:
    requests = [(300, 200)] * 40
    machine = Machine("v100", 8, 16e9)  # 12.4 GB each: one GPU does not hold 16 GB of weights
    # Two GPUs are 1.9 times as fast as one, four 3, eight 4.
    times = _scaled({1: 1.0, 2: 1.9, 4: 3.0, 8: 4.0})

    found = machine_deployments(machine, LLAMA, times, requests)

    assert {d.tensor_parallel for d in found} == {2, 4, 8}
    assert [d.num_instances * d.tensor_parallel for d in found] == [8, 8, 8]
    assert found[0].tokens_per_s == max(d.tokens_per_s for d in found)


def test_each_machine_gets_its_own_degree() -> None:
    small, large = Machine("small", 4, 11e9), Machine("large", 4, 80e9)
    times = {"small": _scaled({1: 1.0, 2: 1.8, 4: 2.5}), "large": _scaled({1: 1.0, 2: 1.2, 4: 1.3})}

    found = search_deployment([small, large], LLAMA, times, [(300, 200)] * 40, max_requests=16)

    assert [(d.machine.name, d.tensor_parallel) for d in found] == [("small", 4), ("large", 1)]


def test_a_model_that_fits_nowhere_says_how_much_is_missing() -> None:
    huge = ServedModel(weight_bytes=140e9, kv_bytes_per_token=327680.0, longest_tokens=4096)

    with pytest.raises(
        InfeasibleError, match=r"needs 1\.34 GB, and all 4 GPUs.*-32\.80 GB, 34\.14 GB too little"
    ):
        search_deployment([Machine("v100", 4, 32e9)], huge, {"v100": _scaled({4: 1.0})}, [(1, 1)])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Machine("m", 0, 32e9),
        lambda: Machine("m", 4, math.nan),
        lambda: Machine("m", 4, 32e9, price_per_hour=-1.0),
        lambda: Machine("m", 4, 32e9, usable_ratio=1.5),
        lambda: ServedModel(-1.0, 1.0, 10),
        lambda: estimate_throughput(TIMES, 1e9, 1.0, []),
        lambda: estimate_refilled(TIMES, 1e9, 1.0, []),
    ],
)
def test_values_out_of_range_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="must"):
        wrong()  # type: ignore[operator]


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
    (fast,) = _scaled({4: 4.0}).values()
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
