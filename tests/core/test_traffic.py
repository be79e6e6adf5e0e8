"""What the traffic of late asks of an engine's time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from states import SLO, FixedLengths, make_cost

from sola_sched.core.live import LiveRequest
from sola_sched.core.monitor import StateMonitor
from sola_sched.core.traffic import NUM_ENOUGH, NUM_REMEMBERED, Load, RecentTraffic


def load_of(traffic: RecentTraffic, now_s: float, step_s: float = 0.02) -> Load | None:
    """Steps of 10 ms and 1 ms a decode; 0.1 ms a prompt token."""
    return traffic.load(
        now_s,
        step_s,
        tokens_per_step=1.0,
        decode_s=lambda count, ctx: 0.01 + 1e-3 * count,
        prefill_s=lambda tokens: 1e-4 * tokens,
    )


def made(count: int, rate_per_s: float, prompt: int = 500, output: int = 50) -> RecentTraffic:
    traffic = RecentTraffic()
    for number in range(count):
        traffic.came(number / rate_per_s, prompt)
        traffic.ended(output)
    return traffic


def test_it_is_that_of_a_fluid() -> None:
    """4 a second of 50 tokens at 20 ms: 4 decodes, so 14 of 20 ms; prompts take 4 x 50 ms."""
    load = load_of(made(100, 4.0), now_s=25.0)

    assert load is not None
    assert load.decodes == pytest.approx(0.7)
    assert load.total == pytest.approx(0.9)


def test_steps_with_several_tokens_of_a_request_need_fewer_of_them() -> None:
    load = made(100, 4.0).load(
        25.0, 0.02, tokens_per_step=2.0, decode_s=lambda n, _: 0.01 + 1e-3 * n,
        prefill_s=lambda _: 0.0,
    )  # fmt: skip

    assert load is not None
    assert load.total == pytest.approx(0.6)


def test_it_falls_when_nobody_comes_any_more() -> None:
    traffic = made(100, 40.0)
    during, later = load_of(traffic, now_s=2.5), load_of(traffic, now_s=25.0)

    assert during is not None
    assert later is not None
    assert during.total > 1.0 > later.total


def test_too_little_is_known_at_first_and_without_a_pace() -> None:
    assert load_of(made(NUM_ENOUGH - 1, 4.0), now_s=10.0) is None
    assert load_of(made(NUM_ENOUGH, 4.0), now_s=10.0) is not None
    assert load_of(made(100, 4.0), now_s=25.0, step_s=math.inf) is None
    traffic = RecentTraffic()
    for number in range(100):
        traffic.came(0.1 * number, 10)
    assert load_of(traffic, now_s=10.0) is None  # nothing has ended


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
    load = load_of(traffic, now_s=float(len(lengths)))

    assert load is not None
    prompt, output = last.mean(axis=0)
    assert load.decodes == pytest.approx((0.01 + 1e-3 * output * 0.02) / 0.02)
    assert load.total - load.decodes == pytest.approx(1e-4 * prompt)


def test_the_monitor_tells_of_arrivals_and_ends_and_counts_nobody_twice() -> None:
    now_s = 0.0
    monitor = StateMonitor(make_cost(), FixedLengths(), lambda: now_s)
    for number in range(NUM_ENOUGH):
        now_s = 0.25 * number
        monitor.add(f"r{number}", num_prompt_tokens=500, max_tokens=50, slo=SLO, arrival_s=now_s)
    monitor.finished("r0", by_itself=True)
    before = load_of(monitor.traffic, 8.0)

    live = [
        LiveRequest(
            req_id=f"r{number}", num_prompt_tokens=500, max_tokens=50, slo=SLO,
            arrival_s=0.25 * number, num_tokens=500, num_computed=0, num_output=0,
        )
        for number in range(1, NUM_ENOUGH)
    ]  # fmt: skip
    monitor.rebuild(live, 0)

    assert before is not None
    assert load_of(monitor.traffic, 8.0) == before
    assert before.total - before.decodes == pytest.approx(4.0 * 0.05)
