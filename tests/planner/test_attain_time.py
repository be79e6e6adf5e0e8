"""What a plan takes grows hardly faster than the number of requests that are lost."""

from __future__ import annotations

import time

import numpy as np
import pytest
from states import StateBuilder

from sola_sched.config.slo import SloTarget
from sola_sched.config.sola_config import SolaConfig
from sola_sched.core.state import StepState
from sola_sched.planner.attain import AttainPlanner

pytestmark = pytest.mark.timing


def make_state(count: int) -> StepState:
    """So many decodes of different ages, most of which no step is short enough for."""
    rng = np.random.default_rng(0)
    builder = StateBuilder(max_num_running=count, num_blocks=10**6)
    for number in range(count):
        slo, num_out = SloTarget(1000.0, rng.uniform(0.016, 0.024)), int(rng.integers(2, 200))
        builder.decode(f"d{number}", first_ago_s=0.016 * num_out, out=num_out, slo=slo)
    builder.waiting("w", waited_s=0.1)
    return builder.build()


def seconds(planner: AttainPlanner, state: StepState) -> float:
    """Of the quickest of 20 plans."""
    times = []
    for _ in range(20):
        start_s = time.perf_counter()
        planner.plan(state)
        times.append(time.perf_counter() - start_s)
    return min(times)


def test_four_times_as_many_lost_take_less_than_sixteen_times_as_long() -> None:
    planner = AttainPlanner(SolaConfig())
    few, many = make_state(256), make_state(1024)
    planner.plan(many)
    assert planner.step.at.num_alive < 100

    ratios = [seconds(planner, many) / seconds(planner, few) for _ in range(3)]

    assert min(ratios) < 16.0
