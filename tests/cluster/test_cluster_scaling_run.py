"""Instances that come and go while a cluster runs, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from cluster_views import make_view

from sola_sched.cluster.routers import JoinShortestQueue
from sola_sched.cluster.view import Views
from sola_sched.config.slo import SloTarget
from sola_sched.errors import ConfigError
from sola_sched.simulator.cluster.cluster import VirtualCluster
from sola_sched.simulator.cluster.engine import ClusterRequest
from sola_sched.simulator.cluster.fast.instance import FastInstance
from sola_sched.simulator.cluster.records import ClusterRun
from sola_sched.simulator.cluster.scaling import Scaling, Utilization
from sola_sched.simulator.cluster.step_model import BatchTime
from sola_sched.simulator.request import VirtualRequest
from sola_sched.simulator.steps.time import StepTimeModel

_MAKE = partial(
    FastInstance, BatchTime(StepTimeModel(base_s=0.01, per_token_s=1e-4)), kv_capacity_tokens=6400
)


def _run(decide: Callable[[int, Views, float], int], first: int) -> ClusterRun:
    scaling = Scaling(decide, _MAKE, period_s=1.0, startup_s=2.0)
    requests = [
        ClusterRequest(VirtualRequest(f"r{i}", 0.1 * i, 20, prompt_len=100), SloTarget(ttft_s=1.0))
        for i in range(100)
    ]
    cluster = VirtualCluster([_MAKE() for _ in range(first)], JoinShortestQueue(), scaling=scaling)
    return cluster.run(requests)


def test_instances_that_were_asked_for_take_requests_once_they_have_started() -> None:
    run = _run(lambda arrivals, views, now_s: 3, first=1)

    late = [record for record in run.records if record.arrival_s > 3.0]
    assert {i for record in late for i in record.instances} == {0, 1, 2}
    assert all(record.instances == [0] for record in run.records if record.arrival_s < 2.9)
    # One all the time, two from the first question on.
    assert run.instance_s == pytest.approx(3 * run.duration_s - 2 * 1.0)


def test_instances_too_many_finish_what_they_have_and_get_nothing_more() -> None:
    run = _run(lambda arrivals, views, now_s: 1, first=3)

    assert all(record.completed for record in run.records)
    assert run.num_retries == 0
    assert {i for r in run.records if r.arrival_s > 1.0 for i in r.instances} == {0}
    assert run.instance_s < run.duration_s + 2 * 2.0


def test_the_number_of_arrivals_is_told() -> None:
    told: list[int] = []

    _run(lambda arrivals, views, now_s: told.append(arrivals) or 1, first=1)  # type: ignore[func-returns-value]

    assert sum(told) == pytest.approx(100, abs=11)
    assert max(told) <= 11


def test_utilization_asks_for_more_at_once_and_for_fewer_after_a_while() -> None:
    scaler = Utilization(0.5, down_delay_s=10.0, slots=10.0)
    busy, idle = make_view(running=[10.0] * 10), make_view()

    assert scaler(0, [busy, busy], 0.0) == 4
    assert scaler(0, [idle] * 4, 5.0) == 4
    assert scaler(0, [idle] * 4, 11.0) == 1


@pytest.mark.parametrize("period_s", [0.0, float("nan"), -1.0])
def test_a_period_that_cannot_be_is_refused(period_s: float) -> None:
    with pytest.raises(ConfigError, match="'period_s' must be > 0"):
        Scaling(lambda arrivals, views, now_s: 1, _MAKE, period_s=period_s)


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="trace is empty"):
        VirtualCluster([_MAKE()], JoinShortestQueue()).run([])


@pytest.mark.parametrize("arrival_s", [float("inf"), float("nan"), -1.0])
def test_requests_must_come_after_the_start(arrival_s: float) -> None:
    request = ClusterRequest(
        VirtualRequest("late", arrival_s, 20, prompt_len=100), SloTarget(ttft_s=1.0)
    )

    with pytest.raises(ConfigError, match="'arrival_s' of 'late' must be finite and >= 0"):
        VirtualCluster([_MAKE()], JoinShortestQueue()).run([request])
