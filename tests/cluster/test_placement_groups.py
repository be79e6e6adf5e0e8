"""Groups (Eq. 8) and how many instances a rate needs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placements import make_model

from sola_sched.cluster.performance import DecodeTime
from sola_sched.cluster.placement import (
    Demand,
    Fleet,
    GroupedFleet,
    group_sizes,
    instances_needed,
)
from sola_sched.cluster.placement.sizing import Workload
from sola_sched.errors import ConfigError, InfeasibleError

DECODE = DecodeTime(1e-6, 1e-4, 0.01)


def test_group_sizes_keep_both_bounds_of_eq_8() -> None:
    # The paper's example: 10 % extra instances ask for 5 to a group.
    assert group_sizes(10, 100.0, extra_ratio=0.1, rate_limit_per_s=50.0) == [5, 5]
    assert group_sizes(11, 30.0, extra_ratio=0.1, rate_limit_per_s=10.0 * 1.5) == [6, 5]
    assert group_sizes(7, 10.0, extra_ratio=0.1, rate_limit_per_s=50.0) == [7]


@given(st.integers(1, 2000), st.floats(0.0, 3e4), st.floats(0.01, 0.5), st.floats(10.0, 3000.0))
def test_groups_cover_all_instances_or_say_why_not(
    instances: int, rate: float, extra: float, limit: float
) -> None:
    try:
        sizes = group_sizes(instances, rate, extra_ratio=extra, rate_limit_per_s=limit)
    except InfeasibleError:
        assert math.ceil(rate / limit) > max(1, instances // math.ceil(1.0 / (2.0 * extra) - 1e-9))
        return

    assert sum(sizes) == instances
    assert rate / len(sizes) <= limit * (1 + 1e-9)
    if len(sizes) > 1:
        assert min(sizes) >= 1.0 / (2.0 * extra) - 1e-6


@pytest.mark.parametrize("wrong", [{"rate_per_s": math.nan}, {"extra_ratio": 0.0}])
def test_group_sizes_refuse_values_out_of_range(wrong: dict[str, float]) -> None:
    arguments = {"rate_per_s": 5.0, "extra_ratio": 0.1, "rate_limit_per_s": 10.0} | wrong

    with pytest.raises(ConfigError, match="out of range"):
        group_sizes(10, **arguments)


def test_requests_are_dealt_out_in_proportion_to_the_groups() -> None:
    model = make_model(capacity=1e6, per_ctx_s=1e-12)
    groups = GroupedFleet([Fleet([model] * 2), Fleet([model] * 4)])

    used = [groups.place(Demand(10, 10.0)) for _ in range(60)]

    assert sum(place is not None and place[0] == 0 for place in used) == 20


def test_a_full_group_asks_the_next_one_and_then_gives_up() -> None:
    groups = GroupedFleet([Fleet([make_model()], 1), Fleet([make_model()], 1)])

    places = [groups.place(Demand(10, 10.0)) for _ in range(3)]

    assert places == [(0, 0), (1, 0), None]
    assert groups.place_anyway(Demand(10, 10.0)) in [(0, 0), (1, 0)]


WORKLOAD = Workload(np.full(200, 200.0), np.linspace(20.0, 180.0, 200), 1.0, 0.03)


def test_twice_the_rate_needs_about_twice_the_instances() -> None:
    model = make_model(capacity=5000.0)

    few, many = (instances_needed(model, WORKLOAD, rate, seed=1) for rate in (20.0, 40.0))

    # 100 tokens at 30 ms are 3 s: 60 requests of 200 + 50 to 100 tokens at once, some 17 to 5000.
    assert 3 <= few <= 6
    assert 1.6 * few <= many <= 2.4 * few


def test_a_request_that_fits_on_no_instance_is_said() -> None:
    with pytest.raises(InfeasibleError, match="KV memory"):
        instances_needed(make_model(capacity=150.0), WORKLOAD, 5.0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Workload(np.array([]), np.array([]), 1.0, 0.1),
        lambda: Workload(np.array([5.0]), np.array([math.nan]), 1.0, 0.1),
        lambda: Workload(np.array([5.0]), np.array([5.0]), 1.0, math.inf),
        lambda: instances_needed(make_model(), WORKLOAD, math.nan),
    ],
)
def test_bad_workloads_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        wrong()  # type: ignore[operator]
