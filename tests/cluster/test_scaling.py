"""Eq. 7, change points of the rate, and hysteresis."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sola_sched.cluster.scaling import (
    InstanceScaler,
    ScalingLaw,
    ScalingOptions,
    change_points,
)
from sola_sched.errors import ConfigError

pytest.importorskip("ruptures")
LAW = ScalingLaw(per_rate=0.5, fixed=0.25)


def test_the_law_rounds_up() -> None:
    assert [LAW.instances(rate) for rate in (0.0, 1.4, 1.5, 1.6, 10.0)] == [1, 1, 1, 2, 6]


def test_below_r_the_value_at_r_holds() -> None:
    law = ScalingLaw(0.5, 0.0, lowest_rate_per_s=8.0)

    assert [law.instances(rate) for rate in (1.0, 8.0, 10.0)] == [4, 4, 5]


@given(st.floats(0.01, 5.0), st.floats(0.0, 3.0))
def test_a_fit_finds_the_line_again(slope: float, fixed: float) -> None:
    rates = [5.0, 10.0, 20.0, 40.0]
    needed = [max(1, math.ceil(slope * rate + fixed)) for rate in rates]

    law = ScalingLaw.fit(rates, needed)

    for rate, number in zip(rates, needed, strict=True):
        assert abs(law.instances(rate) - number) <= 2


def test_rates_below_r_are_not_fitted_to() -> None:
    law = ScalingLaw.fit([1.0, 10.0, 20.0], [9, 5, 10], lowest_rate_per_s=5.0)

    assert law.per_rate == pytest.approx(0.5)
    assert law.instances(1.0) == law.instances(5.0) == 3


@pytest.mark.parametrize("seed", range(3))
def test_a_doubled_rate_is_found_within_ten_heartbeats(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = [*rng.poisson(20, 150), *rng.poisson(40, 10)]

    (found,) = change_points(counts)

    assert abs(found - 150) <= 3


def test_a_steady_rate_has_no_change_points() -> None:
    found = [
        change_points(np.random.default_rng(seed).poisson(rate, 200))
        for seed in range(10)
        for rate in (2, 200)
    ]

    assert sum(bool(points) for points in found) <= 1


def test_too_few_counts_have_no_change_points() -> None:
    assert change_points([5.0] * 9) == []


def _run(scaler: InstanceScaler, rates: list[float], seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return [scaler.observe(int(rng.poisson(r)), float(t)) for t, r in enumerate(rates)]


def test_the_scaler_goes_up_at_once_and_down_after_the_delay() -> None:
    options = ScalingOptions(window=60, down_delay_s=30.0, margin_ratio=0.1)
    scaler = InstanceScaler(LAW, options)

    targets = _run(scaler, [20.0] * 60 + [60.0] * 60 + [20.0] * 90)

    assert 11 <= targets[59] <= 14
    up = next(t for t in range(60, 120) if targets[t] >= 30)
    assert up <= 75
    down = next(t for t in range(120, 210) if targets[t] <= 16)
    assert 150 <= down <= 170


def test_slack_keeps_a_few_instances_too_many() -> None:
    options = ScalingOptions(window=60, down_delay_s=5.0, slack=4)

    targets = _run(InstanceScaler(LAW, options), [40.0] * 60 + [35.0] * 90)

    assert min(targets[70:]) == max(targets[70:])


def test_a_lull_at_the_end_of_the_delay_takes_away_only_what_was_never_needed() -> None:
    options = ScalingOptions(window=60, down_delay_s=300.0, margin_ratio=0.0)
    scaler = InstanceScaler(ScalingLaw(1.0, 0.0), options)

    targets = _run(scaler, [20.0] * 120 + [18.0] * 294 + [4.0] * 8 + [18.0] * 30)

    assert min(targets[120:]) >= 18


def test_after_a_fall_more_are_asked_for_at_once() -> None:
    options = ScalingOptions(window=60, down_delay_s=30.0, margin_ratio=0.0)
    scaler = InstanceScaler(ScalingLaw(1.0, 0.0), options)

    targets = _run(scaler, [40.0] * 60 + [10.0] * 60 + [40.0] * 20)

    fell = next(t for t in range(60, 120) if targets[t] <= 15)
    assert 90 <= fell <= 105
    assert max(targets[120:135]) >= 35


def test_what_was_not_counted_was_not_enough() -> None:
    options = ScalingOptions(window=10, down_delay_s=100.0, margin_ratio=0.0)
    scaler = InstanceScaler(ScalingLaw(1.0, 0.0), options)
    for t in range(20):
        scaler.observe(20, float(t))
    for t in range(20, 40):
        scaler.observe(5, float(t))

    after_a_gap = [scaler.observe(5, float(t)) for t in range(500, 605)]

    assert set(after_a_gap[:100]) == {20}
    assert after_a_gap[-1] == 5


@given(
    counts=st.lists(st.sampled_from([0, 2, 10, 40]), min_size=20, max_size=80),
    delay_s=st.sampled_from([0.0, 1.0, 7.0, 30.0]),
    slack=st.sampled_from([0, 3]),
)
def test_the_target_is_never_below_what_was_needed_within_the_delay(
    counts: list[int], delay_s: float, slack: int
) -> None:
    """Against the rule in one line: what each moment needed is what a scaler without delay says."""
    law = ScalingLaw(1.0, 0.0)
    given_options = {"window": 20, "margin_ratio": 0.0}
    bare = InstanceScaler(law, ScalingOptions(down_delay_s=0.0, **given_options))
    scaler = InstanceScaler(law, ScalingOptions(down_delay_s=delay_s, slack=slack, **given_options))
    needed: list[int] = []
    target = 1
    for t, count in enumerate(counts):
        needed.append(bare.observe(count, float(t)))
        most = max(needed[max(0, t - max(0, int(delay_s) - 1)) :])
        if needed[-1] > target or (t >= delay_s and most < target - slack):
            target = max(most, needed[-1])

        assert scaler.observe(count, float(t)) == target


def test_the_target_stays_within_its_bounds() -> None:
    options = ScalingOptions(min_instances=3, max_instances=5)

    assert set(_run(InstanceScaler(LAW, options), [1.0] * 20 + [80.0] * 20)) == {3, 5}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: LAW.instances(math.nan),
        lambda: LAW.instances(-1.0),
        lambda: ScalingLaw.fit([1.0, 1.0], [1, 1]),
        lambda: ScalingLaw.fit([1.0, 2.0], [0, 1]),
        lambda: ScalingLaw.fit([1.0, -2.0], [1, 1]),
        lambda: change_points([1.0] * 20 + [math.nan]),
        lambda: ScalingOptions(heartbeat_s=0.0),
        lambda: ScalingOptions(min_instances=3, max_instances=2),
        lambda: InstanceScaler(LAW).observe(-1, 0.0),
    ],
)
def test_bad_numbers_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        wrong()  # type: ignore[operator]


def test_a_missing_ruptures_is_said_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruptures", None)

    with pytest.raises(ConfigError, match=r"sola-sched\[cluster\]"):
        change_points([5.0] * 40)
