"""Placements that follow the load: nothing is lost, and the interval follows Eq. 8."""

from __future__ import annotations

import math

import pytest

from sola_sched.cluster.sharing.placement import Cluster, Group, Placement
from sola_sched.cluster.sharing.services import Service
from sola_sched.cluster.sharing.turns import DoublingBudget
from sola_sched.cluster.sharing.unserved import Score
from sola_sched.simulator.sharing.cluster import Arrival, Setting
from sola_sched.simulator.sharing.hardware import Hardware
from sola_sched.simulator.sharing.replaced import ReplacingCluster, expected

A_TWICE = Placement((Group(1, ("a",)), Group(1, ("a",)), Group(1, ("b",))))
B_TWICE = Placement((Group(1, ("a",)), Group(1, ("b",)), Group(1, ("b",))))


def make_setting() -> Setting:
    services = [
        Service(name, "llama-2-13b", 1.0, [(2000, 200)], slo_scale=5.0) for name in ("a", "b")
    ]
    return Setting.of(services, Hardware("a100"), Cluster.of(4), DoublingBudget)


def moving_load() -> list[Arrival]:
    """Nearly all of `a` for 40 s, then nearly all of `b`."""
    busy = [(i / 6.0, "a" if i < 240 else "b", 2000, 200) for i in range(600)]
    return busy + [(5.0 * i, "b" if i < 8 else "a", 2000, 200) for i in range(20)]


def follow(past: list[Arrival]) -> Placement:
    count = sum(name == "a" for _, name, _, _ in past)
    return A_TWICE if 2 * count > len(past) else B_TWICE


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_placement_follows_the_load_and_every_request_ends(is_adaptive: bool) -> None:
    setting = make_setting()
    cluster = ReplacingCluster(
        setting, A_TWICE, Score(0.0, 1.0), follow, interval_s=20.0, is_adaptive=is_adaptive
    )

    requests = cluster.run(setting.requests(moving_load()))

    assert all(request.num_done == request.output for request in requests)
    assert sum(interval.num_changed > 0 for interval in cluster.intervals) == 1
    lengths = [interval.end_s - interval.begin_s for interval in cluster.intervals]
    if not is_adaptive:
        assert lengths == pytest.approx([20.0] * len(lengths))
    for interval, following in zip(cluster.intervals, lengths[1:], strict=False):
        if is_adaptive:
            gap = abs(interval.real - interval.estimated)
            factor = 0.9 if gap > 0.1 * interval.estimated else 1.1
            assert following == pytest.approx(factor * (interval.end_s - interval.begin_s))


def test_loading_weights_costs_latency() -> None:
    """26 GB of a new group at 2.6 GB/s: ten seconds in which it serves nobody."""
    latencies_s = []
    for bytes_per_s in (2.6e9, 2.6e12):
        setting = make_setting()
        cluster = ReplacingCluster(
            setting, A_TWICE, Score(0.0, 1.0), follow, interval_s=20.0,
            load_bytes_per_s=bytes_per_s, is_adaptive=False,
        )  # fmt: skip
        requests = cluster.run(setting.requests(moving_load()))
        latencies_s.append(sum(request.latency_s for request in requests))

    assert latencies_s[0] > latencies_s[1] + 10.0


def test_expectation_without_requests_is_the_worst() -> None:
    setting = make_setting()

    assert expected(setting, A_TWICE, []) == Score(1.0, math.inf)
    assert expected(setting, A_TWICE, [(0.0, "a", 2000, 200)]).missed == 0.0
