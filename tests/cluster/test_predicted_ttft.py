"""Predicted times to the first token against those that an engine then takes, with long queues."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sola_sched.cluster.routers import LeastPredictedTtft, RoundRobin, SingleInstance
from sola_sched.cluster.ttft import predicted_ttft_s
from sola_sched.cluster.view import RoutedRequest, Router, Views
from sola_sched.config.slo import SloTarget
from sola_sched.simulator.cluster.cluster import VirtualCluster
from sola_sched.simulator.cluster.engine import ClusterRequest
from sola_sched.simulator.cluster.fast.instance import FastInstance
from sola_sched.simulator.cluster.lengths import true_lengths
from sola_sched.simulator.cluster.records import ClusterRun
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.request import VirtualRequest
from sola_sched.simulator.steps.time import StepTimeModel

SLOTS_SHORT = {"kv_capacity_tokens": 200_000, "max_num_seqs": 32}
MEMORY_SHORT = {"kv_capacity_tokens": 16_000, "max_num_seqs": 256}


class Asked(SingleInstance):
    """Sends all to the first instance and keeps what was predicted of it."""

    def __init__(self) -> None:
        super().__init__()
        self.predicted_s: dict[str, float] = {}

    def pick(self, request: RoutedRequest, views: Views, able: Sequence[int], now_s: float) -> int:
        predicted_s = predicted_ttft_s(views[able[0]], request.prompt_tokens, now_s)
        self.predicted_s[request.req_id] = predicted_s
        return super().pick(request, views, able, now_s)


def make_instance(factor: float = 1.0, **options: int) -> FastInstance:
    steps = StepTimeModel(
        base_s=0.004, per_decode_s=1e-4, per_ctx_s=2e-7, per_prefill_token_s=5e-5,
        per_prefill_attn_s=1e-9, weights_s=0.01, per_token_s=5e-5,
    )  # fmt: skip
    return FastInstance(
        BatchTime(steps, factor), max_num_batched_tokens=2048, max_model_len=4096, **options
    )


def serve(
    instances: list[FastInstance], router: Router, count: int, rate_per_s: float
) -> ClusterRun:
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1.0 / rate_per_s, count))
    requests = [
        VirtualRequest(
            f"r{i}", float(arrivals[i]), int(rng.integers(50, 500)),
            prompt_len=int(rng.integers(100, 1500)),
        )
        for i in range(count)
    ]  # fmt: skip
    slo = SloTarget(ttft_s=30.0, tpot_s=0.2)
    cluster = VirtualCluster(instances, router, predict=true_lengths)
    return cluster.run([ClusterRequest(request, slo) for request in requests])


@pytest.mark.parametrize("short", [SLOTS_SHORT, MEMORY_SHORT], ids=["slots", "memory"])
def test_waits_in_a_queue_of_several_turns_are_foreseen(short: dict[str, int]) -> None:
    router = Asked()

    run = serve([make_instance(**short)], router, 400, 20.0)

    late = [record for record in run.records if record.ttft_s > 5.0]
    assert len(late) > 250
    foreseen = np.array([router.predicted_s[record.req_id] for record in late])
    actual = np.array([record.ttft_s for record in late])
    assert foreseen.sum() / actual.sum() == pytest.approx(1.0, abs=0.2)
    assert np.median(np.abs(foreseen / actual - 1.0)) < 0.25


def test_an_overload_is_spread_by_what_unequal_instances_can_serve() -> None:
    def instances() -> list[FastInstance]:
        return [make_instance(1.0, **SLOTS_SHORT), make_instance(2.0, **MEMORY_SHORT)]

    def end_s(those: list[FastInstance], router: Router) -> float:
        return max(record.last_token_s for record in serve(those, router, 400, 20.0).records)

    # Both busy to the end: the speeds of each alone add up.
    best_s = 1.0 / sum(1.0 / end_s([one], SingleInstance()) for one in instances())
    assert end_s(instances(), LeastPredictedTtft()) < 1.2 * best_s
    assert end_s(instances(), RoundRobin()) > 1.5 * best_s
