"""Several engines with real schedulers that take turns on one simulated GPU."""

from __future__ import annotations

import math

import pytest

from sola_sched.cluster.sharing.placement import Cluster, Group, Placement
from sola_sched.cluster.sharing.queue import SharedRequest
from sola_sched.cluster.sharing.services import Service
from sola_sched.cluster.sharing.turns import RoundRobin
from sola_sched.config.slo import SloTarget
from sola_sched.simulator.sharing.cluster import Arrival, Setting, SharedCluster
from sola_sched.simulator.sharing.hardware import Hardware
from sola_sched.simulator.sharing.real import RealSharedEngine, real_engine

TIGHT = Service("tight", "llama-2-7b", 2.0, [(200, 30), (400, 50)], SloTarget(0.5, 0.06))
LOOSE = Service("loose", "opt-6.7b", 2.0, [(1500, 40), (1000, 60)], SloTarget(8.0, 0.5))
GROUP = Group(1, ("loose", "tight"))
PLACEMENT = Placement((GROUP,))
SETTING = Setting.of([TIGHT, LOOSE], Hardware("a100"), Cluster.of(1), RoundRobin)
#: A burst of long prompts, and short ones beside it.
ARRIVALS: list[Arrival] = sorted(
    [(0.02 * i, "loose", *LOOSE.lengths[i % 2]) for i in range(15)]
    + [(0.3 * i, "tight", *TIGHT.lengths[i % 2]) for i in range(15)]
)


def serve(policy: str | None) -> tuple[RealSharedEngine, list[SharedRequest]]:
    engine = real_engine(SETTING, PLACEMENT, GROUP, policy)
    cluster = SharedCluster(SETTING, PLACEMENT, make=lambda _: engine)
    requests = cluster.run(SETTING.requests(ARRIVALS))
    while engine.next_s < math.inf:  # vLLM's scheduler takes a step to forget the last request
        engine.advance()
    return engine, requests


@pytest.fixture(scope="module")
def served() -> dict[str | None, tuple[RealSharedEngine, list[SharedRequest]]]:
    return {policy: serve(policy) for policy in (None, "attain", "doubling")}


@pytest.mark.parametrize("policy", [None, "attain", "doubling"])
def test_each_request_is_answered_whole_and_steps_do_not_overlap(served, policy) -> None:
    engine, requests = served[policy]

    assert all(r.num_done == r.output and r.arrival_s < r.first_s <= r.last_s for r in requests)
    assert (engine.num_open, engine.next_s) == (0, math.inf)
    span_s = max(r.last_s for r in requests) - min(r.arrival_s for r in requests)
    assert 0.5 * span_s < engine.busy_s <= span_s + 1e-9


def test_vllms_engines_in_a_round_are_what_the_fast_model_says(served) -> None:
    fast = SharedCluster(SETTING, PLACEMENT)
    expected = fast.run(SETTING.requests(ARRIVALS))

    engine, requests = served[None]

    assert engine.busy_s == pytest.approx(fast.engines[0].busy_s, rel=0.02)
    for name in ("tight", "loose"):
        mean_s = [
            sum(r.latency_s for r in run if r.service == name) for run in (requests, expected)
        ]
        assert mean_s[0] == pytest.approx(mean_s[1], rel=0.05)


def test_attain_keeps_the_targets_of_both_where_a_round_does_not(served) -> None:
    kept = {policy: [r.is_met for r in requests] for policy, (_, requests) in served.items()}

    assert sum(kept["attain"]) > sum(kept[None])
    assert sum(kept["attain"]) == len(ARRIVALS)


def test_memory_is_split_so_that_each_holds_its_longest_request_and_all_fit() -> None:
    shares = SETTING.memory_shares(PLACEMENT, GROUP)
    kv = SETTING.hardware.kv_split(1, [LOOSE, TIGHT], {"loose": 1e-6, "tight": 10.0})

    assert sum(shares.values()) == pytest.approx(0.9)
    assert kv["loose"] > 1560 * SETTING.hardware.kv_bytes("opt-6.7b", 1)
    assert kv["tight"] > kv["loose"]
