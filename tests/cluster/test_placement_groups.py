"""Re-balancing (Algorithm 2), groups (Eq. 8) and how many instances a rate needs."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placements import make_model

from sola_sched.cluster.performance import DecodeTime
from sola_sched.cluster.placement import (
    Demand,
    Fleet,
    GroupedFleet,
    InstanceError,
    error_of,
    group_sizes,
    instances_needed,
    rebalance,
)
from sola_sched.cluster.placement.rebalance import Progress
from sola_sched.cluster.placement.sizing import Workload
from sola_sched.errors import ConfigError, InfeasibleError

DECODE = DecodeTime(1e-6, 1e-4, 0.01)


def test_errors_count_requests_that_outlive_or_undercut_their_prediction() -> None:
    error = error_of(
        [
            Progress(predicted=100, generated=50),  # as planned so far
            Progress(predicted=100, generated=120, predicted_again=160),  # l' = + 160, + 1
            Progress(predicted=100, generated=70, is_finished=True),  # - 30 tokens, - 1
            Progress(predicted=100, generated=100, is_finished=True),
            Progress(predicted=10, generated=30, predicted_again=40),  # + 40 tokens, + 1
        ]
    )

    assert error == InstanceError(tokens=170.0, requests=1.0)


def test_a_new_request_moves_from_the_underestimated_to_the_overestimated_instance() -> None:
    errors = [InstanceError(300, 3), InstanceError(-300, -3)]
    new = [Demand(10, 100.0), Demand(10, 100.0)]

    moved = rebalance([DECODE] * 2, errors, [0, 1], new)

    assert moved == [1, 1]


def test_nothing_moves_where_predictions_hold() -> None:
    errors = [InstanceError(), InstanceError()]

    assert rebalance([DECODE] * 2, errors, [0, 1, 0], [Demand(10, 50.0)] * 3) == [0, 1, 0]


def test_a_move_that_breaks_a_constraint_is_not_made() -> None:
    errors = [InstanceError(300, 3), InstanceError(-300, -3), InstanceError(-200, -2)]

    moved = rebalance([DECODE] * 3, errors, [0], [Demand(10, 100.0)], lambda j, i: i != 1)

    assert moved == [2]


def _spread(errors: list[InstanceError], where: list[int], start: list[int],
            demands: list[Demand]) -> float:  # fmt: skip
    tokens = [e.tokens for e in errors]
    count = [e.requests for e in errors]
    for source, target, demand in zip(start, where, demands, strict=True):
        if source != target:
            tokens[source] -= demand.output_tokens
            count[source] -= 1
            tokens[target] += demand.output_tokens
            count[target] += 1
    alpha, beta = DECODE.per_ctx_s, DECODE.per_request_s
    return sum(
        abs(alpha * t + beta * b) / math.hypot(alpha, beta)
        for t, b in zip(tokens, count, strict=True)
    )


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-400, 400), st.integers(-4, 4)), min_size=2, max_size=3),
    st.lists(st.integers(1, 200), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_rebalancing_never_ends_above_where_it_began_nor_misses_a_single_better_move(
    raw: list[tuple[int, int]], outputs: list[int], first: int
) -> None:
    errors = [InstanceError(float(t), float(b)) for t, b in raw]
    demands = [Demand(5, float(n)) for n in outputs]
    start = [(first + j) % len(errors) for j in range(len(demands))]

    where = rebalance([DECODE] * len(errors), errors, start, demands)

    reached = _spread(errors, where, start, demands)
    assert reached <= _spread(errors, start, start, demands) + 1e-9
    for j, i in itertools.product(range(len(demands)), range(len(errors))):
        other = [*where[:j], i, *where[j + 1 :]]
        assert _spread(errors, other, start, demands) >= reached - 1e-6


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
