"""What is told of the traffic of late."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from states import SLO, FixedLengths, make_cost

from sola_sched.core.live import LiveRequest
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.traffic import NUM_ENOUGH, NUM_REMEMBERED, RecentTraffic


def made(count: int, rate_per_s: float, prompt: int = 500, output: int = 50) -> RecentTraffic:
    traffic = RecentTraffic()
    for number in range(count):
        traffic.came(number / rate_per_s, prompt)
        traffic.ended(output)
    return traffic


def test_it_tells_when_the_first_and_the_last_came_and_mean_lengths() -> None:
    assert made(100, 4.0).means() == pytest.approx((100, 0.0, 24.75, 500.0, 50.0))


def test_nothing_is_known_of_what_has_not_come_or_not_ended() -> None:
    traffic = RecentTraffic()
    assert traffic.means() == pytest.approx((0, *[math.nan] * 4), nan_ok=True)
    traffic.came(1.5, 10)
    assert traffic.means() == pytest.approx((1, 1.5, 1.5, 10.0, math.nan), nan_ok=True)


def test_one_that_another_engine_had_for_minutes_does_not_set_the_time_back() -> None:
    traffic = made(100, 4.0)
    traffic.came(-300.0, 500)  # a gateway sends it again; it counts from its first arrival
    assert traffic.means() == pytest.approx((101, 0.0, 24.75, 500.0, 50.0))
    traffic.came(25.0, 500)
    assert traffic.means() == pytest.approx((102, 0.0, 25.0, 500.0, 50.0))


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 5000), st.integers(1, 900)),
        min_size=NUM_ENOUGH,
        max_size=2 * NUM_REMEMBERED,
    )
)
def test_only_the_last_ones_count(lengths: list[tuple[int, int]]) -> None:
    traffic = RecentTraffic()
    for number, (prompt, output) in enumerate(lengths):
        traffic.came(float(number), prompt)
        traffic.ended(output)
    last = np.array(lengths[-NUM_REMEMBERED:], dtype=np.float64)
    first_s = float(len(lengths) - len(last))

    expected = (len(last), first_s, len(lengths) - 1.0, *last.mean(axis=0))
    assert traffic.means() == pytest.approx(expected)


def test_the_monitor_tells_of_arrivals_and_ends_and_counts_nobody_twice() -> None:
    now_s = 0.0
    monitor = StateMonitor(make_cost(), FixedLengths(), lambda: now_s)
    for number in range(NUM_ENOUGH):
        now_s = 0.25 * number
        monitor.add(f"r{number}", num_prompt_tokens=500, max_tokens=50, slo=SLO, arrival_s=now_s)
    monitor.finished("r0", by_itself=True)
    before = monitor.traffic.means()

    live = [
        LiveRequest(
            req_id=f"r{number}", num_prompt_tokens=500, max_tokens=50, slo=SLO,
            arrival_s=0.25 * number, num_tokens=500, num_computed=0, num_output=0,
        )
        for number in range(1, NUM_ENOUGH)
    ]  # fmt: skip
    monitor.rebuild(live, 0)

    assert before[0] == NUM_ENOUGH
    assert monitor.traffic.means() == before
